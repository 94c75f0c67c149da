"""All graphs of this process, and their end: before process groups, before memory that they read moves, before another entry.

NCCL lets go of a communicator only when no graph is left that was captured with it; destroying and aborting one poll for that
alike (`commDestroySync`, NCCL 2.26 and newer). So a live graph hangs `destroy_process_group`, and where a replay hangs in its
collective the order is: abort the communicators from other threads, which ends their kernels, and do not wait for that; destroy
the graphs once the device has drained; wait for the aborts; destroy the groups. A device that does not drain in time keeps its
graphs: freeing memory under a running kernel would be worse than the restart of the process that follows.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.contract import GraphError

DESTROYED_WITHIN_S = 20.0
"""How long running kernels may take to end. In-process restart gives all of its cleaning up 30 s."""
AT_EXIT_WITHIN_S = 5.0


class Graph(Protocol):
    """What may be registered: a `FullIterationGraph`, an `OptimizerGraph`, or the like."""

    def reset(self) -> None:
        """Destroy what was captured, on any thread, with the device idle; may be called again. Warms up anew if it is used."""
        ...


@dataclass(frozen=True)
class Destroyed:
    """What became of the graphs. `memory_returned_bytes`: of the device, given back to the driver."""

    num_graphs: int = 0
    memory_returned_bytes: int = 0
    took_s: float = 0.0
    problem: str = ""
    """Why a graph is still there, or a communicator's abort has not ended; empty when all went well."""

    def __str__(self) -> str:
        returned_mib = self.memory_returned_bytes / 2**20
        return f"CUDA graphs destroyed in {self.took_s:.2f} s: {self.num_graphs}; memory returned: {returned_mib:.0f} MiB"


_graphs: "weakref.WeakSet[Graph]" = weakref.WeakSet()
_aborts: list[threading.Thread] = []
_last = Destroyed()
_at_exit_of = 0
"""The process that destroys its graphs when it exits."""


def register(graph: Graph) -> None:
    """`graph` is reset wherever graphs must be gone, for as long as somebody else holds it. Call it once, when it is made."""
    global _at_exit_of
    _graphs.add(graph)
    if _at_exit_of != os.getpid():
        _at_exit_of = os.getpid()
        atexit.register(_leave_interpreter, _at_exit_of)


def live_graphs() -> list[Graph]:
    """What is registered and not yet garbage."""
    return list(_graphs)


def memory_returned_bytes() -> int:
    """What the last destruction of graphs gave back to the driver. 0 on a host without CUDA."""
    return _last.memory_returned_bytes


def destroy_graphs(within_s: float = DESTROYED_WITHIN_S) -> bool:
    """Wait for the device, at most `within_s`, and reset all graphs; whether they are gone. `let_go_of_graphs` says why not."""
    return not _destroy(within_s).problem


def let_go_of_graphs(what: str, within_s: float = DESTROYED_WITHIN_S) -> Destroyed:
    """The same for callers that cannot go on with graphs; `what` follows, such as "process groups cannot be destroyed".

    Raises `GraphError` when a kernel still runs after `within_s`, as of a replay that waits for a lost rank: the process has
    to end then, which a launcher answers with a restart. Do not call it inside a step or while one is captured.
    """
    destroyed = _destroy(within_s)
    if destroyed.problem:
        raise GraphError(f"{what}: {destroyed.problem}; end this process, so that its launcher starts it anew")
    return destroyed


def destroy_process_group(group: dist.ProcessGroup | None = None, within_s: float = DESTROYED_WITHIN_S) -> None:
    """torch's `destroy_process_group`, with the graphs gone first: torch's own hangs while a graph lives that communicates."""
    let_go_of_graphs("process groups cannot be destroyed", within_s)
    dist.destroy_process_group(group)


