"""The processes of one attempt on this node: spawned together, signalled, and reaped with all that they left behind."""

import os
import signal
import stat
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rsup.launcher.device_variables import DEVICE_VARIABLES
from rsup.launcher.failure_report import read_error_file, telling_line
from rsup.launcher.launch_options import LaunchOptions, rank_command
from rsup.launcher.logs import LogPump, RankPipes
from rsup.launcher.process_events import RankDied
from rsup.launcher.process_table import EXITING_FLAG
from rsup.launcher.processes import ProcessId, RankProcess, SpawnError, describe, marked_processes, reap_everything, spawn_rank
from rsup.launcher.rank_environment import SessionPlaces, rank_environment
from rsup.launcher.rank_seats import RankSeats
from rsup.launcher.reaping import open_process, read_stat, send_signal
from rsup.launcher.result_tracker import ResultTracker, tracker_path
from rsup.launcher.stacks import process_state
from rsup.launcher.standby import StandbyPool
from rsup.launcher.standby_rules import Seat
from rsup.launcher.terminal import has_keys
from rsup.supervisor import wire

REAP_STEP_S = 0.2
"""One step of the reaping holds up the agent's loop at most this long."""
SOON_S = 0.5
"""What ends by itself mostly does within this; later there is no hurry to see it."""
DRAIN_S = 1.0
LAST_LINES_S = 0.05
"""How long the loop waits for the last lines of a rank that failed; a child of it may hold its pipes for ever."""


