"""What the replays of one kept step say about the devices that computed it. Pure.

Each device is compared with itself (its passes), with the reference (what came out on a device that the case's verdict cleared)
and with like devices that computed the step now. Each of these has one say, and a say that a fatal check rejects speaks against
nobody. A device has failed where its passes differ, or where more healthy says are against it than for it and either its own
value is rejected, or it is the very value that had been rejected, or two say the same. Where nothing tells which is wrong, and
where there is nothing to compare with, the test is skipped, which is no pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, TestResult
from rsup.worker.rerun.difference import difference
from rsup.worker.rerun.replay_order import GRADIENTS, ReplayAnswer, StepPass

MIN_PASSES = 2
REFERENCE = "reference"
ACROSS_PROCESSES = 1e-5
"""Relative: a loss is compared to the bit in one process; the reference was computed by another one, beside other ranks."""


@dataclass(frozen=True)
class _Say:
    """What somebody else computed. `rejected`: a fatal check did not like it."""

    who: str
    values: Mapping[str, str]
    rejected: bool
    tolerance: float = 0.0
    """At least, for every value."""


def judge_replays(answers: Mapping[str, ReplayAnswer]) -> dict[str, TestResult]:
    """By device (UUID), the result of each that computed the step."""
    return {uuid: _judge(uuid, answer, answers) for uuid, answer in answers.items()}


def name_of(answer: ReplayAnswer, case: str) -> str:
    """The test's name."""
    return f"replay of {answer.case_id or case}, rank {answer.rank}" if answer.case_id else f"replay of {case}"


def _judge(uuid: str, answer: ReplayAnswer, answers: Mapping[str, ReplayAnswer]) -> TestResult:
    result = TestResult(name=name_of(answer, ""), outcome=SKIPPED, repetitions=len(answer.passes), seconds=answer.seconds)
    why_not = _unusable(answer)
    if why_not:
        result.reason = why_not
        return result
    first = answer.passes[0]
    result.values, result.digest = dict(first.values), ""
    result.compared_with.append("itself")
    for number, again in enumerate(answer.passes[1:], start=2):
        if different := _difference(first, again, answer.tolerances):
            result.outcome, result.reason = FAILED, f"pass {number} differs from the first: {different}"
            return result
    says = _says(uuid, answer, answers)
    result.compared_with += [say.who for say in says]
    result.outcome, result.reason = _weigh(answer, says)
    return result


def _unusable(answer: ReplayAnswer) -> str:
    if answer.problem:
        return answer.problem
    if len(answer.passes) < MIN_PASSES:
        return f"computed {len(answer.passes)} times only"
    missing = sorted(answer.flagged.keys() - answer.passes[0].values.keys())
    return f"the replay did not make the check {missing[0]!r} that had failed" if missing else ""


def _says(uuid: str, answer: ReplayAnswer, answers: Mapping[str, ReplayAnswer]) -> list[_Say]:
    """The reference, where its device is like this one or is this one, and like devices that agree with themselves."""
    says = []
    told = answer.reference
    if told is not None and told.likeness == answer.likeness:
        says.append(_Say(f"{REFERENCE} ({told.uuid})", told.values, False, ACROSS_PROCESSES))
    for other, one in sorted(answers.items()):
        agrees = not _unusable(one) and not any(_difference(one.passes[0], p, one.tolerances) for p in one.passes[1:])
        if other != uuid and agrees and one.likeness == answer.likeness:
            first = one.passes[0]
            says.append(_Say(other, _compared(first), bool(first.rejected)))
    return says


def _weigh(answer: ReplayAnswer, says: Sequence[_Say]) -> tuple[str, str]:
    first = answer.passes[0]
    if not says:
        return SKIPPED, "there is nothing to compare with: no like device beside it, and no value of a device that was cleared"
    against = {say.who: different for say in says if (different := _contradiction(first, say, answer.tolerances))}
    for_it = [say.who for say in says if say.who not in against]
    healthy = [say for say in says if say.who in against and not say.rejected]
    is_expected = any(who.startswith(REFERENCE) for who in for_it)
    bad = "" if is_expected else next((f"{check}: {what}" for check, what in first.rejected.items()), "")
    if len(healthy) > len(for_it):
        told = f"{bad + ', and ' if bad else ''}{against[healthy[0].who]} ({_names(healthy)})"
        if bad or _is_the_old_value(answer) or len(healthy) > 1:
            return FAILED, told
        return SKIPPED, f"{told}, and nothing tells which is wrong: test a third like device"
    if bad:
        return SKIPPED, f"{bad}, on {', '.join(for_it) or 'like devices'} as well: the data, the program, or all of them"
    if not for_it:
        return SKIPPED, f"only devices on which the step fails are there to compare with ({', '.join(against)})"
    return PASSED, ""


def _names(says: Sequence[_Say]) -> str:
    return ", ".join(say.who for say in says[:3])


def _is_the_old_value(answer: ReplayAnswer) -> bool:
    """Whether what had been rejected came out again."""
    values = answer.passes[0].values
    return bool(answer.flagged) and all(
        difference(float(old), float(values[check])) <= answer.tolerances.get(check, 0.0)
        for check, old in answer.flagged.items()
    )


def _compared(one: StepPass) -> dict[str, str]:
    return {**one.values, **({GRADIENTS: one.digest} if one.digest else {})}


def _difference(first: StepPass, again: StepPass, tolerances: Mapping[str, float]) -> str:
    """Where two passes of one device differ; empty: nowhere."""
    if first.values.keys() != again.values.keys():
        return "other checks were made"
    return _contradiction(again, _Say("itself", _compared(first), False), tolerances)


def _contradiction(found: StepPass, say: _Say, tolerances: Mapping[str, float]) -> str:
    """The first value that is another one than somebody says; empty: none. What only one of them has is not compared."""
    for check, value in _compared(found).items():
        other = say.values.get(check)
        if other is None:
            continue
        if check == GRADIENTS:
            if value != other:
                return f"{GRADIENTS}: not those of {say.who}"
        elif not difference(float(other), float(value)) <= max(tolerances.get(check, 0.0), say.tolerance):
            return f"{check} is {value} instead of {other}"
    return ""
