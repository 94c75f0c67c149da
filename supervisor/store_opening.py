"""Opens the store that a supervisor starts with, and for an embedded one finds another where that cannot be used.

A damaged, newer, full or unwritable store must not stop a launch: nothing in it is touched, and the jobs of this supervisor
go into a store of their own beside it (in the runtime directory where the state directory cannot be written, in memory where
nothing can). A held store is no such trouble: its holder is the supervisor to talk to.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import Store, StoreError, StoreHeld

HELD_RETRY_S = 3.0
_RETRY_EVERY_S = 0.2
_FALLBACK_PREFIX = "rsup-fallback-"

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

    def announce(self, rpc: str, rest: str) -> None:
        """Tell whoever finds the store held where we answer. Raise `StoreError`, `OSError`."""
        if isinstance(self.store, SqlStore):
            self.store.announce(rpc, rest)


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
    """A store for this supervisor's jobs alone: that of a supervisor that was in the same trouble and died, else a new one."""
    folders = [state, places.supervisor_runtime_dir(state)]
    earlier = [path for folder in folders for path in sorted(folder.glob(f"{_FALLBACK_PREFIX}*.db"), reverse=True)[:3]]
    for path in earlier:
        store = _try_open(path, holder)
        if store is not None and _has_live_jobs(store):
            return OpenedStore(store, path, store.database, trouble)
        if store is not None:
            store.close()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for folder in folders:
        path = folder / f"{_FALLBACK_PREFIX}{stamp}.db"
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
    try:
        return SqlStore.open(path, holder=holder, alone_may_migrate=True)
    except StoreError as error:
        _log.warning("%s", error)
        return None
