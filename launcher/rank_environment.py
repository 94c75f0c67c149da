"""The environment of a rank: torchrun's variables with torchrun's meaning, and the `RSUP_*` ones of its session.

Pure: from the agent's environment, the options, the order to start and the rank's local number. What the agent's environment
holds is inherited, as with torchrun.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rsup.launcher.launch_options import LaunchOptions
from rsup.supervisor.wire import PhaseStart, StartAttempt, UsageError

NVRX_LAUNCHER = "L"
"""In the folder of the sockets for NVRx's clients, where each local rank has its number: the one to the launcher."""


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
    nvrx_dir: str = ""
    """Folder of the sockets for NVRx's clients; empty: there are none."""
    timer_file: str = ""
    """Pipe of torch's file timers; empty: there is none."""


def rank_environment(
    inherited: Mapping[str, str],
    options: LaunchOptions,
    start: StartAttempt,
    local_rank: int,
    places: SessionPlaces,
    error_file: str = "",
    ordinal: int | None = None,
) -> dict[str, str]:
    """Every variable of local rank `local_rank`. Raise `UsageError` if `--virtual-local-rank` finds too few devices.

    `ordinal`: its `LOCAL_RANK`, by which it takes its device, where that is not its place among the node's ranks.
    """
    ordinal = local_rank if ordinal is None else ordinal
    rank, world_size = str(start.first_rank + local_rank), str(start.world_size)
    environment = {name: value for name, value in inherited.items() if not name.startswith("RSUP_PHASE")}
    if start.phase is not None and start.phase.number < len(options.phases):
        ends = ",".join(str(phase.until_iteration) for phase in options.phases[:-1])
        environment |= {**options.phases[start.phase.number].environment, **phase_environment(start.phase, ends)}
    environment |= {
        "RANK": rank,
        "LOCAL_RANK": str(ordinal),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(start.num_ranks),
        "GROUP_RANK": str(start.group_rank),
        "GROUP_WORLD_SIZE": str(start.group_world_size),
        "ROLE_RANK": str(start.first_role_rank + local_rank) if start.role_world_size else rank,
        "ROLE_NAME": options.role,
        "ROLE_WORLD_SIZE": str(start.role_world_size or world_size),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(start.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id(options, start),
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
    if options.omp_num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.omp_num_threads)
    elif start.num_ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if places.timer_file:
        environment["TORCHELASTIC_TIMER_FILE"] = places.timer_file
    for name, value in (
        ("RSUP_BOARD", places.board),
        ("RSUP_RANK_SOCKET", places.rank_socket),
        ("FT_RANK_MONITOR_IPC_SOCKET", places.nvrx_dir and f"{places.nvrx_dir}/{local_rank}"),
        ("FT_LAUNCHER_IPC_SOCKET", places.nvrx_dir and f"{places.nvrx_dir}/{NVRX_LAUNCHER}"),
        ("TORCHELASTIC_ERROR_FILE", error_file),
        ("RSUP_DEADLINE", "" if options.deadline is None else f"{options.deadline:.0f}"),
        ("RSUP_DEADLINE_MARGIN", "" if options.deadline is None else f"{options.deadline_margin:g}"),
        ("RSUP_SAVE_S", f"{start.save_s:.3f}" if start.save_s else ""),
    ):
        environment.pop(name, None)
        if value:
            environment[name] = value
    if options.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = _only_device(inherited.get("CUDA_VISIBLE_DEVICES"), ordinal)
    return environment


def phase_environment(phase: PhaseStart, ends: str = "") -> dict[str, str]:
    """What a rank sees of its phase; what is not known is not there. `ends`: where all phases but the last end."""
    known = {
        "RSUP_PHASE": str(phase.number),
        "RSUP_PHASE_NAME": phase.name,
        "RSUP_PHASE_ITERATION_OFFSET": str(phase.iteration_offset),
    }
    if phase.sample_offset >= 0:
        known["RSUP_PHASE_SAMPLE_OFFSET"] = str(phase.sample_offset)
    if phase.until_iteration:
        known["RSUP_PHASE_UNTIL_ITERATION"] = str(phase.until_iteration)
    if ends:
        known["RSUP_PHASE_ENDS"] = ends
    return known


def run_id(options: LaunchOptions, start: StartAttempt) -> str:
    """As torchrun's: what the user called it, else a name that no other launch has (its random one for a job of one node,
    `none` across nodes); over restarts it stays."""
    return options.rdzv_id if options.rdzv_id != "none" else f"{start.job_id}.{start.run}"


def threads_notice(inherited: Mapping[str, str], num_ranks: int) -> str:
    """The line that says why OMP_NUM_THREADS is 1; empty where it is left alone."""
    if num_ranks < 2 or "OMP_NUM_THREADS" in inherited:
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
