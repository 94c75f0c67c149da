"""Ranks that end with 0 while all are to enter their training function again, or have before: nobody waits in vain. Pure.

A function that makes `SystemExit` of the interruption, or ends its process, looks like one that has done its work. Where the
ranks of its node go on it is replaced as a rank that died; else all processes are restarted. A rank that has finished did so in
the entry that all had reached, since `worker.inprocess` lets none return before the others.
"""

from rsup.supervisor.in_process import fault_of_exit, took_death
from rsup.supervisor.open_restart import give_up, has_reserves, join
from rsup.supervisor.re_entry import left_before, ranks_text, under_way
from rsup.supervisor.states import Phase
from rsup.supervisor.turn import Turn


def took_early_end(turn: Turn, agent_id: str, rank: int) -> bool:
    """Replace a rank that has ended with 0 and is missed. False: it has finished, or nobody can take its place."""
    state, agent = turn.state, turn.state.agents[agent_id]
    restart = under_way(state.in_process)
    if restart is None or state.phase is not Phase.RUNNING or rank not in left_before(state, restart):
        return False
    if len(agent.exits) >= agent.info.num_ranks and not has_reserves(state):
        return False  # a launcher none of whose ranks is left takes them for finished
    return took_death(turn, agent_id, rank)


def settle_early_ends(turn: Turn) -> bool:
    """Give the restart up if it waits for a rank that has ended with 0."""
    state, restart = turn.state, under_way(turn.state.in_process)
    gone = left_before(state, restart) if restart is not None else []
    if restart is None or not gone:
        return False
    agent = next(a for _, a in state.active if gone[0] in a.exits)
    fault = fault_of_exit(state, agent, gone[0], agent.exits[gone[0]], state.in_process.left.get(gone[0], 0))
    join(turn, fault)
    them = "it" if len(gone) == 1 else "they"
    give_up(turn, f"{ranks_text(gone)} ended with 0, so {them} cannot come into entry {restart.entry}")
    return True
