"""What a supervisor does for a run of the matrix: it hears the cases, restarts ranks, and chooses their devices. Pure."""

from collections.abc import Mapping, Sequence
from itertools import permutations

MAX_RESTARTS = 6


class Placement:
    """Which device serves which rank, what is spare, and what has been tried and quarantined."""

    def __init__(self, devices: Sequence[str], spares: Sequence[str]) -> None:
        self.devices = list(devices)
        self._all = [*devices, *spares]
        self.quarantined: set[str] = set()

    def without(self, accused: Sequence[str]) -> bool:
        """Take the accused out of service; False if there are too few left."""
        self.quarantined |= set(accused)
        return self._place({})

    def elsewhere(self, tried: Mapping[int, Sequence[str]]) -> bool:
        """Put ranks onto devices that have not computed their data; False if there is no such placement."""
        return self._place(tried)

    def _place(self, tried: Mapping[int, Sequence[str]]) -> bool:
        """The allowed placement that moves the fewest ranks."""
        usable = [device for device in self._all if device not in self.quarantined]
        best: tuple[int, list[str]] | None = None
        for chosen in permutations(usable, len(self.devices)):
            if any(device in tried.get(rank, ()) for rank, device in enumerate(chosen)):
                continue
            moved = sum(new != old for new, old in zip(chosen, self.devices, strict=True))
            if best is None or moved < best[0]:
                best = moved, list(chosen)
        if best is None:
            return False
        self.devices = best[1]
        return True
