"""What may be lost to Weights & Biases when this process is killed: a copy of the newest rows, beside the checkpoints.

The process that wandb starts beside us writes its file by blocks of 32 KB, sends now and then, and dies with us; and rows wait
here while wandb is being opened. So each row is first appended to a small file. A run that goes on sends those of iterations
that it does not compute again, before anything new: the server keeps what it knows already.
"""

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from rsup.worker.checkpoint_directory import write_durably
from rsup.worker.observe.contract import CLOSE_WITHIN_S, Point
from rsup.worker.observe.writers.background import BackgroundWriter, Row, Sink

JOURNAL_FILE = "wandb-newest.jsonl"
MAX_ROWS = 4096
"""That are kept when the file has twice as many: far more than 32 KB, and than 15 s of steps give."""
_one_at_a_time = threading.Lock()
"""After an in-process restart the old one may still be ending."""


class Journal:
    """The file. `project`: rows of another one are no business of this run. `resumed_at`: rows behind it come again.

    `open` and then `append` by one thread; `kept` and `forget` by any.
    """

    def __init__(self, folder: Path, project: str, resumed_at: int) -> None:
        self._path = folder / JOURNAL_FILE
        self._head = json.dumps({"project": project, "writer": secrets.token_hex(8)})
        self._project = project
        self._resumed_at = resumed_at
        self._file: IO[str] | None = None
        self._lines: list[str] = []
        """Those of the file."""

    def open(self) -> list[Row]:
        """Take over the file of the attempt before this one; the rows that are to be sent again. Raise `OSError`."""
        with _one_at_a_time:
            kept = [line for line in self._read() if _row(line).iteration <= self._resumed_at]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(kept)
        return [_row(line) for line in kept]

    def append(self, rows: Sequence[Row]) -> None:
        """Hand it to the operating system, which keeps it when this process is killed. Raise `OSError`."""
        assert self._file is not None, "it is opened first"
        added = [_line(row) for row in rows]
        self._lines += added
        if len(self._lines) > 2 * MAX_ROWS:
            with _one_at_a_time:
                if self._is_mine():
                    self._begin(self._lines)
                    return
        self._file.write("".join(f"{line}\n" for line in added))
        self._file.flush()

    def close(self, is_complete: bool) -> None:
        """`is_complete`: Weights & Biases has all of it. May be repeated."""
        if self._file is not None:
            self._file.close()
        with _one_at_a_time:
            if is_complete and self._is_mine():
                self._path.unlink(missing_ok=True)

    def _begin(self, lines: list[str]) -> None:
        if self._file is not None:
            self._file.close()
        self._lines = lines[-MAX_ROWS:]
        write_durably(self._path, "".join(f"{line}\n" for line in (self._head, *self._lines)))
        self._file = self._path.open("a")

    def _is_mine(self) -> bool:
        try:
            with self._path.open() as file:
                return file.readline().rstrip("\n") == self._head
        except OSError:
            return False

    def _read(self) -> list[str]:
        """The whole lines behind the head."""
        try:
            head, *lines = self._path.read_text(errors="replace").split("\n")
            is_ours = json.loads(head).get("project") == self._project
        except (OSError, ValueError, AttributeError):
            return []
        return [line for line in lines[:-1] if _is_whole(line)] if is_ours else []


class JournaledRun:
    """A sink in front of that of Weights & Biases, which has a thread of its own: that one may be opening for a minute, or
    stand still. What was flushed here outlives this process."""

    def __init__(self, name: str, journal: Journal, run: Sink) -> None:
        self._name = name
        self._journal: Journal | None = journal
        self._run = run
        self._writer: BackgroundWriter | None = None

    def open(self, remark: Callable[[str], None]) -> None:
        """Take over the journal, and send what is in it."""
        self._writer = BackgroundWriter(self._name, self._run, remark, waits_at_flush=False)
        assert self._journal is not None
        try:
            rows = self._journal.open()
        except OSError as error:
            self._journal = None
            remark(f"{self._name}: what is newest is lost there should this process be killed: no copy is kept: {error}")
            return
        self._send(rows)

    def put(self, rows: Sequence[Row]) -> None:
        """Keep them, and pass them on."""
        if self._journal is not None:
            try:
                self._journal.append(rows)
            except OSError:  # a full disk; the run itself may well go on
                self._journal = None
        self._send(rows)

    def _send(self, rows: Sequence[Row]) -> None:
        assert self._writer is not None
        for row in rows:
            self._writer.write(row.iteration, row.consumed_samples, row.points, at_s=row.at_s)

    def flush(self) -> None:
        """All is in the journal."""

    def close(self) -> None:
        """End the run; the journal is needed no more where it has ended in order."""
        if self._writer is not None:
            self._writer.close(CLOSE_WITHIN_S - 2)  # before whoever waits for this thread gives up
        if self._journal is not None:
            self._journal.close(self._writer is not None and self._writer.has_all)


def _line(row: Row) -> str:
    return json.dumps([row.iteration, row.consumed_samples, row.at_s, [[point.key, point.value] for point in row.points]])


def _row(line: str) -> Row:
    iteration, consumed_samples, at_s, points = json.loads(line)
    return Row(iteration, consumed_samples, at_s, [Point(key, value) for key, value in points])


def _is_whole(line: str) -> bool:
    try:
        _row(line)
    except (ValueError, TypeError):
        return False
    return True
