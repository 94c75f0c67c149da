"""The file of a local checkpoint: one rank's part of one save, checkable on its own. No torch.

    8 bytes magic, 8 bytes length of the header (little endian), the header (JSON), the tensors' bytes, each at a multiple of
    64, 32 bytes SHA-256 of all before

Files are not synced: a process's death costs nothing of them, and what a node's crash tears apart fails its size or digest.
"""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rsup.worker.checkpoint_directory import Damaged

FORMAT = 1
ALIGNMENT = 64
DIGEST_BYTES = 32
CHUNK_BYTES = 4 << 20
_MAGIC = b"RSUPLOC\n"
_PREAMBLE = struct.Struct("<8sQ")
_MOST_HEADER_BYTES = 1 << 28


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a part: where its bytes are, counted from the end of the header. `shared`: every rank has it, one keeps
    it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    shared: bool = False


@dataclass(frozen=True)
class PartHeader:
    """What a part says of itself. `token` is one random value a run of the job: parts with equal `save_id` are of one save.

    `progress` is the trainer's own JSON; `digest` is not in it: it is the file's last 32 bytes.
    """

    job_key: str
    attempt: int
    iteration: int
    token: str
    rank: int
    world_size: int
    saved_us: int
    progress: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    @property
    def payload_bytes(self) -> int:
        """Length of what lies between header and digest."""
        return max((_aligned(entry.offset + entry.size_bytes) for entry in self.tensors), default=0)


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...], int, bool]]) -> tuple[TensorEntry, ...]:
    """Give (name, dtype, shape, size in bytes, shared) their places, one after the other."""
    entries, offset = [], 0
    for name, dtype, shape, size_bytes, shared in tensors:
        entries.append(TensorEntry(name, dtype, shape, offset, size_bytes, shared))
        offset = _aligned(offset + size_bytes)
    return tuple(entries)


def part_bytes(header: PartHeader) -> int:
    """Size of the whole file."""
    return _PREAMBLE.size + len(_encode(header)) + header.payload_bytes + DIGEST_BYTES


def write_part(path: Path, header: PartHeader, buffers: Sequence[memoryview]) -> None:
    """Write a part to `path`; `buffers` are the bytes of its tensors, in the header's order. Raises `OSError`; the caller
    removes what was written then."""
    encoded = _encode(header)
    digest = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
        _put(file.fileno(), _PREAMBLE.pack(_MAGIC, len(encoded)) + encoded, digest)
        for entry, buffer in zip(header.tensors, buffers, strict=True):
            assert len(buffer) == entry.size_bytes
            _put(file.fileno(), buffer, digest)
            padding = _aligned(entry.offset + entry.size_bytes) - entry.offset - entry.size_bytes
            _put(file.fileno(), bytes(padding), digest)
        _put(file.fileno(), digest.digest(), None)


def _put(fd: int, data: bytes | memoryview, digest: Any) -> None:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        if digest is not None:
            digest.update(chunk)
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]


def read_header(path: Path) -> PartHeader:
    """The header of a part whose size is right; raise `Damaged` otherwise. The content is not checked (see `read_part`)."""
    try:
        with path.open("rb") as file:
            preamble = file.read(_PREAMBLE.size)
            length = _header_length(preamble)
            encoded = file.read(length)
            found_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path.name} is cut short or garbled") from None
    return _decode(path.name, encoded, length, found_bytes)


def read_part(path: Path) -> tuple[PartHeader, memoryview]:
    """Header and tensor bytes of a part that is whole; raise `Damaged` otherwise."""
    read_header(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    return parse_part(path.name, memoryview(content))


def parse_part(name: str, content: memoryview) -> tuple[PartHeader, memoryview]:
    """As `read_part`, of a file's content; `name` is for the error's text."""
    try:
        length = _header_length(bytes(content[: _PREAMBLE.size]))
    except ValueError:
        raise Damaged(f"{name} is cut short or garbled") from None
    start = _PREAMBLE.size + length
    header = _decode(name, bytes(content[_PREAMBLE.size : start]), length, len(content))
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise Damaged(f"{name} does not match its digest")
    return header, content[start : start + header.payload_bytes]


def _header_length(preamble: bytes) -> int:
    if len(preamble) != _PREAMBLE.size:
        raise ValueError("too short")
    magic, length = _PREAMBLE.unpack(preamble)
    if magic != _MAGIC or length > _MOST_HEADER_BYTES:
        raise ValueError("no part of a local checkpoint")
    return int(length)


def _encode(header: PartHeader) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(header)}, separators=(",", ":")).encode()


def _decode(name: str, encoded: bytes, length: int, found_bytes: int) -> PartHeader:
    try:
        body = json.loads(encoded)
        if body.pop("format") != FORMAT:
            raise Damaged(f"{name} has another format than this release reads ({FORMAT})")
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in body.pop("tensors"))
        header = PartHeader(**body, tensors=entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{name} is cut short or garbled") from None
    wanted_bytes = _PREAMBLE.size + length + header.payload_bytes + DIGEST_BYTES
    if found_bytes != wanted_bytes:
        raise Damaged(f"{name} has {found_bytes} bytes instead of {wanted_bytes}")
    return header


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
