"""A rerun case in the supervisor: what its ranks tell of it becomes a record, lines of the job's story, and evidence. Pure.

Ranks find out what a rejected result was (`worker/rerun`) and report it step by step under one id. A report replaces the one
before; a verdict closes the case for good, and nothing that is told later changes it. What was told is written in the same
transaction as all that follows from it, so each verdict is stored once and gives evidence once, whatever dies in between, also
when the report comes late out of a dead agent's spool.

A `persistent` device is out for the rest of the job, unless the fault only followed its rank to it (`followed_rank`). What is
told of devices: `case_evidence`. What follows when ranks leave for a case: `case_followup`.
"""

import msgspec
from msgspec.structs import replace

from rsup.supervisor.case_evidence import accuse, held_devices
from rsup.supervisor.case_sentences import MAX_TEXT_CHARS, findings_text, first_finding, verdict_text
from rsup.supervisor.followed_rank import Doubt, doubted, doubts_about, settle_accusations
from rsup.supervisor.records import CaseSaved
from rsup.supervisor.states import Case, JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import CASE_ACTIONS, VERDICTS, AvoidedDevice, CaseFinding, CaseReported

MAX_OPEN = 8
MAX_CLOSED_KEPT = 64
MAX_FINDINGS = 64
MAX_DEVICES = 256
MAX_ID_CHARS = 300
LEAVING_ACTIONS = ("restart", "elsewhere", "leave")
"""After these the ranks end, and the supervisor decides what comes next."""


def case_reported(turn: Turn, agent_id: str, fact: CaseReported) -> None:
    """A rank of the current attempt tells of a case."""
    if _can_be_used(turn, agent_id, fact):
        _take(turn, agent_id, fact, is_late=False)


def late_case(turn: Turn, agent_id: str, fact: CaseReported) -> None:
    """A report of an attempt that is over: a verdict in it is kept, and decides nothing of the job's course any more."""
    if not _can_be_used(turn, agent_id, fact):
        return
    node, report = turn.state.agents[agent_id].info.node, fact.report
    what = f"the verdict {report.verdict!r}" if report.verdict else "no verdict"
    _take(turn, agent_id, fact, is_late=True)
    text = f"case {report.case_id}: a report of attempt {fact.attempt} with {what} came late from {node} and decides nothing"
    turn.log("CaseReported", f"{text} of the job's course", "warning", at_us=fact.at_us, attempt=fact.attempt, node=node)


def is_open(case: Case) -> bool:
    """Whether it has no verdict yet."""
    return not case.saved.verdict


def is_due(case: Case) -> bool:
    """Whether another device has still to decide it; the checkpoint that the ranks leave holds what they need for that."""
    return is_open(case) and case.saved.action == "elsewhere"


def put_case(turn: Turn, case: Case) -> None:
    """Keep the case as it is now, as the one told of last; write its record."""
    others = [one for one in turn.state.cases if one.saved.case_id != case.saved.case_id]
    turn.change(cases=[*others, case])
    turn.record(case.saved)


def drop_case(turn: Turn, case_id: str) -> None:
    """Nothing follows from that case any more."""
    turn.change(cases=[one for one in turn.state.cases if one.saved.case_id != case_id])


def close_undecided(turn: Turn, case: Case, reason: str) -> None:
    """The supervisor closes a case that its ranks cannot decide any more."""
    saved = replace(case.saved, verdict="undecided", reason=reason[:MAX_TEXT_CHARS], closed_us=turn.now.us)
    put_case(turn, replace(case, saved=saved, avoid=[]))
    _note_closed(turn, saved.case_id)
    drop_case(turn, saved.case_id)
    turn.log("CaseVerdict", f"case {saved.case_id}: undecided: {saved.reason}", "warning", data=_data(saved))


