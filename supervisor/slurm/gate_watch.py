"""Which gates are blind, and which do not ask: a gate that cannot decide lets jobs in, so that nothing else would show it. And
what gates that only observe would have refused.

Known since this supervisor's start, by what nodes fetch (each minute) and report; decisions of before from the store. Written
by request threads, one entry at a time, and by the first round of drains; readers copy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.hardware.hostlist import fold
from rsup.supervisor.metrics import Metric
from rsup.supervisor.slurm.guard import HOUR_US
from rsup.supervisor.view_times import iso

Json = dict[str, Any]

SILENT_AFTER_US = 600_000_000
"""A round is made each minute: who has missed ten does not ask."""
BELIEVED_US = HOUR_US
"""So long a gate goes by a snapshot that no supervisor confirms (`max_age_s` of node.toml, as it is installed)."""
TAKEN_UP_US = 2_000_000
"""So long after its question a node surely has the answer on its disk."""
WEEK_US = 7 * 86_400_000_000
"""So long what would have been refused is shown: gates observe that long before they enforce."""
MAX_NODES = 65_536
MAX_LINES = 20
OBSERVED = "observe: "
"""So a prolog's refusal begins that was none: the node's mode."""


class Gate(Struct, frozen=True):
    """One node's. Times are when this supervisor heard of it, 0: never."""

    asked_us: int = 0
    got_us: int = 0
    """When it last fetched the snapshot; `asked_us` is of its reports, too."""
    got_refusal: bool = False
    """That snapshot refuses something of this node."""
    told_us: int = 0
    mode: str = ""
    trouble: str = ""
    """Why it decides nothing, by its own word; empty: it sees."""
    undecided_us: int = 0
    undecided: str = ""
    """The newest job that it could not decide about."""
    refused_us: int = 0
    refused: str = ""
    """The newest refusal of its prolog."""
    would_us: int = 0
    would: str = ""
    """The newest job that it let in because it only observes."""

    def refuses_jobs(self, now_us: int) -> bool:
        """Whether a job that starts there now is refused, as far as is known."""
        return self.got_refusal and self.mode != "observe" and now_us - self.got_us <= BELIEVED_US


class GatesSeen(Struct, frozen=True):
    """What a round goes by. `begun_us`: since when what gates fetch is known."""

    gates: Mapping[str, Gate] = {}
    begun_us: int = 0

    def believes_until_us(self, node: str) -> int:
        """When the gate there believes nothing any more of what it has, unless it asks again."""
        return max(self.gates.get(node, Gate()).got_us, self.begun_us) + BELIEVED_US


NO_GATES = GatesSeen()


@dataclass
class GateWatch:
    """`begun_us`: since when this supervisor listens, 0: unknown."""

    begun_us: int = 0
    _gates: dict[str, Gate] = field(default_factory=dict)

    def asked(self, node: str, now_us: int, *, refuses: bool = False) -> None:
        """It has asked for the snapshot, and got one that `refuses` something of it."""
        self._put(node, replace(self._of(node), asked_us=now_us, got_us=now_us, got_refusal=refuses))

    def told(self, node: str, mode: str, trouble: str, now_us: int) -> None:
        """It has said whether it sees."""
        self._put(node, replace(self._of(node), asked_us=now_us, told_us=now_us, mode=mode, trouble=trouble))

    def decided(self, node: str, kind: str, detail: str, now_us: int) -> None:
        """Its prolog has spooled an event of that kind at that time."""
        gate = self._of(node)
        if kind == "gate-unknown" and now_us >= gate.undecided_us:
            self._put(node, replace(gate, undecided_us=now_us, undecided=detail))
        elif kind == "prolog-refused" and detail.startswith(OBSERVED):
            if now_us >= gate.would_us:
                self._put(node, replace(gate, would_us=now_us, would=detail.removeprefix(OBSERVED)))
        elif kind == "prolog-refused" and now_us >= gate.refused_us:
            self._put(node, replace(gate, refused_us=now_us, refused=detail))

    def seen(self) -> GatesSeen:
        """All that is known of them now."""
        return GatesSeen(self._gates.copy(), self.begun_us)

    def gates(self, expected: Iterable[str]) -> dict[str, Gate]:
        """Of the nodes that ought to ask (as SLURM knows them; none: of all that ever did)."""
        known = self._gates.copy()
        nodes = expected or (node for node, gate in known.items() if gate.asked_us)
        return {node: known.get(node, Gate()) for node in sorted(nodes)}

    def _of(self, node: str) -> Gate:
        return self._gates.get(node, Gate())

    def _put(self, node: str, gate: Gate) -> None:
        if node in self._gates or len(self._gates) < MAX_NODES:
            self._gates[node] = gate


