"""`rsup db backup|check|upgrade|merge|copy`: care for the store by hand.

`backup` and `check` only read, and work beside a running supervisor; `upgrade`, `merge` and `copy` take the lease, and so
refuse to while one runs.
"""

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from rsup.supervisor import postgres_dump, schema, tables
from rsup.supervisor.config import from_file
from rsup.supervisor.database import (
    DATABASE_NAME,
    Target,
    describe,
    find_database,
    noted_elsewhere,
    postgres_writer,
    reader_engine,
    split_target,
    sqlite_writer,
    store_of,
)
from rsup.supervisor.database_errors import translated
from rsup.supervisor.history_check import history_problems
from rsup.supervisor.lease import LeaseHolder, LeaseRecord, read_record
from rsup.supervisor.network_copy import copy_database
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.places import boot_id, state_dir, this_host
from rsup.supervisor.postgres_lease import is_held, read_holder
from rsup.supervisor.render import pieces, plural
from rsup.supervisor.sql_store import SqlStore, upgrade_store
from rsup.supervisor.sqlite_file import make_fresh_file
from rsup.supervisor.store import StoreDamaged, StoreError, StoreFull, StoreTooNew, StoreTooOld
from rsup.supervisor.store_copy import copy_store
from rsup.supervisor.store_merge import merge
from rsup.supervisor.store_move import check_filled, is_same, move_store
from rsup.supervisor.wire import RsupError, UsageError

Answer = dict[str, Any]

MERGING = (
    "Take over the jobs of another store that have ended, as when a launch went on with an embedded supervisor because the "
    "shared one did not answer, or when a supervisor had to use a store of its own. Run it where the store that is to have "
    "them is written, while no supervisor holds that: stop `rsup serve`, both where two share a database; running jobs wait "
    "for its return. OTHER must be seen from there: a state directory, or a copy made with `rsup db backup FILE`. It may be "
    "repeated."
)

