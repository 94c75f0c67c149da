"""The supervisor's loop: inputs in, one transaction, then the actions. The shell around `job_machine`.

`handle` takes a batch of inputs, decides on each, commits every record and every changed state in ONE transaction of the
store, and only then sends anything: what an agent or an operator hears is on disk. A crash between commit and sending loses
nothing: commands stand in the outboxes of the states, and are sent again until they are acknowledged.

A store that cannot be written stops decisions, not training: nothing is acknowledged (agents keep their facts), inputs are
kept in a bounded queue and tried again each second, reports are answered so that no agent thinks its supervisor dead.

What is not worth a transaction (when an agent was last heard, its latest beats, what has been sent to it) lives here, in
`agent_links`, and starts anew with each supervisor: every agent then has its full time again. All calls come from one thread,
except `live_beats` and `store_error`, which may be read from any.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rsup.supervisor import job_machine, wire
from rsup.supervisor.actions import SendOrder, SendRefusal, SendWelcome
from rsup.supervisor.agent_links import RETRY_S, AgentLink, LiveAgentBeats, beat_row, newest_beats, tells_something
from rsup.supervisor.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentSilent,
    FactArrived,
    Now,
    OperatorAsked,
    Recovered,
    Tick,
)
from rsup.supervisor.job_routing import Routing
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.loop_inputs import (
    AgentKnownDead,
    AgentMessage,
    Clock,
    Input,
    OperatorReply,
    OperatorRequest,
    SystemClock,
    Transport,
)
from rsup.supervisor.outgoing import Outgoing
from rsup.supervisor.records import BeatsSaved, JobKey, Record
from rsup.supervisor.states import JobState, Phase, Role, StateUnreadable, decode, job_record, rebased
from rsup.supervisor.store import Store, StoreError
from rsup.supervisor.wire import AgentGone, Bye, Hello, Refusal, Report, RsupError, SupervisorInfo

__all__ = [
    "AgentKnownDead",
    "AgentMessage",
    "Clock",
    "LiveAgentBeats",
    "Loop",
    "OperatorReply",
    "OperatorRequest",
    "SystemClock",
    "Transport",
]

BEATS_EVERY_S = 3.0
FORGET_ENDED_AFTER_S = 60.0
MAX_BACKLOG = 10_000

_log = logging.getLogger(__name__)


class Loop:
    """One per supervisor process. Call `recover` once, then `handle` for every batch of inputs and `tick` in between.

    `listen` makes the shell answer at a `host:port` too; it may be called again for the same, and raises `RsupError`.
    """

    def __init__(
        self,
        store: Store,
        transport: Transport,
        clock: Clock,
        info: SupervisorInfo,
        listen: Callable[[str], object],
        new_job_id: Callable[[], str] | None = None,
    ) -> None:
        self.info = info
        self.store_error = ""
        """Why the store cannot be written now, empty if it can."""
        self.on_fault: Callable[[Exception, object], None] = _log_fault
        """Called with an exception of our own code and the input that led to it; the input is dropped."""
        self._store = store
        self._clock = clock
        self._listen = listen
        self._routing = Routing(store, new_job_id)
        self._jobs: dict[JobKey, JobState] = {}
        self._job_of: dict[str, JobKey] = {}
        self._links: dict[str, AgentLink] = {}
        self._outgoing = Outgoing(transport, info, self._links)
        self._backlog: deque[Input] = deque(maxlen=MAX_BACKLOG)
        self._retry_at_s = 0.0
        self._sweep_at_s = 0.0
        self._beats_at_s = 0.0
        self._beats_saved_s: dict[JobKey, float] = {}
        self._ended_s: dict[JobKey, float] = {}

    # ------------------------------------------------------------------------------------------------------- the shell's

    def recover(self) -> None:
        """Take over every live job of the store and send what its agents have not acknowledged. Raise `StoreError`."""
        now = self._now()
        batch = Batch(now, self._jobs)
        for key, data in self._store.live_jobs():
            try:
                state = rebased(decode(data), now.s)
            except StateUnreadable as error:
                _log.error("job %s is left alone: %s", key, error)
                continue
            self._jobs[key] = state
            for agent_id in state.agents:
                self._job_of[agent_id] = key
                self._links[agent_id] = AgentLink(heard_s=now.s)
            if state.spec.listen:
                self._listen_again(state)
            batch.decide(state, Recovered(self.info.instance))
        try:
            self._commit(batch)
        except StoreError as error:  # what the outboxes hold was committed before, and may be sent
            self._store_failed(error, [])
        self._perform(batch)

    def handle(self, inputs: Sequence[Input]) -> None:
        """Decide on these inputs, commit, act. While the store fails they are kept and tried again by `tick`."""
        if self.store_error:
            self._keep(inputs)
            return
        self._process(inputs)

    def tick(self) -> None:
        """Do what time demands. Call it at least every `next_wakeup_s`."""
        now_s = self._clock.monotonic_s()
        if self.store_error and now_s < self._retry_at_s:
            return
        backlog = list(self._backlog)
        self._backlog.clear()
        self._process(backlog, with_time=True)
        if not self.store_error:
            self._forget_ended(now_s)

    def next_wakeup_s(self) -> float:
        """Seconds until `tick` has something to do, at most a second."""
        now_s = self._clock.monotonic_s()
        due = [now_s + RETRY_S, self._sweep_at_s if self._jobs else now_s + RETRY_S]
        for state in self._jobs.values():
            due += [s for s in (state.deadline_s, state.last_call_s) if s is not None and state.phase is not Phase.ENDED]
        if self.store_error:
            due = [self._retry_at_s]
        return max(0.0, min(due) - now_s)

    def jobs(self) -> list[JobState]:
        """Jobs that have not ended, or of whose end an agent has yet to hear."""
        return [state for state in self._jobs.values() if state.phase is not Phase.ENDED or state.undelivered]

    def job(self, key: JobKey) -> JobState | None:
        """The state of a job in memory."""
        return self._jobs.get(key)

    def live_beats(self, key: JobKey) -> list[LiveAgentBeats]:
        """The newest beats of a job's agents. From any thread."""
        state = self._jobs.get(key)
        if state is None:
            return []
        return newest_beats(state, self._links)

    def silent_s(self, agent_id: str) -> float:
        """How long nothing has been heard of an agent."""
        link = self._links.get(agent_id)
        return 0.0 if link is None else self._clock.monotonic_s() - link.heard_s

    # ------------------------------------------------------------------------------------------------------- transaction

    def _now(self) -> Now:
        return Now(self._clock.now_us(), self._clock.monotonic_s())

    def _process(self, inputs: Sequence[Input], with_time: bool = False) -> None:
        batch = Batch(self._now(), self._jobs)
        try:
            for one in inputs:
                self._guarded(batch, one)
            if with_time:
                self._time_passes(batch)
            self._commit(batch)
        except StoreError as error:
            self._store_failed(error, inputs)
            return
        if self.store_error:
            _log.warning("the store can be written again")
            self.store_error = ""
        self._perform(batch)

    def _guarded(self, batch: Batch, one: Input) -> None:
        try:
            self._take(batch, one)
        except StoreError:
            raise
        except Exception as error:  # a fault of ours in one input must not stop the supervision of all jobs
            self.on_fault(error, one)

    def _commit(self, batch: Batch) -> None:
        rows: list[Record] = []
        for key in batch.dirty:
            state = batch.changed[key]
            batch.changed[key] = state = _stamped(state, batch.now.s)
            rows.append(job_record(state, batch.now.us))
        if rows or batch.records:
            self._store.commit([*rows, *batch.records])
        for key, state in batch.changed.items():
            is_new = key not in self._jobs
            self._jobs[key] = state
            if is_new or key in batch.dirty:
                for agent_id in state.agents.keys() - self._links.keys():
                    self._links[agent_id] = AgentLink(heard_s=batch.now.s)
                for agent_id in state.agents:
                    self._job_of[agent_id] = key
            if state.phase is Phase.ENDED:
                self._ended_s.setdefault(key, batch.now.s)

    def _store_failed(self, error: StoreError, inputs: Sequence[Input]) -> None:
        if not self.store_error:
            _log.error("%s; training goes on, nothing is decided or acknowledged until the store can be written", error)
        self.store_error = str(error)
        self._retry_at_s = self._clock.monotonic_s() + RETRY_S
        self._keep(inputs)

    def _keep(self, inputs: Sequence[Input]) -> None:
        """Put inputs aside. Reports are answered without a word of what is new in them, so that their agents stay."""
        now_s = self._clock.monotonic_s()
        for one in inputs:
            message = None if isinstance(one, (OperatorRequest, AgentKnownDead)) else one.message
            if isinstance(message, Report):
                self._hear(message, now_s)
                key = self._job_of.get(message.agent_id)
                if key is not None and key in self._jobs:
                    self._outgoing.order(self._jobs[key], message.agent_id, now_s)
                if not message.facts:
                    continue
            self._backlog.append(one)

    def _perform(self, batch: Batch) -> None:
        now_s = batch.now.s
        for agent_id, refusal in batch.refusals:
            self._outgoing.refuse(agent_id, refusal)
        for key, action in batch.sends:
            state = self._jobs.get(key)
            if isinstance(action, SendRefusal):
                self._outgoing.refuse(action.agent_id, Refusal(action.exit_code, action.message))
            elif state is not None and action.agent_id in state.agents:
                if isinstance(action, SendWelcome):
                    self._outgoing.welcome(state, action.agent_id)
                elif action.agent_id not in batch.reports and state.agents[action.agent_id].role is not Role.LOST:
                    self._outgoing.order(state, action.agent_id, now_s)
        for agent_id, key in batch.reports.items():
            if key in self._jobs:
                self._outgoing.order(self._jobs[key], agent_id, now_s)
        for request, reply in batch.replies:
            request.reply(reply)

    # ------------------------------------------------------------------------------------------------------------ inputs

    def _take(self, batch: Batch, one: Input) -> None:
        if isinstance(one, OperatorRequest):
            self._operator(batch, one)
        elif isinstance(one, AgentKnownDead):
            key = self._job_of.get(one.agent_id)
            state = batch.get(key) if key is not None else None
            if state is not None and one.agent_id in state.agents:
                gone = AgentGone(batch.now.us, one.reason)
                batch.decide(state, FactArrived(one.agent_id, 0, gone))
        elif isinstance(one.message, Hello):
            self._hello(batch, one.message)
        elif isinstance(one.message, Report):
            self._report(batch, one.message)
        else:
            assert isinstance(one.message, Bye)
            key = self._job_of.get(one.message.agent_id)
            state = batch.get(key) if key is not None else None
            if state is not None:
                batch.decide(state, AgentLeft(one.message.agent_id))

    def _hello(self, batch: Batch, hello: Hello) -> None:
        agent_id = hello.agent.agent_id
        if wire.common_version(hello.speaks) is None:
            text = f"the supervisor runs rsup {wire.RELEASE}, this agent {hello.release}: install one of the two"
            batch.refusals.append((agent_id, Refusal(1, text)))
            return
        if hello.spec.listen:
            try:
                self._listen(hello.spec.listen)
            except RsupError as error:
                batch.refusals.append((agent_id, Refusal(error.exit_code, str(error))))
                return
        known = self._job_of.get(agent_id) or batch.job_of(agent_id)
        state: JobState | Refusal | None = batch.get(known) if known is not None else None
        if state is None:
            state = self._routing.job_for(hello, batch.live(), batch.now)
        if isinstance(state, Refusal):
            batch.refusals.append((agent_id, state))
            return
        link = self._links.get(agent_id)
        if link is not None:
            link.heard_s, link.sent = batch.now.s, 0
        if state.phase is Phase.ENDED:
            batch.changed.setdefault(state.key, state)  # it may have been forgotten
        batch.decide(state, AgentJoined(hello))

    def _report(self, batch: Batch, report: Report) -> None:
        agent_id = report.agent_id
        key = self._job_of.get(agent_id)
        state = batch.get(key) if key is not None else None
        agent = state.agents.get(agent_id) if state is not None else None
        if state is None or agent is None:
            return
        self._hear(report, batch.now.s)
        if tells_something(state, agent, report):
            if agent.number_commands:
                self._links[agent_id].sent = 0
            batch.decide(state, AgentHeard(agent_id, report.epoch, report.acked_command, report.beats))
        for i, fact in enumerate(report.facts):
            state = batch.get(state.key)
            assert state is not None
            sequence = report.first_sequence + i
            if sequence == state.agents[agent_id].acked_fact + 1 or isinstance(fact, AgentGone):
                batch.decide(state, FactArrived(agent_id, sequence, fact))
        if agent.role is not Role.GONE or agent.outbox or report.facts:
            batch.reports[agent_id] = state.key

    def _hear(self, report: Report, now_s: float) -> None:
        link = self._links.get(report.agent_id)
        if link is None:
            link = self._links[report.agent_id] = AgentLink(heard_s=now_s)
        link.heard_s = now_s
        if report.beats:
            link.beats, link.beats_s = report.beats, now_s

    def _operator(self, batch: Batch, request: OperatorRequest) -> None:
        found = [state for state in batch.live() if _is_meant(state, request.job)]
        if len(found) != 1:
            text = (
                f"no live job {request.job}" if not found else f"several live jobs are called {request.job}: name owner and run"
            )
            batch.replies.append((request, OperatorReply(False, text, None, request.request_id)))
            return
        event = OperatorAsked(request.kind, request.principal, request.reason, request.request_id, request.node)
        answer = batch.decide(found[0], event)
        assert answer is not None
        batch.replies.append((request, OperatorReply(answer.done, answer.message, found[0].key, request.request_id)))

    # -------------------------------------------------------------------------------------------------------------- time

    def _time_passes(self, batch: Batch) -> None:
        now_s = batch.now.s
        sweep = now_s >= self._sweep_at_s
        if sweep:
            self._sweep_at_s = now_s + RETRY_S
        for key in list(self._jobs):
            state = batch.get(key)
            if state is None or state.phase is Phase.ENDED:
                continue
            if sweep:
                self._look_for_silent(batch, state)
            state = batch.get(key)
            assert state is not None
            batch.decide(state, Tick())
        if sweep:
            self._resend(batch)
        if now_s >= self._beats_at_s:
            self._beats_at_s = now_s + BEATS_EVERY_S
            self._save_beats(batch)

    def _look_for_silent(self, batch: Batch, state: JobState) -> None:
        for agent_id, agent in state.agents.items():
            link = self._links.get(agent_id)
            if agent.role is Role.GONE or link is None or batch.now.s - link.heard_s < job_machine.LOST_AFTER_S:
                continue
            now = batch.get(state.key)
            assert now is not None
            batch.decide(now, AgentSilent(agent_id, batch.now.s - link.heard_s))

    def _resend(self, batch: Batch) -> None:
        for key in self._jobs:
            state = batch.get(key)
            for agent_id, agent in state.agents.items() if state is not None else ():
                link = self._links.get(agent_id)
                overdue = link is not None and link.sent and batch.now.s - link.sent_s >= RETRY_S
                if agent.outbox and overdue and agent.reachable:
                    batch.sends.append((key, SendOrder(agent_id)))

    def _save_beats(self, batch: Batch) -> None:
        for key in self._jobs:
            state = batch.get(key)
            if state is None or state.phase not in (Phase.RUNNING, Phase.COLLECTING):
                continue
            beats = self.live_beats(key)
            newest_s = max((one.at_s for one in beats), default=0.0)
            if newest_s <= self._beats_saved_s.get(key, 0.0):
                continue
            self._beats_saved_s[key] = newest_s
            batch.records.append(BeatsSaved(key, batch.now.us, [beat_row(one, beat) for one in beats for beat in one.beats]))
            if state.iteration:
                batch.changed[key] = state
                batch.dirty.add(key)

    def _forget_ended(self, now_s: float) -> None:
        for key, ended_s in list(self._ended_s.items()):
            state = self._jobs.get(key)
            if state is None or state.phase is not Phase.ENDED:
                del self._ended_s[key]
            elif not state.undelivered or now_s - ended_s >= FORGET_ENDED_AFTER_S:
                del self._ended_s[key], self._jobs[key]
                self._beats_saved_s.pop(key, None)
                for agent_id in state.agents:
                    if self._job_of.get(agent_id) == key:
                        del self._job_of[agent_id]
                        self._links.pop(agent_id, None)

    # ----------------------------------------------------------------------------------------------------------- sending

    def _listen_again(self, state: JobState) -> None:
        try:
            self._listen(state.spec.listen)
        except RsupError as error:
            _log.error("other nodes of job %s cannot reach this supervisor: %s", state.key, error)


def _stamped(state: JobState, now_s: float) -> JobState:
    return replace(state, clock_s=now_s)


def _is_meant(state: JobState, job: JobKey | str) -> bool:
    if isinstance(job, JobKey):
        return state.key == job
    return state.phase is not Phase.ENDED and job in (state.key.job_id, f"{state.key.job_id}.{state.key.run}")


def _log_fault(error: Exception, one: object) -> None:
    _log.error("a fault of rsup itself; the input is dropped: %.300r", one, exc_info=error)
