"""One turn of the process machine: the state as it becomes, and the actions so far."""

from typing import Any

from msgspec.structs import replace

from rsup.launcher.process_events import Action, AddFact, Moment
from rsup.launcher.process_state import AgentState
from rsup.supervisor import wire


class Turn:
    """Used within one `decide` only; what leaves it is frozen."""

    def __init__(self, state: AgentState, now: Moment) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)

    def set_rank(self, local_rank: int, **changes: Any) -> None:
        """Replace fields of one rank."""
        ranks = list(self.state.ranks)
        ranks[local_rank] = replace(ranks[local_rank], **changes)
        self.set(ranks=tuple(ranks))

    def do(self, action: Action) -> None:
        """Add an action."""
        self.actions.append(action)

    def fact(self, fact: wire.AnyFact) -> None:
        """Report a fact."""
        self.do(AddFact(fact))

    def note(self, level: str, text: str, rank: int | None = None) -> None:
        """Report a line for the job's story."""
        self.fact(wire.Note(self.now.wall_us, level, text, rank))
