"""Times as people write them: ISO 8601, a date, or how long ago (`36h`, `30d`)."""

import re
from datetime import UTC, datetime, timedelta

from rsup.supervisor.wire import UsageError

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US

_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "min": 60_000_000, "h": HOUR_US, "d": DAY_US, "w": 7 * DAY_US}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_span(text: str) -> int | None:
    """Microseconds of `8h` or `3d`; None where it is no duration."""
    span = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(s|m|min|h|d|w)", text.strip())
    return round(float(span[1]) * _UNIT_US[span[2]]) if span else None


def parse_moment(text: str, now_us: int, option: str = "the time") -> int:
    """UTC microseconds of `text`; a time without a zone is UTC. Raise `UsageError`, which names `option`."""
    ago_us = parse_span(text.strip().removesuffix(" ago"))
    if ago_us is not None:
        return now_us - ago_us
    if text.strip() == "now":
        return now_us
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{option}: {text[:60]!r} is no time; write 2026-11-29T20:47:01Z, 2026-11-29, or 36h or 30d ago"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    try:
        return (moment - _EPOCH) // timedelta(microseconds=1)
    except OverflowError:
        raise UsageError(f"{option}: {text[:60]!r} is beyond the calendar") from None
