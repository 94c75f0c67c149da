"""The process groups of an entry that is over: communicators are aborted, groups are destroyed, and none may be left."""

import functools
import gc
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import rsup.worker
from rsup.worker.cuda_graph import lifecycle
from rsup.worker.cuda_graph.capture import forget_shared_captures
from rsup.worker.inprocess.kept import graphs, holder_of
from rsup.worker.inprocess.nccl_wake import wake_until
from rsup.worker.inprocess.timings import RestartTimings

ABORTED_WITHIN_S = 20.0
GRAPHS_SEEM_KEPT_AFTER_S = 3.0


@dataclass(frozen=True)
class KeptGroup:
    """A process group that is destroyed and still alive. `has_sockets`: gloo's, which others may be waiting in."""

    group: Any
    has_sockets: bool

    def holder(self) -> str:
        """Who keeps it, for people."""
        found = holder_of(self.group)
        return found or "something that Python's garbage collector does not see (a default argument, a C++ object)"


class OldGroups:
    """Of one process, entry after entry. `abort` is called by NVRx's monitor thread, the rest by whoever leaves the entry."""

    def __init__(self, timings: RestartTimings) -> None:
        self._timings = timings
        self._aborts: list[threading.Thread] = []
        self._seen: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def abort(self) -> None:
        """Begin to abort the NCCL communicators of all process groups, at the same time: one may wait for another's kernels.

        Does not wait: kernels end as soon as an abort has begun, which frees the training thread; the rest of it, some tenths
        of a second, goes on while that thread leaves the function. gloo cannot be aborted; its sockets close when the rank
        that the others wait for has left its frames.
        """
        self.look()
        if not dist.is_initialized() or not torch.cuda.is_available():
            return
        backends = [_nccl(group) for group in list(dist.distributed_c10d._world.pg_names)]
        aborts = [functools.partial(self._abort, backend) for backend in backends if backend is not None]
        self._aborts += (threads := lifecycle.abort_beside(aborts))
        if threads:
            wake_until(lambda: not any(thread.is_alive() for thread in threads))

    def _abort(self, backend: Any) -> None:
        began_s = time.monotonic()
        try:
            backend.abort()
        finally:
            self._timings.beside("abort", time.monotonic() - began_s)

    def look(self) -> None:
        """Remember the groups that there are now."""
        for group in list(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else []:
            if isinstance(group, dist.ProcessGroup):
                self._seen[id(group)] = (weakref.ref(group), "gloo" in str(dist.get_backend_config(group)))

    def wait_until_aborted(self) -> None:
        """Destroy the registered CUDA graphs, which keep communicators from going, and wait until every abort has ended.

        Raises `GraphError` where a graph still runs, `TimeoutError` that names a graph which is not registered. The new entry
        must not begin before: an abort frees memory of the device, which waits for kernels, and those of a new communicator may
        wait for a peer whose own launch waits for its abort.
        """
        if lifecycle.live_graphs():
            rsup.worker.note("info", str(lifecycle.let_go_of_graphs("this entry's process groups cannot be destroyed")))
        forget_shared_captures()
        _join(self._aborts, GRAPHS_SEEM_KEPT_AFTER_S)
        if any(thread.is_alive() for thread in self._aborts) and (found := graphs()):
            where = holder_of(found[0]) or "something that Python's garbage collector does not see"
            raise TimeoutError(
                f"{where} keeps a CUDA graph, which keeps NCCL's communicators from being aborted:"
                " let current_entry().at_restart(graph.reset) let go of it"
            )
        _join(self._aborts, ABORTED_WITHIN_S)
        if any(thread.is_alive() for thread in self._aborts):
            raise TimeoutError(f"NCCL's communicators were not aborted after {ABORTED_WITHIN_S:g} s")
        self._aborts.clear()

    def destroy(self) -> list[KeptGroup]:
        """Destroy all groups; those that something in the script keeps alive nevertheless."""
        self.look()
        destroy_groups()
        if self._alive():
            gc.collect()  # in cycles with what was not yet garbage before
        kept = self._alive()
        self._seen.clear()
        return kept

    def _alive(self) -> list[KeptGroup]:
        found = [(seen(), has_sockets) for seen, has_sockets in self._seen.values()]
        return [KeptGroup(group, has_sockets) for group, has_sockets in found if group is not None]


def _join(threads: list[threading.Thread], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _nccl(group: Any) -> Any:
    """The NCCL backend of a process group, None where it has none."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (RuntimeError, AttributeError):
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def destroy_groups() -> None:
    """Destroy all process groups, and forget one whose making was interrupted.

    torch counts groups to name them, and sets the count back only when it destroys the default one: a rank whose
    `init_process_group` had failed would look for the others under another name from then on.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0
