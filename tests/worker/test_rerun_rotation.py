"""Rotation, without processes: axes, shifts, the outcome table, and that no combination of faults accuses a healthy device."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rsup.worker.rerun.contract import Checked, Judgement, RankDevice, RankFinding, RerunError, RotatedOutcome
from rsup.worker.rerun.judging import NO_LIKE_DEVICE, UNEVEN, choose_shift, judge, judge_state
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.rotation import compare_values

TP2 = ReplicaAxis(((0, 1), (2, 3), (4, 5)))


def found(rank: int, *flagged: str, model: str = "H200", uuid: str = "", batches: tuple[int, ...] = (1,)) -> RankFinding:
    return RankFinding(rank, RankDevice(uuid or f"GPU-{rank}", model=model), flagged, batches)


def findings_of(size: int, *flagged: int) -> list[RankFinding]:
    return [found(rank, *(["loss"] if rank in flagged else [])) for rank in range(size)]


def outcomes_of(axis: ReplicaAxis, shift: int, **changed: str) -> list[RotatedOutcome]:
    """`r2="same rejected"`: of rank 2's data. The others came out the same."""
    outcomes = []
    for rank in axis.ranks:
        words = changed.get(f"r{rank}", "same").split()
        outcomes.append(
            RotatedOutcome(rank, axis.next_of(rank, shift), "same" in words, "rejected" in words, "incomplete" not in words)
        )
    return outcomes


def test_an_axis_moves_blocks_of_model_parallel_ranks_and_keeps_positions() -> None:
    world = ReplicaAxis.of_world(3)
    assert [world.next_of(rank, 1) for rank in range(3)] == [1, 2, 0]
    assert [world.next_of(rank, -1) for rank in range(3)] == [2, 0, 1]
    assert (world.size, world.replica_size, world.members_of(2), world.counterparts_of(2)) == (3, 1, (2,), (0, 1, 2))
    assert [TP2.next_of(rank, 1) for rank in TP2.ranks] == [2, 3, 4, 5, 0, 1]
    assert [TP2.next_of(rank, 2) for rank in TP2.ranks] == [4, 5, 0, 1, 2, 3]
    assert TP2.members_of(3) == (2, 3) and TP2.counterparts_of(3) == (1, 3, 5) and TP2.replica_of(5) == 2
    for axis, shift, rank in itertools.product((world, TP2), (-2, 0, 1, 4), range(3)):
        assert axis.next_of(axis.next_of(rank, shift), -shift) == rank


def test_an_axis_refuses_ranks_twice_blocks_of_different_sizes_and_unknown_ranks() -> None:
    with pytest.raises(RerunError, match="overlap"):
        ReplicaAxis(((0, 1), (1, 2)))
    with pytest.raises(RerunError, match="equally large"):
        ReplicaAxis(((0, 1), (2,)))
    with pytest.raises(RerunError, match="rank 7 is not on the replica axis"):
        TP2.next_of(7, 1)


@pytest.mark.parametrize(
    ("flagged", "shift"),
    [({0}, 1), ({3}, 1), ({0, 2}, 1), ({0, 1}, 2), ({1, 2}, 2), ({3, 0}, 2), ({0, 1, 2}, 2)],
)
def test_the_shift_brings_failed_data_to_healthy_devices(flagged: set[int], shift: int) -> None:
    axis = ReplicaAxis.of_world(4)
    assert choose_shift(findings_of(4, *flagged), axis) == shift
    landed = {(rank + shift) % 4 for rank in flagged}
    assert landed - flagged, "at least one lands on a healthy one"
    if len(flagged) < 3:
        assert not landed & flagged


@pytest.mark.parametrize(
    ("findings", "why"),
    [
        (findings_of(2, 0, 1), "all 2 replicas failed"),
        (findings_of(3, 0, 1, 2), "all 3 replicas failed"),
        (findings_of(3), "no rank found"),
        (findings_of(3, 0)[:2], "no finding of rank 2"),
        ([found(0, "loss", batches=(4,)), found(1, batches=(3,))], UNEVEN),
        ([found(0, "loss", batches=(4,)), found(1, batches=(4, 4))], UNEVEN),
        ([found(0, "loss"), found(1, model="H100")], NO_LIKE_DEVICE),
        ([found(0, "loss", uuid="GPU-x"), found(1, uuid="GPU-x")], NO_LIKE_DEVICE),
    ],
)
def test_where_no_shift_works_the_reason_is_said(findings: list[RankFinding], why: str) -> None:
    chosen = choose_shift(findings, ReplicaAxis.of_world(max(len(findings), 2 if why != "no finding of rank 2" else 3)))
    assert isinstance(chosen, str) and why in chosen


