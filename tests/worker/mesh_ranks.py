"""What four ranks of `test_rerun_mesh.py` check on a 2x2 mesh of data and tensor parallelism. A script."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rsup.worker.rerun.checksums import Difference, differing, sharded_names
from rsup.worker.rerun.contract import Checked, Judgement, Payload, RankDevice, RankFinding
from rsup.worker.rerun.exchange import gather
from rsup.worker.rerun.gradient_checks import GradientChecks
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.rotation import Rotation
from rsup.worker.rng import capture_rng, restore_rng


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make_model(mesh: DeviceMesh, with_fsdp: bool) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    if with_fsdp:
        fully_shard(model, mesh=mesh["dp"])
    return model


class Training:
    """A rank's iteration of two micro-batches. Members of a replica draw the same data."""

    def __init__(self, mesh: DeviceMesh, rank: int) -> None:
        self.model = make_model(mesh, with_fsdp=True)
        self.gradients = GradientChecks()
        self.gradients.attach(self.model)
        self.is_broken = False
        self.model[3].register_forward_pre_hook(self._spoil)
        torch.manual_seed(50 + rank // 2)
        self.batches: list[Any] = [{"x": torch.randn(4, 8)} for _ in range(2)]
        self.rng = capture_rng()

    def _spoil(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * 1e36,) if self.is_broken else inputs

    @property
    def payload(self) -> Payload:
        return Payload([self.batches, None], self.rng)

    def run(self, payload: Payload) -> list[Checked]:
        self.gradients.begin()
        self.model.zero_grad()
        restore_rng(payload.rng)
        checked = []
        for number, batch in enumerate(payload.batches[0] or []):
            loss = self.model(batch["x"]).square().mean()
            loss.backward()
            checked.append(as_checked(f"loss #{number}", loss, 0.0))
        return checked + [as_checked(f"{name} #{n}", norm, 0.001) for n, (name, norm) in enumerate(self.gradients.take())]


def as_checked(name: str, value: torch.Tensor, tolerance: float) -> Checked:
    number = float(value.detach())
    return Checked(name, number, rejected=not abs(number) < 1e6, tolerance=tolerance)


def rotate(training: Training, rotation: Rotation) -> Judgement:
    """A case from the first pass to the judgement."""
    rank = dist.get_rank()
    first = training.run(training.payload)
    again = training.run(training.payload)
    flagged = [one.check for one, two in zip(first, again, strict=True) if one.rejected and two.rejected]
    begun = rotation.begin(RankFinding(rank, RankDevice(f"GPU-{rank}"), tuple(flagged), (2,)), training.payload)
    return begun if isinstance(begun, Judgement) else rotation.end(training.run(begun), again, flagged)


def check_the_axis_of_a_mesh(rank: int, mesh: DeviceMesh) -> None:
    axis = ReplicaAxis.of_mesh(mesh, "dp")
    assert axis.replicas == ((0, 1), (2, 3)) and axis.next_of(1, 1) == 3
    assert ReplicaAxis.of_mesh(mesh, ("dp", "tp")) == ReplicaAxis.of_world(4)
    assert ReplicaAxis.of_mesh(mesh, "tp").replicas == ((0, 2), (1, 3))
    assert ReplicaAxis.of_mesh(mesh["tp"], "tp").ranks == (rank // 2 * 2, rank // 2 * 2 + 1)


def check_losses_are_bitwise_the_same_in_the_other_replica(rank: int, mesh: DeviceMesh) -> None:
    training = Training(mesh, rank)
    rotation = Rotation(ReplicaAxis.of_mesh(mesh, "dp"), None, RankDevice(f"GPU-{rank}"), dict)
    here = training.run(training.payload)
    finding = RankFinding(rank, RankDevice(f"GPU-{rank}"), ("x",) if rank == 0 else (), (2,))
    begun = rotation.begin(finding, training.payload)
    assert isinstance(begun, Payload) and begun.batches[1] is None
    there = training.run(begun)
    owned = gather([one.value for one in there], None)[rotation.axis.next_of(rank, 1)]
    assert [one.value for one in here] == owned and len({*owned[:2]}) == 2
    assert here[2].value != gather(here[2].value, None)[(rank + 1) % 4], "the norm is this rank's shard and data"


def check_a_fault_of_one_member_makes_its_replica_suspect_and_bad_data_nobody(rank: int, mesh: DeviceMesh) -> None:
    training = Training(mesh, rank)
    rotation = Rotation(ReplicaAxis.of_mesh(mesh, "dp"), None, RankDevice(f"GPU-{rank}"), dict)
    training.is_broken = rank == 2
    broken = rotate(training, rotation)
    assert (broken.verdict, broken.accused, broken.suspect_of) == ("persistent", (2, 3), 2), broken
    assert {finding.rank for finding in rotation.findings if finding.flagged} <= {2, 3}
    training.is_broken = False
    if rank in (0, 1):
        training.batches[1]["x"][2, 2] = float("nan")
    data = rotate(training, rotation)
    assert (data.verdict, data.accused) == ("application", ()), data


def check_sharded_state_is_left_out_and_tensor_parallel_shards_are_compared(rank: int, mesh: DeviceMesh) -> None:
    axis = ReplicaAxis.of_mesh(mesh, "dp")
    sharded = dict(make_model(mesh, with_fsdp=True).named_parameters())
    assert sharded_names(sharded, axis) == list(sharded)
    assert differing(sharded, axis, None) == []
    model = make_model(mesh, with_fsdp=False)
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    assert sharded_names(state, axis) == [] and differing(state, axis, None) == []
    weight: Any = model[0].weight
    if rank == 3:
        weight.to_local().data.view(torch.int32)[0, 0] ^= 1
    assert differing(state, axis, None) == [Difference("0.weight", (1, 3))], "no majority of two, and only that column"


CHECKS: Sequence[Any] = [check for name, check in globals().items() if name.startswith("check_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    the_mesh = make_mesh()
    for one in CHECKS:
        one(dist.get_rank(), the_mesh)
        print(f"holds: {one.__name__}", flush=True)
    dist.destroy_process_group()
