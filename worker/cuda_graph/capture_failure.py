"""After a capture that failed: which call was illegal, and everything usable again.

The CUDA runtime refuses a call that cannot be recorded (a host sync, a copy from pageable memory, an allocation outside of the
pool) and ends the capture; torch raises where the call was made, and once more when the capture is ended. What torch (2.11)
leaves behind then, and what is done about each:

* `capture_end` raises before it tells the allocator: it goes on routing to the graph's pool, and "already recording" follows at
  the next capture. Ended by hand (pytorch#180395), and the pool is not used again, whose host side cannot be ended.
* The pool keeps the graph's reference, and its memory never comes back (pytorch#190308). Given back by hand.
* Generators stay in capture mode: "Offset increment outside graph capture" at the next dropout. A small capture that succeeds
  takes them out of it, in place, so that graphs captured before keep their generators.
"""

import contextlib
import linecache
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent) + "/"
_STDLIB = sysconfig.get_path("stdlib") + "/"
_PACKAGES = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))
_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocators may still ask them whether a stream is theirs."""


def failure_text(what: str, error: BaseException) -> str:
    """One line: what could not be captured, the call that was illegal, and what the runtime says of it."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    call = illegal_call(error.__traceback__)
    where = f" at {call}" if call else ""
    return (
        f"{what} cannot be captured{where}: {type(error).__name__}: {message}; a graph takes no host reads, no shapes that "
        f"depend on data, and no work on streams that it does not wait for: change that call, or run eagerly"
    )


def illegal_call(trace: TracebackType | None) -> str:
    """`FILE:LINE in FUNCTION: CODE` of the innermost frame that is neither torch's, nor Python's own, nor this package's."""
    found = ""
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if _is_of_the_user(file):
            code = linecache.getline(file, line, trace.tb_frame.f_globals).strip()
            found = f"{file}:{line} in {trace.tb_frame.f_code.co_name}" + (f": `{code}`" if code else "")
        trace = trace.tb_next
    return found


def _is_of_the_user(file: str) -> bool:
    if file.startswith(("<", _TORCH, _OURS)):
        return False
    return not file.startswith(_STDLIB) or file.startswith(_PACKAGES)


def forget_locals(error: BaseException) -> None:
    """Let go of what the frames of `error` hold: tensors in the memory of a graph that will never be."""
    traceback.clear_frames(error.__traceback__)


def recover(
    graph: torch.cuda.CUDAGraph,
    pool: torch.cuda.MemPool,
    uses_before: int,
    stream: torch.cuda.Stream,
    generators: Sequence[torch.Generator],
) -> bool:
    """Undo what a failed capture of `graph` into `pool` left behind; whether `stream` can be used on.

    `uses_before`: the pool's use count before the capture. Call it with the capture ended, as far as it could be.
    """
    device_index = stream.device.index
    with contextlib.suppress(RuntimeError):  # where torch has done it itself
        torch._C._cuda_endAllocateToPool(device_index, pool.id)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    while pool.use_count() > uses_before:
        torch._C._cuda_releasePool(device_index, pool.id)
    _abandoned.append(graph)
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():
            return False
    stream.synchronize()
    _leave_capture_mode(stream, generators)
    return True


def _leave_capture_mode(stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
    with torch.cuda.stream(stream):
        something = torch.zeros(1, device=stream.device)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        register_generators(graph, generators)
        graph.capture_begin(capture_error_mode="thread_local")
        something.zero_()
        graph.capture_end()
        graph.reset()


def register_generators(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
    """Let each replay of `graph` go on in these generators; the device's default one always does.

    Newer torch registers every generator that is used, by itself, and deprecates the call.
    """
    register = getattr(graph, "register_generator_state", None)
    if register is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        for generator in generators:
            register(generator)
