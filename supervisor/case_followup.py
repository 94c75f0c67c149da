"""What follows when ranks leave (16 or 17) for a rerun case, and what becomes of cases between attempts. Pure.

The report's action says what the ranks left for: `elsewhere` with a case that is open: its ranks repeat the iteration on other
devices, of their node (a spare or a neighbour's, by the agent), of a spare node, or of a node that changes places with theirs;
`elsewhere` after a verdict: the job goes on without the accused device; `restart`: again from the last checkpoint; `leave`: the
job ends with 17, as it does whatever they left for if the fault has followed its rank to another board (`followed_rank`). None
of these restarts costs anything of the budget; each has a cap of its own, so that no case keeps a job busy for ever. Without
another device the job ends with 16 and names the node to exclude: the case stays open, and a resumed launch places its ranks
where they have not been.

A case that nobody works on any more when its attempt has ended is closed `undecided`: the checkpoint does not hold it.
"""

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor import rerun_elsewhere
from rsup.supervisor.case_machine import close_undecided, drop_case, is_due, is_open, put_case
from rsup.supervisor.case_sentences import verdict_text
from rsup.supervisor.end_report import all_exits
from rsup.supervisor.other_devices import all_avoided, arranged, change_places, is_concerned, ranks_of
from rsup.supervisor.records import CaseSaved
from rsup.supervisor.render import plural
from rsup.supervisor.rerun_elsewhere import Rerun, confirmed_rerun, name_suspect
from rsup.supervisor.restart_policy import Verdict
from rsup.supervisor.states import Case, JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, AvoidedDevice

MAX_RERUNS = 3
"""Reruns that a launch gives one case."""
MAX_RETURNS = 3
"""Reruns of a case, over all launches, that came to a device which had been tried: nobody has another one for it."""
MAX_RESTARTS = 3
"""Free restarts for cases without a newer durable checkpoint between."""
MAX_PLACEMENTS = 32

_RERUN = "restart for a rerun on another device"
_LEAVES_FOR = ("exit", "signal", "hang")
"""Kinds of failure that a declared exit may hide behind: peers of a rank that leaves may break first."""


class FollowUp(Struct, frozen=True, kw_only=True):
    """What follows from the case for which the ranks left."""

    case: Case
    verdict: Verdict
    event: str = ""
    """Kind of the story's line; empty: the verdict's own says it."""
    order: list[str] = []
    """The agents of the next attempt in the order of the current one's, where nodes change places."""
    avoid: list[AvoidedDevice] = []
    """Where the case's ranks must not run again."""
    gives_up: str = ""
    """Why the case is closed without a verdict of its ranks'."""
    is_restart: bool = False
    why: str = "restart for a rerun case"


def left_for(state: JobState) -> FollowUp | Rerun | None:
    """For what the ranks of the failed attempt left on purpose: a case of ours, or one of Megatron-LM's rerun machine."""
    return follow_up(state) or confirmed_rerun(state)


def follow_up(state: JobState) -> FollowUp | None:
    """What the failed attempt's case asks for; None if its ranks did not leave for one."""
    if state.failure is None or state.failure.kind not in _LEAVES_FOR:
        return None
    codes = (EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED)
    if not any(exit_.declared in codes and exit_.exit_code == exit_.declared for _, exit_, _ in all_exits(state)):
        return None
    for case in reversed(state.cases):
        if state.attempt in (case.told_in, case.sent_in) and case.saved.action in _FOLLOW:
            if case.follows:
                return FollowUp(case=case, verdict=_failed(case.saved, case.follows), event="CaseFollowsRank")
            return _FOLLOW[case.saved.action](state, case)
    return None


