"""The time line of the report: what happened to a job from its begin to its end, a lane for each kind of thing. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rsup.supervisor.case_text import verdict_of
from rsup.supervisor.render import duration, moment
from rsup.supervisor.report_axis import Axis, time_axis
from rsup.supervisor.report_markup import details, section, table, text
from rsup.supervisor.training_text import PART_NAMES

Json = Mapping[str, Any]

WIDTH, HEIGHT = 2000, 20
COLUMNS = 110
"""Characters of a label that fit side by side into a lane at its least width."""
MAX_STRAGGLER_LANES = 3
MAX_LISTED = 300


@dataclass(frozen=True)
class Piece:
    """A stretch of time, or a moment where `to_s` is None, in seconds since the job's begin. `style`: its class."""

    from_s: float
    to_s: float | None
    style: str
    text: str
    label: str = ""


@dataclass(frozen=True)
class Lane:
    """Pieces of one kind; of those that overlap the later one is drawn above."""

    name: str
    pieces: Sequence[Piece]


def timeline_section(status: Json, events: Sequence[Json] = ()) -> str:
    """The time line with its legend, and a list of what it shows."""
    lanes, span_s = lanes_of(status, events), max(status["goodput"]["wall_s"], 1e-3)
    job = status["job"]
    axis = time_axis(span_s)
    drawn = "".join(_lane(lane, axis) for lane in lanes)
    ends = f"{moment(job['created'])} to {moment(job['ended']) if job['ended'] else 'now'}, {duration(span_s)}"
    body = f'<div class="scroll pad"><div class="timeline">{drawn}{_axis(axis)}</div></div>{_legend(lanes)}'
    body += "".join(f'<p class="note">{text(line)}</p>' for line in [_left_out(status)] if line)
    listed = [(piece, lane.name) for lane in lanes for piece in lane.pieces]
    listed.sort(key=lambda one: one[0].from_s)
    rows = [_row(piece, lane) for piece, lane in listed[:MAX_LISTED]]
    more = f"the first {MAX_LISTED} of {len(listed)}" if len(listed) > MAX_LISTED else ""
    headings = ("since the begin", "took", "kind", "what")
    body += details(f"as a list ({len(rows)})", table(headings, rows, right=(0, 1), caption=more))
    return section("timeline", "Time line", body, ends)


def _left_out(status: Json) -> str:
    """What is only its newest part: a status holds no more."""
    parts = []
    for name in ("attempts", "incidents", "cases", "checkpoints"):
        shown, count = len(status[name]), status["counts"][name]
        parts += [f"the newest {shown} of {count} {name}"] if count > shown else []
    return f"shown are {', '.join(parts)}" if parts else ""


def _legend(lanes: Sequence[Lane]) -> str:
    """Of the stretches that there are: parts of the time have the colours and names that they have in its table."""
    used = {piece.style for lane in lanes for piece in lane.pieces if piece.to_s is not None}
    names = {f"part-{part}": name for part, name in PART_NAMES.items()} | {"slow": "a slow rank"}
    keys = "".join(f'<li><i class="key {style}"></i>{text(name)}</li>' for style, name in names.items() if style in used)
    return f'<ul class="legend">{keys}</ul>' if keys else ""


def _row(piece: Piece, lane: str) -> list[str]:
    took = "" if piece.to_s is None else duration(piece.to_s - piece.from_s)
    return [text(part) for part in (duration(max(0.0, piece.from_s)), took, lane, piece.text)]


def lanes_of(status: Json, events: Sequence[Json] = ()) -> list[Lane]:
    """The lanes that have something in them. `events`: failed saves are taken from them."""
    clock = _Clock(status["job"]["created"], status["goodput"]["wall_s"])
    failed = [one for one in events if one["kind"] == "SaveFailed"]
    saves = [_durable(one, clock) for one in status["checkpoints"]]
    saves += [Piece(clock(one["at"]) or 0.0, None, "failed", f"save failed: {one['text']}", "failed") for one in failed]
    entries = [piece for one in status["incidents"] if one.get("in_process") for piece in _entry(one, clock)]
    hangs = [one for one in status["incidents"] if one["kind"] == "suspected-hang"]
    troubles = [one for one in status["incidents"] if one["kind"] != "suspected-hang"]
    lanes = [
        Lane(
            "attempts",
            [*_waiting(clock, status), *(piece for one in status["attempts"] for piece in _attempt(one, clock, status))],
        ),
        Lane("in-process", entries),
        Lane("incidents", [_incident(one, clock) for one in troubles]),
        Lane("suspected", [_incident(one, clock) for one in hangs]),
        Lane("rerun cases", [_case(one, clock) for one in status["cases"]]),
        Lane("checkpoints", saves),
        *_stragglers((status.get("stragglers") or {}).get("episodes", ()), clock),
    ]
    return [lane for lane in lanes if lane.pieces]


