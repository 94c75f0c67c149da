"""Stretches of one job with a configuration each: which of them an attempt is in, and when the next one follows. Pure.

Where a phase ends is an iteration; the phase of an attempt follows from where its ranks go on, never from a counter, so it is
right after any crash, requeue or resume. Ranks leave at the end of their phase with `RankLeaves(kind="phase")`, once their
save is durable, and exit 0; the next attempt then has the next phase's configuration and costs no restart. Ranks that find a
checkpoint of another phase than theirs (an older one was whole, say) leave in the same way, before they compute anything.

What is consumed of the data counts anew in each phase, from `sample_offset` (Megatron-LM's `--phase-transition-iterations`).
"""

from collections.abc import Sequence

from msgspec.structs import replace

from rsup.supervisor.states import JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import PhaseSpec, PhaseStart, RankLeaves, clip

MAX_HOPS = 3
"""So often in a row may ranks leave for another phase without having come further."""
MAX_REASON_CHARS = 500


def phase_at(phases: Sequence[PhaseSpec], iteration: int) -> int:
    """The number of the phase (0: the first) to which the iteration after `iteration` belongs."""
    return sum(1 for phase in phases[:-1] if phase.until_iteration <= iteration)


def start_of(state: JobState) -> PhaseStart | None:
    """The phase of an attempt that starts now; None for a job without phases."""
    phases = state.spec.phases
    if not phases:
        return None
    number = phase_at(phases, state.resume_point)
    begins = phases[number - 1].until_iteration if number else 0
    return PhaseStart(
        number=number,
        count=len(phases),
        name=phases[number].name,
        iteration_offset=begins,
        sample_offset=state.phase_samples.get(begins, -1) if number else 0,
        until_iteration=phases[number].until_iteration,
    )


def named(phases: Sequence[PhaseSpec], number: int) -> str:
    """A phase as people read it, counted from 1."""
    name = phases[number].name
    return f"phase {number + 1} of {len(phases)}{f' ({name})' if name else ''}"


def rank_leaves(turn: Turn, agent_id: str, fact: RankLeaves) -> None:
    """The training loop leaves on purpose. What it saved for that makes a stop clean, and tells where the job goes on."""
    state = turn.state
    samples = state.phase_samples
    if fact.iteration in [phase.until_iteration for phase in state.spec.phases]:
        samples = {**samples, fact.iteration: fact.consumed_samples}
    left = replace(fact, reason=clip(fact.reason, MAX_REASON_CHARS))
    turn.change(
        left=left,
        phase_samples=samples,
        resume_point=fact.iteration if fact.durable or fact.kind == "phase" else state.resume_point,
        stop=replace(state.stop, saved=True) if state.stop is not None and fact.durable else state.stop,
    )
    saved = "after a durable save" if fact.durable else "without a durable save"
    text = f"the ranks leave after iteration {fact.iteration}, {saved}: {left.reason or left.kind}"
    data: dict[str, object] = {"kind": fact.kind, "iteration": fact.iteration, "durable": fact.durable}
    level = "info" if fact.durable or fact.kind in ("finished", "phase") else "warning"
    turn.log("RankLeaves", text, level, at_us=fact.at_us, node=state.agents[agent_id].info.node, data=data)


def next_phase(state: JobState) -> str:
    """Why an attempt whose ranks have all exited 0 is followed by another one, in another phase; empty: it is not."""
    left, phases = state.left, state.spec.phases
    if not phases or left is None or left.kind != "phase" or state.stop is not None:
        return ""
    number = phase_at(phases, state.resume_point)
    if number == state.phase_number:
        return ""
    before = min(state.phase_number, len(phases) - 1)
    if number > before:
        over = f"{named(phases, before)} is over after iteration {left.iteration}"
    else:
        over = f"iteration {left.iteration}, from which the job goes on, is not of {named(phases, before)}"
    return f"{over}: {named(phases, number)} follows"


def is_going_round(state: JobState) -> bool:
    """Whether ranks keep leaving for another phase and get nowhere."""
    return state.phase_hops >= MAX_HOPS


def count_hop(turn: Turn) -> None:
    """Another phase follows: note whether the attempt has brought the job further."""
    state = turn.state
    start = state.current.start_iteration if state.current is not None else 0
    further = state.left is not None and state.left.iteration > start and state.attempt_iteration > start
    turn.change(phase_hops=0 if further else state.phase_hops + 1)
