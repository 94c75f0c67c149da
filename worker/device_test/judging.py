"""Compares the reports of several devices with each other and with what like devices computed before. Pure.

A device that differs from itself or from float64 has failed by itself. Where two that agree with themselves differ from each
other, one of them is wrong, and only a third opinion tells which: another like device, or the record. Without one, both are
`skipped`: nothing is proven against either.
"""

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
    sound = {
        (report.uuid, test.name): test.digest
        for report in reports
        for test in report.tests
        if test.outcome == PASSED and test.digest
    }
    for report in reports:
        like = [other.uuid for other in reports if other is not report and other.likeness and other.likeness == report.likeness]
        known = records.get(record_key(report), {})
        for test in report.tests:
            others = {uuid: sound[uuid, test.name] for uuid in like if (uuid, test.name) in sound}
            if (report.uuid, test.name) in sound:
                _compare(report, test, others, known.get(test.name))
        if report.tests:
            report.outcome, report.reason = whole(report.tests)


def _compare(report: DeviceReport, test: TestResult, others: Mapping[str, str], known: Known | None) -> None:
    """Each like device has one say: what it computes now, else what it computed before."""
    before = [uuid for uuid in known.devices if uuid not in others] if known else []
    test.compared_with += sorted(others) + ([RECORD] if before else [])
    said: dict[str, list[str]] = {}
    for uuid, digest in others.items():
        said.setdefault(digest, []).append(uuid)
    for uuid in before if known else ():
        assert known is not None
        earlier = "itself" if uuid == report.uuid else uuid
        said.setdefault(known.digest, []).append(f"{earlier} before")
    for_it = said.pop(test.digest, [])
    against = max(said.values(), key=len, default=[])
    if len(against) <= len(for_it):
        return
    named = f"differs from {', '.join(sorted(against)[:3])}{' and others' if len(against) > 3 else ''}"
    is_seen_now = any(uuid in against for uuid in others) or not others  # else all here differ from the record: it is doubtful
    if len(against) > 1 and not for_it and is_seen_now:
        test.outcome, test.reason = FAILED, f"{named}, which agree with each other"
    else:
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
