"""Small things a daemon needs of its host: a lock, a key, a log, a word to systemd."""

import contextlib
import fcntl
import logging
import logging.handlers
import os
import resource
import secrets
import socket
import sys
import time
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.secret_file import write_once

MAX_LOG_BYTES = 5 * 1024 * 1024


def lock_alone(path: Path, *, within_s: float = 0.0) -> int | None:
    """Lock `path` for this process's life; the descriptor, or None while another process holds it after `within_s`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
        time.sleep(0.02)


def make_key(state: Path) -> None:
    """Write a new random secret to `key` in the state directory, unless there is one. Raise `PlaceError`."""
    path = state / "key"
    if path.exists():
        return
    try:
        write_once(path, secrets.token_hex(32))
    except OSError as error:
        raise places.PlaceError(f"cannot write the key file {path}: {error.strerror}; give one with --key-file") from None


def write_public_key(state: Path, key: places.LinkKey) -> None:
    """Leave `key.pub` in the state directory, for `/etc/rsup/key.pub` of the nodes; what fails costs nobody anything."""
    path, line = state / "key.pub", places.public_key_line(key)
    with contextlib.suppress(OSError):
        if path.exists() and path.read_text() == line:
            return
        temporary = state / f".key.pub.{os.getpid()}"
        temporary.write_text(line)
        temporary.chmod(0o644)
        temporary.replace(path)


def log_to(folders: list[Path], *, debug: bool) -> None:
    """Log into `supervisor.log` of the first folder that has room for it, rotated at `MAX_LOG_BYTES`; else to stderr."""
    handler: logging.Handler | None = None
    for folder in folders:
        try:
            if not os.statvfs(folder).f_bavail:
                continue
            handler = _QuietFile(folder / "supervisor.log", maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
            break
        except OSError:
            continue
    log_with(handler or logging.StreamHandler(sys.stderr), debug=debug)


def log_with(handler: logging.Handler, *, debug: bool) -> None:
    """Send all log lines to `handler`."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for noisy in ("uvicorn.error", "asyncio", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _QuietFile(logging.handlers.RotatingFileHandler):
    """A full disk must cost log lines only: no traceback on stderr for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: each agent is a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))


def tell_systemd(state: str) -> None:
    """Send `state` (`READY=1`, `STOPPING=1`) where systemd asked for it; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