def test_an_unlike_device_is_passed_over_and_so_is_one_with_other_batches() -> None:
    four = [found(0, "loss"), found(1, model="H100"), found(2), found(3)]
    assert choose_shift(four, ReplicaAxis.of_world(4)) == 2
    alternating = [found(0, "loss", batches=(2,)), found(1, batches=(3,)), found(2, batches=(2,)), found(3, batches=(3,))]
    assert choose_shift(alternating, ReplicaAxis.of_world(4)) == 2


WORLD = ReplicaAxis.of_world(3)
FOUR = ReplicaAxis.of_world(4)
PAIR = ReplicaAxis.of_world(2)
TABLE = [
    # axis, flagged, shift, what came of whose data, verdict, accused, data-dependent, another placement, word of the reason
    (PAIR, {0}, 1, {"r0": "", "r1": "rejected"}, "persistent", (0,), False, False, "other data failed on it too"),
    (PAIR, {0}, 1, {"r0": ""}, "persistent", (0,), True, False, "other data is healthy"),
    (PAIR, {0}, 1, {"r0": "same rejected"}, "application", (), False, False, "same rejected values"),
    (PAIR, {0}, 1, {"r0": "same rejected", "r1": "rejected"}, "undecided", (), False, True, "cannot tell apart"),
    (PAIR, {0, 1}, 1, {"r0": "", "r1": ""}, "undecided", (), False, True, "all 2 replicas failed"),
    (WORLD, {2}, 1, {"r2": "", "r1": "rejected"}, "persistent", (2,), False, False, "other data failed on it too"),
    (WORLD, {2}, 2, {"r2": "", "r0": "rejected"}, "persistent", (2,), False, False, "other data failed on it too"),
    (WORLD, {2}, 1, {"r2": ""}, "persistent", (2,), True, False, "other data is healthy on it"),
    (WORLD, {2}, 1, {"r2": "", "r1": ""}, "persistent", (2,), True, False, "came out differently"),
    (WORLD, {2}, 1, {"r2": "same rejected"}, "application", (), False, False, ""),
    (WORLD, {2}, 1, {"r2": "same rejected", "r1": "rejected"}, "undecided", (), False, True, "cannot tell apart"),
    (WORLD, {2}, 1, {"r2": "same rejected", "r1": ""}, "undecided", (), False, True, "cannot tell apart"),
    (WORLD, {2}, 1, {"r2": "rejected"}, "undecided", (), False, True, "rejected there too"),
    (WORLD, {2}, 1, {"r2": "incomplete"}, "undecided", (), False, True, "other checks"),
    (WORLD, {2}, 1, {"r2": "", "r1": "incomplete"}, "persistent", (2,), True, False, "no healthy data ran on it"),
    (WORLD, {2}, 1, {"r2": "", "r0": ""}, "undecided", (), False, True, "do not reproduce each other"),
    (WORLD, {0, 1}, 2, {"r0": "", "r1": ""}, "persistent", (0,), True, False, "which failed as well"),
    (WORLD, {0, 1, 2}, 1, {}, "undecided", (), False, True, "all 3 replicas failed"),
    (FOUR, {0, 1}, 2, {"r0": "", "r2": "rejected", "r1": "same rejected"}, "persistent", (0,), False, False, ""),
    (FOUR, {0, 1}, 2, {"r0": "", "r1": "", "r2": "rejected", "r3": "rejected"}, "persistent", (0, 1), False, False, ""),
    (FOUR, {0, 1}, 2, {"r0": "same rejected", "r1": "same rejected"}, "application", (), False, False, ""),
    (FOUR, {0, 1}, 2, {"r0": "same rejected", "r1": "rejected"}, "undecided", (), False, True, ""),
    (FOUR, {0, 1}, 2, {"r0": "", "r1": "", "r2": "rejected"}, "persistent", (0,), False, False, ""),
    (TP2, {2}, 1, {"r2": "", "r3": "", "r0": "rejected", "r1": ""}, "persistent", (2, 3), False, False, ""),
    (TP2, {2, 3}, 1, {"r2": "", "r3": ""}, "persistent", (2, 3), True, False, ""),
    (TP2, {2, 3}, 1, {"r2": "same rejected", "r3": "same rejected"}, "application", (), False, False, ""),
    (TP2, {2, 3}, 1, {"r2": "same rejected", "r3": ""}, "undecided", (), False, True, "rejected there too"),
    (TP2, {2}, 1, {"r2": "", "r3": "rejected"}, "undecided", (), False, True, "rejected there too"),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].size}x{row[0].replica_size}-{sorted(row[1])}-{row[3]}")
