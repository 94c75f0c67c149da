"""Charts of the report: curves over iterations, as SVG made here, so that the page needs no script. Pure.

The picture is stretched to its place while its lines keep their width; names of ticks stand beside it as text of the page,
which stays readable at any size. Each has a title and a description for who cannot see it, and a table of its figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rsup.supervisor.report_axis import Axis, Unit, iteration_axis, number, spread, tick_labels, value_axis
from rsup.supervisor.report_markup import details, table, text

WIDTH, HEIGHT = 2000, 800
"""Of the picture's own coordinates."""
MAX_LINES = 8
MAX_TITLED_MARKS = 40
"""Beyond these, marks are short ones below the curve, in one stroke, and say nothing one by one."""
SHORT = HEIGHT * 19 // 20
MAX_TABLE_ROWS = 9
MAX_TOLD_HOLES = 3

NO_UNIT = Unit()

Point = tuple[float, float | None, float | None, float | None]
"""Iteration, value, lowest and highest of what it stands for; None where nothing was finite."""

Stretch = tuple[float, float]
"""The first and the last of some iterations."""


@dataclass(frozen=True)
class Line:
    """A curve. Points in the order of their iterations, each at the middle of what it stands for.

    `is_sparse`: each point gets a dot. `newest`: the newest value, None where it is not finite. `stretch`: what the curve tells
    of (None: from its first to its last point). `odd`: stretches with values that were not finite. `holes`: those that nobody
    told.
    """

    name: str
    points: Sequence[Point]
    is_sparse: bool = False
    num_non_finite: int = 0
    newest: float | None = None
    stretch: Stretch | None = None
    odd: Sequence[Stretch] = ()
    holes: Sequence[Stretch] = ()

    @property
    def ends(self) -> Stretch:
        """The first and the last iteration."""
        return self.stretch or (self.points[0][0], self.points[-1][0])


@dataclass(frozen=True)
class Mark:
    """Something that happened at an iteration. `kind`: a class of the style sheet: `restart`, `entry`, `case`."""

    iteration: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """What is drawn. `may_be_log`: over a logarithmic axis where the values span enough; `from_zero`: the axis has the zero."""

    identity: str
    title: str
    lines: Sequence[Line]
    unit: Unit = NO_UNIT
    marks: Sequence[Mark] = ()
    may_be_log: bool = False
    from_zero: bool = False
    note: str = ""


def figure(chart: Chart) -> str:
    """The chart as markup; a sentence where none of its values is finite. Lines beyond `MAX_LINES` are left out."""
    lines = [line for line in chart.lines if line.points]
    shown = [_in_unit(line, chart.unit.size) for line in lines[:MAX_LINES]]
    lows = [low for line in shown for _, _, low, _ in line.points if low is not None]
    highs = [high for line in shown for _, _, _, high in line.points if high is not None]
    head = f"<figcaption><b>{text(chart.title)}</b> {_newest(shown, chart.unit)}</figcaption>"
    if not lows or not highs:
        return f'<figure class="chart">{head}<p class="unknown">no finite value was reported</p></figure>'
    y = value_axis(min(lows), max(highs), may_be_log=chart.may_be_log, from_zero=chart.from_zero)
    x = iteration_axis(min(line.ends[0] for line in shown), max(line.ends[1] for line in shown))
    left_out = len(lines) - len(shown)
    notes = [chart.note, "log scale" if y.is_log else "", f"{left_out} more are not drawn" if left_out else ""]
    notes += [f"{bad} not finite" for bad in [sum(line.num_non_finite for line in shown)] if bad]
    notes += [_told_holes(shown)]
    said = ", ".join(note for note in notes if note)
    return (
        f'<figure class="chart">{head}{_plot(chart, shown, x, y)}'
        + (_legend(shown) if len(shown) > 1 else "")
        + (f'<p class="note">{text(said)}</p>' if said else "")
        + details("figures", _figures(shown, chart.unit))
        + "</figure>"
    )


