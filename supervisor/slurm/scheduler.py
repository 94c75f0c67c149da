"""Speaks to SLURM through `scontrol`, with a time limit on every call. Never through a shell.

The command may have words before it (`sudo -n /usr/bin/scontrol`): the daemon need not be an operator of SLURM's itself. All
calls block, so they are made on a thread of their own. A call that fails says why in one line; nothing is taken for granted
from it.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rsup.supervisor.hardware.hostlist import fold
from rsup.supervisor.slurm.scheduler_text import RESERVATION, NodeSeen, read_nodes, read_reservations, read_setting
from rsup.supervisor.wire import RsupError, UsageError

TIMEOUT_S = 5.0
NODES_PER_CALL = 500
_PLACES = "/usr/bin:/usr/local/bin:/usr/sbin:/opt/slurm/bin"
MAX_ERROR_CHARS = 300
NOT_ALLOWED_SEE = "docs/operating.md, Rights in SLURM"
_NOT_ALLOWED = re.compile(r"Invalid user id|[Aa]ccess denied|[Pp]ermission denied|^sudo: ")


class SchedulerError(RsupError):
    """SLURM did not do, or not answer, what it was asked; the text says what."""


class SilentScheduler(SchedulerError):
    """It did not answer in time: the next question would wait as long."""


class NoRight(SchedulerError):
    """SLURM, or sudo, does not let us."""


class NoScheduler(SchedulerError):
    """There is no `scontrol` here."""


class Scontrol:
    """`command`: as in the setting `scontrol`; empty: the one of PATH or of the usual places. Raise `UsageError` for one that
    cannot be split into words."""

    def __init__(self, command: str = "", timeout_s: float = TIMEOUT_S) -> None:
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"scontrol: {command[:80]!r} cannot be split into words: {error}") from None
        self._timeout_s = timeout_s

    def nodes(self, names: Sequence[str] = ()) -> dict[str, NodeSeen]:
        """All nodes as SLURM shows them, or those of `names` that it knows. Raise `SchedulerError`."""
        if not names:
            return read_nodes(self._run("show", "node", "-o"))
        found: dict[str, NodeSeen] = {}
        for part in _parts(names):
            found |= read_nodes(self._run("show", "node", "-o", fold(part), unknown_is_fine=True))
        return found

    def cluster_name(self) -> str:
        """SLURM's `ClusterName`, empty where it shows none."""
        return read_setting(self._run("show", "config"), "ClusterName")

    def started_us(self) -> int:
        """When slurmctld was started, UTC microseconds; 0: it does not say."""
        try:
            started = time.strptime(read_setting(self._run("show", "config"), "BOOT_TIME"), "%Y-%m-%dT%H:%M:%S")
        except ValueError:
            return 0
        return int(time.mktime(started)) * 1_000_000

    def drain(self, names: Sequence[str], reason: str) -> None:
        """Let jobs run to their end there, and start none. Raise `SchedulerError`."""
        for part in _parts(names):
            self._run("update", f"nodename={fold(part)}", "state=drain", f"reason={reason}")

    def explain(self, names: Sequence[str], reason: str) -> None:
        """Another reason for what is drained."""
        for part in _parts(names):
            self._run("update", f"nodename={fold(part)}", f"reason={reason}")

    def undrain(self, names: Sequence[str]) -> None:
        """End a drain; a node that is down stays so, which `state=resume` would undo as well."""
        for part in _parts(names):
            self._run("update", f"nodename={fold(part)}", "state=undrain")

    def weigh(self, name: str, weight: int) -> None:
        """Nodes of less weight are taken first."""
        self._run("update", f"nodename={name}", f"weight={weight}")

    def reservations(self) -> set[str]:
        """Names of those that are ours."""
        return read_reservations(self._run("show", "reservation", "-o"))

    def reserve(self, name: str) -> None:
        """Keep users off a node; tests run there with `--reservation`."""
        words = ("starttime=now", "duration=infinite", "users=root", "flags=maint,ignore_jobs")
        self._run("create", "reservation", f"reservationname={RESERVATION}{name}", f"nodes={name}", *words)

    def unreserve(self, name: str) -> None:
        """End that."""
        self._run("delete", f"reservationname={RESERVATION}{name}")

    def _run(self, *words: str, unknown_is_fine: bool = False) -> str:
        command = [*(self._command or [find_scontrol()]), *words]
        what = f"scontrol {' '.join(words[:2])}"
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "standard"},
            )
        except FileNotFoundError:
            raise NoScheduler(f"there is no {command[0]}: set --scontrol, or --drains off") from None
        except OSError as error:
            raise SchedulerError(f"{command[0]} cannot be run: {error.strerror}; set --scontrol") from None
        out, errors = self._wait(process, what)
        if process.returncode and not (unknown_is_fine and "not found" in errors + out):
            said = " ".join((errors.strip() or out.strip() or "nothing").split())[:MAX_ERROR_CHARS]
            if _NOT_ALLOWED.search(said):
                raise NoRight(f"{what} is not allowed to rsup's user ({NOT_ALLOWED_SEE}): {said}")
            raise SchedulerError(f"{what} failed with {process.returncode}, and said: {said}")
        return out

    def _wait(self, process: "subprocess.Popen[bytes]", what: str) -> tuple[str, str]:
        try:
            out, errors = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise SilentScheduler(f"{what} did not answer within {self._timeout_s:g} s") from None
        return out.decode(errors="replace"), errors.decode(errors="replace")


def find_scontrol() -> str:
    """Its absolute path. Raise `NoScheduler`."""
    found = shutil.which("scontrol", path=f"{os.environ.get('PATH', '')}:{_PLACES}")
    if found is None:
        raise NoScheduler("there is no scontrol on this host: install SLURM's client commands, or set --drains off")
    return str(Path(found).absolute())


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it started; what cannot be killed (sudo's child of another user) must not hold us up either."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process.kill()
    try:
        process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _parts(names: Sequence[str]) -> list[list[str]]:
    return [list(names[at : at + NODES_PER_CALL]) for at in range(0, len(names), NODES_PER_CALL)]
