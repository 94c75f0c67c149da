"""What happened to a job, for the report: summary, incidents, rerun cases, slow ranks, devices, checkpoints. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsup.supervisor.case_text import accused_of, verdict_of, what_followed
from rsup.supervisor.exit_text import exit_lines
from rsup.supervisor.metric_views import losses_of
from rsup.supervisor.render import duration, moment, percent, plural
from rsup.supervisor.report_axis import number, seconds_unit
from rsup.supervisor.report_markup import block, details, facts, ranges, section, table, text, unknown, when
from rsup.supervisor.report_text import found_by, lost_by, place_of, recovery_of, troubles
from rsup.supervisor.status_text import end_of_rank, short_device, size_of, state_of
from rsup.supervisor.training_text import at_risk_line, in_process_lines, work_lines

Json = Mapping[str, Any]

MAX_DEVICES = 64
MAX_ASKED = 16
MAX_EVENTS = 300
MAX_OPEN = 20
"""Incidents that are shown without being asked for."""


def summary(status: Json) -> str:
    """Name, state and the figures that people look for first."""
    job, goodput, counts = status["job"], status["goodput"], status["counts"]
    latest = (status.get("metrics") or {}).get("training", {})
    state = state_of(job)
    ended = f", exit code {job['exit_code']}" if job["exit_code"] is not None else ""
    pairs = [
        ("goodput", percent(goodput["ratio"]) if goodput["ratio"] is not None else "unknown"),
        ("ran for" if job["ended"] else "running for", duration(goodput["wall_s"])),
        ("iteration reached", f"{job['iteration']:,}" if job["iteration"] else "none reported"),
        ("size", size_of(job)),
        ("attempts", str(counts["attempts"])),
        ("in-process restarts", str(counts["in_process_restarts"])),
        ("incidents", str(counts["incidents"])),
        ("mean time of an iteration", _pace(goodput["iteration_s"])),
        ("work done again", duration(goodput["lost_s"]) if goodput["lost_s"] is not None else "unknown"),
        *((name, number(latest[name]["value"])) for name in losses_of(latest)[:1]),
    ]
    lines = [f'<p class="reason">{text(job["reason"])}</p>'] if job["reason"] else []
    if job.get("waiting_for"):
        lines.append(f'<p class="reason">{text(job["waiting_for"])}</p>')
    until = f"ended {moment(job['ended'])}" if job["ended"] else f"as of {moment(job['updated'])}"
    injected = ", with injected faults" if job.get("injected") else ""
    said = f"of {job['owner']}, begun {moment(job['created'])}, {until}{injected}"
    lines.append(f'<p class="note">{text(said)}</p>')
    command = block(job["command"])
    shown = details("command", f"<pre>{command}</pre>") if command else unknown("no command is known")
    title = f'<h1>{text(job["name"])} <span class="state {text(state)}">{text(state + ended)}</span></h1>'
    return f'<header id="summary">{title}{"".join(lines)}{facts(pairs)}{_now(status)}{shown}</header>\n'


def _pace(iteration_s: float | None) -> str:
    if not iteration_s:
        return "unknown"
    unit = seconds_unit(iteration_s)
    return f"{iteration_s / unit.size:.3g} {unit.name}"


def _now(status: Json) -> str:
    said = [*(f"looks stuck: {one['text']}" for one in status["suspects"]), *in_process_lines(status["in_process"])]
    said += [line for line in [at_risk_line(status)] if line]
    items = "".join(f"<li>{text(line)}</li>" for line in said)
    return f'<ul class="said">{items}</ul>' if said else ""


def incidents_section(status: Json) -> str:
    """Each incident with how it was found, what recovery took and what was lost; the newest first."""
    found, count = status["incidents"], status["counts"]["incidents"]
    if not found:
        what = "no incident" if status["cases"] or troubles(status) else "nothing went wrong that rsup noticed"
        return section("incidents", "Incidents", unknown(what))
    cards = [_incident(one, status["job"]) for one in reversed(found)]
    body = "".join(cards[:MAX_OPEN])
    if cards[MAX_OPEN:]:
        body += details(f"{len(cards) - MAX_OPEN} earlier ones", "".join(cards[MAX_OPEN:]))
    return section("incidents", "Incidents", body, f"the newest {len(found)} of {count}" if count > len(found) else "")


def _incident(one: Json, job: Json) -> str:
    soft = one["kind"] == "suspected-hang"
    where = f", iteration {one['iteration']}" if one["iteration"] else ""
    head = f"Incident {one['incident']}: {one['kind']}"
    noted = f"{moment(one['at'])}, attempt {one['attempt']}{where}"
    victims = one["victims"]
    rows = [
        ("where", place_of(one)),
        ("found by", found_by(one)),
        ("only waited", f"rank {ranges(victims)}" if victims else ""),
        ("recovery", recovery_of(one, job, soft)),
        ("lost", lost_by(one, soft)),
    ]
    said = "; ".join(f"{name}: {what}" for name, what in rows if what)
    more = "\n".join(exit_lines(one))
    style = "incident soft" if soft else "incident"
    return (
        f'<article class="{style}"><p><b>{text(head)}</b> <small>{text(noted)}</small></p>'
        f'<p>{text(one["text"])}</p><p class="note">{text(said)}</p>'
        + (details("how its ranks ended", f"<pre>{block(more)}</pre>") if more else "")
        + "</article>"
    )


def cases_section(status: Json) -> str:
    """Rerun cases, the newest first; nothing where there are none."""
    cases = status["cases"]
    if not cases:
        return ""
    rows = [
        [when(one["opened"]), *_cells(one["iteration"], verdict_of(one), accused_of(one), what_followed(one)),
         *_cells(duration(one["took_s"]), one["reason"])]
        for one in reversed(cases)
    ]  # fmt: skip
    headings = ("opened", "iteration", "verdict", "accused", "then", "took", "why")
    return section("cases", "Rerun cases", table(headings, rows, right=(1, 5)))


def stragglers_section(status: Json) -> str:
    """Slow ranks, with the device and the cause where one shows."""
    found = status.get("stragglers") or {"episodes": (), "num_reports": 0, "num_episodes": 0}
    if not found["episodes"]:
        watched = found["num_reports"] or (status.get("metrics") or {}).get("straggler")
        nobody = "no rank held the others up" if watched else "nobody looked for slow ranks (`--log-straggler`)"
        return section("stragglers", "Slow ranks", unknown(nobody))
    headings = (
        "from",
        "attempt",
        "rank",
        "device",
        "node",
        "iterations",
        "slower",
        "section",
        "cause",
        "what",
        "for the device",
    )
    rows = [_episode(one) for one in reversed(found["episodes"])]
    count = found["num_episodes"]
    note = f"the newest {len(rows)} of {count}" if count > len(rows) else ""
    return section("stragglers", "Slow ranks", table(headings, rows, right=(1, 2, 6)), note)


def _episode(one: Json) -> list[str]:
    device = short_device(one["device"])
    said = one["text"].replace(one["device"], device) if device else one["text"]
    where = _cells(one["attempt"], one["rank"], device, one["node"], f"{one['first_iteration']}-{one['last_iteration']}")
    how = _cells(f"{one['slowdown']:.1f}x", one["section"], one["cause"] or "none shows", said, one["verdict"])
    return [when(one["from"]), *where, *how]


def _cells(*parts: object) -> list[str]:
    return [text(part) for part in parts]


def devices_of_interest(status: Json) -> list[str]:
    """Devices that something is said about, then the first others: those whose history is worth a question, at most
    `MAX_ASKED`. A rank's stand-in for a device it does not have is none."""
    named = _accused(status)
    names = dict.fromkeys([*named, *(one["device"] for one in status["ranks"] if one["device"])])
    return [name for name in names if not name.startswith("CPU-")][:MAX_ASKED]


