"""Gradients in memory that stays where it is: one block, cut into groups that are measured and reduced as wholes.

A graph reads and writes addresses, so gradients must not move; and flat groups need one kernel where parameters need hundreds.
The groups are those of the rerun machine's gradient checks (last parameters first, 25 MB), so a group's number, and with it the
name of its check and its baseline, is the same with and without a graph.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.cuda_graph.gradient_reduction import Reduction, SideStreams
from rsup.worker.rerun.gradient_checks import GROUP_BYTES, groups_of
from rsup.worker.rerun.gradient_norms import local_norms

OnNorm = Callable[[int, torch.Tensor], None]
"""Gets a group's number and its norm: [], float32."""
_PARAMETER_BYTES = 16
"""A gradient begins at a multiple of it: fused kernels then load four float32 at once."""
_GROUP_BYTES = 512
"""So does a group: what torch's allocator gives each tensor."""


class GradientGroups:
    """The gradients of `parameters`, all on one device; those that need none have none, and count for the groups only.

    `group`: the ranks over which gradients are averaged, of the device's backend; None: all ranks, where there are any.
    `names`: of the parameters, for errors. `measures_reduced`: with several ranks, measure each group once more when it is
    reduced, beside the next group's reduction, so that clipping need not read all gradients again. `in_rank_order`: gather all
    ranks' gradients and add them in the order of the ranks, so that three or more get the bits that they get under
    `deterministic.rank_order_hook`.

    From now on `zero_` takes the place of `optimizer.zero_grad`, which would drop the gradients. Raises `GraphError` for
    parameters that have no flat place: DTensors, several devices.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None = None,
        group_bytes: int = GROUP_BYTES,
        names: Sequence[str] | None = None,
        measures_reduced: bool = False,
        in_rank_order: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._names = names
        self._group = group
        self._in_rank_order = in_rank_order
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.device = self._one_device()
        places = list(groups_of(self.parameters, group_bytes))
        self.num_groups = len(places)
        blocks = _Blocks(self.parameters, places, self.device)
        self.storages = blocks.storages
        """One tensor for each dtype: all gradients of it, with zeros between."""
        self._flats = blocks.flats
        self._trained = [[place for place in group if self.parameters[place].requires_grad] for group in places]
        self._pass: Reduction | None = None
        self._streams = SideStreams(self.device)
        self._is_watching = False
        self._views = blocks.views
        self.norms = torch.zeros(self.num_groups, device=self.device)
        """[num_groups], float32: local norms of the last `reduce`, before the reduction."""
        self._reduced_norms = torch.zeros_like(self.norms) if measures_reduced and self.world_size > 1 else None
        self.is_measured = False
        """`reduce` has run at least once."""
        self._averages = self.device.type == "cuda" and self.world_size > 1 and _uses_nccl(group)
        self.attach()

    def attach(self) -> None:
        """Make our memory the parameters' `.grad`, as at the start."""
        for place, view in self._views.items():
            self.parameters[place].grad = view

    def zero_(self) -> None:
        """Zero all gradients in place. In the step, before the first backward; a kernel for each dtype."""
        for storage in self.storages:
            storage.zero_()

    def reduce(self, on_norm: OnNorm | None) -> None:
        """Average the gradients over the ranks, after measuring this rank's own. In the step, after the last backward.

        `on_norm` gets each group's number and local norm ([], float32, a view of `norms`), from float64 sums: finite gradients
        never give Inf. None: nobody asks for norms, and several ranks take none. With several ranks a group's reduction runs
        beside the next group's norm. NCCL averages (each rank's part is divided before the sum); gloo gets divided parts to
        sum, as DDP does it.
        """
        with self.reducing(on_norm):
            pass

    @contextlib.contextmanager
    def reducing(self, on_norm: OnNorm | None) -> Iterator[None]:
        """The same, around the backward of the last micro-batch: a group is measured, and its reduction begins, as soon as that
        has left its last gradient, so that the ranks communicate while they compute. Groups go in order on all ranks, whichever
        is complete first. Nothing else may run a backward inside."""
        if self.world_size > 1:
            self._watch()
            self._pass = self._new_pass(measures=on_norm is not None)
        try:
            yield
        finally:
            under_way, self._pass = self._pass, None
        with torch.no_grad():
            self._end(under_way, on_norm)

    def _new_pass(self, measures: bool) -> Reduction:
        num_missing = [len(places) for places in self._trained]
        measures_reduced = self._reduced_norms is not None
        return Reduction(
            self._flats,
            num_missing,
            self._group,
            self._averages,
            self._streams,
            measures,
            measures_reduced,
            self._in_rank_order,
        )

    def _end(self, under_way: Reduction | None, on_norm: OnNorm | None) -> None:
        """Start what is left, wait on the stream for the reductions, and hand out the norms."""
        if under_way is None:
            self._store(local_norms([flat for flats in self._flats for flat in flats]), self.norms)
        else:
            under_way.finish()
            if under_way.norms:
                self._store(torch.cat(under_way.norms), self.norms)
            if self._reduced_norms is not None:
                self._store(torch.cat(under_way.reduced_norms), self._reduced_norms)
        self.is_measured = True
        if on_norm is not None:
            for number in range(self.num_groups):
                on_norm(number, self.norms[number])

    def _watch(self) -> None:
        """Have ourselves told of each gradient that is complete; once."""
        if self._is_watching:
            return
        self._is_watching = True
        for number, places in enumerate(self._trained):
            for place in places:
                hook = functools.partial(_tell, weakref.ref(self), number)  # C++ keeps it where no garbage collector looks
                self.parameters[place].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _gradient_is_there(self, number: int) -> None:
        """On autograd's thread, whose stream is that of the forward pass."""
        if self._pass is not None and not self._pass.gradient_came(number):
            raise GraphError(
                "a second backward runs inside reducing(), whose gradients are on their way: only the last belongs there"
            )

    def total_norm(self) -> torch.Tensor | None:
        """The norm of all gradients as `reduce` has left them, [], float32, from those of the groups. None before the first
        `reduce`, and with several ranks where reduced gradients are not measured."""
        norms = self._reduced_norms if self.world_size > 1 else self.norms
        if norms is None or not self.is_measured:
            return None
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total

    def check_in_place(self) -> str:
        """Name of a parameter whose `.grad` is no longer ours; empty if there is none. On the host, without kernels."""
        for place, view in self._views.items():
            gradient = self.parameters[place].grad
            if gradient is None or gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                return self._name(place)
        return ""

    def _store(self, measured: torch.Tensor, norms: torch.Tensor) -> None:
        """`measured`: of all flat tensors, in order; a group with several dtypes has several, one without gradients none."""
        if all(len(flats) == 1 for flats in self._flats):
            norms.copy_(measured)
            return
        first = 0
        for number, flats in enumerate(self._flats):
            norms[number].copy_(torch.linalg.vector_norm(measured[first : first + len(flats)]))
            first += len(flats)

    def _one_device(self) -> torch.device:
        trained = [place for place, parameter in enumerate(self.parameters) if parameter.requires_grad]
        if not trained:
            raise GraphError("no parameter needs a gradient: there is nothing to train")
        for place in trained:
            parameter = self.parameters[place]
            if isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor):
                text = f"{self._name(place)} is sharded (a DTensor), and static gradient storage holds plain tensors"
                raise GraphError(f"{text}: use DDP or GradientGroups on an unsharded model, or no full-iteration graph")
            if parameter.device != self.parameters[trained[0]].device:
                text = f"{self._name(place)} is on {parameter.device}, others on {self.parameters[trained[0]].device}"
                raise GraphError(f"{text}: a graph's gradients are on one device; make a GradientGroups for each")
        return self.parameters[trained[0]].device

    def _name(self, place: int) -> str:
        if self._names is not None:
            return self._names[place]
        return f"parameter {place} of shape {tuple(self.parameters[place].shape)}"


