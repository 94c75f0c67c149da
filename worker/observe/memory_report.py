"""What a rank's GPU memory is really used for, beside the theory, at the moments of Megatron-LM's report.

The theory is printed once, by rank 0, with the first line of the training log. The measured figures come with that line and
with the one after it (the first may come before the optimizer has its state), around the first three saves, and every
`interval` iterations.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rsup.worker.observe.memory_estimate import MIB

NUM_SAVES_REPORTED = 3
_FIELDS = {
    "allocated": "allocated_bytes.all.current",
    "max allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "max reserved": "reserved_bytes.all.peak",
}
_PROCESS_FIELDS = {"resident": "VmRSS", "max resident": "VmHWM"}


class MemoryReport:
    """Says when memory is to be reported, and what. On the training thread; never waits for the device.

    `say`: prints a line of this rank; `speaks`: whether this rank is one whose memory is told (its data-parallel rank is 0).
    `theory`: lines, and the bytes that the peak should have (0: nobody knows); asked once, and only on rank 0. `interval`:
    iterations between further reports, None for none.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        *,
        say: Callable[[str], None],
        speaks: bool = True,
        theory: Callable[[], tuple[Sequence[str], int]] | None = None,
        interval: int | None = None,
        device_memory_used: bool = False,
    ) -> None:
        self._device = device
        self._rank = rank
        self._say = say
        self._speaks = speaks
        self._theory = theory
        self._interval = interval
        self._device_memory_used = device_memory_used
        self._num_log_points = 0
        self._num_saves = 0
        self._reported = 0
        """The newest iteration that was reported."""
        self._estimated_peak = 0

    def at_log_point(self, iteration: int) -> None:
        """The training log has printed its line for `iteration`."""
        self._num_log_points += 1
        if self._num_log_points == 1 and self._theory is not None and self._rank == 0:
            lines, self._estimated_peak = self._theory()
            for line in lines:
                self._say(line)
        if self._num_log_points <= 2:
            self._report(iteration, f"(after {iteration} iterations)")

    def at_step(self, iteration: int) -> None:
        """`iteration` is done, and the training log has had its turn. Every step."""
        if self._interval and iteration % self._interval == 0 and iteration != self._reported:
            self._report(iteration, f"(after {iteration} iterations)")

    @contextlib.contextmanager
    def around_save(self, iteration: int) -> Iterator[None]:
        """Report before and after what is inside, for the first saves of this process."""
        self._num_saves += 1
        is_reported = self._num_saves <= NUM_SAVES_REPORTED
        if is_reported:
            self._report(iteration, f"(before the save of iteration {iteration})")
        yield
        if is_reported:
            self._report(iteration, f"(after the save of iteration {iteration})")

    def _report(self, iteration: int, label: str) -> None:
        self._reported = iteration
        if not self._speaks:
            return
        self._say(memory_line(self._device, self._rank, label, self._device_memory_used))
        if self._estimated_peak and self._device.type == "cuda" and self._num_log_points >= 2:
            self._say(comparison(self._estimated_peak, torch.cuda.max_memory_allocated(self._device)))
            self._estimated_peak = 0


def memory_line(device: torch.device, rank: int, label: str, device_memory_used: bool = False) -> str:
    """`[Rank r] label memory (MB) | allocated: ... |`: of the process on a CPU, of torch's allocator on a GPU."""
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        values = {field: float(statistics.get(name, 0)) for field, name in _FIELDS.items()}
        if device_memory_used:
            free, total = torch.cuda.mem_get_info(device)
            values["total device memory used"] = float(total - free)
    else:
        status = _process_status()
        values = {field: status[name] for field, name in _PROCESS_FIELDS.items() if name in status}
    fields = " | ".join(f"{field}: {value / MIB:.2f}" for field, value in values.items())
    return f"[Rank {rank}] {label} memory (MB) | {fields} |"


def comparison(estimated: int, measured: int) -> str:
    """One line: what was measured beside what theory says."""
    share = f" ({100 * (estimated - measured) / measured:+.1f} %)" if measured else ""
    return f"memory at the peak (MB): estimated {estimated / MIB:.2f}, measured {measured / MIB:.2f}{share}"


def _process_status() -> Mapping[str, float]:
    """Sizes of this process in bytes, as Linux tells them."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            words = rest.split()
            if name in _PROCESS_FIELDS.values() and len(words) == 2:
                found[name] = float(words[0]) * 1024
    return found