def carry_out(turn: Turn, left: FollowUp | Rerun) -> None:
    """Remember what is to be avoided, say what follows, and let nodes change places."""
    if isinstance(left, Rerun):
        rerun_elsewhere.carry_out(turn, left)
        return
    state, case, saved = turn.state, left.case, left.case.saved
    _name_suspect(turn, saved, left.verdict)
    if left.event:
        level = "warning" if left.verdict.restart else "error"
        data: dict[str, object] = {"case_id": saved.case_id, "tried": saved.tried, "accused": saved.accused}
        turn.log(left.event, f"case {saved.case_id}: {left.verdict.reason}", level, data=data)
        if left.verdict.restart:
            turn.tell(f"case {saved.case_id}: {left.verdict.reason}")
    if left.gives_up:
        close_undecided(turn, case, left.gives_up)
    elif is_open(case):
        put_case(turn, replace(case, avoid=left.avoid or case.avoid))
    else:
        drop_case(turn, saved.case_id)
    if left.is_restart:
        newer = state.checkpoint > state.case_checkpoint
        turn.change(case_restarts=1 if newer else state.case_restarts + 1, case_checkpoint=state.checkpoint)
    if left.order:
        change_places(turn, left.order)


# ------------------------------------------------------------------------------------- between attempts, and at the end


def settle_cases(turn: Turn) -> None:
    """Another attempt is about to begin: close the cases that it cannot take up."""
    state = turn.state
    for case in state.cases:
        saved = case.saved
        held = case.sent_in > 0 or state.checkpoint >= saved.iteration - 1 or bool(case.avoid)
        if not is_open(case):
            drop_case(turn, saved.case_id)
        elif max(state.attempt_iteration, state.checkpoint) > saved.iteration or state.checkpoint == saved.iteration:
            close_undecided(turn, case, f"training went past iteration {saved.iteration}, and its ranks told no verdict")
        elif not is_due(case):
            close_undecided(turn, case, f"attempt {case.told_in} ended in the middle of it{_why(state)}")
        elif not held:
            close_undecided(turn, case, f"attempt {case.told_in} ended before its checkpoint was durable{_why(state)}")
        elif case.sent_in == state.attempt and not state.store_bound:  # no rank of that attempt was started
            kept = [entry for entry in saved.placements if entry["attempt"] != state.attempt]
            put_case(turn, replace(case, saved=replace(saved, placements=kept), num_reruns=case.num_reruns - 1))
        elif not case.avoid:
            put_case(turn, replace(case, avoid=where_tried(state, case)))


def _why(state: JobState) -> str:
    return f": {state.failure.text}" if state.failure is not None else ""


def seated(state: JobState, member_ids: list[str]) -> list[str]:
    """The agents of the next attempt in an order in which no rank must run on what it has to avoid; as they are if there is no
    such order: the ranks then find themselves on a device that has been tried."""
    avoid = all_avoided(state)
    if not avoid:
        return member_ids
    starts, first = [], 0
    for agent_id in member_ids:
        starts.append(first)
        first += state.agents[agent_id].info.num_ranks
    return arranged(state, member_ids, starts, avoid) or member_ids


def begin_cases(turn: Turn) -> None:
    """An attempt begins, its agents have their ranks: those of open cases repeat their iteration in it."""
    state = turn.state
    for case in state.cases:
        placements = [*case.saved.placements, *_placements(turn, case)][-MAX_PLACEMENTS:]
        saved = replace(case.saved, placements=placements)
        put_case(turn, replace(case, saved=saved, sent_in=state.attempt, num_reruns=case.num_reruns + 1))


def _placements(turn: Turn, case: Case) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for rank, devices in _tried(case.saved).items():
        agent = next((agent for _, agent in turn.state.active if rank in ranks_of(agent)), None)
        if agent is not None and devices:
            how = "another device of its node" if devices[-1] in agent.devices else f"node {agent.info.node}"
            at = {"at_us": turn.now.us, "attempt": turn.state.attempt, "rank": rank}
            found.append({**at, "from": devices[-1], "to": "", "how": how})
    return found


def end_cases(turn: Turn, exit_code: int) -> None:
    """The job has ended. A case that a checkpoint holds stays open for `--resume`; nothing is left to decide another."""
    for case in turn.state.cases:
        if not is_open(case):
            drop_case(turn, case.saved.case_id)
        elif exit_code == 0:
            close_undecided(turn, case, "the job ended, and its ranks told no verdict")
        elif not is_due(case):
            close_undecided(turn, case, "the job ended in the middle of it")


