"""A file of records as TensorBoard reads it (TFRecord): length, its checksum, data, its checksum; all little-endian.

The checksum is CRC-32C. TensorBoard's own package has it byte by byte in Python, which would be most of what a step costs to
write, with the interpreter's lock held while training launches kernels. It is linear, so here each byte's part, which depends
on its value and its distance from the end, comes from a table, and numpy adds them up, 512 bytes at a time.
"""

import struct
from typing import IO

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reflected (RFC 3720, appendix B.4)."""
_MASK_DELTA = 0xA282EAD8
_Table = npt.NDArray[np.uint32]
_Octets = npt.NDArray[np.uint8]


def _last_byte() -> _Table:
    """The part of a last byte, by its value."""
    parts = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        parts = np.where(parts & 1, (parts >> 1) ^ np.uint32(_POLYNOMIAL), parts >> 1).astype(np.uint32)
    return parts


_CHUNK = 512


def _parts_of_chunk() -> _Table:
    rows = [_last_byte()]
    while len(rows) < _CHUNK:
        rows.append(np.asarray(rows[0][rows[-1] & 255] ^ (rows[-1] >> 8), dtype=np.uint32))
    return np.stack(rows)


_PARTS = _parts_of_chunk()
"""Of a byte, by how many come behind it in its chunk and by its value."""


def _register(octets: _Octets) -> int:
    """Of a chunk, or less, behind a register of zeros."""
    return int(np.bitwise_xor.reduce(_PARTS[np.arange(len(octets) - 1, -1, -1), octets]))


def crc32c(data: bytes) -> int:
    """CRC-32C of at least four bytes."""
    octets = np.frombuffer(data, dtype=np.uint8).copy()
    octets[:4] ^= 255  # the register begins with all ones
    if len(octets) <= _CHUNK:
        return _register(octets) ^ 0xFFFFFFFF
    register = 0
    in_front = np.zeros(-len(octets) % _CHUNK, dtype=np.uint8)  # zeros before the first byte change nothing
    for chunk in np.concatenate([in_front, octets]).reshape(-1, _CHUNK):
        chunk[:4] ^= np.frombuffer(register.to_bytes(4, "little"), dtype=np.uint8)  # what came before goes on in the next
        register = _register(chunk)
    return register ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """As the format has it: a checksum of data that holds checksums would be weak."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


class RecordFile:
    """Appends records to an open file, and owns it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        """Append a record."""
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join((length, struct.pack("<I", _masked(length)), data, struct.pack("<I", _masked(data)))))

    def flush(self) -> None:
        """Hand to the operating system what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
