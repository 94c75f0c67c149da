"""Finds the embedded supervisor of a state directory, or starts it.

Several agents may come here at once and all start one: the supervisor takes a lock before it binds its socket, the losers end
without a word, and every agent dials the same address. So starting one too many does no harm, and the agent calls `ensure`
again whenever its supervisor is silent. One that lives and says nothing for long (`SILENT_S`: stopped, or stuck) is killed and
replaced: its state is the store. A shared supervisor is never touched.

On a plain machine the supervisor is nobody's child and in a session of its own: it outlives the terminal and the launch that
started it, and the agent, a child subreaper, must not take it for a rank's descendant. Under a scheduler or in a container it
stays in the job's process tree, whose end is its end.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rsup.launcher.processes import start_hint
from rsup.launcher.reaping import ProcessId, is_dead, open_process, read_stat, send_signal
from rsup.supervisor import places
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.places import SupervisorFile
from rsup.supervisor.wire import RsupError

SILENT_S = 30.0
"""An embedded supervisor that lives and has said nothing for so long is replaced."""
SUSPENDED_AFTER_S = 1.0
"""Longer between two looks at the supervisor, and it was we who did not run: that is not its silence."""

_FIRST_RESTART_S = 0.5
_LONGEST_RESTART_S = 30.0
_FOREIGN_ANSWER_S = 0.3
_ASK_FOREIGN_EVERY_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_RANK_VARIABLES = ("RSUP_MARK", "RSUP_JOB_ID", "RSUP_RUN", "RSUP_ATTEMPT", "RSUP_RANK_SOCKET", "RSUP_BOARD")
_NOT_FOR_THE_SUPERVISOR = {*_RANK_VARIABLES, "RSUP_SUPERVISOR", "RSUP_EMBEDDED"}


class StartError(RsupError):
    """The interpreter that runs this cannot be started again, so there is no supervisor."""


class EmbeddedSupervisor:
    """Starts the supervisor again, with growing pauses, as often as `ensure` finds none.

    `in_job` overrides whether it stays in this process's tree. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        state: Path,
        arguments: Sequence[str] = (),
        in_job: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = places.make_state_dir(state)
        self._arguments = list(arguments)
        self._in_job = belongs_to_job() if in_job is None else in_job
        self._clock = clock
        self._pause_s = _FIRST_RESTART_S
        self._started_s: float | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._foreign = ""
        self._foreign_asked_s: float | None = None
        self._silence = Silence(clock)
        self.num_starts = 0

    def ensure(self) -> str:
        """Address at which the supervisor answers or soon will. Raise `PlaceError` where it can have no socket, `StartError`
        where no process can be started."""
        self._children = [child for child in self._children if child.poll() is None]
        found = self._read_live()
        if found:
            return found
        address = places.embedded_address(self._state)
        if _listens(address):
            return address
        now_s = self._clock()
        if self._started_s is None or now_s - self._started_s >= self._pause_s:
            if self._started_s is not None:
                self._pause_s = min(self._pause_s * 2, _LONGEST_RESTART_S)
            self._started_s = now_s
            self._start(address)
        return address

    def _read_live(self) -> str:
        """`read_live`, which may wait for another host's answer: asked seldom, since we are called ten times a second."""
        file = places.read_supervisor_file(self._state)
        if file is None or file.host == places.this_host():
            return read_live(self._state)
        now_s = self._clock()
        if self._foreign_asked_s is None or now_s - self._foreign_asked_s >= _ASK_FOREIGN_EVERY_S:
            self._foreign_asked_s = now_s
            self._foreign = read_live(self._state)
        return self._foreign

    def heard(self) -> None:
        """It has answered: the next restart need not wait."""
        self._pause_s = _FIRST_RESTART_S
        self._started_s = None
        self._silence.end()

    def kill_silent(self) -> int:
        """Call it with `ensure` while the supervisor does not answer: one that lives and has been silent for `SILENT_S` is
        killed, and its pid returned; else 0."""
        found = places.read_supervisor_file(self._state)
        mine = ProcessId(found.pid, found.start_ticks) if found and found.embedded and _is_ours(found) else None
        if not self._silence.is_too_long(mine) or mine is None:
            return 0
        self._silence.end()
        return mine.pid if _kill(mine) else 0

    def _start(self, address: str) -> None:
        self.num_starts += 1
        options = ["--embedded", "--state-dir", str(self._state), "--rpc", address, *self._arguments]
        command = [sys.executable, "-P", "-m", "rsup.supervisor.main", *options]
        with _error_log(self._state) as errors:
            if self._in_job:
                self._children.append(_spawn(command, errors))
            else:
                with _no_subreaper():
                    _spawn(["/bin/sh", "-c", '"$@" & exit 0', "rsup", *command], errors).wait()


