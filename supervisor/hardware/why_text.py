"""Why a device or node is in its state, on one screen: each piece of evidence with its numbers, what follows, how it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rsup.supervisor.hardware.hardware_text import heading, standing_lines, times, what
from rsup.supervisor.hardware.policy import built_in
from rsup.supervisor.render import PLAIN, Paint, clean, moment

MAX_EVIDENCE = 6
MAX_FINDINGS = 3
MAX_OTHERS = 3
MAX_BOARDS = 16
MAX_NOTES = 6

Json = dict[str, Any]


@dataclass(frozen=True)
class WhyStory:
    """What the text is made of. `cases`: rerun cases by id, as far as they may be read."""

    kind: str
    found: Json
    evidence: Sequence[Json]
    cases: Mapping[str, Json]


def why_text(story: WhyStory, paint: Paint = PLAIN) -> str:
    """The story."""
    found = story.found
    lines = [heading(story.kind, found, paint), *standing_lines(found)]
    counted = [one for one in story.evidence if one["effect"] == "counted"]
    others = [one for one in story.evidence if one["effect"] != "counted"]
    lines += ["", "what speaks for that:"] if counted else ["", "nothing that counts has been seen of it"]
    for one in counted[:MAX_EVIDENCE]:
        lines += _evidence(one, story.cases.get(one["case_id"]))
    if len(counted) > MAX_EVIDENCE:
        lines.append(f"  and more, see `rsup {story.kind}s timeline {clean(_name(story))}`")
    for one in others[:MAX_OTHERS]:
        lines.append(f"  not counted, {clean(one['effect'])}: {what(one)}, {clean(one['text'])}")
    lines += _against(story)
    lines += ["", "what follows:", *(f"  {line}" for line in _follows(story))]
    lines += ["how it ends:", *(f"  {line}" for line in _ends(story))]
    return "\n".join(lines)


def _against(story: WhyStory) -> list[str]:
    """Of a node: the boards that speak against it, and what was done about it in SLURM."""
    boards = [one for one in story.found.get("against", ()) if one["kind"] == "device"]
    lines = [f"  {clean(one['name'])} {one['state'].replace('_', ' ')}: {clean(one['reason'])}" for one in boards[:MAX_BOARDS]]
    if lines:
        lines = ["", "its devices (`rsup devices why DEVICE` tells each):", *lines]
    notes = story.found.get("notes", ())[:MAX_NOTES]
    if notes:
        lines += ["", "in SLURM, the newest first:"]
        lines += [f"  {moment(one['at'])}  {clean(one['text'])}" for one in notes]
    return lines


def _name(story: WhyStory) -> str:
    return str(story.found.get("uuid") or story.found.get("node"))


def _evidence(one: Json, case: Json | None) -> list[str]:
    job = one["job"]
    where = f" in job {job['name']}" if job else ""
    if one["iteration"]:
        where += f", iteration {one['iteration']}"
    if one["rank"] is not None:
        where += f", rank {one['rank']}"
    share = f", 1 of {round(1 / one['share'])}" if one["share"] < 1 else ""
    injected = ", injected" if one["injected"] else ""
    weighs = f"weighs {one['weight']:g}" if one["weight"] else "weighs nothing"
    first = f"  {moment(one['last'])}  {what(one)}{share}, {times(one['count'])}{where} ({weighs}{injected}; {one['rule']})"
    lines = [clean(first) if not first.startswith("  ") else "  " + clean(first), f"    {clean(one['text'])}"]
    if case is not None:
        lines.append(f"    case {clean(case['case_id'])}: {clean(case.get('verdict') or 'open')}")
        if case.get("note"):
            lines.append(f"      {clean(case['note'])}")
        lines += [f"      {_finding(finding)}" for finding in case.get("findings", [])[:MAX_FINDINGS]]
    return lines


def _finding(finding: Json) -> str:
    told = f"rank {finding['rank']}, {finding['check']}: {finding['initial']} on {finding['device']}"
    if finding.get("in_place"):
        told += f", {finding['in_place']} when repeated there"
    if finding.get("elsewhere"):
        told += f", {finding['elsewhere']} on {finding.get('elsewhere_device') or 'another device'}"
    return clean(told)


def _follows(story: WhyStory) -> list[str]:
    found, what_ = story.found, story.kind
    if found["override"] and found["override"]["word"] == "allow":
        return [f"nothing until {moment(found['override']['until'])}: somebody's word stands above the evidence"]
    in_slurm = _in_slurm(found)
    if in_slurm and found["state"] in ("clear", "watch", "probation"):
        return in_slurm
    lines = {
        "clear": ["nothing"],
        "watch": [f"nothing yet: the {what_} is used as before"],
        "suspect": [f"ranks are placed on other {what_}s first"],
        "quarantined": [f"the {what_} is left out wherever others suffice; a launch that must use it says so"],
        "in_repair": [f"the {what_} is left out wherever others suffice"],
        "probation": ["it is in use; the next hit leads straight back to quarantine"],
        "retired": [f"the {what_} is left out for good"],
    }[found["state"]]
    if found["state"] in ("quarantined", "in_repair", "retired") and what_ == "device":
        why = found["may_drain"]
        lines.append(
            f"its node may be drained: {clean(why)}"
            if why
            else "its node is not drained for it: that takes a second independent episode, a failed test or an operator's word"
        )
    return lines + in_slurm


def _in_slurm(found: Json) -> list[str]:
    """What the supervisor holds against a node in SLURM now, or nothing."""
    at = found.get("scheduler")
    if at is None:
        return []
    lines = []
    if at["refused"]:
        lines.append(f"the gate refuses it to jobs since {moment(at['refused_since'])} ({at['refused']})")
    if at["drained"]:
        lines.append(f"it is drained in SLURM: {clean(at['drained'])}")
    if at.get("taken_over"):
        lines.append("somebody else has made the drain theirs: `rsup slurm status` shows it")
    if at["reserved"]:
        lines.append("it is reserved in SLURM, so that only tests run there")
    if at.get("held"):
        lines.append("no gate refuses it yet: the guard holds it back, or SLURM shows it out of service (`rsup slurm status`)")
    if at["let_run_by"] and found["against"]:
        lines.append(f"{clean(at['let_run_by'])} let it run: it is left alone until new evidence, or `rsup nodes drain`")
    return lines


def _ends_in_slurm(found: Json) -> list[str]:
    at = found.get("scheduler")
    if at is None or not (at["refused"] or at["drained"] or at["reserved"]):
        return []
    if at.get("waits_for_gate"):
        return ["once its gate knows that nothing counts against it: it asks each minute (`rsup slurm status`)"]
    if at["wanted"]:
        return [f"asked for by {clean(at['wanted'])}: by `rsup nodes undrain {clean(found['node'])} --reason ...`"]
    boards = [clean(one["name"]) for one in found["against"] if one["kind"] == "device" and one["may_drain"]]
    if boards:
        return [f"once nothing counts against {', '.join(boards[:MAX_BOARDS])}: `rsup devices why {boards[0]}` says how"]
    return []


def _ends(story: WhyStory) -> list[str]:
    found, name = story.found, clean(_name(story))
    state, command = found["state"], f"rsup {story.kind}s"
    lines = []
    if found["override"]:
        lines.append(f"the {found['override']['word']} at {moment(found['override']['until'])}")
    lines += _ends_in_slurm(found)
    if state == "clear":
        return lines or ["there is nothing to end"]
    if state in ("watch", "suspect"):
        lines.append(
            f"by itself at {moment(found['expires'])} unless more is seen" + (", as watch" if state == "suspect" else "")
        )
        lines.append(f"or by `{command} release {name} --reason ...`")
    elif state in ("quarantined", "in_repair"):
        due = _due_first(found["rule"])
        if due:
            lines.append(f"a {due} is due first")
        if found["held_by_test"] and story.kind == "device":
            lines.append(f"after a passed `rsup devices test {name}` since, by `{command} release {name} --reason ...`;")
            lines.append("never by time; an operator may release it with --without-test")
        elif found["held_by_test"]:
            lines.append(f"by `{command} release {name} --without-test --reason ...`; never by time")
        else:
            lines.append(f"a test was passed: by `{command} release {name} --reason ...`, then on probation")
    elif state == "probation":
        lines.append(f"by clean run time: {found['clean_hours']:g} h so far")
    else:
        lines.append(f"only by `{command} repair {name} --reason ...`")
    return lines


def _due_first(label: str) -> str:
    """`reset`, `reboot` or `repair`, as far as the built-in rules tell it of that rule."""
    name = label.rpartition("/")[2]
    return next((rule.until for rule in built_in().rules if rule.name == name), "")
