"""From "a rank failed" or "somebody said stop" to the next attempt or the job's end.

A failure anywhere ends the attempt everywhere: `StopAttempt` to all at once, then nothing more until every rank is known gone;
the restart policy speaks only then. A stop asked for gives the ranks time to save; no attempt follows. A lost node holds up a
restart (its ranks may be alive: never two attempts) but not an end.
"""

import signal
from collections.abc import Callable

from msgspec.structs import replace

from rsup.supervisor.case_followup import carry_out, end_cases, left_for
from rsup.supervisor.end_report import all_exits, report_text
from rsup.supervisor.failure import first_mover
from rsup.supervisor.fault_evidence import lost_in_process_evidence, lost_node_evidence, lost_rank_evidence
from rsup.supervisor.first_mover import name_first_mover
from rsup.supervisor.leaving import goes_on, how_ranks_left, is_by_leaving, let_all_go
from rsup.supervisor.phases import count_hop, is_going_round, next_phase
from rsup.supervisor.re_entry import is_being_replaced, under_way
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.restart_policy import FailedAttempt, Verdict, judge, passed_on, signature
from rsup.supervisor.states import LIVE_PHASES, Budget, Failure, JobState, Phase, Role, StopRequest
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    EXIT_NO_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
    SLURM_GROUP,
    EndJob,
    JobResult,
    JobSpec,
    RanksGone,
    StopAttempt,
    StopTraining,
)
from rsup.supervisor.workload_control import asked_for, let_excluded_go

STACKS_WITHIN_S = 2.0
"""For stacks of those who live when one has failed of a timeout, which was longer."""
UNKILLABLE_AFTER_S = 60.0
"""How long after the grace ranks may take to be gone before the node is reported as stuck."""
ESCALATE_AFTER_S = 10.0
"""How long after a stop's grace agents are told to end the ranks themselves."""
ESCALATED_GRACE_S = 5.0
CANNOT_SAVE_GRACE_S = 2.0
"""What ranks have that are told to stop and cannot save: some only note a signal, and wait for a rank that will not come."""


# -------------------------------------------------------------------------------------------------------------- failing


def fail_attempt(
    turn: Turn,
    kind: str,
    text: str,
    *,
    exit_code: int = 1,
    section: str = "",
    rank: int | None = None,
    node: str = "",
    incident: IncidentSaved | None = None,
    grace_s: Callable[[str], float] | None = None,
    stacks_within_s: float = 0.0,
    error: str = "",
) -> None:
    """End the attempt on all nodes because of a failure; open its incident. `grace_s` per agent, default the job's.
    `stacks_within_s`: for stacks of those who live before they are ended."""
    if turn.state.phase is Phase.STOPPING:
        return
    if not turn.state.in_process.given_up and under_way(turn.state.in_process) is not None:
        lost_in_process_evidence(turn)
    at_us = turn.now.us
    turn.change(
        failure=Failure(
            kind=kind, at_us=at_us, text=text, exit_code=exit_code, section=section, rank=rank, node=node, error=error
        )
    )
    if incident is None:
        incident = IncidentSaved(turn.state.key, 0, turn.state.attempt, turn.now.us, kind, rank, node, found_by=kind, text=text)
    open_incident(turn, incident)
    graces_s = stop_attempt(turn, f"attempt {turn.state.attempt} has failed: {text}", grace_s, stacks_within_s)
    turn.enter(Phase.STOPPING, turn.now.s + graces_s + stacks_within_s + UNKILLABLE_AFTER_S)


def open_incident(turn: Turn, incident: IncidentSaved) -> None:
    """Keep the incident until the job has recovered; it gets its number unless it has one, and is recorded."""
    if incident.incident:
        turn.record(incident)
    else:
        incident = numbered(turn, incident)
    turn.change(incident=incident)


