"""A node's directory of local checkpoints: parts of the ranks there, and copies of other ranks' parts. No torch.

    DIR/rsup-JOB/owner.json                         whose it is: the job's key, and the process that launched it
    DIR/rsup-JOB/lock                               a shared lock that every living rank of the job holds
    DIR/rsup-JOB/iter_0000030.TOKEN.rank_00003      rank 3's part of the save of iteration 30, written as `.iter_...`
    DIR/rsup-JOB/iter_0000030.TOKEN.rank_00003.kept-by-00007   the same, kept by rank 7

JOB is a digest of the job's key, which names its run: jobs share DIR without seeing each other's files, and a new run begins
without those of the run before. In memory DIR is of our own, in /dev/shm: the files outlive every process of the job. They go
when the job has ended well, else with the next start of any job of this user, once no rank and no launcher of theirs lives (or
with the machine). In a user's directory only those of earlier runs of the same job go, once a newer run has one of its own.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.places import boot_id, this_host
from rsup.supervisor.wire import UsageError
from rsup.worker.checkpoint_directory import Damaged, folder_name, job_name, write_durably
from rsup.worker.local_checkpoint_format import PartHeader, read_header

SHARED_MEMORY = Path("/dev/shm")
OWNER_FILE = "owner.json"
LOCK_FILE = "lock"
_PREFIX = "rsup-"
_PART = re.compile(r"iter_\d{7,}\.[0-9a-f]{16}\.rank_(\d{5,})(\.kept-by-\d{5,})?")
_RESERVE = 0.05
"""Part of shared memory that local checkpoints leave free: NCCL and data loaders need some, and die without."""
_ANEW = "an earlier run: this one was started anew, and does not go on from them as --resume would have"


def memory_root() -> Path:
    """Where local checkpoints in memory are, for this user."""
    return SHARED_MEMORY / f"rsup-local-{os.getuid()}"


_held: dict[Path, int] = {}
"""Locks of this process: held until it ends, so that each entry of an in-process restart finds its own."""


@dataclass(frozen=True)
class Launcher:
    """The process that launched the job on this node; while it lives, the job may start ranks again."""

    pid: int
    start_ticks: int


def this_launcher(board_owner: int | None) -> Launcher:
    """rsup's agent, as the heartbeat board names it, else the parent process."""
    pid = board_owner or os.getppid()
    return Launcher(pid, process_start_ticks(pid))


