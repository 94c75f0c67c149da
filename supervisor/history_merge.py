"""Takes over another store's history of devices and nodes: evidence, states with their transitions, and where boards sat.

May be repeated, like all of a merge. Evidence is one row a fingerprint: the first sighting stays, counts never shrink. Of a
subject that both stores know, the transitions of both stay, numbered anew in order of time; its state is the one that was
reached last, unless that would release what this store holds back without having known of it: a merge never makes a device
look better than either store had reason to. Faults that somebody injected for a test accuse nobody here.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, and_, case, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from rsup.supervisor.tables import devices, drain_notes, evidence, nodes, seats, subjects, transitions

_BATCH = 1000

SEVERITY = {"clear": 0, "watch": 1, "probation": 2, "suspect": 3, "quarantined": 4, "in_repair": 5, "retired": 6}

Row = dict[str, Any]


def merge_evidence(read: Connection, write: Connection, ids: Mapping[int, int], *, as_is: bool) -> int:
    """Bring the evidence over; return how many rows are new. `ids`: jobs of the source -> jobs here. `as_is`: a full copy,
    in which injected evidence keeps its effect."""
    before = _count(write)
    statement = _add_evidence(write)
    rows = read.execute(select(evidence).execution_options(yield_per=_BATCH))
    for batch in rows.partitions(_BATCH):
        write.execute(statement, [_own_evidence(dict(row._mapping), ids, as_is) for row in batch])
    return _count(write) - before


def merge_subjects(read: Connection, write: Connection, ids: Mapping[int, int], *, as_is: bool) -> int:
    """Bring states and transitions over; return how many subjects changed."""
    if as_is:
        _copy(read, write, transitions, ids)
        return _copy(read, write, subjects, ids)
    changed = 0
    for row in read.execute(select(subjects).order_by(subjects.c.kind, subjects.c.subject)).mappings().all():
        if not _is_of_injection(read, row["kind"], row["subject"]):
            changed += _merge_subject(read, write, dict(row), ids)
    return changed


def merge_seats(read: Connection, write: Connection, *, as_is: bool) -> None:
    """Bring the stays over; stays of one board that go on into one another become one."""
    if as_is:
        _copy(read, write, seats, {})
        return
    rows = read.execute(select(seats).order_by(seats.c.uuid, seats.c.from_us).execution_options(yield_per=_BATCH)).mappings()
    for uuid, theirs in groupby(rows, key=itemgetter("uuid")):
        ours = [dict(row) for row in write.execute(select(seats).where(seats.c.uuid == uuid)).mappings()]
        joined = join_stays([*ours, *(dict(row) for row in theirs)])
        if joined != sorted(ours, key=itemgetter("from_us")):
            write.execute(delete(seats).where(seats.c.uuid == uuid))
            write.execute(insert(seats), joined)


def merge_sightings(read: Connection, write: Connection, ids: Mapping[int, int]) -> None:
    """Bring over which nodes and devices were ever seen; the newer sighting wins, the first time stays the first."""
    insert_of = sqlite.insert if write.dialect.name == "sqlite" else postgresql.insert
    for table in (nodes, devices):
        statement = insert_of(table)
        new = statement.excluded
        keys = [column.name for column in table.primary_key]
        newest = new.at_us >= table.c.at_us
        values = {column.name: case((newest, new[column.name]), else_=column) for column in table.c if column.name not in keys}
        values["first_us"] = case((new.first_us < table.c.first_us, new.first_us), else_=table.c.first_us)
        rows = read.execute(select(table).execution_options(yield_per=_BATCH))
        for batch in rows.partitions(_BATCH):
            found = [dict(row._mapping) for row in batch]
            if table is nodes:
                found = [{**row, "job": ids.get(row["job"])} for row in found]
            write.execute(statement.on_conflict_do_update(index_elements=keys, set_=values), found)


def copy_drains(read: Connection, write: Connection) -> None:
    """Bring what was done in the scheduler over; of a full copy only, for it tells of the store's own cluster."""
    _copy(read, write, drain_notes, {})


def join_stays(stays: Sequence[Row]) -> list[Row]:
    """The stays of one board in order, without overlaps: what two stores saw at one place is one stay."""
    joined: list[Row] = []
    for stay in sorted(stays, key=itemgetter("from_us")):
        last = joined[-1] if joined else None
        if last is not None and (last["to_us"] is None or last["to_us"] >= stay["from_us"]):
            if (last["node"], last["pci_bus_id"]) == (stay["node"], stay["pci_bus_id"]):
                joined[-1] = _one_stay(last, stay)
                continue
            joined[-1] = {**last, "to_us": stay["from_us"]}
        joined.append(dict(stay))
    return joined


def _one_stay(first: Row, second: Row) -> Row:
    newer, older = (second, first) if second["seen_us"] >= first["seen_us"] else (first, second)
    known = {name: newer[name] or older[name] for name in ("serial", "board", "boot_id")}
    ends = None if first["to_us"] is None or second["to_us"] is None else max(first["to_us"], second["to_us"])
    if newer["to_us"] is not None and older["to_us"] is None:
        ends = newer["to_us"]  # whoever looked last saw it gone
    return {**newer, **known, "from_us": first["from_us"], "to_us": ends}


