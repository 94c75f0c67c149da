"""What is known of a node beside its own state: the boards that speak against it, and where it stands in SLURM.

A node is known once it took part in a job, told of its boards, was spoken about, or something was noted about it in SLURM; the
supervisor also knows those that SLURM shows (`others`).
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from rsup.supervisor import hardware_views
from rsup.supervisor.history_jobs import MayRead, everything
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_rows import read_grounds
from rsup.supervisor.slurm.node_log import logs_of
from rsup.supervisor.tables import drain_notes
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import now_us

MAX_NOTES = 20
"""Of the newest notes that a story shows."""

Json = dict[str, Any]


def node_story(
    connection: Connection, name: str, may_read: MayRead = everything, others: Collection[str] = ()
) -> dict[str, Any]:
    """`hardware_views.node_detail`, with `against` (what keeps jobs off it, or makes it come last), `scheduler` (None: nothing
    was ever done about it in SLURM) and `notes` (what was, the newest first). Raise `UnknownHardware`."""
    found = hardware_views.node_detail(connection, name, may_read, others)
    grounds = [ground for ground in read_grounds(connection, now_us()) if ground.node == name]
    against = [
        {"kind": one.kind, "name": one.subject, "state": one.state, "reason": one.reason, "may_drain": one.may_drain}
        for one in sorted(grounds, key=lambda one: (not one.refuses, one.since_us, one.subject))
    ]
    rows = connection.execute(select(drain_notes).where(drain_notes.c.node == name).order_by(drain_notes.c.at_us))
    notes = [DrainNoted(**row) for row in rows.mappings()]
    shown = [{"at": iso(note.at_us), "what": note.what, "text": note_text(note)} for note in reversed(notes[-MAX_NOTES:])]
    newest_us = max((one.newest_us for one in grounds if one.refuses), default=0)
    standing = _scheduler(notes, name, newest_us, is_accused=any(one.refuses for one in grounds))
    return {**found, "against": against, "scheduler": standing, "notes": shown}


def _scheduler(notes: list[DrainNoted], name: str, newest_us: int, *, is_accused: bool) -> Json | None:
    log = logs_of(notes).get(name)
    if log is None:
        return None
    is_let_run = log.is_left_alone(newest_us)
    return {
        "refused": f"Q-{log.number}" if log.number else "",
        "refused_since": iso(log.admitted_us) if log.number else None,
        "drained": log.drained,
        "reserved": log.reserved,
        "wanted": log.wanted,
        "let_run_by": log.left_alone_by if is_let_run else "",
        "let_run_since": iso(log.left_alone_us) if is_let_run else None,
        "held": is_accused and not log.number and not is_let_run,
        "taken_over": log.taken_over,
        "waits_for_gate": log.waits_for_gate,
    }


def note_text(note: DrainNoted) -> str:
    """One note as a sentence."""
    by = f" by {note.principal}" if note.principal else ""
    text = _WORDS.get(note.what, note.what).format(number=note.number)
    return f"{text}{by}" + (f": {note.reason}" if note.reason else "")


_WORDS = {
    "admitted": "refused to jobs as Q-{number}",
    "cleared": "refused to jobs no more",
    "told": "its gate refuses it",
    "untold": "its gate refuses it no more",
    "wanted": "drain asked for",
    "unwanted": "let run",
    "rebooting": "SLURM reboots it",
    "rebooted": "SLURM has rebooted it, it is drained still",
    "drained": "drained in SLURM",
    "renewed": "drained in SLURM, the reason written anew",
    "undrained": "drained in SLURM no more",
    "reserved": "reserved in SLURM",
    "unreserved": "reserved in SLURM no more",
    "weighted": "comes last in SLURM (its weight was {number})",
    "unweighted": "comes last in SLURM no more",
    "resumed": "somebody else let it run",
    "yielded": "somebody else's drain now",
}
