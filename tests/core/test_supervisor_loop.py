"""The loop: one transaction before anything is sent, stores that fail, supervisors that start anew, jobs found and refused."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rsup.supervisor import loop, wire
from rsup.supervisor.loop import AgentKnownDead, AgentMessage, Loop, OperatorReply, OperatorRequest
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.records import AttemptSaved, BeatsSaved, EventLogged, EvidenceSaved, JobKey, JobSaved, MetricsSaved, Record
from rsup.supervisor.states import JobState, Phase, Role, decode
from rsup.supervisor.store import StoreError, StoreFull, StoreRefuses
from tests.core.job_driver import START_US, hello, info, spec


@dataclass
class Bench:
    """A loop with everything around it in the test's hand. It is its own transport and clock."""

    store: MemoryStore = field(default_factory=MemoryStore)
    now_s: float = 50.0
    sent: list[tuple[str, wire.ToAgent]] = field(default_factory=list)
    listening: list[str] = field(default_factory=list)
    instance: int = 0
    embedded: bool = True

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new supervisor process over the same store."""
        self.instance += 1
        where = wire.SupervisorInfo(f"i{self.instance}", self.instance, "host", self.embedded)
        self.loop = Loop(self.store, self, self, where, self.listening.append, lambda: "generated")
        self.loop.on_fault = _raise
        self.loop.recover()

    def now_us(self) -> int:
        return START_US + int(self.now_s * 1e6)

    def monotonic_s(self) -> float:
        return self.now_s + 1000.0 * self.instance

    def send(self, agent_id: str, message: wire.ToAgent) -> None:
        self.sent.append((agent_id, wire.decode_to_agent(wire.encode(message))))

    def hear(self, agent_id: str, message: wire.ToSupervisor) -> list[wire.ToAgent]:
        """What this agent is sent because of its message."""
        before = len(self.sent)
        self.loop.handle([AgentMessage(agent_id, message)])
        return [message for name, message in self.sent[before:] if name == agent_id]

    def join(self, name: str, its_spec: wire.JobSpec | None = None, **fields: object) -> list[wire.ToAgent]:
        return self.hear(name, hello(name, its_spec or spec(), **fields))

    def report(self, name: str, *facts: wire.AnyFact, first: int = 0, acked: int = 0, **fields: object) -> wire.Order:
        """An agent's report; the order that answers it."""
        message = wire.Report(name, 1, acked, first, list(facts), **fields)  # type: ignore[arg-type]
        (order,) = [m for m in self.hear(name, message) if isinstance(m, wire.Order)]
        return order

    def wait(self, seconds: float) -> None:
        """Let time pass in turns of at most a second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + max(0.001, self.loop.next_wakeup_s()))
            self.loop.tick()

    def start(self, name: str = "a") -> None:
        """One agent, its attempt running."""
        self.join(name)
        self.report(name, wire.StoreBound(0, 1, "h", 1), wire.AttemptStarted(0, 1, [11, 12]), first=1, acked=1)
        self.report(name, acked=2)

    def ask(self, kind: str, job: JobKey | str = "t1", **fields: object) -> OperatorReply:
        replies: list[OperatorReply] = []
        self.loop.handle([OperatorRequest(job, kind, "alice", "why", replies.append, **fields)])  # type: ignore[arg-type]
        (reply,) = replies
        return reply

    @property
    def state(self) -> JobState:
        return decode(self.saved.state)

    @property
    def saved(self) -> JobSaved:
        row = list(self.store.rows[JobSaved].values())[-1]
        assert isinstance(row, JobSaved)
        return row

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events]


def _raise(error: Exception, one: object) -> None:
    raise error


SLURM_JOB = {"job_id": "", "preferred_id": "4711", "scheduler_job": "slurm-c-4711", "resume": True}


def note(text: str) -> wire.Note:
    return wire.Note(1, "info", text)


def test_an_agent_is_welcomed_and_gets_its_commands() -> None:
    bench = Bench()
    welcome, order = bench.join("a")
    assert isinstance(welcome, wire.Welcome) and (welcome.job_id, welcome.run, welcome.acked_fact) == ("t1", 1, 0)
    assert isinstance(order, wire.Order) and [type(c) for c in order.commands] == [wire.HostStore] and order.epoch == 1
    assert bench.saved.phase == "starting" and bench.saved.command == "train.py"


def test_two_hellos_of_one_agent_in_one_batch_make_one_job() -> None:
    bench = Bench()
    ids = iter(["one", "two"])
    bench.loop._routing._new_job_id = lambda: next(ids)
    message = AgentMessage("a", hello("a", spec(job_id="")))
    bench.loop.handle([message, message])
    assert [row.job.job_id for row in bench.store.rows[JobSaved].values() if isinstance(row, JobSaved)] == ["one"]
    assert bench.kinds().count("AgentJoined") == 1
    assert {m.job_id for _, m in bench.sent if isinstance(m, wire.Welcome)} == {"one"}
    assert not [m for _, m in bench.sent if isinstance(m, wire.Refusal)]


def test_a_newcomer_that_has_left_before_it_was_read_begins_no_job() -> None:
    bench = Bench()
    came, left = AgentMessage("a", hello("a", spec())), AgentMessage("a", wire.Bye("a"))
    bench.loop.handle([came, came, left])
    assert not bench.store.rows.get(JobSaved) and not bench.sent and not bench.store.events
    bench.loop.handle([left, came])
    assert bench.saved.phase == "starting", "one that comes again"
    bench.loop.handle([came, left])
    assert bench.saved.phase == "ended", "one that the job knows"


def test_a_bye_right_behind_its_hello_reaches_the_job() -> None:
    bench = Bench()
    bench.loop.handle([AgentMessage("a", hello("a", spec(), job_id="t1", run=1)), AgentMessage("a", wire.Bye("a"))])
    assert bench.saved.phase == "ended"


def test_the_trouble_of_the_store_is_in_each_new_jobs_story() -> None:
    bench = Bench()
    notice = "rsup.db is damaged; this job's story is kept in rsup-fallback-1.db"
    info_ = wire.SupervisorInfo("i1", 1, "host", True, notice=notice)
    bench.loop = Loop(bench.store, bench, bench, info_, bench.listening.append)
    welcome = bench.join("a")[0]
    assert isinstance(welcome, wire.Welcome) and welcome.supervisor.notice == notice
    bench.join("a")
    assert bench.kinds()[0] == "JobCreated" and bench.kinds().count("StoreTrouble") == 1
    (event,) = [event for event in bench.store.events if event.kind == "StoreTrouble"]
    assert event.text == notice and event.level == "warning"


def test_a_dry_run_says_what_would_be_done_and_does_nothing() -> None:
    bench = Bench()
    bench.start()
    before = len(bench.store.events)
    for kind in ("stop", "checkpoint"):
        reply = bench.ask(kind, dry_run=True)
        assert reply.done and reply.message.startswith("would ") and "running, attempt 1, 2 ranks on 1 node" in reply.message
    assert not bench.ask("fence", node="node-a", dry_run=True).done, "it answers"
    assert len(bench.store.events) == before
    bench.wait(16.0)
    before = len(bench.store.events)
    reply = bench.ask("fence", node="node-a", dry_run=True)
    assert reply.done and "node-a" in reply.message and len(bench.store.events) == before
    assert bench.ask("fence", node="node-a").done and bench.saved.phase == "ended"
    assert [e.principal for e in bench.store.events if e.kind == "Fence"] == ["alice"]


def test_facts_are_acknowledged_once_each_in_order() -> None:
    bench = Bench()
    bench.join("a")
    assert bench.report("a", note("x"), note("y"), first=1).acked_fact == 2
    assert bench.report("a", note("x"), note("y"), note("z"), first=1).acked_fact == 3
    assert bench.report("a", note("gap"), first=5).acked_fact == 3
    assert [event.text for event in bench.store.events if event.kind == "Note"] == ["x", "y", "z"]


def test_nothing_is_sent_before_the_commit() -> None:
    bench = Bench()
    seen_at_commit = []
    commit = bench.store.commit
    bench.store.commit = lambda records: (seen_at_commit.append(len(bench.sent)), commit(records))[1]  # type: ignore
    bench.loop.handle([AgentMessage("a", hello("a", spec())), AgentMessage("b", hello("b", spec(job_id="t2")))])
    assert seen_at_commit == [0] and len(bench.sent) == 4, "one transaction for the batch, then the messages"


def test_reports_without_news_cost_no_transaction() -> None:
    bench = Bench()
    bench.start()
    commits = bench.store.num_commits
    beat = [wire.RankBeat(0, 1, 0, 0.1, 0.1), wire.RankBeat(1, 1, 0, 0.1, 0.1)]
    for _ in range(5):
        bench.report("a", acked=2, beats=beat)
    assert bench.store.num_commits == commits
    assert [one.beats for one in bench.loop.live_beats(JobKey("local", "alice", "t1", 1))] == [beat]
    bench.wait(4.0)
    assert len(bench.store.rows[BeatsSaved]) == 1


def test_commands_are_sent_again_until_they_are_acknowledged() -> None:
    bench = Bench()
    bench.join("a")
    bench.sent.clear()
    bench.wait(3.5)
    orders = [m for _, m in bench.sent if isinstance(m, wire.Order)]
    assert len(orders) == 3 and all(len(order.commands) == 1 for order in orders)
    assert bench.report("a", acked=1).commands == []
    bench.sent.clear()
    bench.wait(3.0)
    assert bench.sent == []


def test_a_new_supervisor_takes_over_and_sends_the_outbox_again() -> None:
    bench = Bench()
    bench.start()
    bench.report("a", wire.RankExited(0, 1, 0, 9), first=3, acked=2)
    bench.sent.clear()
    bench.restart()
    again = [type(c) for _, m in bench.sent if isinstance(m, wire.Order) for c in m.commands]
    assert again == [wire.StopAttempt], "what was acknowledged is not sent again"
    assert bench.kinds()[-1] == "SupervisorStarted"
    (welcome, _) = bench.join("a", epoch=1, attempt=1)
    assert isinstance(welcome, wire.Welcome) and welcome.acked_fact == 3 and welcome.supervisor.instance == "i2"
    assert bench.report("a", wire.RanksGone(0, 1), first=4, acked=3).acked_fact == 4
    assert bench.saved.phase == "ended" and bench.saved.exit_code == 9


def test_time_that_no_supervisor_saw_does_not_count() -> None:
    bench = Bench()
    bench.join("a", spec(min_nodes=2, max_nodes=2, join_timeout_s=60.0))
    bench.wait(30.0)
    bench.now_s += 1000.0
    bench.restart()
    for _ in range(60):
        bench.report("a")
        bench.wait(0.99)
        if bench.saved.phase == "ended":
            break
    assert bench.saved.phase == "ended" and "AgentLost" not in bench.kinds()[bench.kinds().index("SupervisorStarted") :]


def test_a_full_disk_stops_decisions_but_not_the_conversation(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.start()
    bench.store.fail_with = StoreFull("no space left in /state: free some, or move it with --state-dir")
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            order = bench.report("a", note("kept"), first=3, acked=2)
            assert order.acked_fact == 2, "nothing is acknowledged that is not on disk"
            bench.wait(1.0 + i)
        reply: list[OperatorReply] = []
        bench.loop.handle([OperatorRequest("t1", "stop", "alice", "", reply.append)])
        bench.wait(2.0)
        assert reply == [] and "no space left" in bench.loop.store_error
        bench.store.fail_with = None
        bench.wait(1.5)
    assert bench.loop.store_error == "" and reply[0].done
    assert [event.text for event in bench.store.events if event.kind == "Note"] == ["kept"]
    assert bench.report("a", acked=2).acked_fact == 3
    assert "AgentLost" not in bench.kinds()
    assert len([r for r in caplog.records if "no space left" in r.message]) == 1, "one line, not one a try"
    assert any("can be written again" in r.message for r in caplog.records)


def test_a_store_that_takes_what_is_tried_and_not_what_comes_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk has room for what is written over, and none for what is new."""
    bench = Bench()
    bench.start()
    bench.store.fail_with = StoreFull("could not extend file 17 at block 9")
    monkeypatch.setattr(bench.store, "probe", lambda: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            bench.report("a", note("kept"), first=3, acked=2)
            bench.loop._backlog.clear()  # so that what is tried again needs nothing new
            bench.wait(1.2)
        assert bench.loop.store_trouble() and not bench.loop.store_error, "not ready either"
        said = [r.message for r in caplog.records]
        assert len(said) <= 3 and sum("could not extend" in line for line in said) == 2, said
        bench.store.fail_with = None
        for _ in range(8):
            bench.wait(1.0)
        assert not bench.loop.store_trouble() and bench.report("a", note("kept"), first=3, acked=2).acked_fact == 3
    assert [r.message for r in caplog.records][len(said) :] == ["the store can be written again"]


def test_a_new_agent_hears_of_a_full_disk_and_leaves_no_ghost_job() -> None:
    bench = Bench()
    bench.store.fail_with = StoreFull("no space left in /state: free some, or choose another --state-dir")
    assert bench.join("a") == [], "it asks again"
    bench.wait(2.5)
    (refusal,) = bench.join("a")
    assert isinstance(refusal, wire.Refusal) and refusal.exit_code == 1
    assert refusal.message.startswith("no job can be started now: no space left") and "\n" not in refusal.message
    bench.store.fail_with = None
    bench.wait(2.0)
    assert bench.loop.store_error == "" and bench.loop.jobs() == [] and not bench.store.rows
    assert isinstance(bench.join("b")[0], wire.Welcome)


def test_a_new_agent_of_a_shared_supervisor_is_sent_elsewhere() -> None:
    bench = Bench(embedded=False)
    bench.store.fail_with = StoreFull("the database takes no more data")
    bench.join("a")
    bench.wait(2.5)
    (said,) = bench.join("a")
    assert isinstance(said, wire.StandsBy) and "no job can be started now: the database takes no more data" in said.message


def test_nobody_is_dead_for_what_could_not_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The database is away for a minute; an agent ends meanwhile, and what it has to say comes when it is back."""
    bench = Bench(embedded=False)
    bench.start()
    away = StoreError("cannot reach the database")
    bench.store.fail_with = away
    bench.loop.lease_doubt = lambda: "another may have taken over" if bench.store.fail_with else ""
    bench.loop.handle([AgentKnownDead("a", "what was seen just before")])
    for _ in range(60):
        bench.now_s += 1.0
        bench.loop.listened(has_read_all=True)
        assert all(isinstance(said, wire.StandsBy) for said in bench.hear("a", wire.Report("a", 1, 2)))
        bench.loop.tick()
    assert bench.loop.silent_s("a") < 5.0, "what it said was not taken, and is no silence"
    bench.loop.handle([AgentKnownDead("a", "what was seen meanwhile")])
    bench.store.fail_with = StoreError("cannot execute INSERT in a read-only transaction")
    bench.wait(2.0)
    bench.store.fail_with = None
    for _ in range(5):  # it has yet to come back
        bench.now_s += 1.0
        bench.loop.listened(has_read_all=True)
        bench.loop.tick()
    assert bench.loop.store_error == "" and bench.loop.silent_s("a") < 2.5
    assert "AgentGone" not in bench.kinds() and "AgentLost" not in bench.kinds()
    assert [r.message for r in caplog.records if "cannot be written still: cannot execute" in r.message], "the new reason"
    assert bench.report("a", note("I have ended"), first=3, acked=2).acked_fact == 3


def test_a_turn_without_anything_to_write_is_no_cure(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.store.fail_with = StoreFull("no space")
    bench.join("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            bench.wait(1.0)
            assert bench.loop.store_error == "no space"
    assert len(caplog.records) == 1
    bench.store.fail_with = None
    bench.wait(1.5)
    assert bench.loop.store_error == ""


def test_a_known_agent_that_says_hello_again_is_answered_while_the_store_fails() -> None:
    """After some seconds without a word, as in a commit that hangs, agents say nothing but hello."""
    bench = Bench()
    bench.start()
    bench.join("s", spec(job_id="t2", min_nodes=2, max_nodes=2))
    bench.join("g", spec(job_id="t3"))
    bench.hear("g", wire.Bye("g"))
    bench.store.fail_with = StoreError("cannot reach the database")
    heard_s = bench.loop.silent_s("a")
    for _ in range(3):
        bench.now_s += 5.0
        (welcome,) = bench.join("a", epoch=1, attempt=1, job_id="t1", run=1)
        assert isinstance(welcome, wire.Welcome) and (welcome.job_id, welcome.epoch, welcome.acked_fact) == ("t1", 1, 2)
        assert bench.loop.silent_s("a") <= heard_s
        assert bench.report("a", note("kept"), first=3, acked=2).acked_fact == 2
    assert [type(m) for m in bench.join("s", spec(job_id="t2"), job_id="t2", run=1)] == [wire.Welcome], "one that waits, too"
    kept = len(bench.loop._backlog)
    assert not [one for one in bench.loop._backlog if isinstance(one, AgentMessage) and isinstance(one.message, wire.Hello)]
    for odd in (
        hello("a", spec(), epoch=2, attempt=1),
        hello("a", spec(), epoch=1, attempt=2),
        hello("a", spec(), epoch=1, agent=info("a", gone=True)),
        hello("g", spec(job_id="t3"), job_id="t3", run=1),
    ):
        assert bench.hear(odd.agent.agent_id, odd) == [], "what has to be decided on waits"
    assert len(bench.loop._backlog) == kept + 4
    bench.loop.lease_doubt = lambda: "another may have taken over"
    (said,) = bench.join("a", epoch=1, attempt=1)
    assert isinstance(said, wire.StandsBy), "another may be the one that decides"


def test_an_adopted_job_hears_what_an_agent_says_to_run_though_the_store_failed_meanwhile() -> None:
    bench = Bench()
    two = spec(min_nodes=2, max_nodes=2)
    bench.join("a", two)
    bench.join("b", two)
    bench.join("a", two, epoch=5, attempt=3)
    bench.store.fail_with = StoreError("cannot reach the database")
    bench.now_s += 1.0
    assert bench.join("b", two, epoch=5) == [] and bench.join("b", two, epoch=5, attempt=3) == []
    bench.store.fail_with = None
    bench.wait(2.0)
    assert [name for name, _ in bench.state.active] == ["a", "b"]


@pytest.mark.parametrize("store_fails", [False, True])
def test_a_command_that_was_lost_is_sent_again_while_the_clock_stands_still(store_fails: bool) -> None:
    bench = Bench()
    bench.start()
    bench.loop.listened(has_read_all=True)
    order = bench.report("a", wire.RankExited(0, 1, 0, 9), first=3, acked=2)
    assert [type(command) for command in order.commands] == [wire.StopAttempt]
    bench.store.fail_with = StoreFull("no space") if store_fails else None
    for _ in range(5):
        bench.now_s += 1.0
        bench.loop.listened(has_read_all=False)
    assert [type(command) for command in bench.report("a", acked=2).commands] == [wire.StopAttempt]
    assert bench.report("a", acked=2).commands == [], "not with each report"
    bench.now_s += 1.0
    bench.loop.listened(has_read_all=False)
    assert [type(command) for command in bench.report("a", acked=2).commands] == [wire.StopAttempt]


def test_a_backlog_that_is_full_tells_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_BACKLOG", 3)
    bench = Bench()
    bench.start()
    bench.store.fail_with = StoreFull("no space")
    replies: list[OperatorReply] = []
    for i in range(5):
        bench.loop.handle([OperatorRequest("t1", "checkpoint", "alice", "", replies.append, request_id=f"q{i}")])
    assert [(reply.done, reply.request_id) for reply in replies] == [(False, "q0"), (False, "q1")]
    assert "no space" in replies[0].message and bench.loop.num_dropped == 2
    bench.store.fail_with = None
    bench.wait(1.5)
    assert [(reply.done, reply.request_id) for reply in replies[2:]] == [(True, "q2"), (True, "q3"), (True, "q4")]


def test_what_the_store_refuses_costs_the_input_that_brought_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.start("a")
    bench.join("b", spec(job_id="t2"))
    write = bench.store.commit

    def commit(records: Sequence[Record]) -> None:
        if any(isinstance(record, EventLogged) and "poison" in record.text for record in records):
            raise StoreRefuses("the database does not take that: integer out of range")
        write(records)

    monkeypatch.setattr(bench.store, "commit", commit)
    replies: list[OperatorReply] = []
    poison = AgentMessage("a", wire.Report("a", 1, 2, 3, [note("poison")]))
    well = AgentMessage("b", wire.Report("b", 1, 0, 1, [note("well")]))
    asked = OperatorRequest("t2", "stop", "alice", "poison", replies.append)
    for _ in range(3):
        bench.loop.handle([poison, well, asked, poison])
        assert bench.loop.store_error == ""
    assert [event.text for event in bench.store.events if event.kind == "Note"] == ["well"]
    assert [reply.done for reply in replies] == [False] * 3 and "out of range" in replies[0].message
    (record,) = [record for record in caplog.records if "left out" in record.message]
    assert record.message == "the database does not take that: integer out of range; left out: Report of agent 'a'"
    bad = bench.join("z", spec(job_id="t3", command=["poison"]))
    assert [type(message) for message in bad] == [wire.Refusal if bench.embedded else wire.StandsBy], "it need not wait in vain"
    assert "no job can be started now: the database does not take that" in bad[0].message  # type: ignore[union-attr]
    bench.store.fail_with = StoreFull("no space")
    bench.loop.handle([poison, AgentMessage("b", wire.Report("b", 1, 0, 2, [note("later")]))])
    assert bench.loop.store_error == "no space"
    bench.store.fail_with = None
    bench.wait(2.5)
    assert bench.loop.store_error == "", "nor does it hold up what waited for the store"
    assert [event.text for event in bench.store.events if event.kind == "Note"] == ["well", "later"]


def test_a_fact_that_the_store_refuses_leaves_a_line_and_lets_those_behind_it_through(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start()
    write = bench.store.commit

    def commit(records: Sequence[Record]) -> None:
        if any(isinstance(record, MetricsSaved) and "poison" in record.series for record in records):
            raise StoreRefuses("the database does not take that: integer out of range")
        write(records)

    monkeypatch.setattr(bench.store, "commit", commit)
    bad = wire.MetricsReported(1, 1, 0, "training", {"poison": [wire.MetricBin.of(1, 1, 1, 1.0)]})
    beats = [wire.RankBeat(0, 11, 5, 0.1, 0.1)]
    answers = bench.hear("a", wire.Report("a", 1, 2, 3, [note("one"), bad, note("two"), bad, note("three")], beats))
    assert [one.acked_fact for one in answers if isinstance(one, wire.Order)][-1] == 7
    assert bench.loop.store_error == "" and bench.loop.num_dropped == 0
    told = [event.text for event in bench.store.events if event.kind == "Note"]
    left_out = "a MetricsReported is left out: the database does not take that: integer out of range"
    assert told == ["one", left_out, "two", left_out, "three"]
    assert [agent.beats[0].iteration for agent in bench.loop.live_beats(bench.saved.job)] == [5]


def test_a_disk_that_is_full_when_the_supervisor_starts() -> None:
    bench = Bench()
    bench.start()
    bench.store.fail_with = StoreError("read-only")
    bench.restart()
    assert bench.loop.store_error == "read-only"
    bench.store.fail_with = None
    bench.wait(2.0)
    assert bench.loop.store_error == "" and bench.report("a", note("x"), first=3, acked=2).acked_fact == 3


def test_a_silent_agent_is_lost_and_found() -> None:
    bench = Bench()
    bench.start()
    bench.wait(14.0)
    assert "AgentLost" not in bench.kinds()
    bench.wait(3.0)
    assert bench.kinds()[-1] == "AgentLost"
    bench.report("a", acked=2)
    assert bench.kinds()[-1] == "AgentFound"


def test_nodes_that_fall_silent_together_are_each_told_of_and_come_back_in_a_line_each() -> None:
    """As after `scontrol suspend`: the last one of them has nobody else to tell it to."""
    bench = Bench()
    two = spec(min_nodes=2, max_nodes=2)
    for name in ("a", "b"):
        bench.join(name, two)
    bench.wait(20.0)
    for name in ("a", "b"):
        bench.hear(name, wire.Report(name, 1, 0, 0, []))
    said = [text for _, message in bench.sent if isinstance(message, wire.Order) for text in message.notices]
    for name in ("a", "b"):
        assert [text.partition(" for 15 s")[0] for text in said if f"node-{name}" in text] == [
            f"nothing heard of node node-{name}",
            f"node node-{name} answers again",
        ]


def test_an_ended_job_is_told_to_an_agent_that_missed_the_end_even_after_a_restart() -> None:
    bench = Bench()
    bench.start()
    bench.report("a", wire.RankExited(0, 1, 0, 0), wire.RankExited(0, 1, 1, 0), first=3, acked=2)
    assert bench.saved.phase == "ended" and len(bench.loop.jobs()) == 1, "the agent has not heard"
    bench.restart()
    assert bench.loop.jobs() == []
    answers = bench.join("a", epoch=1, job_id="t1", run=1)
    ends = [c for m in answers if isinstance(m, wire.Order) for c in m.commands if isinstance(c, wire.EndJob)]
    assert ends and ends[0].result.exit_code == 0
    bench.hear("a", wire.Bye("a"))
    bench.wait(1.0)
    assert bench.loop.jobs() == [] and bench.loop.job(JobKey("local", "alice", "t1", 1)) is None


def test_an_ended_id_starts_the_next_run_or_goes_on_with_resume() -> None:
    bench = Bench()
    bench.start()
    bench.report("a", wire.RankExited(0, 1, 0, 3), wire.RanksGone(0, 1), first=3, acked=2)
    assert bench.saved.exit_code == 3
    (welcome, order) = bench.join("b")
    assert isinstance(welcome, wire.Welcome) and welcome.run == 2 and isinstance(order, wire.Order) and order.epoch == 2
    bench.report("b", wire.StartFailed(0, 1, "no", 1), first=1)
    (welcome, order) = bench.join("c", spec(resume=True))
    assert isinstance(welcome, wire.Welcome) and welcome.run == 2
    (command,) = order.commands if isinstance(order, wire.Order) else ()
    assert isinstance(command, wire.HostStore) and command.attempt == 2 and isinstance(order, wire.Order) and order.epoch > 2


def test_a_live_id_is_refused() -> None:
    bench = Bench()
    bench.start()
    (refusal,) = bench.join("b")
    assert isinstance(refusal, wire.Refusal) and refusal.exit_code == 2 and "already running (attempt 1" in refusal.message
    assert bench.kinds().count("AgentJoined") == 1


def test_agents_without_an_id_are_grouped() -> None:
    two = {"min_nodes": 2, "max_nodes": 2, "job_id": ""}
    for ours, theirs, together in [
        (spec(rdzv_id="exp", **two), spec(rdzv_id="exp", **two), True),
        (spec(rdzv_id="exp", **two), spec(rdzv_id="other", **two), False),
        (spec(listen="h:29400", **two), spec(**two), True),
        (spec(**two), spec(**two), False),
        (spec(rdzv_id="exp", **two), spec(rdzv_id="exp", owner="bob", **{**two}), False),
        (spec(job_id=""), spec(job_id=""), False),
    ]:
        bench = Bench()
        ids = iter(["one", "two"])
        bench.loop._routing._new_job_id = lambda ids=ids: next(ids)  # type: ignore[misc]
        bench.join("a", ours)
        bench.join("b", theirs)
        names = {row.job.job_id for row in bench.store.rows[JobSaved].values() if isinstance(row, JobSaved)}
        assert names == ({"one"} if together else {"one", "two"}), (ours, theirs)


def test_listening_where_the_first_node_asks_and_refusing_what_cannot_be_bound() -> None:
    bench = Bench()
    two = spec(min_nodes=2, max_nodes=2, listen="127.0.0.1:29400")
    bench.join("a", two)
    assert bench.listening == ["127.0.0.1:29400"]
    bench.restart()
    assert bench.listening == ["127.0.0.1:29400"] * 2, "a new supervisor listens again"

    def in_use(endpoint: str) -> None:
        raise wire.RsupError(f"{endpoint} is in use")

    bench.loop._listen = in_use
    (refusal,) = bench.join("b", spec(job_id="t2", listen="127.0.0.1:1"))
    assert isinstance(refusal, wire.Refusal) and refusal.message == "127.0.0.1:1 is in use"


def test_a_job_of_a_lost_store_is_adopted_and_its_agent_kept() -> None:
    bench = Bench()
    (welcome,) = bench.join("a", spec(job_id=""), epoch=4, attempt=3, job_id="20261129-abc", run=2)
    assert isinstance(welcome, wire.Welcome) and (welcome.job_id, welcome.run, welcome.epoch) == ("20261129-abc", 2, 4)
    assert bench.saved.phase == "running" and bench.saved.attempt == 3
    assert bench.store.events[0].level == "warning"


def test_a_keeper_ends_its_dead_agent_and_joins_nothing() -> None:
    bench = Bench()
    (refusal,) = bench.join("x", agent=info("x", gone=True))
    assert isinstance(refusal, wire.Refusal)
    bench.start()
    (welcome,) = bench.join("a", agent=info("a", gone=True))
    assert isinstance(welcome, wire.Welcome) and welcome.acked_fact == 2
    assert bench.report("a", wire.AgentGone(0, "dead"), first=3).acked_fact == 3
    assert bench.saved.phase == "ended", "no node is left"


def test_the_shell_may_find_an_agent_dead() -> None:
    bench = Bench()
    bench.start()
    bench.loop.handle([AgentKnownDead("a", "no such process"), AgentKnownDead("nobody", "x")])
    assert bench.saved.phase == "ended"


def test_operators_are_answered_after_the_commit() -> None:
    bench = Bench()
    assert not bench.ask("stop", "nothing").done
    bench.start()
    assert bench.ask("checkpoint", request_id="r1").done
    assert "taken up already" in bench.ask("checkpoint", request_id="r1").message
    assert not bench.ask("fence").done
    reply = bench.ask("stop", JobKey("local", "alice", "t1", 1))
    assert reply.done and reply.job == JobKey("local", "alice", "t1", 1)
    assert [e.principal for e in bench.store.events if e.kind == "StopRequested"] == ["alice"]
    assert "being stopped already" in bench.ask("stop").message


def test_versions_too_far_apart_are_refused() -> None:
    bench = Bench()
    old = wire.Hello((90, 92), "9.9", info("a"), spec())
    (refusal,) = bench.hear("a", old)
    assert isinstance(refusal, wire.Refusal) and "9.9" in refusal.message


def test_a_fault_of_ours_costs_one_input_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.start()
    del bench.loop.on_fault
    loop = Loop(bench.store, bench, bench, bench.loop.info, bench.listening.append)
    loop.recover()
    loop.handle([AgentMessage("a", "rubbish"), AgentMessage("a", wire.Report("a", 1, 2, 3, [note("x")]))])  # type: ignore
    assert any("fault of rsup itself" in record.message for record in caplog.records)
    assert [event.text for event in bench.store.events if event.kind == "Note"] == ["x"]


def test_event_numbers_have_no_gaps_and_each_commit_is_whole() -> None:
    bench = Bench()
    bench.start()
    bench.report("a", wire.RankExited(0, 1, 0, 9), wire.RanksGone(0, 1), first=3)
    assert [event.number for event in bench.store.events] == list(range(1, len(bench.store.events) + 1))


def test_the_memory_store_keeps_all_or_nothing() -> None:
    store, key = MemoryStore(), JobKey("local", "alice", "t1", 1)
    first: list[Record] = [EventLogged(key, 1, 0, 0, "A", "text"), JobSaved(key, b"", "running", 1, 1, 0, 0)]
    store.commit(first)
    store.commit(first)
    assert len(store.events) == 1 and store.live_jobs() == [(key, b"")]
    with pytest.raises(StoreError):
        store.commit([EventLogged(key, 2, 0, 0, "B", "text"), EventLogged(key, 1, 0, 0, "other", "text")])
    assert len(store.events) == 1
    assert store.last_run("local", "alice", "t1") == (key, b"") and store.last_run("local", "bob", "t1") is None


def test_phases_and_roles_are_what_the_records_say() -> None:
    bench = Bench()
    bench.start()
    assert bench.state.phase is Phase.RUNNING and {a.role for a in bench.state.agents.values()} == {Role.ACTIVE}


def test_an_agent_that_missed_the_end_and_the_next_run_gets_its_own_result() -> None:
    bench = Bench()
    bench.start()
    bench.report("a", wire.RankExited(0, 1, 0, 0), wire.RankExited(0, 1, 1, 0), first=3, acked=2)
    bench.restart()
    bench.join("b")
    (refusal,) = bench.join("a", epoch=1, job_id="t1", run=1)
    assert isinstance(refusal, wire.Refusal) and refusal.exit_code == 0 and "every rank exited 0" in refusal.message


def test_a_job_whose_script_the_scheduler_has_started_again_goes_on_under_its_name() -> None:
    """The machine of its first node was lost, its own supervisor with it: the store still has it running."""
    bench = Bench()
    bench.join("a", spec(**SLURM_JOB))
    bench.report("a", wire.StoreBound(0, 1, "h", 1), wire.AttemptStarted(0, 1, [11, 12]), first=1, acked=1)
    bench.restart()
    welcome, *_ = bench.join("b", spec(**SLURM_JOB, scheduler_start=1))
    assert isinstance(welcome, wire.Welcome) and (welcome.job_id, welcome.run) == ("4711", 1)
    (ended,) = [event for event in bench.store.events if event.kind == "JobEnded"]
    assert "the scheduler has started the job again (slurm-c-4711, restart 1): nothing is left of this run" in ended.text
    assert [row.outcome for row in bench.store.rows[AttemptSaved].values()] == ["stopped", "running"]
    assert not bench.store.rows.get(EvidenceSaved), "nobody is accused"
    assert bench.state.attempt == 2 and bench.state.agents["a"].role is Role.GONE

    beside, *_ = bench.join("c", spec(**SLURM_JOB, scheduler_start=1))
    assert isinstance(beside, wire.Welcome) and beside.job_id == "generated", "another step of the same start"
    assert bench.kinds().count("JobEnded") == 1

    _, order = bench.join("a", spec(**SLURM_JOB), attempt=1, epoch=1, job_id="4711", run=1)
    assert isinstance(order, wire.Order) and isinstance(order.commands[-1], wire.EndJob), "cut off, and alive after all"
