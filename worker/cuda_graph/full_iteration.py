"""A step's forward and backward, of all its micro-batches, as one CUDA graph.

    step = FullIterationGraph(forward_backward, device, parameters=model.named_parameters())
    result = step(batches)          # the first calls run eagerly, then one is captured and replayed, then all are replayed
    loss = result.materialize()

Each call computes the step exactly once, whichever way. Inputs are copied to static buffers; the step reads only those. All
state is the instance's own: a training and an evaluation graph, or several of either, live side by side. Each signature of the
inputs has a warm-up and a graph of its own; what happens to inputs of another signature says `OnChange`: never a replay.
Source: the seed's section 3.1; the specification's section 6.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph import lifecycle
from rsup.worker.cuda_graph.addresses import Addresses, Gradients, Parameters, named
from rsup.worker.cuda_graph.capture import Captured, SharedCapture, shared_capture
from rsup.worker.cuda_graph.capture_agreement import Action, Ranks, RankState
from rsup.worker.cuda_graph.contract import Batches, Fallback, ForwardBackward, GraphError, OnChange
from rsup.worker.cuda_graph.fallback import say_fallback
from rsup.worker.cuda_graph.nesting import detached
from rsup.worker.cuda_graph.results import Results, VolatileResult
from rsup.worker.cuda_graph.static_buffers import Signature, StaticBuffers, difference
from rsup.worker.rerun.replay_state import ReplayState

_MAX_KNOWN = 1024
"""Signatures whose number and warm-up are remembered: inputs may change with every call, and memory shall not grow for ever."""


@dataclass
class _Known:
    """What is there for one signature (of all ranks)."""

    signature: Signature
    num_warm: int = 0
    captured: Captured[Any] | None = None
    addresses: Addresses | None = None


class FullIterationGraph:
    """Runs `forward_backward` on batches: eagerly `warmup_steps` times, then as a graph. One thread; collective over `group`.

    `forward_backward`: gets the static batches, leaves gradients in place, returns tensors (nested); it must do the same on the
    device each time, and read nothing back. `name`: for messages. `max_graphs`: with `OnChange.RECAPTURE`; the least recently
    used goes. `generators`: those that the step draws from beside the device's own. `parameters` (with or without names): they
    are checked to be where they were captured. `group`: the ranks that call it together, over host memory (gloo); None: all.
    `ignored_inputs`: see `StaticBuffers`. `before_capture`: called right before a capture, which can take seconds.
    `on_fallback`: told, once, what could not be captured, when training goes on eagerly.
    Without CUDA everything runs eagerly, in the same buffers and with the same states.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        device: torch.device,
        *,
        name: str = "training",
        warmup_steps: int = 3,
        on_change: OnChange = OnChange.RAISE,
        max_graphs: int = 4,
        fallback: Fallback = Fallback.RAISE,
        generators: Sequence[torch.Generator] = (),
        parameters: Parameters = (),
        group: dist.ProcessGroup | None = None,
        capture: SharedCapture | None = None,
        ignored_inputs: Collection[str] = (),
        before_capture: Callable[[], None] | None = None,
        on_fallback: Callable[[str], None] = say_fallback,
    ) -> None:
        if warmup_steps < 0 or max_graphs < 1:
            raise GraphError(f"the {name} graph needs warmup_steps >= 0 and max_graphs >= 1: got {warmup_steps}, {max_graphs}")
        self.name = name
        self.num_calls = 0
        self.is_eager_for_good = False
        """A capture failed, and the step goes on eagerly (`Fallback.EAGER`); `why`: what failed. Stays so after a reset."""
        self.why = ""
        self._forward_backward = forward_backward
        self._warmup_steps = warmup_steps
        self._on_change = OnChange(on_change)
        self._max_graphs = max_graphs
        self._fallback = Fallback(fallback)
        self.generators = tuple(generators)
        self._parameters = named(parameters)
        self._capture = capture if capture is not None else shared_capture(device)
        self._ranks = Ranks(group)
        self._by_inputs = self._on_change is not OnChange.RAISE and self._ranks.size > 1
        self._before_capture = before_capture
        self._on_fallback = on_fallback
        self._buffers = StaticBuffers(self._capture.device, ignored_inputs)
        self._results = Results(name)
        self._numbers: OrderedDict[Signature, int] = OrderedDict()
        self._next_number = 0
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        """By the numbers of all ranks' signatures, or this rank's alone; least recently used first."""
        self._num_resets = 0
        self._is_running = False
        self._state = ReplayState(self._capture.device)
        for index, generator in enumerate(self.generators):
            self._state.register_generator(f"generator {index} of the graph", generator)
        lifecycle.register(self)

    # ------------------------------------------------------------------------------------------------------------- calls

    def __call__(self, batches: Batches, *, eager: bool = False, counts: bool = True) -> VolatileResult:
        """Compute one step. `eager`: run it as it is, for dumps, profiling or finding a fault; graphs stay.

        `counts`: False for a rerun, which neither warms up nor captures. Waits for nothing on the device but at a capture.
        Raises `GraphError`, with nothing computed, for inputs of another signature (`OnChange.RAISE`), a step that cannot be
        captured (`Fallback.RAISE`), memory that moved, ranks that differ.
        """
        if self._is_running:
            raise GraphError(f"the {self.name} graph is called from within its own step: call it once a step")
        self._is_running = True
        try:
            key, known, action = self._decide(self._buffers.signature(batches), eager, counts)
            self._results.spoil("belongs to a call before one that did not end")
            with self._capture.on_stream():
                value = self._perform(action, key, known, batches, counts)
        finally:
            self._is_running = False
        self.num_calls += counts
        return self._results.put(value)

    def reset(self) -> None:
        """Drop graphs and results, and warm up anew: before memory moves that a graph refers to. Static buffers stay.

        Waits for what is queued on the shared stream. Raises `GraphError` in the midst of a call. Reset it on all ranks.
        """
        if self._is_running:
            raise GraphError(f"the {self.name} graph cannot be reset in the midst of a call: reset it between two steps")
        if self._capture.in_progress:
            raise GraphError(f"the {self.name} graph cannot be reset while {self._capture.in_progress} is captured: wait")
        self._results.spoil("was dropped by reset()")
        self._drop_graphs()
        for known in self._known.values():
            known.num_warm = 0
        self._num_resets += 1

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self.num_graphs > 0

    @property
    def num_graphs(self) -> int:
        """Graphs that are there, one for each signature of the inputs."""
        return sum(known.captured is not None for known in self._known.values())

    # ---------------------------------------------------------------------------------------------------- what a call does

    def _decide(self, signature: Signature, eager: bool, counts: bool) -> tuple[Hashable, _Known, Action]:
        number = self._number_of(signature)
        action = Action.EAGER if eager or self.is_eager_for_good else None
        key: Hashable = number
        if self._by_inputs and not self.is_eager_for_good:
            told = Action.BY_INPUTS if action is None else action
            state = RankState((self.num_calls, self._num_resets, told, counts))
            key = self._ranks.agree(state, number, self.name)
        known = self._known.get(key)
        if known is None:
            known = _Known(signature)
        if action is None:
            action = self._action(known, counts)
        if not self._by_inputs and action is not Action.REPLAY and not self.is_eager_for_good:
            self._ranks.agree(RankState((self.num_calls, self._num_resets, action, counts)), number, self.name)
        if action is Action.REPLAY:
            self._check_addresses(known)
        self._remember(key, known)
        return key, known, action

    def _action(self, known: _Known, counts: bool) -> Action:
        if known.captured is not None:
            return Action.REPLAY
        others = [other for other in self._known.values() if other is not known]
        used = next((other for other in others if other.captured is not None or other.num_warm), None)
        if used is not None and self._on_change is OnChange.RAISE:
            what = "was captured" if used.captured is not None else "warms up"
            raise GraphError(
                f"the {self.name} graph {what} with other inputs: {difference(used.signature, known.signature)}; keep the "
                f"inputs as they are, or choose on_change eager or recapture"
            )
        other = next((other for other in others if other.captured is not None), None)
        if other is not None and self._on_change is OnChange.EAGER:
            return Action.EAGER
        return Action.WARM_UP if known.num_warm < self._warmup_steps or not counts else Action.CAPTURE

    def _perform(self, action: Action, key: Hashable, known: _Known, batches: Batches, counts: bool) -> Any:
        if action is Action.CAPTURE:
            self._make_room(key)
        static = self._buffers.load(key, batches)
        if action is Action.CAPTURE:
            value = self._capture_and_replay(known, static)
        elif action is Action.REPLAY:
            assert known.captured is not None
            known.captured.replay()
            value = known.captured.result
        else:
            value = detached(self._forward_backward(static))
            known.num_warm += counts and action is Action.WARM_UP
        self._keep_buffers(key)
        return value

    def _capture_and_replay(self, known: _Known, static: Batches) -> Any:
        if self._before_capture is not None:
            self._before_capture()
        before, gradients = self._state.capture(), Gradients(self._parameters)
        captured: Captured[Any] | None = None
        cause: GraphError | None = None
        failure = ""
        try:
            try:
                captured = self._capture.capture(
                    functools.partial(_computed, self._forward_backward, static), f"the {self.name} step", self.generators
                )
            except GraphError as error:
                failure, cause = str(error), error
            failure = self._ranks.failures(failure)
        except BaseException:
            self._undo(captured, gradients, before)
            raise
        if captured is not None and not failure:
            captured.replay()
            known.captured, known.addresses = captured, Addresses(self._parameters)
            return captured.result
        self._undo(captured, gradients, before)
        if self._fallback is Fallback.RAISE:
            raise GraphError(failure) from cause
        self._drop_graphs()
        self.is_eager_for_good, self.why, cause = True, failure, None
        return detached(self._forward_backward(static))

    def _undo(self, captured: Captured[Any] | None, gradients: Gradients, before: Any) -> None:
        """A capture computes nothing: what changed is which tensors are gradients, and what the host has drawn."""
        if captured is not None:
            captured.destroy()
        gradients.restore()
        self._state.restore(before)

    def _check_addresses(self, known: _Known) -> None:
        moved = known.addresses.moved() if known.addresses is not None else ""
        if moved:
            raise GraphError(
                f"the {self.name} graph reads parameters and writes gradients where they were when it was captured, and now "
                f"{moved}: use zero_grad(set_to_none=False), and reset the graph when parameters move"
            )

    # --------------------------------------------------------------------------------------------------- what is remembered

    def _number_of(self, signature: Signature) -> int:
        """A number for this rank's signature: the ranks tell numbers, which never stand for anything else."""
        if signature not in self._numbers:
            self._numbers[signature] = self._next_number
            self._next_number += 1
        self._numbers.move_to_end(signature)
        if len(self._numbers) > _MAX_KNOWN:
            needed = {known.signature for known in self._known.values() if known.captured is not None}
            del self._numbers[next(kept for kept in self._numbers if kept not in needed)]
        return self._numbers[signature]

    def _remember(self, key: Hashable, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            oldest = next(kept for kept, other in self._known.items() if other.captured is None)
            del self._known[oldest]

    def _make_room(self, key: Hashable) -> None:
        """Drop the least recently used graphs, and their buffers, until that of `key` may be captured."""
        for other in self._known.values():
            if self.num_graphs < self._max_graphs:
                break
            _drop(other)
        self._keep_buffers(key)

    def _keep_buffers(self, of_this_call: Hashable) -> None:
        self._buffers.keep([of_this_call, *(key for key, known in self._known.items() if known.captured is not None)])

    def _drop_graphs(self) -> None:
        for known in self._known.values():
            _drop(known)


def _computed(forward_backward: ForwardBackward, static: Batches) -> Any:
    """What is captured. No closure: a frame of one keeps its variables for as long as an exception keeps the frame."""
    return detached(forward_backward(static))


def _drop(known: _Known) -> None:
    if known.captured is not None:
        known.captured.destroy()
    known.captured, known.addresses = None, None
