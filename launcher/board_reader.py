"""The agent's side of the heartbeat board: makes it, samples it, and keeps the watch's memory of one attempt.

A rank has two slots, since each has one writer: the one that its own rsup.worker writes, and one that the node's NVRx server
writes for it. What is read is both together.
"""

import time
from dataclasses import replace
from pathlib import Path

from rsup.launcher import board_watch
from rsup.launcher.board_watch import WatchedRank, WatchState
from rsup.launcher.process_state import AgentState
from rsup.launcher.rank_group import RankGroup, is_debugged
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import FLAG_LEFT, SEQUENCE, Board, BoardError, SlotSample


class BoardReader:
    """One board for the life of the agent. Without room for one, ranks run unwatched and `problem` says why."""

    def __init__(self, num_slots: int, runtime_dir: Path) -> None:
        self.problem = ""
        self._num_ranks = num_slots
        self._board: Board | None = None
        self._state = WatchState()
        self._attempt = 0
        self._watched: list[WatchedRank] = []
        self._stale: dict[int, int] = {}
        """Sequence words of slots as a process left them that was replaced: nobody has taken them over since."""
        try:
            self._board = Board.create(2 * num_slots, runtime_dir)
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
        self._stale = {}

    def forget(self, rank: int, local_rank: int) -> None:
        """That rank is about to get a new process: what was seen of the one before, or is still in its slots, says nothing
        about it."""
        state, board = self._state, self._board
        if board is not None:
            slots = (local_rank, self._num_ranks + local_rank)
            self._stale |= {index: board.slot(index).get(SEQUENCE) for index in slots}
        self._state = WatchState(
            {known: memory for known, memory in state.ranks.items() if known != rank},
            frozenset(key for key in state.past if key[0] != rank),
            frozenset(key for key in state.told if key[0] != rank),
        )

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
        """What was observed since the attempt began, of dead ranks too until they are replaced; None if no rank uses
        rsup.worker."""
        if self._board is None or attempt != self._attempt:
            return None
        samples = [sample for i in range(self._num_ranks) if (sample := self._sample(i))]
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
        """The rank's slots, if its process, or the one that it started, has taken one."""
        own, served = self._slot(local_rank), self._slot(self._num_ranks + local_rank)
        return together(own, served) if own and served else own or served

    def _slot(self, index: int) -> SlotSample | None:
        if self._board is None or index >= self._board.num_slots:
            return None
        if self._board.slot(index).get(SEQUENCE) == self._stale.get(index):
            return None
        sample = self._board.read(index)
        return sample if sample.attempt == self._attempt and sample.calls else None


def together(own: SlotSample, served: SlotSample) -> SlotSample:
    """One rank as it shows itself through rsup.worker and through a client of NVRx's: all sections, the latest signs of life.

    A client that has left no longer counts, but for how long its sections took.
    """
    if served.flags & FLAG_LEFT:
        closed = tuple(replace(section, open_since_ns=0) for section in served.sections)
        return replace(own, calls=own.calls + served.calls, sections=own.sections + closed)
    return replace(
        own,
        main_ns=max(own.main_ns, served.main_ns),
        iteration=max(own.iteration, served.iteration),
        phase=own.phase or served.phase,
        closed_since_ns=max(own.closed_since_ns, served.closed_since_ns) if served.closed_since_ns else 0,
        train_steps=max(own.train_steps, served.train_steps),
        heartbeats=own.heartbeats + served.heartbeats,
        heartbeat_ns=max(own.heartbeat_ns, served.heartbeat_ns),
        calls=own.calls + served.calls,
        sections=own.sections + served.sections,
    )
