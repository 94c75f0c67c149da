"""What the supervisor's loop knows of hardware: everything that is not clear, and where the boards of live agents sit.

The loop makes one `BookTurn` for each of its turns. What a turn decides joins the rows of that turn's transaction, and becomes
the book's own only by `keep`, after the commit: a commit that fails leaves nothing behind. Evidence about a subject is read
from the store when it is first needed, so counts go on after a restart.

Called from the loop's thread only. Raises `StoreError` where the store cannot be read.
"""

from collections import OrderedDict

from rsup.supervisor.hardware.book_turn import BookTurn, Key
from rsup.supervisor.hardware.device_machine import next_due_us
from rsup.supervisor.hardware.policy import Policy, built_in
from rsup.supervisor.hardware.seat_index import SeatIndex
from rsup.supervisor.hardware.states import Dossier, Standing, is_open
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.records import SubjectSaved
from rsup.supervisor.store import Store

KEPT_DOSSIERS = 2048
"""Evidence of so many subjects stays in memory after it was last needed."""


class Book:
    """One per loop. `accepts_injected`: evidence of runs with an armed injector moves states, too."""

    def __init__(self, store: Store, policy: Policy | None = None, *, accepts_injected: bool = False) -> None:
        self.store = store
        self.policy = policy or built_in()
        self.accepts_injected = accepts_injected
        self.open: dict[Key, SubjectSaved] = {}
        """Every subject that is not clear, or of which a person has spoken."""
        self.by_serial: dict[str, list[str]] = {}
        """Devices of these by their boards' serial."""
        self.names: dict[str, str] = {}
        """Device UUIDs of live agents whose record is kept under another UUID, and that."""
        self.contested: dict[tuple[str, str], str] = {}
        """Claims that cannot be true: (UUID, agent id), and why."""
        self.seats = SeatIndex()
        """Every stay that is not over: agents say `Hello` often, and all at once after a failure of the network."""
        self.models: dict[str, str] = {}
        self.cleaned_us = 0
        """When clean run time was last counted."""
        self.changes = 0
        """How many turns have changed something here."""
        self._dossiers: OrderedDict[Key, Dossier] = OrderedDict()
        self._due_us: int | None = None

    def recover(self) -> None:
        """Read what is not clear. Raise `StoreError`."""
        self.open = {(saved.kind, saved.subject): saved for saved in self.store.open_subjects()}
        self.seats = SeatIndex(self.store.open_seats())
        self._dossiers.clear()
        self._index()

    def turn(self, batch: Batch) -> BookTurn:
        """For one turn of the loop."""
        return BookTurn(self, batch)

    def keep(self, turn: BookTurn) -> None:
        """The turn has been committed."""
        self.changes += bool(turn.dossiers or turn.seats)
        for key, dossier in turn.dossiers.items():
            if is_open(dossier.saved):
                self.open[key] = dossier.saved
            else:
                self.open.pop(key, None)
            self._dossiers[key] = dossier
            self._dossiers.move_to_end(key)
        while len(self._dossiers) > KEPT_DOSSIERS:
            self._dossiers.popitem(last=False)
        for seat in turn.seats:
            if seat.to_us is None:
                self.seats.put(seat)
            else:
                self.seats.drop(seat)
        self.names.update(turn.names)
        self.models.update(turn.models)
        for claim, why in turn.claims.items():
            if why:
                self.contested[claim] = why
            else:
                self.contested.pop(claim, None)
        if turn.cleaned_us:
            self.cleaned_us = turn.cleaned_us
        if turn.dossiers:
            self._index()

    def dossier(self, key: Key) -> Dossier | None:
        """What is in memory of a subject, with its evidence."""
        return self._dossiers.get(key)

    def due(self, now_us: int) -> list[SubjectSaved]:
        """Subjects that something expires of now."""
        if self._due_us is None or now_us < self._due_us:
            return []
        return [saved for saved in self.open.values() if (us := next_due_us(saved)) is not None and us <= now_us]

    def on_probation(self) -> list[SubjectSaved]:
        """Subjects whose clean run time counts."""
        return [saved for saved in self.open.values() if saved.state == Standing.PROBATION]

    def _index(self) -> None:
        self._due_us = min((us for saved in self.open.values() if (us := next_due_us(saved)) is not None), default=None)
        self.by_serial = {}
        for (kind, name), saved in self.open.items():
            if kind == "device" and saved.serial:
                self.by_serial.setdefault(saved.serial, []).append(name)
