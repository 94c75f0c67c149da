"""What the replays of one kept step say about the devices that computed it. Pure.

Each device is compared with itself (its passes), with the reference (what came out on a device that the case's verdict cleared)
and with like devices that computed the step now. Each of these has one say; a say that a fatal check rejects, and that of a
device that has failed, speak against nobody. A device has failed

- where its passes differ, and a like device beside it repeats itself, and no other device differs from itself as well;
- where others that agree with each other are against it, more than are for it, the reference is not for it, and its own
  value is rejected, or it is the very value that had been rejected, or two of them say the same.

Where anybody healthy contradicts a device that has not failed, nothing tells which is wrong: the test is skipped, which is no
pass. So it is where there is nothing to compare with, and where the program does not repeat itself.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, TestResult
from rsup.worker.rerun.difference import difference
from rsup.worker.rerun.replay_order import GRADIENTS, ReplayAnswer, StepPass

MIN_PASSES = 2
ACROSS_PROCESSES = 1e-5
"""Relative: a loss is compared to the bit in one process; the reference was computed by another one, beside other ranks."""


@dataclass(frozen=True)
class _Say:
    """What somebody else computed. `speaks_against`: nothing is wrong with it."""

    who: str
    values: Mapping[str, str]
    speaks_against: bool = True
    is_reference: bool = False

    @property
    def tolerance(self) -> float:
        """At least, for every value."""
        return ACROSS_PROCESSES if self.is_reference else 0.0


@dataclass(frozen=True)
class _Weighed:
    outcome: str
    reason: str
    agreeing: Sequence[str] = ()
    """Who says the same."""


def judge_replays(answers: Mapping[str, ReplayAnswer]) -> dict[str, TestResult]:
    """By device (UUID), the result of each that computed the step."""
    failed: set[str] = set()
    found = {uuid: _judge(uuid, answers, failed) for uuid in answers}
    failed |= {uuid for uuid, result in found.items() if result.outcome == FAILED}
    return {uuid: result if uuid in failed else _judge(uuid, answers, failed) for uuid, result in found.items()}


def _judge(uuid: str, answers: Mapping[str, ReplayAnswer], failed: Collection[str]) -> TestResult:
    answer = answers[uuid]
    name = f"replay of {answer.case_id}, rank {answer.rank}"
    result = TestResult(name=name, outcome=SKIPPED, repetitions=len(answer.passes), seconds=answer.seconds)
    if why_not := _unusable(answer):
        result.reason = why_not
        return result
    result.values = dict(answer.passes[0].values)
    if different := _differs_from_itself(answer):
        result.outcome, result.reason = _blame(uuid, answers, different)
        return result
    weighed = _weigh(answer, _says(uuid, answers, failed))
    result.outcome, result.reason = weighed.outcome, weighed.reason
    result.compared_with = ["itself", *weighed.agreeing]
    return result


def _unusable(answer: ReplayAnswer) -> str:
    if answer.problem:
        return answer.problem
    if len(answer.passes) < MIN_PASSES:
        return f"computed {len(answer.passes)} times only"
    missing = sorted(answer.flagged.keys() - answer.passes[0].values.keys())
    return f"the replay did not make the check {missing[0]!r} that had failed" if missing else ""


def _blame(uuid: str, answers: Mapping[str, ReplayAnswer], different: str) -> tuple[str, str]:
    """Whether the device or the program does not repeat itself."""
    others = {other: one for other, one in answers.items() if other != uuid and not _unusable(one)}
    also = sorted(other for other, one in others.items() if _differs_from_itself(one))
    if also:
        return SKIPPED, f"the program does not repeat itself: {different}, and {also[0]} differs from itself as well"
    if not any(one.likeness == answers[uuid].likeness for one in others.values()):
        return SKIPPED, f"{different}: the device, or a program that does not repeat itself; test a like device beside it"
    return FAILED, different


def _says(uuid: str, answers: Mapping[str, ReplayAnswer], failed: Collection[str]) -> list[_Say]:
    """The reference, where its device is like this one or is this one, and like devices that agree with themselves."""
    says, answer = [], answers[uuid]
    told = answer.reference
    if told is not None and told.likeness == answer.likeness:
        says.append(_Say(f"reference ({told.uuid})", told.values, is_reference=True))
    for other, one in sorted(answers.items()):
        if other != uuid and one.likeness == answer.likeness and not _unusable(one) and not _differs_from_itself(one):
            first = one.passes[0]
            says.append(_Say(other, _compared(first), not first.rejected and other not in failed))
    return says


def _weigh(answer: ReplayAnswer, says: Sequence[_Say]) -> _Weighed:
    first = answer.passes[0]
    if not says:
        told = "there is nothing to compare with: no like device beside it, and no value of a device that was cleared"
        return _Weighed(SKIPPED, told)
    against = {say.who: different for say in says if (different := _contradiction(first, say, answer.tolerances))}
    for_it = [say.who for say in says if say.who not in against]
    healthy = _largest_group([say for say in says if say.who in against and say.speaks_against], answer.tolerances)
    is_expected = any(say.is_reference for say in says if say.who in for_it)
    bad = "" if is_expected else next((f"{check}: {what}" for check, what in first.rejected.items()), "")
    if healthy:
        names = ", ".join(say.who for say in healthy[:3])
        told = f"{bad + ', and ' if bad else ''}{against[healthy[0].who]} ({names})"
        is_outvoted = not is_expected and len(healthy) > (len(for_it) + 1 if for_it else 0)
        if is_outvoted and (bad or _is_the_old_value(answer) or len(healthy) > 1):
            return _Weighed(FAILED, told, for_it)
        return _Weighed(SKIPPED, f"{told}, and nothing tells which is wrong: test a third like device", for_it)
    if bad:
        who = ", ".join(for_it) or "like devices"
        return _Weighed(SKIPPED, f"{bad}, on {who} as well: the data, the program, or all of them", for_it)
    if not for_it:
        return _Weighed(SKIPPED, f"only devices on which the step fails are there to compare with ({', '.join(against)})")
    return _Weighed(PASSED, "", for_it)


def _largest_group(says: Sequence[_Say], tolerances: Mapping[str, float]) -> list[_Say]:
    """Of these, the most that say the same."""
    groups = [[other for other in says if not _disagree(one, other, tolerances)] for one in says]
    return max(groups, key=len, default=[])


def _disagree(one: _Say, other: _Say, tolerances: Mapping[str, float]) -> bool:
    at_least = max(one.tolerance, other.tolerance)
    return bool(_different_value(one.values, other, tolerances, at_least))


def _is_the_old_value(answer: ReplayAnswer) -> bool:
    """Whether what had been rejected came out again."""
    values = answer.passes[0].values
    return bool(answer.flagged) and all(
        difference(float(old), float(values[check])) <= answer.tolerances.get(check, 0.0)
        for check, old in answer.flagged.items()
    )


def _compared(one: StepPass) -> dict[str, str]:
    return {**one.values, **({GRADIENTS: one.digest} if one.digest else {})}


def _differs_from_itself(answer: ReplayAnswer) -> str:
    """Where a pass of one device is not as its first; empty: nowhere."""
    first = answer.passes[0]
    for number, again in enumerate(answer.passes[1:], start=2):
        different = _contradiction(again, _Say("itself", _compared(first)), answer.tolerances)
        if first.values.keys() != again.values.keys():
            different = "other checks were made"
        if different:
            return f"pass {number} differs from the first: {different}"
    return ""


def _contradiction(found: StepPass, say: _Say, tolerances: Mapping[str, float]) -> str:
    """The first value that is another one than somebody says; empty: none. What only one of them has is not compared."""
    return _different_value(_compared(found), say, tolerances, say.tolerance)


def _different_value(found: Mapping[str, str], say: _Say, tolerances: Mapping[str, float], at_least: float) -> str:
    for check, value in found.items():
        other = say.values.get(check)
        if other is None:
            continue
        if check == GRADIENTS:
            if value != other:
                return f"{GRADIENTS}: not those of {say.who}"
        elif not difference(float(other), float(value)) <= max(tolerances.get(check, 0.0), at_least):
            return f"{check} is {value} instead of {other}"
    return ""
