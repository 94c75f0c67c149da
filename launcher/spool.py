"""The agent's facts that no supervisor has acknowledged yet: in memory, and in a file that survives the agent.

A fact gets its sequence number here (1, 2, ... without gaps) and stays until the supervisor has committed it. The file is in
the runtime directory (local, lost with the host, as the ranks are): when the agent dies by SIGKILL its keeper opens the same
file and finishes the delivery. Nothing is fsynced, since only the death of a process has to be survived.

File: records of a 4-byte little-endian length and msgpack of `[sequence, fact]`. A fact of nil says that everything up to
that sequence had been acknowledged when the file was emptied. A truncated last record is cut off on opening.

A full disk costs nothing but the file: facts stay in memory and are written when there is room. With the supervisor away for
long, memory and file have bounds; beyond them only facts that decide something are kept, the others are counted as lost.
"""

import os
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rsup.supervisor import wire
from rsup.supervisor.wire import AnyFact

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, AnyFact | None])
_TELLING_ONLY = (wire.SectionsObserved, wire.Note, wire.DeviceUsed, wire.MetricsReported, wire.StragglersReported)
"""Facts that no decision waits for: the first to be lost when there is no room."""
_TRUNCATE_FROM_BYTES = 64 * 1024


def _encode(sequence: int, fact: AnyFact | None) -> bytes:
    return _encoder.encode((sequence, fact))


@dataclass(slots=True)
class _Entry:
    sequence: int
    size_bytes: int
    fact: AnyFact | None
    """None: only in the file."""
    offset: int | None
    """Where its payload is in the file, None: not written yet. Those without one are always the newest."""


