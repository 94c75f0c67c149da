"""The steps of a restart that are ours, in NVRx's order: abort, finalize, health check, (rank assignment), initialize.

Abort runs in NVRx's monitor thread while the training thread may be stuck in a collective; the others in the training thread.
"""

import concurrent.futures
import gc
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTransformerEngine
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, HealthCheck
from nvidia_resiliency_ext.inprocess.initialize import Initialize

from rsup.worker.inprocess.preconditions import without

CLEAN_UP_WITHIN_S = 30.0
CUDA_WITHIN = timedelta(seconds=10)


class AbortGroups(Abort):  # type: ignore[misc]  # NVRx has no types
    """TransformerEngine's state first, where it is loaded, then what the entry registered, then every NCCL communicator.

    Groups are destroyed later, by `LeaveEntry`: CUDA graphs must go before them. gloo cannot be aborted; its sockets close when
    the rank that the others wait for has left its frames.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._transformer_engine = AbortTransformerEngine()

    def __call__(self, state: Any) -> Any:
        try:
            if "transformer_engine" in sys.modules:
                self._transformer_engine(state)
            self._before()
        finally:
            abort_communicators()
        return state


def abort_communicators() -> None:
    """Abort the NCCL communicators of all process groups, at the same time: one may wait for another's kernels."""
    if not dist.is_initialized() or not torch.cuda.is_available():
        return
    backends = [_nccl(group) for group in list(dist.distributed_c10d._world.pg_names)]
    found = [backend for backend in backends if backend is not None]
    if found:
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(found)) as threads:
            concurrent.futures.wait([threads.submit(backend.abort) for backend in found])


def _nccl(group: Any) -> Any:
    """The NCCL backend of a process group, None where it has none."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (RuntimeError, AttributeError):
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


class LeaveEntry(Finalize):  # type: ignore[misc]
    """What the entry registered, then its process groups, then what only garbage collection frees. Fails after 30 s: a process
    that cannot let go of one entry must not begin another."""

    def __init__(self, clean_up: Callable[[], None], empty_cuda_cache: bool) -> None:
        self._clean_up = clean_up
        self._empty_cuda_cache = empty_cuda_cache

    def __call__(self, state: Any) -> Any:
        run_within(CLEAN_UP_WITHIN_S, self._leave, "what the last entry into the training function left")
        return state

    def _leave(self) -> None:
        try:
            self._clean_up()
        finally:
            destroy_groups()
            gc.collect()  # groups that only cycles hold keep their sockets open; NVRx collects the rest
        if self._empty_cuda_cache and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def destroy_groups() -> None:
    """Destroy all process groups, and forget one whose making was interrupted.

    torch counts groups to name them, and sets the count back only when it destroys the default one: a rank whose
    `init_process_group` had failed would look for the others under another name from then on.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


def run_within(seconds: float, step: Callable[[], None], what: str) -> None:
    """Run `step` in a thread on this thread's CUDA device; raise its error, or `TimeoutError`."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    errors: list[Exception] = []

    def run() -> None:
        try:
            if device is not None:
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


class DeviceAnswers(HealthCheck):  # type: ignore[misc]
    """The GPU this process uses still answers; on a host without one, nothing is checked.

    NVRx's own checks go by `LOCAL_RANK`, which is another GPU where ranks were moved, and fail where there is no NVML.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._check = CudaHealthCheck(timeout=CUDA_WITHIN)

    def __call__(self, state: Any) -> Any:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return state
        try:
            with without("LOCAL_RANK"):  # the check would go by it, which is not always the device in use
                return self._check(state)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise


class BeginEntry(Initialize):  # type: ignore[misc]
    """Calls `begin` with NVRx's frozen state before each entry, also in a rank that only waits."""

    def __init__(self, begin: Callable[[Any], None]) -> None:
        self._begin = begin

    def __call__(self, state: Any) -> Any:
        self._begin(state)
        return state