class LocalDirectory:
    """The folder of one job in `root`, seen by one rank. `in_memory`: `root` is `memory_root()`, made and swept by us."""

    def __init__(self, root: Path, job_key: str, in_memory: bool) -> None:
        self.root = root
        self.job_key = job_key
        self.in_memory = in_memory
        self.path = root / f"{_PREFIX}{hashlib.sha256(job_key.encode()).hexdigest()[:16]}"

    @property
    def node(self) -> str:
        """Equal for ranks that see the same files."""
        status = self.path.stat()
        return f"{this_host()}/{boot_id()}/{status.st_dev}/{status.st_ino}"

    def make(self, launcher: Launcher) -> None:
        """Create the folder where it is missing, and hold its lock as long as this process lives. Raises `UsageError` where
        that cannot be done or the folder is somebody else's."""
        try:
            self._make_root()
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._check_is_ours()
            self._hold()
            self._write_owner(launcher)
        except OSError as error:
            option = "--non-persistent-ckpt-type local" if self.in_memory else "another --non-persistent-local-ckpt-dir"
            raise UsageError(f"cannot keep local checkpoints in {self.path}: {error.strerror}; use {option}") from None

    def _make_root(self) -> None:
        if not self.in_memory:
            self.root.mkdir(parents=True, exist_ok=True)
            return
        self.root.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(self.root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it is not a directory of our own")

    def _check_is_ours(self) -> None:
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        owner = _read_owner(self.path)
        if owner and owner.get("job_key") != self.job_key:
            raise UsageError(
                f"{self.path} holds local checkpoints of job {owner['job_key']}; use another directory for this job"
            )

    def _hold(self) -> None:
        """Take the shared lock, once in this process; anew where a sweep has removed the folder meanwhile."""
        while not _is_held(self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_SH)
                _held[self.path] = fd

    def _write_owner(self, launcher: Launcher) -> None:
        content = {
            "job_key": self.job_key,
            "launcher_pid": launcher.pid,
            "launcher_start_ticks": launcher.start_ticks,
            "boot_id": boot_id(),
            "pid_namespace": _pid_namespace(),
        }
        if _read_owner(self.path) != content:
            write_durably(self.path / OWNER_FILE, json.dumps(content) + "\n")

    # ------------------------------------------------------------------------------------------------------- the files

    def final(self, iteration: int, token: str, rank: int, keeper: int | None = None) -> Path:
        """Name of a part, or of the copy that `keeper` has of it."""
        suffix = "" if keeper is None else f".kept-by-{keeper:05d}"
        return self.path / f"{folder_name(iteration)}.{token}.rank_{rank:05d}{suffix}"

    @staticmethod
    def temporary(final: Path) -> Path:
        """Where it is written before it has its name."""
        return final.with_name(f".{final.name}")

    def parts(self) -> tuple[list[tuple[str, PartHeader]], list[str]]:
        """Parts and copies whose header and size are right and that are of this job, and why the others are not used."""
        found, complaints = [], []
        for path in sorted(self.path.iterdir()):
            if not _PART.fullmatch(path.name):
                continue
            try:
                header = read_header(path)
                if header.job_key != self.job_key:
                    raise Damaged(f"{path.name} is of job {header.job_key}")
                found.append((path.name, header))
            except Damaged as damage:
                complaints.append(f"local checkpoint {self.path}: {damage}")
        return found, complaints

    def remove_all_but(self, token: str, iteration: int) -> None:
        """Remove every part and copy of other saves than this one."""
        keep = f"{folder_name(iteration)}.{token}."
        for path in self._files():
            if not path.name.lstrip(".").startswith(keep):
                path.unlink(missing_ok=True)

    def remove_save(self, token: str, iteration: int, writer: int) -> None:
        """Remove what that rank has written of one save."""
        begin = f"{folder_name(iteration)}.{token}."
        for path in self._files():
            if path.name.lstrip(".").startswith(begin) and _writer(path.name) == writer:
                path.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove what saves that did not get to their end have left. No rank of the job saves meanwhile."""
        for path in self._files():
            if path.name.startswith("."):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with all that is in it; `make` may be called again."""
        _release(self.path)
        shutil.rmtree(self.path, ignore_errors=True)

    def _files(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [path for path in self.path.iterdir() if _PART.fullmatch(path.name.lstrip("."))]
        return []

    def free_bytes(self) -> int:
        """What may still be written here."""
        status = os.statvfs(self.path)
        reserve = int(status.f_blocks * status.f_frsize * _RESERVE) if self.in_memory else 0
        return max(0, status.f_bavail * status.f_frsize - reserve)

    # ----------------------------------------------------------------------------------------------------- other jobs

    def sweep(self) -> list[str]:
        """Remove what ended jobs of this user left in memory; return one line for each. Does nothing in a user's directory:
        what lies there may be waited for by a job that is queued again."""
        if not self.in_memory:
            return []
        removed = []
        for folder in self._others():
            with contextlib.suppress(OSError):
                owner = _read_owner(folder)
                if _is_over(folder, owner):
                    line = f"removed {_contents(folder, owner)}, {_ANEW if self._is_earlier_run(owner) else 'which is over'}"
                    shutil.rmtree(folder)
                    removed.append(line)
        return removed

    def earlier_runs(self) -> list[str]:
        """One line for each earlier run of the same job whose local checkpoints lie here: they are not gone on from."""
        lines = []
        for folder in self._others():
            with contextlib.suppress(OSError):
                owner = _read_owner(folder)
                if self._is_earlier_run(owner) and _newest(folder):
                    goes = _is_over(folder, owner)
                    then = "they go once this run has a local checkpoint of its own" if goes else "they stay: it may be alive"
                    lines.append(f"{folder} holds {_contents(folder, owner)}, {_ANEW}; {then}")
        return lines

    def remove_earlier_runs(self) -> None:
        """This run has a local checkpoint of its own: those of ended earlier runs of the same job are of no more use."""
        for folder in self._others():
            with contextlib.suppress(OSError):
                owner = _read_owner(folder)
                if self._is_earlier_run(owner) and _is_over(folder, owner):
                    shutil.rmtree(folder)

    def _others(self) -> list[Path]:
        return [folder for folder in sorted(self.root.glob(f"{_PREFIX}*")) if folder != self.path]

    def _is_earlier_run(self, owner: dict[str, str | int]) -> bool:
        name = job_name(self.job_key)
        return bool(name) and job_name(str(owner.get("job_key", ""))) == name


def _is_held(path: Path) -> bool:
    fd = _held.get(path)
    if fd is None:
        return False
    if os.fstat(fd).st_nlink:
        return True
    _release(path)
    return False


def _release(path: Path) -> None:
    fd = _held.pop(path, None)
    if fd is not None:
        os.close(fd)


def _writer(name: str) -> int:
    """The rank that wrote a file."""
    return int(name.rpartition(".kept-by-")[2] if ".kept-by-" in name else name.rpartition(".rank_")[2])


def _read_owner(folder: Path) -> dict[str, str | int]:
    try:
        owner = json.loads((folder / OWNER_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(owner) if isinstance(owner, dict) else {}


def _contents(folder: Path, owner: dict[str, str | int]) -> str:
    """What is in a job's folder, for people."""
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    newest = _newest(folder)
    of = f" (the newest of iteration {newest})" if newest else ""
    return f"{size_bytes >> 20} MiB of local checkpoints of {_run_text(str(owner.get('job_key', '?')))}{of}"


def _newest(folder: Path) -> int:
    """The highest iteration of which a folder has a part; 0 where it has none."""
    found = [path.name for path in folder.iterdir() if _PART.fullmatch(path.name)]
    return max((int(name.partition(".")[0].rpartition("_")[2]) for name in found), default=0)


def _run_text(job_key: str) -> str:
    """`run 2 of job a` for rsup's key `a.2`."""
    name, _, run = job_key.rpartition(".")
    return f"run {run} of job {name}" if name and run.isdecimal() else f"job {job_key}"


def _is_over(folder: Path, owner: dict[str, str | int]) -> bool:
    """Whether no rank and no launcher of a job is left that could want its files."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # it is being made
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    if not owner or owner.get("pid_namespace") != _pid_namespace():
        return False
    pid, ticks = int(owner.get("launcher_pid", 0)), int(owner.get("launcher_start_ticks", 0))
    return owner.get("boot_id") != boot_id() or process_start_ticks(pid) != ticks or ticks == 0


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
