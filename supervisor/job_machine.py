"""The job's machine: `decide(state, event, now) -> (state, actions)`. No clock, no I/O, no randomness.

    forming -> starting -> running -> ended
       ^          |          |  \\
       |          |          |   collecting (a limit expired: stacks)
       |          v          v      |
    waiting <- - - - - - stopping <-+          (stopping, forming and waiting may also lead to ended)

An event is looked up by (phase, kind) in `FACTS` or `EVENTS`; its handler changes the state and adds actions. After every
event `_settle` looks whether the phase's own condition for going on is fulfilled (all nodes here, all ranks started, all
stacks taken, all ranks gone), so no handler has to know what follows it.

Facts of an agent are applied once each, in the order of their numbers; those of another attempt than the current one are
logged and decide nothing, but that ranks are gone. What a fact means belongs to the noun it is about: `rendezvous`,
`attempt_start`, `adoption`, `progress`, `hang`, `rank_exits`, `in_process`, `attempt_end`, `case_machine`, `operator_requests`,
`straggler_machine`.
"""

from collections.abc import Callable

from rsup.supervisor import wire
from rsup.supervisor.actions import Action, SendOrder
from rsup.supervisor.adoption import is_all_heard, settle_adopted
from rsup.supervisor.attempt_end import end_unattended, ranks_gone, reform, settle_stopping, succeed
from rsup.supervisor.attempt_start import all_started, attempt_started, device_used, start_failed, store_bound
from rsup.supervisor.case_machine import case_reported, late_case
from rsup.supervisor.devices_known import devices_known
from rsup.supervisor.early_ends import settle_early_ends
from rsup.supervisor.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentSilent,
    DevicesKnown,
    Event,
    FactArrived,
    Now,
    OperatorAsked,
    Recovered,
    StartedAgain,
    StoreTrouble,
    Tick,
)
from rsup.supervisor.hang import overdue, settle_collecting, stacks_of_the_stopped, stacks_taken
from rsup.supervisor.hardware.health_facts import health_seen
from rsup.supervisor.in_process import entry_begun, rank_faulted
from rsup.supervisor.metric_facts import metrics_reported
from rsup.supervisor.open_restart import settle_in_process
from rsup.supervisor.operator_requests import operator_asked, request_done, signal_received
from rsup.supervisor.phases import rank_leaves
from rsup.supervisor.progress import (
    checkpoint_committed,
    guess_first_step,
    heard,
    limits_loaded,
    limits_set,
    resumed_from,
    sections_observed,
)
from rsup.supervisor.rank_exits import rank_exited
from rsup.supervisor.rendezvous import agent_joined, form, known_dead, lost
from rsup.supervisor.saves import save_seen
from rsup.supervisor.states import JobState, Phase, Role
from rsup.supervisor.straggler_machine import stragglers_reported
from rsup.supervisor.turn import Turn
from rsup.supervisor.workload_control import workload_control

LOST_AFTER_S = 15.0
FENCE_MARGIN_S = 15.0
"""After the fence timeout: for the agent to end its ranks, and for messages that were still under way."""

FactHandler = Callable[[Turn, str, wire.AnyFact], None]


# ------------------------------------------------------------------------------------------------ facts, small handlers


def _log_only(turn: Turn, agent_id: str, fact: wire.AnyFact) -> None:
    """The fact has its line in the story; nothing is left to decide in this phase."""
    name, node = type(fact).__name__, turn.state.agents[agent_id].info.node
    turn.log(name, f"{name} on {node}: decides nothing while the job is {turn.state.phase.value}", at_us=fact.at_us, node=node)


def _apply_silently(turn: Turn, agent_id: str, fact: wire.AnyFact) -> None:
    """Too late to matter, too frequent for the story."""


def _note(turn: Turn, agent_id: str, fact: wire.Note) -> None:
    level = fact.level if fact.level in ("info", "warning", "error") else "info"
    turn.log("Note", fact.text, level, at_us=fact.at_us, rank=fact.rank, node=turn.state.agents[agent_id].info.node)
    if fact.num_standbys is not None:
        turn.change_agent(agent_id, num_standbys=fact.num_standbys, standby_bytes=fact.standby_bytes)


