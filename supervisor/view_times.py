"""Times of the records (UTC microseconds) as the JSON shows them."""

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def iso(at_us: int | None) -> str | None:
    """`2026-11-29T20:47:01.123456Z`; None stays None, and a time beyond the calendar is None too."""
    if at_us is None:
        return None
    try:
        return (_EPOCH + timedelta(microseconds=at_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return None


def seconds_between(from_us: int | None, to_us: int | None) -> float | None:
    """Seconds from one time to the other, at least 0; None where one of them is unknown."""
    return None if from_us is None or to_us is None else max(0.0, (to_us - from_us) / 1e6)
