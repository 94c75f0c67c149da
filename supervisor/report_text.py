"""`rsup report`, and events and stacks for people: a job's story from the dicts of `views`."""

from collections.abc import Mapping
from typing import Any

from rsup.supervisor.case_text import accused_of, case_colour, verdict_of, what_followed
from rsup.supervisor.exit_text import exit_lines
from rsup.supervisor.render import PLAIN, Paint, clean, clean_block, duration, moment, percent, plural
from rsup.supervisor.status_text import short_device, size_of, state_of
from rsup.supervisor.training_text import at_risk_line, in_process_lines, time_table

Json = Mapping[str, Any]
MAX_SLOW = 10
HANGS = ("hang", "suspected-hang")
LEVEL_COLOURS = {"warning": "yellow", "error": "red"}


def report_text(status: Json, paint: Paint = PLAIN) -> str:
    """What happened to a job: how it went, each incident with how it was found, what recovery took and what was lost."""
    job, goodput = status["job"], status["goodput"]
    parts = [_how_it_went(status, paint)]
    count = status["counts"]["incidents"]
    if count > len(status["incidents"]):
        parts.append(f"Of {count} incidents the newest {len(status['incidents'])}:")
    parts += [_incident(one, job, paint) for one in status["incidents"]]
    parts += [_case(one, paint) for one in status["cases"]]
    parts += troubles(status)
    if not status["incidents"] and not status["cases"] and not troubles(status):
        parts.append("Nothing went wrong that rsup noticed.")
    parts.append(_time(goodput, paint))
    parts.append(_saved(status))
    return "\n\n".join(parts)


def troubles(status: Json) -> list[str]:
    """What went wrong beside incidents and rerun cases: a paragraph each, of what looks stuck, slow ranks and failed saves."""
    found = [f"Looks stuck: {clean(one['text'])}" for one in status["suspects"]]
    slow = status.get("stragglers")  # an older supervisor has none
    if slow and slow["episodes"]:
        count, newest = slow["num_episodes"], slow["episodes"][-MAX_SLOW:]
        head = f"Slow ranks: {plural(count, 'episode')}" + (f", the newest {len(newest)}:" if count > len(newest) else ":")
        found.append("\n".join([head, *(f"  {_slow(one)}" for one in newest)]))
    saves = status["work"]["saves"]
    if saves is not None and saves["failed"]:
        last = status["work"]["failed"]
        why = f"; the last, of iteration {last['iteration']}: {clean(last['text'])}" if last else ""
        found.append(f"{plural(saves['failed'], 'failed save')}{why}")
    return found


def _slow(one: Json) -> str:
    device, cause = short_device(one["device"]), f" ({clean(one['cause'])})" if one["cause"] else ""
    said = clean(one["text"].replace(one["device"], device) if device else one["text"])
    until = "going on" if one["goes_on"] else f"to {one['last_iteration']}"
    return f"attempt {one['attempt']}, iterations {one['first_iteration']} {until}: {said}{cause}"


def _how_it_went(status: Json, paint: Paint) -> str:
    job = status["job"]
    ended = f", exit code {job['exit_code']}" if job["exit_code"] is not None else ""
    lines = [paint(f"Job {clean(job['name'])} of {clean(job['owner'])}: {state_of(job)}{ended}", "bold")]
    if job["reason"]:
        lines.append(f"  {clean(job['reason'])}")
    if job["command"]:
        lines.append(f"  {clean(job['command'])}")
    until = f"to {moment(job['ended'])}" if job["ended"] else "until now"
    lines.append(f"  {moment(job['created'])} {until}, {duration(status['goodput']['wall_s'])}")
    reached = f", iteration {job['iteration']} reached" if job["iteration"] else ""
    lines.append(f"  {size_of(job)}, {plural(status['counts']['attempts'], 'attempt')}{reached}")
    return "\n".join(lines)


def _incident(one: Json, job: Json, paint: Paint) -> str:
    soft = one["kind"] == "suspected-hang"
    where = f", iteration {one['iteration']}" if one["iteration"] else ""
    head = f"Incident {one['incident']}: {one['kind']}"
    lines = [f"{paint(head, 'yellow' if soft else 'red')}, {moment(one['at'])}, attempt {one['attempt']}{where}"]
    rows = [("what", clean(one["text"])), ("where", place_of(one)), ("found by", found_by(one))]
    if one["victims"]:
        rows.append(("only waited", f"rank {', '.join(str(rank) for rank in one['victims'])}"))
    rows += [("recovery", recovery_of(one, job, soft)), ("lost", lost_by(one, soft))]
    if one["num_stacks"]:
        rows.append(("stacks", f"{one['num_stacks']}: `rsup stacks {clean(job['name'])}`"))
    return "\n".join([*lines, *(f"  {name:<12} {text}" for name, text in rows if text), *exit_lines(one)])