class RankGroup:
    """The ranks that one `StartAttempt` asked for. Use from the main thread: ranks die with the thread that starts them."""

    def __init__(
        self,
        start: wire.StartAttempt,
        options: LaunchOptions,
        places: SessionPlaces,
        logs: LogPump,
        standbys: StandbyPool,
        seats: RankSeats,
    ) -> None:
        self.start = start
        self.seats = seats
        path = tracker_path(options.training_script_args)
        self._tracker = ResultTracker(path, os.environ) if path else None
        self.processes: list[RankProcess] = []
        self.started_ns: list[int] = []
        self._options = options
        self._places = places
        self._logs = logs
        self._standbys = standbys
        self._error_files: list[Path | None] = []
        self._reap_until_s: float | None = None
        self._quick_until_s = 0.0
        self._told_to_end = False
        self._is_patient = False
        self._notes: list[str] = []
        self._signalled: set[int] = set()
        self._dying: set[int] = set()

    @property
    def sessions(self) -> list[int]:
        """Numbers of the ranks' sessions."""
        return [process.pid for process in self.processes]

    def spawn(self, inherited: Mapping[str, str]) -> tuple[int, ...]:
        """Start all ranks; return their pids. Raise `RsupError` if one cannot be started: `reap` then ends the others."""
        self._logs.choose_files(lambda: {i: self.environment_of(inherited, i) for i in range(self.start.num_ranks)})
        self._standbys.begin_start()
        for local_rank in range(self.start.num_ranks):
            pipes = self._open_pipes(local_rank)
            try:
                self.processes.append(self._spawn_one(inherited, local_rank, pipes))
            finally:
                pipes.close_writer_ends()
            self.started_ns.append(time.monotonic_ns())
            self._error_files.append(pipes.error_file)
        self._standbys.end_start(self.start.num_ranks)
        return tuple(process.pid for process in self.processes)

    def _open_pipes(self, local_rank: int) -> RankPipes:
        try:
            return self._logs.open_rank(self.start.attempt, local_rank, self.start.first_rank + local_rank)
        except OSError as error:
            rank = self.start.first_rank + local_rank
            raise SpawnError(f"cannot make the pipes of rank {rank}: {error.strerror}; raise ulimit -n", 1) from None

    def _spawn_one(self, inherited: Mapping[str, str], local_rank: int, pipes: RankPipes) -> RankProcess:
        error_file = str(pipes.error_file) if pipes.error_file else ""
        if pipes.error_file:
            pipes.error_file.unlink(missing_ok=True)
        seat = self.seat_of(inherited, local_rank, error_file)
        seat = replace(seat, environment={**seat.environment, **pipes.environment})
        stdin, out, err = self._stdin(), pipes.stdout_fd, pipes.stderr_fd
        warm = self._standbys.take(local_rank, seat, stdin=stdin, stdout_fd=out, stderr_fd=err)
        if warm is not None:
            return warm
        return spawn_rank(
            seat.command,
            seat.environment,
            local_rank=local_rank,
            stdin=stdin,
            stdout_fd=out,
            stderr_fd=err,
            cpus=seat.cpus,
        )

    def seat_of(self, inherited: Mapping[str, str], local_rank: int, error_file: str = "") -> Seat:
        """What a rank of this attempt is started with."""
        command = rank_command(self._options, self.seats.ordinals[local_rank])
        return Seat(command, self.environment_of(inherited, local_rank, error_file), self.seats.cpus[local_rank])

    def environment_of(self, inherited: Mapping[str, str], local_rank: int, error_file: str = "") -> dict[str, str]:
        """Every variable of a rank of this attempt."""
        inherited, ordinal = {**inherited, **self.seats.environment}, self.seats.ordinals[local_rank]
        found = rank_environment(inherited, self._options, self.start, local_rank, self._places, error_file, ordinal)
        of_device = self.seats.device_environments[local_rank] if self.seats.device_environments else {}
        return {name: value for name, value in found.items() if name not in DEVICE_VARIABLES} | dict(of_device)

    def _stdin(self) -> int | None:
        """Standard input for the only rank of this node: a terminal whose keys are ours, a pipe or a file; else nothing."""
        return 0 if self.start.num_ranks == 1 and (has_keys() or _is_pipe_or_file(0)) else None

    def death_of(self, process: RankProcess, iteration: int, section: str) -> RankDied | None:
        """What there is to say about a rank that ended; None if it still runs."""
        status = process.exit_status()
        if status is None:
            return None
        exit_code, signum = status
        error, traceback, tail = "", "", ""
        rejected: list[wire.RejectedResult] = []
        if exit_code:
            self._logs.settle(process.local_rank, LAST_LINES_S)
            tail = self._logs.tail(process.local_rank)
            path = self._error_files[process.local_rank]
            recorded = read_error_file(path) if path else None
            of_stderr = not self._logs.is_mixed(process.local_rank)
            error = recorded.line if recorded else telling_line(tail, of_stderr and not signum)
            traceback = recorded.traceback if recorded else ""
            rejected = self._rejected_by(process.local_rank, exit_code)
        return RankDied(
            self.start.attempt,
            process.local_rank,
            exit_code,
            signum,
            iteration,
            section,
            wire.clip(error, 2000),
            wire.clip(traceback, 16 * 1024),
            wire.clip(tail, 16 * 1024),
            tuple(rejected),
            was_dying=process.local_rank in self._dying,
        )

    def _rejected_by(self, local_rank: int, exit_code: int) -> list[wire.RejectedResult]:
        """What the tracker file of Megatron-LM has of a rank that left with one of its codes, or that was killed."""
        if self._tracker is None or (exit_code < 128 and exit_code not in wire.DECLARED_EXIT_CODES):
            return []
        rank = self.start.first_rank + local_rank
        return self._tracker.added(rank, 1, lambda _, ordinal: self.seats.device_behind(local_rank, ordinal))

    def error_file_of(self, rank: int) -> Path | None:
        """Where that rank of the job leaves its error.json; None if it is not here."""
        local_rank = rank - self.start.first_rank
        return self._error_files[local_rank] if 0 <= local_rank < len(self._error_files) else None

    def signal(self, local_ranks: Collection[int], signum: int, *, whole_session: bool) -> None:
        """Signal those ranks; a stopped one is continued, so that it can die of it."""
        for process in self.processes:
            if process.local_rank not in local_ranks:
                continue
            if process.local_rank not in self._signalled and _is_dying(process.pid):
                self._dying.add(process.local_rank)
            self._signalled.add(process.local_rank)
            if whole_session:
                process.signal_session(signum)
            else:
                process.signal_leader(signum)
            if signum != signal.SIGKILL and process_state(process.pid) == "T":
                process.signal_session(signal.SIGCONT)

    def tell_resized(self) -> None:
        """The terminal has another size: SIGWINCH to all who run on it; who does not care about it does not notice."""
        for process in self.processes:
            process.signal_session(signal.SIGWINCH)

    def begin_reaping(self, grace_s: float) -> None:
        """SIGTERM to what the ranks left behind, SIGKILL after `grace_s`. Said again, it only shortens the grace."""
        until_s = time.monotonic() + grace_s
        if self._reap_until_s is None:
            self._is_patient = grace_s > SOON_S and all(p.exit_status() == (0, 0) for p in self.processes)
        self._quick_until_s = time.monotonic() + SOON_S
        self._reap_until_s = until_s if self._reap_until_s is None else min(self._reap_until_s, until_s)

    @property
    def is_reaping(self) -> bool:
        """Whether `reap` has work."""
        return self._reap_until_s is not None

    @property
    def is_quick(self) -> bool:
        """Whether `reap` should be called often: at first, and when the grace is nearly over. It looks through all of /proc."""
        now_s = time.monotonic()
        return self._reap_until_s is not None and (now_s < self._quick_until_s or now_s > self._reap_until_s)

    def take_notes(self) -> list[str]:
        """Lines for people about what was ended here, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _note_killed(self, left: Collection[ProcessId]) -> None:
        """Ranks exited 0 and what they left behind did not go by itself."""
        self._is_patient = False
        sessions = self.sessions
        for local_rank, count in sorted(Counter(_local_rank_of(found, sessions) for found in left).items(), key=str):
            who = "a rank" if local_rank is None else f"rank {self.start.first_rank + local_rank}"
            self._notes.append(f"ended {count} process{'es' if count > 1 else ''} that {who} left behind, with SIGKILL")

    def survivors(self, keep: Collection[int]) -> tuple[str, ...]:
        """What of the attempt lives, with pid, command and state."""
        return tuple(str(describe(found)) for found in marked_processes(self._places.agent_id, self.sessions, keep=keep))

    def reap(self, keep: Collection[int]) -> bool:
        """Go on reaping without blocking for long; True when nothing is left, and every rank's output has been read.

        `keep`: helpers that are no descendants of ranks.
        """
        assert self._reap_until_s is not None
        mark = self._places.agent_id
        now_s = time.monotonic()
        if now_s < self._reap_until_s:
            left = marked_processes(mark, self.sessions, keep=keep)
            if left and not self._told_to_end:
                self._told_to_end = True
                for found in left:
                    _end_politely(found)
            if left:
                return False
        if self._is_patient and (left := marked_processes(mark, self.sessions, keep=keep)):
            self._note_killed(left)
        if reap_everything(mark, self.sessions, now_s + REAP_STEP_S, keep=keep):
            return False
        self._logs.drain(self.start.attempt, DRAIN_S)
        for process in self.processes:
            process.close()
        self._reap_until_s = None
        return True


def _is_dying(pid: int) -> bool:
    """Whether the kernel is taking the process down already, for a reason of its own."""
    found = read_stat(pid)
    return found is not None and bool(found.flags & EXITING_FLAG)


def _is_pipe_or_file(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _local_rank_of(found: ProcessId, sessions: list[int]) -> int | None:
    """The rank that left it behind, by its session, else by its environment."""
    process = read_stat(found.pid)
    if process is not None and process.session in sessions:
        return sessions.index(process.session)
    try:
        words = Path(f"/proc/{found.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    local_rank = next((word[10:].decode("ascii", "replace") for word in words if word.startswith(b"RSUP_SLOT=")), "")
    return int(local_rank) if local_rank.isdecimal() and int(local_rank) < len(sessions) else None


def _end_politely(found: ProcessId) -> None:
    pidfd = open_process(found)
    if pidfd is not None:
        send_signal(pidfd, signal.SIGTERM)
        send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)


def is_debugged(pid: int) -> bool:
    """Whether a debugger, and not py-spy, traces the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tracer = next((line.split()[1] for line in status.splitlines() if line.startswith("TracerPid:")), "0")
        return tracer != "0" and "py-spy" not in Path(f"/proc/{tracer}/comm").read_text()
    except OSError:
        return False
