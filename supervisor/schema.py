"""Which schema a database has, how a fresh one is made, and how an old one is migrated.

An up-to-date store is opened without Alembic, whose import alone takes longer than everything else here. A fresh store is
made from `tables.metadata` in one transaction; an older one is migrated by `rsup.migrations`, in one transaction too, by
whoever holds its lease alone and has made a backup. A newer one is never touched.
"""

import secrets
from importlib.resources import files
from pathlib import Path

from sqlalchemy import Connection, Engine, insert, inspect, select

from rsup.supervisor import tables
from rsup.supervisor.database import describe
from rsup.supervisor.store import StoreDamaged, StoreTooNew, StoreTooOld


def read_revision(connection: Connection) -> str | None:
    """The schema's revision, None for an empty database. Raise `StoreDamaged` for somebody else's."""
    names = set(inspect(connection).get_table_names())
    if not names:
        return None
    revision = None
    if tables.alembic_version.name in names:
        revision = connection.execute(select(tables.alembic_version.c.version_num)).scalar()
    if revision is None:
        place = describe(connection.engine.url) if connection.dialect.name != "sqlite" else _file_of(connection)
        raise StoreDamaged(f"the database {place} is not rsup's: it has tables but no schema version; choose another")
    return str(revision)


def encoding_problem(connection: Connection, database: str) -> str:
    """Why a server's database cannot hold all names and reasons, empty where it can."""
    if connection.dialect.name == "sqlite":
        return ""
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding == "UTF8":
        return ""
    return (
        f"the database {database} has the encoding {encoding}, and must have UTF8: make another with "
        "`createdb -E UTF8 -T template0 NAME`, and bring what is in this one there with `rsup db copy`"
    )


def check_revision(revision: str, database: str) -> None:
    """Raise `StoreTooNew` or `StoreTooOld` unless `revision` is this release's."""
    if revision not in tables.REVISIONS:
        known = tables.HEAD
        raise StoreTooNew(
            f"the store {database} has schema {revision}, newer than this release's {known}: it was not touched; "
            "upgrade rsup or choose another --state-dir"
        )
    if revision != tables.HEAD:
        raise StoreTooOld(
            f"the store {database} has the old schema {revision}, this release needs {tables.HEAD}: run `rsup db upgrade`"
        )


def make_fresh(connection: Connection) -> None:
    """Make all tables and name the schema, in the transaction that is open on `connection`."""
    tables.metadata.create_all(connection, checkfirst=False)
    tables.alembic_version.create(connection, checkfirst=True)
    connection.execute(insert(tables.alembic_version).values(version_num=tables.HEAD))
    connection.execute(insert(tables.meta).values(key="store", value=secrets.token_hex(16)))


def prepare(connection: Connection, database: str) -> None:
    """Make a fresh schema where there is none; raise `StoreTooNew` or `StoreTooOld` for another release's."""
    revision = read_revision(connection)
    if revision is None:
        make_fresh(connection)
    else:
        check_revision(revision, database)


def migrate(engine: Engine, scripts: Path | None = None, revision: str = "head") -> None:
    """Migrate to `revision` in one transaction, all or nothing. `engine` must not enforce foreign keys (SQLite).

    `scripts`: another Alembic environment in place of `rsup.migrations`.
    """
    from alembic.command import upgrade
    from alembic.config import Config

    folder = scripts or Path(str(files("rsup.migrations").joinpath("env.py"))).parent
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        upgrade(config, revision)


def _file_of(connection: Connection) -> str:
    return str(connection.exec_driver_sql("PRAGMA database_list").all()[0][2])
