"""`rsup db backup|check|upgrade|merge|copy`: care for the store by hand.

`backup` and `check` only read, and work beside a running supervisor; `upgrade`, `merge` and `copy` take the lease, and so
refuse to while one runs.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import URL, Connection, Engine, func, select

from rsup.supervisor import postgres_dump, schema, tables
from rsup.supervisor.database import DATABASE_NAME, Target, describe, find_database, reader_engine, split_target, sqlite_writer
from rsup.supervisor.database_errors import translated
from rsup.supervisor.history_check import history_problems
from rsup.supervisor.lease import LeaseHolder, LeaseRecord, read_record
from rsup.supervisor.network_copy import copy_database
from rsup.supervisor.places import boot_id, state_dir, this_host
from rsup.supervisor.postgres_lease import is_held, read_holder
from rsup.supervisor.render import pieces, plural
from rsup.supervisor.sql_store import SqlStore, upgrade_store
from rsup.supervisor.sqlite_file import make_fresh_file
from rsup.supervisor.store import StoreError
from rsup.supervisor.store_copy import copy_store
from rsup.supervisor.store_merge import merge
from rsup.supervisor.wire import UsageError

Answer = dict[str, Any]

MERGING = (
    "Take over the jobs of another store that have ended, as when a launch went on with an embedded supervisor because the "
    "shared one did not answer, or when a supervisor had to use a store of its own. Run it where the store that is to have "
    "them is written, while no supervisor holds that (stop `rsup serve`; running jobs wait for its return). OTHER must be "
    "seen from there: a state directory, or a copy made with `rsup db backup FILE`. It may be repeated."
)

COPYING = (
    "Copy a whole store into an empty one, as when a SQLite store moves to PostgreSQL, or back: all jobs, running ones too, "
    "all history and evidence. Stop `rsup serve` before, and start it on the copy: agents of running jobs wait for it and go "
    "on. FROM is left as it was; do not use it any more."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rsup db ...` with `argv`; return the exit code. Raise `RsupError`, whose text is the one line to print."""
    options = _parser().parse_args(list(sys.argv[2:] if argv is None else argv))
    state = state_dir(options.state_dir)
    answer: Answer = options.run(options, state)
    print(json.dumps(answer, indent=1) if options.json else answer.pop("text"))
    return 0 if answer.get("ok", True) else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    shared = _Parser(add_help=False)
    shared.add_argument("--state-dir", metavar="DIR", help="the state directory (RSUP_STATE_DIR, ~/.local/state/rsup)")
    shared.add_argument(
        "--database-url", metavar="URL", help="the store, where it is not in a state directory (RSUP_DATABASE_URL)"
    )
    shared.add_argument("--json", action="store_true", help="answer in JSON")
    parser = _Parser(prog="rsup db", description="Care for the store.")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)
    backup = verbs.add_parser("backup", parents=[shared], help="write a copy of the store, while it is in use too")
    backup.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="where to (default: beside the store, with the time in its name); of a server's store: FILE.dump is made by "
        "pg_dump, any other is a SQLite file, which rsup can read and copy back (default: by pg_dump where it is installed)",
    )
    backup.set_defaults(run=_backup)
    check = verbs.add_parser("check", parents=[shared], help="look for damage, and say which schema it has and who holds it")
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
    engine = reader_engine(source)
    try:
        with translated(str(target)):
            _copy(source, engine, target)
            size_bytes = target.stat().st_size
    finally:
        engine.dispose()
    return {"backup": str(target), "size_bytes": size_bytes, "text": f"backup written: {target} ({size_bytes} bytes)"}


def _copy(source: Path | URL, engine: Engine, target: Path) -> None:
    if isinstance(source, Path):
        copy_database(source, target)
    elif target.suffix in postgres_dump.SUFFIXES:
        postgres_dump.dump(source, target)
    else:
        _copy_rows(engine, target)


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
        with source.connect() as read, engine.begin() as write:
            copy_store(read, write, target=str(target))
        engine.dispose()
        arriving.replace(target)
    finally:
        arriving.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- check


def _check(options: argparse.Namespace, state: Path) -> Answer:
    target = find_database(state, options.database_url)
    place = split_target(target)
    answer: Answer = {"database": describe(target), "ok": True, "revision": None, "head": tables.HEAD, "holder": None}
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
            schema.check_revision(answer["revision"], describe(target))
            for table in (tables.jobs, tables.events, tables.cases, tables.evidence, tables.subjects):
                answer[table.name] = connection.execute(select(func.count()).select_from(table)).scalar()
            problems += history_problems(connection)
            if not isinstance(place, Path):
                answer["holder"] = _holder(read_holder(connection), is_held(connection))
                answer["size_bytes"] = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar()
                answer["notes"] = _server_notes(connection)
    except StoreError as error:
        problems.append(str(error))
    finally:
        engine.dispose()
    if isinstance(place, Path):
        shared = place if options.database_url else state / DATABASE_NAME
        answer["holder"] = _holder(read_record(shared) or read_record(place))
    answer.update(ok=not problems, problems=problems)
    answer["text"] = _check_text(answer)
    return answer


