"""Where a job's time went, for the report: the parts of its whole life, and its newest process's own account. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsup.supervisor.goodput import PARTS
from rsup.supervisor.render import duration, moment, percent, plural
from rsup.supervisor.report_markup import section, table, text, unknown
from rsup.supervisor.training_text import PART_NAMES

Json = Mapping[str, Any]

BAR_WIDTH = 2000
_ACCOUNT = (
    ("train_iterations_time_total_productive", "productive", f"{PART_NAMES['productive']}, in a durable checkpoint"),
    ("lost_time", "unsaved", "training that no checkpoint holds yet"),
    ("validation_iterations_time_total", "evaluation", "evaluations"),
    ("save_checkpoint_sync_time_total", "checkpoint", PART_NAMES["checkpoint"]),
    ("load_checkpoint_time", "load", "loading a checkpoint"),
)
"""End-to-end metrics that do not overlap: name, class of the style sheet (a part's only for what that part is), meaning."""
_WALL = "app_wall_time"


def time_section(status: Json) -> str:
    """Bars and tables: the parts of the job's time, then what the newest process says of its own."""
    goodput = status["goodput"]
    parts, wall_s = goodput["parts"], goodput["wall_s"]
    pieces = [(PART_NAMES[name], name, parts[name]) for name in PARTS if wall_s and parts[name]]
    body = _bar_and_table(pieces, wall_s, "in all") if pieces else unknown("no time has passed yet")
    missing = [PART_NAMES[name] for name in PARTS if parts[name] is None]
    body += unknown(f"unknown: {', '.join(missing)}") if missing else ""
    ratio = goodput["ratio"]
    note = "no rank reported an iteration, so goodput is unknown" if ratio is None else f"goodput {percent(ratio)}"
    return section("time", "Where the time went", body + _account(status), note)


def _account(status: Json) -> str:
    metrics = (status.get("metrics") or {}).get("end_to_end", {})
    life = metrics.get(_WALL)
    if life is None or not life["value"]:
        return "<h3>End-to-end metrics</h3>" + unknown("no script reported end-to-end metrics (docs/end_to_end.md)")
    # told with that: a process before this one can have known of what this one does not, and its numbers are still there
    values = {name: one["value"] for name, one in metrics.items() if one["at"] == life["at"] and one["value"] is not None}
    wall_s = values[_WALL]
    whose = "of the newest process or entry"
    if any(one["started"] > life["at"] for one in status["attempts"]):
        whose += " that told any"
    last = f"last at {moment(life['at'])} after iteration {life['iteration']}: what came later is not in it"
    head = f"<h3>End-to-end metrics <small>{text(f'{whose}, as its rank 0 told, {last}')}</small></h3>"
    pieces = [(words, style, max(0.0, values[name])) for name, style, words in _ACCOUNT if values.get(name)]
    known_s = sum(took_s for _, _, took_s in pieces)
    if wall_s > known_s:
        pieces.append(("the rest: start-up, earlier entries, waiting", "rest", wall_s - known_s))
    said = f'<p class="note">{text(_iterations(values))}</p>' if "train_iterations" in values else ""
    return head + _bar_and_table(pieces, max(wall_s, known_s), "the process's life") + said


def _iterations(values: Mapping[str, float]) -> str:
    """What the process has done of the run's iterations, and how much of that is saved."""
    said = f"{plural(round(values['train_iterations']), 'iteration')} done"
    start, held = values.get("train_iterations_start"), values.get("train_iterations_productive_end")
    if start is None:
        return said
    said += f" from iteration {start:,.0f} on" if start else ""
    return said if held is None else f"{said}, {max(0.0, held - start):,.0f} of them held by a durable checkpoint"


def _bar_and_table(pieces: Sequence[tuple[str, str, float]], whole_s: float, whole: str) -> str:
    """`pieces`: name, class, seconds."""
    drawn, from_s = "", 0.0
    for name, style, took_s in pieces:
        at, to = round(from_s / whole_s * BAR_WIDTH), round((from_s + took_s) / whole_s * BAR_WIDTH)
        title = f"<title>{text(name)}: {text(duration(took_s))}</title>"
        drawn += f'<rect class="part-{style}" x="{min(at, BAR_WIDTH - 3)}" width="{max(3, to - at)}" height="20">{title}</rect>'
        from_s += took_s
    said = "; ".join(f"{name} {percent(took_s / whole_s)}" for name, _, took_s in pieces)
    box = f'viewBox="0 0 {BAR_WIDTH} 20" preserveAspectRatio="none" role="img" aria-label="{text(said)}"'
    rows = [
        [f'<i class="key part-{style}"></i>{text(name)}', text(duration(took_s)), text(percent(took_s / whole_s))]
        for name, style, took_s in pieces
    ]
    rows.append([f"<b>{text(whole)}</b>", text(duration(whole_s)), text(percent(1))])
    return f'<svg class="shares" {box}>{drawn}</svg>' + table(("", "took", "share"), rows, right=(1, 2))
