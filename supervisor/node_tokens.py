"""Tokens of nodes: `node.NAME.HEX`, where HEX is HMAC-SHA256 of NAME under the secret in `node-secret` of the state directory.

Nothing has to be stored for a node, and none can make another's. Who holds a node's token may read the gate's snapshot and
report what happened on that node, and nothing else. A new secret (remove the file, restart the supervisor) ends all of them.
Two supervisors that stand by for each other need the same file.
"""

import hashlib
import hmac
import re
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.hardware.hostlist import expand
from rsup.supervisor.places import PlaceError
from rsup.supervisor.secret_file import write_once
from rsup.supervisor.wire import RsupError, UsageError

SECRET_NAME = "node-secret"
PREFIX = "node."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_USAGE = (
    "usage: rsup slurm node-token [--state-dir DIR] NODE...: print the token of each node, one a line, for /etc/rsup/token; "
    "NODE may name several as n[1-40]"
)


def node_token(secret: bytes, node: str) -> str:
    """The token of `node`. Raise `UsageError` for what is no node's name."""
    if not _NAME.fullmatch(node):
        raise UsageError(f"{node!r} is no node name: letters, digits, dots, hyphens and underscores")
    return f"{PREFIX}{node}.{hmac.new(secret, node.encode(), hashlib.sha256).hexdigest()}"


def node_of(secret: bytes, token: str) -> str:
    """The node whose token that is; empty for anything else. Compares in constant time."""
    node, dot, _ = token.removeprefix(PREFIX).rpartition(".")
    if not token.startswith(PREFIX) or not dot or not token.isascii() or not _NAME.fullmatch(node):
        return ""
    return node if hmac.compare_digest(node_token(secret, node), token) else ""


def read_secret(state: Path) -> bytes:
    """The secret of that state directory, empty where none was made. Raise `PlaceError` for one that cannot be used."""
    path = state / SECRET_NAME
    try:
        status = path.stat()
        secret = path.read_bytes().strip()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise PlaceError(f"cannot read the secret of the nodes' tokens {path}: {error.strerror}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PlaceError(f"the secret of the nodes' tokens {path} can be read by others; chmod 600 {path}")
    if len(secret) < 32:
        raise PlaceError(f"the secret of the nodes' tokens {path} is shorter than 32 characters; remove it for a new one")
    return secret


def make_secret(state: Path) -> bytes:
    """The secret of that state directory, made (0600) where there is none; of two makers one wins. Raise `PlaceError`."""
    path = state / SECRET_NAME
    found = read_secret(state)
    if found:
        return found
    try:
        write_once(path, secrets.token_hex(32))
    except OSError as error:
        raise PlaceError(f"cannot write the secret of the nodes' tokens {path}: {error.strerror}") from None
    return read_secret(state)


def main(arguments: Sequence[str]) -> int:
    """`rsup slurm node-token`: for the owner of the supervisor's state directory, on its host."""
    if list(arguments) in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    try:
        print("\n".join(_tokens(list(arguments))))
    except RsupError as error:
        print(f"rsup: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _tokens(words: list[str]) -> list[str]:
    given = None
    if words[:1] == ["--state-dir"] and len(words) > 1:
        given, words = words[1], words[2:]
    if not words or any(word.startswith("-") for word in words):
        raise UsageError(_USAGE)
    state = places.state_dir(given)
    if not state.is_dir():
        raise UsageError(f"there is no supervisor's state directory {state}; name it with --state-dir")
    secret = read_secret(state)
    if not secret:
        raise PlaceError(
            f"no supervisor has made its nodes' secret in {state} (`rsup serve` does at its start): a token from here would be "
            "worth nothing; name the supervisor's state directory with --state-dir or RSUP_STATE_DIR"
        )
    return [node_token(secret, node) for word in words for node in _nodes(word)]


def _nodes(word: str) -> list[str]:
    """What names no list is left for `node_token` to judge."""
    return expand(word) if "[" in word or "," in word else [word]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