def placed(turn: Turn, rank: int, device: str) -> None:
    """A rank says which device it uses: where a case's rerun really went."""
    state = turn.state
    for case in state.cases:
        entries = case.saved.placements
        index = next(
            (i for i, e in enumerate(entries) if (e["attempt"], e["rank"], e["to"]) == (state.attempt, rank, "")), None
        )
        if index is None:
            continue
        tried = case.saved.tried.get(str(rank), [])
        returned = device in tried
        how = "the same device again" if returned else str(entries[index]["how"])
        entries = [{**e, "to": device, "how": how} if i == index else e for i, e in enumerate(entries)]
        counted = any(e["attempt"] == state.attempt and e["how"] == "the same device again" for e in case.saved.placements)
        saved = replace(case.saved, placements=entries)
        put_case(turn, replace(case, saved=saved, num_returns=case.num_returns + (returned and not counted)))
        text = f"case {saved.case_id}: rank {rank} runs iteration {saved.iteration} again on {device}"
        text += ", which had been tried: no other was free" if returned else f", not on {', '.join(tried)}"
        turn.log("CasePlaced", text, "warning" if returned else "info", rank=rank)


def where_tried(state: JobState, case: Case) -> list[AvoidedDevice]:
    """What the case's ranks must avoid: the devices that computed its iteration, and, where an agent could not do better than
    bring a rank back to one of these, all of that node."""
    saved = case.saved
    reason = f"iteration {saved.iteration} was rejected there (case {saved.case_id})"
    avoid = [AvoidedDevice(device, reason, rank=rank) for rank, devices in _tried(saved).items() for device in devices]
    for entry in saved.placements:
        if entry["how"] == "the same device again":
            rank, device = _as_rank(entry["rank"]), entry["to"]
            for agent in state.agents.values():
                if device in agent.devices or device in agent.devices_used.values():
                    stuck = f"its node could not move rank {rank} off {device}"
                    avoid += [AvoidedDevice(uuid, stuck, rank=rank) for uuid in agent.devices]
    return list({(a.device, a.rank): a for a in avoid}.values())


# -------------------------------------------------------------------------------------------------------- by the action


def _elsewhere(state: JobState, case: Case) -> FollowUp:
    return _replay(state, case) if is_open(case) else _without_device(state, case)


def _replay(state: JobState, case: Case) -> FollowUp:
    saved, ranks = case.saved, sorted(_tried(case.saved))
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    what = f"{who} computed iteration {saved.iteration} with a rejected result"
    if case.num_returns >= MAX_RETURNS:
        reason = f"no second device: {plural(case.num_returns, 'rerun')} of it came to a device that had been tried"
        return FollowUp(case=case, verdict=_failed(saved, f"undecided: {reason}"), gives_up=reason)
    avoid = where_tried(state, case)
    if case.num_reruns >= MAX_RERUNS:
        text = f"{MAX_RERUNS} reruns on other devices have brought no verdict; {_exclude(state, avoid)}: {what}"
        return FollowUp(case=case, verdict=_end(saved, text), event="CaseWaits", avoid=avoid)
    places = _order(state, [*state.avoid, *avoid])
    if places is None:
        text = f"there is no other device for {who} in this allocation; {_exclude(state, avoid)}: {what}"
        return FollowUp(case=case, verdict=_end(saved, text), event="CaseWaits", avoid=avoid)
    order, moved = places
    where = f"node {moved}" if moved else "another device"
    text = f"{what}; {'it runs' if len(ranks) == 1 else 'they run'} it again on {where}, which costs no restart"
    return FollowUp(case=case, verdict=Verdict(True, 0, text), event="CaseMoved", order=order, avoid=avoid, why=_RERUN)