def test_the_outcome_table(row: tuple[Any, ...]) -> None:
    axis, flagged, shift, changed, verdict, accused, data_dependent, another, word = row
    findings = findings_of(len(axis.ranks), *flagged)
    judgement = judge(findings, outcomes_of(axis, shift, **changed), axis)
    assert (judgement.verdict, judgement.accused, judgement.data_dependent) == (verdict, accused, data_dependent), judgement
    assert judgement.another_placement_may_decide is another
    assert word in judgement.reason
    assert judgement.suspect_of == (axis.replica_size if accused else 1)
    order = [2, 0, 1, *range(3, len(axis.ranks))]
    shuffled = judge([findings[i] for i in order if i < len(findings)], outcomes_of(axis, shift, **changed), axis)
    assert shuffled == judgement, "the order of gathering does not matter"


def test_a_rank_without_outcome_leaves_it_open() -> None:
    judgement = judge(findings_of(3, 2), outcomes_of(WORLD, 1, r2="")[:2], WORLD)
    assert judgement.verdict == "undecided" and "rank 2" in judgement.reason


def test_p3_p4_p24_findings_of_several_ranks_and_checks_are_judged_each_by_itself() -> None:
    """P3, P4, P24: no rank's outcome covers another's, and the rank that shows a fault is not blamed for being first."""
    axis = ReplicaAxis.of_world(5)
    findings = [found(0, "loss"), found(1), found(2, "grad norm of bucket 0", "loss"), found(3), found(4)]
    outcomes = outcomes_of(axis, 1, r0="same rejected", r2="", r1="rejected")
    judgement = judge(findings, outcomes, axis)
    assert (judgement.verdict, judgement.accused) == ("persistent", (2,))
    assert "rank 0: its data gave the same rejected values on rank 1" in judgement.reason


def test_state_that_differs_is_corrupted_state_and_names_who_was_outvoted() -> None:
    axis = ReplicaAxis.of_world(3)
    assert judge_state([], axis) is None
    judgement = judge_state([("layer.weight", (1,)), ("optimizer.step", (1,))], axis)
    assert judgement is not None and judgement.verdict == "corrupted state" and judgement.accused == (1,)
    assert judgement.reason == "layer.weight, optimizer.step of rank 1 differ from the majority"
    without_majority = judge_state([("w", (0, 1))], PAIR)
    assert without_majority is not None and without_majority.accused == ()
    assert "without a majority" in without_majority.reason
    in_one_column = judge_state([("w", (3,)), ("v", (0, 2, 4))], TP2)
    assert in_one_column is not None and in_one_column.accused == (3,)


