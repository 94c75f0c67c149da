"""Nodes and devices from the store, with what ran on them. See `views` for what holds of every view.

Everybody with a token may see these, so of a job they hold only what `views.PUBLIC_FIELDS` names.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Subquery, func, select, union

from rsup.supervisor.hardware import standing_views
from rsup.supervisor.history_jobs import MayRead, everything
from rsup.supervisor.tables import devices, drain_notes, incidents, job_nodes, jobs, nodes, placements, seats, subjects
from rsup.supervisor.view_times import iso
from rsup.supervisor.views import job_fields, public_fields
from rsup.supervisor.wire import RsupError

MAX_HISTORY = 100


class UnknownHardware(RsupError):
    """The store has no such node or device."""


def list_nodes(
    connection: Connection, *, after: str = "", limit: int = 100, state: str = "", others: Collection[str] = ()
) -> tuple[list[dict[str, Any]], str | None]:
    """By name: at most `limit` nodes after the name `after`, only those in `state` if given, and the name to continue after
    (None at the end). `others`: nodes that are known from elsewhere, too. Raise `UsageError` for a state that there is not."""
    known = _known_nodes()
    query = select(known.c.node).where(known.c.node > after).order_by(known.c.node).limit(limit + 1)
    names = list(connection.execute(standing_views.only(query, "node", known.c.node, state)).scalars())
    if others and state in ("", "clear"):
        names = sorted({*names, *_unheard_of(connection, {name for name in others if name > after})})[: limit + 1]
    shown = names[:limit]
    rows = {row["node"]: row for row in connection.execute(select(nodes).where(nodes.c.node.in_(shown))).mappings()}
    named = _jobs_of(connection, {row["job"] for row in rows.values()})
    quiet = _quiet_nodes(connection, [name for name in shown if name not in rows])
    boards = _boards_on(connection, shown)
    standings = standing_views.standings(connection, "node", [(name, "") for name in shown])
    known_here = {name: _node_fields(rows[name], boards[name], named) if name in rows else quiet[name] for name in shown}
    items = [{**known_here[name], **standings[name]} for name in shown]
    return items, shown[-1] if len(names) > limit else None


def _known_nodes() -> Subquery:
    """Nodes that took part in a job, told of their boards, or were spoken about, here or in SLURM."""
    spoken_of = select(subjects.c.subject.label("node")).where(subjects.c.kind == "node")
    with_boards = select(seats.c.node).where(seats.c.node != "")
    return union(select(nodes.c.node), spoken_of, with_boards, select(drain_notes.c.node)).subquery("known")


def is_known_node(connection: Connection, name: str) -> bool:
    """Whether the store has heard of that node at all."""
    known = _known_nodes()
    return connection.execute(select(known.c.node).where(known.c.node == name).limit(1)).scalar() is not None


def _unheard_of(connection: Connection, names: Collection[str]) -> set[str]:
    """Those of `names` that the store does not know."""
    return set(names) - set(connection.execute(select(_known_nodes().c.node)).scalars())


def _quiet_nodes(connection: Connection, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Fields of nodes that took part in no job: what is known of their boards."""
    boards = _boards_on(connection, names)
    times = select(seats.c.node, func.min(seats.c.from_us), func.max(seats.c.seen_us)).where(seats.c.node.in_(names))
    seen = {node: (first_us, last_us) for node, first_us, last_us in connection.execute(times.group_by(seats.c.node))}
    found = {}
    for name in names:
        first_us, last_us = seen.get(name, (None, None))
        told = {"first_seen": iso(first_us), "last_seen": iso(last_us), "job": None, "devices": boards[name]}
        found[name] = {"node": name, "role": "", **told}
    return found


def _boards_on(connection: Connection, names: Sequence[str]) -> dict[str, list[str]]:
    """UUIDs of the boards that sit in these nodes now, by slot."""
    stays = select(seats).where(seats.c.node.in_(names), seats.c.to_us.is_(None)).order_by(seats.c.pci_bus_id, seats.c.uuid)
    boards: dict[str, list[str]] = {name: [] for name in names}
    for row in connection.execute(stays).mappings():
        boards[row["node"]].append(row["uuid"])
    return boards


def node_detail(
    connection: Connection, name: str, may_read: MayRead = everything, others: Collection[str] = ()
) -> dict[str, Any]:
    """One node, the newest jobs it took part in, and incidents on it. `others`: nodes that are known from elsewhere, too.
    Raise `UnknownHardware`."""
    standing = standing_views.standing_detail(connection, "node", name, "", may_read)
    row = connection.execute(select(nodes).where(nodes.c.node == name)).mappings().first()
    if row is None:
        if name not in others and not is_known_node(connection, name):
            raise UnknownHardware(f"no node {name[:200]!r} in this store; `rsup nodes list` lists them")
        return {**_quiet_nodes(connection, [name])[name], "jobs": [], "incidents": [], **standing}
    took_part = select(job_nodes).where(job_nodes.c.node == name).order_by(job_nodes.c.at_us.desc()).limit(MAX_HISTORY)
    parts = connection.execute(took_part).mappings().all()
    named = _jobs_of(connection, {row["job"], *(part["job"] for part in parts)})
    history = [
        {
            "job": named.get(part["job"]),
            "role": part["role"],
            "first_seen": iso(part["first_us"]),
            "last_seen": iso(part["at_us"]),
        }
        for part in parts
    ]
    found = _incidents(connection, select(incidents).where(incidents.c.node == name))
    return {**_node_fields(row, _boards_on(connection, [name])[name], named), **standing, "jobs": history, "incidents": found}


