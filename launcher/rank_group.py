"""The processes of one attempt on this node: spawned together, signalled, and reaped with all that they left behind."""

import os
import select
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
from rsup.launcher.orphans import reap_orphans
from rsup.launcher.process_events import RankDied
from rsup.launcher.process_table import EXITING_FLAG
from rsup.launcher.processes import ProcessId, RankProcess, SpawnError, describe, marked_processes, reap_everything, spawn_rank
from rsup.launcher.rank_environment import SessionPlaces, rank_environment
from rsup.launcher.rank_seats import RankSeats
from rsup.launcher.reaping import all_processes, open_process, read_stat, send_signal
from rsup.launcher.result_tracker import ResultTracker, tracker_path
from rsup.launcher.stacks import process_state
from rsup.launcher.standby import StandbyPool
from rsup.launcher.standby_rules import SETTLED_AFTER_S, Seat
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
        self._replaced: list[RankProcess] = []
        """Processes that died and were replaced, while something lives in their session."""
        self._entering_until_ns: dict[int, int] = {}

    @property
    def sessions(self) -> list[int]:
        """Numbers of the ranks' sessions, in local-rank order; then those of processes that were replaced."""
        return [process.pid for process in (*self.processes, *self._replaced)]

    @property
    def entering(self) -> frozenset[int]:
        """Ranks that got a new process a few seconds ago: it may be on its way into the training function."""
        now_ns = time.monotonic_ns()
        return frozenset(self.start.first_rank + i for i, until_ns in self._entering_until_ns.items() if now_ns < until_ns)

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

    def replace(self, inherited: Mapping[str, str], local_rank: int, death: int) -> int:
        """Start a new process in the place of a dead one, after `end_leftovers`; return its pid.

        `death`: which process of the rank has died (1: the first), for the new one to find the others by. Raise `RsupError`.
        """
        pipes = self._open_pipes(local_rank, f"process {death + 1} of this rank in attempt {self.start.attempt} begins here")
        try:
            process = self._spawn_one({**inherited, "RSUP_JOIN": str(death)}, local_rank, pipes)
        finally:
            pipes.close_writer_ends()
        self._retire(self.processes[local_rank])
        self.processes[local_rank] = process
        self.started_ns[local_rank] = time.monotonic_ns()
        self._entering_until_ns[local_rank] = self.started_ns[local_rank] + int(SETTLED_AFTER_S * 1e9)
        self._error_files[local_rank] = pipes.error_file
        self._signalled.discard(local_rank)
        self._dying.discard(local_rank)
        return process.pid

    def end_leftovers(self, local_rank: int, keep: Collection[int]) -> None:
        """SIGKILL to the data loaders, writers and helpers of a dead rank. What is stuck in the kernel is not waited for: the
        attempt's end does that."""
        until_s = time.monotonic() + REAP_STEP_S
        while True:
            found = marked_processes(self._places.agent_id, self.sessions, keep=keep)
            left = [one for one in found if self._local_rank_of(one) == local_rank]
            _kill_and_wait(left, until_s)
            if not left or time.monotonic() > until_s:
                break
        reap_orphans(self._places.agent_id, self.sessions, keep)

    def _retire(self, process: RankProcess) -> None:
        """Its zombie goes with the last of its session: until then its number must not be another's."""
        held = {stat.session for stat in all_processes() if stat.pid != stat.session}
        for one in (*self._replaced, process):
            if one.pid not in held:
                one.close()
        self._replaced = [one for one in (*self._replaced, process) if one.pidfd >= 0]

    def _local_rank_of(self, found: ProcessId) -> int | None:
        """Whose it is: by its session, else by its environment, else by the process that started it."""
        pid = found.pid
        while pid > 1 and pid != os.getpid() and (process := read_stat(pid)) is not None:
            leader = next((one for one in (*self.processes, *self._replaced) if one.pid == process.session), None)
            owner = self._slot_of(pid) if leader is None else leader.local_rank
            if owner is not None:
                return owner
            pid = process.parent
        return None

    def _slot_of(self, pid: int) -> int | None:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if b"RSUP_MARK=" + os.fsencode(self._places.agent_id) not in words:
            return None
        slot = next((word[10:].decode("ascii", "replace") for word in words if word.startswith(b"RSUP_SLOT=")), "")
        return int(slot) if slot.isdecimal() and int(slot) < len(self.processes) else None

    def _open_pipes(self, local_rank: int, mark: str = "") -> RankPipes:
        try:
            return self._logs.open_rank(self.start.attempt, local_rank, self.start.first_rank + local_rank, mark)
        except OSError as error:
            rank = self.start.first_rank + local_rank
            raise SpawnError(f"cannot make the pipes of rank {rank}: {error.strerror}; raise ulimit -n", 1) from None

    def _spawn_one(self, inherited: Mapping[str, str], local_rank: int, pipes: RankPipes) -> RankProcess:
        error_file = str(pipes.error_file) if pipes.error_file else ""
        if pipes.error_file:
            pipes.error_file.unlink(missing_ok=True)
        seat = self.seat_of(inherited, local_rank, error_file)
        started_s = f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}"  # of the rank: its process may be an older standby
        seat = replace(seat, environment={**seat.environment, **pipes.environment, "RSUP_RANK_STARTED_S": started_s})
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
        phase = self.start.phase.number if self.start.phase is not None else 0
        command = rank_command(self._options, self.seats.ordinals[local_rank], phase)
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
        for local_rank, count in sorted(Counter(self._local_rank_of(found) for found in left).items(), key=str):
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
        for process in (*self.processes, *self._replaced):
            process.close()
        self._reap_until_s = None
        return True


def _kill_and_wait(left: Collection[ProcessId], until_s: float) -> None:
    """SIGKILL; return once all have ended, or at `until_s`."""
    pidfds = [pidfd for found in left if (pidfd := open_process(found)) is not None]
    for pidfd in pidfds:
        send_signal(pidfd, signal.SIGKILL)
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        os.close(pidfd)


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
