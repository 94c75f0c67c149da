"""What the supervisor's loop says to agents, once it is on disk."""

from collections.abc import Mapping

from rsup.supervisor import wire
from rsup.supervisor.agent_links import RETRY_S, AgentLink
from rsup.supervisor.loop_inputs import Transport
from rsup.supervisor.records import JobKey
from rsup.supervisor.states import JobState, Role
from rsup.supervisor.wire import Order, Refusal, StandsBy, SupervisorInfo, Welcome

MAX_STATES = 1024


class Outgoing:
    """Makes messages of committed states. May lose them: outboxes are sent again, agents ask again."""

    def __init__(self, transport: Transport, info: SupervisorInfo, links: Mapping[str, AgentLink]) -> None:
        self._transport = transport
        self._info = info
        self._links = links
        self._silent_of: dict[JobKey, tuple[JobState, list[str], int | None]] = {}

    def welcome(self, state: JobState, agent_id: str) -> None:
        """Tell an agent its job, and the last fact that is committed."""
        speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
        acked = state.agents[agent_id].acked_fact
        job = state.key
        about = (speaks, wire.RELEASE, self._info, job.job_id, job.run, state.epoch, acked)
        welcome = Welcome(*about, secret_identities=True, takes_metrics=True)
        self._transport.send(agent_id, welcome)

    def refuse(self, agent_id: str, refusal: Refusal) -> None:
        """Turn an agent away."""
        self._transport.send(agent_id, refusal)

    def stand_by(self, agent_id: str, why: str) -> None:
        """Tell an agent that this supervisor may not be the one that decides any more."""
        self._transport.send(agent_id, StandsBy(message=why))

    def notice(self, state: JobState, agent_id: str, text: str) -> None:
        """Say a sentence on an agent's terminal."""
        self._transport.send(agent_id, Order(agent_id, state.epoch, state.agents[agent_id].acked_fact, notices=[text]))

    def order(self, state: JobState, agent_id: str, now_s: float) -> None:
        """Acknowledge facts, and send commands that are new or have waited for their acknowledgement too long. `now_s`: by the
        machine's monotonic clock."""
        agent = state.agents.get(agent_id)
        link = self._links.get(agent_id)
        if agent is None or link is None:
            return
        again = now_s - link.sent_s >= RETRY_S
        commands = [command for command in agent.outbox if again or command.sequence > link.sent]
        if commands:
            link.sent, link.sent_s = commands[-1].sequence, now_s
        silent = self._silent(state, agent_id)
        self._transport.send(agent_id, Order(agent_id, state.epoch, agent.acked_fact, commands, silent=silent))

    def _silent(self, state: JobState, agent_id: str) -> list[str]:
        """Nodes that do not answer, told to the agent that joined first of those that do. Looked for once for each state: a job
        of thousands of nodes has thousands of reports each second."""
        known = self._silent_of.get(state.key)
        if known is None or known[0] is not state:
            if len(self._silent_of) >= MAX_STATES:
                self._silent_of.clear()
            nodes = sorted({agent.info.node for agent in state.agents.values() if agent.role is Role.LOST})
            first = min((agent.joined for agent in state.agents.values() if agent.reachable), default=None) if nodes else None
            known = self._silent_of[state.key] = (state, nodes, first)
        _, nodes, first = known
        return nodes if nodes and (first is None or state.agents[agent_id].joined <= first) else []