def list_devices(
    connection: Connection, *, after: str = "", limit: int = 100, state: str = "", node: str = ""
) -> tuple[list[dict[str, Any]], str | None]:
    """By UUID: at most `limit` devices after the UUID `after`, only those in `state` and last seen on `node` if given, and the
    UUID to continue after (None at the end). Raise `UsageError` for a state that there is not."""
    query = select(devices).where(devices.c.uuid > after).order_by(devices.c.uuid).limit(limit + 1)
    query = standing_views.only(query, "device", devices.c.uuid, state)
    query = query.where(devices.c.node == node) if node else query
    rows = connection.execute(query).mappings().all()
    shown = rows[:limit]
    used = _placements(connection, [row["uuid"] for row in shown], running=True)
    in_use = {entry.pop("device"): entry for entry in used}
    standings = standing_views.standings(connection, "device", [(row["uuid"], row["serial"]) for row in shown])
    items = [{**_device_fields(row, in_use.get(row["uuid"])), **standings[row["uuid"]]} for row in shown]
    return items, shown[-1]["uuid"] if len(rows) > limit else None


def device_detail(connection: Connection, uuid: str, may_read: MayRead = everything) -> dict[str, Any]:
    """One device, the ranks that used it (newest first), and incidents on it. Raise `UnknownHardware`."""
    row = connection.execute(select(devices).where(devices.c.uuid == uuid)).mappings().first()
    serial = "" if row is None else row["serial"]
    standing = standing_views.standing_detail(connection, "device", uuid, serial, may_read)
    if row is None and standing_views.is_known(connection, "device", uuid):
        return {"uuid": uuid, "placements": [], "incidents": [], "in_use": None, **standing}
    if row is None:
        raise UnknownHardware(f"no device {uuid[:200]!r} in this store; `rsup devices list` lists them")
    history = _placements(connection, [uuid], running=False)
    in_use = next((entry for entry in history if entry["to"] is None), None)
    found = _incidents(connection, select(incidents).where(incidents.c.device == uuid))
    return {**_device_fields(row, in_use), **standing, "placements": history, "incidents": found}


def _node_fields(row: RowMapping, boards: Sequence[str], named: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """`row`: of the newest job, which may have used few of the node's boards, or none."""
    seen = {"first_seen": iso(row["first_us"]), "last_seen": iso(row["at_us"])}
    devices_here = list(boards) or list(dict.fromkeys(row["devices"]))  # ranks that share a device name it several times
    return {"node": row["node"], "role": row["role"], **seen, "job": named.get(row["job"]), "devices": devices_here}


def _device_fields(row: RowMapping, in_use: dict[str, Any] | None) -> dict[str, Any]:
    same = ("uuid", "model", "serial", "board", "pci_bus_id", "vbios", "driver", "node")
    seen = {"first_seen": iso(row["first_us"]), "last_seen": iso(row["at_us"])}
    return {**{name: row[name] for name in same}, **seen, "in_use": in_use}


def _placements(connection: Connection, uuids: Sequence[str], *, running: bool) -> list[dict[str, Any]]:
    query = select(placements).where(placements.c.device.in_(uuids)).order_by(placements.c.from_us.desc())
    query = query.where(placements.c.to_us.is_(None)) if running else query.limit(MAX_HISTORY)
    rows = connection.execute(query).mappings().all()
    named = _jobs_of(connection, {row["job"] for row in rows})
    return [
        {
            "job": named.get(row["job"]),
            "attempt": row["attempt"],
            "rank": row["rank"],
            "device": row["device"],
            "node": row["node"],
            "from": iso(row["from_us"]),
            "to": iso(row["to_us"]),
        }
        for row in rows
    ]


def _incidents(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    rows = connection.execute(query.order_by(incidents.c.at_us.desc()).limit(MAX_HISTORY)).mappings().all()
    named = _jobs_of(connection, {row["job"] for row in rows})
    return [
        {"job": named.get(row["job"]), "incident": row["incident"], "kind": row["kind"], "at": iso(row["at_us"])}
        for row in rows
    ]


def _jobs_of(connection: Connection, numbers: set[Any]) -> dict[int, dict[str, Any]]:
    wanted = [number for number in numbers if number is not None]
    if not wanted:
        return {}
    rows = connection.execute(select(jobs).where(jobs.c.id.in_(wanted))).mappings()
    return {row["id"]: public_fields(job_fields(row)) for row in rows}
