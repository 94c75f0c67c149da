"""A job's training for people: where its time went, what is saved and what is at risk. Text from the dicts of `views`."""

from collections.abc import Mapping
from typing import Any

from rsup.supervisor.curve_text import BAR_COLUMNS, mark_of, time_bar
from rsup.supervisor.goodput import PARTS
from rsup.supervisor.render import PLAIN, Paint, clean, duration, moment, percent, plural, table

Json = Mapping[str, Any]

PART_NAMES = {
    "productive": "training that was kept",
    "lost": "work done again",
    "checkpoint": "standing still for saves",
    "rerun": "reruns",
    "hang": "hangs until judged",
    "in_process_restart": "in-process restarts",
    "restart": "restarts",
    "startup": "start-up",
    "waiting": "waiting for nodes",
    "ending": "ending",
    "uncounted": "no iterations shown",
}
"""What people read for each of `goodput.PARTS`."""


def time_table(goodput: Json, width: int | None = None, paint: Paint = PLAIN) -> str:
    """Where the time went, as a bar and a table: the parts that took some, the unknown ones by name below."""
    wall_s, parts = goodput["wall_s"], goodput["parts"]
    rows = [
        (f"{mark_of(name)} {PART_NAMES[name]}", duration(parts[name]), percent(parts[name] / wall_s))
        for name in PARTS
        if wall_s and parts[name]
    ]
    rows.append(("= in all", duration(wall_s), percent(1)))
    text = table(("  TIME", "TOOK", "SHARE"), rows, width, right=(1, 2), paint=paint)
    bar = time_bar(goodput, paint, BAR_COLUMNS if width is None else min(width, BAR_COLUMNS))
    text = f"{bar}\n{text}" if bar else text
    unknown = [PART_NAMES[name] for name in PARTS if parts[name] is None]
    return f"{text}\nunknown: {', '.join(unknown)}" if unknown else text


def work_lines(status: Json, paint: Paint = PLAIN) -> list[str]:
    """Checkpoints, work at risk, in-process restarts, why the ranks left: a line each, of what there is to say."""
    work = status["work"]
    lines = [f"last checkpoint: {_checkpoint(work['durable'])}" if work["durable"] else "no checkpoint reported"]
    if work["local"]:
        lines.append(f"newest local checkpoint: {_checkpoint(work['local'])}")
    if work["saving"]:
        saving = work["saving"]
        lines.append(f"a save of iteration {saving['iteration']} has been under way for {duration(saving['for_s'])}")
    if work["failed"]:
        failed = work["failed"]
        text = f"the save of iteration {failed['iteration']} failed at {moment(failed['at'])}: {clean(failed['text'])}"
        lines.append(paint(text, "yellow"))
    lines += [at_risk_line(status)] if at_risk_line(status) else []
    lines += in_process_lines(status["in_process"])
    if status["left"]:
        lines.append(_left(status["left"]))
    return lines


def at_risk_line(status: Json) -> str:
    """What would be lost if the job failed now, or was lost as it failed; empty where there is nothing to say."""
    risk = status["work"]["at_risk"]
    if risk is None:
        return ""
    is_saved = status["work"]["durable"] or risk["since_iteration"]
    since = f"since iteration {risk['since_iteration']}" if is_saved else "since the beginning"
    about = f" (about {duration(risk['about_s'])} of work)" if risk["about_s"] else ""
    what = f"{plural(risk['iterations'], 'iteration')} {since}{about}"
    if status["job"]["ended"]:
        lost = "" if is_saved else f"not saved: anything of what was done up to iteration {status['job']['iteration']}"
        return f"not saved: {what}" if risk["iterations"] else lost
    if not risk["iterations"] and not is_saved:
        return "at risk: nothing yet; no iteration is saved, and none was done since the restart"
    return f"at risk: {what}" if risk["iterations"] else "at risk: nothing, all is saved"


def in_process_lines(in_process: Json) -> list[str]:
    """How often ranks entered their training function again, why last, and what is going on now."""
    lines, last = [], in_process["last"]
    if last is not None:
        num, total = in_process["restarts"], in_process["restarts_in_all"]
        others = f" and {total - num} before" if total > num else ""
        took = f" took {duration(last['took_s'])}" if last["took_s"] is not None else ""
        again = f", {plural(last['lost_iterations'], 'iteration')} done again" if last["lost_iterations"] else ""
        head = f"in-process restarts: {num} in attempt {in_process['attempt']}{others}"
        lines.append(f"{head}; the last at {moment(last['at'])}{took}{again}: {clean(last['why'])}")
    if in_process["under_way"] is not None:
        now = in_process["under_way"]
        lines.append(f"an in-process restart is under way since {moment(now['since'])}: {clean(now['why'])}")
    return lines


def _checkpoint(saved: Json) -> str:
    where = f", {clean(saved['path'])}" if saved["path"] else ""
    return f"iteration {saved['iteration']} at {moment(saved['at'])}{where}"


def _left(left: Json) -> str:
    saved = "after a durable save" if left["durable"] else "without a durable save"
    why = clean(left["reason"]) or left["kind"]
    if left["kind"] == "finished":
        return f"training is finished, {saved}: {why}"
    return f"the ranks left on purpose after iteration {left['iteration']}, {saved}: {why}"