class Spool:
    """Unacknowledged facts, oldest first. One owner at a time: the agent, after its death the keeper.

    `path` None keeps them in memory only. Opening an existing file takes up what is in it.
    """

    def __init__(
        self, path: Path | None, *, memory_limit_bytes: int = 16 * 1024 * 1024, file_limit_bytes: int = 128 * 1024 * 1024
    ) -> None:
        self._entries: deque[_Entry] = deque()
        self._memory_limit_bytes = memory_limit_bytes
        self._file_limit_bytes = file_limit_bytes
        self._in_memory_bytes = 0
        self._file_bytes = 0
        self._fd = -1
        self.acked = 0
        """The last fact that the supervisor has committed."""
        self.last = 0
        """The last sequence number given out."""
        self.shift = 0
        """By how much `rebase` has moved the numbers of facts, in all."""
        self.num_lost = 0
        self.file_error = ""
        """Why the file cannot be written now; empty when it can."""
        self.path = path
        if path is not None:
            self._open(path)

    def append(self, fact: AnyFact) -> int:
        """Keep `fact`; return its sequence number (that of the last fact, if there was no room and `fact` decides nothing)."""
        record = _encode(self.last + 1, fact)
        if len(record) > wire.MAX_MESSAGE_BYTES // 2:
            text = f"{type(fact).__name__} of {len(record)} bytes was too large to send"
            fact = wire.Note(fact.at_us, "error", text)
            record = _encode(self.last + 1, fact)
        if isinstance(fact, _TELLING_ONLY) and not self._has_room(len(record)):
            self.num_lost += 1
            return self.last
        self.last += 1
        self._entries.append(_Entry(self.last, len(record), fact, None))
        self._in_memory_bytes += len(record)
        self._write_missing()
        return self.last

    def acknowledge(self, sequence: int) -> None:
        """Forget everything up to `sequence`. Lower than before or never given out: nothing happens."""
        if not self.acked < sequence <= self.last:
            return
        self.acked = sequence
        while self._entries and self._entries[0].sequence <= sequence:
            entry = self._entries.popleft()
            if entry.fact is not None:
                self._in_memory_bytes -= entry.size_bytes
        if not self._entries and self._file_bytes > _TRUNCATE_FROM_BYTES:
            self._rewrite()

    def pending(
        self, after: int = 0, *, max_facts: int | None = None, max_bytes: int | None = None
    ) -> list[tuple[int, AnyFact]]:
        """Unacknowledged facts with a sequence above `after`, oldest first; at least one, where there is one."""
        found: list[tuple[int, AnyFact]] = []
        size_bytes = 0
        start = max(0, after - self._entries[0].sequence + 1) if self._entries else 0
        for index in range(start, len(self._entries)):
            entry = self._entries[index]
            size_bytes += entry.size_bytes
            if found and ((max_facts and len(found) >= max_facts) or (max_bytes and size_bytes > max_bytes)):
                break
            fact = entry.fact if entry.fact is not None else self._read(entry)
            found.append((entry.sequence, fact))
        return found

    def rebase(self, acked: int) -> None:
        """Number what is pending from `acked + 1` on: the supervisor knows another history of this agent than we do.

        That is so when it starts with a store of its own, or when this spool could not be read after the agent's death.
        """
        facts = [fact for _, fact in self.pending()]
        self.shift += acked - (self.last - len(self._entries))
        self._entries.clear()
        self.acked = self.last = acked
        self._in_memory_bytes = 0
        for fact in facts:
            self.last += 1
            size_bytes = len(_encode(self.last, fact))
            self._entries.append(_Entry(self.last, size_bytes, fact, None))
            self._in_memory_bytes += size_bytes
        self._rewrite()

    def close(self, *, remove: bool = False) -> None:
        """Close the file; with `remove` delete it (everything is delivered, or nobody wants it)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def is_on_disk(self) -> bool:
        """Whether every unacknowledged fact is in the file, and so outlives this process."""
        return self._file_usable() and all(entry.offset is not None for entry in list(self._entries)[-1:])

    def __len__(self) -> int:
        return len(self._entries)

    def _has_room(self, size_bytes: int) -> bool:
        if self._file_usable() and not self.file_error:
            return self._file_bytes + size_bytes <= self._file_limit_bytes
        return self._in_memory_bytes + size_bytes <= self._memory_limit_bytes

    def _file_usable(self) -> bool:
        return self._fd >= 0

    def _open(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            data = Path(path).read_bytes()
        except OSError as error:
            self.file_error = f"cannot use the spool {path}: {error.strerror}"
            return
        self._file_bytes = self._load(data)
        if self._file_bytes < len(data):
            os.ftruncate(self._fd, self._file_bytes)

    def _load(self, data: bytes) -> int:
        """Take up the records of `data`; return the length of the sound part."""
        position = 0
        while position + _LENGTH.size <= len(data):
            (size_bytes,) = _LENGTH.unpack_from(data, position)
            payload = data[position + _LENGTH.size : position + _LENGTH.size + size_bytes]
            if len(payload) < size_bytes:
                break
            try:
                sequence, fact = _decoder.decode(payload)
            except msgspec.DecodeError:
                break
            if fact is None:
                self.acked = sequence
                self._entries.clear()
            else:
                self._entries.append(_Entry(sequence, size_bytes, None, position + _LENGTH.size))
            self.last = sequence
            position += _LENGTH.size + size_bytes
        if self._entries:
            self.acked = max(self.acked, self._entries[0].sequence - 1)
        return position

    def _read(self, entry: _Entry) -> AnyFact:
        assert entry.offset is not None
        sequence, fact = _decoder.decode(os.pread(self._fd, entry.size_bytes, entry.offset))
        assert sequence == entry.sequence and fact is not None
        return fact

    def _rewrite(self) -> None:
        """Empty the file and write what is pending. Every pending fact must be in memory."""
        if not self._file_usable():
            return
        os.ftruncate(self._fd, 0)
        self._file_bytes = 0
        self._write(_encode(self.acked, None))
        self._write_missing()

    def _write_missing(self) -> None:
        """Write the facts that are not in the file yet, and drop from memory what it need not hold."""
        if not self._file_usable():
            return
        missing: list[_Entry] = []
        for entry in reversed(self._entries):
            if entry.offset is not None:
                break
            missing.append(entry)
        for entry in reversed(missing):
            assert entry.fact is not None
            offset = self._write(_encode(entry.sequence, entry.fact))
            if offset is None:
                return
            entry.offset = offset
            if self._in_memory_bytes > self._memory_limit_bytes:
                entry.fact = None
                self._in_memory_bytes -= entry.size_bytes

    def _write(self, payload: bytes) -> int | None:
        """Append one record; return the offset of its payload, None if there was no room for it."""
        record = _LENGTH.pack(len(payload)) + payload
        try:
            written = os.pwrite(self._fd, record, self._file_bytes)
        except OSError as error:
            self.file_error = f"cannot write the spool {self.path}: {error.strerror}"
            return None
        if written < len(record):
            self.file_error = f"cannot write the spool {self.path}: no space left"
            os.ftruncate(self._fd, self._file_bytes)
            return None
        self.file_error = ""
        offset = self._file_bytes + _LENGTH.size
        self._file_bytes += len(record)
        return offset
