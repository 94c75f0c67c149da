"""What shows that a job gets on: reports, beats, first steps, checkpoints, observed section times."""

from msgspec.structs import replace

from rsup.supervisor.case_machine import passed_by
from rsup.supervisor.events import AgentHeard
from rsup.supervisor.re_entry import heard_from, resumed_in_process, see_beats
from rsup.supervisor.records import CheckpointSaved, ResumeSaved, SectionSaved
from rsup.supervisor.render import plural
from rsup.supervisor.rendezvous import found
from rsup.supervisor.saves import durable_seen
from rsup.supervisor.section_limits import OUT_OF_SECTION, calculate, merge, take_over
from rsup.supervisor.states import AgentState, JobState, Phase, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    CheckpointCommitted,
    Limits,
    LimitsLoaded,
    LimitsSet,
    RankBeat,
    ResumedFrom,
    SectionSeen,
    SectionsObserved,
    SetLimits,
)

_AT_WORK = (Phase.STARTING, Phase.RUNNING, Phase.COLLECTING)
NOTICEABLE_CHANGE = 0.05
"""A calculated limit that moved by less than this part of it is not pushed to the agents again."""
UNWATCHED_AFTER_S = 60.0
"""How long after its first step a job without sections is told that their limits watch nothing."""
_COMES_LATE = ("checkpointing", "warmup")


def heard(turn: Turn, event: AgentHeard) -> None:
    """A report: acknowledged commands leave the outbox, beats show how far the ranks are."""
    agent = turn.state.agents.get(event.agent_id)
    if agent is None or agent.dead:
        return
    if agent.role is Role.LOST:
        found(turn, event.agent_id)
        agent = turn.state.agents[event.agent_id]
    if agent.number_commands or event.acked_command > agent.last_command:
        _renumber(turn, event.agent_id, agent, event.acked_command)
    elif agent.outbox and agent.outbox[0].sequence <= event.acked_command:
        turn.change_agent(event.agent_id, outbox=[c for c in agent.outbox if c.sequence > event.acked_command])
    if event.beats and event.epoch == turn.state.epoch and turn.state.phase in _AT_WORK:
        _beats(turn, event.agent_id, event.beats)


def _renumber(turn: Turn, agent_id: str, agent: AgentState, acked_command: int) -> None:
    """The agent has performed commands of a supervisor whose memory is lost: ours go on from its number."""
    outbox = [replace(command, sequence=acked_command + 1 + i) for i, command in enumerate(agent.outbox)]
    turn.change_agent(agent_id, outbox=outbox, last_command=acked_command + len(outbox), number_commands=False)


def _beats(turn: Turn, agent_id: str, beats: list[RankBeat]) -> None:
    state = turn.state
    if state.phase is Phase.COLLECTING:
        for beat in beats:
            if beat.rank in state.overdue and beat.iteration > state.overdue[beat.rank].iteration:
                heard_from(turn, beat.rank)
    iterations = [beat.iteration for beat in beats]
    highest, lowest = max(iterations), min(iterations)
    if highest > state.attempt_iteration:
        turn.change(
            attempt_iteration=highest,
            iteration=max(state.iteration, highest),
            counts_iterations=True,
        )
    see_beats(turn, agent_id, beats)
    agent = turn.state.agents[agent_id]
    if state.stepped or agent.stepped or agent.group_rank < 0 or len(beats) < agent.info.num_ranks or lowest <= 0:
        return
    start = state.current.start_iteration if state.current is not None else 0
    first = agent.first_iteration or lowest
    stepped = lowest > start or lowest > first
    turn.change_agent(agent_id, first_iteration=first, stepped=stepped)
    if stepped and all(a.stepped for a in turn.state.agents.values() if a.group_rank >= 0 and a.role is not Role.GONE):
        turn.change(stepped=True)
        seen = f"every rank has stepped (seen at iteration {lowest})"
        resumed = f"every rank has done iteration {start + 1}, the first after the resume"
        first_step(turn, resumed if 0 < start < lowest else seen)


def first_step(turn: Turn, how: str) -> None:
    """Every rank of the attempt is under way: the job has recovered, if it had failed before."""
    state = turn.state
    if state.current is None:
        return
    current = replace(state.current, first_step_us=turn.now.us)
    turn.change(current=current)
    turn.record(current)
    incident = state.incident
    if incident is None or incident.attempt >= state.attempt:
        turn.log("FirstStep", how)
        return
    incident = replace(incident, recovered_us=turn.now.us)
    turn.record(incident)
    turn.change(incident=None if state.stepped else incident)
    took_s = (turn.now.us - (incident.detected_us or incident.at_us)) / 1e6
    lost = ""
    if incident.lost_iterations:
        verb = "is" if incident.lost_iterations == 1 else "are"
        lost = f", {plural(incident.lost_iterations, 'iteration')} {verb} done again"
    turn.log("Recovered", f"{how}, {took_s:.2f} s after the failure of attempt {incident.attempt} was found{lost}")