def abort_beside(aborts: Sequence[Callable[[], object]]) -> list[threading.Thread]:
    """Call each of `aborts` (of NCCL backends) in a thread of its own, and return these. Any thread.

    Does not wait for them: an abort takes some tenths of a second, and while graphs live it ends only after them. Whoever
    destroys graphs, and whoever destroys process groups, waits for it.
    """
    threads = [threading.Thread(target=abort, name="rsup-abort", daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    _aborts.extend(threads)
    return threads


def _destroy(within_s: float) -> Destroyed:
    global _last
    graphs, began_s = live_graphs(), time.monotonic()
    ends_s = began_s + within_s
    problem, returned_bytes = "", 0
    if graphs:
        work = _Destruction(graphs)
        problem = work.run(within_s)
        returned_bytes = work.memory_returned_bytes
    while not problem and _aborts:
        _aborts[0].join(max(0.0, ends_s - time.monotonic()))
        if _aborts[0].is_alive():
            problem = (
                f"a communicator is still being aborted after {within_s:g} s (a CUDA graph that nobody registered keeps it)"
            )
        else:
            _aborts.pop(0)
    _last = Destroyed(len(graphs), returned_bytes, time.monotonic() - began_s, problem)
    return _last


class _Destruction:
    """Drains the device and resets graphs in a thread that may be left behind: no call of CUDA's can be given a time limit."""

    def __init__(self, graphs: list[Graph]) -> None:
        self.memory_returned_bytes = 0
        self._graphs = graphs
        self._error = ""
        self._is_over = False
        self._lock = threading.Lock()
        self._device = torch.cuda.current_device() if _uses_cuda() else None

    def run(self, within_s: float) -> str:
        """What went wrong, or an empty string."""
        thread = threading.Thread(target=self._work, name="rsup-destroy-graphs", daemon=True)
        thread.start()
        thread.join(within_s)
        if not thread.is_alive():
            return self._error
        self._is_over = True  # a device that drains later must not lose graphs that somebody has gone on with
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return f"{len(self._graphs)} CUDA graphs cannot be destroyed, the device was still at work after {within_s:g} s"
        return f"the destruction of {len(self._graphs)} CUDA graphs had not ended after {within_s:g} s"

    def _work(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            drain()
        except Exception as error:  # a device with an error is idle too, and its graphs are of no more use
            self._error = _one_line("the device has failed", error)
        with self._lock:
            if self._is_over:
                return
            before_bytes = _reserved_bytes()
            for graph in self._graphs:
                try:
                    graph.reset()
                except Exception as error:  # the others have to go nevertheless
                    self._error = self._error or _one_line(f"{type(graph).__name__} was not destroyed", error)
            self.memory_returned_bytes = max(0, before_bytes - _reserved_bytes())


def drain() -> None:
    """Wait for all that this process has queued on the current device."""
    if _uses_cuda():
        torch.cuda.synchronize()


def _reserved_bytes() -> int:
    """Memory that the allocator uses: what it only holds goes back to the driver first, the pools of destroyed graphs too."""
    if not _uses_cuda():
        return 0
    try:
        torch.cuda.empty_cache()
    except RuntimeError:  # the device has failed, and gives nothing back
        return 0
    return torch.cuda.memory_reserved()


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _one_line(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _leave_interpreter(pid: int) -> None:
    """Before modules are torn down in no order. Says nothing: a device that still works is left to the process's end.

    Without a thread (Python 3.12 starts none any more by now), so the device is asked again and again instead of waited for.
    """
    if pid != os.getpid():
        return
    end_s = time.monotonic() + AT_EXIT_WITHIN_S
    with contextlib.suppress(RuntimeError):  # a device that has failed is idle too
        while not is_idle():
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)
    for graph in live_graphs():
        with contextlib.suppress(Exception):  # the process ends
            graph.reset()


def is_idle() -> bool:
    """Whether all that was queued on the current stream is done; steps on the shared stream belong to it."""
    return not _uses_cuda() or torch.cuda.current_stream().query()
