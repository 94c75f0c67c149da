"""How a line looks on the console: as printed, behind a prefix, or as a JSON object (`--log-format json`). Files stay raw."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

OWN_STREAM = "rsup"
"""`stream` of the launcher's own lines."""
PREFIX_FIELDS = ("role_name", "rank", "local_rank", "host", "attempt", "stream")
"""What a prefix may name: torchrun's three, and ours. Anything else stays as it is written."""


def prefix_text(template: str, fields: Mapping[str, object]) -> bytes:
    """A prefix with its `${...}` filled in."""
    return string.Template(template).safe_substitute(fields).encode(errors="surrogateescape")


@dataclass(frozen=True)
class JsonLines:
    """Makes JSON lines of what one stream of one rank prints: `time` (UTC, when the launcher read it), `host`, `rank`,
    `local_rank`, `attempt`, `stream`, `text`, in this order. `rank` None: lines of the launcher itself.

    A byte that is no UTF-8 becomes U+FFFD. A carriage return ends a line as a newline does: a progress bar gives one object
    for each state that it had.
    """

    host: str
    stream: str
    rank: int | None = None
    local_rank: int | None = None
    attempt: int | None = None

    def render(self, data: bytes) -> bytes:
        """One object for each line of `data` that is not empty; each ends with a newline."""
        start = self._start()
        lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
        objects = [f'{start}, "text": {json.dumps(line, ensure_ascii=False)}}}\n' for line in lines if line]
        return "".join(objects).encode()

    def render_text(self, text: str) -> bytes:
        """One object of all of `text`, however many lines that are."""
        shown = json.dumps(text.encode(errors="backslashreplace").decode(), ensure_ascii=False)
        return f'{self._start()}, "text": {shown}}}\n'.encode()

    def _start(self) -> str:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {"time": time, "host": self.host, "rank": self.rank, "local_rank": self.local_rank, "attempt": self.attempt}
        return json.dumps(fields | {"stream": self.stream}, ensure_ascii=False)[:-1]

    @staticmethod
    def ends_at(data: bytes) -> int:
        """Where the last finished line of `data` ends; 0 if none does."""
        return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
