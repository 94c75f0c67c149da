"""What a rank tells about the fault that ended its entry into the training function."""

import re
import sys
import traceback
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
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
MAX_TRACEBACK_CHARS = 8000


def describe(error: BaseException, entry: int, iteration: int) -> wire.RankFault:
    """The report of an exception that the training function raised in that `entry`, around that `iteration`."""
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    is_victim = isinstance(error, RuntimeError) and any(part in str(error).lower() for part in LOST_CONNECTION)
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


def report_exception(error: BaseException, rank: int, entry: int, iteration: int) -> None:
    """Tell the agent, and the rank's own log: a traceback; one line where only the connection to another rank broke."""
    fault = describe(error, entry, iteration)
    report(fault)
    if fault.victim:
        print(f"rank {rank}: another rank is gone or has left: {fault.text[:120]}", file=sys.stderr, flush=True)
    else:
        head = f"rank {rank}: entry {entry} into the training ends, in-process restart follows:"
        print(f"{head}\n{fault.traceback}", end="", file=sys.stderr, flush=True)


def drop_frames(error: BaseException) -> None:
    """Let go of what the frames of an exception and of its causes hold: models, process groups with their sockets, memory."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        one = following.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        following += [one.__cause__, one.__context__]
