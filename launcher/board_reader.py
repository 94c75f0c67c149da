"""The agent's side of the heartbeat board: makes it, samples it, and keeps the watch's memory of one attempt."""

import time
from pathlib import Path

from rsup.launcher import board_watch
from rsup.launcher.board_watch import WatchedRank, WatchState
from rsup.launcher.process_state import AgentState
from rsup.launcher.rank_group import RankGroup, is_debugged
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Board, BoardError, SlotSample


class BoardReader:
    """One board for the life of the agent. Without room for one, ranks run unwatched and `problem` says why."""

    def __init__(self, num_slots: int, runtime_dir: Path) -> None:
        self.problem = ""
        self._board: Board | None = None
        self._state = WatchState()
        self._attempt = 0
        self._watched: list[WatchedRank] = []
        try:
            self._board = Board.create(num_slots, runtime_dir)
        except BoardError as error:
            self.problem = str(error)

    @property
    def path(self) -> Path | None:
        """The board's file."""
        return self._board.path if self._board else None

    def begin(self, attempt: int) -> None:
        """Forget the attempt before."""
        self._attempt = attempt
        self._state = WatchState()
        self._watched = []

    def look(self, group: RankGroup, state: AgentState, at_us: int) -> list[wire.RankOverdue]:
        """Sample every living rank; return what is overdue now and was not told before."""
        now_ns = time.monotonic_ns()
        self._watched = [
            WatchedRank(state.ranks[i].rank, state.ranks[i].pid, group.started_ns[i], self._sample(i)) for i in state.alive
        ]
        self._state, overdue = board_watch.watch(
            self._state, self._watched, state.limits, now_ns, state.gaps, self._attempt, at_us, is_debugged
        )
        return overdue

    def beats(self) -> list[wire.RankBeat]:
        """Snapshot of the ranks as last sampled."""
        return board_watch.beats(self._watched, time.monotonic_ns())

    def sections(self, attempt: int, at_us: int, closing: bool) -> wire.SectionsObserved | None:
        """What was observed since the attempt began, of dead ranks too; None if no rank uses rsup.worker."""
        if self._board is None or attempt != self._attempt:
            return None
        samples = [sample for i in range(self._board.num_slots) if (sample := self._sample(i))]
        return board_watch.observed(self._state, samples, attempt, at_us, closing)

    def last_words(self, group: RankGroup, local_rank: int) -> tuple[int, str]:
        """Iteration and innermost open section of a rank, dead or alive; (0, "") if it never called rsup.worker."""
        sample = self._sample(local_rank) if group.start.attempt == self._attempt else None
        if sample is None:
            return 0, ""
        sections = board_watch.open_sections(sample)
        return sample.iteration, sections[-1].name if sections else ""

    def close(self) -> None:
        """Unmap and remove the board."""
        if self._board:
            self._board.unlink()
            self._board.close()

    def _sample(self, local_rank: int) -> SlotSample | None:
        """The slot, if a process of this attempt has taken it."""
        if self._board is None or local_rank >= self._board.num_slots:
            return None
        sample = self._board.read(local_rank)
        return sample if sample.attempt == self._attempt and sample.calls else None
