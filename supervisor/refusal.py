"""Why a newcomer cannot take part in a live job: one line that says what to change."""

from datetime import UTC, datetime

from rsup.supervisor.states import JobState
from rsup.supervisor.wire import AgentInfo, JobSpec


def refusal(state: JobState, spec: JobSpec, info: AgentInfo, by_id: bool) -> str | None:
    """Why this newcomer cannot join this live job, None if it can. `by_id`: it named the job's id."""
    started_us = state.current.started_us if state.current else state.created_us
    where = f"attempt {state.attempt}" if state.attempt else "forming"
    since = f"job {state.key.job_id} is already running ({where}, since {_clock(started_us)})"
    if state.spec.max_nodes == 1:
        return f"{since}: choose another --job-id, or `rsup stop {state.key.job_id}`"
    if (spec.min_nodes, spec.max_nodes) != (state.spec.min_nodes, state.spec.max_nodes):
        ours, theirs = nnodes(state.spec), nnodes(spec)
        return f"job {state.key.job_id} was launched with --nnodes {ours}, this node asks for {theirs}: give all nodes the same"
    if spec.rdzv_id != state.spec.rdzv_id:
        ours, theirs = f"--rdzv-id {state.spec.rdzv_id}", f"this node has --rdzv-id {spec.rdzv_id}"
        return (
            f"job {state.key.job_id} has {ours}, {theirs}: give all nodes of a job the same, and each job an --rdzv-endpoint "
            "port of its own"
        )
    if spec.phases != state.spec.phases:
        return f"job {state.key.job_id} has other phases than this node asks for: give all nodes the same --phases file"
    if info.node_rank >= 0:
        for agent in state.agents.values():
            if agent.reachable and agent.info.node_rank == info.node_rank:
                advice = f"or `rsup stop {state.key.job_id}`" if by_id else "or another --rdzv-id"
                return f"{since} and {agent.info.node} holds --node-rank {info.node_rank}: choose another --node-rank, {advice}"
    return None


def nnodes(spec: JobSpec) -> str:
    """As `--nnodes` has it."""
    return f"{spec.min_nodes}:{spec.max_nodes}" if spec.min_nodes != spec.max_nodes else str(spec.max_nodes)


def _clock(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