def _agent_gone(turn: Turn, agent_id: str, fact: wire.AgentGone) -> None:
    known_dead(turn, agent_id, fact.reason, for_good=True)


def _node_lost(turn: Turn, agent_id: str, fact: wire.NodeLost) -> None:
    """The scheduler's word about a node that does not answer. One that answers is not dead, whatever it says."""
    for other, agent in list(turn.state.agents.items()):
        if agent.role is Role.LOST and agent.info.node == fact.node:
            known_dead(turn, other, f"it does not answer, and {fact.reason}", for_good=False, with_node=True)


def _stale(turn: Turn, agent_id: str, fact: wire.AnyFact, attempt: int) -> None:
    name, node = type(fact).__name__, turn.state.agents[agent_id].info.node
    text = f"{name} of attempt {attempt} on {node} came late and decides nothing: the job is at attempt {turn.state.attempt}"
    turn.log(name, text, "warning", at_us=fact.at_us, attempt=attempt, node=node)


def _row(otherwise: Callable[..., None], **phases: Callable[..., None]) -> dict[Phase, FactHandler]:
    assert set(phases) <= {phase.value for phase in Phase}
    return {phase: phases.get(phase.value, otherwise) for phase in Phase}


FACTS: dict[type[wire.Fact], dict[Phase, FactHandler]] = {
    wire.StoreBound: _row(_log_only, starting=store_bound),
    wire.StartFailed: _row(_log_only, starting=start_failed, running=start_failed, collecting=start_failed),
    wire.AttemptStarted: _row(
        _log_only, starting=attempt_started, running=attempt_started, collecting=attempt_started, stopping=attempt_started
    ),
    wire.RankExited: _row(rank_exited),
    wire.RanksGone: _row(ranks_gone),
    wire.RankOverdue: _row(_apply_silently, starting=overdue, running=overdue, collecting=overdue),
    wire.StacksTaken: _row(_log_only, collecting=stacks_taken, stopping=stacks_of_the_stopped),
    wire.SectionsObserved: _row(sections_observed),
    wire.CheckpointCommitted: _row(checkpoint_committed),
    wire.ResumedFrom: _row(resumed_from),
    wire.EntryBegun: _row(entry_begun),
    wire.RankFaulted: _row(rank_faulted),
    wire.SaveSeen: _row(save_seen),
    wire.RankLeaves: _row(rank_leaves),
    wire.LimitsLoaded: _row(limits_loaded),
    wire.LimitsSet: _row(limits_set, ended=_log_only),
    wire.WorkloadControl: _row(workload_control, ended=_log_only),
    wire.DeviceUsed: _row(device_used),
    wire.CaseReported: _row(case_reported, ended=late_case),
    wire.MetricsReported: _row(metrics_reported),
    wire.StragglersReported: _row(stragglers_reported, ended=_apply_silently),
    wire.HealthSeen: _row(health_seen),
    wire.SignalReceived: _row(signal_received, ended=_log_only),
    wire.RequestDone: _row(request_done),
    wire.Note: _row(_note),
    wire.NodeLost: _row(_node_lost, ended=_log_only),
    wire.AgentGone: _row(_agent_gone),
}
"""What each fact does in each phase."""


# --------------------------------------------------------------------------------------------------------------- events


def _fact_arrived(turn: Turn, event: FactArrived) -> None:
    agent = turn.state.agents.get(event.agent_id)
    if agent is None:
        return
    fact = event.fact
    if event.sequence <= agent.acked_fact:
        if isinstance(fact, wire.AgentGone):  # its keeper cannot know every number that the dead agent had used
            _agent_gone(turn, event.agent_id, fact)
        return
    if event.sequence > agent.acked_fact + 1:
        return
    turn.change_agent(event.agent_id, acked_fact=event.sequence)
    attempt: int = getattr(fact, "attempt", turn.state.attempt)
    if isinstance(fact, wire.RanksGone):
        ranks_gone(turn, event.agent_id, fact)
    elif attempt != turn.state.attempt or (agent.group_rank < 0 and hasattr(fact, "attempt")):
        if isinstance(fact, wire.CaseReported):
            late_case(turn, event.agent_id, fact)
        elif not isinstance(fact, (wire.MetricsReported, wire.StragglersReported)):
            _stale(turn, event.agent_id, fact, attempt)
    else:
        FACTS[type(fact)][turn.state.phase](turn, event.agent_id, fact)


