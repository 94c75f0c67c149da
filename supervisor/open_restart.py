"""A restart in the processes from its first fault on: the faults that belong to it, its bounds, and when it is given up.

A fault that turns up during a restart joins it; the one that most likely stands behind the others gives it its name
(`failure.weight`). Slow to kill: while a node does not answer nothing is given up, since its ranks may well be at work.
"""

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.attempt_end import STACKS_WITHIN_S, fail_attempt, numbered
from rsup.supervisor.fault_evidence import lost_in_process_evidence
from rsup.supervisor.re_entry import announce, known_text, num_entered, num_needed, ranks_text, under_way
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.render import plural
from rsup.supervisor.restart_policy import LONG_ATTEMPT_S
from rsup.supervisor.states import InProcess, JobState, OpenRestart, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import InProcessPolicy

IN_PROCESS = "in-process"
"""The kind of its incident: the attempt goes on."""
KEPT_FAULTS = 64
GIVEN_UP_GRACE_S = 5.0
"""What ranks have to end when a restart is given up: none of them trains."""
UNTOLD = 9
"""Weight of a restart that no rank has given a reason for."""


class Fault(Struct, frozen=True, kw_only=True):
    """A fault of a rank, whatever it was. `entry`: which all ranks have to reach after it."""

    rank: int
    entry: int
    text: str
    kind: str
    signature: str
    weight: int
    incident: IncidentSaved
    exit_code: int = 1
    error: str = ""
    is_death: bool = False


def opened(turn: Turn) -> OpenRestart:
    """The restart, where there is one."""
    restart = turn.state.in_process.open
    assert restart is not None
    return restart


def change_open(turn: Turn, **fields: object) -> None:
    """Replace fields of the restart."""
    turn.change(in_process=replace(turn.state.in_process, open=replace(opened(turn), **fields)))


def has_reserves(state: JobState) -> bool:
    """Whether ranks in reserve, and not new processes, take the places of dead ones."""
    return 0 < state.in_process.active < state.world_size


def join(turn: Turn, fault: Fault) -> tuple[bool, str]:
    """Add a fault to the restart under way, or begin one: whether the ranks have to enter once more for it, and, where that is
    one time too often, why."""
    before = under_way(turn.state.in_process)
    if before is None:
        _begin(turn, fault)
        _count(turn, fault)
    else:
        failed = sorted({*before.failed, fault.rank}) if fault.weight < UNTOLD else before.failed
        change_open(turn, failed=failed, entry=max(before.entry, fault.entry))
        is_new = fault.entry > before.counted or fault.rank in before.replacing
        if not (is_new and _only_waits(fault, before)):
            _move_deadline(turn, fault)
            if fault.weight < before.weight or _is_behind(fault, before):
                _blame(turn, fault)
            if is_new:
                _count(turn, fault)
    again = before is None or fault.entry > before.entry or fault.rank in before.replacing
    incident = opened(turn).incident
    victims = sorted({*incident.victims, *opened(turn).failed} - {incident.rank})
    if victims != incident.victims:
        incident = replace(incident, victims=victims)
        change_open(turn, incident=incident)
        turn.record(incident)
    return again, _spent(turn.state.spec.in_process, turn.state.in_process)


def _only_waits(fault: Fault, before: OpenRestart) -> bool:
    """Whether a rank has left an entry only because others are not in it yet. A limit that ends meanwhile, of ranks that wait
    for a process which still starts or of that one, is no fault of theirs; the restart's own deadline bounds the whole."""
    return not fault.is_death and (fault.weight > 0 or (fault.kind == "hang" and bool(before.replacing)))


def _is_behind(fault: Fault, before: OpenRestart) -> bool:
    """Whether, of two ranks of one hang that nothing else tells apart, this one has come less far; or, where the other only
    tells that somebody is gone, this one is gone."""
    if fault.weight != before.weight:
        return False
    if fault.kind == before.kind == "hang":
        return 0 < fault.incident.iteration < before.incident.iteration
    return fault.incident.exit_code == 0 and before.incident.exit_code is None


def _begin(turn: Turn, fault: Fault) -> None:
    within_s = turn.state.spec.in_process.restart_within_s
    start_s = turn.state.in_process.start_s
    restart = OpenRestart(
        since_us=turn.now.us,
        text=fault.text,
        kind=fault.kind,
        incident=numbered(turn, replace(fault.incident, kind=IN_PROCESS)),
        entry=fault.entry,
        exit_code=fault.exit_code,
        error=fault.error,
        weight=fault.weight,
        counted=fault.entry,
        failed=[fault.rank] if fault.weight < UNTOLD else [],
        deadline_s=turn.now.s + within_s + (start_s if fault.is_death else 0.0),
        latest_s=turn.now.s + 2 * (within_s + start_s),
    )
    turn.change(in_process=replace(turn.state.in_process, open=restart))


def _move_deadline(turn: Turn, fault: Fault) -> None:
    """A further death, or another entry, takes its time; twice the whole is the bound."""
    restart, ip = opened(turn), turn.state.in_process
    after_s = turn.state.spec.in_process.restart_within_s + (ip.start_s if fault.is_death else 0.0)
    if restart.deadline_s is not None and (fault.is_death or fault.entry >= restart.entry):
        deadline_s = min(max(restart.deadline_s, turn.now.s + after_s), restart.latest_s)
        change_open(turn, deadline_s=max(restart.deadline_s, deadline_s))


