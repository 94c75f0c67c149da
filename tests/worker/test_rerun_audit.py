"""Audit without processes: what is learned, what is a mismatch, and whom it accuses."""

import math

import pytest

from rsup.worker.rerun.audit import Compared, Jump, Tolerances, audit_shift, compare, judge_audit
from rsup.worker.rerun.contract import Checked
from rsup.worker.rerun.replica_axis import ReplicaAxis


def audit(size: int, shift: int, off: dict[int, float], check: str = "loss") -> list[Compared]:
    """`off`: by the data's rank, how much its value differs elsewhere; the others agree."""
    values = {check: (1.0, 1.0)}
    return [Compared(rank, (rank + shift) % size, {check: off.get(rank, 0.0)}, values) for rank in range(size)]


def by_device(size: int, shift: int, *broken: int) -> list[Compared]:
    """Devices that compute everything a little wrong."""
    off = {rank for rank in range(size) if (rank in broken) != ((rank + shift) % size in broken)}
    off |= {rank for rank in broken if (rank + shift) % size in broken}
    return audit(size, shift, dict.fromkeys(off, 0.3))


@pytest.mark.parametrize("size", [3, 4, 5])
def test_one_device_that_computes_wrongly_is_found(size: int) -> None:
    axis = ReplicaAxis.of_world(size)
    for broken in range(size):
        for shift in range(1, size):
            judgement = judge_audit(by_device(size, shift, broken), Tolerances(), axis)
            assert judgement is not None
            if 2 * shift == size:  # pairs that swap data: each mismatch has the same two devices
                assert judgement.verdict == "undecided" and not judgement.accused
            else:
                assert (judgement.verdict, judgement.accused) == ("persistent", (broken,)), judgement
    assert judge_audit(by_device(size, 1), Tolerances(), axis) is None


def test_audits_go_round_the_other_devices_and_avoid_swaps() -> None:
    assert [audit_shift(2, number) for number in range(3)] == [1, 1, 1]
    assert [audit_shift(3, number) for number in range(3)] == [1, 2, 1]
    assert [audit_shift(4, number) for number in range(4)] == [1, 3, 1, 3]


def test_several_audits_with_other_shifts_are_judged_together() -> None:
    axis = ReplicaAxis.of_world(4)
    judgement = judge_audit([*by_device(4, 2, 1), *by_device(4, 1, 1)], Tolerances(), axis)
    assert judgement is not None and (judgement.verdict, judgement.accused) == ("persistent", (1,))


@pytest.mark.parametrize(
    ("size", "compared", "reason"),
    [
        (2, by_device(2, 1, 0), "of two devices"),
        (4, by_device(4, 1, 0, 2), "no single device"),
        (4, by_device(4, 1, 0, 1), "no single device"),
        (4, audit(4, 1, {0: 0.5}), "no single device"),
        (3, audit(3, 1, {0: math.inf, 1: 0.2, 2: math.nan}), "no single device"),
    ],
)
def test_what_one_device_does_not_explain_stays_undecided(size: int, compared: list[Compared], reason: str) -> None:
    """Of two devices both are named: an undecided case makes its devices watched, not more."""
    judgement = judge_audit(compared, Tolerances(), ReplicaAxis.of_world(size))
    assert judgement is not None and judgement.verdict == "undecided"
    assert judgement.accused == ((0, 1) if size == 2 else ())
    assert reason in judgement.reason


def test_of_two_devices_the_one_that_does_not_reproduce_itself_is_named() -> None:
    axis = ReplicaAxis.of_world(2)
    one, other = by_device(2, 1, 0)
    restless = Compared(one.rank, one.ran_on, one.differences, one.values, {"loss": 0.1}, differs_in_place=True)
    judgement = judge_audit([restless, other], Tolerances(), axis)
    assert judgement is not None and (judgement.verdict, judgement.accused) == ("transient", (0,))
    both = judge_audit([restless, Compared(1, 0, {"loss": 0.3}, {}, {}, differs_in_place=True)], Tolerances(), axis)
    assert both is not None and both.verdict == "undecided" and not both.accused