class _Clock:
    """Seconds since the job's begin of a time of the JSON; None for none."""

    def __init__(self, begin: str, span_s: float) -> None:
        self._begin = datetime.fromisoformat(begin)
        self.span_s = span_s

    def __call__(self, at: str | None) -> float | None:
        return None if not at else (datetime.fromisoformat(at) - self._begin).total_seconds()

    def end_of(self, at: str | None) -> float:
        """The same; what has no end goes on until now."""
        found = self(at)
        return self.span_s if found is None else found


def _waiting(clock: _Clock, status: Json) -> list[Piece]:
    """The stretches without an attempt, as `goodput` cuts them; before the first one shown nobody knows."""
    attempts, pieces = status["attempts"], list[Piece]()
    least_s = clock.span_s / WIDTH
    since = 0.0 if not attempts or attempts[0]["attempt"] == 1 else None
    for one in attempts:
        began = clock(one["started"]) or 0.0
        if since is not None and began - since > least_s:
            pieces.append(Piece(since, began, "part-waiting", f"waiting for nodes before attempt {one['attempt']}"))
        since = clock.end_of(one["stopped"])
    if since is not None and clock.span_s - since > least_s:
        style, what = ("part-ending", "ending") if status["job"]["ended"] else ("part-waiting", "waiting for nodes")
        pieces.append(Piece(since, clock.span_s, style, what))
    return pieces


def _attempt(one: Json, clock: _Clock, status: Json) -> list[Piece]:
    """The parts of an attempt's time, as `goodput` cuts it; saves, reruns and in-process restarts are not cut out of it."""
    began, ended = clock(one["started"]) or 0.0, clock.end_of(one["stopped"])
    stepped = clock(one["first_step"])
    head, label = f"attempt {one['attempt']}", str(one["attempt"])
    is_last = not _later(one, status)
    starting = "part-startup" if one["attempt"] == 1 else "part-restart"
    if stepped is None and is_last and not one["stopped"] and not any(other["last_iteration"] for other in status["attempts"]):
        starting = "part-uncounted"
    fatal = next((trouble for trouble in status["incidents"] if _ends(trouble, one)), None) if one["stopped"] else None
    failed = None if fatal is None else clock(fatal["at"])
    until = ended if failed is None else min(ended, failed)
    if stepped is None:
        did = "never steps"
        if one["last_iteration"] > one["start_iteration"]:
            did = f"ends before it was seen stepping, at iteration {one['last_iteration']}"
        never = f"{head} starts, and {did}: {one['outcome']} {one['reason']}"
        pieces = [Piece(began, until, starting, never, label)]
    else:
        reached = f", iterations {one['start_iteration'] + 1} to {one['last_iteration']}" if one["last_iteration"] else ""
        why = f": {one['reason']}" if one["reason"] else ""
        said = f"{head}{reached}, {one['outcome']}{why}"
        pieces = [Piece(began, min(stepped, until), starting, f"{head} starts"), *_steps(one, stepped, until, said, status)]
    if fatal is not None and failed is not None and until < ended:
        judged = min(ended, max(until, clock(fatal["detected"]) or until)) if fatal["kind"] == "hang" else until
        if judged > until:
            pieces.append(Piece(until, judged, "part-hang", f"incident {fatal['incident']} until it was judged"))
        after = "part-ending" if is_last and status["job"]["ended"] else "part-restart"
        what = f"from incident {fatal['incident']} to the end of attempt {one['attempt']}"
        pieces.append(Piece(judged, ended, after, what))
    return pieces


def _ends(trouble: Json, attempt: Json) -> bool:
    """Whether the attempt ended of it."""
    is_other = trouble.get("in_process") or trouble["kind"] == "suspected-hang"
    return trouble["attempt"] == attempt["attempt"] and not is_other


def _steps(one: Json, stepped: float, until: float, said: str, status: Json) -> list[Piece]:
    """What an attempt did from its first step on: first what was kept, then what a later one did again."""
    label, start, last = str(one["attempt"]), one["start_iteration"], one["last_iteration"]
    if not last:
        return [Piece(stepped, until, "part-uncounted", said, label)]
    kept_to = max(start, min([last, *(other["start_iteration"] for other in _later(one, status))]))
    cured = [other for other in status["incidents"] if other.get("in_process") and other["attempt"] == one["attempt"]]
    computed = last - start + sum(other["lost_iterations"] or 0 for other in cured)
    share = (last - kept_to) / computed if computed > 0 and last > kept_to else 0.0
    turn = until - max(0.0, until - stepped) * share
    pieces = [Piece(stepped, turn, "part-productive", said, label)] if share < 1 else []
    if share:
        redone = f"iterations {kept_to + 1} to {last} of {said}; they were done again"
        pieces.append(Piece(turn, until, "part-lost", redone, "" if pieces else label))
    return pieces


