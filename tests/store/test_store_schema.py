"""Schema and migrations: `tables` is what the migrations make, and a filled old store keeps everything."""

import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, NullPool, create_engine, inspect, select, text
from store_story import event, holder, job_key, story

from rsup.supervisor import schema, tables
from rsup.supervisor.database import reader_engine, split_target, sqlite_writer
from rsup.supervisor.sql_store import SqlStore, upgrade_store
from rsup.supervisor.store import StoreTooOld

SCRIPTS = Path(str(files("rsup.migrations").joinpath("env.py"))).parent

NEXT = '''"""A next schema, for the test."""

import sqlalchemy as sa
from alembic import op

revision = "9001"
down_revision = "{head}"
branch_labels = depends_on = None


def upgrade():
    with op.batch_alter_table("jobs") as batch:
        batch.add_column(sa.Column("note", sa.Text(), nullable=False, server_default="none"))
        batch.alter_column("reason", new_column_name="why")
    {extra}


def downgrade():
    raise NotImplementedError
'''


def engine_of(target: Path | str) -> Engine:
    place = split_target(target)
    return sqlite_writer(place, foreign_keys=False) if isinstance(place, Path) else create_engine(place, poolclass=NullPool)


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The migrations of a release after this one; calling it makes this process that release."""

    def become(extra: str = "pass") -> None:
        folder = tmp_path / "migrations%20"  # alembic's configuration would take % for its own
        shutil.copytree(SCRIPTS, folder)
        (folder / "versions" / "9001_next.py").write_text(NEXT.format(head=tables.HEAD, extra=extra))
        monkeypatch.setattr(schema, "files", lambda package: folder)
        monkeypatch.setattr(tables, "REVISIONS", (*tables.REVISIONS, "9001"))
        monkeypatch.setattr(tables, "HEAD", "9001")

    return become


def test_the_known_revisions_are_the_migrations() -> None:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [tables.HEAD]
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == tables.REVISIONS


def test_the_migrations_make_the_tables(sql_target: Path | str) -> None:
    if isinstance(sql_target, Path):
        sql_target.touch()
    engine = engine_of(sql_target)
    schema.migrate(engine)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []
    migrated = shape(engine)
    engine.dispose()
    assert set(migrated) == set(tables.metadata.tables)


def test_a_fresh_store_is_what_the_migrations_make(tmp_path: Path, open_store) -> None:
    (tmp_path / "a.db").touch()
    migrated = engine_of(tmp_path / "a.db")
    schema.migrate(migrated)
    open_store(tmp_path / "b.db")
    fresh = engine_of(tmp_path / "b.db")
    assert shape(migrated) == shape(fresh)
    for engine in (migrated, fresh):
        engine.dispose()


def shape(engine: Engine) -> dict[str, object]:
    """Columns, keys, indexes and foreign keys of each table."""
    found = inspect(engine)
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name)],
            found.get_pk_constraint(name)["constrained_columns"],
            sorted(
                str({**index, "dialect_options": {option: str(value) for option, value in index["dialect_options"].items()}})
                for index in found.get_indexes(name)
            ),
            sorted(str(unique["column_names"]) for unique in found.get_unique_constraints(name)),
            sorted(str(key) for key in found.get_foreign_keys(name)),
        )
        for name in found.get_table_names()
        if name != "alembic_version"
    }


def test_opening_needs_no_alembic(database: Path) -> None:
    script = """
import sys
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.lease import LeaseHolder
for _ in range(2):
    SqlStore.open(sys.argv[1], holder=LeaseHolder.this_process("x"), alone_may_migrate=True).close()
print(sorted({"alembic", "torch", "fastapi", "psycopg"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script, str(database)], capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.strip() == "[]"


def filled(target: Path | str) -> None:
    store = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    for number in range(5):
        store.commit(story(job_key(f"j{number}"), 20))
    store.close()


def content(target: Path | str) -> list[object]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found: list[object] = [connection.execute(text("SELECT job_id, state FROM jobs ORDER BY job_id")).all()]
        for table in (tables.events, tables.attempts):
            found.append(connection.execute(select(table).order_by(*table.primary_key)).all())
    engine.dispose()
    return found


def test_a_filled_old_file_is_migrated_after_a_backup(open_store, database: Path, next_release) -> None:
    filled(database)
    before, old = content(database), tables.HEAD
    next_release()
    with pytest.raises(StoreTooOld, match="run `rsup db upgrade`"):
        open_store(database)
    assert content(database) == before
    store = open_store(database, alone_may_migrate=True)
    assert content(database) == before
    assert [key.job_id for key, _ in store.live_jobs()] == [f"j{n}" for n in range(5)]
    store.commit([event(job_key("j1"), 21)])
    backup = database.with_name(f"rsup.db.bak-{old}")
    assert store.migrated is not None and store.migrated.backup == backup
    assert content(backup) == before and oct(backup.stat().st_mode)[-3:] == "600"
    with reader_engine(database).connect() as connection:
        assert connection.execute(text("SELECT DISTINCT note FROM jobs")).scalars().all() == ["none"]
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9001"
        assert connection.execute(text("PRAGMA foreign_key_check")).all() == []


def test_a_second_upgrade_keeps_the_backup_of_the_first(open_store, database: Path, next_release) -> None:
    filled(database)
    next_release()
    first = open_store(database, alone_may_migrate=True)
    assert first.migrated is not None
    backup, kept = first.migrated.backup, content(first.migrated.backup)
    first.close()
    shutil.copyfile(backup, database)  # somebody goes back
    second = open_store(database, alone_may_migrate=True)
    assert second.migrated is not None and second.migrated.backup != backup
    assert content(backup) == content(second.migrated.backup) == kept


def test_a_migration_that_fails_leaves_the_old_store(open_store, sql_target: Path | str, next_release) -> None:
    filled(sql_target)
    before = content(sql_target)
    next_release('op.execute("INSERT INTO nowhere VALUES (1)")')
    with pytest.raises(Exception, match="nowhere"):
        upgrade_store(sql_target, holder())
    assert content(sql_target) == before
    engine = reader_engine(sql_target)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() != "9001"
        assert "note" not in [column["name"] for column in inspect(connection).get_columns("jobs")]
    engine.dispose()


def test_a_filled_old_server_is_migrated_on_request_only(open_store, postgres: str, next_release) -> None:
    filled(postgres)
    before = content(postgres)
    next_release()
    with pytest.raises(StoreTooOld):
        open_store(postgres, alone_may_migrate=True)
    done = upgrade_store(postgres, holder())
    assert done is not None and done.backup is None
    assert content(postgres) == before
    open_store(postgres).commit([event(job_key("j1"), 21)])
    assert upgrade_store_again_is_refused(postgres)


def upgrade_store_again_is_refused(target: str) -> bool:
    with pytest.raises(Exception, match="is held by the supervisor"):
        upgrade_store(target, holder())
    return True
