"""Tables, durations and cleaned text."""

import pytest

from rsup.supervisor.render import clean, clean_block, cut, duration, moment, percent, table, width_of
from rsup.supervisor.report_text import found_by, recovery_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (-1, "-"), (0, "0 s"), (0.012, "12 ms"), (0.0996, "0.1 s"), (2.14, "2.1 s"), (59.94, "59.9 s")),
        *((59.96, "1 min"), (61, "1 min 1 s"), (3599.7, "1 h"), (3660, "1 h 1 min"), (86400, "1 d"), (90000, "1 d 1 h")),
    ],
)
def test_durations_read_as_people_write_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_moments_and_shares() -> None:
    assert moment("2026-11-29T20:47:01.123456Z") == "2026-11-29T20:47:01Z" and moment(None) == "-"
    assert percent(0.9731) == "97.3 %" and percent(None) == "-"


def test_control_characters_are_taken_out() -> None:
    assert clean("a\x1b[31m\nb\u202ec\x00") == "a [31m b c"
    assert clean_block("a\tb\x1b\n\x07 c\r\nd") == "a   b\n  c\nd"


def test_a_table_fits_and_is_aligned() -> None:
    text = table(("RANK", "WHAT"), [(1, "x" * 50), (12, "")], width=20, right=(0,))
    assert text.splitlines() == ["RANK  WHAT", f"   1  {'x' * 13}…", "  12  -"]
    assert all(width_of(line) <= 20 for line in text.splitlines())


def test_a_table_too_wide_for_anything_keeps_its_headings() -> None:
    assert table(("RANK", "WHAT"), [("123456", "abcdefgh")], width=3).splitlines()[0] == "RANK  WHAT"


def test_wide_characters_count_two() -> None:
    assert width_of("日本") == 4 and cut("日本語", 5) == "日本…" and cut("日本語", 4) == "日…"


def test_a_hang_is_told_by_how_long_it_stood_still_and_what_recovery_took_after_that() -> None:
    hang = {"kind": "hang", "found_by": "limit of section step (3 s)", "detection_s": 4.1, "recovery_s": 5.6}
    assert found_by(hang) == "limit of section step (3 s), it had stood still for 4.1 s"
    told = recovery_of(hang, {"ended": None}, soft=False)
    assert told == "1.5 s (with the standing still 5.6 s) until every rank had stepped again"
    crash = {**hang, "kind": "signal", "found_by": "exit of the process", "detection_s": 0.0}
    assert found_by(crash) == "exit of the process, at once"
    assert recovery_of(crash, {"ended": None}, soft=False) == "5.6 s until every rank had stepped again"


def test_an_incident_whose_recovery_nobody_saw_says_what_followed() -> None:
    one = {"kind": "exit", "attempt": 1, "detection_s": 0.0, "recovery_s": None}

    def told(attempt: int, outcome: str | None) -> str:
        job = {"ended": outcome and "2026-01-01T00:00:00Z", "attempt": attempt, "outcome": outcome}
        return recovery_of(one, job, soft=False)

    unseen = "unknown: attempt 2 ended before every rank was seen stepping"
    assert told(3, "succeeded") == told(3, "failed") == told(3, None) == told(2, "succeeded") == unseen
    assert told(2, "failed") == told(1, "failed") == "none: the job ended"
    assert told(1, None) == told(2, None) == "not yet"