def _accused(status: Json) -> list[str]:
    """Devices of incidents, cases and slow ranks."""
    named = [one["device"] for one in status["incidents"]]
    named += [device for one in status["cases"] for device in one["accused"] if one["verdict"] != "application"]
    named += [one["device"] for one in (status.get("stragglers") or {}).get("episodes", ())]
    return list(dict.fromkeys(name for name in named if name))


def devices_section(status: Json, known: Mapping[str, Json]) -> str:
    """The newest attempt's devices and ranks, and what the history says of `known` ones (`hardware_views.device_detail`)."""
    accused = _accused(status)
    places: dict[tuple[str, str], list[Json]] = {}
    for rank in status["ranks"]:
        places.setdefault((rank["device"] or "", rank["node"]), []).append(rank)
    if not places:
        return section("devices", "Devices", unknown("no rank was ever started"))
    used = sorted(places, key=lambda one: (one[0] not in accused, places[one][0]["rank"]))
    rows = [
        _device(device, node, places[device, node], known.get(device), device in accused) for device, node in used[:MAX_DEVICES]
    ]
    headings = ("device", "node", "ranks", "end", "in this job", "state", "evidence")
    gone = [name for name in accused if name not in {device for device, _ in used}]
    rows += [_device(name, "", [], known.get(name), True) for name in gone[:MAX_DEVICES]]
    note = (
        f"of the newest attempt; {MAX_DEVICES} of {len(used)}, named ones first"
        if len(used) > MAX_DEVICES
        else "of the newest attempt"
    )
    return section("devices", "Devices", table(headings, rows), note)


