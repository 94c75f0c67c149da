"""The steps of a restart that are ours, in NVRx's order: abort, finalize, health check, (rank assignment), initialize.

Abort runs in NVRx's monitor thread while the training thread may be stuck in a collective; the others in the training thread.
"""

import gc
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTransformerEngine
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, HealthCheck
from nvidia_resiliency_ext.inprocess.initialize import Initialize

from rsup.worker.inprocess.groups import KeptGroup, OldGroups
from rsup.worker.inprocess.preconditions import without
from rsup.worker.inprocess.timings import RestartTimings

CLEAN_UP_WITHIN_S = 30.0
CUDA_WITHIN = timedelta(seconds=10)
MEMORY_IS_SHORT_BELOW = 0.1
"""Of a GPU's memory that is free."""
MOST_COLLECTIONS = 5


class AbortGroups(Abort):  # type: ignore[misc]  # NVRx has no types
    """TransformerEngine's state first, where it is loaded, then `before`, then NCCL's communicators, then `after`.

    Groups are destroyed later, by `LeaveEntry`: CUDA graphs must go before them.
    """

    def __init__(self, groups: OldGroups, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._groups = groups
        self._before = before
        self._after = after
        self._transformer_engine = AbortTransformerEngine()

    def __call__(self, state: Any) -> Any:
        try:
            if "transformer_engine" in sys.modules:
                self._transformer_engine(state)
            self._before()
        finally:
            try:
                self._groups.abort()
            finally:
                self._after()
        return state


class LeaveEntry(Finalize):  # type: ignore[misc]
    """What the entry registered, then its process groups, then what only garbage collection frees. Fails after 30 s: a process
    that cannot let go of one entry must not begin another.

    `left` is called first, with NVRx's frozen state; `keeps` at the end, with groups that something keeps alive; `failed` with
    what makes this process unfit to begin another entry.
    """

    def __init__(
        self,
        groups: OldGroups,
        timings: RestartTimings,
        left: Callable[[Any], None],
        clean_up: Callable[[], None],
        keeps: Callable[[Any, list[KeptGroup]], None],
        failed: Callable[[Exception], None],
        empty_cuda_cache: bool,
    ) -> None:
        self._groups = groups
        self._timings = timings
        self._left = left
        self._clean_up = clean_up
        self._keeps = keeps
        self._failed = failed
        self._empty_cuda_cache = empty_cuda_cache

    def __call__(self, state: Any) -> Any:
        self._timings.mark("left the function")
        self._left(state)
        kept: list[KeptGroup] = []
        try:
            run_within(CLEAN_UP_WITHIN_S, lambda: kept.extend(self._leave()), "what it has left behind")
        except Exception as error:
            self._failed(error)
            raise
        if kept:
            self._keeps(state, kept)
        return state

    def _leave(self) -> list[KeptGroup]:
        try:
            self._clean_up()
        finally:
            self._timings.mark("at_restart")
            collect()  # while NCCL aborts; groups that only cycles hold would keep their sockets open
            self._timings.mark("garbage")
            self._groups.wait_until_aborted()
            self._timings.mark("abort")
            kept = self._groups.destroy()
            self._timings.mark("groups")
        if self._empty_cuda_cache and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return kept


def close_groups(groups: OldGroups) -> str:
    """Close the process groups of a process that leaves for good; what went wrong, or an empty string."""

    def close() -> None:
        groups.abort()  # a destruction waits for kernels, and those for other ranks
        groups.wait_until_aborted()
        groups.destroy()
        gc.collect()

    try:
        run_within(CLEAN_UP_WITHIN_S, close, "its process groups")
    except Exception as error:
        return str(error)
    return ""


def collect() -> None:
    """Collect garbage once; where a GPU's memory is short, until nothing is found."""
    for _ in range(MOST_COLLECTIONS):
        if not gc.collect() or not _memory_is_short():
            return


def _memory_is_short() -> bool:
    for device in devices_in_use():
        free, total = torch.cuda.mem_get_info(device)
        if free < MEMORY_IS_SHORT_BELOW * total:
            return True
    return False


class NoGarbage:
    """Stands for the `gc` module in NVRx's Wrapper, which collects until nothing is found once all ranks have met: `LeaveEntry`
    has just done that, while it had to wait anyway."""

    @staticmethod
    def collect() -> int:
        return 0


def run_within(seconds: float, step: Callable[[], None], what: str) -> None:
    """Run `step` in a thread on this thread's CUDA device; raise its error, or `TimeoutError`."""
    in_use = devices_in_use()
    device = torch.cuda.current_device() if in_use else -1
    errors: list[Exception] = []

    def run() -> None:
        try:
            if device in in_use:
                torch.cuda.set_device(device)
            step()
        except Exception as error:  # raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="rsup-leave-entry", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{what} was not gone after {seconds:g} s")
    if errors:
        raise errors[0]


def devices_in_use() -> list[int]:
    """GPUs that this process has a context on; asking makes none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [torch.cuda.current_device()]
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


class DeviceAnswers(HealthCheck):  # type: ignore[misc]
    """The GPUs that this process uses still answer; on a host without one, nothing is checked.

    NVRx's own checks go by `LOCAL_RANK`, which is another GPU where ranks were moved, and fail where there is no NVML. Its
    check of CUDA goes by the current device: a script that never sets one would be given a context on the first.
    """

    def __init__(self, failed: Callable[[str], None], done: Callable[[], None] = lambda: None) -> None:
        self._failed = failed
        self._done = done
        self._check = CudaHealthCheck(timeout=CUDA_WITHIN)

    def __call__(self, state: Any) -> Any:
        try:
            for device in devices_in_use():
                with torch.cuda.device(device), without("LOCAL_RANK"):
                    self._check(state)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise
        self._done()
        return state


def leave_contexts() -> None:
    """Set back what torch's context managers had set: NVRx's exception can come just where one would do it itself."""
    torch.set_grad_enabled(True)
    for kind in ("cpu", "cuda"):
        torch.set_autocast_enabled(kind, False)
    torch.clear_autocast_cache()
    if in_use := devices_in_use():
        device = torch.cuda.current_device()
        for one in in_use:
            torch.cuda.set_stream(torch.cuda.default_stream(one))  # which makes it the current device
        torch.cuda.set_device(device)


class BeginEntry(Initialize):  # type: ignore[misc]
    """Calls `begin` with NVRx's frozen state before each entry, also in a rank that only waits."""

    def __init__(self, begin: Callable[[Any], None]) -> None:
        self._begin = begin

    def __call__(self, state: Any) -> Any:
        leave_contexts()
        self._begin(state)
        return state