def numbered(turn: Turn, incident: IncidentSaved) -> IncidentSaved:
    """The incident with its number, recorded. What it costs is at most what no checkpoint holds."""
    state = turn.state
    lost = max(0, state.attempt_iteration - max(0, state.checkpoint)) if state.counts_iterations else None
    incident = replace(
        incident,
        incident=state.num_incidents + 1,
        iteration=incident.iteration or state.attempt_iteration,
        detected_us=turn.now.us,
        lost_iterations=lost,
    )
    turn.change(num_incidents=incident.incident)
    turn.record(incident)
    return incident


def stop_attempt(turn: Turn, reason: str, grace_s: Callable[[str], float] | None = None, stacks_within_s: float = 0.0) -> float:
    """Tell every node on which ranks may live to end them; return the longest grace given."""
    state = turn.state
    nodes, longest_s = [], 0.0
    for agent_id, agent in list(state.agents.items()):
        if agent.live_attempt and agent.live_attempt == state.attempt:
            grace = state.spec.stop_grace_s if grace_s is None else grace_s(agent_id)
            turn.command(agent_id, StopAttempt(0, reason, state.attempt, grace, stacks_within_s))
            nodes.append(agent.info.node)
            longest_s = max(longest_s, grace)
    if nodes:
        turn.log("StopAttempt", f"ending the ranks on {', '.join(nodes)}: {reason}", data={"grace_s": longest_s})
    return longest_s


def ranks_gone(turn: Turn, agent_id: str, fact: RanksGone) -> None:
    """No process of that attempt is left on a node."""
    agent = turn.state.agents[agent_id]
    if not agent.live_attempt or fact.attempt < agent.live_attempt:
        return
    agent = turn.change_agent(agent_id, live_attempt=0)
    turn.log(
        "RanksGone",
        f"all ranks of attempt {fact.attempt} on {agent.info.node} are gone",
        at_us=fact.at_us,
        node=agent.info.node,
    )
    current = fact.attempt == turn.state.attempt and agent.group_rank >= 0
    if current and is_being_replaced(turn.state, agent):
        turn.change_agent(agent_id, live_attempt=fact.attempt)  # its next processes are on their way
        return
    finished = len(agent.exits) >= agent.info.num_ranks or (
        turn.state.adopted and not any(e.exit_code for e in agent.exits.values())
    )
    if current and not finished and turn.state.phase in LIVE_PHASES:
        text = f"the ranks on {agent.info.node} are gone and nobody saw how"
        fail_attempt(turn, "agent-lost", text, node=agent.info.node)


# ------------------------------------------------------------------------------------------------------------- stopping


def stop_training(turn: Turn, stop: StopRequest, except_agent: str = "") -> None:
    """End the job because somebody said so: the ranks may save and leave. `except_agent` has told its own ranks already."""
    state = turn.state
    asked = []
    if state.phase not in (Phase.STOPPING, Phase.COLLECTING):
        live = [(agent_id, a.info.node) for agent_id, a in state.agents.items() if a.live_attempt == state.attempt]
        asked = [(agent_id, node) for agent_id, node in live if state.attempt and agent_id != except_agent]
    turn.change(stop=stop)
    data: dict[str, object] = {"request_id": stop.request_id, "nodes": [node for _, node in asked]}
    turn.log("StopRequested", stop.reason, "warning", principal=stop.principal, data=data)
    if state.phase is Phase.STOPPING:
        return
    if under_way(state.in_process) is not None:
        cut_short(turn, "in-process restart is under way")
        return
    grace_s = stop.grace_s or state.spec.stop_grace_s
    if state.phase is Phase.COLLECTING:
        stop_attempt(turn, stop.reason)
    for agent_id, _ in asked:
        turn.command(agent_id, StopTraining(0, stop.reason, stop.request_id, grace_s))
    turn.enter(Phase.STOPPING, turn.now.s + grace_s + ESCALATE_AFTER_S)


