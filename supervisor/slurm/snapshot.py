"""What gates are told: one signed snapshot for the whole cluster, of everything that is not clear. Pure but for `Publisher`.

`refuse` is said only of what the blast guard let pass, and of nodes that nobody has let run knowingly; all else is `avoid`.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from rsup.supervisor.hardware.states import one_line
from rsup.supervisor.slurm.drain_plan import Plan
from rsup.supervisor.slurm.drain_terms import Ground
from rsup.supervisor.slurm.guard import Admission, most_believed
from rsup.supervisor.slurm.signing import SigningKey
from rsup.supervisor.view_times import iso

SCHEMA = 1
REFRESH_US = 600_000_000
"""A snapshot is made anew so often though nothing has changed, so that nodes see its age."""
STORED = "gate-snapshot"

Json = dict[str, Any]


class Snapshot(Struct, frozen=True):
    """One snapshot: `data` as nodes get it."""

    serial: int
    made_us: int
    content: Json
    data: bytes
    refused: frozenset[str] = frozenset()
    """Nodes of which it refuses something."""

    @property
    def etag(self) -> str:
        return f'"{self.serial}"'


def content_of(cluster: str, grounds: Iterable[Ground], plan: Plan) -> Json:
    """All but serial and time."""
    listed = list(grounds)
    nodes: dict[str, Json] = {}
    devices: dict[str, Json] = {}
    refused, away = _told_refused(plan)
    for node, log in sorted(plan.logs.items()):
        if log.wanted:
            nodes[node] = _entry(node in refused, "drained", f"Q-{log.number}" if log.number else "", log.wanted, None)
    for ground in sorted(listed, key=lambda ground: (ground.kind, ground.subject)):
        number = refused.get(ground.node, 0) if ground.refuses else 0
        name = f"Q-{number}" if number else f"S-{ground.version}"
        reason = ground.reason
        if ground.refuses and ground.node in plan.left_alone:
            reason = f"let run by {plan.left_alone[ground.node]}; {reason}"
        entry = _entry(bool(number), ground.state, name, reason, ground.until_us)
        if ground.kind == "node":
            nodes.setdefault(ground.subject, entry)
        else:
            devices[ground.subject] = {**entry, "node": ground.node, "serial": ground.serial}
    admission = plan.admission
    return {
        "schema": SCHEMA,
        "cluster": cluster,
        "num_nodes": _num_nodes(admission, len(away)),
        "max_refused": admission.max_refused + len(away),
        "guard_open": admission.is_open,
        "nodes": nodes,
        "devices": devices,
    }


def _told_refused(plan: Plan) -> tuple[Mapping[str, int], Collection[str]]:
    """Nodes that gates are to refuse, with their numbers, and those of them that are out of service anyway. No gate believes
    that more than half of a cluster is bad, and one that is told so believes nothing. Where there would be so many, the latter
    are left out, then as many as it takes: first those that SLURM keeps jobs off anyway, then the newest."""
    away = plan.admission.away & plan.refused.keys()
    if len(plan.refused) <= most_believed(_num_nodes(plan.admission, len(away))):
        return plan.refused, away
    here = {node: number for node, number in plan.refused.items() if node not in away}
    num_over = len(here) - most_believed(_num_nodes(plan.admission, 0))
    left_out = sorted(here, key=lambda node: (node not in plan.kept_off, -here[node]))[: max(0, num_over)]
    return {node: number for node, number in here.items() if node not in left_out}, frozenset()


def _num_nodes(admission: Admission, num_away: int) -> int:
    """What gates take the half of: the whole cluster, not what of it is in service. Where most nodes sleep to save power, or
    are under maintenance, a few refusals would else be half of it, and gates would believe none."""
    return max(admission.num_shown, admission.num_eligible + num_away)


def _entry(refuses: bool, state: str, name: str, reason: str, until_us: int | None) -> Json:
    verdict = "refuse" if refuses else "avoid"
    return {"verdict": verdict, "state": state, "id": name, "reason": one_line(reason), "until": iso(until_us)}


def told_refused(content: Mapping[str, Any]) -> set[str]:
    """Nodes of which that snapshot refuses something."""
    nodes = {name for name, entry in content["nodes"].items() if entry["verdict"] == "refuse"}
    return nodes | {entry["node"] for entry in content["devices"].values() if entry["verdict"] == "refuse"}


def verdict_of(content: Mapping[str, Any], node: str, uuids: Iterable[str] = ()) -> Json:
    """What a gate with this snapshot says of a job on that node that holds `uuids` (none named: any of its devices)."""
    wanted = set(uuids)
    devices = {
        uuid: entry for uuid, entry in content["devices"].items() if uuid in wanted or (not wanted and entry["node"] == node)
    }
    own = content["nodes"].get(node)
    entries = ([own] if own else []) + list(devices.values())
    verdicts = {entry["verdict"] for entry in entries}
    verdict = "refuse" if "refuse" in verdicts else "avoid" if verdicts else "accept"
    telling = next((entry for entry in entries if entry["verdict"] == verdict), None) or {"id": "", "reason": "", "until": None}
    told = {name: telling[name] for name in ("id", "reason", "until")}
    return {"node": node, "verdict": verdict, **told, "of_node": own, "devices": devices}


class Publisher:
    """Numbers and signs snapshots. Serials grow with the time, also over restarts and from one supervisor to the next."""

    def __init__(self, key: SigningKey, folder: Path) -> None:
        self._key = key
        self._stored = folder / STORED
        self._last = self._last_serial()

    def publish(self, content: Json, now_us: int) -> Snapshot:
        """The next snapshot; its number is kept in the state directory as far as that can be written."""
        self._last = serial = max(self._last + 1, now_us // 1000)
        whole = {"schema": content["schema"], "cluster": content["cluster"], "serial": serial, "made_us": now_us, **content}
        data = self._key.sign(json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
        with contextlib.suppress(OSError):
            self._stored.write_text(f"{serial}\n")
        return Snapshot(serial, now_us, whole, data, frozenset(told_refused(content)))

    def _last_serial(self) -> int:
        try:
            return int(self._stored.read_text().strip())
        except (OSError, ValueError):
            return 0


def is_due(last: Snapshot | None, content: Json, now_us: int) -> bool:
    """Whether a new snapshot is to be made."""
    if last is None or not 0 <= now_us - last.made_us < REFRESH_US:
        return True
    return any(last.content[name] != value for name, value in content.items())
