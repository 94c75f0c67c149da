"""The decisions of one turn of the loop, until they are committed."""

from collections.abc import Callable, Iterable, Mapping

from rsup.supervisor import job_machine
from rsup.supervisor.actions import AnswerOperator, FoundEvidence, Record, SendNotice, SendOrder, SendRefusal, SendWelcome
from rsup.supervisor.events import AgentHeard, AgentSilent, Event, Now, Tick
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.records import JobKey
from rsup.supervisor.records import Record as StoreRecord
from rsup.supervisor.states import JobState
from rsup.supervisor.wire import Refusal


class Batch:
    """Decisions that wait for their commit."""

    def __init__(self, now: Now, jobs: Mapping[JobKey, JobState]) -> None:
        self.now = now
        self._jobs = jobs
        self.changed: dict[JobKey, JobState] = {}
        self.dirty: set[JobKey] = set()
        self.records: list[StoreRecord] = []
        self.evidence: list[Evidence] = []
        """For the hardware's history, in order."""
        self.sends: list[tuple[JobKey, SendWelcome | SendRefusal | SendOrder | SendNotice]] = []
        self.refusals: list[tuple[str, Refusal]] = []
        self.reports: dict[str, JobKey] = {}
        """Agents whose reports are to be answered."""
        self.replies: list[Callable[[], None]] = []
        """Each gives somebody an answer."""

    def get(self, key: JobKey) -> JobState | None:
        """The state as decided so far."""
        return self.changed.get(key) or self._jobs.get(key)

    def job_of(self, agent_id: str) -> JobKey | None:
        """The job that an agent has joined in this very batch: it may have said `Hello` twice."""
        return next((key for key, state in self.changed.items() if agent_id in state.agents), None)

    def live(self) -> Iterable[JobState]:
        """All jobs as decided so far."""
        yield from (self.changed.get(key, state) for key, state in self._jobs.items())
        yield from (state for key, state in self.changed.items() if key not in self._jobs)

    def decide(self, state: JobState, event: Event) -> AnswerOperator | None:
        """Decide on one event; return the answer to an operator, where it is one."""
        after, actions = job_machine.decide(state, event, self.now)
        answer = None
        volatile = isinstance(event, (AgentHeard, AgentSilent, Tick))
        for action in actions:
            if isinstance(action, Record):
                self.records.append(action.record)
                volatile = False
            elif isinstance(action, FoundEvidence):
                self.evidence.append(action.evidence)
                volatile = False
            elif isinstance(action, AnswerOperator):
                answer = action
            else:
                self.sends.append((state.key, action))
        if after is not state:
            self.changed[state.key] = after
            if not volatile:
                self.dirty.add(state.key)
        return answer