@pytest.mark.parametrize(
    ("there", "flagged", "same", "rejected", "complete"),
    [
        ([("loss", 2.0, False), ("grad", 3.0, False)], set(), True, False, True),
        ([("grad", 3.0, False), ("loss", 2.0, False)], set(), True, False, True),
        ([("loss", 2.1, False), ("grad", 3.0, False)], set(), False, False, True),
        ([("loss", 2.1, False), ("grad", 3.0, False)], {"grad"}, True, False, True),
        ([("loss", 2.0, False), ("grad", 3.0003, False)], {"grad"}, True, False, True),
        ([("loss", 2.0, False), ("grad", math.nan, True)], {"grad"}, False, True, True),
        ([("loss", 2.0, False)], {"grad"}, False, False, False),
        ([("loss", 2.0, False), ("grad", 3.0, False), ("extra", 1.0, False)], set(), True, False, False),
    ],
)
def test_values_are_compared_by_their_owner(there: Any, flagged: set[str], same: bool, rejected: bool, complete: bool) -> None:
    own = [Checked("loss", 2.0), Checked("grad", 3.0, tolerance=0.001)]
    outcome = compare_values(0, 1, own, there, flagged)
    assert (outcome.same, outcome.rejected_there, outcome.complete) == (same, rejected, complete)


def test_the_owners_compare_function_counts_and_one_that_fails_proves_nothing() -> None:
    """P12: a comparison is a mismatch unless a match is proven."""
    near = Checked("x", 1.0, compare=lambda a, b: abs(a - b), tolerance=0.5)
    assert compare_values(0, 1, [near], [("x", 1.4, False)], ()).same
    assert not compare_values(0, 1, [replace(near, compare=lambda a, b: math.nan)], [("x", 1.0, False)], ()).same
    assert not compare_values(0, 1, [replace(near, compare=lambda a, b: 1 / 0)], [("x", 1.0, False)], ()).same


# ------------------------------------------------------------------------------------------- simulated devices and data

DEVICES = ("well", "always nan", "always huge", "own data only", "next data only", "even data only", "a little off")
DATA = ("well", "nan", "huge")


@dataclass(frozen=True)
class Faults:
    """What is wrong with one rank: its device, its data, its replicated state."""

    device: str = "well"
    data: str = "well"
    state: bool = False


def value(data: int, device: int, faults: tuple[Faults, ...]) -> float:
    """What that rank's data gives on that device."""
    bad = faults[device].device
    number = {"well": 1 + data / 10, "nan": math.nan, "huge": 1e20 * (1 + data)}[faults[data].data]
    if faults[device].state:
        return 1e25 * (1 + device)
    hit = {
        "own data only": data == device,
        "next data only": data == (device + 1) % len(faults),
        "even data only": data % 2 == 0,
    }.get(bad, bad.startswith("always"))
    if hit:
        return math.nan if bad == "always nan" else 1e30 * (1 + device) + data
    return number * 1.0001 if bad == "a little off" else number


def rejected(number: float) -> bool:
    return not abs(number) < 1e6


def run_case(faults: tuple[Faults, ...], axis: ReplicaAxis) -> Judgement | None:
    """The whole case: checks, state checksums, rotation, confirmation in place (all faults here are deterministic)."""
    own = [value(rank, rank, faults) for rank in axis.ranks]
    if not any(map(rejected, own)):
        return None
    holders = [rank for rank in axis.ranks if faults[rank].state]
    if holders:
        outvoted = tuple(holders if len(holders) * 2 < axis.size else axis.ranks)
        return judge_state([("weight", outvoted)], axis)
    findings = [found(rank, *(["loss"] if rejected(own[rank]) else [])) for rank in axis.ranks]
    shift = choose_shift(findings, axis)
    if isinstance(shift, str):
        return Judgement("undecided", shift, another_placement_may_decide=True)
    outcomes = []
    for rank in axis.ranks:
        ran_on = axis.next_of(rank, shift)
        there = value(rank, ran_on, faults)
        checked = [Checked("loss", own[rank])]
        outcomes.append(compare_values(rank, ran_on, checked, [("loss", there, rejected(there))], findings[rank].flagged))
    return judge(findings, outcomes, axis)


def combinations(size: int, most: int) -> Iterator[tuple[Faults, ...]]:
    kinds = [Faults(device, data) for device in DEVICES for data in DATA[: 5 - most] if (device, data) != ("well", "well")]
    kinds.append(Faults(state=True))
    for number in range(1, most + 1):
        for ranks in itertools.combinations(range(size), number):
            for chosen in itertools.product(kinds, repeat=number):
                faults = [Faults()] * size
                for rank, one in zip(ranks, chosen, strict=True):
                    faults[rank] = one
                yield tuple(faults)