def test_a_model_parallel_replica_is_suspect_as_a_whole() -> None:
    axis = ReplicaAxis(((0, 1), (2, 3), (4, 5)))
    compared = [Compared(rank, axis.next_of(rank, 1), {"loss": 0.2 if rank in (0, 2) else 0.0}) for rank in axis.ranks]
    judgement = judge_audit(compared, Tolerances(), axis)
    assert judgement is not None and (judgement.accused, judgement.suspect_of) == ((2, 3), 2)


def test_an_echo_of_the_first_bad_reduction_accuses_nobody_else() -> None:
    axis = ReplicaAxis.of_world(4)
    second = "grad norm of bucket 0, reduction 2"
    compared = [
        Compared(one.rank, one.ran_on, {"grad norm of bucket 0": one.differences["loss"], second: 0.5}, {})
        for one in by_device(4, 1, 3)
    ]
    judgement = judge_audit(compared, Tolerances(), axis)
    assert judgement is not None and (judgement.verdict, judgement.accused) == ("persistent", (3,))
    tolerances = Tolerances()
    assert tolerances.learn(compared) and tolerances[second] == 0.0, "nothing is learned from an echo"


def test_tolerances_come_from_healthy_devices_and_never_from_a_mismatch() -> None:
    tolerances = Tolerances()
    assert not tolerances.learn(audit(4, 1, {0: 1e-4, 1: 2e-4, 2: 1.5e-4, 3: 1e-4}))
    assert tolerances["loss"] == pytest.approx(8e-4) and tolerances["other"] == 0.0
    assert not tolerances.mismatches(audit(4, 1, {0: 7e-4})[0]) and tolerances.mismatches(audit(4, 1, {0: 9e-4})[0])
    for far in (0.3, math.inf, math.nan, 0.009):
        fresh = Tolerances()
        assert fresh.learn(audit(4, 1, {1: far, 2: far})), far
        assert fresh["loss"] == 0.0
        assert judge_audit(audit(4, 1, {1: far, 2: far}), fresh, ReplicaAxis.of_world(4)) is not None
    assert Tolerances(1e-6)["loss"] == 1e-6


def test_what_was_learned_survives_a_checkpoint() -> None:
    tolerances = Tolerances()
    tolerances.learn(audit(3, 1, {0: 1e-7}))
    other = Tolerances()
    other.load(tolerances.state() | {"broken": math.nan, "far": 7.0})
    assert other["loss"] == tolerances["loss"] > 0 and other["broken"] == other["far"] == 0.0


def test_values_that_are_missing_on_one_side_do_not_agree() -> None:
    own = [Checked("loss", 2.0), Checked("nan", math.nan), Checked("gone", 1.0)]
    compared = compare(0, 1, own, {"loss": 2.0, "nan": math.nan, "new": 3.0}, own[:2])
    assert compared.differences == {"loss": 0.0, "nan": 0.0, "gone": math.inf, "new": math.inf}
    assert compared.in_place == {"loss": 0.0, "nan": 0.0}


def test_a_jump_is_a_value_far_above_the_usual() -> None:
    jump = Jump()
    assert not any(jump.jumped(1.0 + 0.1 * (number % 3)) for number in range(20))
    assert jump.jumped(4.0) and jump.jumped(math.nan) and not jump.jumped(1.1)
    fresh = Jump()
    assert not any(fresh.jumped(value) for value in (1.0, 50.0, 2.0)), "the first ones are learned from"
    falling = Jump()
    assert not any(falling.jumped(100 * 0.9**number) for number in range(100))
    raised = Jump()
    assert any([raised.jumped(1.0) for _ in range(40)] + [raised.jumped(10.0)])
    assert not [raised.jumped(10.0) for _ in range(60)][-1], "a new level becomes usual"