# ------------------------------------------------------------------------------------------------------------ evidence


def _add_evidence(write: Connection) -> Any:
    statement = (sqlite.insert if write.dialect.name == "sqlite" else postgresql.insert)(evidence)
    new, old = statement.excluded, evidence.c
    values = {
        "first_us": case((new.first_us < old.first_us, new.first_us), else_=old.first_us),
        "last_us": case((new.last_us > old.last_us, new.last_us), else_=old.last_us),
        "count": case((new["count"] > old["count"], new["count"]), else_=old["count"]),
        "job": func.coalesce(old.job, new.job),
    }
    return statement.on_conflict_do_update(index_elements=["fingerprint"], set_=values)


def _own_evidence(row: Row, ids: Mapping[int, int], as_is: bool) -> Row:
    row["job"] = ids.get(row["job"])
    if row["injected"] and row["effect"] == "counted" and not as_is:
        row["effect"] = "inert: injected, in the store that this came from"
    return row


def _is_of_injection(read: Connection, kind: str, subject: str) -> bool:
    """Whether all that ever moved this subject was injected: nobody's word, and no real evidence."""
    query = select(func.count(), func.count().filter(evidence.c.injected))
    query = query.where(evidence.c.kind == kind, evidence.c.subject == subject, evidence.c.effect == "counted")
    counted, injected = read.execute(query).one()
    asked = select(func.count()).where(
        transitions.c.kind == kind, transitions.c.subject == subject, transitions.c.principal != ""
    )
    return bool(counted) and counted == injected and not read.execute(asked).scalar()


def _copy(read: Connection, write: Connection, table: Table, ids: Mapping[int, int]) -> int:
    """All rows of a table, into an empty one; return how many."""
    copied = 0
    rows = read.execute(select(table).execution_options(yield_per=_BATCH))
    for batch in rows.partitions(_BATCH):
        found = [dict(row._mapping) for row in batch]
        write.execute(insert(table), [{**row, "job": ids.get(row["job"])} if "job" in row else row for row in found])
        copied += len(found)
    return copied


def _count(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(evidence)).scalar() or 0)


# ------------------------------------------------------------------------------------------------------------ subjects


def _merge_subject(read: Connection, write: Connection, theirs: Row, ids: Mapping[int, int]) -> bool:
    kind, subject = theirs["kind"], theirs["subject"]
    found = write.execute(select(subjects).where(_is(subjects, kind, subject))).mappings().first()
    new = [{**row, "job": ids.get(row["job"])} for row in _history(read, kind, subject)]
    if found is None:
        write.execute(insert(subjects).values(theirs))
        if new:
            write.execute(insert(transitions), new)
        return True
    ours, old = dict(found), _history(write, kind, subject)
    known = {_name(row) for row in old}
    missing = [row for row in new if _name(row) not in known]
    whole = sorted([*old, *missing], key=lambda row: (row["at_us"], row["version"]))
    same_line = theirs["version"] >= ours["version"] and not known - {_name(row) for row in new}
    state = _state_of_both(ours, theirs, same_line)
    if whole and whole[-1]["after"] != state["state"]:
        whole.append(_settled(whole[-1], state))
    state["version"] = max(len(whole), state["version"])
    if len(whole) == len(old) and state == ours:
        return False
    _write(write, state, whole)
    return True


def _write(write: Connection, state: Row, whole: Sequence[Row]) -> None:
    write.execute(delete(transitions).where(_is(transitions, state["kind"], state["subject"])))
    if whole:
        first = state["version"] - len(whole) + 1
        write.execute(insert(transitions), [{**row, "version": first + number} for number, row in enumerate(whole)])
    values = {name: value for name, value in state.items() if name not in ("kind", "subject")}
    write.execute(update(subjects).where(_is(subjects, state["kind"], state["subject"])).values(values))


def _state_of_both(ours: Row, theirs: Row, same_line: bool) -> Row:
    """Theirs, if it follows from all that ours does, or is at least as strict and newer; else ours."""
    stricter = SEVERITY.get(theirs["state"], 0) >= SEVERITY.get(ours["state"], 0)
    newer = theirs["since_us"] >= ours["since_us"]
    return dict(theirs) if same_line or (stricter and newer) else dict(ours)


def _settled(last: Row, state: Row) -> Row:
    """The transition that says which state holds after the merge of two histories."""
    reason = f"two stores merged: {state['state']} holds"
    same = {"kind": state["kind"], "subject": state["subject"], "rule": state["rule"], "fingerprint": "", "job": None}
    change = {"at_us": last["at_us"], "before": last["after"], "after": state["state"], "reason": reason}
    return {**same, **change, "principal": "", "verb": "merge", "version": last["version"] + 1}


def _history(connection: Connection, kind: str, subject: str) -> list[Row]:
    query = select(transitions).where(_is(transitions, kind, subject)).order_by(transitions.c.version)
    return [dict(row) for row in connection.execute(query).mappings()]


def _name(transition: Row) -> tuple[object, ...]:
    """What tells a transition apart from others of its subject, in any store."""
    return tuple(transition[name] for name in ("at_us", "before", "after", "verb", "principal"))


def _is(table: Any, kind: str, subject: str) -> Any:
    return and_(table.c.kind == kind, table.c.subject == subject)
