"""What the three ranks of `test_rerun_exchange.py` check of one another. A script: each check prints its name when it holds."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.rerun.audit import Audit
from rsup.worker.rerun.checksums import Difference, differing
from rsup.worker.rerun.contract import Checked, Drawn, Judgement, Payload, RankDevice, RankFinding, RerunError
from rsup.worker.rerun.exchange import gather, move
from rsup.worker.rerun.gradient_checks import GradientChecks
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.rotation import Rotation
from rsup.worker.rng import capture_rng, restore_rng

CPU = torch.device("cpu")


@dataclass
class Sample:
    """A batch of a class that only unpickling can make."""

    tokens: torch.Tensor
    name: str


class Unsendable:
    """A batch that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("I stay here")


def check_payloads_of_any_kind_move(rank: int, size: int) -> None:
    axis = ReplicaAxis.of_world(size)
    big = torch.arange(1_000_000)
    batches: dict[int, list[list[Any] | None]] = {
        0: [[{"tokens": torch.full((3, 5), 7), "more": (1, None, "x", [torch.tensor(1.5, dtype=torch.bfloat16)])}] * 4, None],
        1: [[Drawn({"x": big[:10]}, b"states")], None],
        2: [[(big[:10], numpy.arange(3), Sample(torch.ones(2, 2), "s"), torch.tensor(float("nan")))], [torch.zeros(0)]],
    }
    for shift in (1, 2, -1, 3):
        source = axis.next_of(rank, -shift)
        got = move(Payload(batches[rank], bytes([rank]) * 5), axis, shift, None, CPU)
        assert got.rng == bytes([source]) * 5
        assert len(got.batches[0] or []) == [4, 1, 1][source] and (got.batches[1] is None) == (source != 2)
        if source == 0:
            first = (got.batches[0] or [])[3]
            assert torch.equal(first["tokens"], torch.full((3, 5), 7)) and first["more"][:3] == (1, None, "x")
            assert first["more"][3][0].dtype == torch.bfloat16
        if source == 1:
            (drawn,) = got.batches[0] or []
            assert type(drawn) is Drawn and torch.equal(drawn.batch["x"], big[:10]) and drawn.rng == b"states"
        if source == 2:
            tokens, numbers, sample, nan = (got.batches[0] or [])[0]
            assert torch.equal(tokens, big[:10]) and numbers.tolist() == [0, 1, 2] and bool(nan.isnan())
            assert tokens.untyped_storage().nbytes() == 80 or shift == 3, "the rest of the storage did not travel"
            assert sample.name == "s" and sample.tokens.sum() == 4


def check_one_rank_that_cannot_send_stops_all_alike(rank: int, size: int) -> None:
    payload = Payload([[Unsendable() if rank == 1 else torch.ones(1)]], b"")
    try:
        move(payload, ReplicaAxis.of_world(size), 1, None, CPU)
    except RerunError as error:
        assert "rank 1: a batch cannot be moved" in str(error) and "I stay here" in str(error), error
    else:
        raise AssertionError("it moved")
    assert gather(rank, None) == list(range(size)), "and the group is still in step"


def check_digests_find_a_single_bit(rank: int, size: int) -> None:
    axis = ReplicaAxis.of_world(size)
    tensors: dict[str, torch.Tensor] = {
        "half": torch.ones(777, dtype=torch.bfloat16),
        "matrix": torch.arange(100_001, dtype=torch.float32),
        "step": torch.tensor(3.0),
        "zero": torch.zeros(3),
        "nan": torch.full((2,), float("nan")),
    }
    assert differing(tensors, axis, None) == []
    if rank == 1:
        tensors["matrix"].view(torch.int32)[54_321] ^= 1
        tensors["nan"].view(torch.int32)[1] ^= 1
    if rank == 2:
        tensors["zero"] = -tensors["zero"]
        tensors["half"] = tensors["half"].half()
        del tensors["step"]
        tensors["own"] = torch.ones(1)
    expected = [("half", (2,)), ("matrix", (1,)), ("nan", (1,)), ("own", (2,)), ("step", (2,)), ("zero", (2,))]
    assert differing(tensors, axis, None) == [Difference(*one) for one in expected]


