"""Changes of devices and nodes made on the store itself, where no supervisor runs: under its lease, by the same pure core."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Connection

from rsup.supervisor.database import describe, find_database, split_target
from rsup.supervisor.events import Now
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.policy import Policy
from rsup.supervisor.hardware.verbs import VerbRequest, Verdict
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.wire import now_us


def change(
    state: Path, policy: Policy, requests: Callable[[Connection], Sequence[VerbRequest]], *, dry_run: bool = False
) -> list[Verdict]:
    """Decide on the requests, one after another, and keep what they lead to in one transaction. Raise `StoreHeld` where a
    supervisor holds the store, other `StoreError`s, and what `requests` raises for subjects that there are not."""
    target = find_database(state)
    place = split_target(target)
    if isinstance(place, Path) and not place.exists():
        raise QueryError(f"there is nothing in {describe(target)} yet: devices are known once a job has used them")
    store = SqlStore.open(target, holder=LeaseHolder.this_process(f"verb-{secrets.token_hex(4)}"), alone_may_migrate=False)
    try:
        wanted = store.change(requests)
        book = Book(store, policy, accepts_injected=True)
        book.recover()
        batch = Batch(Now(now_us(), 0.0), {})
        turn = book.turn(batch)
        verdicts = [turn.ask(request) for request in wanted]
        if not dry_run:
            store.commit(batch.records)
        return verdicts
    finally:
        store.close()
