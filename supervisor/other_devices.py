"""Whether ranks can have other devices than those they must avoid, and which nodes have to change places for that. Pure.

Which device of its node a rank gets the agent decides (`launcher/device_placement`); here only the nodes are put in order. A
device that one rank must not run on again (`AvoidedDevice.rank`) may serve another; a quarantined one serves nobody, a suspect
one whoever must.
"""

from collections import Counter
from collections.abc import Sequence

from rsup.supervisor.devices_known import avoided_for
from rsup.supervisor.states import AgentState, JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import AvoidedDevice


def ranks_of(agent: AgentState) -> range:
    """The global ranks of a node in the current attempt."""
    return range(agent.first_rank, agent.first_rank + agent.info.num_ranks)


def all_avoided(state: JobState) -> list[AvoidedDevice]:
    """What the job's ranks are to avoid: devices that are out for all, and what open cases have tried."""
    return [*state.avoid, *(avoided for case in state.cases for avoided in case.avoid)]


def avoided_by(state: JobState, agent: AgentState) -> list[AvoidedDevice]:
    """What an agent's `StartAttempt` says: devices to be avoided by all, and by ranks of its own."""
    ranks = ranks_of(agent)
    of_job = [avoided for avoided in all_avoided(state) if avoided.rank is None or avoided.rank in ranks]
    return avoided_for(agent, of_job)


def usable(agent: AgentState) -> list[str]:
    """The devices of a node that its agent will give to ranks: without those that the history has quarantined, where the others
    suffice."""
    out = {one.device for one in agent.known if one.quarantined}
    others = [device for device in agent.devices if device not in out]
    return others if len(others) >= agent.info.num_ranks else agent.devices


def has_seats(devices: Sequence[str], ranks: range, avoid: Sequence[AvoidedDevice]) -> bool:
    """Whether every rank can have one of `devices` that it need not avoid, no device more often than it is in the list."""
    out = {a.device for a in avoid if a.rank is None and a.quarantined}
    free = Counter(device for device in devices if device not in out)
    owners: dict[tuple[str, int], int] = {}

    def seat(rank: int, tried: set[tuple[str, int]]) -> bool:
        unfit = {a.device for a in avoid if a.rank == rank}
        for place in ((device, nth) for device, count in free.items() if device not in unfit for nth in range(count)):
            if place in tried:
                continue
            tried.add(place)
            if place not in owners or seat(owners[place], tried):
                owners[place] = rank
                return True
        return False

    constrained = {a.rank for a in avoid}
    ordered = sorted(ranks, key=lambda rank: rank not in constrained)
    return all(seat(rank, set()) for rank in ordered)


def is_concerned(devices: Sequence[str], ranks: range, avoid: Sequence[AvoidedDevice]) -> bool:
    """Whether anything that is to be avoided is about these ranks, or keeps one of these devices from all."""
    return any(a.rank in ranks if a.rank is not None else a.quarantined and a.device in devices for a in avoid)


def arranged(state: JobState, order: Sequence[str], starts: Sequence[int], avoid: Sequence[AvoidedDevice]) -> list[str] | None:
    """`order` (agents, whose ranks begin at `starts`) with those exchanged for others of their size that have no seats for
    their ranks; spare nodes come first. None if a rank would have to run on what it must avoid."""
    places = list(order)
    for index, agent_id in enumerate(order):
        agent = state.agents[agent_id]
        ranks = range(starts[index], starts[index] + agent.info.num_ranks)
        now = usable(state.agents[places[index]])
        if not is_concerned(now, ranks, avoid) or has_seats(now, ranks, avoid):
            continue
        other_id = _other_node(state, places, index, starts, avoid)
        if other_id is None:
            return None
        if other_id in places:
            places[places.index(other_id)] = places[index]
        places[index] = other_id
    return places


def _other_node(
    state: JobState, places: Sequence[str], index: int, starts: Sequence[int], avoid: Sequence[AvoidedDevice]
) -> str | None:
    """A node of the same size that can change places with the one at `index`."""
    leaving = state.agents[places[index]]
    size = leaving.info.num_ranks
    ranks = range(starts[index], starts[index] + size)
    candidates = []
    for other_id, other in state.agents.items():
        if other_id == places[index] or not other.reachable or other.excluded or other.leaving:
            continue
        if other.info.num_ranks != size or not has_seats(usable(other), ranks, avoid):
            continue
        if other_id in places:
            start = starts[places.index(other_id)]
            if not has_seats(usable(leaving), range(start, start + size), avoid):
                continue
        candidates.append((other_id in places, other.joined, other_id))
    return min(candidates, default=(False, 0, None))[2]


def change_places(turn: Turn, order: Sequence[str]) -> None:
    """Give the agents in `order` the group ranks of the current attempt's, in its order; who is not among them is out."""
    before = [(agent_id, agent.group_rank) for agent_id, agent in turn.state.active]
    for (leaving, group_rank), coming in zip(before, order, strict=True):
        if leaving != coming:
            turn.change_agent(coming, group_rank=group_rank)
        if leaving not in order:
            turn.change_agent(leaving, group_rank=-1)
