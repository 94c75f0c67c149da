"""What of the ranks' output goes where: torchrun's log options, decided per rank and stream. Pure but for the directories."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rsup.launcher.log_lines import PREFIX_FIELDS, JsonLines, prefix_text
from rsup.launcher.trace_files import trace_environment, traces_in
from rsup.supervisor import places
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
    ranks_filter: frozenset[int] | None = None
    """Console only for these ranks of the job; None: all."""
    as_json: bool = False
    """The console gets JSON objects instead, one a line."""
    role: str = "default"
    line_prefix_template: str | None = None
    """In front of every line on the console. None: teed streams alone carry one, as the environment says, else
    `[${role_name}${rank}]:`."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()

    def place(self, local_rank: int, rank: int, stream: str, attempt: int = 1) -> StreamPlace:
        """Where one stream of one rank goes in attempt 1, 2, ..."""
        bit = STREAM_BITS[stream]
        files = self.log_dir != os.devnull
        redirected = files and bool(_chosen(self.redirects, local_rank) & bit)
        teed = bool(_chosen(self.tee, local_rank) & bit)
        shown = self._shows(local_rank, rank)
        return StreamPlace(
            to_file=files and (redirected or teed),
            to_console=shown and (teed or not redirected),
            prefix=self.prefix(local_rank, rank, stream, attempt) if teed or self.line_prefix_template is not None else b"",
            json=self.json_lines(local_rank, rank, stream, attempt),
            needles=self.needles(stream) if teed and shown and files else (),
        )

    @property
    def keeps_files(self) -> bool:
        """Whether the user asked for any log file."""
        values = [v for given in (self.redirects, self.tee) for v in ([given] if isinstance(given, int) else given.values())]
        return any(values)

    def needles(self, stream: str) -> tuple[bytes, ...]:
        """What a teed line must hold to be duplicated."""
        words = self.duplicate_stdout_filters if stream == "stdout" else self.duplicate_stderr_filters
        return tuple(word.encode(errors="surrogateescape") for word in words)

    def prefix(self, local_rank: int, rank: int, stream: str = STREAMS[0], attempt: int = 1) -> bytes:
        """In front of a line."""
        template = self.line_prefix_template
        if template is None:
            template = os.environ.get(PREFIX_VARIABLE) or DEFAULT_PREFIX
        values = (self.role, rank, local_rank, places.this_node(), attempt, stream)
        return prefix_text(template, dict(zip(PREFIX_FIELDS, values, strict=True)))

    def json_lines(self, local_rank: int, rank: int, stream: str, attempt: int) -> JsonLines | None:
        """What makes objects of the stream's lines; None: they are printed as they are."""
        return JsonLines(places.this_node(), stream, rank, local_rank, attempt) if self.as_json else None

    def _shows(self, local_rank: int, rank: int) -> bool:
        locally = not self.local_ranks_filter or local_rank in self.local_ranks_filter
        return locally and (self.ranks_filter is None or rank in self.ranks_filter)


@dataclass(frozen=True)
class StreamPlace:
    """Where a stream goes. `needles`: its lines with one of these go to the attempt's filtered log as well. `json`: makes of
    its lines what the console gets."""

    to_file: bool
    to_console: bool
    prefix: bytes
    needles: tuple[bytes, ...]
    json: JsonLines | None = None


@dataclass(frozen=True)
class RankFiles:
    """Where both streams of one rank go in one attempt, by stream. `error_file`: for TORCHELASTIC_ERROR_FILE. `environment`:
    what the rank's environment is to have besides."""

    places: Mapping[str, StreamPlace]
    files: Mapping[str, Path | None]
    filtered: Mapping[str, Path | None]
    error_file: Path | None
    environment: Mapping[str, str] = field(default_factory=dict)


class FileNames(Protocol):
    """Chooses the files of an attempt's ranks in the place of torchrun's tree."""

    def files_of(self, environments: Mapping[int, Mapping[str, str]], options: LogOptions) -> Mapping[int, RankFiles]:
        """By local rank. Raises `RsupError`."""
        ...


def files_in(folder: Path | None, places: Mapping[str, StreamPlace]) -> RankFiles:
    """torchrun's names in a rank's directory and the one above; None: there are no files."""
    return RankFiles(
        places,
        files={stream: folder and folder / f"{stream}.log" for stream in STREAMS},
        filtered={stream: folder and folder.parent / f"filtered_{stream}.log" for stream in STREAMS},
        error_file=folder and folder / "error.json",
        environment=trace_environment(folder and folder.parent, os.environ),
    )


def _chosen(given: Mapping[int, int] | int, local_rank: int) -> int:
    return given if isinstance(given, int) else given.get(local_rank, 0)


class LogTree:
    """The directories: `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/`, n counting from 0."""

    def __init__(self, options: LogOptions) -> None:
        self.run_dir: Path | None = None
        self.problem = ""
        """Why there is no temporary directory, for which nobody asked."""
        self.is_temporary = options.log_dir is None and not options.keeps_files
        self._own_base = options.log_dir is None
        self._made: set[int] = set()
        if options.log_dir == os.devnull:
            return
        run_id = re.sub(r"[^A-Za-z0-9._-]", "_", options.run_id)[:MAX_RUN_ID_CHARS] or "none"
        base = options.log_dir or ""
        try:
            base = base or tempfile.gettempdir()
            os.makedirs(base, exist_ok=True)
            prefix = f"rsup-{run_id}_" if self._own_base else f"{run_id}_"
            self.run_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(base)))
        except OSError as error:
            problem = f"cannot write to the log directory {base}: {error.strerror or error}"
            if not self.is_temporary:
                raise LogDirError(f"{problem}; choose another --log-dir") from None
            self.problem = f"{problem}; ranks go without error files"

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

    def traces(self, attempt: int) -> list[Path]:
        """What the flight recorder of that attempt's ranks has left."""
        return traces_in(self.run_dir / f"attempt_{attempt - 1}") if self.run_dir is not None else []

    def remove_temporary(self, *, only_empty: bool) -> None:
        """Remove a temporary tree, with `only_empty` if no rank left an error file. One that was asked for stays, and one that
        holds traces."""
        if not self.is_temporary or self.run_dir is None or any(self.traces(attempt) for attempt in self._made):
            return
        if not only_empty or not any(path.is_file() for path in self.run_dir.rglob("*")):
            shutil.rmtree(self.run_dir, ignore_errors=True)
