"""The optimizer's step as a graph: clipping, weight decay and a gated Adam, replayed without arguments.

What changes from step to step is on the device: the learning rate, the weight decay, the step count, the gate. What a graph
bakes in (betas, epsilon, a plain weight decay, addresses) is compared before each replay, and a change is an error: it would
otherwise be ignored without a word.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rsup.worker.cuda_graph import lifecycle
from rsup.worker.cuda_graph.capture import Captured, SharedCapture, shared_capture
from rsup.worker.cuda_graph.contract import Fallback, GraphError
from rsup.worker.cuda_graph.fallback import say_fallback
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.optimizer_gate import (
    Gateable,
    GatedOptimizer,
    has_own_gate,
    prepare_optimizer_for_graph,
    refuse_loss_scale,
)
from rsup.worker.cuda_graph.weight_decay import ScheduledWeightDecay

__all__ = ["GatedOptimizer", "OptimizerGraph", "prepare_optimizer_for_graph"]

_Place = tuple[int, int, str, int]
"""Number of the group, place of the parameter in it, which of its tensors, address."""


class OptimizerGraph:
    """One rank's updates. Prepares the optimizer (see `prepare_optimizer_for_graph`), also after its `load_state_dict`.

    `gate`: [], float32, exactly 0 or 1; while it is 1 nothing changes, to the bit. None: always open.
    `max_norm`: clip gradients to it; infinite: measure only; None: neither. `gradients`: where they lie, if it is our storage.
    `warmup_steps`: eager calls before the capture. `captures`: False leaves every call eager, so that `step` may be captured as
    part of another graph. `group`: a gloo group whose ranks meet before a capture, so that none is waited for in a collective
    meanwhile. `scaler`: a loss scaler in use, which is refused if it is dynamic. `fallback`, `on_fallback`: as of
    `FullIterationGraph`. Without CUDA a replay is the step itself.
    """

    def __init__(
        self,
        optimizer: Gateable,
        device: torch.device,
        *,
        gate: torch.Tensor | None = None,
        max_norm: float | None = None,
        gradients: GradientGroups | None = None,
        exact_norm: bool = False,
        warmup_steps: int = 3,
        captures: bool = True,
        capture: SharedCapture | None = None,
        group: ProcessGroup | None = None,
        weight_decay: ScheduledWeightDecay | None = None,
        scaler: Any = None,
        fallback: Fallback = Fallback.RAISE,
        on_fallback: Callable[[str], None] = say_fallback,
    ) -> None:
        refuse_loss_scale(scaler)
        self._optimizer = optimizer
        self._device = device
        self._gate = gate if gate is not None else torch.zeros((), device=device)
        self._closed = torch.ones((), device=device)
        self._max_norm = max_norm
        self._gradients = gradients
        self._exact_norm = exact_norm
        self._owns_all = gradients is not None and _same_parameters(optimizer, gradients)
        self._warmup_steps = warmup_steps
        self._group = group
        self._weight_decay = weight_decay
        self._norm = torch.zeros((), device=device)
        self._captures = captures
        self._fallback = Fallback(fallback)
        self._on_fallback = on_fallback
        self._capture = capture if capture is not None else shared_capture(device)
        self._captured: Captured[None] | None = None
        self._num_calls = 0
        self._baked: list[dict[str, Any]] = []
        self._addresses: list[_Place] = []
        self._prepare()
        if isinstance(optimizer, torch.optim.Optimizer):
            this = weakref.ref(self)  # an optimizer outlives its graphs
            optimizer.register_load_state_dict_post_hook(lambda _: _after_load(this()))
        lifecycle.register(self)

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._captured is not None

    def step(self) -> torch.Tensor | None:
        """Clip, decay, update: queued, not waited for. Returns the norm of the gradients before clipping, [], float32, always
        the same memory; None without `max_norm`.

        Bitwise the norm and the gradients of `torch.nn.utils.clip_grad_norm_` (over the parameters in the order of `gradients`,
        if that holds all), but for one case: on a GPU, where `gradients` holds all and knows their norm (one rank, or
        `measures_reduced`) and not `exact_norm`. Then no gradient is read again, and the norm, made of the groups' (float64
        sums), differs in the last digits. Raises `GraphError` where something changed that the graph cannot follow.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._require_state()
            self._run()
            return self._result
        self._require_learning_rates()
        with self._capture.on_stream():
            if self._captured is not None:
                self._require_unchanged()
                self._captured.replay()
            elif self._captures and self._num_calls >= self._warmup_steps:
                self._capture_and_replay()
            else:
                self._run()
        self._num_calls += 1
        return self._result

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """The learning rate from the next step on, for all groups or by group. On the step's stream, without waiting."""
        groups = self._optimizer.param_groups
        rates = [lr] * len(groups) if isinstance(lr, (int, float)) else list(lr)
        self._require_learning_rates()
        with self._capture.on_stream():
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)

    def reset(self) -> None:
        """Give up the graph; the next calls warm up and capture anew. The optimizer keeps its state. On any thread, while
        nothing of it runs."""
        captured, self._captured = self._captured, None
        self._num_calls = 0
        if captured is not None:
            captured.destroy()

    # ------------------------------------------------------------------------------------------------------- the step

    def _run(self) -> None:
        self._clip()
        if self._weight_decay is not None:
            self._weight_decay.apply()
        if has_own_gate(self._optimizer):
            self._optimizer.gated_step(self._gate)
        else:
            self._gated_adam(self._gate)

    @torch.no_grad()
    def _clip(self) -> None:
        """Without a branch of the host's: the coefficient is at most 1, and always multiplied."""
        if self._max_norm is None:
            return
        owned = self._gradients if self._owns_all else None
        is_known = owned is not None and not self._exact_norm and self._device.type != "cpu"
        total = owned.total_norm() if owned is not None and is_known else None
        if total is None:
            measured = owned.parameters if owned is not None else self._trained()
            total = torch.nn.utils.get_total_norm([parameter.grad for parameter in measured if parameter.grad is not None])
        self._norm.copy_(total)
        if self._max_norm == float("inf"):
            return
        if self._gradients is not None and self._owns_all:
            coefficient = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)
            for storage in self._gradients.storages:
                storage.mul_(coefficient)
        else:
            torch.nn.utils.clip_grads_with_norm_(self._trained(), self._max_norm, total)

    def _gated_adam(self, gate: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.grad_scale = None
        optimizer.found_inf = gate
        optimizer.step()

    def _capture_and_replay(self) -> None:
        if self._has_new_parameters():  # state made in a capture would be made again by every replay
            self._make_state()
        if self._group is not None:
            dist.barrier(self._group)
        try:
            captured = self._capture.capture(self._run, "the optimizer's step")
        except GraphError as error:
            if self._fallback is Fallback.RAISE:
                raise
            self._captures = False
            self._on_fallback(str(error))
            self._run()
            return
        self._baked = self._settings()
        self._addresses = list(self._places())
        self._captured = captured
        captured.replay()

    def _make_state(self) -> None:
        """Moments and step counts as at the first step, by one with the gate closed."""
        if has_own_gate(self._optimizer):
            self._optimizer.gated_step(self._closed)
        else:
            self._gated_adam(self._closed)

    # -------------------------------------------------------------------------------------------------- what may not change

    @property
    def _result(self) -> torch.Tensor | None:
        return self._norm if self._max_norm is not None else None

    def _prepare(self) -> None:
        prepare_optimizer_for_graph(self._optimizer)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def after_load(self) -> None:
        """The optimizer has loaded a state, which lies elsewhere and has its own settings: prepare it again, capture anew."""
        self.reset()
        self._prepare()

    def _require_learning_rates(self) -> None:
        for number, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates, strict=False)):
            if group["lr"] is not rate:
                text = f"the learning rate of parameter group {number} was replaced, and the graph reads the old tensor"
                raise GraphError(f"{text}: call set_lr(), or fill group['lr'] in place")

    def _require_unchanged(self) -> None:
        for number, (group, baked) in enumerate(zip(self._settings(), self._baked, strict=False)):
            for key, value in baked.items():
                if group.get(key) != value:
                    text = f"{key} of parameter group {number} has become {group.get(key)!r}, and the graph holds {value!r}"
                    remedy = "use ScheduledWeightDecay" if key == "weight_decay" else "call reset(), which captures anew"
                    raise GraphError(f"{text}: {remedy}")
        places = list(self._places())
        if places == self._addresses:
            return
        number, place, what, _ = next(
            (now for now, then in zip(places, self._addresses, strict=False) if now != then), places[-1]
        )
        text = f"{what} of parameter {place} in group {number} is no longer what the optimizer's graph reads"
        raise GraphError(f"{text}: call reset() after moving or adding parameters, gradients or optimizer state")

    def _require_state(self) -> None:
        if self._has_new_parameters():
            raise GraphError("the optimizer is captured before its first step: run at least one eager warm-up step")

    def _has_new_parameters(self) -> bool:
        state = getattr(self._optimizer, "state", None)
        return state is not None and any(not state.get(parameter) for parameter in self._trained())

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [
            {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
            for group in groups
        ]

    def _places(self) -> Iterator[_Place]:
        """All that the graph reads or writes."""
        state = getattr(self._optimizer, "state", {})
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield number, place, "memory", parameter.data_ptr()
                yield number, place, "grad", 0 if parameter.grad is None else parameter.grad.data_ptr()
                for key, value in (state.get(parameter) or {}).items():
                    if isinstance(value, torch.Tensor):
                        yield number, place, key, value.data_ptr()

    def _trained(self) -> list[Any]:
        groups = self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]


def _same_parameters(optimizer: Gateable, gradients: GradientGroups) -> bool:
    ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad}
    return ours == {id(parameter) for parameter in gradients.parameters if parameter.requires_grad}


def _after_load(graph: OptimizerGraph | None) -> None:
    if graph is not None:
        graph.after_load()