def passed_by(turn: Turn, iteration: int) -> None:
    """A checkpoint of that iteration is durable: nothing decides older cases any more. A verdict may still be under way from a
    node that is cut off."""
    if all(agent.reachable for _, agent in turn.state.active):
        for case in turn.state.cases:
            if is_open(case) and case.saved.iteration < iteration:
                text = f"training went past iteration {case.saved.iteration} (a checkpoint of iteration {iteration} is durable)"
                close_undecided(turn, case, f"{text}, and its ranks told no verdict")


# ------------------------------------------------------------------------------------------------------------- a report


def _can_be_used(turn: Turn, agent_id: str, fact: CaseReported) -> bool:
    report, why = fact.report, ""
    if not report.case_id or len(report.case_id) > MAX_ID_CHARS:
        why = "its id is empty or too long"
    elif report.verdict and report.verdict not in VERDICTS:
        why = f"unknown verdict {report.verdict[:40]!r}"
    elif report.action and report.action not in CASE_ACTIONS:
        why = f"unknown action {report.action[:40]!r}"
    if why:
        node = turn.state.agents[agent_id].info.node
        text = f"a case report of rank {fact.rank} on {node} cannot be used and decides nothing: {why}"
        turn.log("CaseReported", text, "warning", at_us=fact.at_us, attempt=fact.attempt, rank=fact.rank, node=node)
    return not why


def _take(turn: Turn, agent_id: str, fact: CaseReported, is_late: bool) -> None:
    state, report = turn.state, fact.report
    before = next((case for case in state.cases if case.saved.case_id == report.case_id), None)
    if report.case_id in state.closed_cases:
        _after_verdict(turn, fact, before)
        return
    saved = _saved(state, fact, before.saved if before is not None else None)
    case = replace(before, saved=saved) if before is not None else Case(saved=saved, told_in=0)
    if not is_late:
        case = replace(case, told_in=fact.attempt)
    doubts = doubts_about(state, saved, fact.attempt)
    case = doubted(case, doubts)
    if before is None:
        _make_room(turn)
        node = turn.state.agents[agent_id].info.node
        text = f"case {saved.case_id}: iteration {saved.iteration} was rejected: {findings_text(report.findings)}"
        at = first_finding(report.findings)
        turn.log(
            "CaseOpened",
            text,
            "warning",
            at_us=fact.at_us,
            rank=at.rank if at else fact.rank,
            node=at.node or node if at else node,
            data=_data(saved),
        )
    elif saved == before.saved:
        turn.change(cases=[*(c for c in state.cases if c is not before), case])
        return
    put_case(turn, case)
    if saved.verdict:
        _close(turn, case, doubts, is_late)
    elif is_late and before is None:
        close_undecided(turn, case, f"attempt {fact.attempt}, which found it, had ended before it was told of")
    elif saved.action == "elsewhere" and (before is None or before.saved.action != "elsewhere"):
        text = f"case {saved.case_id}: another device has to decide it: {saved.reason}"
        turn.log("CaseElsewhere", text, "warning", at_us=fact.at_us, data=_data(saved))


def _make_room(turn: Turn) -> None:
    cases = turn.state.cases
    if len(cases) >= MAX_OPEN:
        oldest = cases[0]
        if is_open(oldest):
            close_undecided(turn, oldest, f"{MAX_OPEN} newer cases of the job are open: it was given up")
        else:
            drop_case(turn, oldest.saved.case_id)


def _after_verdict(turn: Turn, fact: CaseReported, case: Case | None) -> None:
    """What is told of a case that is closed: a repeat, or something that comes too late to count."""
    report = fact.report
    if case is not None and report.verdict == case.saved.verdict:
        return
    said = f"{report.verdict!r}: {report.reason[:MAX_TEXT_CHARS]}" if report.verdict else "no verdict"
    text = f"case {report.case_id} has its verdict already, which is final; a later report says {said}"
    turn.log("CaseReported", text, "info", at_us=fact.at_us, attempt=fact.attempt, rank=fact.rank)