def cut_short(turn: Turn, why: str) -> None:
    """End ranks soon that were told to stop while some of them are not in their training function: a save takes all."""
    state = turn.state
    if state.stop is None or state.stop.cut_short:
        return
    known = state.checkpoint > 0
    kept = f"the checkpoint of iteration {state.checkpoint} is the newest" if known else "no checkpoint was reported"
    text = f"{state.stop.reason}: {why}, so the ranks cannot save, and are ended; {kept}"
    turn.change(stop=replace(state.stop, cut_short=True))
    turn.tell(text)
    grace_s = min(CANNOT_SAVE_GRACE_S, state.stop.grace_s or state.spec.stop_grace_s)
    stop_attempt(turn, text, lambda _: grace_s)
    turn.enter(Phase.STOPPING, turn.now.s + grace_s + ESCALATE_AFTER_S)


# ------------------------------------------------------------------------------------------- when the ranks are all gone


def settle_stopping(turn: Turn) -> None:
    """Go on once every rank is gone; look after those that do not go."""
    state = turn.state
    if any(agent.live_attempt and agent.reachable for agent in state.agents.values()):
        all_ended = state.stop is not None and state.store_bound and not state.adopted and state.num_ended >= state.world_size
        if all_ended and not goes_on(state):
            conclude(turn)
        elif state.deadline_s is not None and turn.now.s >= state.deadline_s:
            _overstayed(turn)
        return
    unknown = [agent.info.node for agent in state.agents.values() if agent.live_attempt]
    if not unknown or state.stop is not None or (state.failure is not None and not _verdict(state)[0].restart):
        conclude(turn)
        return
    nodes = ", ".join(sorted(unknown))
    text = f"ranks of attempt {state.attempt} may be alive on {nodes}, which does not answer"
    if state.blocked and state.deadline_s is not None and turn.now.s >= state.deadline_s:
        give_up_blocked(turn, text)
    elif not state.blocked:
        turn.change(blocked=True, deadline_s=turn.now.s + blocked_for_s(state.spec))
        turn.log("AttemptBlocked", f"{text}: no new attempt until it does or is fenced", "warning")
        fence = f"rsup fence {state.key.job_id} {min(unknown)}"
        turn.tell(f"{text}: no new attempt until it does, or `{fence}` says that nothing of the job lives there")


def blocked_for_s(spec: JobSpec) -> float:
    """How long a next attempt waits for a node whose old ranks may be alive: as long as nodes may take to come together, and
    in any case until an agreed fence would have told."""
    return max(spec.join_timeout_s, (spec.fence_timeout_s or 0.0) + UNKILLABLE_AFTER_S)


def give_up_blocked(turn: Turn, text: str) -> None:
    """End a job that cannot go on because a node does not answer: who starts it anew knows whether that node is dead."""
    state = turn.state
    waited = f"no restart: {text}, for {blocked_for_s(state.spec):g} s now (--join-timeout); exit 88: please requeue"
    for agent in state.agents.values():
        if agent.group_rank >= 0 or not state.adopted:  # else it may have had no rank
            lost_node_evidence(turn, agent, text)
    close_attempt(turn, "failed", text if state.failure is None else state.failure.text)
    end_job(turn, EXIT_REQUEUE, waited if state.failure is None else f"{state.failure.text}; {waited}")


def allow_time_to_end(turn: Turn) -> None:
    """A node with ranks that are to end has only now come back: it hears of it late, and has its time from now."""
    deadline_s = turn.now.s + turn.state.spec.stop_grace_s + UNKILLABLE_AFTER_S
    turn.change(deadline_s=max(turn.state.deadline_s or 0.0, deadline_s), blocked=False)


