"""Which of a job's series the report draws, and how. Pure: series of `metric_views.series_of` by kind, markup out."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rsup.supervisor.curve_points import newest_of, points_of
from rsup.supervisor.metric_views import GRAD_NORM, LEARNING_RATE, STEP_TIME, losses_of
from rsup.supervisor.report_axis import number, unit_of
from rsup.supervisor.report_chart import Chart, Line, Mark, figure
from rsup.supervisor.report_markup import section, text, unknown
from rsup.supervisor.wire import METRIC_KINDS

Json = Mapping[str, Any]
Series = Mapping[str, Json]
"""By name: `points` and `num_non_finite`."""

MAX_POINTS = 240
MAX_SERIES_A_KIND = 32
MAX_OTHERS = 12
DRAWN_KINDS = tuple(kind for kind in METRIC_KINDS if kind != "end_to_end")
_VALIDATION = " validation"
_TIMES = ("throughput", "tokens-per-second")
_NOTES = {"straggler-slowdown": "the slowest straggler's time over the fastest rank's, of intervals that had a straggler"}
_SAID_ELSEWHERE = ("stragglers", "slowest-rank", "fastest-rank", "slowest-rank-ms", "fastest-rank-ms")


def wanted(latest: Mapping[str, Mapping[str, Json]]) -> dict[str, list[str]]:
    """The series to ask for by kind, of those that there are (`metric_views.latest_of`): those that people look for first."""
    found = {}
    for kind in DRAWN_KINDS:
        names = sorted(latest.get(kind, {}))
        first = [*losses_of(names), *(name for name in (STEP_TIME, LEARNING_RATE, GRAD_NORM, *_TIMES) if name in names)]
        if kind == "timers":  # the longest ones: of nested timers those that hold the others
            first = sorted(names, key=lambda name: -(latest[kind][name]["value"] or 0.0))
        found[kind] = list(dict.fromkeys([*first, *names]))[:MAX_SERIES_A_KIND]
    return {kind: names for kind, names in found.items() if names}


def marks_of(status: Json) -> list[Mark]:
    """Where the training was interrupted: in-process restarts, ends of attempts, rerun cases."""
    marks = [
        Mark(one["iteration"], "entry", f"in-process restart at iteration {one['iteration']}: {one['text']}")
        for one in status["incidents"]
        if one.get("in_process") and one["iteration"]
    ]
    for one in status["attempts"][:-1]:
        if one["last_iteration"]:
            why = f": {one['reason']}" if one["reason"] else ""
            marks.append(Mark(one["last_iteration"], "restart", f"attempt {one['attempt']} ended ({one['outcome']}){why}"))
    marks += [
        Mark(one["iteration"], "case", f"rerun case at iteration {one['iteration']}: {one['verdict'] or 'open'}")
        for one in status["cases"]
        if one["iteration"]
    ]
    return marks


def curve_sections(series: Mapping[str, Series], marks: Sequence[Mark], why_none: str = "") -> str:
    """The sections of all curves. Where a job has no numbers at all: one that says so (`why_none`, if that is known)."""
    if not any(series.values()):
        nobody = "The script reported no numbers of its training (`rsup.worker.report_metrics`, or the reference trainer)."
        return section("training", "Training", unknown(why_none or nobody))
    return "".join(draw(series, marks) for draw in (_training, _times, _sections, _validation, _memory, _energy, _others))


# ------------------------------------------------------------------------------------------------------ what is drawn where


def _training(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers, evaluated = series.get("training", {}), series.get("validation", {})
    charts = []
    for name in losses_of(numbers):
        lines = [_line("training", name, numbers[name])]
        own = f"{name}{_VALIDATION}"
        lines += [
            _line("validation", other.removeprefix(f"{name} "), evaluated[other], is_sparse=True)
            for other in sorted(evaluated)
            if other.startswith(own) and not other.endswith(" ppl")
        ]
        charts.append(Chart("", name, lines, marks=marks, may_be_log=True))
    charts += _charts(numbers, "training", [LEARNING_RATE], marks, from_zero=True)
    charts += _charts(numbers, "training", [GRAD_NORM], marks, may_be_log=True)
    missing = [] if losses_of(numbers) else ["no script reported a loss"]
    missing += [] if LEARNING_RATE in numbers else ["no script reported a learning rate"]
    return _section("training", "Loss and learning rate", charts, missing, _interruptions(marks))


def _interruptions(marks: Sequence[Mark]) -> str:
    kinds = {mark.kind for mark in marks}
    names = {"restart": "restart", "entry": "in-process restart", "case": "rerun case"}
    keys = "".join(f'<li><i class="stroke {kind}"></i>{name}</li>' for kind, name in names.items() if kind in kinds)
    return f'<ul class="legend">{keys}</ul>' if keys else ""


def _times(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers, slow = series.get("training", {}), series.get("straggler", {})
    charts = _charts(numbers, "training", [STEP_TIME], marks, from_zero=True, titles={STEP_TIME: "time of an iteration"})
    each = sorted((name for name in slow if _rank_of(name) is not None), key=lambda name: _rank_of(name) or 0)
    lines = [_line("straggler", f"rank {_rank_of(name)}", slow[name]) for name in each]
    if not lines:
        ends = (("slowest-rank-ms", "the slowest rank"), ("fastest-rank-ms", "the fastest rank"))
        lines = [_line("straggler", words, slow[name]) for name, words in ends if name in slow]
    if lines:
        note = "an iteration without what waits for other ranks"
        charts.append(
            Chart("", "own work of the ranks", lines, _unit("x-ms", "straggler", lines), marks, from_zero=True, note=note)
        )
    charts += _charts(numbers, "training", _TIMES, marks, from_zero=True)
    missing = [] if STEP_TIME in numbers else ["no script reported how long an iteration takes"]
    missing += [] if lines else ["no times of single ranks: `--log-straggler`, or `rsup stragglers JOB on`, reports them"]
    return _section("step-time", "Time of an iteration", charts, missing)


def _rank_of(name: str) -> int | None:
    number_ = name.removeprefix("rank-").removesuffix("-ms")
    return int(number_) if name == f"rank-{number_}-ms" and number_.isdecimal() else None


def _sections(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    timers = series.get("timers", {})
    lines = [_line("timers", name.removesuffix("-time"), one) for name, one in timers.items()]
    lines.sort(key=lambda line: -max((point[3] or 0.0 for point in line.points), default=0.0))
    unit = _unit("x-time", "timers", lines)
    note = "the longest over the ranks, an iteration; one may hold others"
    charts = [Chart("", "sections", lines, unit, marks, from_zero=True, note=note)] if lines else []
    missing = [] if lines else ["no script reported times of its sections (`--timing-log-level 1 --log-timers-to-tensorboard`)"]
    return _section("sections", "Sections of an iteration", charts, missing)


def _validation(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers = series.get("validation", {})
    charts = [
        Chart("", name, [_line("validation", name, one, is_sparse=True)], marks=marks, may_be_log=True)
        for name, one in numbers.items()
    ]
    return _section("validation", "Validation", charts, [] if charts else ["no script reported an evaluation"])


def _memory(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers = series.get("memory", {})
    sizes = [_line("memory", name, one) for name, one in numbers.items() if name.endswith("-bytes")]
    charts = [Chart("", "memory", sizes, _unit("x-bytes", "memory", sizes), marks, from_zero=True)] if sizes else []
    charts += _charts(numbers, "memory", [name for name in numbers if not name.endswith("-bytes")], marks, from_zero=True)
    return _section(
        "memory", "Memory", charts, [] if charts else ["no script reported memory; without a GPU there is none to report"]
    )


def _energy(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers = series.get("energy", {})
    charts = _charts(numbers, "energy", list(numbers), marks, from_zero=True)
    return _section("energy", "Energy", charts, [] if charts else ["no script reported energy (`--log-energy`, on a GPU)"])


def _others(series: Mapping[str, Series], marks: Sequence[Mark]) -> str:
    numbers = series.get("training", {})
    drawn = {*losses_of(numbers), STEP_TIME, LEARNING_RATE, GRAD_NORM, *_TIMES}
    rest = {("training", name): one for name, one in numbers.items() if name not in drawn}
    more = series.get("straggler", {})
    rest |= {("straggler", name): one for name, one in more.items() if name not in _SAID_ELSEWHERE and _rank_of(name) is None}
    same = {name: value for (_, name), one in rest.items() if (value := _constant(one)) is not None}
    charts = [
        chart for (kind, name), one in rest.items() if name not in same for chart in _charts({name: one}, kind, [name], marks)
    ]
    said = text("always the same: " + ", ".join(f"{name} {number(value)}" for name, value in same.items()))
    body = f'<p class="note">{said}</p>' if same else ""
    left_out = len(charts) - MAX_OTHERS
    body += f'<p class="note">{left_out} more are not drawn</p>' if left_out > 0 else ""
    return _section("others", "Other numbers", charts[:MAX_OTHERS], [], body) if charts or body else ""


def _constant(one: Json) -> float | None:
    ends = {end for point in one["points"] for end in point[2:5]}
    return ends.pop() if len(ends) == 1 else None


# ---------------------------------------------------------------------------------------------------------------- pieces


def _section(identity: str, title: str, charts: Sequence[Chart], missing: Sequence[str], below: str = "") -> str:
    drawn = [figure(_named(chart, f"{identity}-{place}")) for place, chart in enumerate(charts)]
    body = f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    return section(identity, title, body + below + "".join(map(unknown, missing)))


def _named(chart: Chart, identity: str) -> Chart:
    return dataclasses.replace(chart, identity=identity)


def _charts(
    numbers: Series,
    kind: str,
    names: Sequence[str],
    marks: Sequence[Mark],
    *,
    titles: Mapping[str, str] | None = None,
    may_be_log: bool = False,
    from_zero: bool = False,
) -> list[Chart]:
    """One for each of those names that there is."""
    charts = []
    for name in names:
        if name in numbers:
            lines = [_line(kind, name, numbers[name])]
            charts.append(
                Chart(
                    *("", (titles or {}).get(name, name), lines, _unit(name, kind, lines), marks, may_be_log, from_zero),
                    note=_NOTES.get(name, ""),
                )
            )
    return charts


def _line(kind: str, name: str, one: Json, is_sparse: bool = False) -> Line:
    points = points_of(one["points"])
    odd: list[tuple[float, float]] = []
    for before, point in zip([None, *points], points, strict=False):
        if point.num_non_finite:
            first = odd.pop()[0] if before is not None and before.num_non_finite else point.first
            odd.append((first, point.iteration))
    return Line(
        name,
        [(point.middle, point.value, point.low, point.high) for point in points],
        is_sparse,
        one.get("num_non_finite", 0),
        newest_of(one) if points else None,
        (points[0].first, points[-1].iteration) if points else None,
        odd,
        [(first, last) for first, last in one.get("holes", ())],
    )


def _unit(name: str, kind: str, lines: Sequence[Line]) -> Any:
    pick: Callable[[float | None], float] = lambda value: abs(value or 0.0)  # noqa: E731
    return unit_of(name, kind, max((pick(point[3]) for line in lines for point in line.points), default=0.0))