def _device(name: str, node: str, ranks: Sequence[Json], found: Json | None, is_accused: bool) -> list[str]:
    ends = {end_of_rank(rank) for rank in ranks} - {""}
    here = "named above" if is_accused else ""
    shown = short_device(name) or "none"
    evidence = "" if found is None else _evidence(found)
    cells = (shown, node, ranges(rank["rank"] for rank in ranks), ", ".join(sorted(ends)), here, (found or {}).get("state", ""))
    return [*map(text, cells), text(evidence)]


def _evidence(found: Json) -> str:
    counts = found["evidence"]
    if not counts["known"]:
        return "none"
    newest = found["newest_evidence"]
    last = f"; the newest: {newest[0]['text']}" if newest else ""
    return f"{counts['counted']} of {counts['known']} count{last}"


def checkpoints_section(status: Json) -> str:
    """What is saved, and what is not."""
    saved, count = status["checkpoints"], status["counts"]["checkpoints"]
    said = "".join(f"<li>{text(line)}</li>" for line in work_lines(status))
    saves = status["work"]["saves"]
    if saves is not None:
        stall = f", training stood still for {duration(saves['stall_s'])}" if saves["stall_s"] is not None else ""
        told = ", ".join(f"{saves[how]} {how}" for how in ("durable", "local", "failed"))
        said += f"<li>{text(plural(saves['begun'], 'save'))} begun, {told}{stall}</li>"
    rows = [
        [text(one["iteration"]), when(one["at"]), *_cells(one["attempt"], duration(one["duration_s"]), one["path"])]
        for one in reversed(saved)
    ]
    body = f'<ul class="said">{said}</ul>'
    if rows:
        shown = f"{len(rows)} of {count}" if count > len(rows) else str(count)
        body += details(
            f"durable checkpoints ({shown})", table(("iteration", "at", "attempt", "took", "path"), rows, right=(0, 2, 3))
        )
    return section("checkpoints", "Checkpoints", body)


def events_section(events: Sequence[Json]) -> str:
    """The newest events, as they were recorded."""
    if not events:
        return ""
    rows = [[when(one["at"]), *_cells(one["kind"], one["text"])] for one in reversed(events[-MAX_EVENTS:])]
    count = events[-1]["number"]  # they are counted through, also over those that have been forgotten
    shown = f"the newest {len(rows)} of {count}" if count > len(rows) else str(len(rows))
    return section("events", "Events", details(f"events ({shown})", table(("at", "kind", "what"), rows)))