def _case(one: Json, paint: Paint) -> str:
    head = paint(f"Rerun case {clean(one['case_id'])}: {clean(verdict_of(one))}", case_colour(one))
    lines = [f"{head}, {moment(one['opened'])}, attempt {one['attempt']}, iteration {one['iteration']}"]
    rows = [("accused", accused_of(one)), ("why", one["reason"]), ("then", what_followed(one))]
    rows.append(("compared", f"`rsup cases show {one['case_id']}`"))
    return "\n".join([*lines, *(f"  {name:<12} {clean(text)}" for name, text in rows if text)])


def place_of(one: Json) -> str:
    """Rank, node and device."""
    who = f"rank {one['rank']}" if one["rank"] is not None else ""
    return ", ".join(clean(part) for part in (who, one["node"], short_device(one["device"])) if part)


def found_by(one: Json) -> str:
    """Who noticed it, and how soon."""
    if one["detection_s"] is None:
        return clean(one["found_by"])
    delay = f"after {duration(one['detection_s'])}" if one["detection_s"] >= 0.001 else "at once"
    if one["kind"] in HANGS:
        delay = f"it had stood still for {duration(one['detection_s'])}"
    return f"{clean(one['found_by']) or 'rsup'}, {delay}"


def recovery_of(one: Json, job: Json, soft: bool) -> str:
    """How long it took until training went on, or why it did not."""
    if one["recovery_s"] is not None:
        took = duration(one["recovery_s"])
        if one["kind"] in HANGS and one["detection_s"] is not None:
            took = f"{duration(one['recovery_s'] - one['detection_s'])} (with the standing still {took})"
        return f"{took} until every rank had stepped again"
    if soft:
        return "nothing was killed"
    if one["kind"] == "in-process" and one["attempt"] < job["attempt"]:
        return "none: the attempt ended"
    after = one["attempt"] + 1
    if after < job["attempt"] or (after == job["attempt"] and job.get("outcome") == "succeeded"):
        return f"unknown: attempt {after} ended before every rank was seen stepping"
    return "none: the job ended" if job["ended"] else "not yet"


def lost_by(one: Json, soft: bool) -> str:
    """What was done again, or is gone; empty where that is no question."""
    if one["lost_iterations"] is None:
        return "" if soft else "unknown"
    return plural(one["lost_iterations"], "iteration") if one["lost_iterations"] else "nothing"


def _time(goodput: Json, paint: Paint) -> str:
    if goodput["ratio"] is None:
        return f"Time: {duration(goodput['wall_s'])} in all; no rank reported an iteration, so goodput is unknown."
    head = (
        f"Time: {duration(goodput['wall_s'])} in all, {duration(goodput['productive_s'])} of it training that was kept"
        f" (goodput {percent(goodput['ratio'])})."
    )
    return head + "\n" + "\n".join(f"  {line}" for line in time_table(goodput, paint=paint).splitlines())


def _saved(status: Json) -> str:
    count, work = status["counts"]["checkpoints"], status["work"]
    lines = ["No checkpoint was reported."]
    if work["durable"]:
        last = work["durable"]
        which = f"the last of iteration {last['iteration']} at {moment(last['at'])}"
        lines = [f"{plural(count, 'checkpoint')}, {which}: {clean(last['path'])}"]
    risk = at_risk_line(status)
    lines += [risk[0].upper() + risk[1:] + "."] if risk else []
    lines += [line[0].upper() + line[1:] for line in in_process_lines(status["in_process"])]
    return "\n".join(lines)


def event_line(event: Json, paint: Paint = PLAIN) -> str:
    """One event on one line."""
    who = f" [{clean(event['principal'])}]" if event["principal"] else ""
    text = f"{event['kind']}: {clean(event['text'])}{who}" if event["text"] else event["kind"]
    return f"{paint(moment(event['at']), 'dim')}  {paint(clean(text), LEVEL_COLOURS.get(event['level'], ''))}"


def stacks_text(found: Json, paint: Paint = PLAIN) -> str:
    """Stacks with their ranks, equal ones once."""
    if not found["stacks"]:
        return str(clean(found["message"]))
    head = f"incident {found['incident']} ({found['kind']}) at {moment(found['at'])}, attempt {found['attempt']}"
    parts = [f"{head}: {clean(found['text'])}"]
    for stack in found["stacks"]:
        ranks = ", ".join(str(rank) for rank in stack.get("ranks", ()))
        title = f"rank {ranks} ({clean(stack.get('source', ''))})"
        parts.append(f"{paint(title, 'bold')}\n{clean_block(stack.get('text', ''))}")
    return "\n\n".join(parts)
