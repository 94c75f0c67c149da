"""Who asks, and what they may see and do (DESIGN.md section 12).

Two files in the state directory name principals. `token` (0600) holds the secret of the owner, who is operator of an
embedded supervisor. `tokens.toml`, for a shared one, names others; it holds only hashes:

    [[token]]
    name = "ann"
    role = "user"
    sha256 = "9f86d08..."        # printf %s "$TOKEN" | sha256sum

Tokens are long random strings, so a plain SHA-256 is enough. A node's token is made of its name and the secret in the file
`node-secret` (`node_tokens`). A supervisor reads these files at its start, and anew when they have changed (`WatchedTokens`).
"""

import contextlib
import getpass
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from rsup.supervisor import node_tokens
from rsup.supervisor.places import PlaceError
from rsup.supervisor.secret_file import write_once
from rsup.supervisor.wire import RsupError, UsageError

MIN_TOKEN_CHARS = 16
LOOK_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Role(IntEnum):
    """Each role may do what the ones before it may."""

    NODE = 0
    """A node's root: reads the gate's snapshot, and reports for its own node."""
    VIEWER = 1
    """Devices, nodes, and of a job its id, owner and state."""
    USER = 2
    """Also everything of one's own jobs."""
    OPERATOR = 3
    """Everything."""


@dataclass(frozen=True)
class Principal:
    """Who asks. `name` is a user name of the cluster: the one that owns jobs; `node` the one that a node speaks for."""

    name: str
    role: Role
    node: str = ""

    def may_read(self, owner: str) -> bool:
        """Whether this principal may see everything of a job of `owner`, and stop it."""
        return self.role is Role.OPERATOR or (self.role is Role.USER and self.name == owner)

    def may_report_for(self, node: str) -> bool:
        """Whether this principal may say what happened on `node`: the node itself, and operators."""
        return self.role is Role.OPERATOR or (self.role is Role.NODE and bool(node) and self.node == node)

    def __str__(self) -> str:
        if self.role is Role.NODE:
            return f"node {self.node}"
        return f"{self.name} ({self.role.name.lower()})"


@dataclass(frozen=True)
class TokenBook:
    """The known tokens, as (SHA-256 of the token, whose it is); with `node_secret`, those of the nodes too."""

    entries: Sequence[tuple[bytes, Principal]]
    node_secret: bytes = b""

    def find(self, token: str) -> Principal | None:
        """Whose token that is, None for an unknown one. Compares with every entry in constant time."""
        node = node_tokens.node_of(self.node_secret, token) if self.node_secret else ""
        if node:
            return Principal(f"node:{node}", Role.NODE, node)
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, principal in self.entries:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


class WatchedTokens:
    """The token book of a state directory, read anew when its files have changed: a token that somebody takes out of
    `tokens.toml` counts no more, without a restart. Files that are wrong then change nothing, which is logged."""

    def __init__(self, state: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise as `read_tokens`."""
        self._state = state
        self._clock = clock
        self._seen = self._look()
        self._looked_s = clock()
        self._book = read_tokens(state)

    def find(self, token: str) -> Principal | None:
        """As `TokenBook.find`. From any thread."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._read_if_changed()
        return self._book.find(token)

    def _read_if_changed(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._book = read_tokens(self._state)
        except RsupError as error:
            _log.error("%s; tokens stay as they were", error)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_version_of(self._state / name) for name in ("token", "tokens.toml", node_tokens.SECRET_NAME)]


Tokens = TokenBook | WatchedTokens


def _version_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def owner_name() -> str:
    """The name of this user, as jobs carry it; `uid-N` where the system knows none."""
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return f"uid-{os.getuid()}"


def read_tokens(state: Path) -> TokenBook:
    """The tokens of a state directory. Raise `PlaceError` or `UsageError` where a file is unreadable or wrong."""
    entries: list[tuple[bytes, Principal]] = []
    if (state / "token").exists():
        token = read_token_file(state / "token")
        entries.append((hashlib.sha256(token.encode()).digest(), Principal(owner_name(), Role.OPERATOR)))
    if (state / "tokens.toml").exists():
        entries += _read_toml(state / "tokens.toml")
    return TokenBook(tuple(entries), node_tokens.read_secret(state))


def make_token(state: Path) -> str:
    """The owner's token: the one in the state directory, else a new one, written with mode 0600."""
    path = state / "token"
    with contextlib.suppress(FileNotFoundError):
        return read_token_file(path)
    try:
        write_once(path, secrets.token_urlsafe(32))
    except OSError as error:
        raise PlaceError(f"cannot write the token file {path}: {error.strerror}; choose another --state-dir") from None
    return read_token_file(path)


def read_token_file(path: Path) -> str:
    """The token in that file. Raise `FileNotFoundError`, or `PlaceError` where others can read it or it is too short."""
    try:
        status = path.stat()
        token = path.read_text().strip()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise PlaceError(f"cannot read the token file {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PlaceError(f"the token file {path} can be read by others; chmod 600 {path}")
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        raise PlaceError(f"the token file {path} holds no token of {MIN_TOKEN_CHARS} ASCII characters or more; remove it")
    return token


def _read_toml(path: Path) -> list[tuple[bytes, Principal]]:
    try:
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PlaceError(f"the token list {path} can be written by others; chmod go-w {path}")
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise PlaceError(f"cannot read the token list {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the token list {path} is no TOML: {error}") from None
    rows = content.get("token", [])
    if not isinstance(rows, list) or set(content) - {"token"}:
        raise UsageError(f"the token list {path} may hold only [[token]] tables")
    entries = [_toml_entry(path, number, row) for number, row in enumerate(rows, 1)]
    first = {digest: number for number, (digest, _) in reversed(list(enumerate(entries, 1)))}
    for number, (digest, _) in enumerate(entries, 1):
        if first[digest] != number:
            raise UsageError(
                f"entry {number} of the token list {path} has the sha256 of entry {first[digest]}: a token is one's own"
            )
    return entries


def _toml_entry(path: Path, number: int, row: object) -> tuple[bytes, Principal]:
    where = f"entry {number} of the token list {path}"
    if not isinstance(row, dict) or set(row) != {"name", "role", "sha256"} or not all(isinstance(v, str) for v in row.values()):
        raise UsageError(f"{where} must have the texts name, role and sha256, and nothing else")
    roles = {role.name.lower(): role for role in Role if role is not Role.NODE}  # theirs are made of `node-secret`
    if row["role"] not in roles:
        raise UsageError(f"{where} has the role {row['role']!r}; the roles are {', '.join(roles)}")
    try:
        digest = bytes.fromhex(row["sha256"])
    except ValueError:
        digest = b""
    if len(digest) != 32 or not row["name"]:
        raise UsageError(f"{where} needs a name and a sha256 of 64 hexadecimal digits")
    return digest, Principal(row["name"], roles[row["role"]])
