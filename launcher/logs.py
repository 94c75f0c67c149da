"""Log pipes: one thread reads what the ranks print and hands it to files and console. Training never waits for a log.

Owns the read ends of all rank pipes, the log files and the console. Each sink (stdout, stderr, the log files) has its own
writer thread and a bounded buffer. A console that is read slowly slows the ranks down once its buffer is full; a full disk, a
closed console, or one that is not read at all for long, cost bytes, which are counted and said, and no training. Files get the
bytes as printed; the console gets whole lines, of one rank at a time.

What is shown and kept is torchrun's: `--redirects`, `--tee`, `--log-dir`, `--local-ranks-filter`, the duplicate filters,
`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`, and the tree `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/`, n counting
from 0 as TORCHELASTIC_RESTART_COUNT does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rsup.launcher.log_lines import OWN_STREAM, JsonLines
from rsup.launcher.log_options import STREAMS, FileNames, LogDirError, LogOptions, LogTree, RankFiles, files_in, parse_streams
from rsup.launcher.log_sinks import Console, Sink, gap_line
from rsup.launcher.log_streams import PARTIAL_AFTER_S, RankStream
from rsup.launcher.log_targets import POLL_S, console_target, same_file
from rsup.launcher.terminal import KeptTerminals
from rsup.supervisor import places

__all__ = ["LogDirError", "LogOptions", "LogPump", "RankPipes", "parse_streams"]

PIPE_BYTES = 256 * 1024
CONSOLE_PATIENCE_S = 30.0
"""How long a console may take nothing before output is dropped: with a full buffer, and at the end of the job."""
FILE_PATIENCE_S = 1.0
LAST_FLUSH_S = 0.5
READ_WITHIN_S = 0.5


@dataclass
class RankPipes:
    """What one rank writes to. Pass the descriptors to `spawn_rank`, then `close_writer_ends`."""

    stdout_fd: int
    stderr_fd: int
    error_file: Path | None
    """For TORCHELASTIC_ERROR_FILE; None with `--log-dir /dev/null`, or where the directory could not be made."""
    passthrough: bool = False
    """The rank writes to the terminal itself, for want of a pseudo terminal: there is no tail of it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the rank's environment is to have besides."""

    def close_writer_ends(self) -> None:
        """Close our copies, so that the end of the rank is the end of the pipe. May be repeated."""
        for fd in {self.stdout_fd, self.stderr_fd} - {-1}:
            os.close(fd)
        self.stdout_fd = self.stderr_fd = -1


