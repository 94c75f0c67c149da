"""The heartbeat board: shared memory that ranks write and their agent reads. Needs only the standard library.

One file per agent, a fixed slot per local rank. Every field is one aligned 8-byte word, written by one thread; times are
CLOCK_MONOTONIC nanoseconds, 0 meaning never. A rank never waits for a reader, and a stopped reader never stalls a rank.

    file    header (16 words) | slot 0 | slot 1 | ...
    header  magic, layout version, number of slots, pid of the agent, its start time, its pid namespace (0: unknown), zeros
    slot    head (16 words) | section 0 | section 1 | ...          (`NUM_SECTIONS` sections)
    section name (32 bytes, UTF-8, zero-padded) | open since | times entered | total ns | longest ns

A section's `times entered` is its sequence word: it changes with every entry, so a reader that finds it unchanged before
and after has a consistent `open since`. A slot's `SEQUENCE` grows when another process takes the slot over (odd while it
is being cleared).
"""

import contextlib
import hashlib
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LAYOUT_VERSION = 1
MAGIC = 0x0044_5242_5055_5352  # "RSUPBRD\0", little-endian
HEADER_WORDS = 16
NUM_SECTIONS = 24
NAME_BYTES = 32
NAME_WORDS = NAME_BYTES // 8
HEAD_WORDS = 16
SECTION_WORDS = NAME_WORDS + 4
SLOT_WORDS = HEAD_WORDS + NUM_SECTIONS * SECTION_WORDS

# words of a slot's head
(
    SEQUENCE,
    PID,
    ATTEMPT,
    LIVENESS_NS,  # by the beat thread: the process runs
    MAIN_NS,  # by the training thread: it made a call of rsup.worker
    ITERATION,
    PHASE,
    NUM_NAMED,
    CLOSED_SINCE_NS,  # when the last open section closed: out-of-section time runs from here
    FLAGS,
    TRAIN_STEPS,  # steps done by this process, evaluation apart
    EVAL_STEPS,
    CHECKPOINTS,
    HEARTBEATS,  # explicit heartbeats of the script
    HEARTBEAT_NS,
    CALLS,  # 0 until the first call of rsup.worker
) = range(HEAD_WORDS)

# words of a section, after its name
OPEN_SINCE_NS, ENTERED, TOTAL_NS, LONGEST_NS = range(NAME_WORDS, NAME_WORDS + 4)

PHASES = ("", "setup", "warmup", "train", "eval")
FLAG_DEBUGGER = 1
FLAG_LOADED_PERSISTENT = 2
FLAG_ASYNC_SAVE = 4
FLAG_LEFT = 8
"""The rank asked not to be watched any longer: no limit holds. What was open then is left as it was."""

monotonic_ns = time.monotonic_ns


class BoardError(Exception):
    """The file is no board of this layout, or not ours."""


def name_on_board(name: str) -> str:
    """A section's name as the board has it: one of more than 32 bytes of UTF-8 is cut, and ends in a digest of the whole."""
    encoded = name.encode(errors="replace")
    if len(encoded) <= NAME_BYTES:
        return encoded.decode()
    return f"{encoded[: NAME_BYTES - 9].decode(errors='ignore')}~{hashlib.sha256(encoded).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class SectionSample:
    """One section as read. `open_since_ns` is 0 while it is closed."""

    name: str
    open_since_ns: int
    entered: int
    total_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class SlotSample:
    """One rank's slot as read at one moment."""

    pid: int
    attempt: int
    liveness_ns: int
    main_ns: int
    iteration: int
    phase: str
    closed_since_ns: int
    flags: int
    train_steps: int
    eval_steps: int
    checkpoints: int
    heartbeats: int
    heartbeat_ns: int
    calls: int
    sections: tuple[SectionSample, ...]


class Section:
    """A named section of one rank. Enter and exit from one thread; the same name is not entered twice at once."""

    __slots__ = ("_base", "_entered", "_head", "_longest_ns", "_since_ns", "_total_ns", "_words", "name")

    def __init__(self, words: memoryview, head: int, base: int, name: str) -> None:
        self.name = name
        self._words = words
        self._head = head
        self._base = base
        self._entered = self._total_ns = self._longest_ns = self._since_ns = 0

    def enter(self) -> None:
        """Open the section now."""
        words, base = self._words, self._base
        self._entered += 1
        words[base + ENTERED] = self._entered
        self._since_ns = words[base + OPEN_SINCE_NS] = monotonic_ns()

    def exit(self) -> None:
        """Close the section; closing one that is not open does nothing."""
        since_ns = self._since_ns
        if not since_ns:
            return
        words, base = self._words, self._base
        now_ns = monotonic_ns()
        elapsed_ns = now_ns - since_ns
        self._since_ns = 0
        self._total_ns += elapsed_ns
        words[base + TOTAL_NS] = self._total_ns
        if elapsed_ns > self._longest_ns:
            self._longest_ns = words[base + LONGEST_NS] = elapsed_ns
        words[base + OPEN_SINCE_NS] = 0
        words[self._head + CLOSED_SINCE_NS] = now_ns

    @property
    def is_open(self) -> bool:
        """Whether it is open now."""
        return self._since_ns != 0

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        self.exit()


