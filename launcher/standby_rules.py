"""When there is a warm standby for a rank, and whether it can still become it. Pure, but for a look at the script's file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsup.launcher import standby_process
from rsup.launcher.device_variables import DEVICE_VARIABLES
from rsup.launcher.launch_options import LaunchOptions

SETTLED_AFTER_S = 5.0
"""A script that tells us no iteration is taken to be training so long after all its ranks have loaded torch."""
FREE_SIZES = 2
"""Standbys are started while this many times their size would be free."""
LITTLE_MEMORY = "too little memory is free"

CHANGES_PER_ATTEMPT = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_TIMER_FILE",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "RSUP_ATTEMPT",
        "RSUP_RANK_STARTED_S",
        "RSUP_JOIN",
        "RSUP_SAVE_S",
        "RSUP_PHASE",
        "RSUP_PHASE_NAME",
        "RSUP_PHASE_ITERATION_OFFSET",
        "RSUP_PHASE_SAMPLE_OFFSET",
        "RSUP_PHASE_UNTIL_ITERATION",
        "RSUP_BOARD",
        "RSUP_RANK_SOCKET",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        *DEVICE_VARIABLES,
        "FT_RANK_MONITOR_IPC_SOCKET",
        "FT_LAUNCHER_IPC_SOCKET",
    }
)
"""Variables that nothing reads while torch is imported."""


@dataclass(frozen=True)
class Situation:
    """What `why_none` looks at. Bytes; seconds of the monotonic clock."""

    can_restart: bool
    is_running: bool
    torch_loaded_s: float | None
    """Since when all local ranks have torch; None: not all of them."""
    has_stepped: bool
    """Every rank that tells its iteration is past the first one, and at least one tells it."""
    size_bytes: int
    num_wanted: int
    free_bytes: int
    pause_until_s: float


def why_none(seen: Situation, now_s: float) -> str:
    """Why there should be no further standby now; empty: start one. Pure."""
    if not seen.can_restart:
        return "no restart is left"
    if not seen.is_running:
        return "the attempt is not running"
    if seen.torch_loaded_s is None:
        return "not every rank has loaded torch"
    if not seen.has_stepped and now_s < seen.torch_loaded_s + SETTLED_AFTER_S:
        return "the first step is not done"
    if now_s < seen.pause_until_s:
        return "paused"
    if seen.free_bytes < FREE_SIZES * seen.size_bytes * seen.num_wanted:
        return LITTLE_MEMORY
    return ""


@dataclass(frozen=True)
class Seat:
    """What one local rank is started with. `cpus` None: wherever the launcher may run."""

    command: Sequence[str]
    environment: Mapping[str, str]
    cpus: frozenset[int] | None = None


def can_wait(options: LaunchOptions) -> bool:
    """Whether a standby could run this: a Python module, or a script that is a file."""
    if options.no_standby or options.no_python or options.run_path:
        return False
    return options.module or os.path.isfile(options.training_script)


def standby_command(preload: Sequence[str], seat: Seat, link_fd: int, *, is_module: bool) -> list[str]:
    """The command of a standby for the rank whose own is `python -u [-m] WORD...`."""
    kind, num_before = ("module", 3) if is_module else ("script", 2)
    words = [kind, ",".join(preload), *seat.command[num_before:]]
    return [seat.command[0], "-u", standby_process.__file__, str(link_fd), *words]


def what_changed(old: Seat, new: Seat) -> list[str]:
    """What of a rank's start is not as when its standby was made, and could have made its imports others."""
    names = (old.environment.keys() | new.environment.keys()) - CHANGES_PER_ATTEMPT
    changed = sorted(name for name in names if old.environment.get(name) != new.environment.get(name))
    return changed + [what for what in ("command", "cpus") if getattr(old, what) != getattr(new, what)]
