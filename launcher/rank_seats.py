"""Where the ranks of one attempt sit: device, `LOCAL_RANK`, cores and the variables that follow from them.

Puts together what `inventory` found, `device_placement` decides and `numa_binding` reads; asks the machine only for the cores
that this process may use.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rsup.launcher.device_count import count_amd
from rsup.launcher.device_placement import DevicePlacement, place
from rsup.launcher.device_variables import device_environments
from rsup.launcher.inventory import Inventory
from rsup.launcher.numa_binding import SYSFS, Bindings, bind, cpu_text
from rsup.supervisor.wire import Device, StartAttempt


@dataclass(frozen=True)
class RankSeats:
    """One attempt's seats, by local rank."""

    devices: tuple[Device, ...] = ()
    ordinals: tuple[int, ...] = ()
    """`LOCAL_RANK` of each."""
    listed: tuple[Device, ...] = ()
    """The devices that CUDA shows, by ordinal; empty without GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from the launcher's, for every rank."""
    cpus: tuple[frozenset[int] | None, ...] = ()
    lines: tuple[str, ...] = ()
    """What is not as found, and why: for the terminal and the job's story."""
    notes: tuple[str, ...] = ()
    """For the story alone."""
    warnings: tuple[str, ...] = ()
    device_environments: tuple[Mapping[str, str], ...] = ()
    """What each local rank is told of its device (`device_variables`)."""

    @property
    def device_names(self) -> list[str]:
        """UUIDs by local rank."""
        return [device.uuid for device in self.devices]

    @property
    def cpu_texts(self) -> list[str]:
        """Cores by local rank; empty if no rank is bound."""
        return [cpu_text(cpus or ()) for cpus in self.cpus] if any(self.cpus) else []

    def device_behind(self, local_rank: int, ordinal: int) -> str:
        """UUID of what that rank calls its device `ordinal`; of its own without GPUs."""
        if 0 <= ordinal < len(self.listed):
            return self.listed[ordinal].uuid
        return self.devices[local_rank].uuid if local_rank < len(self.devices) else ""


def choose_seats(
    start: StartAttempt, numa_binding: str | None, inventory: Inventory, virtual_local_rank: bool = False, sysfs: Path = SYSFS
) -> RankSeats:
    """The seats of the attempt's local ranks. Never raises."""
    num_ranks, first_rank = start.num_ranks, start.first_rank
    has_gpus = bool(inventory.visible.devices)
    stand_ins = inventory.stand_ins(num_ranks)
    is_fixed = not has_gpus and bool(inventory.listed) and count_amd() > 0  # their ranks go by the ordinal alone
    placed = place(inventory.visible, stand_ins, num_ranks, start.avoid, first_rank, is_fixed=is_fixed)
    lines = list(placed.lines)
    if virtual_local_rank and placed.ordinals != tuple(range(num_ranks)):
        lines.append("with --virtual-local-rank every rank calls its device 0: Megatron-LM cannot see that it is another one")
    bound = _bound(numa_binding, placed, has_gpus, sysfs, first_rank)
    return RankSeats(
        devices=placed.devices,
        ordinals=placed.ordinals,
        listed=placed.listed if has_gpus and not virtual_local_rank else (),
        environment=placed.environment(),
        cpus=bound.cpus,
        lines=tuple(lines),
        notes=(bound.line,) if bound.line else (),
        warnings=(bound.warning,) if bound.warning else (),
        device_environments=device_environments(placed, inventory.visible, sees_one=virtual_local_rank),
    )


def _bound(mode: str | None, placed: DevicePlacement, has_gpus: bool, sysfs: Path, first_rank: int) -> Bindings:
    unbound = (None,) * len(placed.devices)
    if mode is None:
        return Bindings(unbound)
    if not has_gpus and count_amd():
        return Bindings(unbound, warning=f"--numa-binding {mode} has no effect: it knows where NVIDIA GPUs are, not AMD ones")
    return bind(mode, placed.devices, placed.listed, os.sched_getaffinity(0), sysfs, first_rank)
