"""The states of a device or node, in order of severity, and what each means for those who place ranks.

    clear -> watch -> suspect -> quarantined -> in_repair -> probation -> clear        retired: for good

Up to `suspect` a state is what the evidence adds up to at the moment (`scoring`): it comes and goes with it, and expires. From
`quarantined` on it stays until somebody's word, or for `probation` enough clean run time, ends it.
"""

from enum import StrEnum

from msgspec import Struct

from rsup.supervisor.records import EvidenceSaved, SubjectSaved
from rsup.supervisor.wire import AvoidedDevice

MAX_REASON_CHARS = 120


class Standing(StrEnum):
    """Where a device or node is."""

    CLEAR = "clear"
    WATCH = "watch"
    """There is evidence; used as before."""
    SUSPECT = "suspect"
    """Used last."""
    QUARANTINED = "quarantined"
    """Not used where others suffice."""
    IN_REPAIR = "in_repair"
    PROBATION = "probation"
    """Back in use; the next hit leads straight to quarantine, enough clean run time to `clear`."""
    RETIRED = "retired"
    """Gone; nothing but a person's `repair` leads back."""


SOFT = (Standing.CLEAR, Standing.WATCH, Standing.SUSPECT)
"""States that follow from evidence alone, and expire."""
OUT = (Standing.QUARANTINED, Standing.IN_REPAIR, Standing.RETIRED)
"""States in which a device stays out of placement where others suffice."""
REACTIONS = ("note", "watch", "suspect", "quarantined", "in_repair")
"""What evidence can lead to, in order. `note`: it is kept, and moves nothing."""


def rank(reaction: str) -> int:
    """Place in `REACTIONS`; `clear` counts as `note`."""
    return 0 if reaction == Standing.CLEAR else REACTIONS.index(reaction)


class Dossier(Struct, frozen=True):
    """All that decisions about one device or node need: its row, and its evidence by fingerprint."""

    saved: SubjectSaved
    rows: dict[str, EvidenceSaved] = {}

    @property
    def standing(self) -> Standing:
        return Standing(self.saved.state)


def clear_dossier(kind: str, subject: str, serial: str = "") -> Dossier:
    """Of a device or node that nothing was ever known against."""
    return Dossier(SubjectSaved(kind, subject, Standing.CLEAR.value, 0, "nothing is known against it", 0, serial=serial))


def is_open(saved: SubjectSaved) -> bool:
    """Whether it must be known at every placement: not clear, or with a person's word in force."""
    return saved.state != Standing.CLEAR or bool(saved.override)


def override_in_force(saved: SubjectSaved, now_us: int) -> str:
    """`allow` or `deny` where a person's word counts now, else empty."""
    until_us = saved.override_until_us
    return saved.override if saved.override and (until_us is None or now_us < until_us) else ""


def avoided(saved: SubjectSaved, name: str, now_us: int) -> AvoidedDevice | None:
    """What placement has to know, under the name that the device has now; None where it may be used freely."""
    word = override_in_force(saved, now_us)
    if word == "allow":
        return None
    if word == "deny":
        return AvoidedDevice(name, f"denied by {saved.override_actor}: {saved.override_reason}", quarantined=True)
    standing = Standing(saved.state)
    if standing in OUT or standing is Standing.SUSPECT:
        what = standing.value.replace("_", " ")
        return AvoidedDevice(name, f"{what}: {saved.reason}", quarantined=standing in OUT)
    return None


_NOT_IN_A_REASON = str.maketrans({'"': None, "'": None, "`": None, "=": " "})


def one_line(text: str, limit_chars: int = MAX_REASON_CHARS) -> str:
    """The first line of `text` as a reason that SLURM can show: bounded, without quotes, `=` and control characters."""
    stripped = text.strip()
    first = stripped.splitlines()[0] if stripped else ""
    if not first.isprintable():
        first = "".join(letter if letter.isprintable() else " " for letter in first)
    kept = first.translate(_NOT_IN_A_REASON)
    return kept if len(kept) <= limit_chars else kept[: limit_chars - 1] + "…"
