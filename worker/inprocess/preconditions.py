"""What NVRx and NCCL need for a restart inside of the processes: set, and checked, only where it is on."""

import contextlib
import os
from collections.abc import Callable, Iterator

from rsup.supervisor.wire import RsupError

SETTINGS = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "an aborted communicator would end the process"),
    "NCCL_NVLS_ENABLE": ("0", "NVLink multicast cannot be aborted"),
}
BAD_NCCL = ((2, 28, 3), (2, 28, 9))
OLDEST_NCCL = (2, 26, 2)


class CannotRestartInProcess(RsupError):
    """in-process restart cannot work here: WHY; WHAT TO DO"""

    exit_code = 2


def set_environment(warn: Callable[[str], None]) -> None:
    """Set what the user has not set, before NCCL is loaded; `warn` of what the user has set otherwise."""
    for name, (value, why) in SETTINGS.items():
        found = os.environ.setdefault(name, value)
        if found != value:
            warn(f"{name}={found}: in-process restart needs {value} ({why})")


def check(warn: Callable[[str], None]) -> None:
    """Raise `CannotRestartInProcess` for what makes a restart impossible; `warn` of an NCCL known to hang in an abort."""
    import torch.distributed as dist

    try:
        import nvidia_resiliency_ext.inprocess  # noqa: F401
    except ImportError as error:
        raise CannotRestartInProcess(
            f"in-process restart needs nvidia-resiliency-ext ({error}): pip install rsup[train]"
        ) from None
    if dist.is_initialized():
        raise CannotRestartInProcess(
            "torch.distributed is initialised before the training function is entered: move init_process_group into it"
        )
    version = nccl_version()
    if version and (version < OLDEST_NCCL or BAD_NCCL[0] <= version < BAD_NCCL[1]):
        warn(f"NCCL {'.'.join(map(str, version))} may hang when it is aborted: use 2.26.2 to 2.28.2, or 2.28.9 and newer")


def import_early() -> None:
    """Import what remembers the default process group of the moment in which it is imported: it would keep the first entry's,
    with its connections, for ever. DDP imports it when it is first made."""
    import torch.distributed.nn  # noqa: F401


def nccl_version() -> tuple[int, ...]:
    """Of torch's NCCL; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ()
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """The environment lacks `name` meanwhile."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value
