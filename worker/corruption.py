"""Makes injected numeric faults strike: the numbers in a rank's memory really change, as broken hardware or data change them.

A fault strikes in replays as the physics says: a transient one once in the job, a device's whenever that device computes, the
data's wherever the data go. Nothing here knows whether a pass is a replay.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.numeric_faults import NumericFault


class Marks(Protocol):
    """Remembers which faults have struck; `faults.StrikeMarks` does so durably."""

    def first_time(self, fault: NumericFault) -> bool: ...


class MemoryMarks:
    """Marks of one process."""

    def __init__(self) -> None:
        self._struck: set[str] = set()

    def first_time(self, fault: NumericFault) -> bool:
        """Remember that this fault strikes now; False if it has struck before."""
        is_first = str(fault) not in self._struck
        self._struck.add(str(fault))
        return is_first


class Strikes:
    """Which of a rank's numeric faults strike now, computing on `device` (its UUID): in a replay, too, as the physics says.

    Call `begin_pass` at the head of every pass of an iteration, `takes` with every batch, then ask `strikes` for each place
    where a fault could do so, in the order in which they are computed. `say` is told once of each that has struck.
    """

    def __init__(
        self, faults: Sequence[object], rank: int, device: str, marks: Marks, say: Callable[[str], None] | None = None
    ) -> None:
        ours = [f for f in faults if isinstance(f, NumericFault) and not f.is_data]
        self._armed = [f for f in ours if f.device == device or (not f.device and f.rank == rank)]
        self.is_armed = any(isinstance(f, NumericFault) for f in faults)
        """A numeric fault is armed on any rank: what this run finds is marked `injected`."""
        self._rank = rank
        self._marks = marks
        self._say = say or _say
        self._said: set[str] = set()
        self._iteration = 0
        self._content: int | None = None

    def begin_pass(self, iteration: int) -> None:
        """A forward and backward pass of `iteration` (1-based, global) begins; its parameters are about to be read."""
        self._iteration = iteration
        self._content = None

    def takes(self, batch: Any) -> None:
        """The rank computes on `batch` from now on."""
        if any(fault.when for fault in self._armed):
            self._content = content_hash(batch)

    def at(self, site: str) -> list[NumericFault]:
        """The faults of that site that may strike on this rank."""
        return [fault for fault in self._armed if fault.site == site]

    def strikes(self, fault: NumericFault) -> bool:
        """Whether it does now; a transient one does once."""
        if fault.device:
            last = fault.last_iteration
            if self._iteration < fault.first_iteration or (last is not None and self._iteration > last):
                return False
        elif self._iteration != fault.iteration:
            return False
        if fault.when is not None and (self._content is None or self._content % fault.when[1] != fault.when[0]):
            return False
        if not fault.device and not fault.repeat and not self._marks.first_time(fault):
            return False
        if str(fault) not in self._said:
            self._said.add(str(fault))
            self._say(f"rank {self._rank}: injected fault: {fault}")
        return True


class Corruption(Strikes):
    """The numeric faults that may strike on one rank, where each pass is computed by the host's calls. All calls on the
    training thread.

    Call `damage_loss` with every loss before `backward`. Gradients are damaged by hooks on the parameters, so before any
    communication. In a CUDA graph: `cuda_graph.graph_corruption`.
    """

    def __init__(
        self,
        faults: Sequence[object],
        rank: int,
        device: str,
        marks: Marks,
        module: torch.nn.Module | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(faults, rank, device, marks, say)
        self._parameters = dict(module.named_parameters()) if module is not None else {}
        for fault in self.at("grad"):
            parameter = damaged_parameter(fault, self._parameters)
            parameter.register_hook(self._grad_hook(fault))  # type: ignore[no-untyped-call]

    def begin_pass(self, iteration: int) -> None:
        """As of all strikes; damages parameters."""
        super().begin_pass(iteration)
        damage_parameters(self, self._parameters)

    def damage_loss(self, loss: torch.Tensor) -> None:
        """`loss`: [], float32; its value changes in place where a fault strikes, the graph behind it does not."""
        for fault in self.at("loss"):
            if self.strikes(fault):
                damage(loss.data, fault)

    def _grad_hook(self, fault: NumericFault) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            if not self.strikes(fault):
                return None
            damaged = grad.clone(memory_format=torch.contiguous_format)
            damage(damaged, fault)
            return damaged

        return hook


def damage_parameters(strikes: Strikes, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Damage the parameters in memory whose faults strike now."""
    for fault in strikes.at("param"):
        if strikes.strikes(fault):
            damage(damaged_parameter(fault, parameters).data, fault)


def damaged_parameter(fault: NumericFault, parameters: Mapping[str, torch.nn.Parameter]) -> torch.nn.Parameter:
    """The one that the fault is about. Raises `UsageError` where the model has none such."""
    if fault.parameter:
        found = parameters.get(fault.parameter)
    else:
        found = next((p for p in parameters.values() if p.dim() == 1), next(iter(parameters.values()), None))
    if found is None or found.dtype != torch.float32:
        raise UsageError(f"--fault {fault}: the model has no float32 parameter {fault.parameter!r}")
    return found


def damage(tensor: torch.Tensor, fault: NumericFault) -> None:
    """Change one number of a float32 tensor in place, as the fault's kind says."""
    flat = tensor.view(-1)
    element = int(flat.abs().nan_to_num(0.0).argmax()) if fault.element is None else fault.element
    check_element(fault, flat.numel())
    one = flat[element : element + 1]
    if fault.kind == "bitflip":
        mask = 1 << fault.bit if fault.bit < 31 else -(1 << 31)
        one.view(torch.int32).bitwise_xor_(mask)
    elif fault.kind == "scale":
        one.mul_(fault.factor)
    else:
        one.fill_(float(fault.kind))


def check_element(fault: NumericFault, num_elements: int) -> None:
    """Raise `UsageError` where the fault's element is none of so many."""
    if fault.element is not None and fault.element >= num_elements:
        raise UsageError(f"--fault {fault}: there is no element {fault.element} among {num_elements}")


def content_hash(batch: Any) -> int:
    """A number for the content of nested tensors, the same on every device and in every replay."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch):
            yield from _tensors(batch[key])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
