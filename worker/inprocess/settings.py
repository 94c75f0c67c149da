"""What in-process restart is told: Megatron-LM's `--inprocess-*` flags, checked before torch is imported. Times in seconds."""

from dataclasses import dataclass

from rsup.supervisor.wire import UsageError

GRANULARITIES = ("node", "rank")


@dataclass(frozen=True)
class InProcessSettings:
    """Megatron-LM's flags and defaults, but for `last_call_wait`: the supervisor tells of deaths, nobody waits for more."""

    max_iterations: int | None = None
    """Entries into the training function, in all, in one attempt; None: no limit of the worker's."""
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0
    heartbeat_interval: float = 30.0
    heartbeat_timeout: float = 60.0
    soft_timeout: float = 60.0
    """Without a sign of progress of the main thread: the rank is interrupted, and takes part in the restart."""
    hard_timeout: float = 90.0
    """The same: its process is killed."""
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 0.0
    termination_grace_time: float = 1.0
    granularity: str = "node"
    """What a reserve replaces where there are some: a `node` whole, or one `rank`."""
    active_world_size: int | None = None
    """Ranks that compute; the others are reserves. None: all."""
    empty_cuda_cache: bool = False

    def reserves(self, world_size: int) -> int:
        """How many of `world_size` ranks only wait."""
        return world_size - (self.active_world_size or world_size)


def check_settings(settings: InProcessSettings, world_size: int, local_world_size: int) -> None:
    """Raise `UsageError` where times are in an order that cannot work, or the ranks do not suffice."""
    for shorter, longer in _ORDER:
        low, high = getattr(settings, shorter), getattr(settings, longer)
        if low >= high:
            raise UsageError(f"{_flag(shorter)} ({low:g} s) must be shorter than {_flag(longer)} ({high:g} s)")
    for name in _POSITIVE:
        if getattr(settings, name) <= 0:
            raise UsageError(f"{_flag(name)} must be more than 0")
    if settings.granularity not in GRANULARITIES:
        raise UsageError(f"{_flag('granularity')} {settings.granularity}: use one of {', '.join(GRANULARITIES)}")
    if settings.max_iterations is not None and settings.max_iterations < 1:
        raise UsageError(f"{_flag('max_iterations')} must be 1 or more")
    active = settings.active_world_size
    if active is None:
        return
    if not 1 <= active <= world_size:
        raise UsageError(f"{_flag('active_world_size')} {active}: there are {world_size} ranks")
    if settings.granularity == "node" and active % local_world_size:
        raise UsageError(
            f"{_flag('active_world_size')} {active} is no multiple of the {local_world_size} ranks of a node:"
            f" change it, or use {_flag('granularity')} rank"
        )


_ORDER = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
    ("last_call_wait", "barrier_timeout"),
    ("termination_grace_time", "barrier_timeout"),
)
_POSITIVE = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "progress_watchdog_interval",
    "heartbeat_interval",
    "completion_timeout",
)


def _flag(name: str) -> str:
    return f"--inprocess-{name.replace('_', '-')}"
