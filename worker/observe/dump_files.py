"""Files of dumps: written aside and renamed, so that one under its name is whole; and whether there is room for them."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil
import torch

_SHARE_OF_MEMORY = 0.5
"""Of the host memory that is available, what a dump may take before it is written."""


def write_dump(path: Path, content: dict[str, Any]) -> int:
    """Write `content` (nested dicts of CPU tensors and plain values) for `torch.load`; its size in bytes. Raise `OSError`.

    What a killed process leaves of one that it was writing is overwritten by the next dump.
    """
    aside = path.parents[1] / f"{path.name}.unfinished"
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("wb") as file:
            _save(content, _NotingFile(file))
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        path.parent.mkdir(exist_ok=True)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return size_bytes


class _NotingFile:
    """A file that is written to; it keeps the error, which torch does not."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(content: dict[str, Any], file: _NotingFile) -> None:
    try:
        torch.save(content, cast(BinaryIO, file))
    except RuntimeError as error:  # torch tells of a disk that is full in words of its own
        raise file.error or OSError(0, str(error).splitlines()[0]) from None


def append_lines(path: Path, lines: list[str]) -> None:
    """Append whole lines, in one piece. Raise `OSError`. A line that a killed process has not finished is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, end)
        if whole < end:
            file.truncate(whole)
        file.write("".join(f"{line}\n" for line in lines).encode())


def _end_of_last_line(file: Any, end: int) -> int:
    """Where the last line that is whole ends. `end`: of the file."""
    position = end
    while position > 0:
        first = max(0, position - 4096)
        file.seek(first)
        found = file.read(position - first).rfind(b"\n")
        if found >= 0:
            return int(first + found + 1)
        position = first
    return 0


def free_disk_bytes(folder: Path) -> int:
    """What is free where `folder` is, or will be. Raise `OSError`."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return shutil.disk_usage(existing).free


def memory_for_dumps_bytes() -> int:
    """Host memory that a dump may take: of what the machine and this process's cgroups have left."""
    own = ""
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text()
    return int(min([psutil.virtual_memory().available, *left_in_cgroups(own, Path("/sys/fs/cgroup"))]) * _SHARE_OF_MEMORY)


def left_in_cgroups(own: str, root: Path) -> Iterator[int]:
    """What each limit of memory leaves, in cgroups of version 2. `own`: as in /proc/self/cgroup; `root`: where they lie."""
    path = next((line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")), "")
    folder = root / path
    while root in folder.parents:
        with contextlib.suppress(OSError, ValueError):  # without a limit it says "max"
            limit_bytes = int((folder / "memory.max").read_text())
            used_bytes = int((folder / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            yield max(0, limit_bytes - used_bytes + (int(cached[1]) if cached else 0))
        folder = folder.parent
