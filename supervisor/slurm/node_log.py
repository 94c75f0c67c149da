"""What the notes about a node's place in the scheduler (`records.DrainNoted`) add up to. Pure.

| note | means |
|---|---|
| admitted, cleared | the guard let its refusal pass, and nothing counts against it any more |
| wanted, unwanted | an operator asked for its drain (`rsup nodes drain`), or to let it run (`undrain`) |
| drained, undrained | the supervisor did so, or found it done |
| renewed | the supervisor wrote the reason of its drain anew |
| rebooting, rebooted | SLURM itself reboots a drained node, and it is drained still afterwards |
| reserved, unreserved | the same by a reservation |
| weighted, unweighted | the same of the weight by which suspects come last |
| resumed | somebody else ended our drain: it is left so until new evidence or an operator's word |
| yielded | somebody else has put a reason of theirs in the place of ours: the drain is theirs now |
| told, untold | its gate refuses jobs by the snapshot that it has, and does so no more |
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.records import DrainNoted

NOTES = (
    "admitted", "cleared", "told", "untold", "wanted", "unwanted", "rebooting", "rebooted", "drained", "renewed", "undrained",
    "reserved", "unreserved", "weighted", "unweighted", "resumed", "yielded",
)  # fmt: skip


class NodeLog(Struct, frozen=True):
    """Where a node stands with us."""

    number: int = 0
    """Of the refusal in force (`Q-17`), 0: it is not refused."""
    admitted_us: int = 0
    drained: str = ""
    """The reason of our drain, empty: it is not ours."""
    reserved: bool = False
    weight: int | None = None
    """The node's own weight, while ours is in its place."""
    wanted: str = ""
    """The words of the operator who asked for its drain, empty: nobody does."""
    wanted_us: int = 0
    left_alone_us: int = 0
    """Until newer evidence it is not refused or drained: somebody has let it run knowingly. 0: not so."""
    left_alone_by: str = ""
    taken_over: bool = False
    """Somebody else's reason stands where ours stood."""
    rebooting: bool = False
    """SLURM reboots it: should the drain be gone afterwards, nobody has ended it."""
    gate_refuses: bool = False
    """Its gate has fetched a snapshot that refuses it, and none since that does not: a job that starts there is refused."""

    @property
    def waits_for_gate(self) -> bool:
        """Whether its release waits until its gate knows of it."""
        return self.gate_refuses and not self.number and (bool(self.drained) or self.reserved)

    def is_left_alone(self, newest_us: int) -> bool:
        """`newest_us`: the newest evidence, or word, against it."""
        return bool(self.left_alone_us) and newest_us <= self.left_alone_us and self.wanted_us <= self.left_alone_us


NOTHING = NodeLog()


def noted(log: NodeLog, note: DrainNoted) -> NodeLog:
    """`log` after `note`."""
    match note.what:
        case "admitted":
            return replace(log, number=note.number, admitted_us=note.at_us)
        case "cleared":
            return replace(log, number=0, admitted_us=0)
        case "wanted":
            return replace(log, wanted=note.reason, wanted_us=note.at_us, left_alone_us=0, left_alone_by="")
        case "unwanted":
            return replace(log, wanted="", wanted_us=0, left_alone_us=note.at_us, left_alone_by=note.principal)
        case "drained":
            return replace(log, drained=note.reason, left_alone_us=0, left_alone_by="", taken_over=False)
        case "renewed":
            return replace(log, drained=note.reason)
        case "undrained":
            return replace(log, drained="", taken_over=False, rebooting=False)
        case "told" | "untold":
            return replace(log, gate_refuses=note.what == "told")
        case "rebooting" | "rebooted":
            return replace(log, rebooting=note.what == "rebooting")
        case "yielded":
            return replace(log, drained="", taken_over=True)
        case "resumed":
            gone = {"drained": "", "reserved": False, "taken_over": False, "rebooting": False, "wanted": "", "wanted_us": 0}
            return replace(log, **gone, left_alone_us=note.at_us, left_alone_by=note.principal or "somebody else")
        case "reserved" | "unreserved":
            return replace(log, reserved=note.what == "reserved")
        case "weighted":
            return replace(log, weight=note.number)
        case "unweighted":
            return replace(log, weight=None)
    return log


def logs_of(notes: Iterable[DrainNoted]) -> dict[str, NodeLog]:
    """By node, from its notes in any order."""
    found: dict[str, NodeLog] = {}
    for note in sorted(notes, key=lambda note: (note.at_us, NOTES.index(note.what) if note.what in NOTES else -1)):
        found[note.node] = noted(found.get(note.node, NOTHING), note)
    return found