def _tell(groups: "weakref.ref[GradientGroups]", number: int, parameter: torch.Tensor) -> None:
    this = groups()
    if this is not None:
        this._gradient_is_there(number)


class _Blocks:
    """Where each gradient lies. Lays out all groups, one storage for each dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], places: Sequence[Sequence[int]], device: torch.device) -> None:
        self._ends: dict[torch.dtype, int] = {}
        offsets: dict[int, int] = {}
        spans: list[dict[torch.dtype, tuple[int, int]]] = []
        for group in places:
            spans.append(self._lay_out(parameters, group, offsets))
        by_dtype = {dtype: torch.zeros(end, dtype=dtype, device=device) for dtype, end in self._ends.items()}
        self.storages = list(by_dtype.values())
        self.flats = [[by_dtype[dtype][first:end] for dtype, (first, end) in span.items()] for span in spans]
        self.views = {
            place: _view(parameters[place], by_dtype[parameters[place].dtype], offset) for place, offset in offsets.items()
        }

    def _lay_out(
        self, parameters: Sequence[nn.Parameter], group: Sequence[int], offsets: dict[int, int]
    ) -> dict[torch.dtype, tuple[int, int]]:
        spans: dict[torch.dtype, tuple[int, int]] = {}
        for place in group:
            parameter = parameters[place]
            if not parameter.requires_grad:
                continue
            dtype, size = parameter.dtype, parameter.element_size()
            is_first = dtype not in spans
            offset = _rounded_up(self._ends.get(dtype, 0), (_GROUP_BYTES if is_first else _PARAMETER_BYTES) // size)
            offsets[place] = offset
            self._ends[dtype] = offset + parameter.numel()
            spans[dtype] = (offset if is_first else spans[dtype][0], self._ends[dtype])
        return spans


def _view(parameter: nn.Parameter, storage: torch.Tensor, offset: int) -> torch.Tensor:
    """The gradient's memory, laid out as the parameter's where that is dense: fused optimizers need the same strides."""
    kept = torch.empty_like(parameter, device="meta").stride()
    return storage.as_strided(parameter.shape, kept, offset)


def _rounded_up(count: int, multiple: int) -> int:
    return math.ceil(count / max(multiple, 1)) * max(multiple, 1)


def _uses_nccl(group: ProcessGroup | None) -> bool:
    return "cuda:nccl" in dist.get_backend_config(group)
