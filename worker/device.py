"""Which device does this rank compute on? The launcher says so where it knows; CUDA does; a CPU rank gets a name of its own."""

import os

import torch

from rsup.supervisor.places import boot_id, this_node
from rsup.worker.rerun.contract import RankDevice


def this_device(device: torch.device | str | None = None) -> RankDevice:
    """The device of this rank: its UUID, and what must be alike for another one to be comparable.

    `device`: what the rank computes on; None: the current CUDA device where CUDA is in use, else the CPU.
    """
    told = {name: os.environ.get(f"RSUP_DEVICE_{name}", "") for name in ("UUID", "MODEL", "VBIOS", "DRIVER")}
    uuid, model = told["UUID"], told["MODEL"]
    where = _current() if device is None else torch.device(device)
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        uuid = f"GPU-{properties.uuid}"  # its own word counts: a verdict is about the board that really computed
        model = model or properties.name
    uuid = uuid or f"CPU-{boot_id()}-{os.environ.get('LOCAL_RANK', '0')}"
    return RankDevice(uuid, this_node(), model, told["VBIOS"], told["DRIVER"])


def _current() -> torch.device:
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")
