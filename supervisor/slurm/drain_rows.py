"""Reads of the store for drains and the gate's snapshot: what speaks against which node, and the notes about nodes."""

from collections.abc import Iterable

from sqlalchemy import Connection, and_, func, select, text, tuple_

from rsup.supervisor.device_selector import is_serial
from rsup.supervisor.hardware.hardware_rows import node_of, open_subjects
from rsup.supervisor.hardware.states import avoided
from rsup.supervisor.records import DrainNoted, SubjectSaved
from rsup.supervisor.render import clean_line
from rsup.supervisor.slurm.drain_terms import Ground
from rsup.supervisor.tables import COUNTED, drain_notes, evidence, nodes, seats, transitions

NODE_SEEN_WITHIN_US = 30 * 86_400_000_000
MAX_GATE_WORDS = 20_000
_CHUNK = 200
_BY_ITSELF = ("expiry", "clean", "evidence", "merge")


def read_grounds(connection: Connection, now_us: int) -> list[Ground]:
    """All that is to be kept from jobs, or to come last."""
    subjects = [saved for saved in open_subjects(connection) if avoided(saved, saved.subject, now_us) is not None]
    newest = _newest(connection, subjects)
    return [_ground(connection, saved, newest.get((saved.kind, saved.subject), 0), now_us) for saved in subjects]


def read_notes(connection: Connection) -> list[DrainNoted]:
    """All notes, oldest first."""
    rows = connection.execute(select(drain_notes).order_by(drain_notes.c.at_us)).mappings()
    return [DrainNoted(**row) for row in rows]


def read_gate_words(connection: Connection, now_us: int) -> list[tuple[str, str, str, int]]:
    """What prologs refused, or could not decide, within the last month, oldest first: node, kind, what it said, when."""
    told = evidence.c
    words = (
        select(told.node, told.code, told.text, told.last_us)
        .where(told.source == "gate", told.last_us >= now_us - NODE_SEEN_WITHIN_US)
        .order_by(told.last_us.desc())
        .limit(MAX_GATE_WORDS)
    )
    rows = connection.execute(words).all()
    return [(node, kind, clean_line(said.partition("\n")[2]), at_us) for node, kind, said, at_us in reversed(rows)]


def known_nodes(connection: Connection, now_us: int) -> list[str]:
    """Nodes that took part in a job, or told of their boards, within the last month."""
    since_us = now_us - NODE_SEEN_WITHIN_US
    in_jobs = select(nodes.c.node).where(nodes.c.at_us >= since_us)
    with_boards = select(seats.c.node).where(seats.c.to_us.is_(None), seats.c.seen_us >= since_us)
    return sorted({*connection.execute(in_jobs).scalars(), *connection.execute(with_boards).scalars()})


def _ground(connection: Connection, saved: SubjectSaved, newest_us: int, now_us: int) -> Ground:
    told = avoided(saved, saved.subject, now_us)
    assert told is not None
    uuid, node = (saved.subject, saved.subject) if saved.kind == "node" else _place(connection, saved)
    return Ground(
        kind=saved.kind,
        subject=uuid,
        node=node,
        state=saved.state,
        reason=saved.reason,
        refuses=told.quarantined,
        may_drain=saved.may_drain if told.quarantined else "",
        newest_us=newest_us,
        since_us=saved.since_us,
        until_us=saved.expires_us,
        serial=saved.serial,
        version=saved.version,
    )


def _place(connection: Connection, saved: SubjectSaved) -> tuple[str, str]:
    """The UUID that the board has now, and the node where it sits. One that fell off its bus is where it last was, until
    another board is in its place: then it is nowhere, and its node is free of it."""
    stays = select(seats).order_by(seats.c.to_us.is_not(None), seats.c.seen_us.desc())
    row = connection.execute(stays.where(seats.c.uuid == saved.subject)).first()
    if (row is None or row.to_us is not None) and is_serial(saved.serial):
        of_serial = stays.where(seats.c.serial == saved.serial, seats.c.to_us.is_(None))
        row = connection.execute(of_serial).first() or row
    if row is None:
        return saved.subject, node_of(connection, saved.subject)
    if row.to_us is not None:
        same_place = (seats.c.node == row.node, seats.c.pci_bus_id == row.pci_bus_id, seats.c.to_us.is_(None))
        if connection.execute(select(seats.c.uuid).where(*same_place)).first() is not None:
            return saved.subject, ""
    return row.uuid, row.node


def _newest(connection: Connection, subjects: Iterable[SubjectSaved]) -> dict[tuple[str, str], int]:
    """When the newest independent piece of evidence, or operator's word, about each was recorded. What is only seen again (of
    one boot, one job) is nothing new, and neither are flags, which anybody may give."""
    keys = [(saved.kind, saved.subject) for saved in subjects]
    found: dict[tuple[str, str], int] = {}
    told, said = evidence.c, transitions.c
    for at in range(0, len(keys), _CHUNK):
        part = keys[at : at + _CHUNK]
        of_evidence = (
            select(told.kind, told.subject, func.max(told.recorded_us))
            .where(tuple_(told.kind, told.subject).in_(part), text(COUNTED), told.source.not_in(("person", "devices")))
            .group_by(told.kind, told.subject)
        )
        of_words = (
            select(said.kind, said.subject, func.max(said.at_us))
            .where(and_(tuple_(said.kind, said.subject).in_(part), said.verb.not_in(_BY_ITSELF)))
            .group_by(said.kind, said.subject)
        )
        for kind, subject, at_us in (*connection.execute(of_evidence), *connection.execute(of_words)):
            found[kind, subject] = max(found.get((kind, subject), 0), at_us)
    return found
