"""Where devices sit, found by board, serial or node without a look into the store. Pure."""

from collections.abc import Iterable

from rsup.supervisor.records import SeatSaved

_Key = tuple[str, int]
"""UUID, and when the stay began."""


class SeatIndex:
    """Stays of devices, the newest version of each. A loop's book holds all that are open: some 500 bytes each."""

    def __init__(self, seats: Iterable[SeatSaved] = ()) -> None:
        self._seats: dict[_Key, SeatSaved] = {}
        self._by_uuid: dict[str, set[_Key]] = {}
        self._by_serial: dict[str, set[_Key]] = {}
        self._by_node: dict[str, set[_Key]] = {}
        for one in seats:
            self.put(one)

    def put(self, seat: SeatSaved) -> None:
        """Add a stay, or write over what is there of it."""
        self.drop(seat)
        key = (seat.uuid, seat.from_us)
        self._seats[key] = seat
        for index, name in self._places(seat):
            index.setdefault(name, set()).add(key)

    def drop(self, seat: SeatSaved) -> None:
        """Forget a stay, if it is there."""
        key = (seat.uuid, seat.from_us)
        before = self._seats.pop(key, None)
        for index, name in self._places(before) if before is not None else ():
            index[name].discard(key)
            if not index[name]:
                del index[name]

    def get(self, seat: SeatSaved) -> SeatSaved | None:
        """What is here of the same stay."""
        return self._seats.get((seat.uuid, seat.from_us))

    def find(self, uuids: Iterable[str], serials: Iterable[str] = (), node: str = "") -> list[SeatSaved]:
        """Stays of these boards or on that node, by UUID and beginning."""
        keys = set(self._by_node.get(node, ()))
        for index, names in ((self._by_uuid, uuids), (self._by_serial, serials)):
            for name in names:
                keys |= index.get(name, set())
        return [self._seats[key] for key in sorted(keys)]

    def _places(self, seat: SeatSaved) -> list[tuple[dict[str, set[_Key]], str]]:
        places = ((self._by_uuid, seat.uuid), (self._by_serial, seat.serial), (self._by_node, seat.node))
        return [(index, name) for index, name in places if name]
