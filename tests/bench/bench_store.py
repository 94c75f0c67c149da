"""Cost of one commit of ten records to a SQLite store: goal 2 ms with the disk's sync, beside sqlite3 by hand."""

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.records import AttemptSaved, EventLogged, JobKey, JobSaved, NodeSeen, RankSaved, Record
from rsup.supervisor.sql_store import SqlStore
from tests.bench.table import Row, print_table

NUM_COMMITS = 500
KEY = JobKey("local", "ann", "bench", 1)


def ten_records(number: int) -> list[Record]:
    """What a turn of the loop with a handful of facts writes."""
    records: list[Record] = [JobSaved(KEY, b"s" * 4000, "running", 1, 1, 1, number)]
    records += [EventLogged(KEY, 6 * number + n, 1, 1, "RankExited", "rank 3 exited with 1 on node-17") for n in range(6)]
    records += [AttemptSaved(KEY, 1, 1, 1), RankSaved(KEY, 1, 3, "node-17"), NodeSeen("node-17", number, KEY, "active")]
    return records


def timed_ms(work: Callable[[int], object]) -> list[float]:
    samples = []
    for number in range(NUM_COMMITS):
        started = time.perf_counter()
        work(number)
        samples.append(1000 * (time.perf_counter() - started))
    return samples


def main() -> list[Row]:
    """Measure in a temporary directory on this machine's disk."""
    with tempfile.TemporaryDirectory(prefix="rsup-bench-") as folder:
        opening = []
        for _ in range(20):
            started = time.perf_counter()
            store = SqlStore.open(Path(folder, "rsup.db"), holder=LeaseHolder.this_process("bench"), alone_may_migrate=True)
            opening.append(1000 * (time.perf_counter() - started))
            store.close()
        store = SqlStore.open(Path(folder, "rsup.db"), holder=LeaseHolder.this_process("bench"), alone_may_migrate=True)
        commits = timed_ms(lambda number: store.commit(ten_records(number)))
        store.close()
        by_hand = _by_hand(Path(folder, "plain.db"))
    return [
        Row("commit of 10 records", "rsup, SQLite", commits, "ms", "<= 2 ms"),
        Row("commit of 10 records", "sqlite3 by hand", by_hand, "ms", note="one table, WAL, synced"),
        Row("open an up-to-date store", "rsup, SQLite", opening[1:], "ms"),
    ]


def _by_hand(path: Path) -> list[float]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, body BLOB)")
    body = os.urandom(500)

    def commit(_: int) -> None:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO t (body) VALUES (?)", [(body,)] * 10)
        connection.execute("COMMIT")

    samples = timed_ms(commit)
    connection.close()
    return samples


if __name__ == "__main__":
    print_table(main())
