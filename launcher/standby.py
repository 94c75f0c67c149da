"""Warm standbys: for each rank of this node an interpreter that has imported torch, so that a restart costs no imports.

Theory. `StandbyPool` is ticked by the agent. Once an attempt has got under way it starts one standby a rank, one after the
other and at idle priority, and keeps them until the next attempt takes them. Nobody waits for a standby: one that is not ready,
or whose environment would be another, is ended, and that rank starts cold. When there is one is decided by `why_none`, a pure
function, and for which script by `standby_script`; what it does when it turns out to be no use is in `standby_process`.

A rank that came from a standby is a rank as any other: a session of its own that dies with the agent.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.processes import RankProcess, SpawnError
from rsup.launcher.standby_memory import free_bytes, own_bytes
from rsup.launcher.standby_rules import LITTLE_MEMORY, Seat, Situation, can_wait, what_changed, why_none
from rsup.launcher.standby_script import script_path, why_not_twice
from rsup.launcher.standby_waiter import Standby, start_standby

LOOK_EVERY_S = 0.5
GUESSED_BYTES = 300 << 20
"""Size of a standby before the first one was measured."""
PAUSE_S = 60.0
"""After memory was short, and after a standby died."""
MAX_DEATHS = 3


class StandbyPool:
    """The standbys of one agent. Main thread only: they die with the thread that starts them."""

    def __init__(self, options: LaunchOptions, reports_dir: Path) -> None:
        """`reports_dir`: where a rank leaves word if it had to start cold after all."""
        self.options = options
        self._is_wanted = can_wait(options)
        self._reports_dir = reports_dir
        self._standbys: dict[int, Standby] = {}
        self._stuck: list[Standby] = []
        """Killed, and still not gone."""
        self._notes: list[tuple[str, str]] = []
        self._next_look_s = 0.0
        self._torch_loaded_s: float | None = None
        self._size_bytes = GUESSED_BYTES
        self._pause_until_s = 0.0
        self._num_deaths = 0
        self._said_ready = self._said_short = False
        self._has_read_script = False
        self._num_warm = 0
        self._learned: tuple[str, ...] = ()
        self._reports: dict[Path, int] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that belong to no attempt."""
        return tuple(standby.process.pid for standby in (*self._standbys.values(), *self._stuck))

    @property
    def num_ready(self) -> int:
        """Standbys that wait."""
        return sum(standby.is_ready for standby in self._standbys.values())

    @property
    def size_bytes(self) -> int:
        """Memory of all of them."""
        return sum(own_bytes(pid) for pid in self.pids)

    def take_notes(self) -> list[tuple[str, str]]:
        """(level, line) for the job's story since the last call."""
        notes, self._notes = self._notes, []
        return notes

    # ------------------------------------------------------------------------------------------------- between restarts

    def is_due(self, now_s: float) -> bool:
        """Whether `tick` has something to look at."""
        return self._is_wanted and now_s >= self._next_look_s

    def tick(
        self,
        now_s: float,
        pids: Collection[int],
        seats: Mapping[int, Seat],
        *,
        can_restart: bool,
        is_running: bool,
        has_stepped: bool,
    ) -> None:
        """Look after the standbys. `pids`: the living ranks. `seats`: by local rank, as this attempt's."""
        self._next_look_s = now_s + LOOK_EVERY_S
        self._stuck = [standby for standby in self._stuck if not standby.end(0.0)]
        self._read_reports()
        self._look_at_standbys(now_s)
        if not self._is_wanted:
            return
        if self._torch_loaded_s is None and is_running and pids and all(_has_loaded_torch(pid) for pid in pids):
            self._torch_loaded_s = now_s
        missing = sorted(seats.keys() - self._standbys.keys())
        if any(not standby.is_ready for standby in self._standbys.values()):
            return
        if not missing:
            self._say_ready()
            return
        seen = Situation(
            can_restart,
            is_running,
            self._torch_loaded_s,
            has_stepped,
            self._size_bytes,
            len(missing),
            free_bytes() if self._torch_loaded_s is not None else 0,
            self._pause_until_s,
        )
        why = why_none(seen, now_s)
        if not why and (reason := self._why_not_twice()):
            self._give_up(reason)
        elif not why:
            self.start(missing[0], seats[missing[0]])
        elif why == LITTLE_MEMORY and not self._said_short:
            self._said_short = True
            self._note("info", f"no warm standbys: {seen.free_bytes >> 20} MB are free; a restart will import everything again")

    def _why_not_twice(self) -> str:
        """What the script does before it imports torch, if that stands against a standby. It is read once."""
        if self._has_read_script:
            return ""
        self._has_read_script = True
        options = self.options
        return why_not_twice(script_path(options.training_script, is_module=options.module))

    def _look_at_standbys(self, now_s: float) -> None:
        for local_rank, standby in list(self._standbys.items()):
            was_ready = standby.is_ready
            if not was_ready:
                standby.look()
            if standby.process.exit_status() is not None:
                self._bury(local_rank, now_s)
            elif standby.is_ready and not was_ready:
                self._size_bytes = max(own_bytes(standby.process.pid), 1 << 20)
                self._hear_ready(standby)
        if self._standbys and free_bytes() < self._size_bytes:
            self._give_back(now_s)

    def _hear_ready(self, standby: Standby) -> None:
        for problem in standby.problems:
            self._note("warning", f"a warm standby could not import {problem}")
        if standby.opened_gpu:
            self._give_up(f"importing {standby.opened_gpu} opens the GPU, whose memory a standby must not hold")

    def _give_up(self, reason: str) -> None:
        self._is_wanted = False
        self._note("info", f"no warm standbys for this job: {reason}")
        self._end_all()

    def _bury(self, local_rank: int, now_s: float) -> None:
        standby = self._standbys.pop(local_rank)
        line = standby.last_line()
        code, signum = standby.process.exit_status() or (0, 0)
        self._end(standby)
        self._num_deaths += 1
        self._pause_until_s = now_s + PAUSE_S
        how = f"was killed by {signal.Signals(signum).name}" if signum else f"ended with code {code}"
        text = f"the warm standby of local rank {local_rank} {how}{line and ': '}{line}"
        if self._num_deaths >= MAX_DEATHS:
            self._is_wanted = False
            text += "; no more are started"
        self._note("warning", text)

    def _give_back(self, now_s: float) -> None:
        text = f"memory is short: {_count(len(self._standbys))} ended, which frees {self.size_bytes >> 20} MB"
        self._note("warning", text)
        self._end_all()
        self._pause_until_s = now_s + PAUSE_S
        self._said_ready = False

    def _say_ready(self) -> None:
        if not self._said_ready:
            self._said_ready = True
            self._note("info", f"{_count(len(self._standbys))} ready, {self.size_bytes >> 20} MB: a restart costs no imports")

    @property
    def _preload(self) -> tuple[str, ...]:
        return self._learned or self.options.preload

    def start(self, local_rank: int, seat: Seat) -> None:
        """Start one now; `tick` does it when it is due."""
        try:
            self._standbys[local_rank] = start_standby(self._preload, local_rank, seat, is_module=self.options.module)
        except SpawnError as error:
            self._give_up(str(error))

    # ------------------------------------------------------------------------------------------------------- at a restart

    def begin_start(self) -> None:
        """Ranks are about to be started: standbys that are not ready would only compete with them."""
        self._torch_loaded_s = None
        self._said_ready = False
        self._num_warm = 0
        self._reports = {}
        for local_rank, standby in list(self._standbys.items()):
            standby.look()
            if not standby.is_ready:
                self._end(self._standbys.pop(local_rank))

    def take(
        self,
        local_rank: int,
        seat: Seat,
        *,
        stdin: int | None,
        stdout_fd: int,
        stderr_fd: int,
    ) -> RankProcess | None:
        """The local rank, started from its standby; None: start it cold."""
        standby = self._standbys.pop(local_rank, None)
        if standby is None:
            return None
        self._said_ready = False
        standby.look()
        if not standby.is_ready:  # a single rank is replaced, and its standby has just been started
            self._end(standby)
            return None
        report = self._reports_dir / f"cold-{seat.environment.get('RSUP_ATTEMPT', '')}-{local_rank}"
        if self._is_usable(standby, seat) and standby.become(seat, report, stdin, stdout_fd, stderr_fd):
            self._num_warm += 1
            self._reports[report] = local_rank
            return standby.process
        self._end(standby)
        return None

    def _is_usable(self, standby: Standby, seat: Seat) -> bool:
        changed = what_changed(standby.seat, seat)
        if changed:
            who, what = f"local rank {standby.process.local_rank}", ", ".join(changed[:3])
            self._note("info", f"{who} starts cold: {what} changed since its standby was made")
        return not changed and standby.can_listen

    def end_start(self, num_ranks: int) -> None:
        """All ranks were started: say how, if any could have been warm."""
        if self._num_warm:
            self._note("info", f"{self._num_warm} of {num_ranks} rank{'s'[: num_ranks > 1]} took over a warm standby")

    def _read_reports(self) -> None:
        for path, local_rank in list(self._reports.items()):
            try:
                report = json.loads(path.read_text(errors="replace"))
                path.unlink()
            except (OSError, ValueError):
                continue
            del self._reports[path]
            if report["is_cold"]:
                self._note("info", f"local rank {local_rank} started cold after all: {report['reason']}")
            else:
                self._note("warning", f"local rank {local_rank}: {report['reason']}")
            self._learn(report["preload"])

    def _learn(self, preload: list[str]) -> None:
        """A standby was no use: import first, from now on, what the script imports first; or keep none."""
        first = (*preload, "torch", *self.options.preload)
        if preload and self._learned in ((), first):
            if not self._learned:
                self._note("info", f"the next warm standbys import {', '.join(preload)} before torch, as the script does")
            self._learned = first
        elif self._is_wanted:
            self._is_wanted = False
            self._note("info", "no more warm standbys for this job: they would not help it")
        self._end_all()

    # --------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End all standbys."""
        self._is_wanted = False
        self._end_all()

    def _end(self, standby: Standby) -> None:
        if not standby.end():
            self._stuck.append(standby)
            self._note("warning", f"the warm standby {standby.process.pid} does not end on SIGKILL: it is stuck in the kernel")

    def _end_all(self) -> None:
        for standby in self._standbys.values():
            standby.process.signal_leader(signal.SIGKILL)
        for standby in self._standbys.values():
            self._end(standby)
        self._standbys.clear()

    def _note(self, level: str, text: str) -> None:
        self._notes.append((level, text))


def _count(number: int) -> str:
    return "1 warm standby is" if number == 1 else f"{number} warm standbys are"


def _has_loaded_torch(pid: int) -> bool:
    try:
        return b"/libtorch_cpu.so" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
