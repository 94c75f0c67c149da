"""A whole store into an empty one of the other kind: every row of every table, keys and the store's id included.

Agents of running jobs know the store by its id and go on with the copy where they were. In one transaction of the target, from
one moment of the source; afterwards the target is read back and compared, so that what a database changed in passing is found.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from sqlalchemy import Connection, Table, delete, func, insert, select, text

from rsup.supervisor import tables
from rsup.supervisor.store import StoreError

_BATCH = 1000


@dataclass
class Copied:
    """Rows by table, and jobs among them that have not ended."""

    rows: dict[str, int] = field(default_factory=dict)
    live_jobs: int = 0


def copy_store(read: Connection, write: Connection, *, target: str) -> Copied:
    """Copy all. Raise `StoreError` where `target` (for people) is not empty or what arrived differs; database errors."""
    _check_empty(write, target)
    copied = Copied()
    for table in tables.metadata.sorted_tables:
        if table is tables.meta:
            continue
        statement, wanted = insert(table), 0
        copied.rows[table.name] = 0
        for batch in _batches(read, table):
            wanted += _digest(batch)
            write.execute(statement, batch)
            copied.rows[table.name] += len(batch)
        _count_on(write, table)
        if sum(_digest(batch) for batch in _batches(write, table)) != wanted:
            raise StoreError(f"{target} does not give back the rows of {table.name} as they were written: nothing was copied")
    _take_identity(read, write)
    copied.live_jobs = int(
        write.execute(select(func.count()).select_from(tables.jobs).where(tables.jobs.c.phase != "ended")).scalar() or 0
    )
    return copied


def _check_empty(write: Connection, target: str) -> None:
    for table in tables.metadata.sorted_tables:
        if table is not tables.meta and write.execute(select(func.count()).select_from(table)).scalar():
            raise StoreError(f"{target} is not empty ({table.name} has rows): copy into a fresh one, or use `rsup db merge`")


def _batches(connection: Connection, table: Table) -> Iterator[list[dict[str, object]]]:
    rows = connection.execute(select(table).execution_options(yield_per=_BATCH))
    for batch in rows.partitions(_BATCH):
        yield [dict(row._mapping) for row in batch]


def _digest(batch: list[dict[str, object]]) -> int:
    """The same in any order: databases sort texts in ways of their own."""
    rows = (repr(sorted(row.items())).encode("utf-8", "surrogatepass") for row in batch)
    return sum(int.from_bytes(hashlib.sha256(row).digest(), "big") for row in rows)


def _count_on(write: Connection, table: Table) -> None:
    """Rows that come later get numbers behind those that were brought (PostgreSQL's sequences know nothing of them)."""
    column = table.autoincrement_column
    if column is not None and write.dialect.name == "postgresql":
        highest = write.execute(select(func.max(column))).scalar()
        if highest:
            sequence = text("SELECT setval(pg_get_serial_sequence(:table, :column), :highest)")
            write.execute(sequence, {"table": table.name, "column": column.name, "highest": highest})


def _take_identity(read: Connection, write: Connection) -> None:
    of_store = select(tables.meta.c.value).where(tables.meta.c.key == "store")
    identity = read.execute(of_store).scalar()
    if identity:
        write.execute(delete(tables.meta).where(tables.meta.c.key == "store"))
        write.execute(insert(tables.meta).values(key="store", value=identity))