def gates_of(watch: GateWatch, expected: Iterable[str], now_us: int) -> Json:
    """For `rsup slurm status`. `never_asked`, `silent` are lists of nodes as SLURM writes them."""
    gates = watch.gates(expected)
    never = [node for node, gate in gates.items() if not gate.asked_us]
    modes: dict[str, int] = {}
    for gate in gates.values():
        if gate.mode:
            modes[gate.mode] = modes.get(gate.mode, 0) + 1
    return {
        "num_nodes": len(gates),
        "num_asking": sum(bool(gate.asked_us) and not _is_silent(watch, gate, now_us) for gate in gates.values()),
        "since": iso(watch.begun_us) if watch.begun_us else None,
        "modes": modes,
        "num_mode_unknown": sum(bool(gate.asked_us) and not gate.mode for gate in gates.values()),
        "blind": [{"node": node, "why": gate.trouble, "at": iso(gate.told_us)} for node, gate in gates.items() if gate.trouble],
        "undecided": [
            {"node": node, "at": iso(gate.undecided_us), "why": gate.undecided}
            for node, gate in gates.items()
            if gate.undecided_us and now_us - gate.undecided_us < HOUR_US
        ],
        "would_refuse": [
            {"node": node, "at": iso(gate.would_us), "line": gate.would}
            for node, gate in gates.items()
            if gate.would and gate.mode != "enforce" and now_us - gate.would_us < WEEK_US
        ],
        "refused": {node: {"at": iso(gate.refused_us), "line": gate.refused} for node, gate in gates.items() if gate.refused},
        "never_asked": fold(never),
        "silent": [
            {"node": node, "asked": iso(gate.asked_us)}
            for node, gate in gates.items()
            if gate.asked_us and _is_silent(watch, gate, now_us)
        ],
    }


def gate_metrics(watch: GateWatch, expected: Iterable[str], now_us: int) -> Metric:
    """Each node once: `blind` by its own word, `silent` where it does not ask, else `sees`."""
    counts = {"sees": 0, "blind": 0, "silent": 0}
    for gate in watch.gates(expected).values():
        counts["silent" if _is_silent(watch, gate, now_us) else "blind" if gate.trouble else "sees"] += 1
    text = "Nodes by what their gates can do: see, blind (they let all in), silent (have not asked for 10 minutes)."
    return Metric("rsup_gate_nodes", "gauge", text, [({"state": state}, num) for state, num in counts.items()])


def _is_silent(watch: GateWatch, gate: Gate, now_us: int) -> bool:
    last_us = gate.asked_us or watch.begun_us
    return now_us - last_us > SILENT_AFTER_US


def gate_lines(gates: Mapping[str, Any]) -> list[str]:
    """For people."""
    if not gates or not gates["num_nodes"]:
        return []
    modes = ", ".join(f"{num} {mode}" for mode, num in sorted(gates["modes"].items()))
    if num := gates.get("num_mode_unknown", 0):
        modes += f"{', ' if modes else ''}{num} not known yet"
    lines = [f"gates: {gates['num_asking']} of {gates['num_nodes']} nodes ask" + (f" ({modes})" if modes else "")]
    if gates["never_asked"]:
        lines.append(f"  not asked since this supervisor's start at {gates['since']}: {gates['never_asked']}")
    lines += _some([f"  {one['node']} has not asked since {one['asked']}" for one in gates["silent"]])
    lines += _some([f"  blind {one['node']}: {one['why']}" for one in gates["blind"]])
    lines += _some([f"  undecided {one['node']} at {one['at']}: {one['why']}" for one in gates["undecided"]])
    lines += _some([f"  would refuse {one['node']}, at {one['at']}: {one['line']}" for one in gates.get("would_refuse", [])])
    return lines


def _some(lines: list[str]) -> list[str]:
    left = len(lines) - MAX_LINES
    return lines if left <= 0 else [*lines[:MAX_LINES], f"  ... and {left} more; --json has them all"]


def refusal_words(gates: Mapping[str, Any], node: str, reason: str) -> str:
    """What ties SLURM's `Prolog error` to our refusal there; empty for other reasons, and where none is known."""
    refused = (gates or {}).get("refused", {}).get(node)
    if not reason.startswith("Prolog error") or not refused:
        return ""
    return f" (its gate refused a job at {refused['at']}: {refused['line']}; somebody must resume it)"
