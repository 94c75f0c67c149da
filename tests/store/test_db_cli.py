"""`rsup db`: backup, check, upgrade, merge, by hand and beside a running supervisor."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import select
from store_story import event, holder, job_key, saved, story

from rsup.launcher import cli
from rsup.supervisor import db_cli, schema, tables
from rsup.supervisor.database import reader_engine, sqlite_writer
from rsup.supervisor.db_cli import main
from rsup.supervisor.lease import LeaseRecord
from rsup.supervisor.records import DeviceSeen, IncidentSaved, JobKey, NodeSeen, Record
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.sqlite_file import make_fresh_file
from rsup.supervisor.store import StoreError, StoreHeld
from rsup.supervisor.wire import UsageError


@pytest.fixture
def state(own_directories: Path) -> Path:
    """The state directory that the environment names."""
    (own_directories / "state").mkdir()
    return own_directories / "state"


def fill(target: Path | str, *jobs: list[Record]) -> None:
    store = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    for records in jobs:
        store.commit(records)
    store.close()


def ended(key: JobKey, num_events: int = 3, **fields: object) -> list[Record]:
    """A finished job; made at a time of its own unless told."""
    times = {"created_us": 1000 + key.run, "ended_us": 5000} | fields
    return [saved(key, "ended", **times), *story(key, num_events)[1:]]


def events_of(target: Path | str) -> dict[str, int]:
    engine = reader_engine(target)
    found: dict[str, int] = {}
    with engine.connect() as connection:
        columns = (tables.jobs.c.job_id, tables.jobs.c.run)
        for job_id, run in connection.execute(select(*columns).join(tables.events)):
            found[f"{job_id}.{run}"] = found.get(f"{job_id}.{run}", 0) + 1
    engine.dispose()
    return found


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_backup_beside_a_running_supervisor(open_store, state: Path, capsys) -> None:
    store = open_store(state / "rsup.db")
    store.commit(story(job_key(), 5))
    copy = Path(str(answer(capsys, "backup")["backup"]))
    store.commit([event(job_key(), 6)])
    assert copy.parent == state and events_of(copy) == {"t1.1": 5}
    assert oct(copy.stat().st_mode)[-3:] == "600"
    named = answer(capsys, "backup", str(state / "mine.db"))
    assert events_of(Path(str(named["backup"]))) == {"t1.1": 6}
    with pytest.raises(UsageError, match="exists"):
        main(["backup", str(state / "mine.db")])
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_sigterm_in_a_backup_leaves_nothing_behind(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = tmp_path / "pg_dump"
    dump.write_text('#!/bin/sh\necho $$ > "$0.pid"\nmv "$0.pid" "$0.started"\nexec sleep 200\n')
    dump.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = [sys.executable, "-m", "rsup.launcher", "db", "backup", "--database-url", "postgresql://nobody@127.0.0.1:9/x"]
    with subprocess.Popen([*words, str(state / "b.dump")], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until((tmp_path / "pg_dump.started").exists)
            assert [path.name for path in state.iterdir()] == [f".b.dump.arriving-{process.pid}"]
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert list(state.iterdir()) == []
    pid = int((tmp_path / "pg_dump.started").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_backup_of_a_server_is_a_file(open_store, postgres: str, state: Path, capsys) -> None:
    sightings = [NodeSeen("n", 5, job_key(), "active"), DeviceSeen("G", 6, "n", job=job_key(), attempt=1, rank=0)]
    fill(postgres, ended(job_key("a")), [*story(job_key()), *sightings])
    target = state / "copy.db"
    answer(capsys, "backup", str(target), "--database-url", postgres)
    assert target.read_bytes()[18:20] == b"\x01\x01", "no write-ahead log, whose files a reader would leave beside it"
    assert events_of(target) == {"a.1": 3, "t1.1": 3}
    store = open_store(target)
    assert store.live_jobs() == [(job_key(), b"\x00\xffstate")]
    with reader_engine(target).connect() as connection:
        assert len(connection.execute(select(tables.placements)).all()) == 1
        assert connection.execute(select(tables.nodes.c.role)).scalar() == "active"


def test_check_of_a_sound_store(open_store, sql_target: Path | str, state: Path, capsys) -> None:
    url = str(sql_target) if isinstance(sql_target, str) else f"sqlite:///{sql_target}"
    fill(sql_target, ended(job_key()))
    found = answer(capsys, "check", "--database-url", url)
    expected = {"ok": True, "revision": tables.HEAD, "jobs": 1, "events": 3, "problems": []}
    assert {name: found[name] for name in expected} == expected
    open_store(sql_target)
    found = answer(capsys, "check", "--database-url", url)
    assert found["holder"]["lives"] is True  # type: ignore[index]


def test_check_names_no_holder_that_is_gone(state: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    fill(state / "rsup.db", ended(job_key()))
    gone = LeaseRecord(**{**asdict(holder()), "pid": 7, "start_ticks": 1, "term": 1})
    monkeypatch.setattr(db_cli, "read_record", lambda path: gone)
    monkeypatch.setattr(LeaseRecord, "process_lives", lambda *of: False)
    main(["check"])
    assert "held by nobody now; pid 7 on " in capsys.readouterr().out


def test_check_finds_damage(state: Path, capsys) -> None:
    fill(state / "rsup.db", *(ended(job_key(f"j{n}"), 40) for n in range(5)))
    data = bytearray((state / "rsup.db").read_bytes())
    for page in range(8, len(data) // 4096):
        data[page * 4096 : page * 4096 + 200] = b"\x55" * 200
    (state / "rsup.db").write_bytes(data)
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["problems"]
    assert main(["check"]) == 1
    assert "NOT SOUND" in capsys.readouterr().out


def test_check_of_another_releases_store(state: Path, capsys) -> None:
    path = state / "rsup.db"
    make_fresh_file(path)
    engine = sqlite_writer(path, foreign_keys=False)
    with engine.begin() as connection:
        tables.metadata.drop_all(connection)
        tables.alembic_version.drop(connection)
    schema.migrate(engine, revision=tables.REVISIONS[0])
    engine.dispose()
    assert main(["check"]) == 0, "an old schema is no damage"
    said = capsys.readouterr().out
    assert f"sound, schema {tables.REVISIONS[0]}, 0 jobs" in said and "NOT SOUND" not in said
    assert f"upgrade it to {tables.HEAD} with `rsup db upgrade`" in said
    found = answer(capsys, "check")
    assert (found["ok"], found["is_old"], found["problems"]) == (True, True, [])
    assert main(["upgrade"]) == 0
    capsys.readouterr()
    assert answer(capsys, "check")["is_old"] is False
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert main(["check"]) == 1
    said = capsys.readouterr().out
    assert "CANNOT BE CHECKED by this release, schema 9999" in said and "newer than this release's" in said


def test_no_store_is_one_line(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["check"], ["backup"], ["upgrade"], ["merge", str(state / "nothing.db")]):
        assert cli.main(["db", *words]) == 1
        printed = capfd.readouterr().err
        assert printed.count("\n") == 1 and "there is no store at" in printed, printed
    assert not list(state.iterdir()), "and nothing is made"


def test_wrong_usage_is_one_line(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["vacuum"], ["check", "--what"], ["merge"], ["check", "--database-url", "mysql://x/y"]):
        assert cli.main(["db", *words]) == 2, words
        assert capfd.readouterr().err.count("\n") == 1


def test_upgrade_of_an_up_to_date_store(state: Path, capsys) -> None:
    fill(state / "rsup.db", ended(job_key()))
    found = answer(capsys, "upgrade")
    assert found["from"] == found["to"] == tables.HEAD and found["backup"] is None
    main(["upgrade"])
    assert "already" in capsys.readouterr().out


def test_upgrade_and_merge_respect_the_lease(open_store, state: Path, tmp_path: Path) -> None:
    fill(tmp_path / "other.db", ended(job_key()))
    open_store(state / "rsup.db")
    for words in (["upgrade"], ["merge", str(tmp_path / "other.db")]):
        with pytest.raises(StoreHeld):
            main(words)


def test_merge_can_be_repeated(sql_target: Path | str, state: Path, tmp_path: Path, capsys) -> None:
    url = str(sql_target) if isinstance(sql_target, str) else f"sqlite:///{sql_target}"
    fill(sql_target, ended(job_key("ours"), 2))
    fill(state / "rsup.db", ended(job_key("a"), 5), ended(job_key("b"), 2500), story(job_key("live"), 4))
    first = answer(capsys, "merge", str(state), "--database-url", url)
    assert (first["new_jobs"], first["new_events"], first["still_live"]) == (2, 2505, 1)
    assert events_of(sql_target) == {"ours.1": 2, "a.1": 5, "b.1": 2500}
    again = answer(capsys, "merge", str(state), "--database-url", url)
    assert (again["jobs"], again["new_jobs"], again["new_events"]) == (2, 0, 0)
    fill(state / "rsup.db", [saved(job_key("live"), "ended", ended_us=9, created_us=1000), event(job_key("live"), 5)])
    last = answer(capsys, "merge", str(state / "rsup.db"), "--database-url", url)
    assert (last["new_jobs"], last["new_events"]) == (1, 5)


def test_merge_brings_what_is_newer_and_keeps_what_is_not(state: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.db"
    incident = IncidentSaved(job_key("a"), 1, 1, 50, "exit", text="first")
    fill(
        state / "rsup.db",
        [*ended(job_key("a"), 2, updated_us=10), incident],
        ended(job_key("b"), 2, updated_us=90, exit_code=7),
    )
    later = IncidentSaved(job_key("a"), 1, 1, 50, "exit", text="later")
    fill(
        other, [*ended(job_key("a"), 4, updated_us=20, exit_code=3), later], ended(job_key("b"), 2, updated_us=10, exit_code=8)
    )
    main(["merge", str(other)])
    with reader_engine(state / "rsup.db").connect() as connection:
        codes = dict(connection.execute(select(tables.jobs.c.job_id, tables.jobs.c.exit_code)).fetchall())
        assert codes == {"a": 3, "b": 7}
        assert connection.execute(select(tables.incidents.c.text)).scalars().all() == ["later"]
    assert events_of(state / "rsup.db") == {"a.1": 4, "b.1": 2}


def test_two_jobs_of_one_name_both_stay(state: Path, tmp_path: Path, capsys) -> None:
    fill(state / "rsup.db", ended(job_key(run=1), 1, created_us=10), ended(job_key(run=2), 2, created_us=20))
    fill(tmp_path / "other.db", ended(job_key(run=1), 5, created_us=15))
    first = answer(capsys, "merge", str(tmp_path / "other.db"))
    assert (first["new_jobs"], first["renumbered"]) == (1, 1)
    expected = {"t1.1": 1, "t1.2": 2, "t1.3": 5}
    assert events_of(state / "rsup.db") == expected
    answer(capsys, "merge", str(tmp_path / "other.db"))
    assert events_of(state / "rsup.db") == expected


def test_a_store_is_not_merged_with_itself(state: Path) -> None:
    fill(state / "rsup.db", ended(job_key()))
    with pytest.raises(UsageError, match="is the store itself"):
        main(["merge", str(state)])


def test_an_empty_name_is_no_store(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(state / "rsup.db", ended(job_key()))
    (state / "here").mkdir()
    monkeypatch.chdir(state / "here")  # what an empty text would mean
    for words, name in (
        (["copy", str(state), ""], "TO"),
        (["copy", "", str(state / "new.db")], "FROM"),
        (["merge", ""], "OTHER"),
    ):
        with pytest.raises(UsageError, match=f"^{name} is empty"):
            main(words)
    assert list((state / "here").iterdir()) == [] and not (state / "new.db").exists()


def test_a_merge_from_nothing_names_what_was_meant(state: Path, tmp_path: Path) -> None:
    fill(state / "rsup.db", ended(job_key()))
    with pytest.raises(StoreError, match=r"there is no store at .*/nosuch\.db; check OTHER"):
        main(["merge", str(tmp_path / "nosuch.db")])


def test_a_settings_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        main(["check", "--config", str(tmp_path)])
    assert str(caught.value) == f"cannot read the settings file {tmp_path}: Is a directory"


def test_a_merge_from_garbage_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "other.db").write_text("no database at all" * 500)
    with pytest.raises(StoreError, match="no rsup store"):
        main(["merge", str(tmp_path / "other.db")])
