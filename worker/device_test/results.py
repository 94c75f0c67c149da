"""What a screen found: plain data, as it is printed, kept and handed from process to process (JSON)."""

from msgspec import Struct

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
PLAN = 1
"""Number of the set of computations: digests of another one say nothing about ours."""
EXIT_CODES = {PASSED: 0, FAILED: 1, SKIPPED: 75}


class TestResult(Struct, kw_only=True):
    """One computation on one device."""

    __test__ = False  # for pytest: it is none

    name: str
    outcome: str
    reason: str = ""
    repetitions: int = 0
    digest: str = ""
    """SHA-256 of the result's bytes; empty where there is none to compare."""
    seconds: float = 0.0
    """Of all repetitions, on the device."""
    rate: float = 0.0
    """Of the fastest repetition."""
    unit: str = ""
    error: float | None = None
    """Largest deviation from float64, as a share of what rounding can explain."""
    compared_with: list[str] = []
    """`itself`, `float64`, `record`, or the UUID of a like device."""
    values: dict[str, str] = {}
    """Of a replayed step: what came out, by check (`repr` of floats)."""
    is_required: bool = True
    """Without it the whole is no pass. False: this device does not have what it needs."""


class Range(Struct):
    """Least and greatest of what was read during the screen."""

    least: float
    greatest: float


class DeviceReport(Struct, kw_only=True):
    """The screen of one device."""

    uuid: str
    outcome: str
    reason: str = ""
    node: str = ""
    model: str = ""
    serial: str = ""
    vbios: str = ""
    driver: str = ""
    likeness: str = ""
    """Devices with equal ones must compute the same bits."""
    torch: str = ""
    cuda: str = ""
    at_us: int = 0
    seconds: float = 0.0
    rounds: int = 0
    tests: list[TestResult] = []
    temperature_c: Range | None = None
    sm_clock_mhz: Range | None = None
    power_w: Range | None = None
    injected: bool = False
    """A fault was put in on purpose."""
    was_tried: bool = True
    """False: it was left alone, since it is in use."""
    plan: int = PLAN


def whole(tests: list[TestResult]) -> tuple[str, str]:
    """Outcome of a device and the reason: one failure fails it, and what was not tested is no pass."""
    failed = [test for test in tests if test.outcome == FAILED]
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return FAILED, f"{failed[0].name}: {failed[0].reason}{more}"
    missing = [test for test in tests if test.outcome == SKIPPED and test.is_required]
    if missing or not any(test.outcome == PASSED for test in tests):
        names = f"{missing[0].name}: {missing[0].reason}" if missing else "nothing was tested"
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        return SKIPPED, f"a skip is no pass: {names}{more}"
    return PASSED, ""


def overall(reports: list[DeviceReport]) -> str:
    """Of several devices: the worst."""
    outcomes = {report.outcome for report in reports}
    return FAILED if FAILED in outcomes else SKIPPED if SKIPPED in outcomes or not outcomes else PASSED
