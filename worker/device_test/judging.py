"""Compares the reports of several devices with each other and with what like devices computed before. Pure.

A device that differs from itself or from float64 has failed by itself. Where two that agree with themselves differ from each
other, one of them is wrong, and only a third opinion tells which: another like device, or the record. Without one, both are
`skipped`: nothing is proven against either.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, DeviceReport, TestResult, whole

RECORD = "record"


class Known(Struct, frozen=True):
    """A digest that passed, and the devices that gave it."""

    digest: str
    devices: list[str]


Records = Mapping[str, Mapping[str, Known]]
"""By likeness and plan (`record_key`), then by the test's name."""


def record_key(report: DeviceReport) -> str:
    """Under which a report's digests are known."""
    return f"{report.plan}: {report.likeness}"


def judge(reports: Sequence[DeviceReport], records: Records) -> None:
    """Complete the reports, in place: what was compared with what, and the outcome."""
    for report in reports:
        like = [other for other in reports if other is not report and other.likeness and other.likeness == report.likeness]
        known = records.get(record_key(report), {})
        for test in report.tests:
            _compare(report, test, _results(like, test.name), known.get(test.name))
    for report in reports:
        if report.tests:
            report.outcome, report.reason = whole(report.tests)


def _results(like: Sequence[DeviceReport], name: str) -> dict[str, str]:
    """Digests of like devices that agree with themselves and with float64, by UUID."""
    return {
        report.uuid: test.digest
        for report in like
        for test in report.tests
        if test.name == name and test.digest and _is_sound(test)
    }


def _is_sound(test: TestResult) -> bool:
    """Nothing but a comparison with others speaks against it."""
    return test.outcome == PASSED or bool(test.compared_with and test.reason.startswith(_OTHERS))


_OTHERS = "like devices differ: "


def _compare(report: DeviceReport, test: TestResult, others: Mapping[str, str], known: Known | None) -> None:
    if test.outcome != PASSED or not test.digest:
        return
    test.compared_with += sorted(others)
    opinions = Counter(others.values())
    witnesses = [uuid for uuid in known.devices if uuid != report.uuid and uuid not in others] if known else []
    if known is not None and (witnesses or not others):
        test.compared_with.append(RECORD)
        opinions[known.digest] += max(1, len(witnesses)) if witnesses else 0
    against = {digest: count for digest, count in opinions.items() if digest != test.digest}
    if not against:
        return
    digest, count = max(against.items(), key=lambda item: item[1])
    for_it = opinions[test.digest]
    who = [uuid for uuid, other in sorted(others.items()) if other == digest] or ["what like devices computed before"]
    named = f"{_OTHERS}{', '.join(who[:3])}{' and others' if len(who) > 3 else ''}"
    if count >= 2 and for_it == 0:
        test.outcome, test.reason = FAILED, f"{named}: {count} like devices agree against it"
    elif count > for_it:
        test.outcome, test.reason = SKIPPED, f"{named}, and nothing tells which is wrong: test a third like device"


def learned(reports: Sequence[DeviceReport], records: Records) -> dict[str, dict[str, Known]]:
    """The records with what now passed: only of devices that passed whole, without a fault put in."""
    merged = {key: dict(known) for key, known in records.items()}
    for report in reports:
        if report.outcome != PASSED or report.injected or not report.likeness:
            continue
        known = merged.setdefault(record_key(report), {})
        for test in report.tests:
            before = known.get(test.name)
            if not test.digest:
                continue
            if before is None:
                known[test.name] = Known(test.digest, [report.uuid])
            elif before.digest == test.digest and report.uuid not in before.devices:
                known[test.name] = Known(test.digest, [*before.devices, report.uuid][:8])
    return merged
