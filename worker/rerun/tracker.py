"""What was rejected, and what became of it: one file of JSON lines for each rank, `NAME.rank0007.jsonl`.

A line is written by one call in append mode, so a killed rank loses at most the end of its last line, and no other rank's.
The file is opened at the start and touched again only when something is rejected. Trouble with it is said once and never ends
a job.
"""

import os
import re
import socket
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from rsup.supervisor.wire import UsageError
from rsup.worker.rerun.contract import Rejection

VERSION = 1
MAX_CHECK_CHARS = 1000
TRAINING = "train"
EVALUATION = "eval"
_STATUSES = frozenset(Rejection)


class RejectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    version: int = VERSION
    ts: str
    """UTC, ISO 8601."""
    run: str
    """`ID.RUN` of the job; outside `rsup launch` an empty ID with a RUN of this process."""
    attempt: int
    rank: int
    node: str
    device: str
    """UUID, or what stands for it."""
    iteration: int
    """1-based, global."""
    phase: str
    """`train` or `eval`."""
    status: str
    """A `contract.Rejection`."""
    check: str = ""
    value: str = ""
    """`repr` of the float."""
    fatal: bool = True
    case_id: str = ""
    verdict: str = ""
    """One of `wire.VERDICTS`, on lines of the status VERDICT."""

    @property
    def job(self) -> str:
        """The job's id: runs of one job have it in common."""
        return self.run.rpartition(".")[0]


class RejectionTracker:
    """The file of one rank. Raises `UsageError` when it cannot be opened."""

    def __init__(
        self, name: str | os.PathLike[str], rank: int, run: str = "", attempt: int = 1, device: str = "", node: str = ""
    ) -> None:
        self.path = tracker_path(name, rank)
        self.device = device
        self._rank = rank
        self._run = run or f".{int(time.time())}-{os.getpid()}"
        self._attempt = attempt
        self._node = node or socket.gethostname()
        self._has_warned = False
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._starts_new_line = _ends_within_line(self._fd)
        except OSError as error:
            raise UsageError(
                f"--result-rejected-tracker-filename: cannot write {self.path}: {error.strerror}; name one in an existing "
                f"folder that this rank may write to"
            ) from None

    def write(
        self,
        status: Rejection,
        iteration: int,
        check: str = "",
        value: float | None = None,
        *,
        fatal: bool = True,
        phase: str = TRAINING,
        case_id: str = "",
        verdict: str = "",
    ) -> None:
        """Append one record. Never raises: the first error is warned of."""
        record = RejectionRecord(
            ts=datetime.now(UTC).isoformat(timespec="microseconds"),
            run=self._run,
            attempt=self._attempt,
            rank=self._rank,
            node=self._node,
            device=self.device,
            iteration=iteration,
            phase=phase,
            status=status.value,
            check=check[:MAX_CHECK_CHARS],
            value="" if value is None else repr(value),
            fatal=fatal,
            case_id=case_id,
            verdict=verdict,
        )
        line = msgspec.json.encode(record) + b"\n"
        if self._starts_new_line:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._warn(error.strerror or repr(error))
            return
        self._starts_new_line = written != len(line)
        if self._starts_new_line:
            self._warn("the disk took only a part of a line")

    def close(self) -> None:
        """Close the file; nothing may be written any more."""
        os.close(self._fd)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"rsup: rejected results are not recorded in {self.path}: {why}", RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class Trackers:
    """What the files of all ranks hold."""

    records: tuple[RejectionRecord, ...] = ()
    num_files: int = 0
    num_skipped: int = 0
    """Lines that are cut off, damaged, or of another version."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be read, and why."""

    @property
    def complaint(self) -> str:
        """One line for the log about what was left out; empty when nothing was."""
        parts = [f"{self.num_skipped} lines that are cut off or of another version"] if self.num_skipped else []
        parts += self.unreadable
        return f"rejected results of earlier runs: not read: {'; '.join(parts)}" if parts else ""


def tracker_path(name: str | os.PathLike[str], rank: int) -> Path:
    """The file of `rank`."""
    return Path(f"{os.fspath(name)}.rank{rank:04d}.jsonl")


def read_trackers(name: str | os.PathLike[str]) -> Trackers:
    """The records of all ranks' files, file by file. Never raises: what cannot be read is counted or named."""
    stem = Path(os.fspath(name))
    pattern = re.compile(re.escape(stem.name) + r"\.rank\d+\.jsonl")
    unreadable: list[str] = []
    try:
        files = sorted(path for path in stem.parent.iterdir() if pattern.fullmatch(path.name))
    except OSError as error:
        return Trackers(unreadable=(f"{stem.parent} ({error.strerror})",))
    records: list[RejectionRecord] = []
    num_skipped = 0
    for path in files:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            unreadable.append(f"{path} ({error.strerror})")
            continue
        found = read_lines(lines)
        records += found.records
        num_skipped += found.num_skipped
    return Trackers(tuple(records), len(files), num_skipped, tuple(unreadable))


def read_lines(lines: Iterable[bytes]) -> Trackers:
    """The records in lines of one file."""
    records: list[RejectionRecord] = []
    num_skipped = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=RejectionRecord)
        except msgspec.MsgspecError:
            num_skipped += 1
            continue
        if record.version != VERSION or record.status not in _STATUSES:
            num_skipped += 1
        else:
            records.append(record)
    return Trackers(tuple(records), 1, num_skipped)


def _ends_within_line(fd: int) -> bool:
    """Whether a killed predecessor left half a line, to which ours must not be joined."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
