"""What this process knows of an agent beside its state: when it was heard, what was sent to it, its latest beats.

None of it is worth a transaction. It starts anew with each supervisor process: every agent then has its full time again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsup.supervisor.states import AgentState, JobState, Phase, Role
from rsup.supervisor.wire import RankBeat, Report

RETRY_S = 1.0
"""A command that has not been acknowledged for so long is sent again."""


@dataclass
class AgentLink:
    """One agent, as this process sees it. `heard_s` is in seconds of `listening`, the others are the machine's: a clock that
    stands still keeps nobody from hearing a command again."""

    heard_s: float
    sent: int = 0
    """The last command that has been sent."""
    sent_s: float = 0.0
    beats: Sequence[RankBeat] = ()
    beats_s: float = 0.0


@dataclass
class LiveAgentBeats:
    """The newest beats of one agent, and when they came, by this supervisor's monotonic clock."""

    agent_id: str
    node: str
    at_s: float
    beats: Sequence[RankBeat]


def tells_something(state: JobState, agent: AgentState, report: Report) -> bool:
    """Whether the core has to hear of a report: most only say that the agent lives, and that is kept here."""
    if agent.role is Role.LOST or agent.number_commands or report.acked_command > agent.last_command:
        return True
    if agent.outbox and agent.outbox[0].sequence <= report.acked_command:
        return True
    if not report.beats or report.epoch != state.epoch:
        return False
    if state.in_process.open is not None or state.phase is Phase.COLLECTING:
        return True
    return not state.stepped or any(beat.iteration > state.attempt_iteration for beat in report.beats)


def newest_beats(state: JobState, links: Mapping[str, AgentLink]) -> list[LiveAgentBeats]:
    """The newest beats of a job's agents, those without any left out."""
    found = [(agent_id, agent, links.get(agent_id)) for agent_id, agent in state.agents.items() if agent.group_rank >= 0]
    return [
        LiveAgentBeats(agent_id, agent.info.node, link.beats_s, link.beats)
        for agent_id, agent, link in found
        if link is not None and link.beats
    ]


def beat_row(one: LiveAgentBeats, beat: RankBeat) -> dict[str, object]:
    """An entry of `BeatsSaved`."""
    return {
        "rank": beat.rank,
        "node": one.node,
        "iteration": beat.iteration,
        "beat_age_s": beat.beat_age_s,
        "main_beat_age_s": beat.main_beat_age_s,
        "open_sections": [[section.name, section.age_s] for section in beat.open_sections],
        "phase": beat.phase,
        "pid": beat.pid,
    }
