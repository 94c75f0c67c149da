"""What the drain plan speaks of: what is against a node, what SLURM shows, and a step that is to be taken."""

from collections.abc import Mapping

from msgspec import Struct

from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog, noted
from rsup.supervisor.slurm.scheduler_text import NodeSeen

ADDED_WEIGHT = 1000
"""Suspects come after all nodes whose weights differ by less."""


class Ground(Struct, frozen=True):
    """One device or node that speaks against a node."""

    kind: str
    subject: str
    """The UUID that the device has now, or the node's name."""
    node: str
    state: str
    reason: str
    refuses: bool = True
    """Jobs are to be kept off; else it only comes last."""
    may_drain: str = ""
    newest_us: int = 0
    """Of its evidence, and of operators' words."""
    since_us: int = 0
    until_us: int | None = None
    serial: str = ""
    version: int = 0

    @property
    def text(self) -> str:
        """For a reason."""
        what = "" if self.kind == "node" else f"{_short(self.subject)} "
        return f"{what}{self.state.replace('_', ' ')}: {self.reason}"


def _short(uuid: str) -> str:
    """A name that is cut says so: one that is short loses nothing."""
    return uuid if len(uuid) <= 16 else f"{uuid[:12]}..."


class PlanSettings(Struct, frozen=True):
    """As in `config.Settings`."""

    mode: str = "propose"
    quarantine_by: str = "drain"
    bad_gpu: str = "drain"
    avoid_suspects: bool = False


class Step(Struct, frozen=True):
    """One thing to do to some nodes: `drain`, `undrain`, `renew` (the reason of a drain of ours), `reserve`, `unreserve`,
    `weigh`, `unweigh`."""

    kind: str
    nodes: tuple[str, ...]
    reason: str = ""
    """Of `drain`, `renew`: what SLURM is to show; of `undrain`: that which it must still show (each node's: in its log)."""
    why: str = ""
    weight: int = 0
    by_word: bool = False
    """An operator asked for it: done in mode `propose` too."""


class View(Struct, frozen=True):
    """What is known of the scheduler. `nodes` None: it has not answered, or is not asked."""

    nodes: Mapping[str, NodeSeen] | None = None
    reservations: frozenset[str] | None = None
    is_stale: bool = False
    """It is an earlier answer: good for counting, not for seeing what others do, and no ground for steps."""
    has_forgotten: bool = False
    """SLURM was started anew since the last look: drains that are gone were lost with its state, nobody has ended them."""


class Decision:
    """One call of `drain_plan.decide`: what is seen, and the notes that it makes."""

    def __init__(self, view: View, logs: Mapping[str, NodeLog], now_us: int) -> None:
        self.view, self.now_us = view, now_us
        self.logs = dict(logs)
        self.notes: list[DrainNoted] = []

    def log(self, node: str) -> NodeLog:
        """Where that node stands, with what was noted now."""
        return self.logs.get(node, NOTHING)

    def note(self, node: str, what: str, *, number: int = 0, reason: str = "", principal: str = "") -> None:
        """Note something."""
        note = DrainNoted(node, self.now_us, what, number, reason, principal)
        self.notes.append(note)
        self.logs[node] = noted(self.log(node), note)

    def seen(self, node: str) -> NodeSeen | None:
        """The node as SLURM shows it now, None where that is not known."""
        return None if self.view.nodes is None or self.view.is_stale else self.view.nodes.get(node)
