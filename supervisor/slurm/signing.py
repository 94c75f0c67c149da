"""The supervisor's signing key (Ed25519), and the one line over a snapshot by which a node knows who has made it.

    rsup-snapshot 1 KEY_ID SIGNATURE\\n     KEY_ID: the first 16 hex digits of SHA-256 of the 32 bytes of the public key;
    ...the bytes that are signed            SIGNATURE: base64

The key is made when it is first needed. Supervisors that stand in for one another sign with the same file. It begins with
`PRIVATE_MARK`, so that `rsup slurm install` never takes it for its public part.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rsup.supervisor.places import PlaceError
from rsup.supervisor.secret_file import write_once
from rsup.supervisor.wire import RsupError

KEY_NAME = "signing-key"
MAGIC = b"rsup-snapshot 1 "
PRIVATE_MARK = "rsup-signing-key "
"""Missing in files of before there was one, which are read all the same."""
_KEY_BYTES = 32


class BadSnapshot(RsupError):
    """It is not what the holder of that key has signed; the text says why."""


class SigningKey:
    """`key_id` and `public` (base64 of 32 bytes) are what nodes have."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        raw = self._key.public_key().public_bytes_raw()
        self.public = base64.b64encode(raw).decode()
        self.key_id = key_id(raw)

    def sign(self, content: bytes) -> bytes:
        """`content` below its line."""
        signature = base64.b64encode(self._key.sign(content))
        return b"%s%s %s\n%s" % (MAGIC, self.key_id.encode(), signature, content)


def key_id(public: bytes) -> str:
    """The name of a public key of 32 bytes."""
    return hashlib.sha256(public).hexdigest()[:16]


def load_key(state: Path, file: str = "") -> SigningKey:
    """The key in `file`, else in the state directory; a new one where there is none yet. The public part lies beside it, as
    `NAME.pub`. Raise `PlaceError` for a file that cannot be used: a new key would be one that no node knows."""
    path = Path(file) if file else state / KEY_NAME
    try:
        key = SigningKey(_read(path))
    except FileNotFoundError:
        key = SigningKey(_make(path))
    public = path.with_name(path.name + ".pub")
    with contextlib.suppress(OSError):  # the directory may be somebody else's
        if not public.exists() or public.read_text().strip() != key.public:
            public.write_text(key.public + "\n")
            public.chmod(0o644)
    return key


def verified(data: bytes, public: str) -> bytes:
    """The signed bytes of a snapshot. Raise `BadSnapshot`."""
    try:
        raw = base64.b64decode(public.strip(), validate=True)
        line, newline, content = data.partition(b"\n")
        if not line.startswith(MAGIC) or not newline:
            raise BadSnapshot("it is no snapshot of rsup's, or of another version")
        name, _, signature = line.removeprefix(MAGIC).decode("ascii").partition(" ")
        if name != key_id(raw):
            raise BadSnapshot(f"it is signed by another key ({name[:16]}, not {key_id(raw)})")
        Ed25519PublicKey.from_public_bytes(raw).verify(base64.b64decode(signature, validate=True), content)
    except InvalidSignature:
        raise BadSnapshot("its signature is wrong") from None
    except (binascii.Error, ValueError) as error:
        raise BadSnapshot(f"it is damaged: {error}") from None
    return content


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        secret = base64.b64decode(path.read_text().strip().removeprefix(PRIVATE_MARK), validate=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or "it holds no key"
        raise PlaceError(f"cannot read the signing key {path}: {what}; restore it, or remove it and tell the nodes") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PlaceError(f"the signing key {path} can be read by others; chmod 600 {path}")
    if len(secret) != _KEY_BYTES:
        raise PlaceError(f"the signing key {path} is not {_KEY_BYTES} bytes long; restore it, or remove it and tell the nodes")
    return secret


def _make(path: Path) -> bytes:
    try:
        write_once(path, PRIVATE_MARK + base64.b64encode(os.urandom(_KEY_BYTES)).decode())
    except OSError as error:
        raise PlaceError(f"cannot write the signing key {path}: {error.strerror}; set --signing-key-file") from None
    return _read(path)
