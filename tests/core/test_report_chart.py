"""The report's axes, charts, time line and files: points in, markup out."""

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rsup.supervisor import report_page
from rsup.supervisor.curve_points import holes_of, points_of
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.render import fitting
from rsup.supervisor.report_axis import (
    Axis,
    Unit,
    iteration_axis,
    nice_step,
    number,
    spread,
    tick_labels,
    time_axis,
    unit_of,
    value_axis,
)
from rsup.supervisor.report_chart import Chart, Line, Mark, Point, figure, runs
from rsup.supervisor.report_curves import curve_sections, marks_of, wanted
from rsup.supervisor.report_file import write_whole
from rsup.supervisor.report_markup import block, ranges, table, text, unknown
from rsup.supervisor.report_page import file_name
from rsup.supervisor.report_timeline import Piece, labelled

EVIL = "<script>alert(1)</script>\x1b[31m\u202e&\"'"


def line(*values: float | None, name: str = "loss", first: int = 1) -> Line:
    """A curve of single values, one an iteration."""
    return Line(name, [(i, value, value, value) for i, value in enumerate(values, first)], newest=values[-1])


def test_ticks_are_round_and_hold_the_values() -> None:
    assert value_axis(2.53, 4.9).ticks == (2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
    assert value_axis(0.11, 0.22, from_zero=True).ticks[0] == 0
    assert value_axis(-3, -1, from_zero=True).ticks[-1] == 0
    for low, high in ((0.0, 1.0), (1e-9, 2e-9), (-5e8, 7e8), (99.9, 100.1), (3.0, 3.0), (0.0, 0.0), (1e300, 2e300)):
        axis = value_axis(low, high)
        assert axis.low <= low <= high <= axis.high and 2 <= len(axis.ticks) <= 8, (low, high)
        labels = tick_labels(axis)
        assert len(set(labels)) == len(labels) and max(map(len, labels)) <= 12, labels
    for low, high in (
        (5e-324, 1e10),
        (0.0, 1e-310),
        (-1e-310, 1e-320),
        (1e-299, 1e-299 * (1 + 1e-12)),
        (1e116, 1e116 * (1 + 2**-52)),
    ):
        for axis in (value_axis(low, high), value_axis(low, high, may_be_log=True), value_axis(low, high, from_zero=True)):
            assert axis.low < axis.high and 0 <= axis.share(low) <= axis.share(high) <= 1 and tick_labels(axis), (low, high)
    assert [nice_step(x) for x in (0.7, 1.0, 1.1, 2.3, 3.0, 7.0)] == [1.0, 1.0, 2.0, 2.5, 5.0, 10.0]


def test_a_logarithmic_axis_where_the_values_span_enough() -> None:
    axis = value_axis(0.02, 30.0, may_be_log=True)
    assert axis.is_log and axis.ticks == pytest.approx((0.01, 0.1, 1.0, 10.0, 100.0))
    assert axis.share(1.0) == pytest.approx(0.5) and axis.share(0.0) == 0 and axis.share(1e9) == 1
    assert tick_labels(axis) == ["0.01", "0.1", "1", "10", "100"]
    assert len(value_axis(1e-12, 1e12, may_be_log=True).ticks) <= 7
    assert not value_axis(1.0, 49.0, may_be_log=True).is_log and not value_axis(0.0, 1e6, may_be_log=True).is_log


def test_iterations_and_times() -> None:
    assert iteration_axis(1, 300) == Axis(1, 300, (1, 100.0, 200.0, 300.0))
    assert iteration_axis(7, 7).ticks == (7,) and iteration_axis(7, 7).share(7) == 0.5
    assert iteration_axis(1, 4).ticks == (1.0, 2.0, 3.0, 4.0) and len(iteration_axis(1, 1_000_000).ticks) <= 6
    assert time_axis(63).ticks == (0, 10, 20, 30, 40, 50, 60)
    assert time_axis(86400 * 3).ticks[1] == 43200 and time_axis(0.0).ticks[0] == 0 and len(time_axis(4e8).ticks) <= 8


def test_numbers_for_people() -> None:
    shown = {
        0.0: "0",
        2.5274: "2.527",
        0.142316: "0.1423",
        1234567.0: "1.235e6",
        9.99e-6: "9.99e-6",
        7195.22: "7,195",
        1.0: "1",
    }
    assert {value: number(value) for value in shown} == shown
    assert number(None) == number(float("nan")) == number(float("inf")) == "not finite" and number(-0.5) == "-0.5"
    assert tick_labels(value_axis(0, 7e-6))[:2] == ["0", "2e-6"]
    assert tick_labels(iteration_axis(1, 900)) == ["1", "250", "500", "750"] and tick_labels(value_axis(-2, 2))[2] == "0"
    assert [unit_of(n, k, v).name for n, k, v in (
        ("mem-allocated-bytes", "memory", 3e9), ("iteration-time", "training", 0.2), ("x", "timers", 900.0),
        ("slowest-rank-ms", "straggler", 40.0), ("power/gpu", "energy", 1.0), ("lm loss", "training", 1.0),
    )] == ["GiB", "ms", "min", "ms", "W", ""]  # fmt: skip
    assert list(spread(3, 9)) == [0, 1, 2] and list(spread(100, 3)) == [0, 50, 99]


def svg_of(markup: str) -> ElementTree.Element:
    """The chart's picture, which must be well-formed."""
    found = re.search(r"<svg.*?</svg>", markup, re.DOTALL)
    assert found
    return ElementTree.fromstring(found.group())


def paths(markup: str, style: str) -> list[str]:
    """The paths of that class."""
    return [path.attrib["d"] for path in svg_of(markup).iter("path") if style in path.attrib["class"].split()]


def test_a_curve_is_cut_where_nothing_was_finite_and_marked() -> None:
    chart = Chart(
        "a", "loss", [line(3.0, 2.0, None, 1.0, 1.0)], marks=[Mark(2, "entry", "again"), Mark(99, "entry", "outside")]
    )
    markup = figure(chart)
    (drawn,), (gap,), (mark,) = paths(markup, "line"), paths(markup, "gap"), paths(markup, "mark")
    assert drawn.count("M") == 2 and gap.startswith("M1000 ") and mark == "M500 0V800"
    assert drawn == "M0 0L500 400M1500 800L2000 800", "the highest value is above, the lowest below"
    assert [len(run) for run in runs(chart.lines[0])] == [2, 2]
    picture = svg_of(markup)
    assert picture.attrib["role"] == "img" and picture.attrib["aria-labelledby"] == "a-t a-d"
    description = picture.findtext("desc")
    assert description == "Over iterations 1 to 5. loss: from 3 to 1, between 1 and 3."
    assert '<td class="n">not finite</td>' in markup and "lowest" in markup, "the table of figures"


def test_a_point_stands_in_the_middle_and_a_mixed_one_is_marked() -> None:
    """A loss that becomes NaN within a point, after iterations that nobody told."""
    points = [[i, i, 2.0, 2.0, 2.0, i, 0] for i in range(1, 11)]
    points += [[60, 60, 2.0, 2.0, 2.0, 51, 0], [80, 80, 3.0, 3.0, 3.0, 61, 0], [100, 100, 1.0, 1.0, 1.0, 81, 15]]
    one = {"points": points, "num_non_finite": 15, "holes": [[11, 50]], "newest": {"value": None, "iteration": 100}}
    markup = curve_sections({"training": {"lm loss": one}}, [])
    (drawn,), (gap,), (dot,) = paths(markup, "line"), paths(markup, "gap"), paths(markup, "dots")
    assert drawn.count("M") == 2 and drawn.endswith(f"M{round(54.5 / 99 * 2000)} 400L{round(69.5 / 99 * 2000)} 0")
    assert gap == f"M{round(80 / 99 * 2000)} 0V800H2000V0Z" and dot == f"M{round(89.5 / 99 * 2000)} 800h0"
    assert "<b>lm loss</b> <span>not finite</span>" in markup and "15 not finite" in markup
    assert "nothing is known of iterations 11 to 50" in markup and "from 2 to not finite" in markup
    (older,) = paths(curve_sections({"training": {"lm loss": {"points": [point[:5] for point in points]}}}, []), "line")
    assert older.endswith("L2000 800"), "an older supervisor says where a point ends"


def test_holes_are_longer_than_what_lies_beside_them() -> None:
    def holes(*stretches: tuple[int, int]) -> list[list[int]]:
        return holes_of(points_of([[last, last, 1.0, 1.0, 1.0, first, 0] for first, last in stretches]))

    assert holes((1, 10), (11, 20), (41, 50), (51, 60)) == [[21, 40]]
    assert not holes(*((i, i) for i in range(10, 200, 10))) and not holes((1, 1), (500, 500)) and not holes()
    assert not holes(*((i, i) for i in (1, 2, 3, 10, 20, 30, 40))), "it tells less often from there on"
    assert not holes(*((i, i) for i in range(1, 2000) if not 500 < i < 510)), "nobody would see it"


def test_a_band_shows_what_lies_in_points_that_stand_for_several() -> None:
    points: list[Point] = [(10, 2.0, 1.0, 3.0), (20, 2.0, 2.0, 2.0)]
    markup = figure(Chart("a", "x", [Line("x", points), line(1.0, 3.0, name="y", first=10)], Unit("ms", 1e-3)))
    (band,) = paths(markup, "band")
    assert band == "M0 0L2000 400L2000 400L0 800Z"
    assert markup.count('<i class="key') == 2 and "1,000" in markup and "3,000 ms" in markup


def test_nothing_finite_a_single_point_and_too_many_lines() -> None:
    assert "no finite value" in figure(Chart("a", "x", [line(None, None)])) and "<svg" not in figure(Chart("a", "x", []))
    alone = figure(Chart("a", "x", [line(5.0)]))
    assert paths(alone, "dots") == ["M1000 400h0"] and not paths(alone, "line")
    many = figure(Chart("a", "x", [line(1.0, 2.0, name=f"l{i}") for i in range(11)]))
    assert len(paths(many, "line")) == 8 and "3 more are not drawn" in many
    crowd = [Mark(1 + i / 10, "restart", EVIL) for i in range(1000)]
    assert len(paths(figure(Chart("a", "x", [line(*[1.0] * 100)], marks=crowd)), "mark")) == 1


def test_text_of_jobs_stays_text() -> None:
    chart = Chart("a", EVIL, [line(1.0, 2.0, name=EVIL), line(1.0, name=EVIL)], marks=[Mark(1, "entry", EVIL)], note=EVIL)
    markup = figure(chart) + text(EVIL) + block(EVIL) + unknown(EVIL) + table([EVIL], [[text(EVIL)]], caption=EVIL)
    assert "<script" not in markup and "\x1b" not in markup and "\u202e" not in markup and "&lt;script&gt;" in markup
    assert file_name(f"../{EVIL}/x") == "rsup-report-..__script_alert_1___script___31m_____x.html"
    assert len(file_name("x" * 500)) < 130 and file_name("t1.2") == "rsup-report-t1.2.html"
    assert len(text("x" * 10**6)) < 3000 and unknown("use `--x`") == '<p class="unknown">use <code>--x</code></p>'


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7]) == "1-3, 7" and ranges([]) == "" and ranges(range(0, 100, 2), most=2) == "0, 2, ..."