def _in_unit(line: Line, size: float) -> Line:
    """So that ticks are round in the unit."""

    def of(value: float | None) -> float | None:
        return None if value is None else value / size

    points = [(at, of(value), of(low), of(high)) for at, value, low, high in line.points]
    return replace(line, points=points, newest=of(line.newest))


def _told_holes(lines: Sequence[Line]) -> str:
    holes = sorted({(hole[0], hole[1]) for line in lines for hole in line.holes})
    if not holes:
        return ""
    more = f" and {len(holes) - MAX_TOLD_HOLES} more stretches" if len(holes) > MAX_TOLD_HOLES else ""
    told = ", ".join(f"{first:.0f} to {last:.0f}" for first, last in holes[:MAX_TOLD_HOLES])
    return f"nothing is known of iterations {told}{more}"


def _newest(lines: Sequence[Line], unit: Unit) -> str:
    if len(lines) != 1:
        return f"<small>{text(unit.name)}</small>" if unit.name else ""
    return f"<span>{text(_told(lines[0].newest, unit))}</span>"


def _told(value: float | None, unit: Unit) -> str:
    if value is None:
        return number(None)
    return f"{number(value)}{f' {unit.name}' if unit.name else ''}"


def _plot(chart: Chart, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    grid = "".join(f"M0 {_y(y, tick)}H{WIDTH}" for tick in y.ticks)
    drawn = f'<path class="grid" d="{grid}"/>' + _marks(chart.marks, x)
    drawn += "".join(_band(line, x, y, place) for place, line in enumerate(lines))
    drawn += "".join(_curve(line, x, y, place) for place, line in enumerate(lines))
    names = f'aria-labelledby="{chart.identity}-t {chart.identity}-d"'
    about = f'<title id="{chart.identity}-t">{text(chart.title)}</title>'
    about += f'<desc id="{chart.identity}-d">{text(_description(chart, lines, x))}</desc>'
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" {names}'
    return (
        f'<div class="plot"><div class="ys" aria-hidden="true">{_labels(y)}</div>'
        f"<svg {box}>{about}{drawn}</svg>"
        f'<div class="xs" aria-hidden="true">{_iterations(x)}</div></div>'
    )


def _labels(y: Axis) -> str:
    names = zip(y.ticks, tick_labels(y), strict=True)
    return "".join(f'<span style="top:{100 - 100 * y.share(tick):.4g}%">{text(name)}</span>' for tick, name in names)


def _iterations(x: Axis) -> str:
    names = zip(x.ticks, tick_labels(x), strict=True)
    return "".join(f'<span style="left:{100 * x.share(tick):.4g}%">{text(name)}</span>' for tick, name in names)


def _description(chart: Chart, lines: Sequence[Line], x: Axis) -> str:
    parts = []
    for line in lines:
        known = [point for point in line.points if point[1] is not None]
        if not known:
            parts.append(f"{line.name}: nothing finite")
            continue
        first, last = _told(known[0][1], chart.unit), _told(line.newest, chart.unit)
        lowest, highest = min(point[2] or 0.0 for point in known), max(point[3] or 0.0 for point in known)
        span = f"between {_told(lowest, chart.unit)} and {_told(highest, chart.unit)}"
        parts.append(f"{line.name}: from {first} to {last}, {span}")
    return f"Over iterations {number(x.low)} to {number(x.high)}. {'; '.join(parts)}."


def _x(x: Axis, value: float) -> int:
    return round(x.share(value) * WIDTH)


def _y(y: Axis, value: float) -> int:
    return round((1 - y.share(value)) * HEIGHT)


def runs(line: Line) -> list[list[Point]]:
    """The stretches of points that a curve connects: it is cut where something was not finite, and where nobody told anything.
    A point that stands for some of both is alone."""
    found: list[list[Point]] = [[]]
    for point in line.points:
        is_cut = any(first <= point[0] <= last for first, last in line.odd)
        after_hole = found[-1] and any(found[-1][-1][0] < first and last < point[0] for first, last in line.holes)
        if is_cut or after_hole or point[1] is None:
            found.append([])
        if point[1] is not None:
            found[-1].append(point)
        if is_cut:
            found.append([])
    return [run for run in found if run]


def _band(line: Line, x: Axis, y: Axis, place: int) -> str:
    path = ""
    for run in runs(line):
        ends = [(point[0], point[2], point[3]) for point in run if point[2] is not None and point[3] is not None]
        if any(low < high for _, low, high in ends):
            there = [f"{_x(x, at)} {_y(y, high)}" for at, _, high in ends]
            back = [f"{_x(x, at)} {_y(y, low)}" for at, low, _ in reversed(ends)]
            path += f"M{'L'.join([*there, *back])}Z"
    return f'<path class="band c{place}" d="{path}"/>' if path else ""


def _curve(line: Line, x: Axis, y: Axis, place: int) -> str:
    path = dots = ""
    for run in runs(line):
        spots = [f"{_x(x, point[0])} {_y(y, point[1])}" for point in run if point[1] is not None]
        path += f"M{'L'.join(spots)}" if len(spots) > 1 else ""
        dots += "".join(f"M{spot}h0" for spot in spots) if line.is_sparse or len(spots) == 1 else ""
    drawn = f'<path class="line c{place}" d="{path}"/>' if path else ""
    drawn += f'<path class="dots c{place}" d="{dots}"/>' if dots else ""
    odd = line.odd or [(point[0], point[0]) for point in line.points if point[1] is None]
    gaps = "".join(_gap(_x(x, first), _x(x, last)) for first, last in odd)
    return drawn + (f'<path class="gap" d="{gaps}"><title>{text(line.name)}: not finite</title></path>' if gaps else "")


def _gap(first: int, last: int) -> str:
    return f"M{first} 0V{HEIGHT}" + (f"H{last}V0Z" if last > first else "")


def _marks(marks: Sequence[Mark], x: Axis) -> str:
    inside = [mark for mark in marks if x.low <= mark.iteration <= x.high]
    if len(inside) <= MAX_TITLED_MARKS:
        one = '<path class="mark {}" d="M{} 0V{}"><title>{}</title></path>'
        return "".join(one.format(mark.kind, _x(x, mark.iteration), HEIGHT, text(mark.text)) for mark in inside)
    paths: dict[str, dict[int, None]] = {}
    for mark in inside:
        paths.setdefault(mark.kind, {})[_x(x, mark.iteration)] = None
    drawn = ((kind, "".join(f"M{at} {SHORT}V{HEIGHT}" for at in spots)) for kind, spots in paths.items())
    return "".join(f'<path class="mark {kind}" d="{path}"/>' for kind, path in drawn)


def _legend(lines: Sequence[Line]) -> str:
    keys = "".join(f'<li><i class="key c{place}"></i>{text(line.name)}</li>' for place, line in enumerate(lines))
    return f'<ul class="legend">{keys}</ul>'


def _figures(lines: Sequence[Line], unit: Unit) -> str:
    longest = max(lines, key=lambda line: len(line.points)).points
    chosen = [longest[index] for index in spread(len(longest), MAX_TABLE_ROWS)]
    rows = [
        [number(point[0]), *(_told(_at(line, point[0]), unit) if _has(line, point[0]) else "" for line in lines)]
        for point in chosen
    ]
    rows.append(["newest", *(_told(line.newest, unit) for line in lines)])
    for what, place, choose in (("lowest", 2, min), ("highest", 3, max)):
        ends = [[end for point in line.points if (end := point[place]) is not None] for line in lines]
        rows.append([what, *(_told(choose(of_line), unit) if of_line else "" for of_line in ends)])
    return table(
        ("iteration", *(line.name for line in lines)), [[text(cell) for cell in row] for row in rows], range(len(lines) + 1)
    )


def _has(line: Line, iteration: float) -> bool:
    return any(point[0] == iteration for point in line.points)


def _at(line: Line, iteration: float) -> float | None:
    return next(point[1] for point in line.points if point[0] == iteration)
