"""Rank processes: starting them, signalling them, and finding and ending everything that they left behind.

Theory. A rank is a session of its own whose leader dies with the agent (parent-death signal). The agent is a child
subreaper, so whatever a rank's descendants do (change group or session, daemonise, outlive a leader that exited 0), they
stay findable: by a tag that every process of a rank carries (`rank_tag`), by `RSUP_MARK` in their environment, by their
session, by a cgroup where we may make one, or as descendants of one of these (`rank_search`). Signals go through pidfds
after the start time was compared, so a reused pid is never hit.

Never touched: this process, its parent, its process group, the processes named in `keep` (the keeper, standbys) with what they
started, and any `rsup.supervisor.main` with what it started.

Needs Linux 5.3 (pidfd). Call from the main thread: the parent-death signal is bound to the thread that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

from rsup.launcher import descriptor_limit, rank_cgroup, rank_tag
from rsup.launcher.reaping import (
    ProcessId,
    Survivor,
    all_processes,
    describe,
    is_dead,
    marked_processes,
    open_process,
    reap_everything,
    send_signal,
)
from rsup.supervisor.wire import RsupError

__all__ = [
    "ProcessId",
    "RankProcess",
    "SpawnError",
    "Survivor",
    "become_subreaper",
    "describe",
    "marked_processes",
    "reap_everything",
    "spawn_rank",
]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126

_prctl = ctypes.CDLL(None, use_errno=True).prctl


class SpawnError(RsupError):
    """A rank's program could not be started; `exit_code` is a shell's: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankProcess:
    """A started rank. `fileno()` is readable once its leader has ended, so it can be put into a selector.

    The zombie is kept until `close()`: while it is there neither its pid nor its session number can be reused. So:
    `exit_status()`, then `reap_everything`, then `close()`.
    """

    def __init__(self, popen: subprocess.Popen[bytes], local_rank: int) -> None:
        self._popen = popen
        self._status: tuple[int, int] | None = None
        self.local_rank = local_rank
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def fileno(self) -> int:
        """The pidfd."""
        return self.pidfd

    def exit_status(self) -> tuple[int, int] | None:
        """(exit code, signal) once it has ended: (code, 0), or (128 + signal, signal); None while it runs. May be repeated."""
        if self._status is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._status = (ended.si_status, 0) if exited else (128 + ended.si_status, ended.si_status)
        return self._status

    def signal_leader(self, signal_number: int) -> bool:
        """Send a signal to the leader only; False if it has ended. (A data worker that gets SIGTERM first costs the last
        checkpoint, so the leader is told alone and the session after the grace.)"""
        return self.pidfd >= 0 and send_signal(self.pidfd, signal_number)

    def signal_session(self, signal_number: int) -> int:
        """Send a signal to every process of the rank's session, in whatever process group; return how many got it."""
        members = [stat for stat in all_processes() if stat.session == self.pid and not is_dead(stat)]
        return sum(_signal_process(ProcessId(stat.pid, stat.start_ticks), signal_number) for stat in members)

    def close(self) -> None:
        """Reap the zombie and close the pidfd. Only after the process has ended; may be repeated."""
        if self.pidfd < 0:
            return
        status = self.exit_status()
        assert status is not None, f"rank process {self.pid} is still running"
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._popen.returncode = -status[1] if status[1] else status[0]
        os.close(self.pidfd)
        self.pidfd = -1


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants. Raise `RsupError` where the kernel is too old for us."""
    if _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise RsupError(f"this kernel cannot make a process a subreaper: {os.strerror(ctypes.get_errno())}")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        raise RsupError(f"rsup launch needs pidfd_open, of Linux 5.3 or newer: {error}") from None


def spawn_rank(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    local_rank: int,
    stdin: int | None,
    stdout_fd: int,
    stderr_fd: int,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    cpus: frozenset[int] | None = None,
) -> RankProcess:
    """Start one rank in a session of its own that dies with this thread. `stdin` None: /dev/null. `cpus`: where it may run;
    None: wherever this process may.

    Every descriptor but these and `pass_fds` is closed in it, every signal is at its default and unblocked, but for a SIGHUP
    that this process ignores (nohup). Raise `SpawnError` (127 or 126) with one line if the program cannot be run.
    """
    assert threading.current_thread() is threading.main_thread(), "ranks would die with the thread that starts them"
    cgroup_fd = rank_cgroup.join_descriptor(env.get("RSUP_MARK", ""))
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; what runs before exec takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=stdout_fd,
                stderr=stderr_fd,
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_before_exec(os.getpid(), env.get("RSUP_MARK", ""), cgroup_fd, cpus),
            )
        return _own(popen, local_rank)
    except (OSError, ValueError) as error:
        raise _spawn_error(argv[0], cwd, error) from None
    finally:
        if cgroup_fd is not None:
            os.close(cgroup_fd)


def _own(popen: subprocess.Popen[bytes], local_rank: int) -> RankProcess:
    try:
        return RankProcess(popen, local_rank)
    except OSError:  # no descriptor is left for its pidfd
        popen.kill()
        popen.wait()
        raise


def _before_exec(agent_pid: int, mark: str, cgroup_fd: int | None, cpus: frozenset[int] | None) -> Callable[[], None]:
    """What the child does before exec. Decided before the fork, so that the child only makes system calls."""
    ignored = [s for s in signal.valid_signals() if s != signal.SIGHUP and signal.getsignal(s) is signal.SIG_IGN]
    open_files = descriptor_limit.inherited_limit()
    tag = rank_tag.tag_for(agent_pid, mark) if rank_tag.is_supported() else None

    def before_exec() -> None:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != agent_pid:  # the agent died before the line above
            os._exit(128 + signal.SIGKILL)
        if tag is not None:
            with contextlib.suppress(OSError, ValueError):
                rank_tag.set_tag(tag)
        if cgroup_fd is not None:
            with contextlib.suppress(OSError):
                os.write(cgroup_fd, b"0")
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)
        if open_files is not None:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return before_exec


def _spawn_error(program: str, cwd: str | None, error: OSError | ValueError) -> SpawnError:
    if isinstance(error, ValueError):  # a NUL byte, or an `=` in a variable's name
        return SpawnError(f"cannot start {program!r}: {error}", EXIT_NOT_EXECUTABLE)
    if cwd is not None and not os.path.isdir(cwd):
        return SpawnError(f"cannot start {program}: the working directory {cwd} is not there", EXIT_NOT_EXECUTABLE)
    if error.errno == errno.ENOENT and os.path.exists(program):
        return SpawnError(f"cannot start {program}: the interpreter named in its first line is missing", EXIT_NOT_EXECUTABLE)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SpawnError(f"cannot start {program}: there is no such program; check the path", EXIT_NOT_FOUND)
    if error.errno == errno.ENOEXEC:
        return SpawnError(f"cannot start {program}: it is no program (a script needs a #! line)", EXIT_NOT_EXECUTABLE)
    if error.errno == errno.EACCES:
        return SpawnError(f"cannot start {program}: it is not executable; chmod +x it", EXIT_NOT_EXECUTABLE)
    if error.errno == errno.EAGAIN:
        return SpawnError(f"cannot start {program}: the limit of processes is reached (ulimit -u, pids cgroup)", 1)
    if error.errno == errno.E2BIG:
        why = "its arguments and environment are longer than the system takes; pass them in a file, or raise ulimit -s"
        return SpawnError(f"cannot start {program}: {why}", EXIT_NOT_EXECUTABLE)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return SpawnError(f"cannot start {program}: {error.strerror}; raise ulimit -n", 1)
    return SpawnError(f"cannot start {program}: {error.strerror}", EXIT_NOT_EXECUTABLE)


def start_hint(error: OSError) -> str:
    """What to do where one of our own helpers could not be started."""
    if error.errno == errno.E2BIG:
        return "the environment is longer than the system takes; make it shorter, or raise ulimit -s"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise ulimit -n"
    return "is this Python still there, and processes left (ulimit -u)?"


def _signal_process(process: ProcessId, signal_number: int) -> bool:
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        return send_signal(pidfd, signal_number)
    finally:
        os.close(pidfd)