def _blame(turn: Turn, fault: Fault) -> None:
    """What became known first followed from this one."""
    restart, ip = opened(turn), turn.state.in_process
    incident = replace(
        fault.incident,
        kind=IN_PROCESS,
        incident=restart.incident.incident,
        iteration=fault.incident.iteration or restart.incident.iteration,
        detected_us=restart.incident.detected_us,
        lost_iterations=restart.incident.lost_iterations,
        stacks=fault.incident.stacks or restart.incident.stacks,
    )
    turn.record(incident)
    change_open(
        turn,
        told=False,
        text=fault.text,
        kind=fault.kind,
        exit_code=fault.exit_code,
        error=fault.error,
        weight=fault.weight,
        incident=incident,
    )
    turn.change(in_process=replace(turn.state.in_process, faults=[*ip.faults[:-1], fault.signature]))
    if restart.weight < UNTOLD:
        turn.log("FirstMover", f"first mover: {fault.text}; before it was known: {restart.text}", rank=fault.rank)


def _count(turn: Turn, fault: Fault) -> None:
    """Remember the fault, and no older ones where the job has got further than ever since the last."""
    state, ip = turn.state, turn.state.in_process
    further = state.attempt_iteration > ip.iteration or state.checkpoint > ip.checkpoint
    if not state.counts_iterations:
        further = turn.now.s - ip.fault_s >= LONG_ATTEMPT_S
    turn.change(
        in_process=replace(
            ip,
            faults=[*([] if further else ip.faults), fault.signature][-KEPT_FAULTS:],
            num_restarts=ip.num_restarts + 1,
            iteration=max(ip.iteration, state.attempt_iteration),
            checkpoint=max(ip.checkpoint, state.checkpoint),
            fault_s=turn.now.s,
            open=replace(opened(turn), counted=max(opened(turn).counted, fault.entry)),
        )
    )


def _spent(policy: InProcessPolicy, ip: InProcess) -> str:
    """Why no further in-process restart follows, empty if one may. The fault is counted already."""
    same = ip.faults.count(ip.faults[-1]) if ip.faults and ip.faults[-1] else 0
    if policy.max_restarts is not None and ip.num_restarts > policy.max_restarts:
        return f"all {policy.max_restarts} in-process restarts of an attempt are used (--inprocess-max-restarts)"
    if policy.identical_limit and same >= policy.identical_limit:
        return f"{plural(same, 'equal fault')} without getting further (--inprocess-identical-limit)"
    if policy.no_progress_limit and len(ip.faults) >= policy.no_progress_limit:
        return f"{plural(len(ip.faults), 'fault')} without getting further (--inprocess-no-progress-limit)"
    return ""


# ------------------------------------------------------------------------------------------------------------- giving up


def settle_in_process(turn: Turn) -> None:
    """Tell of a restart, once it is time to; give it up if it takes too long, but not while a node is not heard of."""
    announce(turn)
    restart = turn.state.in_process.open
    if restart is None or restart.deadline_s is None or turn.now.s < restart.deadline_s:
        return
    within_s = turn.state.spec.in_process.restart_within_s
    silent = [agent.info.node for _, agent in turn.state.active if agent.role is Role.LOST]
    if silent:
        change_open(turn, deadline_s=turn.now.s + within_s)
        return
    missing = _missing(turn.state, restart)
    who = ranks_text(missing)
    lacks = f"without {who}" if missing else f"with {num_entered(turn.state, restart)} of {num_needed(turn.state)} ranks"
    took_s = (turn.now.us - restart.since_us) / 1e6
    give_up(turn, f"{took_s:.0f} s later entry {restart.entry} is still {lacks} (--inprocess-restart-within {within_s:g})")


def _missing(state: JobState, restart: OpenRestart) -> list[int]:
    ended = {rank for _, agent in state.active for rank in agent.exits}
    entries = state.in_process.entries
    if has_reserves(state):
        return []  # who of them is to compute is theirs to say
    return [rank for rank in range(state.world_size) if rank not in ended and entries.get(rank, 0) < restart.entry]


def give_up(turn: Turn, why: str) -> None:
    """All processes of the attempt are restarted instead, if the restart policy has it."""
    state, restart = turn.state, opened(turn)
    text = f"{known_text(restart)}; {why}"
    ended = {rank for _, agent in state.active for rank in agent.exits}
    blamed = {rank: exit_ for rank, exit_ in restart.exits.items() if rank not in ended}
    turn.change(in_process=replace(state.in_process, given_up=why, blamed=blamed))
    data: dict[str, object] = {"entry": restart.entry, "failed": restart.failed, "number": state.in_process.num_restarts}
    given_up = f"no in-process restart: {why}; all processes of the attempt are ended"
    turn.log("InProcessGivenUp", given_up, "warning", rank=restart.incident.rank, node=restart.incident.node, data=data)
    incident = replace(restart.incident, kind=restart.kind, text=text)
    if incident.rank not in restart.exits:
        lost_in_process_evidence(turn)
    is_due = restart.deadline_s is not None and turn.now.s >= restart.deadline_s
    grace_s = min(GIVEN_UP_GRACE_S, state.spec.stop_grace_s)
    fail_attempt(
        turn,
        restart.kind,
        text,
        exit_code=restart.exit_code,
        section=incident.section,
        rank=incident.rank,
        node=incident.node,
        incident=incident,
        grace_s=lambda _: grace_s,
        stacks_within_s=STACKS_WITHIN_S if is_due else 0.0,
        error=restart.error,
    )
