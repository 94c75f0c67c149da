"""Whether the nodes of a job have the same rsup, Python, torch and NCCL. A difference is said, never a reason to refuse."""

from collections.abc import Iterable

from rsup.supervisor.states import AgentState, Role
from rsup.supervisor.wire import AgentInfo


def difference(agents: Iterable[AgentState], newcomer: AgentInfo) -> str:
    """A sentence about what a newcomer has in another version than the node that joined first; empty if nothing differs, or
    another node has been found to have the same."""
    present = [agent for agent in sorted(agents, key=lambda agent: agent.joined) if _counts(agent, newcomer)]
    if not present:
        return ""
    first = present[0].info
    differing = [
        (name, version, first.versions[name])
        for name, version in newcomer.versions.items()
        if first.versions.get(name, version) != version
    ]
    if not differing or any(agent.info.versions == newcomer.versions for agent in present):
        return ""
    theirs = ", ".join(f"{name} {version}" for name, version, _ in differing)
    ours = ", ".join(f"{name} {version}" for name, _, version in differing)
    what = f"node {newcomer.node} has {theirs}, node {first.node} has {ours}"
    return f"{what}: ranks may fail or hang; install the same on all nodes"


def _counts(agent: AgentState, newcomer: AgentInfo) -> bool:
    return agent.role is not Role.GONE and bool(agent.info.versions) and agent.info.agent_id != newcomer.agent_id
