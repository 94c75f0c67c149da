"""`rsup cases` for people: text from the dicts of `case_views`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsup.supervisor.render import PLAIN, Paint, clean, duration, moment, table

Json = Mapping[str, Any]

MAX_NAMED = 4
_COLOURS = {"persistent": "red", "corrupted state": "red", "application": "yellow", "undecided": "yellow", "transient": "green"}
_FOLLOWS = {
    "continue": "training went on",
    "skip": "the iteration was left out on all ranks",
    "restart": "the ranks ended, to start again from the last checkpoint",
    "elsewhere": "the ranks ended, to go on elsewhere",
    "leave": "the ranks ended with exit code 17",
    "": "the ranks told no more",
}


def cases_text(cases: Sequence[Json], width: int | None = None, paint: Paint = PLAIN) -> str:
    """A table of cases."""
    if not cases:
        return "no rerun cases"
    headings = ("CASE", "OWNER", "OPENED", "ITERATION", "RANKS", "VERDICT", "ACCUSED", "THEN", "TOOK", "WHY")
    rows = [
        (
            one["case_id"],
            one["job"]["owner"],
            moment(one["opened"]),
            one["iteration"],
            _few(sorted({finding["rank"] for finding in one.get("findings", ())})),
            verdict_of(one),
            accused_of(one),
            one.get("action"),
            duration(one.get("took_s")),
            one.get("reason"),
        )
        for one in cases
    ]
    return table(headings, rows, width, right=(3, 8), paint=paint)


def verdict_of(one: Json) -> str:
    """The verdict in a word or two, `open` where there is none."""
    if not one["verdict"]:
        return "open, for --resume" if one.get("waits_for_resume") else "open"
    kind = " (data-dependent)" if one["data_dependent"] else ""
    return f"{one['verdict']}{kind}{' [injected]' if one['injected'] else ''}"


def accused_of(one: Json) -> str:
    """The devices that it points to."""
    named = _few(one["accused"]) if one["verdict"] != "application" else ""
    return f"1 of {one['suspect_of']}: {named}" if one["suspect_of"] > 1 and named else named


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:MAX_NAMED])
    return f"{shown}, ..." if len(items) > MAX_NAMED else shown


def case_text(one: Json, width: int | None = None, paint: Paint = PLAIN) -> str:
    """One case whole: what was compared, where, the verdict, what followed."""
    verdict = paint(verdict_of(one), case_colour(one))
    name = clean(one["case_id"])
    lines = [f"{paint(f'case {name}', 'bold')}  {verdict}"]
    job = one["job"]
    lines.append(f"  job {clean(job['name'])} of {clean(job['owner'])}, iteration {one['iteration']}, attempt {one['attempt']}")
    closed = f", closed {moment(one['closed'])} ({duration(one.get('took_s'))})" if one["closed"] else ""
    lines.append(f"  found by {clean(one['found_by'])}, opened {moment(one['opened'])}{closed}")
    if accused := accused_of(one):
        lines.append(f"  accused: {clean(accused)}")
    if one["note"]:
        lines.append(f"  note: {clean(one['note'])}")
    if "findings" not in one:
        return "\n".join([*lines, "  only the job's owner and operators see what was compared"])
    if one["reason"]:
        lines.append(f"  why: {clean(one['reason'])}")
    lines.append(f"  then: {what_followed(one)}")
    for name, label in (("checkpoint", "step"), ("data_position", "data")):
        if one[name]:
            lines.append(f"  {label}: {clean(one[name] if name == 'checkpoint' else _pairs(one[name]))}")
    lines += ["", _findings(one, width, paint)]
    if one["placements"]:
        lines += ["", _placements(one, width, paint)]
    return "\n".join(lines)


def case_colour(one: Json) -> str:
    """By the verdict."""
    return _COLOURS.get(one["verdict"], "bold")


def what_followed(one: Json) -> str:
    """What the ranks did after the last report, in words."""
    if one["waits_for_resume"]:
        return "the job ended; a launch with --resume on another node decides it"
    if one["state"] == "open":
        return "another device is to decide it" if one["action"] == "elsewhere" else "the ranks are replaying the iteration"
    return _FOLLOWS.get(one["action"], str(one["action"]))


def _pairs(found: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _findings(one: Json, width: int | None, paint: Paint) -> str:
    headings = ("RANK", "NODE", "DEVICE", "CHECK", "FIRST", "IN PLACE", "ELSEWHERE", "THERE", "TOLERANCE")
    rows = [
        (
            finding["rank"],
            finding["node"],
            finding["device"],
            f"{finding['check']}{'' if finding['fatal'] else ' (not fatal)'}",
            finding["initial"],
            finding["in_place"],
            finding["elsewhere"],
            finding["elsewhere_device"],
            finding["tolerance"] or None,
        )
        for finding in one["findings"]
    ]
    return table(headings, rows, width, right=(0,), paint=paint) if rows else "no values were told"


def _placements(one: Json, width: int | None, paint: Paint) -> str:
    headings = ("RUN AGAIN", "ATTEMPT", "RANK", "FROM", "TO", "HOW")
    rows = [
        (moment(place["at"]), place["attempt"], place["rank"], place["from"], place["to"], place["how"])
        for place in one["placements"]
    ]
    return table(headings, rows, width, right=(1, 2), paint=paint)
