"""A simulated agent: the real process machine and the real spool, over simulated processes and a simulated link.

The link does what `launcher.supervisor_client` does: `Hello` until welcomed and after 3 s of silence, facts in order, sent
again after 2 s without an acknowledgement, numbered anew when a supervisor with another history welcomes us.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rsup.launcher import process_events as ev
from rsup.launcher.case_relay import CaseRelay
from rsup.launcher.device_placement import place
from rsup.launcher.process_ending import HAS_PROCESSES
from rsup.launcher.process_machine import decide, new_state
from rsup.launcher.process_state import Settings
from rsup.launcher.spool import Spool
from rsup.launcher.visible_devices import VisibleList
from rsup.supervisor import wire
from rsup.supervisor.wire import MetricBin
from tests.simulation.sim_training import SimRank, Training

if TYPE_CHECKING:
    from tests.simulation.sim_world import World

TICK_S = 0.5
SILENCE_S = 3.0
RESEND_S = 2.0


class FileSpool(Spool):
    """A spool whose file is simulated too: it outlives the agent as the object does."""

    @property
    def is_on_disk(self) -> bool:
        return True


class SimAgent:
    """One agent and, after its death, its keeper (`gone`)."""

    def __init__(self, world: World, info: wire.AgentInfo, spec: wire.JobSpec) -> None:
        self.world, self.info, self.spec = world, info, spec
        settings = Settings(
            spec.stop_grace_s, spec.supervisor_grace_s, spec.fence_timeout_s, spec.join_timeout_s, node=info.node
        )
        self.state = new_state(settings, self.moment())
        self.spool = FileSpool(None)
        self.cases = CaseRelay(self._answer_rank, self.spool, lambda: world.now_s)
        self.alive = True
        self.gone = False
        self.result: wire.JobResult | None = None
        self.exit_code: int | None = None
        self.refused: wire.Refusal | None = None
        self.ranks: list[SimRank] = []
        self.facts: list[wire.AnyFact] = []
        """All that it ever put into its spool."""
        self.starts: list[tuple[int, int]] = []
        """Run and attempt of each."""
        self.welcomed = False
        self.job_id, self.run = "", 0
        self.instance = ""
        self.heard_s = -1e9
        self.hello_s = -1e9
        self.sent = 0
        self.acked_seen = 0
        self.ack_moved_s = 0.0
        self.num_notes = 0
        self.dice = random.Random(f"numbers of {info.agent_id}")  # of its own: the seeds' worlds stay what they were
        self.tick()

    @property
    def agent_id(self) -> str:
        return self.info.agent_id

    @property
    def live_attempt(self) -> int:
        """The attempt of which a rank lives here, 0: none."""
        return self.state.attempt if any(rank.alive for rank in self.ranks) else 0

    @property
    def training(self) -> Training:
        """The script that its ranks run."""
        assert self.state.start is not None
        return self.world.training_of(self.state.start.job_id, self.state.start.run)

    def moment(self) -> ev.Moment:
        return ev.Moment(self.world.now_s, self.world.now_us())

    # ------------------------------------------------------------------------------------------------------- the machine

    def feed(self, event: ev.Event) -> None:
        """Give the machine an event and perform what it asks for."""
        if not self.alive or self.exit_code is not None:
            return
        self.state, actions = decide(self.state, event, self.moment())
        for action in actions:
            self._perform(action)
        if any(isinstance(action, ev.AddFact) for action in actions):
            self.send_facts()

    def _later(self, delay_s: float, event: ev.Event) -> None:
        self.world.after(delay_s, lambda: self.feed(event))

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.AddFact():
                self.cases.told(self.spool.append(action.fact), action.fact)
                self.facts.append(action.fact)
            case ev.BindStore():
                if self.world.random.random() < self.world.chaos.start_failure:
                    self._later(0.05, ev.StoreFailure(action.attempt, "port 29500 is in use"))
                else:
                    self._later(0.05, ev.StoreReady(action.attempt, self.info.host, 29500))
            case ev.SpawnRanks():
                self._spawn(action.command)
            case ev.ReplaceRank():
                self._replace(action)
            case ev.TellPeers():
                attempt = self.state.attempt
                self.world.after(0.01, lambda: self.training.restarts.leave(attempt))
            case ev.SignalRanks():
                for local_rank in action.local_ranks:
                    self._signal(self.ranks[local_rank], int(action.signum))
            case ev.ReapAll():
                self._later(0.05, ev.AllReaped(action.attempt))
            case ev.ObserveSections():
                sections = {"step": wire.SectionSeen(0.5, 20)}
                self.feed(ev.SectionsRead(wire.SectionsObserved(self.world.now_us(), action.attempt, sections, closing=True)))
            case ev.CollectStacks():
                if self.world.random.random() < 0.8:
                    stacks = tuple(self._stack(rank) for rank in self.ranks if rank.alive)
                    self._later(0.3, ev.StacksReady(action.attempt, stacks))
            case ev.AskRanks():
                self._ask(action)
            case ev.WriteResult():
                self.result = action.result
            case ev.Exit():
                self._exit(action.code)
            case _:
                pass

    def _spawn(self, command: wire.StartAttempt) -> None:
        self.starts.append((command.run, command.attempt))
        assert not any(rank.alive for rank in self.ranks)
        pids = tuple(self.world.next_pid() for _ in range(command.num_ranks))
        placed = place(VisibleList(), self.info.devices, command.num_ranks, command.avoid, command.first_rank)
        devices = [device.uuid for device in placed.devices]
        self.ranks = [SimRank(self, command.first_rank + i, pid, devices[i]) for i, pid in enumerate(pids)]
        self.feed(ev.RanksSpawned(command.attempt, pids))
        training = self.world.training_of(command.job_id, command.run)
        for i, rank in enumerate(self.ranks):
            hello = wire.RankHello(rank.rank, command.attempt, rank.pid, rank.device, training.plan.takes_requests)
            self.feed(ev.RankMessage(command.attempt, i, hello))
        training.add(command.attempt, command.world_size, self.ranks, command.phase)

    def _replace(self, action: ev.ReplaceRank) -> None:
        """A new process for a rank that is dead."""
        local_rank, attempt = action.local_rank, action.attempt
        old = self.ranks[local_rank]
        assert not old.alive, f"two processes of rank {old.rank}"
        if self.world.is_bad and self.world.random.random() < self.world.chaos.start_failure:
            self._later(0.05, ev.ReplaceFailure(attempt, local_rank, "no memory"))
            return
        new = self.ranks[local_rank] = SimRank(self, old.rank, self.world.next_pid(), old.device)
        self._later(0.02, ev.RankReplaced(attempt, local_rank, new.pid))
        self.training.restarts.joins(attempt, new)

    def _signal(self, rank: SimRank, signum: int) -> None:
        if rank.alive and (signum == 9 or not rank.hung):
            self.die(rank, 128 + signum, signal=signum, after_s=0.02)

    def _stack(self, rank: SimRank) -> wire.RankStack:
        text = "time.sleep" if rank.hung else "torch.distributed.all_reduce"
        return wire.RankStack(rank.rank, rank.pid, "py-spy", text, "S", self.training.iteration)

    def _ask(self, action: ev.AskRanks) -> None:
        training = self.training
        training.leave_asked = training.leave_asked or action.leave
        for local_rank in action.local_ranks:
            done = wire.RankRequestDone(action.request_id, training.iteration)
            self._later(0.2, ev.RankMessage(self.state.attempt, local_rank, done))

    def _answer_rank(self, rank: int, attempt: int, answer: wire.CaseStored) -> None:
        self.world.watcher.answered(self, answer)
        if self.alive and self.state.start is not None and any(one.rank == rank and one.alive for one in self.ranks):
            self.training.cases.stored(attempt, answer)

    def _exit(self, code: int) -> None:
        self.exit_code = code
        for rank in self.ranks:
            rank.alive = False
        self.send_facts(again=True)
        if not len(self.spool):
            self.world.to_supervisor(self, wire.Bye(self.agent_id))
        if not self.state.told or len(self.spool):  # nobody may know: its keeper stays until somebody does
            self.world.after(1.0, self._become_keeper)

    # ------------------------------------------------------------------------------------------------------------- ranks

    def die(self, rank: SimRank, exit_code: int, *, signal: int = 0, error: str = "", after_s: float = 0.0) -> None:
        """A rank's process ends."""

        def now() -> None:
            if rank.alive and self.alive:
                rank.alive = False
                local_rank = self.ranks.index(rank)
                iteration = self.training.iteration
                attempt = self.state.attempt
                self.feed(ev.RankDied(attempt, local_rank, exit_code, signal, iteration, "step", error))
                if exit_code:
                    self.training.restarts.died(attempt)

        self.world.after(after_s, now)

    def commit_checkpoint(self, attempt: int, local_rank: int, iteration: int) -> None:
        self.feed(ev.RankMessage(attempt, local_rank, wire.RankCheckpoint(iteration, f"/ckpt/{iteration}")))

    def notice_overdue(self, rank: SimRank, iteration: int, attempt: int) -> None:
        fact = wire.RankOverdue(
            self.world.now_us(),
            attempt,
            rank.rank,
            "step",
            3.1,
            3.0,
            iteration - (1 if rank.hung else 0),
            calculated=self.world.chaos.calculated,
        )
        self.feed(ev.Overdue((fact,)))

    def kill(self, keeper: bool) -> None:
        """SIGKILL of the agent, or the end of its node (no keeper): its ranks die with it."""
        if not self.alive or self.exit_code is not None:
            return
        self.alive = False
        for rank in self.ranks:
            rank.alive = False
        if keeper:
            self.world.after(0.5, self._become_keeper)

    def _become_keeper(self) -> None:
        if self.state.joined is False:
            return
        self.gone = True
        self.refused = None
        self.welcomed = False
        self.info = wire.msgspec.structs.replace(self.info, gone=True)
        fact = wire.AgentGone(self.world.now_us(), "the launcher ended without a word")
        self.spool.append(fact)
        self.facts.append(fact)
        self.tick()

    def _tell_numbers(self) -> None:
        """A rank tells numbers of the training, and who is slow; both go back with the training."""
        if not self.live_attempt or not self.training.iteration:
            return
        local_rank = self.dice.randrange(len(self.ranks))
        done, rank = self.training.iteration, self.ranks[local_rank]
        value = MetricBin.of(done, self.world.now_us(), 8 * done, self.dice.choice([1.0, float("nan"), 5e-324]))
        series = {name: [value] for name in ("loss", f"of rank {rank.rank}")}
        slow = [wire.Straggler(0, "GPU-none", "nowhere", "step", 2.0, 0.5)]
        report = wire.StragglerReport(done, done, 1, stragglers=slow if self.dice.random() < 0.9 else [])
        for message in (wire.RankMetrics("training", series), wire.RankStragglers(report)):
            self.feed(ev.RankMessage(self.state.attempt, local_rank, message))

    # -------------------------------------------------------------------------------------------------------------- link

    @property
    def finished(self) -> bool:
        """Nothing more will come of it, for now."""
        if self.gone:
            return not len(self.spool) or self.refused is not None
        return not self.alive or self.exit_code is not None

    @property
    def is_keeper(self) -> bool:
        """Only its keeper is left."""
        return self.gone and not self.finished

    def tick(self) -> None:
        """The loop's turn."""
        if self.finished:
            return
        now_s = self.world.now_s
        if self.welcomed and now_s - self.heard_s >= SILENCE_S:
            self.welcomed = False
        if not self.gone:
            self.feed(ev.Tick())
            self.cases.answer()
            if self.world.random.random() < 0.02 and not self.finished:
                self.num_notes += 1
                self.feed(ev.Noticed("info", f"note {self.num_notes} of {self.agent_id}"))
            if self.dice.random() < 0.1 and not self.finished:
                self._tell_numbers()
        if not self.finished:
            self._say()
            self.world.after(TICK_S, self.tick)

    def _say(self) -> None:
        if not self.welcomed:
            self.hello_s = self.world.now_s
            attempt = self.state.attempt if self.state.phase in HAS_PROCESSES and not self.gone else 0
            speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
            hello = wire.Hello(speaks, wire.RELEASE, self.info, self.spec, self.state.epoch, attempt, self.job_id, self.run)
            self.world.to_supervisor(self, hello)
            return
        now_s, acked = self.world.now_s, self.spool.acked
        if acked != self.acked_seen or self.sent <= acked:
            self.acked_seen, self.ack_moved_s = acked, now_s
        again = now_s - self.ack_moved_s >= RESEND_S
        if again:
            self.ack_moved_s = now_s
        if not self.send_facts(again=again) and int(self.world.now_s / TICK_S) % 2 == 0:
            self.world.to_supervisor(self, self._report())

    def _report(self, first: int = 0, facts: list[wire.AnyFact] | None = None) -> wire.Report:
        beats = []
        training = self.training if self.state.start is not None else None
        if training is not None and training.plan.shows_iterations:
            done = training.iteration
            beats = [wire.RankBeat(r.rank, r.pid, done - r.hung, 0.1, 0.1) for r in self.ranks if r.alive]
        return wire.Report(self.agent_id, self.state.epoch, self.state.last_command, first, facts or [], beats)

    def send_facts(self, again: bool = False) -> bool:
        """Send what has not been sent, or all that is not acknowledged."""
        if not self.welcomed:
            return False
        pending = self.spool.pending(self.spool.acked if again else max(self.sent, self.spool.acked), max_facts=20)
        if not pending:
            return False
        self.sent = pending[-1][0]
        self.world.to_supervisor(self, self._report(pending[0][0], [fact for _, fact in pending]))
        return True

    def receive(self, message: wire.ToAgent) -> None:
        """A message has arrived."""
        if self.finished:
            return
        self.heard_s = self.world.now_s
        match message:
            case wire.Welcome():
                known = self.instance == message.supervisor.instance
                if message.acked_fact > self.spool.last or (message.acked_fact < self.spool.acked and not known):
                    self.spool.rebase(message.acked_fact)
                else:
                    self.spool.acknowledge(message.acked_fact)
                self.instance, self.job_id, self.run = message.supervisor.instance, message.job_id, message.run
                self.welcomed = True
                self.feed(ev.Welcomed(message))
                self.send_facts(again=True)
            case wire.Refusal():
                self.refused = message
                self.feed(ev.Refused(message))
            case wire.Order():
                self.spool.acknowledge(message.acked_fact)
                self.feed(ev.OrderArrived(message))
                if message.commands and not self.finished:
                    self.world.to_supervisor(self, self._report())
        self.cases.answer()
