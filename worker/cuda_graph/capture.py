"""Where graphs are captured: one stream and one memory pool for all of a process, and what a captured piece of work is.

All graphs of a step (forward and backward, the optimizer, evaluation) run one after the other on one stream, so that they
may share memory: what one needs only while it runs, the next may use. Without CUDA a "graph" is the function itself: a replay
calls it again and writes what it returns over what it returned first, as a graph would.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch

from rsup.worker.cuda_graph.capture_failure import failure_text, forget_locals, recover, register_generators
from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.cuda_graph.nesting import walk

T = TypeVar("T")


class Captured(Generic[T]):
    """Work that can be replayed. Without CUDA: `function` itself, called at each replay."""

    def __init__(self, function: Callable[[], T], what: str) -> None:
        self.what = what
        self._function: Callable[[], T] | None = function
        self._results: list[T] = []

    @property
    def result(self) -> T:
        """What the function returned: tensors that each replay writes anew, and other values as they were at the capture.

        To be read after the first replay: nothing was computed before.
        """
        if not self._results:
            raise GraphError(f"{self.what} has no result yet: replay it first")
        return self._results[0]

    def replay(self) -> None:
        """Do the work again, on the shared stream, without waiting for it. Raises `GraphError` once it was destroyed."""
        if self._function is None:
            raise self._gone()
        result = self._function()
        if self._results:
            _overwrite(self._results[0], result, self.what)
        else:
            self._results.append(result)

    def destroy(self) -> None:
        """Give up the graph and its memory, after all that is queued on the shared stream; may be called again."""
        self._function = None
        self._results.clear()

    def _gone(self) -> GraphError:
        return GraphError(f"{self.what} was destroyed: it has to be captured again")


class _DeviceGraph(Captured[T]):
    """A CUDA graph. `pool` is kept for as long as the graph lives."""

    def __init__(
        self, what: str, graph: torch.cuda.CUDAGraph, result: T, owner: "SharedCapture", pool: "torch.cuda.MemPool"
    ) -> None:
        self.what = what
        self._results = [result]
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._owner = owner
        self._pool: torch.cuda.MemPool | None = pool

    def replay(self) -> None:
        if self._graph is None:
            raise self._gone()
        with self._owner.on_stream():
            self._graph.replay()

    def destroy(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if self._owner.in_progress:
            self._graph = graph
            raise GraphError(
                f"{self.what} cannot be destroyed while {self._owner.in_progress} is captured: do it between steps"
            )
        assert self._owner.stream is not None
        with contextlib.suppress(RuntimeError):  # a device that has failed computes no more
            self._owner.stream.synchronize()
        self._results.clear()
        graph.reset()
        self._pool = None
        self._owner.let_go_of_pool()


class SharedCapture:
    """The stream and the pool of a device's graphs; `shared_capture` gives the one of this process.

    `use_single_mempool`: all graphs share memory; right where they run one after the other and a result is read, or copied,
    before the next graph is captured into its place. Otherwise each has a pool of its own.
    """

    def __init__(self, device: torch.device, use_single_mempool: bool = True) -> None:
        self.device = device
        self.use_single_mempool = use_single_mempool
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self.stream = _new_stream(self.device)
        self.in_progress = ""
        """What is being captured just now."""
        self._pool: torch.cuda.MemPool | None = None

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run what is inside on the shared stream: after all that the current one has queued, and before all that it will.

        Everything of a step belongs in here, and building DDP too: backward runs where a parameter's gradient was set up.
        """
        stream = self.stream
        if stream is None or (outer := torch.cuda.current_stream(self.device)) == stream:
            yield
            return
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            outer.wait_stream(stream)

    def capture(self, function: Callable[[], T], what: str, generators: Sequence[torch.Generator] = ()) -> Captured[T]:
        """Record what `function` does on the device, without doing it; `replay` does it. `what`: for messages, as "the step".

        `generators`: those that it draws from, beside the device's own. Waits for the device. Raises `GraphError` that names
        the call which cannot be recorded; stream, generators and allocator are usable then, and the device's memory as it was.
        """
        if self.in_progress:
            raise GraphError(f"{what} cannot be captured while {self.in_progress} is: capture one after the other")
        if self.stream is None:
            return Captured(function, what)
        self.in_progress = what
        try:
            with torch.cuda.device(self.device), self.on_stream():
                return self._capture(function, what, [g for g in generators if g.device.type == "cuda"], self.stream)
        finally:
            self.in_progress = ""

    def _capture(
        self, function: Callable[[], T], what: str, generators: Sequence[torch.Generator], stream: torch.cuda.Stream
    ) -> Captured[T]:
        torch.cuda.synchronize(self.device)
        gc.collect()  # no garbage is to be found, and freed, in the midst of the capture
        torch.cuda.empty_cache()
        torch.clear_autocast_cache()  # weights that warm-up cast would never be cast again
        pool = self._pool_for_capture()
        uses_before = pool.use_count()
        graph = torch.cuda.CUDAGraph()
        register_generators(graph, generators)
        result: list[T] = []
        error = _record(graph, pool, function, result)
        torch.clear_autocast_cache()  # the graph's own are nobody else's
        if error is None:
            torch.cuda.synchronize(self.device)
            return _DeviceGraph(what, graph, result[0], self, pool)
        result.clear()
        text = failure_text(what, error)
        forget_locals(error)
        self._pool = None  # those that live keep theirs
        try:
            if not recover(graph, pool, uses_before, stream, generators):
                self.stream = _new_stream(self.device)
        except RuntimeError as second:
            raise GraphError(f"{text}; and the device has failed since: {str(second).strip().partition(chr(10))[0]}") from error
        del pool
        torch.cuda.empty_cache()
        if not isinstance(error, Exception):
            raise error
        raise GraphError(text) from error

    def _pool_for_capture(self) -> "torch.cuda.MemPool":
        if not self.use_single_mempool:
            return torch.cuda.MemPool()
        self.let_go_of_pool()  # of graphs that were garbage before anybody destroyed them: torch refuses to fill it again
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return self._pool

    def let_go_of_pool(self) -> None:
        """Return the pool's memory when no graph is left in it."""
        if self._pool is not None and self._pool.use_count() <= 1:
            self._pool = None