def _overstayed(turn: Turn) -> None:
    state = turn.state
    if state.stop is not None and not state.stop.escalated and state.failure is None:
        turn.change(stop=replace(state.stop, escalated=True))
        stop_attempt(turn, f"the ranks did not leave in time: {state.stop.reason}", lambda _: ESCALATED_GRACE_S)
        turn.change(deadline_s=turn.now.s + ESCALATED_GRACE_S + UNKILLABLE_AFTER_S)
        return
    nodes = ", ".join(sorted(a.info.node for a in state.agents.values() if a.live_attempt and a.reachable))
    text = f"ranks on {nodes} cannot be ended: the node needs to be recycled"
    turn.log("RanksStuck", text, "error")
    code = state.stop.exit_code if state.stop is not None else EXIT_REQUEUE
    close_attempt(turn, "stopped" if state.stop is not None else "failed", text)
    end_job(turn, code, text)


def conclude(turn: Turn) -> None:
    """The attempt is over: name its first mover, then restart or end the job."""
    state = turn.state
    if state.failure is not None:
        name_first_mover(turn)
        lost_rank_evidence(turn)
    elif state.stop is None:
        _change_phase(turn)
        return
    if goes_on(turn.state):
        by_leaving = is_by_leaving(turn.state)
        why = let_all_go(turn)
        if by_leaving:
            close_attempt(turn, "stopped", state.stop.reason if state.stop is not None else why)
            turn.change(failure=None, free_restarts=turn.state.free_restarts + 1)
            turn.log("Restart", why, "warning")
            reform(turn)
            return
    elif state.stop is not None:
        clean, how = how_ranks_left(state, state.stop)
        close_attempt(turn, "stopped", state.stop.reason)
        end_job(turn, 0 if clean else state.stop.exit_code, f"{state.stop.reason}: {how}")
        return
    failure = turn.state.failure
    assert failure is not None
    verdict, budget = _verdict(turn.state)
    rerun = left_for(turn.state)
    if rerun is not None and verdict != rerun.verdict:
        rerun = None  # somebody has asked for something else
    if rerun is not None:
        carry_out(turn, rerun)
        failure = turn.state.failure
        assert failure is not None
    close_attempt(turn, {"hang": "hung", "agent-lost": "lost"}.get(failure.kind, "failed"), failure.text)
    is_free = verdict.restart and budget == turn.state.budget
    turn.change(budget=budget, free_restarts=turn.state.free_restarts + is_free)
    if not verdict.restart:
        reason = verdict.reason if rerun is not None else f"{failure.text}; {verdict.reason}"
        end_job(turn, verdict.exit_code, reason, failure.rank, failure.node)
        return
    let_excluded_go(turn)
    why = verdict.reason if rerun is None else rerun.why
    turn.log("Restart", f"{why}, after: {failure.text}", "warning", data={"delay_s": verdict.delay_s})
    if verdict.delay_s > 0:
        turn.enter(Phase.WAITING, turn.now.s + verdict.delay_s)
    else:
        reform(turn)


def _change_phase(turn: Turn) -> None:
    """The ranks of a phase have left; the next one costs no restart."""
    why = next_phase(turn.state)
    close_attempt(turn, "succeeded", why)
    count_hop(turn)
    turn.change(free_restarts=turn.state.free_restarts + 1)
    turn.log("PhaseChange", f"{why}, which costs no restart")
    reform(turn)


def reform(turn: Turn) -> None:
    """Bring the nodes together for the next attempt."""
    turn.enter(Phase.FORMING, turn.now.s + turn.state.spec.join_timeout_s)


