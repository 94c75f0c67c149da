"""What of the ranks' output goes where: torchrun's log options, decided per rank and stream. Pure but for the directories."""

from __future__ import annotations

import os
import re
import shutil
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor.wire import UsageError

STREAMS = ("stdout", "stderr")
STREAM_BITS = {"stdout": 1, "stderr": 2}
DEFAULT_PREFIX = "[${role_name}${rank}]:"
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
MAX_RUN_ID_CHARS = 100


class LogDirError(UsageError):
    """cannot write to the log directory PATH: WHY; choose another --log-dir"""


def parse_streams(text: str) -> dict[int, int] | int:
    """`--redirects` and `--tee`: `0`..`3` for all local ranks (1 stdout, 2 stderr, 3 both), or `0:3,1:1`, ranks of any
    length and ranges (`0-7:3`). Raise `UsageError` for anything else."""
    if re.fullmatch(r"[0-3]", text.strip()):
        return int(text)
    chosen: dict[int, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?:([0-3])\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{text!r} is no choice of streams; give 0, 1 (stdout), 2 (stderr), 3, or RANK:N,RANK-RANK:N")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > 100_000:
            raise UsageError(f"{text!r} names local rank {last}; no node has so many")
        chosen |= dict.fromkeys(range(first, last + 1), int(match[3]))
    return chosen


@dataclass(frozen=True)
class LogOptions:
    """torchrun's log options. `log_dir` None: a directory of our own under the system's temporary one, removed after
    success if nothing was redirected or teed into it. `/dev/null`: no files at all."""

    log_dir: str | None = None
    run_id: str = "none"
    redirects: Mapping[int, int] | int = 0
    tee: Mapping[int, int] | int = 0
    local_ranks_filter: frozenset[int] = frozenset()
    """Console only for these local ranks; empty: all."""
    role: str = "default"
    line_prefix_template: str | None = None
    """None: as in the environment, else `[${role_name}${rank}]:`. Only teed streams carry a prefix."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()

    def place(self, local_rank: int, rank: int, stream: str) -> StreamPlace:
        """Where one stream of one rank goes."""
        bit = STREAM_BITS[stream]
        files = self.log_dir != os.devnull
        redirected = files and bool(_chosen(self.redirects, local_rank) & bit)
        teed = bool(_chosen(self.tee, local_rank) & bit)
        shown = not self.local_ranks_filter or local_rank in self.local_ranks_filter
        needles = self.duplicate_stdout_filters if stream == "stdout" else self.duplicate_stderr_filters
        return StreamPlace(
            to_file=files and (redirected or teed),
            to_console=shown and (teed or not redirected),
            prefix=self._prefix(local_rank, rank) if teed else b"",
            needles=tuple(needle.encode() for needle in needles) if teed and shown and files else (),
        )

    @property
    def keeps_files(self) -> bool:
        """Whether the user asked for any log file."""
        values = [v for given in (self.redirects, self.tee) for v in ([given] if isinstance(given, int) else given.values())]
        return any(values)

    def _prefix(self, local_rank: int, rank: int) -> bytes:
        template = self.line_prefix_template or os.environ.get(PREFIX_VARIABLE) or DEFAULT_PREFIX
        values = {"role_name": self.role, "rank": rank, "local_rank": local_rank}
        return string.Template(template).safe_substitute(values).encode()


@dataclass(frozen=True)
class StreamPlace:
    """Where a stream goes. `needles`: its lines with one of these go to the attempt's filtered log as well."""

    to_file: bool
    to_console: bool
    prefix: bytes
    needles: tuple[bytes, ...]


def _chosen(given: Mapping[int, int] | int, local_rank: int) -> int:
    return given if isinstance(given, int) else given.get(local_rank, 0)


class LogTree:
    """The directories: `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/`, n counting from 0."""

    def __init__(self, options: LogOptions) -> None:
        self.run_dir: Path | None = None
        self.is_temporary = options.log_dir is None and not options.keeps_files
        self._own_base = options.log_dir is None
        self._made: set[int] = set()
        if options.log_dir == os.devnull:
            return
        run_id = re.sub(r"[^A-Za-z0-9._-]", "_", options.run_id)[:MAX_RUN_ID_CHARS] or "none"
        base = options.log_dir or tempfile.gettempdir()
        try:
            os.makedirs(base, exist_ok=True)
            prefix = f"rsup-{run_id}_" if self._own_base else f"{run_id}_"
            self.run_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(base)))
        except OSError as error:
            raise LogDirError(f"cannot write to the log directory {base}: {error.strerror}; choose another --log-dir") from None

    def attempt_dir(self, attempt: int) -> Path:
        """Directory of attempt 1, 2, ...; a leftover of the same number is removed at the first call. Raises OSError."""
        assert self.run_dir is not None
        path = self.run_dir / f"attempt_{attempt - 1}"
        if attempt not in self._made:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            self._made.add(attempt)
        return path

    def rank_dir(self, attempt: int, local_rank: int) -> Path:
        """Directory of one rank. Raises OSError."""
        path = self.attempt_dir(attempt) / str(local_rank)
        path.mkdir(exist_ok=True)
        return path

    def remove_temporary(self, *, only_empty: bool) -> None:
        """Remove a temporary tree, with `only_empty` if no rank left an error file. One that was asked for stays."""
        if not self.is_temporary or self.run_dir is None:
            return
        if not only_empty or not any(path.is_file() for path in self.run_dir.rglob("*")):
            shutil.rmtree(self.run_dir, ignore_errors=True)
