"""Devices and nodes as text for people."""

from collections.abc import Sequence
from typing import Any

from rsup.supervisor.render import PLAIN, Paint, clean, moment, plural, table

Json = dict[str, Any]
COLOURS = {
    "watch": "yellow",
    "suspect": "yellow",
    "quarantined": "red",
    "in_repair": "red",
    "retired": "dim",
    "probation": "yellow",
}
MAX_SHOWN = 10


def list_text(kind: str, found: Sequence[Json], width: int | None = None, paint: Paint = PLAIN) -> str:
    """A table, a line each."""
    if not found:
        return f"no such {kind}s"
    if kind == "device":
        headings = ["DEVICE", "STATE", "NODE", "SERIAL", "MODEL", "IN USE BY", "SCORE", "EVIDENCE", "WHY"]
        rows = [
            [d["uuid"], said(d), d["node"], d["serial"], d["model"], _user(d["in_use"]), _score(d), _counted(d), d["reason"]]
            for d in found
        ]
        return table(headings, rows, width, right=(6, 7), paint=paint)
    headings = ["NODE", "STATE", "ROLE", "JOB", "DEVICES", "SCORE", "EVIDENCE", "WHY"]
    rows = [[n["node"], said(n), *_role_and_job(n), len(n["devices"]), _score(n), _counted(n), n["reason"]] for n in found]
    return table(headings, rows, width, right=(4, 5, 6), paint=paint)


def _role_and_job(node: Json) -> tuple[str, str]:
    """In the newest job that it took part in; after the job's end it has no role."""
    job = node["job"] or {}
    if job.get("state") == "ended":
        return "", f"{job['name']} (ended)"
    return node["role"], job.get("name", "")


def said(standing: Json) -> str:
    """The state in words, with a person's word that stands above it."""
    state = str(standing["state"]).replace("_", " ")
    return f"{state} ({standing['override']['word']}ed)" if standing["override"] else state


def show_text(kind: str, found: Json, width: int | None = None, paint: Paint = PLAIN) -> str:
    """All of one device or node."""
    lines = [heading(kind, found, paint), ""]
    names = ("model", "serial", "board", "vbios", "driver", "node", "pci_bus_id") if kind == "device" else ("role",)
    facts = [(name.replace("_", " "), found.get(name)) for name in names]
    facts += [("first seen", moment(found.get("first_seen"))), ("last seen", moment(found.get("last_seen")))]
    lines += [f"  {name:11} {clean(value)}" for name, value in facts if value and value != "-"]
    lines += ["", *standing_lines(found)]
    changes = found.get("changes", [])[:MAX_SHOWN]
    if changes:
        rows = [[moment(one["at"]), f"{one['before']} -> {one['after']}", one["verb"], one["reason"]] for one in changes]
        lines += ["", table(["WHEN", "CHANGE", "BY", "WHY"], rows, width, paint=paint)]
    notes = found.get("notes", [])[:MAX_SHOWN]
    if notes:
        lines += ["", table(["WHEN", "IN SLURM"], [[moment(one["at"]), one["text"]] for one in notes], width, paint=paint)]
    evidence = found.get("newest_evidence", [])[:MAX_SHOWN]
    if evidence:
        rows = [[moment(one["last"]), what(one), one["count"], one["effect"], one["text"]] for one in evidence]
        lines += ["", table(["LAST SEEN", "EVIDENCE", "TIMES", "EFFECT", "TEXT"], rows, width, right=(2,), paint=paint)]
    used = found.get("placements" if kind == "device" else "jobs", [])[:MAX_SHOWN]
    if used:
        rows = [[moment(one.get("from") or one.get("first_seen")), (one["job"] or {}).get("name"), _part(one)] for one in used]
        lines += ["", table(["SINCE", "JOB", "AS"], rows, width, paint=paint)]
    return "\n".join(lines)


def heading(kind: str, found: Json, paint: Paint = PLAIN) -> str:
    """`device GPU-b: quarantined`."""
    name = found.get("uuid") or found.get("node")
    return f"{kind} {clean(name)}: {paint(said(found), COLOURS.get(str(found['state']), 'green'))}"


def standing_lines(found: Json) -> list[str]:
    """Since when, why, how much, until when."""
    lines = []
    if found["since"]:
        lines.append(f"  since       {moment(found['since'])}, version {found['version']}")
    if found["reason"]:
        lines.append(f"  why         {clean(found['reason'])}")
    if found["rule"]:
        lines.append(f"  rule        {clean(found['rule'])}")
    lines.append(f"  evidence    {_counted(found)} counted of {found['evidence']['known']}, score {_score(found)}")
    if found["override"]:
        word = found["override"]
        lines.append(f"  {word['word']:11} by {clean(word['by'])} until {moment(word['until'])}: {clean(word['reason'])}")
    if found["ticket"]:
        lines.append(f"  ticket      {clean(found['ticket'])}")
    return lines


def what(evidence: Json) -> str:
    """`xid 79`."""
    return f"{evidence['source']} {evidence['code']}".strip()


def _user(in_use: Json | None) -> str:
    return "" if not in_use else f"{(in_use['job'] or {}).get('name', '?')} rank {in_use['rank']}"


def _part(one: Json) -> str:
    if "rank" in one:
        return f"rank {one['rank']} of attempt {one['attempt']} on {one['node']}"
    return str(one.get("role", ""))


def _score(standing: Json) -> str:
    return f"{standing['score']:.1f}"


def _counted(standing: Json) -> str:
    return str(standing["evidence"]["counted"])


def times(count: int) -> str:
    """`once`, `3 times`."""
    return "once" if count == 1 else plural(count, "time")
