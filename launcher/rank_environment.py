"""The environment of a rank: torchrun's variables with torchrun's meaning, and the `RSUP_*` ones of its session.

Pure: from the agent's environment, the options, the order to start and the rank's local number. What the agent's environment
holds is inherited, as with torchrun.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rsup.launcher.launch_options import LaunchOptions
from rsup.supervisor.wire import StartAttempt, UsageError


@dataclass(frozen=True, slots=True)
class SessionPlaces:
    """Where a rank finds its agent."""

    agent_id: str
    board: str
    """Path of the heartbeat board; empty: there is none, and the rank is not watched."""
    rank_socket: str
    stacks_dir: str
    agent_hosts_store: bool
    """False: rank 0 binds the store's port itself."""


def rank_environment(
    inherited: Mapping[str, str],
    options: LaunchOptions,
    start: StartAttempt,
    local_rank: int,
    places: SessionPlaces,
    error_file: str = "",
) -> dict[str, str]:
    """Every variable of local rank `local_rank`. Raise `UsageError` if `--virtual-local-rank` finds too few devices."""
    rank, world_size = str(start.first_rank + local_rank), str(start.world_size)
    environment = dict(inherited)
    environment |= {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(start.num_ranks),
        "GROUP_RANK": str(start.group_rank),
        "GROUP_WORLD_SIZE": str(start.group_world_size),
        "ROLE_RANK": rank,
        "ROLE_NAME": options.role,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(start.max_restarts),
        "TORCHELASTIC_RUN_ID": options.rdzv_id if options.rdzv_id != "none" else start.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(places.agent_hosts_store),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.name for signal in options.signals_to_handle),
        "RSUP_JOB_ID": start.job_id,
        "RSUP_RUN": str(start.run),
        "RSUP_ATTEMPT": str(start.attempt),
        "RSUP_SLOT": str(local_rank),
        "RSUP_MARK": places.agent_id,
        "RSUP_STACKS_DIR": places.stacks_dir,
    }
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if start.num_ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (
        ("RSUP_BOARD", places.board),
        ("RSUP_RANK_SOCKET", places.rank_socket),
        ("TORCHELASTIC_ERROR_FILE", error_file),
    ):
        environment.pop(name, None)
        if value:
            environment[name] = value
    if options.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = _only_device(inherited.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return environment


def threads_notice(inherited: Mapping[str, str], num_ranks: int) -> str:
    """The line that says why OMP_NUM_THREADS is 1; empty where it is left alone."""
    if num_ranks < 2 or inherited.get("OMP_NUM_THREADS"):
        return ""
    return f"rsup: OMP_NUM_THREADS=1 for each of {num_ranks} ranks, as torchrun does; set it yourself to use more threads"


def _only_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}; "
            f"use --nproc-per-node {len(devices)} or fewer"
        )
    return devices[local_rank]
