"""Who this process is: its job and attempt, its rank, its device, and the process groups that the trainer uses."""

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import rsup.worker
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.places import boot_id, this_node
from rsup.supervisor.wire import UsageError
from rsup.worker.cuda_graph.lifecycle import destroy_process_group
from rsup.worker.inprocess.entry import current_entry, finish_backend_init
from rsup.worker.rerun.contract import RankDevice


@dataclass(frozen=True)
class Ranks:
    """This rank among all. `control` and `saving` are gloo groups: the training thread's, and the checkpoint thread's."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank; raise `UsageError` where there is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if num_local > num_devices:
        raise UsageError(
            f"--device {name}: {num_local} ranks on this node and {num_devices} GPUs; start fewer, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that the launcher describes in the environment, or be alone; leave it at the end.

    After an error it is left as it is: the other ranks may be gone, and destroying it could wait for them.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
    else:
        store = TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    if current_entry() is not None:
        finish_backend_init(device)
    control, saving = _gloo_group(timeout), _gloo_group(timeout)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    yield Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device, control, saving)
    destroy_process_group()


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_device(device: torch.device, local_rank: int) -> RankDevice:
    """The device in use, as the launcher's inventory spells it: what it says in the environment, else what torch says."""
    uuid, model, driver = f"CPU-{boot_id()}-{local_rank}", platform.machine(), ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid, model, driver = f"GPU-{properties.uuid}", properties.name, torch.version.cuda or ""
    return RankDevice(
        uuid=os.environ.get("RSUP_DEVICE_UUID") or uuid,
        node=this_node(),
        model=os.environ.get("RSUP_DEVICE_MODEL") or model,
        vbios=os.environ.get("RSUP_DEVICE_VBIOS", ""),
        driver=os.environ.get("RSUP_DEVICE_DRIVER") or driver,
    )


def job_identity() -> tuple[str, int]:
    """Key and attempt of this job: rsup's; under torchrun its run id and agent process, and its restarts; else this process."""
    key = rsup.worker.job_key()
    if key:
        return key, rsup.worker.attempt()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    pid = os.getpid() if run_id is None else os.getppid()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    return f"{run_id or 'alone'}-{pid}-{process_start_ticks(pid)}", attempt
