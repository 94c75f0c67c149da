"""Writes a file that others may be reading: whole or not at all."""

import os
import secrets
import stat
from pathlib import Path

from rsup.supervisor.query_source import QueryError


def write_whole(path: Path, content: str) -> None:
    """Put `content` at `path` in UTF-8: written aside, then renamed over what is there. What is no file (a pipe, a terminal) is
    written to as it is. Raise `QueryError`, in one line, where that cannot be."""
    try:
        if _is_special(path):
            with open(path, "w", encoding="utf-8") as there:
                there.write(content)
            return
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        _replace(path, content)
    except OSError as error:
        why = error.strerror or error
        raise QueryError(
            f"the page cannot be written to {path}: {why}; choose another place with --output FILE, or --text"
        ) from None


def _is_special(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _replace(path: Path, content: str) -> None:
    target = path.resolve()  # through a link the file is meant that it leads to
    aside = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