def _saved(state: JobState, fact: CaseReported, before: CaseSaved | None) -> CaseSaved:
    report = fact.report
    verdict = "" if report.verdict == "undecided" and report.action == "elsewhere" else report.verdict
    tried = {str(rank): list(devices) for rank, devices in report.tried.items()}
    for rank, devices in (before.tried if before is not None else {}).items():
        tried[rank] = list(dict.fromkeys([*devices, *tried.get(rank, [])]))
    findings = report.findings[:MAX_FINDINGS]
    return CaseSaved(
        job=state.key,
        case_id=report.case_id,
        attempt=before.attempt if before is not None else fact.attempt,
        iteration=report.iteration,
        opened_us=before.opened_us if before is not None else fact.at_us,
        fatal=report.fatal,
        findings=[msgspec.to_builtins(one) for one in findings] or (before.findings if before is not None else []),
        closed_us=fact.at_us if verdict else None,
        verdict=verdict,
        reason=report.reason[:MAX_TEXT_CHARS],
        action=report.action,
        data_dependent=report.data_dependent,
        accused=report.accused[:MAX_DEVICES],
        suspect_of=max(1, report.suspect_of),
        tried={rank: devices[-MAX_DEVICES:] for rank, devices in list(tried.items())[:MAX_DEVICES]},
        checkpoint=report.checkpoint[:MAX_TEXT_CHARS] or (before.checkpoint if before is not None else ""),
        data_position=report.data_position,
        found_by=report.found_by[:40],
        injected=report.injected,
        placements=[_with_device(one, findings) for one in (before.placements if before is not None else [])],
    )


def _with_device(placement: dict[str, object], findings: list[CaseFinding]) -> dict[str, object]:
    """A placement of which the ranks know where it went, told by the rank itself or not."""
    there = next((one.elsewhere_device for one in findings if one.rank == placement["rank"] and one.elsewhere_device), "")
    return {**placement, "to": there} if placement["to"] == "" and there else placement


# ------------------------------------------------------------------------------------------------------------ a verdict


def _close(turn: Turn, case: Case, doubts: list[Doubt], is_late: bool) -> None:
    saved = case.saved
    _note_closed(turn, saved.case_id)
    level = "warning" if saved.verdict in ("transient", "undecided") else "error"
    turn.log("CaseVerdict", verdict_text(saved), level, at_us=saved.closed_us, data=_data(saved))
    if saved.fatal:
        accuse(turn, saved, case.doubted)
    settle_accusations(turn, saved, doubts)
    is_repeat = _leave_out(turn, saved, case.doubted)
    if is_late or saved.action not in LEAVING_ACTIONS:
        drop_case(turn, saved.case_id)
        return
    case = replace(case, avoid=[], is_repeat=is_repeat)
    turn.change(cases=[*(one for one in turn.state.cases if one.saved.case_id != saved.case_id), case])


def _note_closed(turn: Turn, case_id: str) -> None:
    turn.change(closed_cases=[*turn.state.closed_cases, case_id][-MAX_CLOSED_KEPT:])


def _leave_out(turn: Turn, saved: CaseSaved, doubted: list[str]) -> bool:
    """A device proven faulty is out for this job, one of a suspect group comes last; whether one accused was out already."""
    if saved.verdict != "persistent":
        return False
    reason = f"case {saved.case_id}: {saved.reason}"
    out = {a.device for a in turn.state.avoid if a.rank is None}
    held = held_devices(turn.state)
    new = [device for device in dict.fromkeys(saved.accused) if device not in {*out, *doubted} and device in held]
    proven = saved.suspect_of == 1
    turn.change(avoid=[*turn.state.avoid, *(AvoidedDevice(device, reason, quarantined=proven) for device in new)])
    return bool(out & set(saved.accused))


def _data(saved: CaseSaved) -> dict[str, object]:
    return {
        "case_id": saved.case_id,
        "iteration": saved.iteration,
        "verdict": saved.verdict,
        "action": saved.action,
        "accused": saved.accused,
        "suspect_of": saved.suspect_of,
        "tried": saved.tried,
        "findings": saved.findings[:8],
        "injected": saved.injected,
    }