class Silence:
    """How long a supervisor has said nothing, while we were running and listening. `clock` as there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._whose: ProcessId | None = None
        self._looked_s = 0.0
        self._lasted_s = 0.0

    def end(self) -> None:
        """It has spoken, or is no more."""
        self._whose = None

    def is_too_long(self, whose: ProcessId | None) -> bool:
        """Count on, ten times a second. Another process begins anew, and what we slept through does not count."""
        now_s = self._clock()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if whose != self._whose:
            self._whose, self._lasted_s = whose, 0.0
        elif passed_s <= SUSPENDED_AFTER_S:
            self._lasted_s += passed_s
        return self._lasted_s >= SILENT_S


def belongs_to_job() -> bool:
    """Whether this process runs under a scheduler or in a container, whose end takes all its processes along."""
    scheduled = "SLURM_JOB_ID" in os.environ or "KUBERNETES_SERVICE_HOST" in os.environ
    return scheduled or os.path.exists("/.dockerenv")


def read_live(state: Path) -> str:
    """Address of the supervisor that `supervisor.json` names, if it lives and this process can reach it; else empty."""
    found = places.read_supervisor_file(state)
    if found is None:
        return ""
    if found.host != places.this_host():
        return found.rpc_tcp if found.rpc_tcp and _accepts(found.rpc_tcp) else ""
    return found.rpc if _lives_here(found) and _listens(found.rpc) else ""


def _lives_here(found: SupervisorFile) -> bool:
    return found.boot_id == places.boot_id() and process_start_ticks(found.pid) == found.start_ticks


def _is_ours(found: SupervisorFile) -> bool:
    """Whether it lives here and is this user's. (A zombie that nobody reaps does not live.)"""
    try:
        owner = os.stat(f"/proc/{found.pid}").st_uid
    except OSError:
        return False
    stat = read_stat(found.pid)
    lives = stat is not None and not is_dead(stat) and _lives_here(found)
    return lives and found.host == places.this_host() and owner == os.getuid()


def _kill(process: ProcessId) -> bool:
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        return send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _listens(address: str) -> bool:
    """Whether a socket is bound at that `ipc://` address; a stopped supervisor's is. TCP of this host: taken on trust."""
    if not address.startswith("ipc://"):
        return bool(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _accepts(address: str) -> bool:
    """Whether somebody accepts connections at that `tcp://` address of another host; waits a moment."""
    host, port = places.split_endpoint(address.removeprefix("tcp://"))
    try:
        socket.create_connection((host, port), timeout=_FOREIGN_ANSWER_S).close()
    except OSError:
        return False
    return True


def _spawn(command: list[str], errors: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        problem = f"cannot start the supervisor with {command[0]}: {error.strerror}"
        raise StartError(f"{problem}; {start_hint(error)}") from None


def _environment() -> dict[str, str]:
    """Ours without what belongs to a rank or to torchrun, and with paths that hold in another directory."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_FOR_THE_SUPERVISOR and not name.startswith(("PET_", "TORCHELASTIC_"))
    }
    if kept.get("PYTHONPATH"):
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in kept["PYTHONPATH"].split(os.pathsep))
    if kept.get("RSUP_KEY_FILE"):
        kept["RSUP_KEY_FILE"] = os.path.abspath(kept["RSUP_KEY_FILE"])
    return kept


@contextlib.contextmanager
def _error_log(state: Path) -> Iterator[int]:
    """Where a supervisor that cannot even start says why: the end of its log file, nowhere if that cannot be written."""
    for path in (state / "supervisor.log", places.supervisor_runtime_dir(state) / "supervisor.log", Path(os.devnull)):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
        try:
            yield fd
        finally:
            os.close(fd)
        return


@contextlib.contextmanager
def _no_subreaper() -> Iterator[None]:
    """Let the orphan of the next moment go to init instead of to us."""
    libc = ctypes.CDLL(None, use_errno=True)
    was = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    if not was.value:
        yield
        return
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
