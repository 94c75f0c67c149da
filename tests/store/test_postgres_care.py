"""`rsup db` with PostgreSQL: copies from SQLite and back, dumps, upgrade with a backup before, check."""

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from postgres_server import PostgresServer
from sqlalchemy import create_engine, make_url, select, text
from store_story import event, holder, job_key, saved, story

from rsup.supervisor import db_cli, postgres_dump, schema, tables
from rsup.supervisor.database import find_database, note_elsewhere, reader_engine
from rsup.supervisor.db_cli import main
from rsup.supervisor.records import DeviceSeen, NodeSeen, SeatSaved
from rsup.supervisor.sources import Sources
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreError, StoreHeld
from rsup.supervisor.wire import UsageError

G = "GPU-1"


@pytest.fixture
def state(own_directories: Path) -> Path:
    (own_directories / "state").mkdir()
    return own_directories / "state"


def fill(target: Path | str) -> None:
    """A job that has ended, one that lives, what was seen and learned of hardware, and texts of all alphabets."""
    store = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    ended = saved(job_key("old"), "ended", created_us=900, ended_us=5000)
    store.commit([ended, *story(job_key("old"), 5)[1:]])
    store.commit([*story(job_key(), 3), event(job_key(), 4, text="Überlauf 漢字 🚀", data={"x": [1.5e-300, None, True]})])
    store.commit([NodeSeen("n", 5, job_key(), "active"), DeviceSeen(G, 6, "n", job=job_key(), attempt=1, rank=0)])
    store.commit([SeatSaved(G, 1, "n", "p"), SeatSaved(G, 7, "m", "q")])
    store.close()


def content(target: Path | str) -> dict[str, list[str]]:
    """Every row of every table, but for who held the store."""
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = {
            table.name: sorted(repr(sorted(row._mapping.items())) for row in connection.execute(select(table)))
            for table in tables.metadata.sorted_tables
            if table is not tables.meta
        }
        found["store"] = [connection.execute(select(tables.meta.c.value).where(tables.meta.c.key == "store")).scalar_one()]
    engine.dispose()
    return found


