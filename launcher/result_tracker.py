"""The tracker file of Megatron-LM's rerun machine (`--result-rejected-tracker-filename`): what it says of our ranks.

Megatron appends a line whenever it rejects a result, and after each rerun what the rerun showed; then all ranks leave with 16
(run this iteration again on another device) or 17 (the verdict is known). The lines that this attempt added are what confirms
such an exit; a rank that only happens to use these codes has none. The file may be shared by nodes and jobs.
Source: spec of Megatron-LM's rerun_state_machine.py (tracker lines since early 2025; Python >= 3.11 prints `Class.NAME`).
"""

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rsup.supervisor.wire import RejectedResult

FLAG = "--result-rejected-tracker-filename"
SHORTEST_FLAG = "--result-rejected"
"""argparse takes unambiguous beginnings."""
MAX_BYTES = 1024 * 1024
MAX_TEXT_CHARS = 300
MAX_LINES = 8
READ_WITHIN_S = 2.0
"""The file may be on a network file system that hangs; then nothing is known of it."""

T = TypeVar("T")

_LINE = re.compile(
    r"ts=(?P<ts>.*?) node=(?P<node>\S+) device=(?P<device>\d+) jobID=(?P<job>\S+) rank=(?P<rank>\d+)"
    r" iteration=(?P<iteration>-?\d+) status=(?P<status>\S+) result=(?P<result>.*?) message='(?P<message>.*)'\s*$"
)


def tracker_path(words: Sequence[str]) -> Path | None:
    """The file that a script's arguments name; None if they name none. The last one counts."""
    found = None
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if FLAG.startswith(flag) and len(flag) >= len(SHORTEST_FLAG):
            found = value if equals else words[i + 1] if i + 1 < len(words) else found
    return Path(found) if found else None


class ResultTracker:
    """Reads what is added to the file from now on, as often as it is asked."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path = path
        self._job = environ.get("SLURM_JOBID", "N/A")
        self._node = os.uname().nodename
        self._begin = _within(READ_WITHIN_S, self._size)

    def added(self, first_rank: int, num_ranks: int, device_of: Callable[[int, int], str]) -> list[RejectedResult]:
        """The newest lines about these ranks on this node, oldest first. `device_of(rank, ordinal)` names a device. Never
        raises, and takes at most `READ_WITHIN_S`."""
        text = _within(READ_WITHIN_S, self._read) or ""
        found: list[RejectedResult] = []
        for match in filter(None, map(_LINE.match, text.splitlines())):
            rank, ordinal = int(match["rank"]), int(match["device"])
            ours = match["node"] == self._node and match["job"] == self._job
            if ours and first_rank <= rank < first_rank + num_ranks:
                found.append(
                    RejectedResult(
                        rank=rank,
                        status=match["status"].rpartition(".")[2].upper(),
                        iteration=int(match["iteration"]),
                        device=device_of(rank, ordinal),
                        ordinal=ordinal,
                        message=match["message"][:MAX_TEXT_CHARS],
                        result=match["result"][:MAX_TEXT_CHARS],
                    )
                )
        return found[-MAX_LINES:]

    def _read(self) -> str:
        if self._begin is None:
            return ""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self._begin if size >= self._begin else 0  # else somebody has begun the file anew
                file.seek(max(begin, size - MAX_BYTES))
                return file.read(MAX_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` returns, if it does so in time."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="rsup-tracker", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
