"""What a rank is told of its device: `RSUP_DEVICE_UUID`, and `RSUP_DEVICE_MODEL`, `_VBIOS` and `_DRIVER`. Pure.

For a device that an inventory file lists, and for a CPU stand-in, they are what makes it the rank's. A rank with several GPUs
to choose from chooses by itself, and only it knows its choice: it is told what is true of each of them.
"""

from collections.abc import Mapping, Sequence

from rsup.launcher.device_placement import DevicePlacement
from rsup.launcher.visible_devices import VisibleList
from rsup.supervisor.wire import Device

DEVICE_VARIABLES = {
    "RSUP_DEVICE_UUID": "uuid",
    "RSUP_DEVICE_MODEL": "model",
    "RSUP_DEVICE_VBIOS": "vbios",
    "RSUP_DEVICE_DRIVER": "driver",
}
"""Name of the variable -> field of `Device`."""


def device_environments(placed: DevicePlacement, visible: VisibleList, sees_one: bool) -> tuple[Mapping[str, str], ...]:
    """The variables of each local rank; one that is not certain is left out. `sees_one`: each rank sees its GPU alone."""
    if not visible.devices:
        return tuple(_alike([device]) for device in placed.devices)
    if not visible.is_certain and placed.shown is None:  # it is not known which is which, only which there are
        return (_alike([one.device for one in visible.devices]),) * len(placed.devices)
    return tuple(_alike([device] if sees_one else placed.listed) for device in placed.devices)


def _alike(devices: Sequence[Device]) -> dict[str, str]:
    """What is the same for all of them and known."""
    found = {name: {getattr(device, field) for device in devices} for name, field in DEVICE_VARIABLES.items()}
    return {name: values.pop() for name, values in found.items() if len(values) == 1 and "" not in values}
