"""What a rank tells about the fault that ended its entry into the training function."""

import errno
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import rsup.worker
from rsup.supervisor import wire

LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "socketpollconnect",
    "connection was likely closed",  # by whoever served the store of an entry that is over
)
PASSING_ERRORS = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,
    errno.ENOLCK,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
)
"""Of the operating system, mostly a network file system's: the next entry may meet none."""
_SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ")
"""gloo's own, which would be all that there is room for."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
MAX_TRACEBACK_CHARS = 8000
_WAITS_IN_TORCH = re.compile(r"/torch/(distributed|nn/parallel|autograd|cuda)/")
_WAITS_BY_NAME = re.compile(
    r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|synchronize|wait|item|tolist|cpu)\("
)
INNERMOST_FRAMES = 6
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHONS = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen ")
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/torch/")
_RESTARTS = re.compile(r"/nvidia_resiliency_ext/inprocess/")


def describe(error: BaseException, entry: int, iteration: int) -> wire.RankFault:
    """The report of an exception that the training function raised in that `entry`, around that `iteration`."""
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    is_victim = _lost_connection(error)
    story = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__)))
    return wire.RankFault(
        entry=entry,
        kind="exception",
        text=wire.clip(text, 1000),
        traceback=story[-MAX_TRACEBACK_CHARS:],
        signature=signature(text),
        iteration=iteration,
        victim=is_victim,
    )


def _lost_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in LOST_CONNECTION)


def may_pass(error: wire.RsupError) -> bool:
    """Whether an operating error is of a kind that the next entry may not meet: it comes from a lost connection to another
    rank, or from an error of the operating system that passes. A damaged checkpoint or wrong usage does not get better."""
    chain = list(causes(error))
    lost = any(_lost_connection(one) for one in chain)
    return lost or any(isinstance(one, OSError) and one.errno in PASSING_ERRORS for one in chain)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it came from, or that were being handled when it was raised."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        one = following.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            following += [one.__cause__, one.__context__]


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames of this package that lead to the training function."""
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    return frames


def signature(text: str) -> str:
    """Equal for equal faults: the text without its numbers and addresses."""
    return _NUMBERS.sub("#", text)[:200]


def report(fault: wire.RankFault) -> None:
    """Tell the agent, without waiting."""
    rsup.worker.init().send(fault)


def report_exception(error: BaseException, rank: int, entry: int, iteration: int) -> str:
    """Tell the agent, and the rank's own log: a traceback, or one line of an operating error. Where only the connection to
    another rank broke, return the line for it instead: it is to come after what that rank, or the supervisor, has to say."""
    fault = describe(error, entry, iteration)
    report(fault)
    if fault.victim:
        lost = _SOURCE_PLACE.sub("", fault.text)
        return f"rank {rank}: entry {entry} into the training ended, another rank was gone or had left it: {lost[:120]}"
    if isinstance(error, wire.RsupError):
        print(f"rank {rank}: entry {entry} into the training ends: {error}", file=sys.stderr, flush=True)
        return ""
    head = f"rank {rank}: entry {entry} into the training ends, in-process restart follows:"
    print(f"{head}\n{fault.traceback}", end="", file=sys.stderr, flush=True)
    return ""


@dataclass(frozen=True)
class Stand:
    """Where a thread stands: its frames, innermost first, without the source lines, which are read when they are asked for."""

    frames: traceback.StackSummary

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other there: in torch's communication, a backward pass, or for a result of the GPU; or
        before the training function is entered."""
        inner = self.frames[:INNERMOST_FRAMES]
        if self.joins or any(_WAITS_IN_TORCH.search(frame.filename) for frame in inner):
            return True
        if not inner or inner[0].filename.startswith(_PYTHONS):  # for a thread or a queue of the rank's own
            return False
        return bool(_WAITS_BY_NAME.search(inner[0].line or "") or _WAITS_BY_NAME.search(f"{inner[0].name}("))

    @property
    def where(self) -> str:
        """The innermost frame of the user's script; where there is none, of the library that it calls."""
        own = self._in_function
        users = [frame for frame in own if not _LIBRARIES.search(frame.filename) and not frame.filename.startswith(_PYTHONS)]
        libraries = [frame for frame in own if "/torch/" not in frame.filename]
        for frame in (*users, *libraries, *own):
            return f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        return "an unknown place"

    @property
    def joins(self) -> bool:
        """Whether the thread is not in the training function, but in a step of a restart."""
        return bool(self.frames) and not self._in_function

    @property
    def _in_function(self) -> list[traceback.FrameSummary]:
        """The frames of the training function and of what it has called."""
        found = []
        for frame in self.frames:
            is_ours = frame.filename.startswith(_OURS)
            if _RESTARTS.search(frame.filename):
                return []
            if is_ours and frame.name == "_enter":  # what is further out has called the function
                break
            if not is_ours:
                found.append(frame)
        return found

    @property
    def story(self) -> str:
        """As a traceback shows it."""
        return "".join(reversed(self.frames.format()))[-MAX_TRACEBACK_CHARS:]


def stand_of_main_thread() -> Stand:
    """Where the training thread stands; call it from another one. It reads no file."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return Stand(traceback.StackSummary.extract(traceback.walk_stack(frame) if frame else iter(()), lookup_lines=False))


def soft_timeout(stand: Stand, entry: int, iteration: int, limit_s: float) -> wire.RankFault:
    """The report of a rank that was interrupted since no rank, or not this one, had made progress for so long."""
    limit = f"no progress for {limit_s:g} s ({wire.SOFT_LIMIT}, --inprocess-soft-timeout)"
    where = f"it waits for other ranks in {stand.where}" if stand.waits else f"it stands in {stand.where}"
    if stand.joins:
        where = "it waits for the other ranks' restart"
    text = wire.clip(f"{limit}; {where}", 1000)
    return wire.RankFault(entry, "soft-timeout", text, stand.story, "soft-timeout", iteration, stand.waits)


def drop_frames(error: BaseException) -> None:
    """Let go of what the frames of an exception and of its causes hold: models, process groups with their sockets, memory."""
    for one in causes(error):
        traceback.clear_frames(one.__traceback__)
