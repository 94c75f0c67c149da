"""What the supervisor needs of a store. `memory_store` and `sql_store` (SQLite, PostgreSQL) satisfy it."""

from collections.abc import Sequence
from typing import Protocol

from rsup.supervisor.records import EvidenceSaved, JobKey, Record, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.wire import RsupError


class StoreError(RsupError):
    """The store could not be read or written now; the text says which and what to do."""


class StoreFull(StoreError):
    """No space, no quota, or read-only: writing may work again later. Nothing of the transaction was kept."""


class StoreRefuses(StoreError):
    """The database answers, and does not take what it is given: the same again would be refused again."""


class StoreDamaged(StoreError):
    """Not a database, or a corrupt one."""


class StoreTooNew(StoreError):
    """The schema is newer than this release; it has not been touched."""


class StoreTooOld(StoreError):
    """The schema is older than this release, and we may not migrate it; it has not been touched."""


class StoreHeld(StoreError):
    """Another live supervisor holds the lease. `address` is where it answers, empty if unknown."""

    def __init__(self, message: str, address: str = "", rest: str = "") -> None:
        super().__init__(message)
        self.address = address
        self.rest = rest


class Store(Protocol):
    """Durable memory of a supervisor. Only the supervisor that holds the lease writes; all calls come from its loop."""

    def live_jobs(self) -> list[tuple[JobKey, bytes]]:
        """Key and machine state of every job that has not ended, oldest first."""
        ...

    def last_run(self, cluster: str, owner: str, job_id: str) -> tuple[JobKey, bytes] | None:
        """The newest run of that job, ended or not, with its machine state."""
        ...

    def open_subjects(self) -> list[SubjectSaved]:
        """Devices and nodes that are not clear, or of which a person has spoken."""
        ...

    def subjects_named(self, kind: str, names: Sequence[str], serials: Sequence[str]) -> list[SubjectSaved]:
        """Devices or nodes of these names or serials, where they have a row."""
        ...

    def evidence_about(self, kind: str, subject: str) -> list[EvidenceSaved]:
        """The newest evidence about a device or node."""
        ...

    def last_transition(self, kind: str, subject: str) -> TransitionSaved | None:
        """The newest change of its state."""
        ...

    def open_seats(self) -> list[SeatSaved]:
        """Every stay of a device that is not over."""
        ...

    def last_node(self, uuid: str) -> str:
        """Where a device was last seen, empty if nowhere."""
        ...

    def commit(self, records: Sequence[Record], /) -> None:
        """Write all of `records` or nothing, durably. Raise `StoreError`; then nothing was written."""
        ...

    def probe(self) -> None:
        """Write something durably that means nothing. Raise `StoreError` where nothing can be written now."""
        ...

    def close(self) -> None:
        """Give the lease back and close."""
        ...