def _verdict(state: JobState) -> tuple[Verdict, Budget]:
    failure = state.failure
    assert failure is not None
    asked = asked_for(state, failure)
    if asked is not None:
        return asked, state.budget
    if failure.kind == "start-failed" and failure.exit_code == EXIT_REQUEUE:
        return Verdict(False, EXIT_REQUEUE, "no restart: the job is to run again on other nodes"), state.budget
    if failure.kind == "start-failed" and failure.exit_code == EXIT_USAGE and state.attempt == 1:
        return Verdict(False, EXIT_USAGE, "no restart: nothing of the job has run"), state.budget
    rerun = left_for(state)
    if rerun is not None:
        return rerun.verdict, state.budget
    first = first_mover((rank, exit_) for rank, exit_, _ in all_exits(state)) if failure.kind in ("exit", "signal") else None
    exit_ = first[1] if first is not None else None
    code = passed_on(exit_.exit_code, exit_.declared) if exit_ is not None else failure.exit_code
    error = exit_.error if exit_ is not None else failure.error
    failed = FailedAttempt(
        exit_code=code,
        signature=signature(
            failure.kind, code, exit_.section if exit_ is not None else failure.section, error, first[0] if first else None
        ),
        declared=exit_.declared if exit_ is not None else 0,
        declared_reason=exit_.declared_reason if exit_ is not None else "",
        checkpoint=state.checkpoint,
        iteration=state.iteration,
        ran_s=failure.at_us / 1e6 - (state.running_us or failure.at_us) / 1e6,
        counts_iterations=state.counts_iterations,
    )
    return judge(state.spec.policy, state.budget, failed)


def close_attempt(turn: Turn, outcome: str, reason: str) -> None:
    """Record how the attempt under way has ended, unless that is known."""
    state = turn.state
    if state.current is None or state.current.outcome != "running":
        return
    first_step_us = state.current.first_step_us
    if first_step_us is None and not state.counts_iterations:
        first_step_us = state.running_us
    current = replace(
        state.current,
        outcome=outcome,
        reason=reason,
        stopped_us=turn.now.us,
        first_step_us=first_step_us,
        last_iteration=state.attempt_iteration,
    )
    turn.change(current=current)
    turn.record(current)


# --------------------------------------------------------------------------------------------------------------- ending


def succeed(turn: Turn) -> None:
    """Every rank of every node has exited 0. The job is over, unless another phase follows: once they are all gone."""
    why = next_phase(turn.state)
    if why and is_going_round(turn.state):
        reason = f"the ranks leave for another phase again and again and get no further ({why})"
        close_attempt(turn, "failed", reason)
        end_job(turn, EXIT_NO_REQUEUE, reason)
        return
    if why:
        graces_s = stop_attempt(turn, why)
        turn.enter(Phase.STOPPING, turn.now.s + graces_s + UNKILLABLE_AFTER_S)
        return
    close_attempt(turn, "succeeded", "every rank exited 0")
    end_job(turn, 0, "every rank exited 0")


def end_unattended(turn: Turn, reason: str) -> None:
    """Nothing is left of the job, and nobody came to tell how it ended. That is no fault of a device or a node."""
    for agent_id in turn.state.agents:
        turn.change_agent(agent_id, role=Role.GONE, live_attempt=0)
    close_attempt(turn, "stopped", reason)
    end_job(turn, 128 + signal.SIGTERM, reason)


def end_job(turn: Turn, exit_code: int, reason: str, rank: int | None = None, node: str = "") -> None:
    """The job is over: tell every agent that may still listen, spares and lost ones too."""
    end_cases(turn, exit_code)
    state = turn.state
    result = JobResult(exit_code, reason, rank, max(1, state.attempt), node)
    report = report_text(state, result)
    speaks = turn.first_answering() if state.spec.rdzv_id.startswith(SLURM_GROUP) else ""  # a step's agents have one terminal
    turn.enter(Phase.ENDED)
    turn.change(result=result, ended_us=turn.now.us, reason=reason)
    for agent_id, agent in list(turn.state.agents.items()):
        if not agent.dead and not any(isinstance(c, EndJob) for c in agent.outbox):
            turn.command(agent_id, EndJob(0, reason, result, report if speaks in ("", agent_id) else ""))
    text = f"job {state.key.job_id} ended with exit code {exit_code}: {reason}"
    turn.log("JobEnded", text, "info" if exit_code == 0 else "error", rank=rank, node=node, data={"exit_code": exit_code})
