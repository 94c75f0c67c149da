"""What `scontrol show node -o` and `show reservation -o` print, as data; and the words that SLURM takes. Pure.

Whatever is unknown here (a state or flag of a newer SLURM, a field) is kept apart and named, never guessed at.
"""

import re

from msgspec import Struct

from rsup.supervisor.hardware.states import one_line

PREFIX = "rsup:"
"""Begins each reason that we write: by it alone a drain is ours."""
RESERVATION = "rsup_q_"
"""Begins the name of each reservation of ours."""
MAX_REASON_CHARS = 120

IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED", "PLANNED", "COMPLETING"})
KNOWN_STATES = IN_SERVICE | {"DOWN", "ERROR", "FUTURE", "UNKNOWN"}
AWAY = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "INVALID_REG", "INVAL", "FAIL", "DYNAMIC_FUTURE"})
KNOWN_FLAGS = AWAY | {
    "DRAIN", "COMPLETING", "CLOUD", "POWERING_UP", "POWER_UP", "NOT_RESPONDING", "NO_RESPOND", "MAINTENANCE", "MAINT",
    "RESERVED", "REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT_CANCEL", "PLANNED", "DYNAMIC", "DYNAMIC_NORM", "BLOCKED",
    "EXTERNAL", "PERFCTRS", "UNDRAIN", "RESUME", "POWER_DRAIN",
}  # fmt: skip

_REBOOTS = re.compile(r"(?: : reboot [a-z ]+)+$")
"""What SLURM itself writes behind a reason (`reboot issued`, `reboot complete`)."""
_FIELD = re.compile(r"(?:^|\s)([A-Za-z_:]+)=(\S*)")
_REASON = re.compile(r"\sReason=(.*?)(?:\s\[([^\[\]@\s]+)@([^\[\]\s]+)\])?(?:\s+Comment=.*|\s+Extra=.*)?\s*$")
_FREE = re.compile(r"\s(?:Comment|Extra)=")
_REASON_BEHIND = re.compile(r".*\sReason=(.*)\s\[([^\[\]@\s]+)@[^\[\]\s]+\]\s*$")
"""A reason behind such a text, which may hold the word `Reason=` itself: SLURM's stamp ends the line."""


class NodeSeen(Struct, frozen=True):
    """A node as SLURM shows it."""

    name: str
    state: str
    """Its base state: `IDLE`, `ALLOCATED`, `MIXED`, `DOWN`, ..."""
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_by: str = ""
    weight: int | None = None
    partitions: tuple[str, ...] = ()
    has_gpus: bool = False

    @property
    def is_in_service(self) -> bool:
        """Up, drained or not."""
        return self.state in IN_SERVICE and not self.flags & AWAY

    @property
    def is_rebooting(self) -> bool:
        """By SLURM itself, or about to be."""
        return any(flag.startswith("REBOOT") and flag not in ("REBOOT_CANCEL", "REBOOT_CANCELED") for flag in self.flags)

    @property
    def is_drained(self) -> bool:
        return "DRAIN" in self.flags

    @property
    def is_ours(self) -> bool:
        """Whether the reason that it shows is one of ours."""
        return self.reason.startswith(PREFIX)

    @property
    def has_foreign_reason(self) -> bool:
        return bool(self.reason) and not self.is_ours

    @property
    def is_eligible(self) -> bool:
        """Whether it could be refused or drained at all: in service, or out of it only by us."""
        return self.is_in_service and not self.has_foreign_reason

    @property
    def unknown(self) -> list[str]:
        """States and flags that this release does not know."""
        return sorted({self.state} - KNOWN_STATES | (self.flags - KNOWN_FLAGS))


def read_nodes(text: str) -> dict[str, NodeSeen]:
    """By name. Lines that are no node are left out."""
    found = (_node(line) for line in text.splitlines() if line.startswith("NodeName="))
    return {node.name: node for node in found if node is not None}


def _node(line: str) -> NodeSeen | None:
    reason, free = _REASON.search(line), _FREE.search(line)
    head = line[: min((found.start() for found in (reason, free) if found), default=len(line))]
    if reason and free and free.start() < reason.start():
        reason = _REASON_BEHIND.search(line, free.start())
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(head):
        fields.setdefault(name, value)
    if not fields.get("NodeName"):
        return None
    words = [re.sub(r"[^A-Z_]", "", word.upper()) for word in fields.get("State", "").split("+")]
    text, by = (reason.group(1).strip(), reason.group(2) or "") if reason else ("", "")
    weight = fields.get("Weight", "")
    return NodeSeen(
        name=fields["NodeName"],
        state=words[0] or "UNKNOWN",
        flags=frozenset(word for word in words[1:] if word),
        reason="" if text in ("(null)", "none") else text,
        reason_by=by,
        weight=int(weight) if weight.isascii() and weight.isdecimal() else None,
        partitions=tuple(part for part in fields.get("Partitions", "").split(",") if part),
        has_gpus=re.search(r"(?:^|,)gpu\b", fields.get("Gres", "")) is not None,
    )


def read_reservations(text: str) -> set[str]:
    """The names of those that are ours."""
    found = (word for line in text.splitlines() for word in line.split()[:1] if word.startswith("ReservationName="))
    return {name for word in found if (name := word.partition("=")[2]).startswith(RESERVATION)}


def read_setting(text: str, name: str) -> str:
    """One line of `scontrol show config`, or of slurm.conf; empty where it shows none."""
    found = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else ""


def is_same_reason(shown: str, written: str) -> bool:
    """Whether SLURM shows what was written, and nobody has added to it."""
    return _REBOOTS.sub("", shown).split() == _REBOOTS.sub("", written).split()


def reason_text(number: int, what: str, node: str = "") -> str:
    """A reason of ours, such as SLURM shows: `rsup:Q-17 GPU-1 quarantined: ...`; number 0: a person's word."""
    head = f"{PREFIX}Q-{number} " if number else PREFIX
    what = what.removeprefix(f"{PREFIX} ").replace(f": {PREFIX} ", ": ")  # the word of a user whose name is rsup
    tail = f"; rsup nodes why {node}" if node and len(node) <= 40 else ""
    return head + one_line(what, MAX_REASON_CHARS - len(head) - len(tail)) + tail
