"""The supervisor's loop: inputs in, one transaction, then the actions. The shell around `job_machine`.

`handle` takes a batch of inputs, decides on each, commits every record and every changed state in ONE transaction of the
store, and only then sends anything: what an agent or an operator hears is on disk. A crash between commit and sending loses
nothing: commands stand in the outboxes of the states, and are sent again until they are acknowledged.

A store that cannot be written stops decisions, not training: nothing is acknowledged (agents keep their facts), inputs are
kept in a bounded queue and tried again each second, reports and known agents that say hello again are answered so that no
agent thinks its supervisor dead. A new agent is told why it cannot start (of a shared supervisor: to try another, or to be its
own), and nothing is kept of it: it may be gone when the store can be written again.

A store that answers and refuses what it is given (`StoreRefuses`) costs the one input that it refuses, not all that came along;
of a report the one fact, in whose place a line stands in the story, so that the facts behind it get through.

Where another supervisor may have taken over meanwhile (`lease_doubt`) reports are not answered so: an agent that hears us would
not look for the other, and its fence timeout would begin anew. It hears `StandsBy`, and keeps what it has to say.

What is not worth a transaction (when an agent was last heard, its latest beats, what has been sent to it) lives in
`live_jobs` and starts anew with each supervisor: every agent then has its full time again. Every duration that is judged is
measured in time in which this loop listened (`listening`): nobody is accused because we were slow, nor while we cannot keep
what we are told; whoever was sent away has the time to come back. All calls come from one thread, except `live_beats` and
`store_error`, which may be read from any.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rsup.supervisor import wire
from rsup.supervisor.actions import SendNotice, SendRefusal, SendWelcome
from rsup.supervisor.agent_admission import Known
from rsup.supervisor.agent_links import RETRY_S, LiveAgentBeats, newest_beats, tells_something
from rsup.supervisor.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    FactArrived,
    Now,
    OperatorAsked,
    Recovered,
    StartedAgain,
    StoreTrouble,
)
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.book_turn import BookTurn
from rsup.supervisor.job_routing import Routing, starts_before
from rsup.supervisor.listening import Listening
from rsup.supervisor.live_jobs import LiveJobs, rows_of
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.loop_inputs import (
    AgentKnownDead,
    AgentMessage,
    Clock,
    HardwareReply,
    HardwareRequest,
    Input,
    NodeReported,
    OperatorReply,
    OperatorRequest,
    RecordsToKeep,
    SystemClock,
    Transport,
)
from rsup.supervisor.loop_sweep import Sweep
from rsup.supervisor.outgoing import Outgoing
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_decoding import parts_of
from rsup.supervisor.states import JobState, Phase, Role, StateUnreadable, decode, rebased
from rsup.supervisor.store import Store, StoreError, StoreRefuses
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

MAX_BACKLOG = 10_000
REFUSE_AFTER_S = 2.0
"""How long the store must have failed before new agents are refused: till then they ask again, as they do by themselves."""

COME_BACK_S = 6.0
"""How long agents that were told to ask elsewhere may take until they are here again (`supervisor_client.STAY_S`)."""

SETTLED_S = 5.0
"""A store that fails again sooner, and for the same reason, had not recovered: of that the log need not hear each time."""

_LOG_EVERY_S = 60.0

_NO_MESSAGE = (OperatorRequest, HardwareRequest, AgentKnownDead, NodeReported, RecordsToKeep)
"""Inputs that are no message of an agent."""

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
        book: Book | None = None,
    ) -> None:
        self.info = info
        self.store_error = ""
        """Why the store cannot be written now, empty if it can."""
        self.num_dropped = 0
        """Inputs that did not find room while the store failed, and those that it refused. Agents repeat theirs."""
        self.on_fault: Callable[[Exception, object], None] = _log_fault
        """Called with an exception of our own code and the input that led to it; the input is dropped."""
        self.lease_doubt: Callable[[], str] = lambda: ""
        """Why another supervisor may decide in our place by now; empty: none can."""
        self._store = store
        self._clock = clock
        self._listening = Listening(clock.monotonic_s())
        self._listen = listen
        self._routing = Routing(store, new_job_id)
        self._live = LiveJobs()
        self._book = book or Book(store, accepts_injected=info.embedded)
        self._sweep = Sweep(self._live, clock.monotonic_s)
        self._outgoing = Outgoing(transport, info, self._live.links)
        self._backlog: deque[Input] = deque()
        self._retry_at_s = 0.0
        self._refused_logged_s = -_LOG_EVERY_S
        self._failing_since_s = 0.0
        self._recovered_s = -SETTLED_S
        """When the store could last be written again, by the machine's clock."""
        self._last_error = ""
        self._comes_and_goes = False
        """Whether it has failed again before it had settled, which the log knows."""
        self._has_doubted = False
        """Whether agents were sent away since the store failed."""
        self._all_back_s = 0.0
        """When those have come back that were sent away, by the machine's clock."""

    # ------------------------------------------------------------------------------------------------------- the shell's

    def recover(self) -> None:
        """Take over every live job of the store and send what its agents have not acknowledged. Raise `StoreError`."""
        now = self._now()
        self._book.recover()
        began_s = self._clock.monotonic_s()
        batch = Batch(now, self._live.states)
        for key, data in self._store.live_jobs():
            try:
                state = rebased(decode(data), now.s)
            except StateUnreadable as error:
                _log.error("job %s is left alone: %s", key, error)
                continue
            self._live.take_over(state, now.s)
            if state.spec.listen:
                self._listen_again(state)
            batch.decide(state, Recovered(self.info.instance))
        hardware = self._book.turn(batch)
        try:
            hardware.recovered()
            self._commit(batch)
            self._book.keep(hardware)
        except StoreError as error:  # what the outboxes hold was committed before, and may be sent
            self._store_failed(error, [])
        self._perform(batch, began_s)

    def listened(self, *, has_read_all: bool) -> None:
        """The links were read just now; what they gave comes by `handle` next. `has_read_all`: nothing was left unread. Time in
        which it cannot be taken does not count, as if we had not listened."""
        now_s = self._clock.monotonic_s()
        takes = not self.store_error and now_s >= self._all_back_s
        self._listening.look(now_s, has_read_all=has_read_all and takes)

    def handle(self, inputs: Sequence[Input]) -> None:
        """Decide on these inputs, commit, act. While the store fails they are kept and tried again by `tick`."""
        doubt = self.lease_doubt()
        if doubt and not self.store_error:
            self._store_failed(StoreError(doubt), inputs)
        elif self.store_error:
            self._keep(inputs)
        else:
            self._process(inputs)

    def tick(self) -> None:
        """Do what time demands. Call it at least every `next_wakeup_s`."""
        now_s = self._clock.monotonic_s()
        if self.store_error and (now_s < self._retry_at_s or not self._can_write()):
            return
        if not self.store_error and (doubt := self.lease_doubt()):
            self._store_failed(StoreError(doubt), [])
            return
        if self._comes_and_goes and not self.store_error and now_s - self._recovered_s >= SETTLED_S:
            self._comes_and_goes = False
            _log.warning("the store can be written again")
        if self._has_doubted:
            self._has_doubted = False
            self._all_back_s = now_s + COME_BACK_S
            self._live.hear_all(self._listened_s())  # whoever we sent away has his full time again
        backlog = list(self._backlog)
        self._backlog.clear()
        self._process(backlog, with_time=True)
        if not self.store_error:
            self._live.forget_ended(self._listened_s())

    def store_trouble(self) -> str:
        """Why the store cannot be written, also where it can now and then; empty if it can. From any thread."""
        return self.store_error or (self._last_error if self._comes_and_goes else "")

    def next_wakeup_s(self) -> float:
        """Seconds until `tick` has something to do, at most a second."""
        if self.store_error:
            return max(0.0, self._retry_at_s - self._clock.monotonic_s())
        now_s = self._listened_s()
        return max(0.0, self._sweep.next_s(now_s) - now_s)

    def jobs(self) -> list[JobState]:
        """Jobs that have not ended, or of whose end an agent has yet to hear."""
        return [state for state in self._live.states.values() if state.phase is not Phase.ENDED or state.undelivered]

    def job(self, key: JobKey) -> JobState | None:
        """The state of a job in memory."""
        return self._live.states.get(key)

    def live_beats(self, key: JobKey) -> list[LiveAgentBeats]:
        """The newest beats of a job's agents. From any thread."""
        state = self._live.states.get(key)
        if state is None:
            return []
        return newest_beats(state, self._live.links)

    def known_agent(self, agent_id: str) -> Known | None:
        """Whose that agent of a live job is."""
        key = self._live.job_of.get(agent_id)
        state = self._live.states.get(key) if key is not None else None
        agent = state.agents.get(agent_id) if state is not None else None
        if key is None or state is None or agent is None:
            return None
        return Known(key.owner, agent.info.principal, None if state.phase is Phase.ENDED else key)

    @property
    def hardware_changes(self) -> int:
        """Grows with each turn that has changed something about a device or node."""
        return self._book.changes

    def silent_s(self, agent_id: str) -> float:
        """How long nothing has been heard of an agent while we listened."""
        link = self._live.links.get(agent_id)
        return 0.0 if link is None else self._listened_s() - link.heard_s

    # ------------------------------------------------------------------------------------------------------- transaction

    def _now(self) -> Now:
        return Now(self._clock.now_us(), self._listened_s())

    def _listened_s(self) -> float:
        return self._listening.now_s(self._clock.monotonic_s())

    def _process(self, inputs: Sequence[Input], with_time: bool = False) -> bool:
        """Whether the store could be written."""
        began_s = self._clock.monotonic_s()
        batch = Batch(self._now(), self._live.states)
        hardware = self._book.turn(batch)
        try:
            left = self._left_unread(inputs)
            for one in inputs:
                if not (isinstance(one, AgentMessage) and one.agent_id in left and isinstance(one.message, Hello)):
                    self._guarded(batch, hardware, one)
            if with_time:
                self._sweep.time_passes(batch)
                self._weigh(hardware, with_time=True)
            self._commit(batch)
            self._book.keep(hardware)
        except StoreRefuses as error:
            return self._part(error, inputs, with_time)
        except StoreError as error:
            self._store_failed(error, inputs)
            return False
        if self.store_error:
            self.store_error = ""
            self._recovered_s = self._clock.monotonic_s()
            if not self._comes_and_goes:
                _log.warning("the store can be written again")
        self._perform(batch, began_s)
        return True

    def _left_unread(self, inputs: Sequence[Input]) -> set[str]:
        """Newcomers that had gone again before anybody read that they came: no job is begun for them."""
        told = [one for one in inputs if isinstance(one, AgentMessage) and isinstance(one.message, (Hello, Bye))]
        last = {one.agent_id: one.message for one in told}
        known = {one.agent_id for one in told if isinstance(one.message, Hello) and not self._is_new(one.message)}
        return {agent_id for agent_id, message in last.items() if isinstance(message, Bye)} - known

    def _part(self, error: StoreRefuses, inputs: Sequence[Input], with_time: bool) -> bool:
        """Something of these is what the store refuses: in ever smaller parts all but that is taken. As `_process`."""
        if not inputs:  # what time demands is no input that could be left out
            self._store_failed(error, [])
            return False
        if len(inputs) > 1 or with_time:
            half = len(inputs) // 2
            if half and not self._process(inputs[:half]):
                self._keep(inputs[half:])
                return False
            return self._process(inputs[half:]) and (not with_time or self._process([], with_time=True))
        why = " ".join(str(error).split())[:300]
        message = None if isinstance(inputs[0], _NO_MESSAGE) else inputs[0].message
        if isinstance(message, Report) and (parts := parts_of(message, why)):
            return self._process([AgentMessage(message.agent_id, part) for part in parts])
        self._drop(inputs[0], why)
        now_s = self._clock.monotonic_s()
        if now_s - self._refused_logged_s >= _LOG_EVERY_S:  # an agent says it again each second
            self._refused_logged_s = now_s
            _log.error("%s; left out: %s", why, _called(inputs[0]))
        return True

    def _guarded(self, batch: Batch, hardware: BookTurn, one: Input) -> None:
        try:
            self._take(batch, hardware, one)
        except StoreError:
            raise
        except Exception as error:  # a fault of ours in one input must not stop the supervision of all jobs
            self.on_fault(error, one)
        self._weigh(hardware)

    def _weigh(self, hardware: BookTurn, *, with_time: bool = False) -> None:
        """What was found about devices and nodes, before the next decision needs it."""
        try:
            hardware.weigh()
            if with_time:
                hardware.time_passes()
        except StoreError:
            raise
        except Exception as error:  # as above: the jobs go on without this piece of the hardware's history
            self.on_fault(error, "the hardware's history")

    def _commit(self, batch: Batch) -> None:
        if rows := rows_of(batch):
            self._store.commit(rows)
        self._live.keep(batch)

    def _can_write(self) -> bool:
        """Try the store once: a turn may have nothing to commit, which is no sign that it could."""
        try:
            self._store.probe()
        except StoreError as error:
            self._store_failed(error, [])
            return False
        return True

    def _store_failed(self, error: StoreError, inputs: Sequence[Input]) -> None:
        now_s = self._clock.monotonic_s()
        if not self.store_error and self._fails_again(str(error), now_s):
            if not self._comes_and_goes:
                _log.error("the store fails again, and is tried until it can be written for some seconds: %s", error)
            self._comes_and_goes = True
        elif not self.store_error:
            self._failing_since_s, self._comes_and_goes = now_s, False
            _log.error("%s; training goes on, nothing is decided or acknowledged until the store can be written", error)
        elif _without_numbers(self.store_error) != _without_numbers(str(error)):
            _log.error("the store cannot be written still: %s", error)
        self.store_error = self._last_error = str(error)
        self._retry_at_s = now_s + RETRY_S
        self._keep(inputs)

    def _fails_again(self, error: str, now_s: float) -> bool:
        return now_s - self._recovered_s < SETTLED_S and _without_numbers(self._last_error) == _without_numbers(error)

    def _keep(self, inputs: Sequence[Input]) -> None:
        """Put inputs aside. Reports are answered without a word of what is new in them, so that their agents stay."""
        now_s, listened_s = self._clock.monotonic_s(), self._listened_s()
        doubt = self.lease_doubt()
        self._has_doubted = self._has_doubted or bool(doubt)
        for one in inputs:
            if isinstance(one, AgentKnownDead):
                continue  # it is looked for again once what it, or whoever speaks for it, has to say can be taken
            message = None if isinstance(one, _NO_MESSAGE) else one.message
            if doubt and isinstance(message, (Hello, Report)):
                agent_id = message.agent.agent_id if isinstance(message, Hello) else message.agent_id
                self._outgoing.stand_by(agent_id, doubt)
                continue
            if isinstance(message, Report):
                self._live.hear(message, listened_s, now_s)
                key = self._live.job_of.get(message.agent_id)
                if key is not None and key in self._live.states:
                    self._outgoing.order(self._live.states[key], message.agent_id, now_s)
                if not message.facts:
                    continue
            elif isinstance(message, Hello) and (state := self._staying(message)) is not None:
                self._live.hear_again(message.agent.agent_id, listened_s)
                self._outgoing.welcome(state, message.agent.agent_id)
                continue
            elif isinstance(message, Hello) and self._is_new(message):
                if now_s - self._failing_since_s >= REFUSE_AFTER_S:
                    self._turn_away(message.agent.agent_id)
                continue
            self._backlog.append(one)
        while len(self._backlog) > MAX_BACKLOG:
            self._drop(self._backlog.popleft(), f"not taken up, too much waits for the store: {self.store_error}")

    def _turn_away(self, agent_id: str, trouble: str = "") -> None:
        """A new agent. One whose supervisor is shared may go to another, or be its own; an embedded one's has no other."""
        why = f"no job can be started now: {trouble or self.store_error}"
        if self.info.embedded:
            self._outgoing.refuse(agent_id, Refusal(1, why))
        else:
            self._outgoing.stand_by(agent_id, why)

    def _staying(self, hello: Hello) -> JobState | None:
        """The job of an agent that only asks whether we are still here, as all do whom we kept waiting for some seconds: of its
        `Hello` nothing has to be kept. An unanswered one takes us for dead, and may kill its ranks (`--fence-timeout`)."""
        key = self._live.job_of.get(hello.agent.agent_id)
        state = self._live.states.get(key) if key is not None else None
        agent = state.agents.get(hello.agent.agent_id) if state is not None else None
        if state is None or agent is None or wire.common_version(hello.speaks) is None or hello.agent.gone:
            return None
        told_all = agent.group_rank >= 0 or not state.adopted  # else it is waited for to say what it runs
        known = hello.epoch <= state.epoch and hello.attempt in (0, agent.live_attempt)
        return state if known and told_all and agent.role is not Role.GONE and not agent.dead else None

    def _is_new(self, hello: Hello) -> bool:
        """Whether nothing of a job runs on that agent, and no job knows it."""
        return not (hello.attempt or hello.job_id or hello.agent.gone) and hello.agent.agent_id not in self._live.job_of

    def _drop(self, one: Input, text: str) -> None:
        self.num_dropped += 1
        if isinstance(one, HardwareRequest):
            one.reply(HardwareReply("busy", text))
        elif isinstance(one, OperatorRequest):
            one.reply(OperatorReply(False, text, None, one.request_id))
        elif isinstance(one, NodeReported):
            one.reply(None)
        elif isinstance(one, RecordsToKeep):
            one.reply(False)
        elif not isinstance(one, _NO_MESSAGE) and isinstance(one.message, Hello) and self._is_new(one.message):
            self._turn_away(one.message.agent.agent_id, text)

    def _perform(self, batch: Batch, began_s: float) -> None:
        """Send what was decided in a turn that began at `began_s` of the machine's clock."""
        for agent_id, refusal in batch.refusals:
            self._outgoing.refuse(agent_id, refusal)
        for key, action in batch.sends:
            state = self._live.states.get(key)
            if isinstance(action, SendRefusal):
                self._outgoing.refuse(action.agent_id, Refusal(action.exit_code, action.message))
            elif state is not None and action.agent_id in state.agents:
                if isinstance(action, SendWelcome):
                    self._outgoing.welcome(state, action.agent_id)
                elif isinstance(action, SendNotice):
                    self._outgoing.notice(state, action.agent_id, action.text)
                elif action.agent_id not in batch.reports and state.agents[action.agent_id].role is not Role.LOST:
                    self._outgoing.order(state, action.agent_id, began_s)
        for agent_id, key in batch.reports.items():
            if key in self._live.states:
                self._outgoing.order(self._live.states[key], agent_id, began_s)
        for tell in batch.replies:
            tell()

    # ------------------------------------------------------------------------------------------------------------ inputs

    def _take(self, batch: Batch, hardware: BookTurn, one: Input) -> None:
        if isinstance(one, OperatorRequest):
            self._operator(batch, one)
        elif isinstance(one, HardwareRequest):
            verdict = hardware.ask(one.request)
            batch.replies.append(partial(one.reply, HardwareReply(verdict.status, verdict.message, verdict.dossier.saved)))
        elif isinstance(one, NodeReported):
            batch.replies.append(partial(one.reply, hardware.reported(one.report)))
        elif isinstance(one, RecordsToKeep):
            batch.records += one.records
            batch.replies.append(partial(one.reply, True))
        elif isinstance(one, AgentKnownDead):
            key = self._live.job_of.get(one.agent_id)
            state = batch.get(key) if key is not None else None
            if state is not None and one.agent_id in state.agents:
                gone = AgentGone(batch.now.us, one.reason)
                batch.decide(state, FactArrived(one.agent_id, 0, gone))
        elif isinstance(one.message, Hello):
            self._hello(batch, hardware, one.message)
        elif isinstance(one.message, Report):
            self._report(batch, hardware, one.message)
        else:
            assert isinstance(one.message, Bye)
            key = self._live.job_of.get(one.message.agent_id) or batch.job_of(one.message.agent_id)
            state = batch.get(key) if key is not None else None
            if state is not None:
                batch.decide(state, AgentLeft(one.message.agent_id))

    def _hello(self, batch: Batch, hardware: BookTurn, hello: Hello) -> None:
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
        known = self._live.job_of.get(agent_id) or batch.job_of(agent_id)
        state: JobState | Refusal | None = batch.get(known) if known is not None else None
        if state is None:
            self._end_starts_before(batch, hello)
            state = self._routing.job_for(hello, batch.live(), batch.now)
        if isinstance(state, Refusal):
            batch.refusals.append((agent_id, state))
            return
        self._live.hear_again(agent_id, batch.now.s)
        if state.phase is Phase.ENDED:
            batch.changed.setdefault(state.key, state)  # it may have been forgotten
        is_new = not state.num_events
        batch.decide(state, AgentJoined(hello, *hardware.joined(hello)))
        state = batch.get(state.key)
        if is_new and state is not None and state.num_events and self.info.notice:
            batch.decide(state, StoreTrouble(self.info.notice))

    def _end_starts_before(self, batch: Batch, hello: Hello) -> None:
        if hello.agent.gone or hello.attempt:
            return
        for state in starts_before(hello.spec, batch.live()):
            again = (
                f"the scheduler has started the job again ({hello.spec.scheduler_job}, restart {hello.spec.scheduler_start})"
            )
            batch.decide(state, StartedAgain(f"{again}: nothing is left of this run"))

    def _report(self, batch: Batch, hardware: BookTurn, report: Report) -> None:
        agent_id = report.agent_id
        key = self._live.job_of.get(agent_id)
        state = batch.get(key) if key is not None else None
        agent = state.agents.get(agent_id) if state is not None else None
        if state is None or agent is None:
            return
        self._live.hear(report, batch.now.s, self._clock.monotonic_s())
        if tells_something(state, agent, report):
            if agent.number_commands:
                self._live.links[agent_id].sent = 0
            batch.decide(state, AgentHeard(agent_id, report.epoch, report.acked_command, report.beats))
        for i, fact in enumerate(report.facts):
            state = batch.get(state.key)
            assert state is not None
            sequence = report.first_sequence + i
            if sequence == state.agents[agent_id].acked_fact + 1 or isinstance(fact, AgentGone):
                batch.decide(state, FactArrived(agent_id, sequence, fact))
                self._weigh(hardware)
        if agent.role is not Role.GONE or agent.outbox or report.facts:
            batch.reports[agent_id] = state.key

    def _operator(self, batch: Batch, request: OperatorRequest) -> None:
        found = [state for state in batch.live() if _is_meant(state, request.job)]
        if len(found) != 1:
            text = (
                f"no live job {request.job}" if not found else f"several live jobs are called {request.job}: name owner and run"
            )
            batch.replies.append(partial(request.reply, OperatorReply(False, text, None, request.request_id)))
            return
        asked = (request.kind, request.principal, request.reason, request.request_id, request.node, request.dry_run)
        event = OperatorAsked(*asked)
        answer = batch.decide(found[0], event)
        assert answer is not None
        reply = OperatorReply(answer.done, answer.message, found[0].key, request.request_id)
        batch.replies.append(partial(request.reply, reply))

    # ----------------------------------------------------------------------------------------------------------- sending

    def _listen_again(self, state: JobState) -> None:
        try:
            self._listen(state.spec.listen)
        except RsupError as error:
            _log.error("other nodes of job %s cannot reach this supervisor: %s", state.key, error)


def _is_meant(state: JobState, job: JobKey | str) -> bool:
    if isinstance(job, JobKey):
        return state.key == job
    return state.phase is not Phase.ENDED and job in (state.key.job_id, f"{state.key.job_id}.{state.key.run}")


def _called(one: Input) -> str:
    """An input in a log line: not all that somebody has written into it."""
    if isinstance(one, _NO_MESSAGE):
        return type(one).__name__
    return f"{type(one.message).__name__} of agent {one.agent_id[:80]!r}"


def _without_numbers(text: str) -> str:
    """What stays the same of a reason that counts seconds."""
    return re.sub(r"\d+", "", text)


def _log_fault(error: Exception, one: object) -> None:
    _log.error("a fault of rsup itself; the input is dropped: %.300r", one, exc_info=error)