def test_a_store_moves_to_a_server_and_back_unchanged(
    postgres: str, postgres_server: PostgresServer, state: Path, open_store, monkeypatch, capsys
) -> None:
    fill(state / "rsup.db")
    before = content(state / "rsup.db")
    assert all(before[name] for name in ("jobs", "events", "attempts", "nodes", "devices", "seats"))
    assert main(["copy", str(state), postgres]) == 0
    said = capsys.readouterr().out
    assert "2 jobs" in said and "9 events" in said and "1 of the jobs have not ended" in said
    assert content(postgres) == before == content(state / "rsup.db")

    store = open_store(postgres)
    assert store.live_jobs() == [(job_key(), b"\x00\xffstate")]
    store.commit([saved(job_key("new")), event(job_key(), 5)])  # numbers of new rows follow those that were brought
    with pytest.raises(StoreHeld):
        main(["copy", postgres, str(state / "back.db")])
    store.close()
    assert main(["copy", postgres, str(state / "back.db"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["jobs"] == 3
    assert content(state / "back.db") == content(postgres)

    assert find_database(state) == postgres and (state / "database-url").stat().st_mode & 0o777 == 0o600
    main(["check", "--json"])
    assert json.loads(capsys.readouterr().out)["jobs"] == 3, "of the server: what was left in the directory is abandoned"
    assert main(["copy", postgres, str(state)]) == 0  # back where it came from
    (aside,) = state.glob("rsup.db.before-copy-*")
    assert str(aside) in capsys.readouterr().out and content(aside) == before
    assert content(state / "rsup.db") == content(postgres) and find_database(state) == state / "rsup.db"
    assert main(["copy", postgres, str(state / "fresh")]) == 0  # a directory that is not there is made, and is one
    assert content(state / "fresh" / "rsup.db") == content(postgres)

    # From server to server: the directory whose note led there must not go on naming what was left.
    for source in (str(state), postgres_server.new_database()):
        note_elsewhere(state, source if "://" in source else postgres)
        if "://" in source:
            fill(source)
        new = postgres_server.new_database()
        assert main(["copy", source, new]) == 0 and find_database(state) == new
        assert f"{state} find it there" in capsys.readouterr().out
    note_elsewhere(state, "")
    monkeypatch.chdir(state)
    with pytest.raises(UsageError, match=r"nothing called nonsense here: write postgresql://user@host/nonsense .* ./nonsense"):
        main(["copy", postgres, "nonsense"])
    with pytest.raises(UsageError, match="there is no store"):
        main(["copy", str(state / "nothing.db"), str(state / "made")])
    with pytest.raises(UsageError, match="cannot make the state directory /proc/nope"):
        main(["copy", postgres, "/proc/nope"])
    assert not (state / "nonsense").exists() and not (state / "made").exists()

    for source, target, why in (
        (state / "rsup.db", postgres, "is not empty"),
        (postgres, state, "is not empty"),
        (postgres, postgres, "same store"),
        (state / "nothing.db", postgres, "there is no store"),
    ):
        with pytest.raises((StoreError, UsageError), match=why):
            main(["copy", str(source), str(target)])


def spelled_otherwise(url: str) -> str:
    return str(make_url(url).update_query_dict({"application_name": "other"}))


def test_a_database_is_known_in_another_spelling(
    postgres: str, postgres_server: PostgresServer, state: Path, tmp_path: Path
) -> None:
    fill(state / "rsup.db")
    left = content(state / "rsup.db")
    assert main(["copy", str(state), postgres]) == 0
    other = spelled_otherwise(postgres)
    with pytest.raises(UsageError, match="are the same store"):
        main(["copy", str(state), other])
    with pytest.raises(UsageError, match="is the store itself"):
        main(["merge", other, "--database-url", postgres])

    copy = postgres_server.new_database()  # has the store's id too, and is another
    assert main(["copy", other, copy]) == 0 and find_database(state) == copy
    assert main(["merge", postgres, "--database-url", copy]) == 0
    assert main(["copy", spelled_otherwise(copy), str(state)]) == 0, "back, where the note has the other spelling"
    (aside,) = state.glob("rsup.db.before-copy-*")
    assert content(aside) == left and find_database(state) == state / "rsup.db"

    (tmp_path / "link.db").symlink_to(state / "rsup.db")
    with pytest.raises(UsageError, match="is the store itself"):
        main(["merge", str(tmp_path / "link.db")])


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_all_names(
    encoding: str, postgres: str, postgres_server: PostgresServer, state: Path, monkeypatch, capsys
) -> None:
    """It is refused at the start in a line, and what is in one already can be brought elsewhere."""
    bad = postgres_server.new_database(encoding)
    with pytest.raises(
        StoreError, match=f"has the encoding {encoding}, and must have UTF8: make another with `createdb -E UTF8"
    ):
        SqlStore.open(bad, holder=holder(), alone_may_migrate=False)
    (state / "full").mkdir()
    fill(state / "full" / "rsup.db")
    with pytest.raises(StoreError, match="must have UTF8"):
        main(["copy", str(state / "full"), bad])
    engine = create_engine(bad.replace("postgresql:", "postgresql+psycopg:"), connect_args={"client_encoding": "utf8"})
    with engine.begin() as connection:  # as an older release made it
        schema.make_fresh(connection)
    engine.dispose()
    assert main(["check", "--database-url", bad]) == 1
    said = capsys.readouterr().out
    assert "NOT SOUND, schema" in said and f"has the encoding {encoding}" in said
    monkeypatch.setenv("RSUP_DATABASE_URL", bad)
    assert Sources(state, "", note=lambda text: None).jobs(5, "", "") == []
    assert main(["copy", bad, postgres]) == 0


def test_what_the_environment_says_of_encodings_changes_nothing(postgres: str, monkeypatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "SQL_ASCII")
    fill(postgres)
    assert any("漢字" in row for row in content(postgres)["events"])


def test_whoever_asks_beside_a_standby_hears_who_leads(postgres: str, state: Path, open_store) -> None:
    notes: list[str] = []
    note_elsewhere(state, postgres)
    store = open_store(postgres)
    store.announce("tcp://db-2:1", "http://db-2:8650")
    assert Sources(state, "", note=notes.append).jobs(5, "", "") == []
    assert "runs elsewhere, pid" in notes[0] and "RSUP_SUPERVISOR_URL=http://db-2:8650 asks it; reading the store" in notes[0]
    store.close()
    assert Sources(state, "", note=notes.append).jobs(5, "", "") == []
    assert notes[1:] == ["no supervisor runs; reading the store"]


def test_passwords_are_neither_printed_nor_on_a_command_line(state: Path, monkeypatch, capsys) -> None:
    url = "postgresql://127.0.0.1:1/db?user=rsup&password=hunter2"
    assert main(["check", "--database-url", url]) == 1
    said = capsys.readouterr().out
    assert "CANNOT BE READ" in said and "NOT SOUND" not in said and "hunter2" not in said and "user=rsup" in said
    called: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        called.append((command, options["env"]))
        return subprocess.CompletedProcess(command, 1, "", "no")

    monkeypatch.setattr(postgres_dump, "program", lambda: "pg_dump")
    monkeypatch.setattr(postgres_dump.subprocess, "run", run)
    with pytest.raises(StoreError, match=r"pg_dump of .* failed: no"):
        main(["backup", str(state / "x.dump"), "--database-url", url])
    ((command, environment),) = called
    assert "hunter2" not in " ".join(command) and environment["PGPASSWORD"] == "hunter2"
    with pytest.raises(StoreError, match="cannot be given sslpassword safely"):
        main(["backup", str(state / "x.dump"), "--database-url", f"{url}&sslpassword=hunter3"])
    for given, why in (
        ("postgresql://rsup:sec:r@t/1@host", "more than one @"),
        ("host=127.0.0.1 password=sec", "neither a URL nor the path of a file"),
        ("nonsense-sec", "neither a URL nor the path of a file"),
        ("postgresql://rsup:sec/rsup", "port is no number"),
        ("postgresql+asyncpg://rsup:sec@h/rsup", "the driver psycopg and no other"),
    ):
        for verb in (["check", "--database-url", given], ["copy", str(state), given]):
            if "://" in given or verb[0] == "check" or "=" in given:
                with pytest.raises(UsageError, match=why) as caught:
                    main(verb)
                assert "sec" not in str(caught.value)
    assert not list(state.iterdir())


def test_the_settings_of_the_supervisor_name_the_store(postgres: str, state: Path, open_store, capsys) -> None:
    open_store(postgres).close()
    settings = state / "rsup.toml"
    settings.write_text(f'database_url = "{postgres}"\ndrains = "off"\n')
    assert main(["check", "--config", str(settings)]) == 0
    assert "postgresql" in capsys.readouterr().out


def _disk_is_full(source: Path, target: Path) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_what_cannot_be_backed_up_or_checked_says_why(postgres: str, state: Path, monkeypatch, capsys) -> None:
    assert main(["check", "--database-url", postgres]) == 1
    said = capsys.readouterr().out
    assert ": EMPTY" in said and "newer than this release" not in said
    fill(state / "rsup.db")
    with pytest.raises(UsageError, match=r"there is no store in .* yet"):
        main(["merge", postgres])
    with pytest.raises(StoreError, match="is empty: there is nothing to back up"):
        main(["backup", str(state / "x.db"), "--database-url", postgres])
    fill(postgres)
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{tables.REVISIONS[0]}'"))
        connection.execute(text("DROP TABLE drain_notes"))
    engine.dispose()
    with pytest.raises(StoreError, match=r"has the old schema .* can only make a dump") as caught:
        main(["backup", str(state / "x.db"), "--database-url", postgres])
    assert "x.db" not in str(caught.value)
    with pytest.raises(UsageError, match="is a SQLite store, no dump"):
        main(["backup", str(state / "x.dump")])
    with pytest.raises(UsageError, match=r"the directory .* does not exist; make it, or name another file"):
        main(["backup", str(state / "nowhere" / "x.db")])
    monkeypatch.setattr(db_cli, "copy_database", _disk_is_full)
    with pytest.raises(StoreError, match=r"^no backup .*x.db of .*rsup.db was made: database or disk is full$"):
        main(["backup", str(state / "x.db")])
    assert not list(state.glob("x.*"))


def test_dumps_of_a_server_can_be_restored(postgres: str, postgres_server, state: Path, capsys) -> None:
    if not shutil.which("pg_dump"):
        pytest.skip("pg_dump is not installed")
    fill(postgres)
    assert main(["backup", "--database-url", postgres, "--json"]) == 0
    dumped = Path(json.loads(capsys.readouterr().out)["backup"])
    assert dumped.suffix == ".dump" and dumped.parent == state and dumped.stat().st_mode & 0o777 == 0o600
    restored = postgres_server.new_database()
    subprocess.run(["pg_restore", "--no-owner", f"--dbname={restored}", str(dumped)], check=True, timeout=60)
    assert content(restored) == content(postgres)
    with pytest.raises(StoreError, match=r"pg_dump of .* failed: .*does not exist") as caught:
        main(
            [
                "backup",
                str(state / "x.dump"),
                "--database-url",
                postgres.replace("/t", "/nothing-t", 1).replace("rsup@", "rsup:secret@"),
            ]
        )
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in state.iterdir()) == [dumped.name], "nothing half written is left"


def test_without_pg_dump_rsup_copies_and_upgrade_asks_for_a_word(postgres: str, state: Path, monkeypatch, capsys) -> None:
    fill(postgres)
    monkeypatch.setattr(postgres_dump, "program", lambda: "")
    assert main(["backup", "--database-url", postgres, "--json"]) == 0
    copy = Path(json.loads(capsys.readouterr().out)["backup"])
    assert content(copy) == content(postgres)
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{tables.REVISIONS[0]}'"))
    with pytest.raises(UsageError, match="pg_dump is not installed here: back the database up"):
        main(["upgrade", "--database-url", postgres])
    with engine.connect() as connection:
        assert schema.read_revision(connection) == tables.REVISIONS[0], "not touched"
    engine.dispose()


def test_check_of_a_server_says_who_leads_and_what_is_unsafe(postgres: str, open_store, capsys) -> None:
    store = open_store(postgres)
    assert main(["check", "--database-url", postgres, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["holder"]["lives"] is True and found["size_bytes"] > 0
    assert any("fsync is off" in note for note in found["notes"])
    store.close()
    assert main(["check", "--database-url", postgres]) == 0
    assert "held by nobody now; pid" in capsys.readouterr().out, "the process runs, and has given it up"


def test_check_says_that_nothing_can_be_written(postgres: str, open_store, capsys) -> None:
    store = open_store(postgres)
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    with engine.connect() as connection:
        assert main(["check", "--database-url", postgres]) == 1
        said = capsys.readouterr().out
        assert "sound, but CANNOT BE WRITTEN" in said and "may only be read now" in said and "NOT SOUND" not in said
        connection.execute(text(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
        assert main(["check", "--database-url", postgres]) == 0
        tables_there = connection.execute(text("SELECT count(*) FROM pg_class WHERE relname LIKE 'rsup_check%'")).scalar()
        assert tables_there == 0, "what was tried is undone"
    engine.dispose()
    store.probe()


def test_a_mistyped_database_is_left_empty(postgres: str, state: Path, tmp_path: Path) -> None:
    """Opening a store to write makes it where there is none."""
    fill(tmp_path / "full.db")
    (tmp_path / "empty.db").touch()
    for words in (
        ["copy", postgres, str(state / "copy.db")],
        ["upgrade", "--database-url", postgres],
        ["upgrade", "--no-backup", "--database-url", postgres],
        ["merge", str(tmp_path / "full.db"), "--database-url", postgres],
        ["copy", str(tmp_path / "empty.db"), postgres],
        ["upgrade", "--database-url", f"sqlite:///{tmp_path / 'empty.db'}"],
    ):
        with pytest.raises(UsageError, match=r"there is no store in .* yet; check"):
            main(words)
    engine = reader_engine(postgres)
    with engine.connect() as connection:
        assert schema.read_revision(connection) is None
    engine.dispose()
    assert (tmp_path / "empty.db").stat().st_size == 0 and not (state / "copy.db").exists()


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt(), sqlite3.OperationalError("database or disk is full")])
def test_a_backup_that_fails_leaves_nothing(postgres: str, state: Path, monkeypatch, ends_by: BaseException) -> None:
    fill(postgres)
    whole = db_cli.copy_store

    def fail(read: Any, write: Any, **more: Any) -> None:
        whole(read, write, **more)
        raise ends_by

    monkeypatch.setattr(db_cli, "copy_store", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(ends_by, KeyboardInterrupt) else StoreError):
        main(["backup", str(state / "x.db"), "--database-url", postgres])
    assert not list(state.iterdir())


def test_an_upgrade_that_fails_names_the_dump_that_it_made(postgres: str, state: Path, monkeypatch, capsys) -> None:
    fill(postgres)
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{tables.REVISIONS[0]}'"))
    engine.dispose()
    monkeypatch.setattr(postgres_dump, "program", lambda: "pg_dump")
    monkeypatch.setattr(postgres_dump, "dump", lambda url, target: target.touch())
    with pytest.raises(StoreError):  # its tables are newer than it says
        main(["upgrade", "--database-url", postgres])
    (dumped,) = state.glob("*.dump")
    assert f"the database as it was before: {dumped}" in capsys.readouterr().err