def _later(one: Json, status: Json) -> list[Json]:
    return [other for other in status["attempts"] if other["attempt"] > one["attempt"]]


def _entry(one: Json, clock: _Clock) -> list[Piece]:
    lost = f", {one['lost_iterations']} iterations done again" if one["lost_iterations"] else ""
    what = f"in-process restart{lost}: {one['text']}"
    began, ended = clock(one["at"]) or 0.0, clock.end_of(one["recovered"])
    judged = min(ended, max(began, clock(one["detected"]) or began)) if "limit" in one["found_by"] else began
    hang = [Piece(began, judged, "part-hang", f"until it was judged: {one['text']}")] if judged > began else []
    return [*hang, Piece(judged, ended, "part-in_process_restart", what)]


def _incident(one: Json, clock: _Clock) -> Piece:
    who = f"rank {one['rank']}" if one["rank"] is not None else one["kind"]
    style = "mark soft" if one["kind"] == "suspected-hang" else "mark"
    return Piece(clock(one["at"]) or 0.0, None, style, f"incident {one['incident']}, {one['kind']}: {one['text']}", who)


def _case(one: Json, clock: _Clock) -> Piece:
    what = f"rerun case at iteration {one['iteration']}: {verdict_of(one)}"
    return Piece(clock(one["opened"]) or 0.0, clock.end_of(one["closed"]), "part-rerun", what, verdict_of(one))


def _durable(one: Json, clock: _Clock) -> Piece:
    took = f", took {duration(one['duration_s'])}" if one["duration_s"] is not None else ""
    return Piece(
        clock(one["at"]) or 0.0,
        None,
        "save",
        f"checkpoint of iteration {one['iteration']} durable{took}",
        str(one["iteration"]),
    )


def _stragglers(episodes: Iterable[Json], clock: _Clock) -> list[Lane]:
    """Episodes that overlap go below each other."""
    rows: list[list[Piece]] = []
    for one in episodes:
        until = clock.end_of(one["to"] or (None if one["goes_on"] else one["seen"]))
        piece = Piece(clock(one["from"]) or 0.0, until, "slow", one["text"], f"rank {one['rank']}")
        row = next((row for row in rows if (row[-1].to_s or 0.0) <= piece.from_s), None)
        if row is None and len(rows) < MAX_STRAGGLER_LANES:
            rows.append(row := [])
        (rows[-1] if row is None else row).append(piece)
    return [Lane("slow ranks" if not place else "", row) for place, row in enumerate(rows)]


# --------------------------------------------------------------------------------------------------------------- drawing


def _lane(lane: Lane, axis: Axis) -> str:
    drawn = "".join(_drawn(piece, axis) for piece in lane.pieces)
    name = text(lane.name or "slow ranks")
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{name}"'
    names = "".join(_label(piece, axis) for piece in labelled(lane.pieces, axis))
    return f'<div class="lane"><span>{text(lane.name)}</span><div class="track"><svg {box}>{drawn}</svg>{names}</div></div>'


def _drawn(piece: Piece, axis: Axis) -> str:
    at = round(axis.share(piece.from_s) * WIDTH)
    title = f"<title>{text(piece.text)}</title>"
    if piece.to_s is None:
        return f'<path class="{piece.style}" d="M{at} 0V{HEIGHT}">{title}</path>'
    width = max(3, round(axis.share(piece.to_s) * WIDTH) - at)
    return f'<rect class="{piece.style}" x="{min(at, WIDTH - width)}" width="{width}" height="{HEIGHT}">{title}</rect>'


def labelled(pieces: Sequence[Piece], axis: Axis) -> list[Piece]:
    """Those whose labels have room: within the stretch, or beside the moment up to the next piece and the lane's end."""
    starts = sorted(piece.from_s for piece in pieces)
    found, free_from = [], 0.0
    for piece in sorted(pieces, key=lambda piece: piece.from_s):
        at = axis.share(piece.from_s) * COLUMNS
        later = next((start for start in starts if start > piece.from_s), axis.high)
        until = axis.share(later if piece.to_s is None else piece.to_s) * COLUMNS
        if piece.label and at >= free_from and at + len(piece.label) + 1.5 <= until:
            found.append(piece)
            free_from = at + len(piece.label) + 1.5
    return found


def _label(piece: Piece, axis: Axis) -> str:
    style = "on" if piece.to_s is not None else "by"
    return f'<b class="{style}" style="left:{100 * axis.share(piece.from_s):.4g}%">{text(piece.label)}</b>'


def _axis(axis: Axis) -> str:
    ticks = [tick for tick in axis.ticks if axis.share(tick) <= 0.97]
    names = "".join(
        f'<span style="left:{100 * axis.share(tick):.4g}%">{text(duration(tick).replace(".0 s", " s"))}</span>'
        for tick in ticks
    )
    return f'<div class="lane axis" aria-hidden="true"><span></span><div class="xs">{names}</div></div>'