def _holder(record: LeaseRecord | None, is_held: bool | None = None) -> Answer | None:
    if record is None or record.released:
        return None
    return {**asdict(record), "lives": record.process_lives(this_host(), boot_id()) if is_held is None else is_held}


def _server_notes(connection: Connection) -> list[str]:
    """What of the server's settings a supervisor should not rely on."""
    notes = []
    if connection.exec_driver_sql("SHOW fsync").scalar() == "off":
        notes.append("fsync is off on the server: if it crashes, what was committed may be lost or damaged")
    if connection.exec_driver_sql("SHOW track_activities").scalar() == "off":
        notes.append("track_activities is off on the server: a second supervisor cannot tell that the first hangs")
    return notes


def _check_text(answer: Answer) -> str:
    lines = [f"{answer['database']}: {'sound' if answer['ok'] else 'NOT SOUND'}, schema {answer['revision']}"]
    if "events" in answer:
        lines[0] += f", {plural(answer['jobs'], 'job')}, {plural(answer['events'], 'event')}, {pieces(answer['evidence'])}"
    lines += [f"  {problem}" for problem in [*answer["problems"], *answer.get("notes", ())]]
    if answer["holder"]:
        holder = answer["holder"]
        lives = {True: "runs", False: "is gone", None: "cannot be seen from here"}[holder["lives"]]
        lines.append(f"  held by pid {holder['pid']} on {holder['host']}, which {lives}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- upgrade and merge


def _upgrade(options: argparse.Namespace, state: Path) -> Answer:
    target = _written_target(options, state)
    dumped = None if options.no_backup else _dump_before(target, state)
    migrated = upgrade_store(target, _holder_of_command())
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
    del state
    source, target = _store_named(options.source), _store_named(options.target)
    names = describe(source), describe(target)
    if names[0] == names[1]:
        raise UsageError(f"{names[0]} and {names[1]} are the same store")
    place = split_target(source)
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"there is no store at {place}")
    held = SqlStore.open(source, holder=_holder_of_command(), alone_may_migrate=False)
    try:
        engine = reader_engine(source)
        store = SqlStore.open(target, holder=_holder_of_command(), alone_may_migrate=False)
        try:
            with translated(names[0]), engine.connect() as read:
                copied = store.change(lambda write: copy_store(read, write, target=names[1]))
        finally:
            store.close()
            engine.dispose()
    finally:
        held.close()
    rows = copied.rows
    text = (
        f"copied from {names[0]} to {names[1]}: {plural(rows['jobs'], 'job')}, {plural(rows['events'], 'event')}, "
        f"{pieces(rows['evidence'])}; {copied.live_jobs} of the jobs have not ended and go on with a supervisor on the copy"
    )
    return {"from": names[0], "to": names[1], "rows": rows, "live_jobs": copied.live_jobs, "text": text}


def _store_named(text: str) -> Target:
    if "://" in text:
        return text
    return Path(text) / DATABASE_NAME if Path(text).is_dir() else Path(text)


def _merge(options: argparse.Namespace, state: Path) -> Answer:
    other = options.other
    if "://" not in other:
        other = find_database(Path(other), "") if Path(other).is_dir() else Path(other)
    target = _written_target(options, state)
    if describe(other) == describe(target):
        raise UsageError(f"{describe(other)} is the store itself; name another one")
    source = reader_engine(other)
    with translated(describe(other)), source.connect() as connection:
        schema.check_revision(schema.read_revision(connection) or "none", describe(other))
    store = SqlStore.open(target, holder=_holder_of_command(), alone_may_migrate=False)
    try:
        with translated(describe(other)):
            merged = merge(source, store.change)
    finally:
        store.close()
        source.dispose()
    text = f"{merged.jobs} jobs looked at, {merged.new_jobs} new, {merged.new_events} events new"
    if merged.renumbered:
        text += f"; {merged.renumbered} got another run number"
    if merged.still_live:
        text += f"; {merged.still_live} left out, since they have not ended"
    if merged.new_evidence or merged.changed_subjects:
        text += f"; {pieces(merged.new_evidence)} new, {merged.changed_subjects} devices or nodes changed"
    return {"database": describe(target), "other": describe(other), **asdict(merged), "text": text}


def _written_target(options: argparse.Namespace, state: Path) -> Target:
    url = options.database_url or os.environ.get("RSUP_DATABASE_URL")
    return url or state / DATABASE_NAME


def _holder_of_command() -> LeaseHolder:
    return LeaseHolder.this_process(f"db-{uuid.uuid4().hex[:8]}")
