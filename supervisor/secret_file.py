"""Secrets that a supervisor makes for itself at first need: of several that start at once one wins, and all read its file."""

import os
import secrets
from pathlib import Path


def write_once(path: Path, text: str) -> None:
    """Write `text` and a newline to `path` with mode 0600, unless it is there by then; whole or not at all. Raise OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        os.replace(temporary, path)