def _without_device(state: JobState, case: Case) -> FollowUp:
    saved = case.saved
    devices = ", ".join(saved.accused)
    if saved.suspect_of > 1 or not saved.accused:  # nobody is proven: those named come last, which may not be enough
        return _restart(state, case)
    avoid = [AvoidedDevice(device, "", quarantined=True) for device in saved.accused]
    places = None if case.is_repeat else _order(state, [*all_avoided(state), *avoid])
    if places is None:
        text = f"there is no device in place of {devices} in this allocation; {_exclude(state, avoid)}: {verdict_text(saved)}"
        return FollowUp(case=case, verdict=_end(saved, text), event="CaseWaits")
    order, moved = places
    text = f"the job goes on without {devices}{f', with node {moved}' if moved else ''}, which costs no restart"
    return FollowUp(case=case, verdict=Verdict(True, 0, text), event="CaseMoved", order=order)


def _restart(state: JobState, case: Case) -> FollowUp:
    spent = 0 if state.checkpoint > state.case_checkpoint else state.case_restarts
    if spent >= MAX_RESTARTS:
        text = f"{MAX_RESTARTS} restarts for cases without a newer durable checkpoint: {verdict_text(case.saved)}"
        return FollowUp(case=case, verdict=_failed(case.saved, text))
    text = f"the job starts again from its last checkpoint, which costs no restart ({spent + 1} of {MAX_RESTARTS} for cases)"
    return FollowUp(case=case, verdict=Verdict(True, 0, text), event="CaseRestart", is_restart=True)


def _leave(state: JobState, case: Case) -> FollowUp:
    return FollowUp(case=case, verdict=_failed(case.saved, verdict_text(case.saved)))


_FOLLOW = {"elsewhere": _elsewhere, "restart": _restart, "leave": _leave}


def _failed(saved: CaseSaved, text: str) -> Verdict:
    return Verdict(False, EXIT_VALIDATION_FAILED, f"{text}; see `rsup cases show {saved.case_id}`")


def _end(saved: CaseSaved, text: str) -> Verdict:
    return Verdict(False, EXIT_RERUN_ELSEWHERE, f"{text}; see `rsup cases show {saved.case_id}`")


def _order(state: JobState, avoid: list[AvoidedDevice]) -> tuple[list[str], str] | None:
    """Who takes part in the next attempt, empty if that stays, and the nodes that come in for others; None: impossible."""
    active = state.active
    order = [agent_id for agent_id, _ in active]
    places = arranged(state, order, [agent.first_rank for _, agent in active], avoid)
    if places is None:
        return None
    moved = [
        state.agents[there].info.node
        for there, (here, agent) in zip(places, active, strict=True)
        if there != here and is_concerned(agent.devices, ranks_of(agent), avoid)
    ]
    return (places if places != order else []), ", ".join(moved)


def _exclude(state: JobState, avoid: list[AvoidedDevice]) -> str:
    devices = {a.device for a in avoid}
    nodes = sorted(
        {agent.info.node for agent in state.agents.values() if devices & {*agent.devices, *agent.devices_used.values()}}
    )
    what = f"exclude node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} and resume" if nodes else "resume"
    return f"{what} the job elsewhere (--resume), the checkpoint is written"


def _tried(saved: CaseSaved) -> dict[int, list[str]]:
    """Devices that computed the iteration, by rank; as the ranks say, else those of the fatal findings."""
    if saved.tried:
        return {int(rank): devices for rank, devices in saved.tried.items()}
    tried: dict[int, list[str]] = {}
    for finding in saved.findings:
        if finding["fatal"]:
            tried.setdefault(_as_rank(finding["rank"]), []).append(str(finding["device"]))
    return tried


def _as_rank(value: object) -> int:
    assert isinstance(value, int)
    return value


def _name_suspect(turn: Turn, saved: CaseSaved, verdict: Verdict) -> None:
    first = next((one for one in saved.findings if one["fatal"]), None)
    if first is not None:
        found_by = "audit of healthy iterations" if saved.found_by == "audit" else f"check {first['check']}"
        code = verdict.exit_code or (EXIT_RERUN_ELSEWHERE if saved.action == "elsewhere" else EXIT_VALIDATION_FAILED)
        name_suspect(turn, _as_rank(first["rank"]), str(first["device"]), saved.iteration, code, found_by)