@pytest.mark.parametrize(("size", "most"), [(2, 2), (3, 3), (4, 3)])
def test_no_combination_of_faults_accuses_a_healthy_device(size: int, most: int) -> None:
    axis = ReplicaAxis.of_world(size)
    verdicts: dict[str, int] = {}
    for faults in combinations(size, most):
        judgement = run_case(faults, axis)
        if judgement is None:
            continue
        verdicts[judgement.verdict] = verdicts.get(judgement.verdict, 0) + 1
        if judgement.verdict == "persistent":
            healthy = [rank for rank in judgement.accused if faults[rank].device == "well"]
            assert judgement.accused and not healthy, (faults, judgement)
        elif judgement.verdict == "corrupted state":
            assert all(faults[rank].state for rank in judgement.accused), (faults, judgement)
        else:
            assert not judgement.accused, (faults, judgement)
        if judgement.verdict == "application":
            failed = [rank for rank in axis.ranks if rejected(value(rank, rank, faults))]
            assert all(faults[rank].data != "well" for rank in failed), (faults, judgement)
    assert set(verdicts) == {"persistent", "application", "corrupted state", "undecided"}, verdicts


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("one", "verdict", "data_dependent"),
    [
        (Faults("always nan"), "persistent", False),
        (Faults("always huge"), "persistent", False),
        (Faults("own data only"), "persistent", True),
        (Faults(data="nan"), "application", False),
        (Faults(data="huge"), "application", False),
        (Faults(state=True), "corrupted state", False),
        (Faults("always nan", "nan"), "undecided", False),
        (Faults("always huge", "huge"), "undecided", False),
        (Faults("a little off", "nan"), "undecided", False),
    ],
)
def test_a_single_fault_gets_its_verdict(size: int, rank: int, one: Faults, verdict: str, data_dependent: bool) -> None:
    faults = tuple(one if place == rank else Faults() for place in range(size))
    judgement = run_case(faults, ReplicaAxis.of_world(size))
    assert judgement is not None and (judgement.verdict, judgement.data_dependent) == (verdict, data_dependent), judgement
    assert judgement.accused == ((rank,) if verdict in ("persistent", "corrupted state") else ())


def test_a_fault_in_a_model_parallel_replica_accuses_its_members_as_suspects_of_whom_one_lied() -> None:
    """P24: inside the replica the fault spreads before anyone looks; nobody outside is accused."""
    shape = ReplicaAxis.of_world(3)
    for faults in combinations(3, 2):
        judgement = run_case(faults, shape)
        flagged = [place for place in range(3) if rejected(value(place, place, faults))]
        if judgement is None or any(one.state for one in faults):
            continue
        findings = [found(rank, *(["loss"] if rank // 2 in flagged else [])) for rank in TP2.ranks]
        shift = choose_shift(findings, TP2)
        if isinstance(shift, str):
            assert judgement.verdict == "undecided"
            continue
        outcomes = []
        for rank in TP2.ranks:
            ran_on = TP2.next_of(rank, shift)
            there = value(rank // 2, ran_on // 2, faults)
            own = [Checked("loss", value(rank // 2, rank // 2, faults))]
            outcomes.append(compare_values(rank, ran_on, own, [("loss", there, rejected(there))], findings[rank].flagged))
        grouped = judge(findings, outcomes, TP2)
        assert grouped.verdict == judgement.verdict
        assert grouped.accused == tuple(rank for rank in TP2.ranks if rank // 2 in judgement.accused)
        assert grouped.suspect_of == (2 if grouped.accused else 1)


def test_two_independent_faults_of_four_ranks_are_both_told() -> None:
    """A broken device on one rank and bad data on another: the device is accused, the reason says what is known of the data."""
    axis = ReplicaAxis.of_world(4)
    for broken, bad in itertools.permutations(range(4), 2):
        faults = [Faults()] * 4
        faults[broken], faults[bad] = Faults("always huge"), Faults(data="nan")
        judgement = run_case(tuple(faults), axis)
        assert judgement is not None and (judgement.verdict, judgement.accused) == ("persistent", (broken,)), judgement
        assert f"rank {bad}: its data gave the same rejected values" in judgement.reason
