"""Which device each local rank gets: as found, unless a device must be avoided. Pure.

Ranks take the device with the ordinal `LOCAL_RANK`. With nothing to avoid among the visible devices nothing is changed, not
even set. Otherwise the fewest ranks are moved:

1. A device that no rank should use (suspect or quarantined) is swapped with a spare; suspects come last in the list,
   quarantined ones stay out of it. Both stay in use where the others do not suffice.
2. A rank that must not run again where it ran (a result of its was rejected there) gets another device *and* another ordinal,
   by exchanging `LOCAL_RANK` with a rank beside it for which nothing has failed (else a spare device, else with any): Megatron-
   LM's rerun machine tells devices apart by node name and ordinal only, and would take another board at the same ordinal for
   the same one.

Devices that stand for those that the ranks compute on (of an inventory file, or CPU stand-ins) are placed alike; there is no
list to write for them, what a rank is told of its device (`device_variables`) is its seat.

Lists that we write name devices as the user did, or by index, with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. Where it is not known which
board an index means (unlike boards, counted fastest first), a list of the user's is left alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsup.launcher.seat_matching import match
from rsup.launcher.visible_devices import Naming, VisibleDevice, VisibleList
from rsup.supervisor.wire import AvoidedDevice, Device

QUARANTINED = 2


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The answer. `ordinals[i]` is the `LOCAL_RANK` of local rank i, `devices[i]` the device that it then takes."""

    devices: tuple[Device, ...]
    ordinals: tuple[int, ...]
    listed: tuple[Device, ...] = ()
    """The devices by ordinal."""
    shown: str | None = None
    """The new `CUDA_VISIBLE_DEVICES`; None: as found. With indices, `CUDA_DEVICE_ORDER` has to be `PCI_BUS_ID`."""
    is_by_index: bool = False
    lines: tuple[str, ...] = ()
    """What was changed, or could not be, and why: a line each, for people."""

    def environment(self) -> dict[str, str]:
        """The variables that change for every rank; `LOCAL_RANK` is not among them."""
        if self.shown is None:
            return {}
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.is_by_index else {}
        return {"CUDA_VISIBLE_DEVICES": self.shown} | order


def place(
    visible: VisibleList,
    stand_ins: Sequence[Device],
    num_ranks: int,
    avoided: Sequence[AvoidedDevice],
    first_rank: int = 0,
    *,
    is_fixed: bool = False,
) -> DevicePlacement:
    """Place the local ranks, global ranks from `first_rank`. `stand_ins`: their devices and spares, by ordinal, where no GPU is
    visible. `is_fixed`: which device an ordinal means cannot be changed."""
    return _Placing(visible, stand_ins, num_ranks, avoided, first_rank, is_fixed).done()