class LogPump:
    """The pump of one agent. Methods are thread-safe, and wait for ranks, disks and consoles only as far as they say."""

    def __init__(
        self,
        options: LogOptions,
        num_local_ranks: int,
        *,
        names: FileNames | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        """Make the log directory and start the threads. `names`: who chooses the files instead. `stdout`, `stderr`: default
        sys.stdout and sys.stderr as they are now. Raise `LogDirError` naming the path if it cannot be written."""
        self._options = options
        self._own = JsonLines(places.this_node(), OWN_STREAM) if options.as_json else None
        self._names = names
        self._named: Mapping[int, RankFiles] = {}
        self._tree = LogTree(options)
        self._passes_terminal = num_local_ranks == 1
        self._notes: list[str] = []
        self._unprinted: list[str] = []
        self._changed = threading.Condition()
        self._streams: set[RankStream] = set()
        self._newest: dict[tuple[int, str], RankStream] = {}
        self._terminals = KeptTerminals() if self._passes_terminal else None
        self._orders: list[Callable[[], None]] = []
        self._traced: set[int] = set()
        self._without_files: set[int] = set()
        self._closing = False
        self._outputs = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self._files = Sink("files", FILE_PATIENCE_S, self._note)
        self._sinks = [self._files]
        self._consoles = self._make_consoles()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="log pump", daemon=True)
        self._thread.start()
        if self._tree.problem:
            self._note(self._tree.problem)

    @property
    def run_dir(self) -> Path | None:
        """`<log_dir>/<run_id>_<random>`; None if there are no files."""
        return self._tree.run_dir

    @property
    def temporary_dir(self) -> Path | None:
        """`run_dir` where it is ours alone, so that whoever survives the agent may remove it."""
        return self._tree.run_dir if self._tree.is_temporary else None

    @property
    def lost_bytes(self) -> int:
        """Bytes that a full disk or a stuck console cost so far."""
        return sum(sink.lost_bytes for sink in self._sinks)

    def choose_files(self, environments: Callable[[], Mapping[int, Mapping[str, str]]]) -> None:
        """Before an attempt's ranks are opened: let `names` choose their files, by the ranks' environments. Raise what it
        raises."""
        self._named = self._names.files_of(environments(), self._options) if self._names is not None else {}

    def open_rank(self, attempt: int, local_rank: int, rank: int, mark: str = "") -> RankPipes:
        """Pipes for one rank of the attempt (1, 2, ...); or a terminal, for a stream of a single rank that is to be shown on
        one and nowhere else. A directory that cannot be made (any more) costs the files, with a note. `mark`: a line of ours
        to begin with, for files that are gone on with."""
        files = self._named.get(local_rank) or files_in(
            self._folder(attempt, local_rank, rank), {s: self._options.place(local_rank, rank, s, attempt) for s in STREAMS}
        )
        terminals = [self._terminal_for(files, stream) for stream in STREAMS]
        if self._terminals is not None:
            self._terminals.end_rank()  # of the attempt before
        fds = [
            self._open_stream(attempt, local_rank, stream, files)
            if terminal is None
            else self._open_terminal(attempt, local_rank, stream, files, terminal)
            for stream, terminal in zip(STREAMS, terminals, strict=True)
        ]
        if mark:
            for stream in {self._newest[local_rank, name] for name in STREAMS if (local_rank, name) in self._newest}:
                stream.mark(mark)
        passthrough = terminals != [None, None] and not self._terminals
        return RankPipes(fds[0], fds[1], files.error_file, passthrough, files.environment)

    def resize(self) -> bool:
        """The terminal has another size: let the rank's have it too. False if no rank has one."""
        return self._terminals is not None and self._terminals.copy_size()

    def _folder(self, attempt: int, local_rank: int, rank: int) -> Path | None:
        if self.run_dir is None:
            return None
        try:
            return self._tree.rank_dir(attempt, local_rank)
        except OSError as error:
            text = f"cannot make a log directory in {self.run_dir}: {error.strerror}; rank {rank} and others have no log files"
            if attempt not in self._without_files:
                self._note(text)
            self._without_files.add(attempt)
            return None

    def tail(self, local_rank: int, stream: str = "stderr") -> str:
        """The last 40 lines, at most 16 KiB, of `stdout` or `stderr` of that local rank in its newest attempt. Whatever a
        rank printed before it died is in it."""
        newest = self._newest.get((local_rank, stream))
        if newest is None:
            return ""
        self._order(lambda: newest.read_all(time.monotonic()), READ_WITHIN_S)
        return newest.tail_text()

    def is_mixed(self, local_rank: int) -> bool:
        """Whether `tail` has both streams of that rank in one: they are shown on one terminal."""
        return self._newest.get((local_rank, "stdout")) is self._newest.get((local_rank, "stderr"), self)

    def settle(self, local_rank: int, within_s: float) -> bool:
        """Wait until what an ended rank printed has been read, so that `tail` has its last lines. False if somebody else
        still holds its pipes after `within_s`."""
        streams = {self._newest[local_rank, name] for name in STREAMS if (local_rank, name) in self._newest}
        with self._changed:
            return self._changed.wait_for(lambda: not streams & self._streams, within_s)

    def drain(self, attempt: int, within_s: float) -> bool:
        """Wait until all that the attempt's ranks printed is written, and close their pipes. False if a pipe was still
        held open by some process after `within_s`, or a sink was stuck: what was there by then has been taken."""
        deadline = time.monotonic() + within_s
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._of(attempt), within_s)
        if not ended:
            self._order(lambda: self._end_all(self._of(attempt)), LAST_FLUSH_S)
        self._note_traces(attempt)
        flush_by = max(deadline, time.monotonic() + LAST_FLUSH_S)
        return all([sink.flush(flush_by) for sink in self._sinks]) and ended

    def _note_traces(self, attempt: int) -> None:
        traces = self._tree.traces(attempt)
        if traces and attempt not in self._traced:
            self._traced.add(attempt)
            some = f"{traces[0]}" if len(traces) == 1 else f"{len(traces)} ranks: {traces[0]} and so on"
            self._note(f"the flight recorder's trace of attempt {attempt}, of {some}")

    def say(self, text: str) -> None:
        """Print lines of our own to stderr, never in the middle of a rank's line."""
        console = self._consoles["stderr"]
        if console is not None and not self._closing:
            console.put(self, self._encoded(text), wait=False)

    def take_notes(self) -> list[str]:
        """What there is to be said about the logs since the last call (a full disk, a closed console), one line each.
        Printed to the console as well, where that works."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def close(
        self, success: bool = False, patience_s: float = CONSOLE_PATIENCE_S, is_told: Callable[[], bool] = lambda: False
    ) -> None:
        """Flush, end the threads, close everything; remove the directory if it is a temporary one of ours and `success`, or
        nothing is in it. May be repeated. Waits for sinks until they have taken nothing for `patience_s`, or `is_told` to
        leave; what is lost by then is said on stderr."""
        if self._closing:
            return
        told: list[bool] = []

        def give_up() -> bool:
            if not told and is_told():
                told.append(True)
            return bool(told)

        self._end_streams(patience_s, give_up)
        if self._terminals is not None:
            self._terminals.end_rank()
        self._closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(READ_WITHIN_S)
        out, err = self._consoles["stdout"], self._consoles["stderr"]
        if out is not None and out is not err:
            out.close()
        last = None if err is None else err.sink
        ended = [sink.close(patience_s, give_up) for sink in self._sinks if sink is not last]
        self._say_losses()
        if err is not None:
            err.close()
            ended.append(err.sink.close(patience_s, give_up))
        if all(ended) and not self._thread.is_alive():  # a thread stuck in a write may still want to wake the pump
            self._selector.close()
            os.close(self._wake_fd)
        self._tree.remove_temporary(only_empty=not success)

    def _end_streams(self, patience_s: float, give_up: Callable[[], bool]) -> None:
        """Take what is in the pipes. The pump may be waiting for a console that is full."""
        since_s = time.monotonic()
        done = self._order(lambda: self._end_all(list(self._streams)), 0.0)
        while not done.wait(POLL_S):
            taken_s = max(since_s, *(sink.progress_s for sink in self._sinks))
            if give_up() or time.monotonic() - taken_s > patience_s:
                for sink in self._sinks:
                    sink.abandon_if_full()
                done.wait(READ_WITHIN_S)
                return

    def _say_losses(self) -> None:
        """The last words on stderr: notes that came too late for the pump, and what was lost."""
        lost = [f"{s.lost_bytes} bytes of output to {s.name} were lost" for s in self._sinks if s.lost_bytes]
        with self._changed:
            self._notes += lost
            texts, self._unprinted = self._unprinted + lost, []
        console = self._consoles["stderr"]
        for text in texts if console is not None else ():
            assert console is not None
            console.put(self, self._encoded(f"rsup: {text}"), wait=False)

    def _gap(self, lost_bytes: int) -> bytes:
        return gap_line(lost_bytes) if self._own is None else self._own.render_text(gap_line(lost_bytes).decode().strip())

    def _encoded(self, text: str) -> bytes:
        """A line for stderr, or all of a report in one object; what its encoding cannot hold is escaped."""
        if self._own is not None:
            return self._own.render_text(text.strip("\n"))
        encoding = getattr(self._outputs["stderr"], "encoding", None) or "utf-8"
        return text.rstrip("\n").encode(encoding, "backslashreplace") + b"\n"

    # ---------------------------------------------------------------------------------------------- opening, any thread

    def _make_consoles(self) -> dict[str, Console | None]:
        consoles: dict[str, Console | None] = {}
        for stream in STREAMS:
            if stream == "stderr" and same_file(self._outputs["stdout"], self._outputs["stderr"]):
                consoles[stream] = consoles["stdout"]
                continue
            target = console_target(stream, self._outputs[stream])
            if target is None:
                consoles[stream] = None
                continue
            sink = Sink(stream, CONSOLE_PATIENCE_S, self._note, gap=self._gap)
            self._sinks.append(sink)
            consoles[stream] = Console(sink, target)
        return consoles

    def _terminal_for(self, files: RankFiles, stream: str) -> int | None:
        """The descriptor to pass through, where the only rank's stream is shown on a terminal and nowhere else."""
        place = files.places[stream]
        if not self._passes_terminal or place.to_file or place.prefix or place.json or not place.to_console:
            return None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fd = self._outputs[stream].fileno()
            return fd if os.isatty(fd) else None
        return None

    def _open_terminal(self, attempt: int, local_rank: int, name: str, files: RankFiles, fd: int) -> int:
        """A pseudo terminal before `fd`, one for both streams if they are shown on one: what a rank prints stays in order.
        Where there is none to be had, the terminal itself, which leaves no tail."""
        assert self._terminals is not None
        console = self._consoles[name]
        try:
            terminal = self._terminals.open(fd, console)
        except OSError:
            return os.dup(fd)
        if terminal is None:
            self._newest[local_rank, name] = self._newest[local_rank, STREAMS[0]]
            return os.dup(self._terminals.writer(console))
        self._add_stream(attempt, local_rank, name, files, terminal.reader, is_terminal=True)
        return terminal.writer

    def _open_stream(self, attempt: int, local_rank: int, name: str, files: RankFiles) -> int:
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # over the user's share of pipe memory: 64 KiB do
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(reader, False)
        self._add_stream(attempt, local_rank, name, files, reader)
        return writer

    def _add_stream(
        self, attempt: int, local_rank: int, name: str, files: RankFiles, reader: int, is_terminal: bool = False
    ) -> None:
        stream = RankStream(
            attempt,
            reader,
            files.places[name],
            self._files,
            self._consoles[name],
            files.files[name],
            files.filtered[name],
            is_terminal,
        )
        with self._changed:
            self._streams.add(stream)
            self._newest[local_rank, name] = stream
        self._order(lambda: self._selector.register(reader, selectors.EVENT_READ, stream), 0.0)

    def _of(self, attempt: int) -> list[RankStream]:
        return [stream for stream in self._streams if stream.attempt == attempt]

    def _note(self, text: str) -> None:
        with self._changed:
            self._notes.append(text)
            self._unprinted.append(text)
        os.eventfd_write(self._wake_fd, 1)

    def _order(self, order: Callable[[], object], within_s: float) -> threading.Event:
        """Have the pump's thread do something, and wait for that at most `within_s`; return what is set once it is done."""
        done = threading.Event()

        def perform() -> None:
            order()
            done.set()

        with self._changed:
            self._orders.append(perform)
        os.eventfd_write(self._wake_fd, 1)
        if within_s:
            done.wait(within_s)
        return done

    # ------------------------------------------------------------------------------------------------- the pump's thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._until_next_partial()):
                if key.data is None:
                    os.eventfd_read(self._wake_fd)
                elif not key.data.read(time.monotonic()):
                    self._end(key.data)
            self._perform_orders()
            self._flush_partials()

    def _until_next_partial(self) -> float | None:
        since_s = min((s.partial_since_s for s in list(self._streams) if s.partial_since_s), default=None)
        return None if since_s is None else max(0.0, since_s + PARTIAL_AFTER_S - time.monotonic())

    def _flush_partials(self) -> None:
        due_s = time.monotonic() - PARTIAL_AFTER_S
        for stream in list(self._streams):
            if stream.partial_since_s and stream.partial_since_s <= due_s:
                stream.flush_partial()

    def _perform_orders(self) -> None:
        with self._changed:
            orders, self._orders = self._orders, []
            unprinted, self._unprinted = self._unprinted, []
        for order in orders:
            order()
        for text in unprinted:
            self.say(f"rsup: {text}")

    def _end_all(self, streams: list[RankStream]) -> None:
        for stream in streams:
            self._end(stream)

    def _end(self, stream: RankStream) -> None:
        self._selector.unregister(stream.fd)
        stream.close()
        with self._changed:
            self._streams.discard(stream)
            self._changed.notify_all()
