"""The text that a launcher prints when its job has ended badly: what failed, where, why."""

from collections import Counter
from collections.abc import Sequence

from rsup.supervisor.failure import exit_text
from rsup.supervisor.render import plural
from rsup.supervisor.states import AgentState, JobState, RankExit, Role
from rsup.supervisor.wire import JobResult

MAX_REPORTED = 8
MAX_LOG_LINES = 20


def all_exits(state: JobState) -> list[tuple[int, RankExit, AgentState]]:
    """Every rank of the attempt that has ended, with its node; first those whose replacement was given up."""
    blamed = [
        (rank, exit_, agent)
        for _, agent in state.active
        for rank, exit_ in state.in_process.blamed.items()
        if agent.first_rank <= rank < agent.first_rank + agent.info.num_ranks
    ]
    return blamed + [(rank, exit_, agent) for agent in state.agents.values() for rank, exit_ in agent.exits.items()]


def report_text(state: JobState, result: JobResult) -> str:
    """Text for the terminal: what failed, where, why; empty after success."""
    if result.exit_code == 0:
        return ""
    lines = [f"rsup: job {state.key.job_id} ends with exit code {result.exit_code}: {result.reason}"]
    exits = sorted(all_exits(state), key=lambda item: item[1].order)
    failing = [(rank, exit_, agent) for rank, exit_, agent in exits if exit_.exit_code and not exit_.by_us]
    for rank, exit_, agent in failing[:MAX_REPORTED]:
        mark = "first" if rank == result.rank else "then"
        lines.append(f"  {mark}: {exit_text(rank, agent.info.node, exit_)}")
        if exit_.log_tail and (rank == result.rank or len(failing) == 1):
            lines += [f"    | {line}" for line in exit_.log_tail.splitlines()[-MAX_LOG_LINES:]]
    if len(failing) > MAX_REPORTED:
        lines.append(f"  and {plural(len(failing) - MAX_REPORTED, 'more rank')}")
    lines += _asked_lines([exit_ for _, exit_, _ in exits if exit_.by_us])
    gone = [a.info.node for a in state.agents.values() if a.role in (Role.GONE, Role.LOST) and a.group_rank >= 0]
    if gone:
        lines.append(f"  nodes that were lost: {', '.join(sorted(gone))}")
    lines.append(f"  more: rsup report {state.key.job_id}    rsup events {state.key.job_id}")
    return "\n".join(lines)


def _asked_lines(exits: Sequence[RankExit]) -> list[str]:
    """How many of those that we had signalled died of a signal, and how many left by themselves, with which codes."""
    killed = sum(1 for exit_ in exits if exit_.signal)
    lines = [f"  {plural(killed, 'rank')} {'was' if killed == 1 else 'were'} ended by us after that"] if killed else []
    codes = Counter(exit_.exit_code for exit_ in exits if not exit_.signal)
    for code, number in sorted(codes.items()):
        themselves, them = ("itself", "it") if number == 1 else ("themselves", "them")
        lines.append(f"  {plural(number, 'rank')} left by {themselves} (exit {code}) after we asked {them} to end")
    return lines