COPYING = (
    "Copy a whole store into an empty one, as when a SQLite store moves to PostgreSQL, or back: all jobs, running ones too, "
    "all history and evidence. Stop `rsup serve` before, and start it on the copy: agents of running jobs wait for it and go "
    "on. FROM is left as it was; do not use it any more. A state directory keeps a note (`database-url`) of where its store "
    "went, by which commands find it; on the way back, what was left there is renamed."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rsup db ...` with `argv`; return the exit code. Raise `RsupError`, whose text is the one line to print."""
    options = _parser().parse_args(list(sys.argv[2:] if argv is None else argv))
    state = _settle(options)
    with _ended_by_sigterm():
        answer: Answer = options.run(options, state)
    print(json.dumps(answer, indent=1) if options.json else answer.pop("text"))
    return 0 if answer.get("ok", True) else 1


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: unfinished files are removed, the lease is given back."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settle(options: argparse.Namespace) -> Path:
    """The state directory; what is neither told by flags nor by the environment comes from the settings' file."""
    given = from_file(options.config) if options.config else {}
    options.database_url = options.database_url or os.environ.get("RSUP_DATABASE_URL") or given.get("database_url") or ""
    in_file = "" if os.environ.get("RSUP_STATE_DIR") else given.get("state_dir", "")
    return state_dir(options.state_dir or in_file or None)


def _parser() -> argparse.ArgumentParser:
    shared = OneLineParser(add_help=False)
    shared.add_argument("--state-dir", metavar="DIR", help="the state directory (RSUP_STATE_DIR, ~/.local/state/rsup)")
    shared.add_argument(
        "--database-url", metavar="URL", help="the store, where it is not in a state directory (RSUP_DATABASE_URL)"
    )
    shared.add_argument("--config", type=Path, metavar="FILE", help="take both from the settings of `rsup serve`, rsup.toml")
    shared.add_argument("--json", action="store_true", help="answer in JSON")
    parser = OneLineParser(prog="rsup db", description="Care for the store.")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=OneLineParser)
    backup = verbs.add_parser("backup", parents=[shared], help="write a copy of the store, while it is in use too")
    backup.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="where to (default: beside the store, with the time in its name); of a server's store: FILE.dump is made by "
        "pg_dump, any other is a SQLite file, which rsup can read and copy back (default: by pg_dump where it is installed)",
    )
    backup.set_defaults(run=_backup)
    check = verbs.add_parser(
        "check",
        parents=[shared],
        help="look for damage, and say which schema it has and who holds it (exit code 0: sound, also of an old schema)",
    )
    check.set_defaults(run=_check)
    upgrade = verbs.add_parser(
        "upgrade", parents=[shared], help="bring an older store to this release's schema, after a backup"
    )
    upgrade.add_argument("--no-backup", action="store_true", help="of a server's store: it has been backed up by other means")
    upgrade.set_defaults(run=_upgrade)
    merging = verbs.add_parser("merge", parents=[shared], help="take over the jobs of another store", description=MERGING)
    merging.add_argument("other", help="the other store: a file, a state directory or a database URL; it is only read")
    merging.set_defaults(run=_merge)
    copying = verbs.add_parser("copy", parents=[shared], help="copy the whole store into an empty one", description=COPYING)
    copying.add_argument("source", metavar="FROM", help="a file, a state directory or a database URL")
    copying.add_argument("target", metavar="TO", help="the same; it is made where it is missing, and must hold nothing")
    copying.set_defaults(run=_copy_all)
    return parser


# -------------------------------------------------------------------------------------------------------------- backup


def _backup(options: argparse.Namespace, state: Path) -> Answer:
    source = split_target(find_database(state, options.database_url))
    target = Path(os.path.abspath(options.file or _backup_name(source, state)))
    if target.exists():
        raise UsageError(f"{target} exists; name a file that does not")
    if not target.parent.is_dir():
        raise UsageError(f"the directory {target.parent} does not exist; make it, or name another file")
    if isinstance(source, Path) and target.suffix in postgres_dump.SUFFIXES:
        raise UsageError(f"{describe(source)} is a SQLite store, no dump can be made of it; name a file that ends in .db")
    engine = reader_engine(source)
    try:
        _copy(source, engine, target)
        size_bytes = target.stat().st_size
    finally:
        engine.dispose()
    return {"backup": str(target), "size_bytes": size_bytes, "text": f"backup written: {target} ({size_bytes} bytes)"}


def _copy(source: Path | URL, engine: Engine, target: Path) -> None:
    if not isinstance(source, Path) and target.suffix in postgres_dump.SUFFIXES:
        postgres_dump.dump(source, target)
        return
    if not isinstance(source, Path):
        _check_can_be_copied(engine, describe(source))
    try:
        if isinstance(source, Path):
            copy_database(source, target)
        else:
            _copy_rows(engine, target)
    except (sqlite3.Error, OSError, SQLAlchemyError) as error:
        cause = getattr(error, "orig", None) or error
        why = str(cause.strerror if isinstance(cause, OSError) and cause.strerror else cause)
        raise StoreError(f"no backup {target} of {describe(source)} was made: {' '.join(why.split())}") from error


def _check_can_be_copied(engine: Engine, database: str) -> None:
    with translated(database), engine.connect() as connection:
        revision = schema.read_revision(connection)
    if revision is None:
        raise StoreError(f"{database} is empty: there is nothing to back up")
    try:
        schema.check_revision(revision, database)
    except StoreTooOld:
        raise StoreError(
            f"{database} has the old schema {revision}, of which this release can only make a dump: name a file that ends in "
            ".dump"
        ) from None


def _backup_name(source: Path | URL, state: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if not isinstance(source, Path) and postgres_dump.program():
        return state / f"rsup.backup-{stamp}.dump"
    folder = source.parent if isinstance(source, Path) else state
    return folder / f"{DATABASE_NAME}.backup-{stamp}"


def _copy_rows(source: Engine, target: Path) -> None:
    """A server's store as a SQLite file, of one moment."""
    arriving = target.with_name(f".{target.name}.arriving-{os.getpid()}")
    try:
        make_fresh_file(arriving)
        engine = sqlite_writer(arriving)
        try:
            with source.connect() as read, engine.begin() as write:
                copy_store(read, write, target=str(target))
        finally:
            engine.dispose()
        with contextlib.closing(sqlite3.connect(arriving)) as whole:
            whole.execute("PRAGMA journal_mode = DELETE")  # else whoever reads it leaves files beside it
        arriving.replace(target)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            arriving.with_name(arriving.name + suffix).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- check


_FILLED_BY = "`rsup serve` makes one when it starts there, `rsup db copy` brings one"


def _check(options: argparse.Namespace, state: Path) -> Answer:
    target = find_database(state, options.database_url)
    place = split_target(target)
    answer: Answer = {"database": describe(target), "ok": True, "revision": None, "head": tables.HEAD, "holder": None}
    answer |= {"is_old": False, "is_known": True, "is_empty": False, "is_unread": False, "is_writable": None}
    problems: list[str] = []
    engine = reader_engine(target)
    try:
        with translated(describe(target)), engine.connect() as connection:
            if isinstance(place, Path):
                answer["size_bytes"] = place.stat().st_size
                rows = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars()
                problems += [str(row) for row in rows if row != "ok"]
                foreign = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                problems += [f"{table}: row {row} belongs to no {parent}" for table, row, parent, _ in foreign[:20]]
            answer["revision"] = schema.read_revision(connection) or "none"
            answer["is_old"] = answer["revision"] in tables.REVISIONS[:-1]
            answer["is_empty"] = answer["revision"] == "none"
            if not answer["is_old"] and not answer["is_empty"]:
                schema.check_revision(answer["revision"], describe(target))
            there = set(inspect(connection).get_table_names())
            for table in (tables.jobs, tables.events, tables.cases, tables.evidence, tables.subjects):
                if table.name in there:
                    answer[table.name] = connection.execute(select(func.count()).select_from(table)).scalar()
            problems += [] if answer["is_old"] or answer["is_empty"] else history_problems(connection)
            problems += [f"there is no store in it yet: {_FILLED_BY}"] if answer["is_empty"] else []
            problems += filter(None, [schema.encoding_problem(connection, describe(target))])
            if not isinstance(place, Path):
                answer["holder"] = _holder(read_holder(connection), is_held(connection))
                connection.rollback()
                if not problems and (why := _cannot_be_written(place, describe(target))):
                    answer["is_writable"] = False
                    problems.append(why)
                answer["size_bytes"] = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar()
                answer["notes"] = _server_notes(connection)
    except StoreTooNew as error:
        problems.append(str(error))
        answer["is_known"] = False
    except StoreError as error:
        problems.append(str(error))
        answer["is_unread"] = answer["revision"] is None and not isinstance(error, StoreDamaged)
    finally:
        engine.dispose()
    if isinstance(place, Path):
        shared = place if options.database_url else state / DATABASE_NAME
        answer["holder"] = _holder(read_record(shared) or read_record(place))
    answer.update(ok=not problems, problems=problems)
    answer["text"] = _check_text(answer)
    return answer


_SOME_ROOM = "SELECT md5(n::text) AS text FROM generate_series(1, 4000) n"


def _holder(record: LeaseRecord | None, is_held: bool | None = None) -> Answer | None:
    if record is None or record.released:
        return None
    runs = record.process_lives(this_host(), boot_id())
    return {**asdict(record), "lives": runs if is_held is None else is_held, "has_left": runs and is_held is False}


def _cannot_be_written(place: URL, name: str) -> str:
    """Why the server's database takes nothing now, empty where it does, or only another role may write. What is tried needs new
    room on its disk, and is undone."""
    engine = postgres_writer(place)
    try:
        with translated(name), engine.connect() as connection, connection.begin() as trial:
            connection.exec_driver_sql(f"CREATE TABLE rsup_check_{uuid.uuid4().hex} AS {_SOME_ROOM}")
            trial.rollback()
    except StoreFull as error:
        return str(error)
    except StoreError:
        return ""  # not ours to make tables in: whether rows can be written is not for this role to try
    finally:
        engine.dispose()
    return ""


def _server_notes(connection: Connection) -> list[str]:
    """What of the server's settings a supervisor should not rely on."""
    notes = []
    if connection.exec_driver_sql("SHOW fsync").scalar() == "off":
        notes.append("fsync is off on the server: if it crashes, what was committed may be lost or damaged")
    if connection.exec_driver_sql("SHOW track_activities").scalar() == "off":
        notes.append("track_activities is off on the server: a second supervisor cannot tell that the first hangs")
    return notes


def _check_text(answer: Answer) -> str:
    verdict = "sound" if answer["ok"] else "NOT SOUND" if answer["is_known"] else "CANNOT BE CHECKED by this release"
    lines = [f"{answer['database']}: {verdict}, schema {answer['revision']}"]
    if answer["is_writable"] is False:
        lines[0] = f"{answer['database']}: sound, but CANNOT BE WRITTEN, schema {answer['revision']}"
    if answer["is_empty"] or answer["is_unread"]:
        lines = [f"{answer['database']}: {'EMPTY' if answer['is_empty'] else 'CANNOT BE READ'}"]
    if "events" in answer:
        evidence = pieces(answer["evidence"]) if "evidence" in answer else "no evidence"
        lines[0] += f", {plural(answer['jobs'], 'job')}, {plural(answer['events'], 'event')}, {evidence}"
    if answer["is_old"]:
        lines.append(f"  an older release's schema: upgrade it to {answer['head']} with `rsup db upgrade`")
    lines += [f"  {problem}" for problem in [*answer["problems"], *answer.get("notes", ())]]
    if answer["holder"]:
        holder = answer["holder"]
        lives = {True: "runs", False: "is gone, or has given it up", None: "cannot be seen from here"}[holder["lives"]]
        who = f"pid {holder['pid']} on {holder['host']}"
        left = f"  held by nobody now; {who} had it, and runs: it has lost its session, or given it up"
        left = f"  held by nobody now; {who} had it, and {lives}" if holder["lives"] is False else left
        lines.append(left if holder["has_left"] or holder["lives"] is False else f"  held by {who}, which {lives}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- upgrade and merge


def _upgrade(options: argparse.Namespace, state: Path) -> Answer:
    target = _written_target(options, state)
    check_filled(target, "check --database-url")
    dumped = None if options.no_backup else _dump_before(target, state)
    try:
        migrated = upgrade_store(target, _holder_of_command())
    except (RsupError, KeyboardInterrupt):
        if dumped is not None:
            print(f"rsup db: the database as it was before: {dumped}", file=sys.stderr)
        raise
    name, before, backup = describe(target), tables.HEAD, dumped
    text = f"{name} has schema {before} already"
    if migrated is not None:
        before, backup = migrated.revision, migrated.backup or dumped
        text = f"{name} upgraded from schema {before} to {tables.HEAD}" + (f"; as it was: {backup}" if backup else "")
    return {"database": name, "from": before, "to": tables.HEAD, "backup": str(backup) if backup else None, "text": text}


def _dump_before(target: Target, state: Path) -> Path | None:
    """A dump of a server's store that is about to be migrated; None where there is nothing to migrate, or it is a file, which
    is copied before."""
    place = split_target(target)
    if isinstance(place, Path):
        return None
    engine = reader_engine(place)
    try:
        with translated(describe(place)), engine.connect() as connection:
            revision = schema.read_revision(connection)
    finally:
        engine.dispose()
    if revision not in tables.REVISIONS[:-1]:
        return None
    if not postgres_dump.program():
        raise UsageError("pg_dump is not installed here: back the database up by other means, and say so with --no-backup")
    backup = state / f"rsup.bak-{revision}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.dump"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    postgres_dump.dump(place, backup)
    return backup


def _copy_all(options: argparse.Namespace, state: Path) -> Answer:
    moved = move_store(options.source, options.target, _holder_of_command, state)
    rows = moved.copied.rows
    text = (
        f"copied from {moved.source} to {moved.target}: {plural(rows['jobs'], 'job')}, {plural(rows['events'], 'event')}, "
        f"{pieces(rows['evidence'])}; {moved.copied.live_jobs} of the jobs have not ended and go on with a supervisor on the "
        "copy"
    )
    text += f"; what {moved.target} was before: {moved.aside}" if moved.aside is not None else ""
    text += f"; {moved.note}" if moved.note else ""
    answer = {"from": moved.source, "to": moved.target, "rows": rows, "live_jobs": moved.copied.live_jobs}
    return {**answer, "as_it_was": str(moved.aside) if moved.aside else None, "text": text}


def _merge(options: argparse.Namespace, state: Path) -> Answer:
    other = options.other
    if not other:
        raise UsageError("OTHER is empty: name a store")
    if "://" not in other:
        other = store_of(Path(other)) if Path(other).is_dir() else Path(other)
    target = _written_target(options, state)
    if isinstance(other, Path) and not other.exists():
        raise StoreError(f"there is no store at {other}; check OTHER")
    if is_same(other, target):
        raise UsageError(f"{describe(other)} is the store itself; name another one")
    check_filled(other, "check OTHER", of_this_release=True)
    if not isinstance(split_target(target), Path):
        check_filled(target, "check --database-url; `rsup serve` makes the first")
    source = reader_engine(other)
    try:
        store = SqlStore.open(target, holder=_holder_of_command(), alone_may_migrate=False)
        try:
            with translated(describe(other)):
                merged = merge(source, store.change)
        finally:
            store.close()
    finally:
        source.dispose()
    text = f"{plural(merged.jobs, 'job')} looked at, {merged.new_jobs} new, {merged.new_events} events new"
    if merged.renumbered:
        text += f"; {merged.renumbered} got another run number"
    if merged.still_live:
        text += f"; {merged.still_live} left out, since they have not ended"
    if merged.new_evidence or merged.changed_subjects:
        text += f"; {pieces(merged.new_evidence)} new, {merged.changed_subjects} devices or nodes changed"
    return {"database": describe(target), "other": describe(other), **asdict(merged), "text": text}


def _written_target(options: argparse.Namespace, state: Path) -> Target:
    return options.database_url or noted_elsewhere(state) or state / DATABASE_NAME


def _holder_of_command() -> LeaseHolder:
    return LeaseHolder.this_process(f"db-{uuid.uuid4().hex[:8]}")