def _agent_silent(turn: Turn, event: AgentSilent) -> None:
    agent = turn.state.agents.get(event.agent_id)
    if agent is None or turn.state.phase is Phase.ENDED:
        return
    if agent.reachable and event.silent_s >= LOST_AFTER_S:
        lost(turn, event.agent_id, event.silent_s)
    fence_s = turn.state.spec.fence_timeout_s
    if agent.role is Role.LOST and fence_s is not None and event.silent_s >= LOST_AFTER_S + fence_s + FENCE_MARGIN_S:
        known_dead(
            turn,
            event.agent_id,
            f"cut off for {event.silent_s:.0f} s: it has ended its ranks by agreement",
            for_good=False,
            with_node=True,
        )


def _agent_left(turn: Turn, event: AgentLeft) -> None:
    agent = turn.state.agents.get(event.agent_id)
    if agent is None:
        return
    if turn.state.phase is Phase.ENDED:
        turn.change_agent(event.agent_id, role=Role.GONE, dead=True, live_attempt=0, outbox=[])
    else:
        turn.change_agent(event.agent_id, left=True)
        known_dead(turn, event.agent_id, "its launcher has left", for_good=True)


def _recovered(turn: Turn, event: Recovered) -> None:
    turn.log("SupervisorStarted", f"a supervisor has taken the job over from the store (instance {event.instance})")
    for agent_id, agent in turn.state.agents.items():
        if agent.outbox:
            turn.act(SendOrder(agent_id))


def _started_again(turn: Turn, event: StartedAgain) -> None:
    if turn.state.phase is not Phase.ENDED:
        end_unattended(turn, event.reason)


def _store_trouble(turn: Turn, event: StoreTrouble) -> None:
    turn.log("StoreTrouble", event.text, "warning")


def _tick(turn: Turn, event: Tick) -> None:
    state = turn.state
    if state.phase is Phase.WAITING and state.deadline_s is not None and turn.now.s >= state.deadline_s:
        reform(turn)


EVENTS: dict[type, Callable[..., None]] = {
    AgentJoined: agent_joined,
    DevicesKnown: devices_known,
    FactArrived: _fact_arrived,
    AgentHeard: heard,
    AgentSilent: _agent_silent,
    AgentLeft: _agent_left,
    StartedAgain: _started_again,
    Tick: _tick,
    Recovered: _recovered,
    StoreTrouble: _store_trouble,
    OperatorAsked: operator_asked,
}


def _settle(turn: Turn) -> None:
    """Go on where the phase's condition is fulfilled; each step leads to a phase with a condition of its own."""
    for _ in Phase:
        before = turn.state.phase
        _SETTLE[before](turn)
        if turn.state.phase is before:
            return


def _settle_starting(turn: Turn) -> None:
    if _everyone_finished(turn):
        return
    all_started(turn)
    if turn.state.phase is Phase.RUNNING:
        guess_first_step(turn)


def _settle_running(turn: Turn) -> None:
    if not _everyone_finished(turn) and not settle_early_ends(turn):
        settle_in_process(turn)
        settle_adopted(turn)


def _everyone_finished(turn: Turn) -> bool:
    state = turn.state
    if state.world_size and state.num_ok >= state.world_size and is_all_heard(state):
        succeed(turn)
        return True
    return False


def _nothing(turn: Turn) -> None:
    """No condition: only events and deadlines lead on."""


_SETTLE: dict[Phase, Callable[[Turn], object]] = {
    Phase.FORMING: form,
    Phase.STARTING: _settle_starting,
    Phase.RUNNING: _settle_running,
    Phase.COLLECTING: settle_collecting,
    Phase.STOPPING: settle_stopping,
    Phase.WAITING: _nothing,
    Phase.ENDED: _nothing,
}


def decide(state: JobState, event: Event, now: Now) -> tuple[JobState, list[Action]]:
    """The state after `event`, and what the loop must do. The same state object comes back if nothing changed."""
    turn = Turn(state, now)
    EVENTS[type(event)](turn, event)
    _settle(turn)
    return turn.state, turn.actions
