"""What time demands of the loop: deadlines of phases, agents that have gone silent, orders to send again, beats to keep."""

from collections.abc import Callable

from rsup.supervisor import job_machine
from rsup.supervisor.actions import SendOrder
from rsup.supervisor.agent_links import RETRY_S, beat_row, newest_beats
from rsup.supervisor.events import AgentSilent, Tick
from rsup.supervisor.live_jobs import LiveJobs
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.records import BeatsSaved, JobKey
from rsup.supervisor.states import JobState, Phase, Role

BEATS_EVERY_S = 3.0
MAX_BEATS_A_TURN = 4096
"""About 40 ms of work; the jobs whose beats were kept first are due again first, so thousands of ranks spread by themselves."""


class Sweep:
    """Goes over all jobs: every second for most, sooner for deadlines. `machine_s` is the machine's monotonic clock."""

    def __init__(self, live: LiveJobs, machine_s: Callable[[], float]) -> None:
        self._live = live
        self._machine_s = machine_s
        self._sweep_at_s = 0.0
        self._beats_looked_s: dict[JobKey, float] = {}
        self._beats_saved_s: dict[JobKey, float] = {}

    def next_s(self, now_s: float) -> float:
        """When there is something to do, by the monotonic clock; a second from now at the latest."""
        states = self._live.states
        due = [now_s + RETRY_S, self._sweep_at_s if states else now_s + RETRY_S]
        for state in states.values():
            due += [s for s in (state.deadline_s, state.last_call_s) if s is not None and state.phase is not Phase.ENDED]
            restart = state.in_process.open
            if state.phase is Phase.RUNNING and restart is not None and restart.deadline_s is not None:
                due.append(restart.deadline_s)
        return min(due)

    def time_passes(self, batch: Batch) -> None:
        """Decide on what is due."""
        now_s = batch.now.s
        sweep = now_s >= self._sweep_at_s
        if sweep:
            self._sweep_at_s = now_s + RETRY_S
        for key in list(self._live.states):
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
        if sweep:
            self._save_beats(batch)

    def _look_for_silent(self, batch: Batch, state: JobState) -> None:
        for agent_id, agent in state.agents.items():
            link = self._live.links.get(agent_id)
            if agent.role is Role.GONE or link is None or batch.now.s - link.heard_s < job_machine.LOST_AFTER_S:
                continue
            now = batch.get(state.key)
            assert now is not None
            batch.decide(now, AgentSilent(agent_id, batch.now.s - link.heard_s))

    def _resend(self, batch: Batch) -> None:
        now_s = self._machine_s()
        for key in self._live.states:
            state = batch.get(key)
            for agent_id, agent in state.agents.items() if state is not None else ():
                link = self._live.links.get(agent_id)
                overdue = link is not None and link.sent and now_s - link.sent_s >= RETRY_S
                if agent.outbox and overdue and agent.reachable:
                    batch.sends.append((key, SendOrder(agent_id)))

    def _save_beats(self, batch: Batch) -> None:
        now_s, num_beats = batch.now.s, 0
        never_s = now_s - BEATS_EVERY_S
        looked_s = self._beats_looked_s = {key: self._beats_looked_s.get(key, never_s) for key in self._live.states}
        saved_s = self._beats_saved_s = {key: self._beats_saved_s.get(key, 0.0) for key in self._live.states}
        for key in sorted(looked_s, key=lambda key: looked_s[key]):
            state = batch.get(key)
            if now_s - looked_s[key] < BEATS_EVERY_S - RETRY_S / 2 or num_beats >= MAX_BEATS_A_TURN:
                break
            looked_s[key] = now_s
            if state is None or state.phase not in (Phase.RUNNING, Phase.COLLECTING):
                continue
            beats = newest_beats(state, self._live.links)
            newest_s = max((one.at_s for one in beats), default=0.0)
            if newest_s <= saved_s[key]:
                continue
            saved_s[key] = newest_s
            num_beats += sum(len(one.beats) for one in beats)
            batch.records.append(BeatsSaved(key, batch.now.us, [beat_row(one, beat) for one in beats for beat in one.beats]))
            if state.iteration:
                batch.changed[key] = state
                batch.dirty.add(key)