def _record(
    graph: torch.cuda.CUDAGraph, pool: "torch.cuda.MemPool", function: Callable[[], T], result: list[T]
) -> BaseException | None:
    """Capture on the current stream; the first error, if any. The capture has ended afterwards, whatever happened."""
    collects = gc.isenabled()
    gc.disable()
    error: BaseException | None = None
    try:
        # thread_local: other threads, such as NCCL's watchdog, may ask the device what the capture forbids
        graph.capture_begin(pool=cast(Any, pool.id), capture_error_mode="thread_local")
        try:
            result.append(function())
        except BaseException as raised:
            error = raised
        graph.capture_end()
    except BaseException as raised:
        error = raised if error is None else error
    finally:
        if collects:
            gc.enable()
    return error


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _overwrite(kept: Any, new: Any, what: str) -> None:
    """Write the tensors of `new` over those of `kept`, as a replay does."""
    old_leaves, new_leaves = ([(path, leaf) for path, leaf, is_leaf in walk(value) if is_leaf] for value in (kept, new))
    if len(old_leaves) != len(new_leaves):
        raise GraphError(
            f"{what} returned {len(old_leaves)} values when it was captured and now {len(new_leaves)}: return the same"
        )
    with torch.no_grad():
        for (path, old), (_, leaf) in zip(old_leaves, new_leaves, strict=True):
            if not isinstance(old, torch.Tensor) or old is leaf:
                continue
            if not isinstance(leaf, torch.Tensor) or leaf.shape != old.shape or leaf.dtype != old.dtype:
                raise GraphError(f"{what} returned another kind of tensor for {path or 'its result'} than when it was captured")
            old.detach().copy_(leaf)


_shared: dict[torch.device, SharedCapture] = {}
_lock = threading.Lock()


def shared_capture(device: torch.device) -> SharedCapture:
    """The stream and the pool of this process's graphs on `device`, made at first use."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _shared:
            _shared[device] = SharedCapture(device)
        return _shared[device]


def forget_shared_captures() -> None:
    """Streams and pools are made anew at their next use: after a restart inside the process, whose graphs are gone, nothing of
    what was captured before shall matter. Any thread."""
    with _lock:
        _shared.clear()
