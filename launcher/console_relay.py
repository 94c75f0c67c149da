"""What a launcher process prints, handed to the caller's `sys.stdout` and `sys.stderr` as they are at the call.

A stream that is a plain file, pipe or terminal is given to the launcher itself, so that a single rank keeps its terminal.
What stands in a stream's place (`contextlib.redirect_stdout`, a notebook, a test's capture) gets text from a thread.
"""

import codecs
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TextIO

from rsup.launcher.pipe_drain import PipeDrain


class ConsoleRelay:
    """`fds`: what a process is given as stdout and stderr. After its start: `close_writer_ends`, `start`. Leaving `stack`
    hands over what is left and ends the threads; not before the process has ended."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._writers: set[int] = set()
        self._drains: list[PipeDrain] = []
        stdout, stderr = sys.stdout, sys.stderr
        out = self._descriptor(stdout)
        self.fds = (out, out if stderr is stdout else self._descriptor(stderr))
        stack.callback(self._finish)

    def close_writer_ends(self) -> None:
        """Close our copies of what the process writes to. May be repeated."""
        while self._writers:
            os.close(self._writers.pop())

    def start(self) -> None:
        """Begin to hand over."""
        for drain in self._drains:
            drain.start()

    def _descriptor(self, stream: TextIO | None) -> int:
        if stream is None:  # a program without a console
            return subprocess.DEVNULL
        if _is_plain(stream):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                return stream.fileno()
        reader, writer = os.pipe()
        self._writers.add(writer)
        self._drains.append(PipeDrain(reader, _writer_of(stream), "rsup-console"))
        return writer

    def _finish(self) -> None:
        self.close_writer_ends()
        for drain in self._drains:
            drain.finish()


def _is_plain(stream: TextIO) -> bool:
    """Whether what is written to the stream's descriptor is the same as what is written to the stream."""
    return isinstance(stream, io.TextIOWrapper) and "write" not in getattr(stream, "__dict__", {})


def _writer_of(stream: TextIO) -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(data: bytes) -> None:
        text = decoder.decode(data, final=not data)
        with contextlib.suppress(OSError, ValueError):  # closed, or not to be written to: the ranks must not feel it
            if text:
                stream.write(text)
                stream.flush()

    return write
