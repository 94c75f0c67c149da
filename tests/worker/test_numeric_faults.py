"""Injected faults that change numbers: what is accepted, and that the numbers really change, when and where they should."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rsup.supervisor.wire import UsageError
from rsup.worker.corruption import Corruption, MemoryMarks, content_hash, damage
from rsup.worker.faults import Fault, StrikeMarks, check_fault, parse_any_fault
from rsup.worker.numeric_faults import NumericFault, poisons


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "device=GPU-b,kind=bitflip,site=grad,bit=30",
            NumericFault("bitflip", "grad", device="GPU-b", bit=30),
        ),
        ("rank=1,iteration=7,kind=nan,site=loss", NumericFault("nan", "loss", rank=1, iteration=7)),
        ("kind=nan-data,iteration=7", NumericFault("nan-data", iteration=7)),
        ("kind=nan-data,iteration=7,rank=2", NumericFault("nan-data", iteration=7, rank=2)),
        (
            "device=GPU-b,kind=scale,factor=1.5,site=grad,param=norm.weight,element=3,when=1/4,from=5,until=9",
            NumericFault(
                "scale",
                "grad",
                device="GPU-b",
                factor=1.5,
                parameter="norm.weight",
                element=3,
                when=(1, 4),
                first_iteration=5,
                last_iteration=9,
            ),
        ),
        ("rank=0,iteration=3,kind=bitflip,site=param,bit=22", NumericFault("bitflip", "param", iteration=3, bit=22)),
        ("rank=0,iteration=3,kind=inf,site=grad,repeat", NumericFault("inf", "grad", iteration=3, repeat=True)),
        ("rank=1,iteration=25,kind=sigkill", Fault(1, "sigkill", 25)),
    ],
)
def test_what_is_a_fault(text: str, fault: NumericFault | Fault) -> None:
    assert parse_any_fault(text) == fault
    assert parse_any_fault(str(fault)) == parse_any_fault(text.removesuffix(",repeat"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=1,iteration=7,kind=nan", "needs site=, one of loss, grad, param"),
        ("rank=1,iteration=7,kind=nan,site=optimizer", "needs site="),
        ("kind=nan,site=loss", "needs either device=ID"),
        ("device=a,rank=1,iteration=2,kind=nan,site=loss", "needs either device=ID"),
        ("rank=1,kind=nan,site=loss", "iteration= must be a number"),
        ("device=a,iteration=3,kind=nan,site=loss", "iteration= means nothing"),
        ("rank=1,iteration=7,kind=nan,site=loss,from=3", "from= means nothing"),
        ("device=a,kind=nan,site=loss,bit=3", "bit= means nothing for nan at loss"),
        ("device=a,kind=nan,site=loss,element=3", "element= means nothing"),
        ("device=a,kind=bitflip,site=grad,bit=32", "bits 0 to 31"),
        ("device=a,kind=scale,site=grad,factor=nan", "finite number other than 1"),
        ("device=a,kind=scale,site=grad,factor=1", "finite number other than 1"),
        ("device=a,kind=nan,site=grad,when=4/4", "K below N"),
        ("device=a,kind=nan,site=grad,when=x/4", "K below N"),
        ("device=a,kind=nan,site=param", "damaged once and stays so"),
        ("rank=0,iteration=2,kind=nan,site=param,repeat", "damaged once and stays so"),
        ("kind=nan-data", "iteration= must be a number"),
        ("kind=nan-data,iteration=3,site=loss", "site= means nothing for nan-data"),
        ("kind=nan-data,iteration=3,device=a", "device= means nothing"),
        ("kind=nan,site=loss,device=", "has no value"),
        ("kind=nan,site=loss,device=a,site=grad", "given twice"),
        ("kind=nan,site=loss,device=a,often=yes", "unknown key 'often'"),
        ("kind=sneeze,device=a", "unknown key 'device'"),
    ],
)
def test_what_is_none_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        parse_any_fault(text)
    assert str(caught.value).startswith("--fault ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=2,iteration=3,kind=nan,site=loss", "there is no rank 2 among 2"),
        ("kind=nan-data,iteration=3,rank=5", "there is no rank 5 among 2"),
        ("rank=1,iteration=21,kind=nan,site=loss", "no iteration 21 among 1 to 20"),
        ("kind=nan-data,iteration=0", "no iteration 0"),
        ("device=a,kind=nan,site=loss,from=21", "no iteration of 1 to 20"),
        ("device=a,kind=nan,site=loss,from=5,until=4", "no iteration of 1 to 20"),
    ],
)
def test_what_cannot_happen_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_fault(parse_any_fault(text), 2, 20, lambda iteration: False)
    check_fault(parse_any_fault("device=a,kind=nan,site=loss,from=20"), 2, 20, lambda iteration: False)


def damaged(value: float, text: str) -> float:
    tensor = torch.tensor([0.5, value, -0.25])
    fault = parse_any_fault(f"device=a,site=grad,{text}")
    assert isinstance(fault, NumericFault)
    damage(tensor, fault)
    assert tensor[0] == 0.5 and tensor[2] == -0.25
    return float(tensor[1])


def test_the_numbers_really_change() -> None:
    assert math.isnan(damaged(1.0, "kind=nan")) and damaged(1.0, "kind=inf") == math.inf
    assert damaged(1.5, "kind=scale,factor=1.25") == 1.875
    assert damaged(-3.0, "kind=bitflip,bit=31") == 3.0
    assert damaged(2.0, "kind=bitflip,bit=22") == 3.0
    assert math.isinf(damaged(1.0, "kind=bitflip,bit=30"))
    assert damaged(0.75, "kind=bitflip,bit=30,element=1") > 1e38
    with pytest.raises(UsageError, match="no element 3 among 3"):
        damaged(1.0, "kind=nan,element=3")


class Computer:
    """One rank on a device: computes passes of a tiny model, and says what came out."""

    def __init__(self, *faults: str, rank: int = 0, device: str = "a", marks: object = None) -> None:
        torch.manual_seed(1)
        first, self.last = nn.Linear(3, 2), nn.Linear(2, 1)
        self.module = nn.Sequential(first, self.last)
        self.said: list[str] = []
        parsed = [parse_any_fault(fault) for fault in faults]
        self.corruption = Corruption(parsed, rank, device, marks or MemoryMarks(), self.module, self.said.append)  # type: ignore[arg-type]

    def run(self, iteration: int, seed: int = 5) -> tuple[float, float]:
        """Loss and the norm of the gradient of one pass."""
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.module.zero_grad()
        self.corruption.begin_pass(iteration)
        self.corruption.takes({"x": data, "more": [torch.ones(1)]})
        loss = self.module(data).square().mean()
        self.corruption.damage_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(loss.detach()), float(torch.stack([grad.norm() for grad in grads]).norm())


def healthy(iteration: int = 1, seed: int = 5) -> tuple[float, float]:
    return Computer().run(iteration, seed)


def test_a_transient_fault_strikes_once_in_the_job_also_across_attempts(tmp_path: Path) -> None:
    text = "rank=1,iteration=7,kind=nan,site=loss"
    first = Computer(text, rank=1, marks=StrikeMarks(tmp_path, "job"))
    assert first.run(6) == healthy()
    loss, grad = first.run(7)
    assert math.isnan(loss) and grad == healthy()[1]
    assert first.run(7) == healthy()
    assert first.said == [f"rank 1: injected fault: {text}"]
    assert Computer(text, rank=1, marks=StrikeMarks(tmp_path, "job")).run(7) == healthy()
    assert math.isnan(Computer(text, rank=1, marks=StrikeMarks(tmp_path, "another")).run(7)[0])
    assert Computer(text, rank=0).run(7) == healthy() and Computer(text, rank=0).corruption.is_armed
    often = Computer(f"{text},repeat", rank=1)
    assert all(math.isnan(often.run(7)[0]) for _ in range(3)) and often.run(8) == healthy()


def test_a_device_is_faulty_whatever_rank_uses_it_and_whenever_it_computes() -> None:
    text = "device=b,kind=bitflip,site=grad,bit=30,from=3,until=4"
    for rank in (0, 1):
        ours, other = Computer(text, rank=rank, device="b"), Computer(text, rank=rank, device="c")
        assert ours.run(2) == healthy() == ours.run(5)
        for _ in range(2):
            loss, grad = ours.run(3)
            assert loss == healthy()[0] and not grad < 1e30
            assert other.run(3) == healthy()


def test_some_faults_show_for_some_inputs_only() -> None:
    computer = Computer("device=b,kind=nan,site=grad,when=1/3", device="b")
    struck = {seed: math.isnan(computer.run(1, seed)[1]) for seed in range(20)}
    assert 2 <= sum(struck.values()) <= 14
    assert struck == {seed: math.isnan(computer.run(2, seed)[1]) for seed in range(20)}
    batch = {"b": torch.ones(2), "a": [torch.zeros(1), "text"]}
    assert content_hash(batch) == content_hash(dict(reversed(batch.items())))
    assert content_hash(batch) != content_hash({**batch, "b": torch.zeros(2)})


def test_a_damaged_parameter_stays_so() -> None:
    computer = Computer("rank=0,iteration=3,kind=bitflip,site=param,bit=22,param=1.weight,element=1")
    before = computer.last.weight.detach().clone()
    assert computer.run(2) == healthy()
    changed = computer.run(3)
    assert changed != healthy() and computer.run(3) == computer.run(4) == changed
    assert torch.ne(computer.last.weight, before).tolist() == [[False, True]]


def test_a_parameter_that_is_not_there_is_said_at_the_start() -> None:
    """P30: what was asked for and cannot strike is no silence."""
    with pytest.raises(UsageError, match="no float32 parameter 'w'"):
        Computer("device=a,kind=nan,site=grad,param=w")
    with pytest.raises(UsageError, match="no element 2 among 2"):
        Computer("device=a,kind=nan,site=grad,param=1.weight,element=2").run(1)


def test_poisoned_data_are_of_one_rank_and_iteration() -> None:
    faults = [parse_any_fault(text) for text in ("kind=nan-data,iteration=7", "kind=nan-data,iteration=9,rank=1")]
    assert [i for i in range(1, 12) if poisons(faults, 0)(i)] == [7]
    assert [i for i in range(1, 12) if poisons(faults, 1)(i)] == [9]