def guess_first_step(turn: Turn) -> None:
    """A script that never showed iterations is taken to be under way when all its ranks run (beats may correct this)."""
    state = turn.state
    if state.attempt > 1 and not state.counts_iterations and state.current is not None and state.current.first_step_us is None:
        first_step(turn, "every rank runs (the script shows no iterations)")


def checkpoint_committed(turn: Turn, agent_id: str, fact: CheckpointCommitted) -> None:
    """A checkpoint is durable: it refills the restart budget, and a stop that waited for it counts as clean."""
    state = turn.state
    turn.record(CheckpointSaved(state.key, fact.attempt, fact.iteration, fact.path, fact.at_us, fact.duration_s))
    turn.change(
        checkpoint=max(state.checkpoint, fact.iteration),
        iteration=max(state.iteration, fact.iteration),
        attempt_iteration=max(state.attempt_iteration, fact.iteration),
        counts_iterations=True,
        saves=durable_seen(state.saves, fact),
        stop=replace(state.stop, saved=True) if state.stop is not None else None,
        resume_point=fact.iteration,
        save_s=fact.duration_s or state.save_s,
    )
    text = f"checkpoint of iteration {fact.iteration} is durable: {fact.path} ({fact.duration_s:.2f} s)"
    data: dict[str, object] = {"iteration": fact.iteration, "path": fact.path, "duration_s": fact.duration_s}
    turn.log("CheckpointCommitted", text, at_us=fact.at_us, node=state.agents[agent_id].info.node, data=data)
    passed_by(turn, fact.iteration)


def resumed_from(turn: Turn, agent_id: str, fact: ResumedFrom) -> None:
    """The attempt goes on from that checkpoint: how much is done again is known exactly now.

    The checkpoint may be one whose commit nobody lived to report; it is durable all the same, unless it is a local one.
    """
    state = turn.state
    turn.log("ResumedFrom", f"resumed from {fact.path}: {fact.iteration} iterations are done", at_us=fact.at_us)
    turn.record(ResumeSaved(state.key, fact.attempt, fact.iteration, fact.path, fact.at_us))
    if fact.attempt != state.attempt or state.current is None:
        return
    current = state.current
    if not resumed_in_process(turn, fact.iteration):
        current = replace(current, start_iteration=fact.iteration)
        turn.record(current)
    turn.change(resume_point=fact.iteration)
    turn.change(current=current, checkpoint=max(state.checkpoint, fact.iteration) if fact.durable else state.checkpoint)
    incident = state.incident
    if incident is not None and incident.attempt < state.attempt and incident.lost_iterations is not None:
        reached = incident.lost_iterations + max(0, state.checkpoint)
        incident = replace(incident, lost_iterations=max(0, reached - fact.iteration))
        turn.record(incident)
        turn.change(incident=incident)


def limits_loaded(turn: Turn, agent_id: str, fact: LimitsLoaded) -> None:
    """Limits came with the checkpoint: the start for this job's own, unless it has calculated some already."""
    state = turn.state
    limits = take_over(state.limits, state.spec.limits, fact.limits)
    if limits is state.limits:
        return
    turn.change(limits=limits)
    listed = ", ".join(limits.calculated)
    turn.log("LimitsLoaded", f"limits that came with the checkpoint: {listed}", at_us=fact.at_us)
    push_limits(turn, "limits that came with the checkpoint")


def push_limits(turn: Turn, reason: str) -> None:
    """Tell every node with ranks which limits hold now."""
    for member_id, member in list(turn.state.agents.items()):
        if member.live_attempt and member.live_attempt == turn.state.attempt:
            turn.command(member_id, SetLimits(0, reason, turn.state.limits, turn.state.switches))


