"""A file of records as TensorBoard reads it (TFRecord): length, its checksum, data, its checksum; all little-endian.

The checksum is CRC-32C. TensorBoard's own package has it byte by byte in Python, which would be most of what a step costs to
write, with the interpreter's lock held while training launches kernels. It is linear, so here each byte's part, which depends
on its value and its distance from the end, comes from a table, and numpy adds them up.
"""

import struct
from typing import IO

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reflected (RFC 3720, appendix B.4)."""
_MASK_DELTA = 0xA282EAD8
_Table = npt.NDArray[np.uint32]


def _last_byte() -> _Table:
    """The part of a last byte, by its value."""
    parts = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        parts = np.where(parts & 1, (parts >> 1) ^ np.uint32(_POLYNOMIAL), parts >> 1).astype(np.uint32)
    return parts


_parts: _Table = _last_byte()[np.newaxis]
"""Of a byte, by how many come behind it and by its value; it grows with the longest record."""


def _parts_for(length: int) -> _Table:
    global _parts
    if length > len(_parts):
        rows = [*_parts]
        while len(rows) < max(length, 512):
            rows.append(rows[0][rows[-1] & 255] ^ (rows[-1] >> 8))
        _parts = np.stack(rows)
    return _parts


def crc32c(data: bytes) -> int:
    """CRC-32C of at least four bytes."""
    octets = np.frombuffer(data, dtype=np.uint8).copy()
    octets[:4] ^= 255  # the register begins with all ones
    behind = np.arange(len(octets) - 1, -1, -1)
    return int(np.bitwise_xor.reduce(_parts_for(len(octets))[behind, octets])) ^ 0xFFFFFFFF


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
