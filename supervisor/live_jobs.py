"""The jobs that this supervisor process has in memory, and whose agent is whose; only what is committed gets in here.

Jobs that have ended stay until all their agents have heard of it, or for `FORGET_ENDED_AFTER_S`.
"""

from msgspec.structs import replace

from rsup.supervisor.agent_links import AgentLink
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.records import JobKey, Record
from rsup.supervisor.states import JobState, Phase, job_record
from rsup.supervisor.wire import Report

FORGET_ENDED_AFTER_S = 60.0


class LiveJobs:
    """`states` by job, `job_of` by agent id, `links` by agent id. Changed by the loop's thread only."""

    def __init__(self) -> None:
        self.states: dict[JobKey, JobState] = {}
        self.job_of: dict[str, JobKey] = {}
        self.links: dict[str, AgentLink] = {}
        self._ended_s: dict[JobKey, float] = {}

    def take_over(self, state: JobState, now_s: float) -> None:
        """A job of the store; each of its agents has its full time again."""
        self.states[state.key] = state
        for agent_id in state.agents:
            self.job_of[agent_id] = state.key
            self.links[agent_id] = AgentLink(heard_s=now_s)

    def keep(self, batch: Batch) -> None:
        """What has been committed is so from now on."""
        for key, state in batch.changed.items():
            is_new = key not in self.states
            self.states[key] = state
            if is_new or key in batch.dirty:
                for agent_id in state.agents.keys() - self.links.keys():
                    self.links[agent_id] = AgentLink(heard_s=batch.now.s)
                for agent_id in state.agents:
                    self.job_of[agent_id] = key
            if state.phase is Phase.ENDED:
                self._ended_s.setdefault(key, batch.now.s)

    def hear(self, report: Report, now_s: float, come_s: float) -> None:
        """An agent lives; keep its beats, which have come at `come_s` of the machine's clock."""
        link = self.links.get(report.agent_id)
        if link is None:
            link = self.links[report.agent_id] = AgentLink(heard_s=now_s)
        link.heard_s = now_s
        if report.beats:
            link.beats, link.beats_s = report.beats, come_s

    def hear_again(self, agent_id: str, now_s: float) -> None:
        """An agent has dialled us anew: what was sent before may not have come."""
        link = self.links.get(agent_id)
        if link is not None:
            link.heard_s, link.sent = now_s, 0

    def hear_all(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for link in self.links.values():
            link.heard_s = max(link.heard_s, now_s)

    def forget_ended(self, now_s: float) -> None:
        """Drop jobs of whose end everybody has heard, or had the time to."""
        for key, ended_s in list(self._ended_s.items()):
            state = self.states.get(key)
            if state is None or state.phase is not Phase.ENDED:
                del self._ended_s[key]
            elif not _is_awaited(state) or now_s - ended_s >= FORGET_ENDED_AFTER_S + _grace_s(state):
                del self._ended_s[key], self.states[key]
                for agent_id in state.agents:
                    if self.job_of.get(agent_id) == key:
                        del self.job_of[agent_id]
                        self.links.pop(agent_id, None)


def _is_awaited(state: JobState) -> bool:
    """Whether an agent has yet to hear of the end, or will still tell that what its ranks left behind is gone."""
    return state.undelivered or any(agent.live_attempt and agent.reachable for agent in state.agents.values())


def _grace_s(state: JobState) -> float:
    return state.stop.grace_s if state.stop is not None else 0.0


def rows_of(batch: Batch) -> list[Record]:
    """All that a batch writes: the changed states, stamped with the time of their bytes, then the records."""
    rows: list[Record] = []
    for key in batch.dirty:
        batch.changed[key] = state = replace(batch.changed[key], clock_s=batch.now.s)
        rows.append(job_record(state, batch.now.us))
    return [*rows, *batch.records]
