"""What must hold at every moment of a simulated run, and at its end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rsup.supervisor import wire
from rsup.supervisor.case_followup import MAX_RERUNS, MAX_RESTARTS, MAX_RETURNS
from rsup.supervisor.case_machine import MAX_OPEN
from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.records import (
    CaseSaved,
    CheckpointSaved,
    EventLogged,
    EvidenceSaved,
    JobKey,
    JobSaved,
    MetricsSaved,
    Record,
    StragglerSaved,
    SubjectSaved,
)
from rsup.supervisor.states import JobState, decode

if TYPE_CHECKING:
    from tests.simulation.sim_agent import SimAgent
    from tests.simulation.sim_world import World


class Watcher:
    """Looks at everything and decides nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: dict[JobKey, list[EventLogged]] = {}
        self.saved: dict[JobKey, JobSaved] = {}
        self.checkpoints: Counter[tuple[JobKey, int, int]] = Counter()
        self.acked: dict[str, int] = {}
        self.numbers: Counter[JobKey] = Counter()
        self.episodes: dict[tuple[JobKey, int], StragglerSaved] = {}
        self.cases: dict[str, CaseSaved] = {}
        self.evidence: dict[str, EvidenceSaved] = {}
        self.states: dict[str, str] = {}
        self.restarts: dict[JobKey, int] = {}
        self.stops: dict[tuple[str, int], int] = {}
        """Number of the command that told an agent to stop an attempt."""
        self.collecting: dict[JobKey, dict[str, int]] = {}
        """How many facts of each agent were known when stacks were last asked for."""

    def committed(self, records: list[Record]) -> None:
        """A transaction is on disk."""
        events = [record for record in records if isinstance(record, EventLogged)]
        moved = any(event.kind in ("CaseMoved", "CaseRestart") for event in events)
        in_process = any(event.kind.startswith("InProcess") or event.kind == "PhaseChange" for event in events)
        free = moved or (in_process and not any(event.kind in ("Restart", "InProcessGivenUp") for event in events))
        for record in records:
            if isinstance(record, EventLogged):
                story = self.events.setdefault(record.job, [])
                assert record.number == len(story) + 1, f"event {record.number} after {len(story)}"
                assert record.text, record
                story.append(record)
            elif isinstance(record, CheckpointSaved):
                self.checkpoints[record.job, record.attempt, record.iteration] += 1
            elif isinstance(record, MetricsSaved):
                self.numbers[record.job] += 1
            elif isinstance(record, StragglerSaved):
                self._episode(record)
            elif isinstance(record, CaseSaved):
                before = self.cases.get(record.case_id)
                assert before is None or before.verdict in ("", record.verdict), f"{before} became {record}"
                self.cases[record.case_id] = record
            elif isinstance(record, EvidenceSaved):
                self.evidence[record.fingerprint] = record
            elif isinstance(record, SubjectSaved):
                self.states[record.subject] = record.state
            elif isinstance(record, JobSaved):
                self._saved(record, free)
        for record in records:
            if isinstance(record, JobSaved):
                self._culprits_were_silent(record, [event for event in events if event.job == record.job])

    def answered(self, agent: SimAgent, answer: wire.CaseStored) -> None:
        """A rank hears that its report is kept: it is on disk, in the store or in its agent's spool."""
        stored = self.cases.get(answer.case_id)
        spooled = (fact for _, fact in agent.spool.pending() if isinstance(fact, wire.CaseReported))
        assert (stored is not None and (stored.verdict or not answer.verdict)) or any(
            (fact.report.case_id, fact.report.verdict) == (answer.case_id, answer.verdict) for fact in spooled
        ), f"{agent.agent_id} called {answer} stored: {stored}"

    def _episode(self, record: StragglerSaved) -> None:
        """Episodes are numbered through, and go on until they are over."""
        before = self.episodes.get((record.job, record.episode))
        if before is None:
            assert record.episode == 1 + sum(job == record.job for job, _ in self.episodes), record
        else:
            assert (before.attempt, before.rank, before.device) == (record.attempt, record.rank, record.device), record
            assert before.to_us is None and record.num_reports >= before.num_reports, f"{before} became {record}"
        assert "none" not in record.device and record.node != "nowhere", "a rank's word about another's device"
        self.episodes[record.job, record.episode] = record

    def _cases_are_bounded(self, state: JobState) -> None:
        assert len(state.cases) <= MAX_OPEN and state.case_restarts <= MAX_RESTARTS
        for case in state.cases:
            assert case.num_reruns <= MAX_RERUNS + state.budget.restarts and case.num_returns <= MAX_RETURNS, case

    def _culprits_were_silent(self, record: JobSaved, events: list[EventLogged]) -> None:
        """No rank is ended alone that was heard from since stacks were asked for."""
        agents = self.world.agents
        for event in events:
            if event.kind == "TakeStacks":
                self.collecting[record.job] = {agent_id: self.acked.get(agent_id, 0) for agent_id in agents}
            elif event.kind == "EndRanks":
                known = self.collecting[record.job]
                news = [
                    fact for name, agent in agents.items() for fact in agent.facts[known.get(name, 0) : self.acked.get(name, 0)]
                ]
                told = [
                    f.rank for f in news if isinstance(f, wire.EntryBegun | wire.RankFaulted) and f.attempt == event.attempt
                ]
                assert event.rank not in told, f"{event.text}, and it was heard from"

    def _saved(self, record: JobSaved, free: bool) -> None:
        before = self.saved.get(record.job)
        if before is not None:
            assert record.epoch >= before.epoch, "an epoch fell"
            assert record.attempt >= before.attempt, "an attempt fell"
            assert not (before.phase == "ended" and record.phase != "ended"), "an ended run came back"
            if before.phase == "ended":
                assert record.exit_code == before.exit_code, "a result changed"
        self.saved[record.job] = record
        state = decode(record.state)
        for agent_id, agent in state.agents.items():
            assert agent.acked_fact >= self.acked.get(agent_id, 0), "an acknowledgement was taken back"
            assert [c.sequence for c in agent.outbox] == list(
                range(agent.last_command - len(agent.outbox) + 1, agent.last_command + 1)
            ), "a hole in an outbox"
            self.acked[agent_id] = agent.acked_fact
        self._cases_are_bounded(state)
        if free:
            assert state.budget.restarts == self.restarts.get(record.job, 0), "a case, restart in process or phase has cost one"
        self.restarts[record.job] = state.budget.restarts
        policy = state.spec.policy
        if policy.mode == "count":
            assert state.budget.restarts <= policy.max_restarts, "more restarts than --max-restarts"
        else:
            assert state.budget.without_progress <= policy.no_progress_limit

    def sent(self, agent: SimAgent, message: wire.ToAgent) -> None:
        """The supervisor sends: only what is on disk."""
        if isinstance(message, wire.Order | wire.Welcome):
            assert message.acked_fact <= self.acked.get(agent.agent_id, 0), "acknowledged before it was committed"
            assert message.acked_fact <= agent.spool.last, "acknowledged what was never said"
        for command in message.commands if isinstance(message, wire.Order) else ():
            if isinstance(command, wire.StopAttempt):
                self.stops.setdefault((agent.agent_id, command.attempt), command.sequence)
            elif isinstance(command, wire.RestartInProcess):
                stop = self.stops.get((agent.agent_id, command.attempt), command.sequence)
                assert command.sequence <= stop, f"{command} after StopAttempt"

    def look(self) -> None:
        """After every event."""
        live: dict[str, set[int]] = {}
        for agent in self.world.agents.values():
            attempt = agent.live_attempt
            if attempt:
                live.setdefault(agent.job_id, set()).add(attempt)
        for job_id, attempts in live.items():
            assert len(attempts) == 1, f"ranks of attempts {attempts} of {job_id} live at once"

    def check_end(self) -> None:
        """When all is over: nothing lost, nothing doubled, one result."""
        for key, record in self.saved.items():
            assert record.phase == "ended", f"{key} is {record.phase}"
        assert all(count == 1 for count in self.checkpoints.values()), f"a fact was applied twice: {self.checkpoints}"
        for agent in self.world.agents.values():
            self._check_facts(agent)
            assert len(agent.starts) == len(set(agent.starts)), f"{agent.agent_id} started an attempt twice: {agent.starts}"
        self._check_cases()
        self._check_results()

    def _check_cases(self) -> None:
        told = Counter(e.data["case_id"] for story in self.events.values() for e in story if e.kind == "CaseVerdict")
        for case_id, case in self.cases.items():
            assert told[case_id] == bool(case.verdict), f"{case_id} {case.verdict!r} was told {told[case_id]} times"
            exit_code = self.saved[case.job].exit_code
            assert case.verdict or (exit_code and case.action == "elsewhere"), f"{case_id} is open for ever: {case}"
        for agent in self.world.agents.values():
            for fact in agent.facts[: self.acked.get(agent.agent_id, 0)]:
                if isinstance(fact, wire.CaseReported) and fact.report.verdict:
                    assert self.cases[fact.report.case_id].verdict, f"the verdict of {fact.report.case_id} was lost"
        self._check_evidence()

    def _check_evidence(self) -> None:
        """A device has as much evidence against it as there are cases that accuse it, whatever was sent twice."""
        closed = [case for case in self.cases.values() if case.verdict not in ("", "application", "undecided")]
        accused = Counter(
            device
            for case in closed
            for device in case.accused or {str(one["device"]) for one in case.findings if case.verdict == "transient"}
        )
        found: Counter[str] = Counter()
        for one in self.evidence.values():
            if one.source == "verdict" and one.kind == "device" and one.code != FOLLOWED_RANK:
                found[one.subject] += one.count
        assert found == accused, f"evidence {found}, accusations {accused}"
        self._check_followed_ranks()

    def _check_followed_ranks(self) -> None:
        """Where a fault has followed its rank, the second board is not accused by it, and the first no more than suspect."""
        proofs = [one for one in self.evidence.values() if one.source == "verdict" and one.code == "persistent"]
        for case in self.cases.values():
            if case.note.startswith("does not count"):
                assert not any(one.case_id == case.case_id for one in proofs), f"{case} counts"
                assert any(one.code == FOLLOWED_RANK for one in self.evidence.values()), f"nothing was taken back for {case}"
        taken_back = {one.subject: one.case_id for one in self.evidence.values() if one.code == FOLLOWED_RANK}
        for device, case_id in taken_back.items():
            if all(one.count == 1 and one.case_id == case_id for one in proofs if one.subject == device):
                assert self.states[device] in ("watch", "suspect"), f"{device} is {self.states[device]}"

    def _check_facts(self, agent: SimAgent) -> None:
        story = [event for events in self.events.values() for event in events if event.node == agent.info.node]
        told = Counter(event.text for event in story if event.kind == "Note")
        delivered = self.acked.get(agent.agent_id, 0)
        said = Counter(fact.text for fact in agent.facts[:delivered] if isinstance(fact, wire.Note))
        assert said == told, (
            f"{agent.agent_id} said {said - told} that is not told, and {told - said} is told that it did not say"
        )
        self._check_numbers(agent)
        exits = sum(isinstance(fact, wire.RankExited) for fact in agent.facts[:delivered])
        logged = sum(event.kind == "RankExited" for event in story)
        assert exits == logged, f"{agent.agent_id}: {exits} exits delivered, {logged} in the story"
        if agent.gone and agent.refused is None:
            assert not len(agent.spool), f"the keeper of {agent.agent_id} could not deliver"

    def _check_numbers(self, agent: SimAgent) -> None:
        """What was taken of numbers is no more than was told: nothing counts twice."""
        key = next((key for key in self.saved if (key.job_id, key.run) == (agent.job_id, agent.run)), None)
        if key is not None:
            agents = [one for one in self.world.agents.values() if (one.job_id, one.run) == (key.job_id, key.run)]
            told = sum(isinstance(fact, wire.MetricsReported) for one in agents for fact in one.facts)
            assert self.numbers[key] <= told, f"{self.numbers[key]} were taken of {told}"

    def _check_results(self) -> None:
        for key, record in self.saved.items():
            for agent in self.world.agents.values():
                if agent.job_id != key.job_id or agent.run != key.run or agent.exit_code is None:
                    continue
                own_word = agent.result is None or "could not be told" in agent.result.reason or agent.state.signum
                requeued = agent.exit_code == wire.EXIT_REQUEUE
                # it said Hello twice while nobody answered: the first was refused, the second came when there was room
                refused = agent.refused is not None and agent.exit_code == agent.refused.exit_code
                assert own_word or requeued or refused or agent.exit_code == record.exit_code, (
                    f"{agent.agent_id} exits {agent.exit_code}, the job {record.exit_code}: {record.reason}"
                )
