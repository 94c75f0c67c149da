"""What the healthcheck of this boot has told already: how far it has read the kernel's log, and the keys of events that stay
true (a counter's value, say). In `/run/rsup/told.json`, gone with the boot."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rsup.launcher.slurm.kernel_log import NOT_READ
from rsup.launcher.slurm.node_settings import UNUSABLE, NodePlaces, read_trusted, write_atomically

MAX_KEYS = 5000


@dataclass(frozen=True, slots=True)
class Told:
    """`sequence`: the newest line of the kernel's log that was looked at, `NOT_READ` for none."""

    boot_id: str
    sequence: int = NOT_READ
    keys: frozenset[str] = frozenset()

    def more(self, sequence: int, keys: Iterable[str]) -> "Told":
        """After more was told."""
        return Told(self.boot_id, max(sequence, self.sequence), frozenset(sorted({*self.keys, *keys})[-MAX_KEYS:]))


def _path(places: NodePlaces) -> Path:
    return places.run / "told.json"


def read_told(places: NodePlaces, boot: str) -> Told:
    """Of this boot; nothing where nothing can be read."""
    with suppress(*UNUSABLE):
        content = json.loads(read_trusted(_path(places), 4 << 20))
        if content["boot_id"] == boot:
            return Told(boot, int(content["sequence"]), frozenset(map(str, content["keys"])))
    return Told(boot)


def write_told(places: NodePlaces, told: Told) -> None:
    """Raise OSError where it cannot be written."""
    content = {"boot_id": told.boot_id, "sequence": told.sequence, "keys": sorted(told.keys)}
    write_atomically(_path(places), json.dumps(content).encode())
