"""The agent: the `rsup launch` process of one node. The shell around `process_machine`.

One loop in one thread: the link to the supervisor, the ranks' pidfds and sockets, signals, the keeper, and a tick every
100 ms that samples the heartbeat board. Each of them becomes an event; the machine's actions are performed at once, in order,
and their results are the next events. Nothing of the loop waits for a rank, a disk or the network.
"""

import os
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from rsup.launcher import process_events as ev
from rsup.launcher.agent_keeper import AgentKeeper
from rsup.launcher.agent_parts import open_parts, where_to_look
from rsup.launcher.case_relay import CaseRelay
from rsup.launcher.error_file import write_error_file
from rsup.launcher.event_log import JobReporter
from rsup.launcher.failure_report import exit_text, first_failure, signal_name
from rsup.launcher.file_timers import kill_in_sessions, open_timers
from rsup.launcher.health_watch import HealthWatch
from rsup.launcher.iteration_file import IterationFile
from rsup.launcher.keeper_process import DELIVER_WITHIN_S
from rsup.launcher.launch_options import LaunchOptions, speaks_for_all
from rsup.launcher.memory_kills import MemoryKills
from rsup.launcher.nvrx_service import NvrxService
from rsup.launcher.orphans import OrphanWatch
from rsup.launcher.process_ending import HAS_PROCESSES
from rsup.launcher.process_machine import decide, new_state
from rsup.launcher.process_state import Phase
from rsup.launcher.rank_environment import SessionPlaces, threads_notice
from rsup.launcher.rank_group import RankGroup
from rsup.launcher.rank_seats import RankSeats, choose_seats
from rsup.launcher.result_file import failures_of, write_results
from rsup.launcher.signal_forwarding import pass_on, told_text
from rsup.launcher.slurm.ending import nodes_to_avoid, settle_launch
from rsup.launcher.slurm.node_watch import NodeWatch
from rsup.launcher.stacks import take_stacks
from rsup.launcher.standby import StandbyPool
from rsup.launcher.stop_signals import RESIZED
from rsup.launcher.suspension import SUSPENDS, suspend
from rsup.supervisor import wire
from rsup.supervisor.wire import RsupError

TICK_S = 0.1
REAP_POLL_S = 0.01
REPORT_EVERY_S = 1.0
SECTIONS_EVERY_S = 10.0
FAREWELL_S = 0.5
MAX_LOOP_FAULTS = 10
ITERATION_FILE_WITHIN_S = 0.2


def run(options: LaunchOptions) -> int:
    """Run this node's part of a job to its end and return the launch's exit code. Main thread only.

    Raise `RsupError`, in one line, for what keeps the agent from starting.
    """
    with ExitStack() as stack:
        agent = Agent(options, stack)
        code = agent.run()
    settle_launch(options, agent.result_to_settle, leaves_others=agent.leaves_others)
    return code