class _Placing:
    """One placement in progress."""

    def __init__(
        self,
        visible: VisibleList,
        stand_ins: Sequence[Device],
        num_ranks: int,
        avoided: Sequence[AvoidedDevice],
        first_rank: int,
        is_fixed: bool,
    ) -> None:
        listed = visible.devices or tuple(VisibleDevice(device, "") for device in stand_ins)
        uuids = {one.device.uuid for one in listed}
        ranks = range(first_rank, first_rank + num_ranks)
        self._avoided = [a for a in avoided if a.device in uuids and (a.rank is None or a.rank in ranks)]
        self._visible, self._has_gpus = visible, bool(visible.devices)
        self._is_fixed = is_fixed
        self._found = listed
        self._listed = list(listed)
        self._num_ranks, self._first_rank = num_ranks, first_rank
        self._ordinals = list(range(num_ranks))
        self._lines: list[str] = []

    def done(self) -> DevicePlacement:
        if self._avoided:
            may_write = self._may_write()
            if may_write:
                self._avoid_devices()
            self._part_ranks(may_write)
            self._say_what_stays()
        changed = self._has_gpus and [one.word for one in self._listed] != [one.word for one in self._found]
        by_index = self._visible.naming is Naming.INDEX
        shown = ",".join(str(one.index) if by_index else one.word for one in self._listed) if changed else None
        if shown is not None:
            self._lines.append(f"CUDA_VISIBLE_DEVICES={shown} in this attempt")
        return DevicePlacement(
            tuple(self._device_at(ordinal) for ordinal in self._ordinals),
            tuple(self._ordinals),
            tuple(one.device for one in self._listed),
            shown,
            by_index,
            tuple(self._lines),
        )

    # ------------------------------------------------------------------------------------------- devices nobody should use

    def _may_write(self) -> bool:
        if self._is_fixed or not self._has_gpus:
            return not self._is_fixed
        if self._visible.was_set and not self._visible.is_certain:
            self._lines.append(
                "CUDA_VISIBLE_DEVICES is left as it is: boards of several models, and indices that count the fastest first;"
                " set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by UUID"
            )
            return False
        return True

    def _avoid_devices(self) -> None:
        """Swap what ranks should not use with spares; put the rest of it last, or leave it out."""
        listed, used = self._listed, min(self._num_ranks, len(self._listed))
        if self._goes_by_ordinal:
            return  # the rank must go to another ordinal: the list stays as it is
        for place in sorted(range(used), key=lambda i: -self._badness(listed[i])):
            spare = min(range(used, len(listed)), key=lambda i: (self._badness(listed[i]), i), default=None)
            if spare is not None and self._badness(listed[spare]) < self._badness(listed[place]):
                bad = listed[place]
                listed[place], listed[spare] = listed[spare], bad
                self._lines.append(f"{_named(listed[place])} is used in place of {_named(bad)}: {self._reason(bad)}")
        tail = sorted(listed[used:], key=self._badness)
        left_out = [one for one in tail if self._badness(one) == QUARANTINED]
        if [one for one in tail if one not in left_out] == listed[used:]:
            return
        listed[used:] = [one for one in tail if one not in left_out]
        for one in left_out:
            self._lines.append(f"{_named(one)} is left out: {self._reason(one)}")

    def _badness(self, one: VisibleDevice) -> int:
        """`QUARANTINED`, 1: suspect, 0: nothing is known against it."""
        return max((QUARANTINED if a.quarantined else 1 for a in self._avoided if a.device == one.device.uuid), default=0)

    def _reason(self, one: VisibleDevice) -> str:
        return next(a.reason for a in self._avoided if a.device == one.device.uuid)

    # ---------------------------------------------------------------------------------- ranks that must not run there again

    @property
    def _goes_by_ordinal(self) -> bool:
        """Whether the only rank of the node moves by its ordinal: nobody is there to exchange `LOCAL_RANK` with."""
        own = [a for a in self._avoided if a.rank is not None]
        return self._num_ranks == 1 and bool(own) and (self._has_gpus or any(a.ordinal >= 0 for a in own))

    def _part_ranks(self, may_write: bool) -> None:
        """Give each such rank another device, at another ordinal if that matters."""
        for local_rank in range(self._num_ranks):
            ordinal, goes = self._ordinals[local_rank], self._goes_by_ordinal
            if self._fits(local_rank, ordinal) and not (goes and self._badness(self._listed[ordinal])):
                continue
            moved = self._to_ordinal(ordinal) if goes else self._moved(local_rank, may_write)
            if moved is not None:
                self._lines.append(moved)
        if not all(self._fits(local_rank, ordinal) for local_rank, ordinal in enumerate(self._ordinals)):
            self._match(may_write)

    def _moved(self, local_rank: int, may_write: bool) -> str | None:
        """First to a device on which nothing has failed, of a rank beside it or a spare: what fails there too is data. Two
        ranks that only change places with each other could decide nothing."""
        ways: list[Callable[[], str | None]] = [
            lambda: self._swap(local_rank, is_clean=True),
            lambda: self._exchange(local_rank, is_clean=True) if may_write else None,
            lambda: self._swap(local_rank),
            lambda: self._exchange(local_rank) if may_write else None,
        ]
        return next((moved for way in ways if (moved := way()) is not None), None)

    def _match(self, may_write: bool) -> None:
        """Seat all ranks anew, if that gives each one that fits: where exchanging two at a time does not."""
        listed, num_ranks = self._listed, self._num_ranks
        if num_ranks == 1 or num_ranks > len(listed):
            return

        def fits(local_rank: int, place: int) -> bool:
            is_spare = place >= num_ranks
            own = self._own(local_rank)
            return not (is_spare and self._badness(listed[place]) == QUARANTINED) and all(
                a.device != listed[place].device.uuid and (is_spare or a.ordinal != place) for a in own
            )

        places = match(num_ranks, len(listed) if may_write else num_ranks, fits)
        if places is None:
            return
        before = [self._at(ordinal) for ordinal in self._ordinals]
        free = [ordinal for ordinal in range(num_ranks) if ordinal not in places]
        for local_rank, place in enumerate(places):
            if place >= num_ranks:
                places[local_rank] = ordinal = free.pop(0)
                listed[ordinal], listed[place] = listed[place], listed[ordinal]
        then, self._ordinals = self._ordinals, places
        for local_rank, old in enumerate(before):
            if self._at(places[local_rank]) is not old:
                self._lines.append(self._moved_text(local_rank, then[local_rank], old))

    def _to_ordinal(self, before: int) -> str | None:
        """The only rank takes the best device by its ordinal."""
        fitting = [ordinal for ordinal in range(len(self._listed)) if self._fits(0, ordinal)]
        best = min(fitting, key=lambda ordinal: (self._badness(self._listed[ordinal]), ordinal), default=before)
        if best == before:
            return None
        self._ordinals[0] = best
        return self._moved_text(0, before, self._listed[before])

    def _exchange(self, local_rank: int, is_clean: bool = False) -> str | None:
        """A spare device takes the place in the list of the rank's own. `is_clean`: one on which nothing has failed."""
        ordinal, listed = self._ordinals[local_rank], self._listed
        old = listed[ordinal % len(listed)]
        spares = [
            i
            for i in range(self._num_ranks, len(listed))
            if self._badness(listed[i]) < QUARANTINED
            and self._fits(local_rank, ordinal, listed[i].device)
            and not (is_clean and self._has_failed(listed[i].device))
        ]
        if not spares:
            return None
        spare = min(spares, key=lambda i: (self._badness(listed[i]), listed[i].device.model != old.device.model, i))
        listed[ordinal], listed[spare] = listed[spare], old
        return self._moved_text(local_rank, ordinal, old)

    def _swap(self, local_rank: int, is_clean: bool = False) -> str | None:
        """It changes places with a rank beside it; not with one that has itself been moved to where nothing has failed.
        `is_clean`: nothing has failed for that rank, nor on its device."""

        def preference(other: int) -> tuple[bool, bool, int]:
            unlike = self._device_at(self._ordinals[other]).model != self._device_at(self._ordinals[local_rank]).model
            return bool(self._own(other)), unlike, abs(other - local_rank)

        for other in sorted((i for i in range(self._num_ranks) if i != local_rank), key=preference):
            mine, theirs = self._ordinals[local_rank], self._ordinals[other]
            has_failed = self._has_failed(self._device_at(theirs))
            if (is_clean and (has_failed or self._own(other))) or (self._own(other) and not has_failed):
                continue
            if self._fits(local_rank, theirs) and self._fits(other, mine):
                self._ordinals[local_rank], self._ordinals[other] = theirs, mine
                more = f"; rank {self._first_rank + other} takes its place, with {_named_device(self._device_at(mine))}"
                return self._moved_text(local_rank, mine, self._at(mine), more)
        return None

    def _fits(self, local_rank: int, ordinal: int, device: Device | None = None) -> bool:
        """Whether the rank may run at that ordinal, on `device` or on what is listed there."""
        uuid = (device or self._device_at(ordinal)).uuid
        return all(a.device != uuid and a.ordinal != ordinal for a in self._own(local_rank))

    def _has_failed(self, device: Device) -> bool:
        """Whether a rank's result was rejected on it."""
        return any(a.device == device.uuid for a in self._avoided if a.rank is not None)

    def _own(self, local_rank: int) -> list[AvoidedDevice]:
        return [a for a in self._avoided if a.rank == self._first_rank + local_rank]

    def _moved_text(self, local_rank: int, before: int, old: VisibleDevice, more: str = "") -> str:
        rank, ordinal = self._first_rank + local_rank, self._ordinals[local_rank]
        against = [a for a in self._avoided if a.device == old.device.uuid and a.rank in (None, rank)]
        reason = (against or self._own(local_rank) or self._avoided)[-1].reason
        was = f" (LOCAL_RANK {ordinal}, was {before})" if ordinal != before else ""
        now, then = _named_device(self._device_at(ordinal)), _named_device(old.device)
        return f"rank {rank} runs on {now} in place of {then}{was}: {reason}{more}"

    # ----------------------------------------------------------------------------------------------------------------------

    def _say_what_stays(self) -> None:
        for local_rank, ordinal in enumerate(self._ordinals):
            rank, device = self._first_rank + local_rank, self._device_at(ordinal)
            if not self._fits(local_rank, ordinal):
                self._lines.append(f"rank {rank} stays on {_named_device(device)}: there is no other device for it here")
        used = {self._device_at(ordinal).uuid for ordinal in self._ordinals}
        for avoided in self._avoided:
            if avoided.rank is None and avoided.device in used:
                self._lines.append(f"{avoided.device} stays in use, no other device is free: {avoided.reason}")

    def _at(self, ordinal: int) -> VisibleDevice:
        return self._listed[ordinal % len(self._listed)]

    def _device_at(self, ordinal: int) -> Device:
        return self._at(ordinal).device


def _named(one: VisibleDevice) -> str:
    return f"device {one.index} ({one.device.uuid})" if one.index >= 0 else _named_device(one.device)


def _named_device(device: Device) -> str:
    return device.uuid or device.pci_bus_id or "an unnamed device"
