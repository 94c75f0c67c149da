"""Opens the store that a supervisor starts with, and for an embedded one finds another where that cannot be used.

A damaged, newer, full or unwritable store must not stop a launch: nothing in it is touched, and jobs go into a store of their
own beside it (in the runtime directory where the state directory cannot be written, in memory where nothing can), which the
next supervisor in that trouble takes up again, so that `rsup status` has one place to look. A held store is no such trouble:
its holder is the supervisor to talk to.
"""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.record_rows import save_meta
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import Store, StoreError, StoreHeld

HELD_RETRY_S = 3.0
_RETRY_EVERY_S = 0.2
MAX_TRIED = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedStore:
    """The store in use. `place` is what a person calls it; `trouble` is why it is not the usual one, empty if it is."""

    store: Store
    target: str | Path
    place: str
    trouble: str = ""

    @property
    def text(self) -> str:
        """Place and trouble in one line."""
        return f"{self.place} (in place of the usual store: {self.trouble})" if self.trouble else self.place

    @property
    def notice(self) -> str:
        """The sentence about the trouble for whoever starts a job, empty if there is none."""
        if not self.trouble:
            return ""
        read = f"; read it with RSUP_DATABASE_URL=sqlite:///{self.target}" if self.target else ""
        return f"{self.trouble}; this job's story is kept in {self.place}{read}"

    @property
    def store_id(self) -> str:
        """The store's random id, empty for one in memory. Raise `StoreError`."""
        return self.store.identity() if isinstance(self.store, SqlStore) else ""

    def announce(self, rpc: str, rest: str) -> None:
        """Tell whoever finds the store held where we answer. Raise `StoreError`, `OSError`."""
        if isinstance(self.store, SqlStore):
            self.store.announce(rpc, rest)

    def tell_secrets(self, digests: dict[str, str]) -> None:
        """Leave digests of this supervisor's secrets for one that stands by, which compares them with its own."""
        if isinstance(self.store, SqlStore):
            try:
                self.store.change(lambda connection: save_meta(connection, "holder_secrets", json.dumps(digests)))
            except StoreError as error:
                _log.warning("one that stands by cannot compare its secrets with ours: %s", error)


def open_usual(target: str | Path, holder: LeaseHolder, *, embedded: bool) -> OpenedStore:
    """The store of these settings. Raise `StoreError`; `StoreHeld` only for a holder that answers, or does not go soon."""
    deadline = time.monotonic() + HELD_RETRY_S
    while True:
        try:
            store = SqlStore.open(target, holder=holder, alone_may_migrate=embedded)
            return OpenedStore(store, target, store.database)
        except StoreHeld as held:
            if held.address or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_EVERY_S)


def open_fallback(state: Path, holder: LeaseHolder, trouble: str) -> OpenedStore:
    """A store in place of the usual one: the newest that a supervisor in such trouble has left and that can be written, one
    with live jobs before others; else a new one."""
    usable = [(path, store) for path in places.fallback_stores(state)[:MAX_TRIED] if (store := _try_open(path, holder))]
    if usable:
        chosen = next((one for one in usable if _has_live_jobs(one[1])), usable[0])
        for one in usable:
            if one is not chosen:
                one[1].close()
        return OpenedStore(chosen[1], chosen[0], chosen[1].database, trouble)
    for path in places.new_fallback_stores(state):
        store = _try_open(path, holder)
        if store is not None:
            return OpenedStore(store, path, store.database, trouble)
    return OpenedStore(MemoryStore(), "", "memory of the supervisor, lost with it", trouble)


def _has_live_jobs(store: SqlStore) -> bool:
    try:
        return bool(store.live_jobs())
    except StoreError:
        return False


def _try_open(path: Path, holder: LeaseHolder) -> SqlStore | None:
    """The store at `path`, if it can be opened and written."""
    store = None
    try:
        store = SqlStore.open(path, holder=holder, alone_may_migrate=True)
        store.probe()
    except StoreError as error:
        _log.warning("%s", error)
        if store is not None:
            store.close()
        return None
    return store