class Agent:
    """One `rsup launch`. `stack` closes what it opened, in reverse order, whatever happens."""

    def __init__(self, options: LaunchOptions, stack: ExitStack) -> None:
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._events: deque[ev.Event] = deque()
        self._exit_code: int | None = None
        self.result_to_settle: wire.JobResult | None = None
        """The job's, on the node that tells the scheduler of it, once the job has ended."""
        self.leaves_others = False
        """This launcher ends by itself: those of other nodes may go on, and so would the scheduler's job."""
        self._group: RankGroup | None = None
        self._has_new_facts = False
        self._said_where = False
        self._said_notice = ""
        self._said_passed_on: set[str] = set()
        self._stacks: queue.SimpleQueue[ev.StacksReady] = queue.SimpleQueue()
        self._next_report_s = self._next_sections_s = 0.0
        self._num_faults = 0
        self._why_left = "the launcher failed"
        self._handed_over = False

        self._parts = parts = open_parts(
            options, stack, succeeded=lambda: self._exit_code == 0, keep_spool=lambda: self._handed_over
        )
        self._agent_id, self._places = parts.agent.agent_id, parts.places
        self._decider, self._client, self._spool = parts.decider, parts.client, parts.spool
        self._logs, self._board, self._link, self._signals = parts.logs, parts.board, parts.link, parts.signals
        self._cases = CaseRelay(self._link.send, self._spool)
        self._state = new_state(parts.settings, self._now())
        self._reporter = JobReporter(options)
        stack.callback(self._reporter.close)
        self._timers = open_timers(os.environ, self._places.stacks_dir)
        if self._timers:
            stack.callback(self._timers.close)
        self._keeper = self._start_keeper()
        self._orphans = OrphanWatch(self._agent_id)
        self._memory_kills = MemoryKills()
        stack.callback(self._let_keeper_go)
        self._standbys = StandbyPool(options, self._places.stacks_dir)
        stack.callback(self._standbys.close)
        self._nvrx = NvrxService(
            self._places.nvrx_dir, options.nproc_per_node, self._board.path, self._selector, self._hear_keeper
        )
        stack.callback(self._nvrx.close)
        self._health = HealthWatch(
            parts.agent.devices,
            parts.inventory.has_gpus,
            options.device_inventory,
            self._selector,
            lambda readings: self._events.append(ev.HealthRead(tuple(readings), parts.agent.boot_id)),
            lambda note: self._events.append(ev.Noticed("warning", note)),
        )
        stack.callback(self._health.close)
        iteration_file = options.checkpoint_iteration_file
        self._iteration_file = IterationFile(iteration_file) if iteration_file else None
        if self._iteration_file:
            stack.callback(self._iteration_file.close)
        stack.callback(self._end_ranks)

        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stack.callback(os.close, self._wake_fd)
        self._node_watch = NodeWatch(options.slurm, lambda: os.eventfd_write(self._wake_fd, 1)) if options.slurm else None
        if self._node_watch:
            stack.callback(self._node_watch.close)
        self._watch(self._client, self._hear_supervisor)
        self._watch(self._signals, self._hear_signals)
        self._watch(self._link, self._hear_ranks)
        self._watch(self._wake_fd, self._hear_threads)
        if self._board.problem:
            self._say(f"rsup: {self._board.problem}; ranks run unwatched")
            self._events.append(ev.Noticed("warning", self._board.problem))

    # --------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> int:
        """Loop until the machine says `Exit`."""
        next_tick_s = time.monotonic()
        while self._exit_code is None:
            try:
                next_tick_s = self._turn(next_tick_s)
            except RsupError:
                raise
            except Exception as error:  # the outermost frame: a fault of ours becomes an event, training goes on
                self._num_faults += 1
                if self._num_faults > MAX_LOOP_FAULTS or self._options.debug:
                    raise
                text = f"internal error of the launcher: {type(error).__name__}: {error}"
                self._say(f"rsup: {text}; please report it")
                self._events.append(ev.Noticed("error", text))
        self._say_farewell()
        return self._exit_code

    def _turn(self, next_tick_s: float) -> float:
        wait_s = next_tick_s - time.monotonic()
        if self._group and self._group.is_quick:
            wait_s = min(wait_s, REAP_POLL_S)
        for key, _ in self._selector.select(max(0.0, wait_s)):
            key.data()
        self._hear_nvrx()
        now_s = time.monotonic()
        if now_s >= next_tick_s:
            next_tick_s = now_s + TICK_S
            self._tick(now_s)
        self._go_on_reaping()
        self._decide_all()
        if self._has_new_facts:
            self._report([])
        return next_tick_s

    def _decide_all(self) -> None:
        while self._events and self._exit_code is None:
            event = self._events.popleft()
            self._state, actions = decide(self._state, event, self._now())
            for action in actions:
                _PERFORM[type(action)](self, action)

    def _now(self) -> ev.Moment:
        return ev.Moment(time.monotonic(), wire.now_us())

    def _tick(self, now_s: float) -> None:
        self._events.append(ev.Tick())
        self._decide_all()  # a gap must be known before the board is looked at
        if line := self._decider.look_after():
            self._say(line)
            if self._state.joined:
                self._events.append(ev.Noticed("warning", line.removeprefix("rsup: ")))
        self._keeper.flush()
        self._hear_supervisor()
        self._link.flush()
        self._nvrx.look_after()
        self._look_at_board(now_s)
        self._look_at_timers()
        self._look_after_standbys(now_s)
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + REPORT_EVERY_S
            self._look_at_iteration_file()
            self._events.extend(ev.Noticed("warning", note) for note in self._logs.take_notes())
            standbys = self._standbys
            for level, note in standbys.take_notes():
                self._events.append(ev.Noticed(level, note, None, standbys.num_ready, standbys.size_bytes))
            self._health.look_after(is_running=self._state.attempt > 0)
            self._report(self._board.beats())
            self._orphans.look(now_s, self._group.sessions if self._group else (), self._helpers)

    def _look_at_board(self, now_s: float) -> None:
        group, state = self._group, self._state
        if group is None or state.phase not in HAS_PROCESSES or not state.alive:
            return
        overdue = self._board.look(group, state, wire.now_us())
        if overdue:
            self._events.append(ev.Overdue(tuple(overdue)))
        if now_s >= self._next_sections_s:
            self._next_sections_s = now_s + SECTIONS_EVERY_S
            self._read_sections(closing=False)

    def _look_after_standbys(self, now_s: float) -> None:
        group, state = self._group, self._state
        if group is None or not self._standbys.is_due(now_s):
            return
        beats, entering = self._board.beats(), group.entering
        iterations = [beat.iteration for beat in beats if beat.iteration]
        is_whole = all(rank.alive or rank.settled for rank in state.ranks)
        enters = any(beat.rank in entering and beat.iteration == 0 for beat in beats)
        slots = range(group.start.num_ranks)
        self._standbys.tick(
            now_s,
            [state.ranks[i].pid for i in state.alive],
            {i: group.seat_of(os.environ, i) for i in slots},
            can_restart=self._can_restart(),
            is_running=state.phase is Phase.RUNNING and is_whole and not enters,
            has_stepped=bool(iterations) and min(iterations) > 1,
        )

    def _can_restart(self) -> bool:
        """Whether standbys could be of use. A guess: the decider decides, by more than the number of restarts."""
        start, options = self._state.start, self._options
        if start is None or self._state.signum or self._state.ending:
            return False
        if any(rank.entered for rank in self._state.ranks):
            return True  # a dead rank alone gets a new process
        return start.attempt <= start.max_restarts or (options.restart == "auto" and not start.max_restarts)

    def _look_at_timers(self) -> None:
        group = self._group
        for expired in self._timers.expired(time.time()) if self._timers and group else ():
            assert group is not None
            leaders = [process.pid for process in group.processes]
            session = kill_in_sessions(expired, leaders)
            if session is not None:
                rank = group.start.first_rank + leaders.index(session)
                what = exit_text(0, expired.signum)
                text = f"rank {rank}: its timer {expired.scope!r} is over; sent {what} to process {expired.pid}"
                self._say(f"rsup: {text}")
                self._events.append(ev.Noticed("error", text, rank))

    def _read_sections(self, *, closing: bool) -> None:
        fact = self._board.sections(self._state.attempt, wire.now_us(), closing)
        if fact:
            self._events.append(ev.SectionsRead(fact))

    def _report(self, beats: list[wire.RankBeat]) -> None:
        self._has_new_facts = False
        state = self._state
        attempt = state.attempt if state.phase in HAS_PROCESSES else 0
        start, running = state.start, None
        if attempt and start is not None:
            running = wire.RunningAttempt(start.first_rank, start.group_rank, start.world_size, start.group_world_size)
        self._client.send_report(state.epoch, state.last_command, beats, attempt, running)

    # ------------------------------------------------------------------------------------------------- what is heard

    def _watch(self, source: Any, callback: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _hear_supervisor(self) -> None:
        for message in self._client.poll():
            if isinstance(message, wire.Order):
                for notice in message.notices:
                    self._say(f"rsup: {notice}")
                self._events.append(ev.OrderArrived(message))
                if self._node_watch:
                    self._node_watch.look(message.silent)
            elif isinstance(message, wire.Refusal):
                self._events.append(ev.Refused(message))
            elif isinstance(message, wire.Welcome):
                self._events.append(ev.Welcomed(message))
                self._keeper.use(self._client, self._decider.key, message.epoch)
                self._say_where(message)
        self._cases.answer()

    def _hear_signals(self) -> None:
        for signum, stops in self._signals.read():
            if signum == SUSPENDS and not stops:
                suspend(self._group.processes if self._group else ())
            elif signum != RESIZED:
                self._events.append(ev.SignalArrived(signum, stops))
            elif self._logs.resize() and self._group:
                self._group.tell_resized()

    def _hear_ranks(self) -> None:
        start = self._state.start
        for hello, message in self._link.read():
            if start is None or hello.attempt != start.attempt:
                continue
            if isinstance(message, wire.RankHello):
                self._link.send(hello.rank, hello.attempt, wire.LimitsNow(self._state.limits))
                if self._state.switches:
                    self._link.send(hello.rank, hello.attempt, wire.SwitchesNow(self._state.switches))
            local_rank = hello.rank - start.first_rank
            if 0 <= local_rank < start.num_ranks:
                self._events.append(ev.RankMessage(hello.attempt, local_rank, message))

    def _hear_nvrx(self) -> None:
        self._events.extend(ev.RankMessage(said.attempt, said.local_rank, said.message) for said in self._nvrx.take_messages())

    def _hear_death(self, group: RankGroup, local_rank: int) -> None:
        process = group.processes[local_rank]
        if process.exit_status() is None:
            return
        self._selector.unregister(process)
        self._hear_ranks()  # what it said before it died
        self._hear_nvrx()
        iteration, section = self._board.last_words(group, local_rank)
        death = group.death_of(process, iteration, section)
        assert death is not None
        killer = self._memory_kills.killer_of(death.signal)
        self._events.append(msgspec.structs.replace(death, killer=killer))

    def _hear_threads(self) -> None:
        os.eventfd_read(self._wake_fd)
        while not self._stacks.empty():
            self._events.append(self._stacks.get())
        if self._node_watch:
            self._events.extend(ev.NodeGivenUp(node, why) for node, why in self._node_watch.take())

    def _hear_keeper(self, notice: str) -> None:
        self._say(f"rsup: {notice}")
        self._events.append(ev.Noticed("warning", notice))

    def _start_keeper(self) -> AgentKeeper:
        places = self._places
        files = (
            *(self._board.path, places.rank_socket, places.stacks_dir, places.nvrx_dir),
            *(self._logs.temporary_dir, places.logs),
        )
        remove = [path for path in files if path]
        return AgentKeeper(self._agent_id, places, remove, self._selector, self._hear_keeper)

    @property
    def _is_settled(self) -> bool:
        """Whether the supervisor knows all that it will ever hear of us: it never knew us, or it ended the job and has our
        last facts."""
        return not self._state.joined or (self._state.told and not len(self._spool))

    def _let_keeper_go(self) -> None:
        if self._is_settled:
            self._keeper.dismiss()
            return
        self._handed_over = True
        if not self._keeper.hand_over(self._why_left):
            self._say(f"rsup: the keeper has died too: how this ended stays in {self._places.spool}")

    # ------------------------------------------------------------------------------------------------------- actions

    def _add_fact(self, action: ev.AddFact) -> None:
        self._cases.told(self._spool.append(action.fact), action.fact)
        self._reporter.saw(action.fact, self._state)
        self._has_new_facts = True

    def _bind_store(self, action: ev.BindStore) -> None:
        try:
            port = self._keeper.host_store(action.attempt, self._parts.agent.host, action.port)
        except RsupError as error:
            self._events.append(ev.StoreFailure(action.attempt, str(error), error.exit_code))
        else:
            self._events.append(ev.StoreReady(action.attempt, self._parts.agent.host, port))

    def _spawn_ranks(self, action: ev.SpawnRanks) -> None:
        start = action.command
        where = SessionPlaces(
            self._agent_id,
            str(self._board.path or ""),
            str(self._places.rank_socket),
            str(self._places.stacks_dir),
            self._keeper.hosts_stores,
            str(self._nvrx.folder) if self._nvrx.is_served else "",
            str(self._timers.path) if self._timers else "",
        )
        seats = choose_seats(
            start, self._options.numa_binding, self._parts.inventory, virtual_local_rank=self._options.virtual_local_rank
        )
        self._tell_seats(seats)
        self._group = group = RankGroup(start, self._options, where, self._logs, self._standbys, seats)
        self._board.begin(start.attempt)
        self._memory_kills.reset()
        self._nvrx.begin(start.attempt, start.first_rank, start.limits)
        if start.attempt == 1 and (notice := threads_notice(os.environ, start.num_ranks)):
            self._say(notice)
        try:
            pids = group.spawn(os.environ)
        except RsupError as error:
            self._events.append(ev.SpawnFailure(start.attempt, str(error), error.exit_code))
            return
        for local_rank, process in enumerate(group.processes):
            self._watch(process, lambda group=group, local_rank=local_rank: self._hear_death(group, local_rank))  # type: ignore[misc]
        self._keeper.set_sessions(group.sessions)
        self._next_sections_s = time.monotonic() + SECTIONS_EVERY_S
        self._events.append(ev.RanksSpawned(start.attempt, pids, tuple(seats.device_names), tuple(seats.cpu_texts)))

    def _replace_rank(self, action: ev.ReplaceRank) -> None:
        group, local_rank = self._group, action.local_rank
        if group is None or group.start.attempt != action.attempt:
            return
        group.end_leftovers(local_rank, self._helpers)
        self._board.forget(group.start.first_rank + local_rank, local_rank)
        try:
            pid = group.replace(os.environ, local_rank, action.death)
        except RsupError as error:
            self._events.append(ev.ReplaceFailure(action.attempt, local_rank, str(error), error.exit_code))
            return
        self._watch(group.processes[local_rank], lambda: self._hear_death(group, local_rank))
        self._keeper.set_sessions(group.sessions)
        self._events.append(ev.RankReplaced(action.attempt, local_rank, pid))

    def _tell_peers(self, action: ev.TellPeers) -> None:
        self._link.broadcast(self._state.attempt, action.message)

    def _tell_seats(self, seats: RankSeats) -> None:
        for text in (*seats.warnings, *seats.lines):
            self._say(f"rsup: {text}")
        self._events.extend(ev.Noticed("warning", text) for text in (*seats.warnings, *seats.lines))
        self._events.extend(ev.Noticed("info", text) for text in seats.notes)

    def _signal_ranks(self, action: ev.SignalRanks) -> None:
        if self._group and action.if_caught:
            self._pass_on(self._group, action)
        elif self._group:
            self._group.signal(action.local_ranks, action.signum, whole_session=action.whole_session)

    def _pass_on(self, group: RankGroup, action: ev.SignalRanks) -> None:
        leaders = {group.processes[i].pid: group.start.first_rank + i for i in action.local_ranks}
        told = [leaders[leader] for leader in pass_on(list(leaders), action.signum)]
        text = told_text(signal_name(action.signum), told, len(leaders))
        if text not in self._said_passed_on:
            self._said_passed_on.add(text)
            self._say(f"rsup: {text}")
        self._events.append(ev.Noticed("info", text))

    def _reap_all(self, action: ev.ReapAll) -> None:
        if self._group:
            self._group.begin_reaping(action.grace_s)

    @property
    def _helpers(self) -> tuple[int, ...]:
        """Processes that carry our mark, or come to us, and are no rank's."""
        return (self._keeper.pid, *self._standbys.pids, *self._nvrx.pids, *self._health.pids)

    def _go_on_reaping(self) -> None:
        group = self._group
        if group is None or not group.is_reaping:
            return
        is_done = group.reap(self._helpers)
        for note in group.take_notes():
            self._say(f"rsup: {note}")
            self._events.append(ev.Noticed("warning", note))
        if is_done:
            self._keeper.set_sessions(())
            self._events.append(ev.AllReaped(group.start.attempt))

    def _name_survivors(self, action: ev.NameSurvivors) -> None:
        if self._group:
            self._events.append(ev.SurvivorsNamed(action.attempt, self._group.survivors(self._helpers)))

    def _look_at_iteration_file(self, within_s: float = 0.0) -> None:
        state, file = self._state, self._iteration_file
        if file is None or state.start is None or state.start.group_rank != 0 or state.phase not in HAS_PROCESSES:
            return
        iteration = file.newer(within_s)
        if iteration is not None:
            message = wire.RankCheckpoint(iteration, str(file.path))
            self._events.append(ev.RankMessage(state.attempt, 0, message))

    def _observe_sections(self, action: ev.ObserveSections) -> None:
        self._look_at_iteration_file(ITERATION_FILE_WITHIN_S)
        self._read_sections(closing=True)

    def _collect_stacks(self, action: ev.CollectStacks) -> None:
        group = self._group
        if group is None:
            return
        ranks = [
            (self._state.ranks[i].rank, self._state.ranks[i].pid, self._board.last_words(group, i)[0])
            for i in self._state.alive
        ]

        def collect() -> None:
            stacks = take_stacks(ranks, action.within_s, stacks_dir=self._places.stacks_dir)
            self._stacks.put(ev.StacksReady(action.attempt, tuple(stacks)))
            os.eventfd_write(self._wake_fd, 1)

        threading.Thread(target=collect, name="rsup-stacks", daemon=True).start()

    def _ask_ranks(self, action: ev.AskRanks) -> None:
        for local_rank in action.local_ranks:
            rank = self._state.ranks[local_rank].rank
            self._link.send(rank, self._state.attempt, wire.SaveNow(action.request_id, action.leave))

    def _push_limits(self, action: ev.PushLimits) -> None:
        self._link.broadcast(self._state.attempt, wire.LimitsNow(action.limits))
        if action.switches:
            self._link.broadcast(self._state.attempt, wire.SwitchesNow(action.switches))
        self._nvrx.use_limits(action.limits)

    def _write_result(self, action: ev.WriteResult) -> None:
        state, options = self._state, self._options
        first = state.start is None or state.start.group_rank == 0
        failures = failures_of(state, self._group.error_file_of) if self._group else []
        self._reporter.ended(action.result, state, failures)
        self.leaves_others = options.max_nodes > 1 and not state.told
        if self.leaves_others or (first and (state.start is not None or not options.slurm or options.slurm.node_index == 0)):
            self.result_to_settle = action.result
        paths, avoid = (options.state_dir, options.result_file), nodes_to_avoid(options, action.result)
        job = state.job_id, state.run
        for problem in write_results(action.result, *job, *paths, is_first_node=first, failures=failures, avoid_nodes=avoid):
            self._say(problem)
        failed = first_failure(state.exits)
        recorded = self._group.error_file_of(failed.rank) if failed and self._group else None
        if problem := write_error_file(action.result, self._exit_message(failed), recorded, os.environ):
            self._say(problem)

    @staticmethod
    def _exit_message(failed: wire.RankExited | None) -> str:
        if failed is None:
            return ""
        text = f"rank {failed.rank}: {exit_text(failed.exit_code, failed.signal)}"
        return f"{text}: {failed.error}" if failed.error else text

    def _print_report(self, action: ev.PrintReport) -> None:
        self._say(action.text if action.text.startswith("rsup") or "\n" in action.text else f"rsup: {action.text}")

    def _exit(self, action: ev.Exit) -> None:
        self._exit_code = action.code
        self._why_left = f"exit code {action.code}, {action.reason}"

    # ---------------------------------------------------------------------------------------------------------- people

    def _say(self, text: str) -> None:
        self._logs.say(text)

    def _say_where(self, welcome: wire.Welcome) -> None:
        if not self._said_where:
            self._said_where = True
            if speaks_for_all(self._options):
                self._say(where_to_look(self._options, welcome, is_embedded=self._decider.route.is_embedded))
        if welcome.supervisor.notice not in ("", self._said_notice):
            self._said_notice = welcome.supervisor.notice
            self._say(f"rsup: {self._said_notice}")

    def _say_farewell(self) -> None:
        """Give the last facts a moment to be committed, then say goodbye."""
        until_s = time.monotonic() + FAREWELL_S
        self._report([])
        while len(self._spool) and self._client.connected and time.monotonic() < until_s:
            if self._selector.select(0.02):
                self._client.poll()
        if self._state.joined and not len(self._spool):  # ahead of facts it would say that we died before them
            self._client.send_bye()
        elif self._state.joined:
            keeper = f"process {self._keeper.pid} goes on telling it for {DELIVER_WITHIN_S:.0f} s"
            what = f"it cannot be told: {self._spool.file_error}" if self._spool.file_error else keeper
            self._say(f"rsup: the supervisor has not heard all of how this ended; {what}")

    def _end_ranks(self) -> None:
        """Whatever happened: no rank outlives its agent."""
        group = self._group
        if group is None or self._state.phase not in HAS_PROCESSES:
            return
        group.begin_reaping(0.0)
        until_s = time.monotonic() + 5.0
        while not group.reap(self._helpers) and time.monotonic() < until_s:
            pass


_PERFORM: dict[type, Callable[[Agent, Any], None]] = {
    ev.AddFact: Agent._add_fact,
    ev.BindStore: Agent._bind_store,
    ev.SpawnRanks: Agent._spawn_ranks,
    ev.ReplaceRank: Agent._replace_rank,
    ev.TellPeers: Agent._tell_peers,
    ev.SignalRanks: Agent._signal_ranks,
    ev.ReapAll: Agent._reap_all,
    ev.NameSurvivors: Agent._name_survivors,
    ev.ObserveSections: Agent._observe_sections,
    ev.CollectStacks: Agent._collect_stacks,
    ev.AskRanks: Agent._ask_ranks,
    ev.PushLimits: Agent._push_limits,
    ev.WriteResult: Agent._write_result,
    ev.PrintReport: Agent._print_report,
    ev.Exit: Agent._exit,
}