class Model(nn.Module):
    """Dropout, and a running mean that differs between ranks on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dropout(self.norm(self.first(x)).relu())
        result: torch.Tensor = self.last(hidden).mean()
        return result


class Training:
    """One rank's iteration, and a device that can be broken: it then corrupts gradients, whatever the data."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.ddp = DistributedDataParallel(self.model, broadcast_buffers=False)
        self.gradients = GradientChecks()
        self.gradients.attach(self.ddp)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.corrupt: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient
        weight: Any = self.model.first.weight
        weight.register_hook(lambda gradient: self.corrupt(gradient))
        torch.manual_seed(100 + rank)
        random.seed(rank)
        self.rng = capture_rng()
        self.batches = [torch.randn(8, 16) for _ in range(3)]
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def run(self, payload: Payload) -> list[Checked]:
        """Forward and backward over the payload from the state of the iteration's start."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[name])
        restore_rng(payload.rng)
        self.gradients.begin()
        self.optimizer.zero_grad()
        checked = []
        for number, batch in enumerate(payload.batches[0] or []):
            loss = self.ddp(batch * random.random())
            loss.backward()
            checked.append(_checked(f"loss #{number}", float(loss.detach()), 0.0))
        return checked + [_checked(message, float(norm), 0.001) for message, norm in self.gradients.take()]

    @property
    def payload(self) -> Payload:
        return Payload([self.batches], self.rng)

    def state(self) -> dict[str, torch.Tensor]:
        buffers = {f"buffer {name}": buffer for name, buffer in self.model.named_buffers()}
        return {name: parameter.data for name, parameter in self.model.named_parameters()} | buffers


def _checked(name: str, value: float, tolerance: float) -> Checked:
    return Checked(name, value, rejected=not abs(value) < 1e6, tolerance=tolerance)


def rotate(training: Training, rotation: Rotation) -> Judgement:
    """A case as the machine runs it, from the first pass to the judgement."""
    first = training.run(training.payload)
    again = training.run(training.payload)
    flagged = {one.check for one, two in zip(first, again, strict=True) if one.rejected and two.rejected}
    finding = RankFinding(
        dist.get_rank(), RankDevice(f"GPU-{dist.get_rank()}"), tuple(sorted(flagged)), (len(training.batches),)
    )
    begun = rotation.begin(finding, training.payload)
    if isinstance(begun, Judgement):
        return begun
    return rotation.end(training.run(begun), again, flagged)


def check_the_loss_is_bitwise_the_same_on_the_next_rank_with_dropout(rank: int, size: int) -> None:
    """The generators' states move along; BatchNorm's running statistics do not matter to a training pass."""
    training = Training(rank)
    training.run(training.payload)
    here = training.run(training.payload)
    for shift in (1, 2):
        there = training.run(move(training.payload, ReplicaAxis.of_world(size), shift, None, CPU))
        owned = gather([one.value for one in there], None)[(rank + shift) % size]
        assert [one.value for one in here if one.check.startswith("loss")] == owned[:3]
    assert len({one.value for one in here}) == len(here) > 3


def check_a_broken_device_a_bad_batch_and_both(rank: int, size: int) -> None:
    training = Training(rank)
    rotation = Rotation(ReplicaAxis.of_world(size), None, RankDevice(f"GPU-{rank}"), training.state)
    assert rotation.why_impossible() == ""
    training.run(training.payload)
    rotation.learn_state()
    assert rotation.compare_state() == []
    if rank == 1:
        training.corrupt = lambda gradient: gradient * 1e36
    judgement = rotate(training, rotation)
    assert (judgement.verdict, judgement.accused, judgement.data_dependent) == ("persistent", (1,), False), judgement
    assert [finding.rank for finding in rotation.findings if finding.flagged] == [1]
    outcome = rotation.outcomes[1]
    assert not outcome.rejected_there and outcome.ran_on == 2 and all(abs(number) < 100 for number in outcome.values.values())
    if rank == 0:
        training.batches[2][0, 0] = float("nan")
    both = rotate(training, rotation)
    assert (both.verdict, both.accused) == ("persistent", (1,)), both
    training.corrupt = lambda gradient: gradient
    data = rotate(training, rotation)
    assert (data.verdict, data.accused) == ("application", ()), data
    if rank == 2:
        training.batches[0][0, 0] = float("inf")
    if rank == 1:
        training.batches[0][0, 0] = float("inf")
    every = rotate(training, rotation)
    assert every.verdict == "undecided" and "all 3 replicas failed" in every.reason, every


def check_a_corrupted_parameter_is_found_and_buffers_that_differ_by_nature_are_not(rank: int, size: int) -> None:
    training = Training(rank)
    rotation = Rotation(ReplicaAxis.of_world(size), None, RankDevice(f"GPU-{rank}"), training.state)
    training.run(training.payload)
    rotation.learn_state()
    if rank == 2:
        training.model.last.weight.data.view(torch.int32)[0, 7] ^= 1 << 12
    assert rotation.compare_state() == [Difference("last.weight", (2,))]


def check_uneven_batches_cannot_rotate(rank: int, size: int) -> None:
    training = Training(rank)
    rotation = Rotation(ReplicaAxis.of_world(size), None, RankDevice(f"GPU-{rank}"), training.state)
    finding = RankFinding(rank, RankDevice(f"GPU-{rank}"), ("loss",) if rank == 0 else (), (rank + 1,))
    begun = rotation.begin(finding, training.payload)
    assert isinstance(begun, Judgement) and "different numbers of batches" in begun.reason


def check_an_audit_finds_a_flipped_bit_that_gives_no_nan(rank: int, size: int) -> None:
    training = Training(rank)
    audit = Audit(ReplicaAxis.of_world(size), None, 10, CPU)
    verdicts = []
    for iteration in range(1, 6):
        own = training.run(training.payload)
        begun = audit.begin(training.payload, (3,))
        assert isinstance(begun, Payload)
        verdicts.append(audit.end(training.run(begun), own, None))
        assert audit.is_calibrating == (iteration < 2)
        if iteration == 3 and rank == 1:
            training.corrupt = _flip_mantissa_bit
    assert verdicts[:3] == [None] * 3
    for judgement in verdicts[3:]:
        assert judgement is not None and (judgement.verdict, judgement.accused) == ("persistent", (1,)), judgement
    assert [audit.due(iteration) for iteration in (9, 10, 11)] == [False, True, False] and audit.due(11, jumped=True)


def _flip_mantissa_bit(gradient: torch.Tensor) -> torch.Tensor:
    flipped = gradient.clone()
    flipped.view(torch.int32)[3, 3] ^= 1 << 21
    return flipped


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in CHECKS:
        one(dist.get_rank(), dist.get_world_size())
        print(f"holds: {one.__name__}", flush=True)
    dist.destroy_process_group()
