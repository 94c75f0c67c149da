"""One entry into the training function. What must not outlive it is registered here, and ended before the next one begins."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Entry:
    """The `number`-th entry of this attempt's ranks (1: the first); `joined`: this process took a dead one's place for it.

    `rank` of `world_size`: this rank among those that compute, as in the environment.
    """

    number: int
    rank: int
    world_size: int
    joined: bool = False
    restart_timings: dict[str, float] = field(default_factory=dict)
    """Seconds of each step of the restart that led to this entry, on this rank, from its fault on; in brackets what ran beside
    the others. Empty in the first entry. For benchmarks: the names of the steps are no interface."""
    _at_abort: list[Callable[[], object]] = field(default_factory=list)
    _at_restart: list[Callable[[], object]] = field(default_factory=list)

    def at_abort(self, unblock: Callable[[], object]) -> None:
        """Call `unblock` from another thread when a fault interrupts this entry, before process groups are aborted: for what
        the training thread may be waiting in. It must return soon."""
        self._at_abort.append(unblock)

    def at_restart(self, clean_up: Callable[[], object]) -> None:
        """Call `clean_up` once the training function has been left for a restart, the last registered first: for CUDA graphs,
        writers, global state. Process groups still exist. If it raises, this process ends and is replaced."""
        self._at_restart.append(clean_up)

    def abort(self) -> None:
        """Call what `at_abort` registered. An error is the next one's chance: the first is raised at the end."""
        _call_all(self._at_abort)

    def clean_up(self) -> None:
        """Call what `at_restart` registered, each once."""
        steps, self._at_restart = self._at_restart, []
        _call_all(steps)


def _call_all(steps: list[Callable[[], object]]) -> None:
    errors = []
    for step in reversed(steps):
        try:
            step()
        except Exception as error:  # of a user's callback: the others are called nevertheless
            errors.append(error)
    if errors:
        raise errors[0]


_current: Entry | None = None


def current_entry() -> Entry | None:
    """The entry that this process is in; None outside in-process restart."""
    return _current


def begin(entry: Entry | None) -> None:
    """`entry` is the current one from now on."""
    global _current
    _current = entry


def finish_backend_init(device: "torch.device") -> None:
    """Make the default process group's backend complete its initialisation. Collective; call it after `init_process_group`.

    NCCL connects at the first collective, and the kernels of a backend that is half initialised cannot be aborted.
    """
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(128, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