def test_labels_of_the_time_line_never_overlap() -> None:
    axis = time_axis(110)
    pieces = [Piece(0, 20, "step", "a", "1"), Piece(20, 21, "step", "b", "2"), Piece(109, None, "mark", "c", "rank 1")]
    pieces += [Piece(50 + i, None, "save", "s", "100") for i in range(10)]
    assert [piece.text for piece in labelled(pieces, axis)] == ["a", "s"]
    assert [piece.from_s for piece in labelled(pieces, axis)] == [0, 59]


def test_what_is_asked_for_and_what_is_said_where_nothing_is_known() -> None:
    latest = {
        name: {"value": value} for name, value in (("grad-norm", 1.0), ("lm loss", 2.0), ("z-own", 3.0), ("loss-scale", 1.0))
    }
    timers = {f"t{i}-time": {"value": float(i)} for i in range(100)}
    asked = wanted({"training": latest, "timers": timers, "end_to_end": {"x": {"value": 1.0}}, "memory": {}})
    assert asked["training"] == ["lm loss", "grad-norm", "loss-scale", "z-own"] and set(asked) == {"training", "timers"}
    assert asked["timers"][0] == "t99-time" and len(asked["timers"]) == 32
    assert "reported no numbers" in curve_sections({}, []) and "of an older" in curve_sections({}, [], "of an older release")
    series = {"training": {"lm loss": {"points": [[1, 1, 2.0, 2.0, 2.0]]}, "z-own": {"points": [[1, 1, 3.0, 3.0, 3.0]]}}}
    markup = curve_sections(series, [])
    for said in (
        "reported a learning rate",
        "how long an iteration takes",
        "reported memory",
        "reported energy",
        "an evaluation",
    ):
        assert said in markup
    assert "always the same: z-own 3" in markup and markup.count("<svg") == 1
    per_rank = {f"rank-{rank}-ms": {"points": [[1, 1, 5.0, 5.0, 5.0]]} for rank in (10, 2)}
    drawn = curve_sections({"straggler": per_rank}, [])
    assert drawn.index("rank 2<") < drawn.index("rank 10<")
    slowdown = {"straggler-slowdown": {"points": [[1, 1, 2.0, 2.0, 2.0], [2, 1, 3.0, 3.0, 3.0]]}}
    assert "time over the fastest rank" in curve_sections({"straggler": slowdown}, [])