class Slot:
    """A rank's side of its slot."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self.head = HEADER_WORDS + index * SLOT_WORDS
        self._sections: dict[str, Section] = {}

    def take_over(self, pid: int, attempt: int) -> None:
        """Clear the slot for a new process. Nothing of the one before is left: no open section survives it."""
        words, head = self._words, self.head
        sequence = words[head + SEQUENCE] | 1
        words[head + SEQUENCE] = sequence
        for word in range(head + 1, head + SLOT_WORDS):
            words[word] = 0
        words[head + PID] = pid
        words[head + ATTEMPT] = attempt
        words[head + SEQUENCE] = sequence + 1
        self._sections.clear()

    def set(self, field: int, value: int) -> None:
        """Write one word of the head (`ITERATION`, `PHASE`, ...)."""
        self._words[self.head + field] = value

    def get(self, field: int) -> int:
        """Read one word of the head."""
        return int(self._words[self.head + field])

    def section(self, name: str) -> Section:
        """The section of that name, made at its first use.

        Long names are cut as `name_on_board` says. Raises `BoardError` when all `NUM_SECTIONS` places are taken.
        """
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = self._make_section(name)
        return section

    def section_totals(self) -> dict[str, tuple[int, int]]:
        """Of each section the times it was entered, and the total of its closed stretches in ns."""
        return {name: (section._entered, section._total_ns) for name, section in self._sections.items()}

    def _make_section(self, name: str) -> Section:
        place = len(self._sections)
        if place >= NUM_SECTIONS:
            raise BoardError(f"more than {NUM_SECTIONS} different sections; {name!r} is not watched")
        base = self.head + HEAD_WORDS + place * SECTION_WORDS
        encoded = name_on_board(name).encode().ljust(NAME_BYTES, b"\0")
        for i, word in enumerate(struct.unpack(f"<{NAME_WORDS}Q", encoded)):
            self._words[base + i] = word
        self._words[self.head + NUM_NAMED] = place + 1
        return Section(self._words, self.head, base, name)


class Board:
    """An open board; `close` it, and as its owner `unlink` it."""

    def __init__(self, path: Path, words: memoryview, memory: mmap.mmap, num_slots: int) -> None:
        self.path = path
        self.num_slots = num_slots
        self._words = words
        self._memory = memory

    @classmethod
    def create(cls, num_slots: int, runtime_dir: Path, shared_memory: Path = Path("/dev/shm")) -> "Board":
        """Make a board of `num_slots` slots, in shared memory or, where that is missing or full, in `runtime_dir`.

        Mode 0600, a random name, never an existing file.
        """
        size_bytes = 8 * (HEADER_WORDS + num_slots * SLOT_WORDS)
        name = f"rsup-board-{os.getuid()}-{os.getpid()}-{secrets.token_hex(6)}"
        error: OSError | None = None
        for folder in (shared_memory, runtime_dir):
            path = folder / name
            try:
                board = cls._map_new(path, size_bytes, num_slots)
            except OSError as failure:
                error = failure
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            board._write_header()
            return board
        raise BoardError(f"cannot make a heartbeat board in {shared_memory} or {runtime_dir}: {error}")

    @classmethod
    def _map_new(cls, path: Path, size_bytes: int, num_slots: int) -> "Board":
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # a full /dev/shm must fail here, not as SIGBUS later
            memory = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        return cls(path, memoryview(memory).cast("Q"), memory, num_slots)

    def _write_header(self) -> None:
        owner = (os.getpid(), process_start_ticks(os.getpid()), pid_namespace())
        for word, value in enumerate((LAYOUT_VERSION, self.num_slots, *owner), start=1):
            self._words[word] = value
        self._words[0] = MAGIC  # last: whoever reads it has the owner too, and does not take the board for a leftover

    @classmethod
    def open(cls, path: Path) -> "Board":
        """Map an existing board. Raise `BoardError` if it is none, of another layout, or another user's."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise BoardError(f"cannot open the heartbeat board {path}: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if status.st_uid not in (os.getuid(), 0) or not stat.S_ISREG(status.st_mode):
                raise BoardError(f"{path} is not ours")
            if status.st_size < 8 * HEADER_WORDS:
                raise BoardError(f"{path} is no heartbeat board")
            memory = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)
        words = memoryview(memory).cast("Q")
        if words[0] != MAGIC or words[1] != LAYOUT_VERSION:
            raise BoardError(f"{path} is no heartbeat board of layout {LAYOUT_VERSION}")
        num_slots = int(words[2])
        if status.st_size < 8 * (HEADER_WORDS + num_slots * SLOT_WORDS):
            raise BoardError(f"{path} is cut short")
        return cls(path, words, memory, num_slots)

    @property
    def owner_pid(self) -> int:
        """Pid of the agent that made the board."""
        return int(self._words[3])

    def slot(self, index: int) -> Slot:
        """The writer's side of slot `index` (the local rank)."""
        if not 0 <= index < self.num_slots:
            raise BoardError(f"slot {index} of a board of {self.num_slots}")
        return Slot(self._words, index)

    def read(self, index: int) -> SlotSample:
        """A consistent sample of slot `index`. Costs a few microseconds per named section."""
        words = self._words
        head = HEADER_WORDS + index * SLOT_WORDS
        for _ in range(100):
            sequence = words[head + SEQUENCE]
            if not sequence & 1:
                sample = self._read_once(head)
                if words[head + SEQUENCE] == sequence:
                    return sample
            time.sleep(0.0001)
        return self._read_once(head)  # the writer died while it cleared the slot: what there is

    def _read_once(self, head: int) -> SlotSample:
        values = self._words[head : head + HEAD_WORDS].tolist()
        num_named = min(values[NUM_NAMED], NUM_SECTIONS)
        return SlotSample(
            pid=values[PID],
            attempt=values[ATTEMPT],
            liveness_ns=values[LIVENESS_NS],
            main_ns=values[MAIN_NS],
            iteration=values[ITERATION],
            phase=PHASES[values[PHASE]] if values[PHASE] < len(PHASES) else "",
            closed_since_ns=values[CLOSED_SINCE_NS],
            flags=values[FLAGS],
            train_steps=values[TRAIN_STEPS],
            eval_steps=values[EVAL_STEPS],
            checkpoints=values[CHECKPOINTS],
            heartbeats=values[HEARTBEATS],
            heartbeat_ns=values[HEARTBEAT_NS],
            calls=values[CALLS],
            sections=tuple(self._read_section(head + HEAD_WORDS + i * SECTION_WORDS) for i in range(num_named)),
        )

    def _read_section(self, base: int) -> SectionSample:
        values = self._words[base : base + SECTION_WORDS].tolist()
        for _ in range(10):
            if self._words[base + ENTERED] == values[ENTERED]:
                break
            values = self._words[base : base + SECTION_WORDS].tolist()
        name = struct.pack(f"<{NAME_WORDS}Q", *values[:NAME_WORDS]).rstrip(b"\0").decode(errors="replace")
        return SectionSample(name, values[OPEN_SINCE_NS], values[ENTERED], values[TOTAL_NS], values[LONGEST_NS])

    def close(self) -> None:
        """Unmap. Slots and sections made from this board must not be used any more."""
        with contextlib.suppress(BufferError):
            self._words.release()
            self._memory.close()

    def unlink(self) -> None:
        """Remove the file; processes that have it mapped keep their memory."""
        self.path.unlink(missing_ok=True)


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is no such process. With the pid it names one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19])


def pid_namespace() -> int:
    """The inode of this process's pid namespace: containers of one host have the boot in common, and other pids. 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_leftovers(folders: Iterable[Path], uid: int | None = None) -> list[Path]:
    """Remove the boards of a user (None: of this one) whose agent no longer lives; return what was removed. Containers may
    share this memory, and have other pids: their boards are left alone."""
    removed = []
    for folder in folders:
        for path in folder.glob(f"rsup-board-{os.getuid() if uid is None else uid}-*"):
            try:
                with path.open("rb") as file:
                    magic, _, _, owner_pid, owner_start, namespace = struct.unpack("<6Q", file.read(48))
            except (OSError, struct.error):
                continue
            is_here = namespace in (0, pid_namespace())
            if magic == MAGIC and owner_pid and is_here and not _lives(owner_pid, owner_start):
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def _lives(pid: int, start_ticks: int) -> bool:
    """Whether that process exists, and is no mere entry that its parent has yet to take note of (zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except PermissionError:
        return True
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and int(fields[19]) == start_ticks
