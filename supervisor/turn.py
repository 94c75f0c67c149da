"""One decision in progress: the state as changed so far, and the actions it asks for.

`job_machine.decide` makes one, hands it to the handler of the event and returns what it holds. It lives for one call only, so
the core stays a function of (state, event, now). Nothing here decides anything.
"""

from msgspec.structs import replace

from rsup.supervisor import records
from rsup.supervisor.actions import Action, Record, SendNotice, SendOrder
from rsup.supervisor.events import Now
from rsup.supervisor.states import AgentState, JobState, Phase
from rsup.supervisor.wire import AnyCommand

MAX_EVENT_TEXT_CHARS = 4000


class Turn:
    """Collects changes of one job's state, its commands and its records."""

    def __init__(self, state: JobState, now: Now) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self._owns_agents = False
        self._commanded: set[str] = set()

    def change(self, **fields: object) -> None:
        """Replace fields of the job's state."""
        self.state = replace(self.state, **fields)

    def enter(self, phase: Phase, deadline_s: float | None = None) -> None:
        """Go to a phase, with the deadline that it has."""
        self.change(phase=phase, deadline_s=deadline_s, last_call_s=None, blocked=False)

    def put_agent(self, agent_id: str, agent: AgentState) -> None:
        """Set an agent's state; the agents are copied once a turn."""
        if not self._owns_agents:
            self.change(agents=dict(self.state.agents))
            self._owns_agents = True
        self.state.agents[agent_id] = agent

    def change_agent(self, agent_id: str, **fields: object) -> AgentState:
        """Replace fields of an agent's state and return it."""
        agent = replace(self.state.agents[agent_id], **fields)
        self.put_agent(agent_id, agent)
        return agent

    def act(self, action: Action) -> None:
        """Add an action."""
        self.actions.append(action)

    def record(self, record: records.Record) -> None:
        """Add a record to the transaction."""
        self.actions.append(Record(record))

    def command(self, agent_id: str, command: AnyCommand) -> None:
        """Put a command into an agent's outbox; it gets its number here."""
        agent = self.state.agents[agent_id]
        sequence = agent.last_command + 1
        numbered = replace(command, sequence=sequence)
        self.change_agent(agent_id, last_command=sequence, outbox=[*agent.outbox, numbered])
        if agent_id not in self._commanded:
            self._commanded.add(agent_id)
            self.act(SendOrder(agent_id))

    def tell(self, text: str, *also: str) -> None:
        """Say a sentence on the terminal of the job's first node that answers, and on those of the agents in `also`."""
        for agent_id in dict.fromkeys((self.first_answering(), *also)):
            if agent_id:
                self.act(SendNotice(agent_id, text))

    def first_answering(self) -> str:
        """The agent of the job's first node that answers; empty if none does."""
        answering = [
            (a.group_rank < 0, a.group_rank, a.joined, agent_id) for agent_id, a in self.state.agents.items() if a.reachable
        ]
        return min(answering)[-1] if answering else ""

    def log(
        self,
        kind: str,
        text: str,
        level: str = "info",
        *,
        at_us: int | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        node: str = "",
        principal: str = "",
        data: dict[str, object] | None = None,
    ) -> None:
        """Write the next line of the job's story."""
        number = self.state.num_events + 1
        self.change(num_events=number)
        self.record(
            records.EventLogged(
                job=self.state.key,
                number=number,
                at_us=self.now.us if at_us is None else at_us,
                recorded_us=self.now.us,
                kind=kind,
                text=text[:MAX_EVENT_TEXT_CHARS],
                level=level,
                attempt=self.state.attempt if attempt is None else attempt,
                rank=rank,
                node=node,
                principal=principal,
                data=data or {},
            )
        )

    def see_node(self, agent_id: str) -> None:
        """Record the role that a node has now."""
        agent = self.state.agents[agent_id]
        self.record(records.NodeSeen(agent.info.node, self.now.us, self.state.key, agent.role.value, agent.devices))
