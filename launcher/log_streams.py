"""One stream of one rank: from the bytes of its pipe to file, console and tail. No thread and no clock of its own."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from rsup.launcher.log_options import StreamPlace
from rsup.launcher.log_sinks import Console, Sink
from rsup.launcher.log_targets import FileTarget

READ_BYTES = 256 * 1024
MAX_READS = 64
MAX_LINE_BYTES = 64 * 1024
PARTIAL_AFTER_S = 0.2
TAIL_LINES = 40
TAIL_BYTES = 16 * 1024

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Za-z0-9]|[=>78A-Z])")
"""A terminal's control sequences: colours, cursor movements, titles, character sets."""


class RankStream:
    """Owns the read end of the pipe. The console gets whole lines; what has no newline yet after `PARTIAL_AFTER_S` or
    `MAX_LINE_BYTES` gets there unfinished (as a JSON object: only then). `is_terminal`: the read end is a pseudo terminal's;
    the console gets all at once.
    """

    def __init__(
        self,
        attempt: int,
        fd: int,
        place: StreamPlace,
        files: Sink,
        console: Console | None,
        file: Path | None,
        filtered: Path | None,
        is_terminal: bool = False,
    ) -> None:
        self.attempt = attempt
        self.fd = fd
        self.tail = b""
        self.partial_since_s = 0.0
        """When the unfinished line that the console has not got yet began; 0.0: there is none."""
        self._place = place
        self._json = place.json
        self._files = files
        self._console = console if place.to_console else None
        self._file = FileTarget(file) if file is not None and place.to_file else None
        self._filtered = FileTarget(filtered) if filtered is not None and place.needles else None
        self._pending = b""
        self._is_terminal = is_terminal

    def mark(self, text: str) -> None:
        """Leave a line of our own in the file, if there is one."""
        if self._file is not None:
            self._files.put(self._file, f"\n[rsup: {text}]\n".encode(), wait=False)

    def read(self, now_s: float) -> bool:
        """Take what is in the pipe; False at its end."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno == errno.EIO:  # so ends a pseudo terminal
                return False
            raise
        if data:
            self._take(data, now_s)
        return bool(data)

    def read_all(self, now_s: float) -> None:
        """Take what is in the pipe by now, however much that is within reason: a process may write for ever."""
        for _ in range(MAX_READS):
            before = self.tail
            if self.fd < 0 or not self.read(now_s) or self.tail is before:
                return

    def flush_partial(self) -> None:
        """Give the console the unfinished line as it is."""
        self._show(self._pending)
        self._pending = b""
        self.partial_since_s = 0.0

    def close(self) -> None:
        """Take what is still in the pipe without waiting, end the line, close pipe and files. May be repeated."""
        if self.fd < 0:
            return
        self.read_all(0.0)
        self.flush_partial()
        if self._console is not None:
            last_line = self.tail[self.tail.rfind(b"\n") + 1 :]
            self._console.finish(self, ends_line=not self._is_terminal or bool(_ESCAPES.sub(b"", last_line).strip()))
        for target in (self._file, self._filtered):
            if target is not None:
                self._files.release(target)
        os.close(self.fd)
        self.fd = -1

    def tail_text(self) -> str:
        """The last lines printed."""
        tail = _ESCAPES.sub(b"", self.tail) if self._is_terminal else self.tail
        return "\n".join(tail.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def _take(self, data: bytes, now_s: float) -> None:
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if self._file is not None:
            self._files.put(self._file, data)
        if self._is_terminal and self._console is not None:
            self._console.put(self, data)
        if (self._console is None or self._is_terminal) and self._filtered is None:
            return
        end = self._json.ends_at(data) if self._json else data.rfind(b"\n") + 1
        if end:
            self._lines(self._pending + data[:end])
            self._pending, self.partial_since_s = data[end:], 0.0
        else:
            self._pending += data
        if len(self._pending) > MAX_LINE_BYTES:
            self.flush_partial()
        elif self._pending and not self.partial_since_s and not self._json:
            self.partial_since_s = now_s

    def _show(self, data: bytes) -> None:
        if not data or self._console is None or self._is_terminal:
            return
        if self._json is not None:
            self._console.put(self, self._json.render(data))
        else:
            self._console.put(self, data, self._place.prefix)

    def _lines(self, lines: bytes) -> None:
        self._show(lines)
        if self._filtered is not None:
            for line in lines.splitlines(keepends=True):
                if any(needle in line for needle in self._place.needles):
                    self._files.put(self._filtered, self._place.prefix + line)