def test_a_table_that_is_wide_or_short_says_so() -> None:
    style = (Path(report_page.__file__).parent / "web" / "report.css").read_text()
    assert 'class="scroll wide short"' in table(["x"] * 11, [["y"] * 11]) and ".scroll.wide::before" in style
    assert 'class="scroll"' in table(["x"], [["y"]] * 1000) and ".scroll.short { break-inside: avoid; }" in style


def test_marks_stand_where_training_was_interrupted() -> None:
    attempt = {"attempt": 1, "last_iteration": 20, "outcome": "failed", "reason": "rank 1 was killed"}
    entry = {"in_process": True, "iteration": 9, "text": "x"}
    status = {"incidents": [entry, {"in_process": False, "iteration": 20, "text": "y"}], "attempts": [attempt, {}], "cases": []}
    assert [(mark.iteration, mark.kind) for mark in marks_of(status)] == [(9, "entry"), (20, "restart")]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_whole(target, "one")
    (tmp_path / "link.html").symlink_to(target)
    write_whole(tmp_path / "link.html", "zwei é")
    assert target.read_text("utf-8") == "zwei é" and (tmp_path / "link.html").is_symlink()
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "\ud800")
    assert target.read_text("utf-8") == "zwei é" and len(list(tmp_path.iterdir())) == 2, "nothing is left beside it"
    for bad in (tmp_path, tmp_path / "none" / "page.html", target / "x"):
        with pytest.raises(QueryError, match=r"cannot be written to .*--output FILE"):
            write_whole(bad, "x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_a_terminal_without_blocks_gets_plain_characters() -> None:
    assert fitting("█▓▒░ ▁█ é…", "utf-8") == "█▓▒░ ▁█ é…" and fitting("█", None) == "█" and fitting("█", "no-such") == "█"
    assert fitting("█▓▒░ ▁▄█ é", "ascii") == "#%+. _-# ?" and fitting("█é", "latin-1") == "#é"