def limits_set(turn: Turn, agent_id: str, fact: LimitsSet) -> None:
    """A rank's client has set limits: they are the job's, on every node and in every later attempt, as if configured."""
    state = turn.state
    limits = fact.change.apply(state.limits)
    turn.change(spec=replace(state.spec, limits=fact.change.apply(state.spec.limits)))
    if limits is state.limits:
        return
    turn.change(limits=limits)
    new = _changed(state.limits.sections, limits.sections)
    for name, before, after in (
        (OUT_OF_SECTION, state.limits.out_of_section_s, limits.out_of_section_s),
        ("initial heartbeat", state.limits.initial_heartbeat_s, limits.initial_heartbeat_s),
        ("heartbeat", state.limits.heartbeat_s, limits.heartbeat_s),
    ):
        if before != after:
            new[name] = after
    listed = ", ".join(f"{name} {'none' if limit is None else f'{limit:.3g} s'}" for name, limit in sorted(new.items()))
    reason = f"rank {fact.rank} has set limits through NVRx's client: {listed}"
    node = state.agents[agent_id].info.node
    turn.log("SetLimits", reason, at_us=fact.at_us, rank=fact.rank, node=node, data={"limits": dict(new)})
    _record(turn, new)
    push_limits(turn, reason)


def _changed(before: dict[str, float | None], after: dict[str, float | None]) -> dict[str, float | None]:
    return {name: limit for name, limit in after.items() if name not in before or before[name] != limit}


def _record(turn: Turn, new: dict[str, float | None]) -> None:
    for name, limit_s in new.items():
        if name == OUT_OF_SECTION:
            seen = SectionSeen(turn.state.observed.out_of_section_s, 0)
        elif name in turn.state.limits.sections:
            seen = turn.state.observed.sections.get(name, SectionSeen(0.0, 0))
        else:
            continue
        turn.record(SectionSaved(turn.state.key, name, limit_s, False, seen.longest_s, seen.times))


def sections_observed(turn: Turn, agent_id: str, fact: SectionsObserved) -> None:
    """Section times of one node: limits may be due."""
    state = turn.state
    before, observed = state.limits, merge(state.observed, fact)
    limits, observed = calculate(before, state.spec.limits, observed, fact.closing)
    if state.phase not in _AT_WORK or not _noticeable(before, limits):
        limits = before
    turn.change(limits=limits, observed=observed)
    _tell_unwatched(turn)
    _record_sections(turn, state, fact.closing)
    if limits is before:
        return
    new = {name: limit for name, limit in limits.sections.items() if limit is not None and name in limits.calculated}
    if limits.out_of_section_s is not None and OUT_OF_SECTION in limits.calculated:
        new[OUT_OF_SECTION] = limits.out_of_section_s
    listed = ", ".join(f"{name} {limit:.3g} s" for name, limit in sorted(new.items()))
    use = "enforced" if limits.enforce_calculated else "reported only"
    reason = f"limits from observed times ({use}): {listed}"
    turn.log("SetLimits", reason, data={"limits": dict(new)})
    push_limits(turn, reason)


def _tell_unwatched(turn: Turn) -> None:
    """Say it once in an attempt where sections have limits and ranks that have long stepped open none: hangs go unseen."""
    state = turn.state
    given = [name for name, limit_s in state.limits.sections.items() if limit_s is not None and name not in _COMES_LATE]
    first_step_us = state.current.first_step_us if state.current is not None else None
    if not given or state.observed.sections or state.observed.told_unwatched or first_step_us is None:
        return
    if turn.now.us - first_step_us < UNWATCHED_AFTER_S * 1e6:
        return
    turn.change(observed=replace(state.observed, told_unwatched=True))
    text = f"no rank has opened a section yet, so the limits of {', '.join(given)} watch nothing"
    turn.log("Note", text, "warning")
    turn.tell(f"{text} (rsup.worker.section opens one; the reference trainer's do with --enable-ft-package)")


def _noticeable(before: Limits, after: Limits) -> bool:
    if before.calculated != after.calculated or set(before.sections) != set(after.sections):
        return True
    pairs = [(before.sections[name], after.sections[name]) for name in after.sections]
    pairs.append((before.out_of_section_s, after.out_of_section_s))
    return any(
        (old is None) != (new is None) or (old and new and abs(new - old) > NOTICEABLE_CHANGE * old) for old, new in pairs
    )


def _record_sections(turn: Turn, old: JobState, closing: bool) -> None:
    state = turn.state
    for name, seen in state.observed.sections.items():
        before = old.observed.sections.get(name)
        limit_s = state.limits.sections.get(name)
        if closing or before is None or seen.longest_s > before.longest_s or limit_s != old.limits.sections.get(name):
            calculated = name in state.limits.calculated
            turn.record(SectionSaved(state.key, name, limit_s, calculated, seen.longest_s, seen.times))
    longest_s, limit_s = state.observed.out_of_section_s, state.limits.out_of_section_s
    if limit_s != old.limits.out_of_section_s or (closing and longest_s > old.observed.out_of_section_s):
        calculated = OUT_OF_SECTION in state.limits.calculated
        turn.record(SectionSaved(state.key, OUT_OF_SECTION, limit_s, calculated, longest_s, 0))
