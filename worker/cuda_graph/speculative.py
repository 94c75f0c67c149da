"""A step that runs on an assumption which the device checks while it computes, and once more without it where it was wrong.

    step = SpeculativeStep(fast, eager, flag, group, replay_state, on_fallback=[routing.drop_capacity, stash.release])
    result = step(batches)

`fast` is a graph of fixed shapes (every expert gets at most C tokens, activations fit a buffer) that writes 1 to `flag` where
that did not hold. All ranks then agree, the graph is thrown away, what it referred to may be released, generators and buffers
go back, and the same batches are computed by `eager`; `fast` warms up and is captured anew. The pattern is that of
Megatron-LM's `PagedStashRunner`, which does not restore generators.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.capture import SharedCapture, shared_capture
from rsup.worker.cuda_graph.contract import Batches, ForwardBackward, GraphError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.nesting import detached
from rsup.worker.cuda_graph.results import Results, VolatileResult
from rsup.worker.cuda_graph.static_buffers import StaticBuffers
from rsup.worker.rerun.replay_state import ReplayState

Hook = Callable[[], object]


class SpeculativeStep:
    """Calls `fast`, waits for its flag, and falls back. Collective over `group` (None: all ranks, where there are any).

    `flag`: [], any dtype, on the step's device; the step writes what is not 0 where the assumption failed, and never 0.
    `replay_state`: what goes back before the fallback, generators always among it; None: nothing does.
    `on_fallback`: called in this order once no graph refers to anything any more: raise a capacity, release buffers, open a
    gate. `after_fallback`: called when the eager pass is over, even if it failed: put settings back.
    `zero_gradients`: called before the eager pass, unless `eager` zeroes them itself.
    `also_reset`: other graphs that refer to the buffers which are released, such as that of the evaluation. `capture`: that of
    `fast`, if it has one of its own.
    """

    def __init__(
        self,
        fast: FullIterationGraph,
        eager: ForwardBackward,
        flag: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        replay_state: ReplayState | None = None,
        on_fallback: Sequence[Hook] = (),
        *,
        after_fallback: Sequence[Hook] = (),
        zero_gradients: Hook | None = None,
        also_reset: Sequence[FullIterationGraph] = (),
        capture: SharedCapture | None = None,
    ) -> None:
        self.num_fallbacks = 0
        self._fast = fast
        self._eager = eager
        self._flag = flag
        self._group = group
        self._replay_state = replay_state
        self._on_fallback = on_fallback
        self._after_fallback = after_fallback
        self._zero_gradients = zero_gradients
        self._also_reset = also_reset
        self._capture = capture if capture is not None else shared_capture(flag.device)

    def __call__(self, batches: Batches, *, eager: bool = False, counts: bool = True) -> VolatileResult:
        """One execution that holds: of `fast`, or, where a rank raised its flag, of `eager` with the same batches.

        Waits for the step. Raises `GraphError` on all ranks where the eager pass raises a flag too: its numbers are no better.
        """
        before = None if self._replay_state is None else self._replay_state.capture()
        self._flag.zero_()
        result = self._fast(batches, eager=eager, counts=counts)
        if not self._is_raised():
            return result
        self.num_fallbacks += 1
        for graph in (self._fast, *self._also_reset):  # before anything that they refer to is freed
            graph.reset()
        try:
            for hook in self._on_fallback:
                hook()
            if before is not None and self._replay_state is not None:
                self._replay_state.restore(before)
            return self._fall_back(batches)
        finally:
            for hook in self._after_fallback:
                hook()

    def _fall_back(self, batches: Batches) -> VolatileResult:
        if self._zero_gradients is not None:
            self._zero_gradients()
        self._flag.zero_()
        with self._capture.on_stream():
            static = StaticBuffers(self._flag.device).load("fallback", batches)
            value = detached(self._eager(static))
        if self._is_raised():
            raise GraphError(
                "the eager pass of a speculative step raised its flag too: give it a function that does not depend on the"
                " assumption, or release the limit in on_fallback"
            )
        return Results("fallback").put(value)

    def reset(self) -> None:
        """Throw the graph away; the next calls warm up anew."""
        self._fast.reset()

    def _is_raised(self) -> bool:
        """Whether a rank's flag is up. Waits for the device."""
        raised = (self._flag != 0).reshape(1).to(torch.float32)
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            if dist.get_backend(self._group) == "gloo":
                raised = raised.cpu()
            dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._group)
        return bool(raised.item())
