"""Worker processes of a `torch.utils.data.DataLoader`: an exit signal to the whole process group must not kill them.

A batch system, or Ctrl-C, signals every process. The rank notes the signal and leaves after its iteration; a worker that died
of it would take the iteration, and the save, with it. A worker therefore only takes note, as Megatron-LM's do, and ends when
its rank lets it go or is gone.

    loader = DataLoader(dataset, num_workers=4, worker_init_fn=WorkerInit(("SIGTERM",)))
    with starting(("SIGTERM",)):    # and the start method, if the loader was given one
        batches = iter(loader)      # here the processes start

`starting` holds the signals back until each worker is ready for them, whether it was forked or started anew (spawn, forkserver;
the fork server keeps them blocked for good, since it has to outlive them too).
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from types import FrameType

_GPU_DEVICES = "/dev/nvidia"


class WorkerInit:
    """A `worker_init_fn`: shields the worker from `signals`, then calls `then(worker_id)`. Can be pickled if `then` can.

    It also closes the GPU descriptors that a forked worker has from its rank: the memory of a rank that died would otherwise
    stay taken as long as one of its workers lives.
    """

    def __init__(self, signals: Iterable[str], then: Callable[[int], object] | None = None) -> None:
        self._signals = tuple(signals)
        self._then = then

    def __call__(self, worker_id: int) -> None:
        numbers = [signal.Signals[name] for name in self._signals]
        for number in numbers:
            signal.signal(number, _take_note)  # not SIG_IGN: what the worker starts would inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        _close_gpus()
        if self._then is not None:
            self._then(worker_id)


def _take_note(number: int, frame: FrameType | None) -> None:
    """The rank answers the signal."""


@contextlib.contextmanager
def starting(signals: Iterable[str], start_method: str | None = None) -> Iterator[None]:
    """Around the start of workers that have `WorkerInit`: what comes meanwhile reaches the rank, and them, afterwards.

    `start_method`: the loader's (`fork`, `spawn` or `forkserver`); None: Python's default.
    """
    if (start_method or multiprocessing.get_start_method()) != "fork":
        resource_tracker.ensure_running()  # started later, it would let SIGTERM and SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name] for name in signals])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_gpus() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_DEVICES):
                os.close(int(name))
