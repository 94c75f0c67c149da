"""How many ranks `--nproc-per-node auto|cpu|gpu|xpu` means on this machine, without importing torch into the launcher."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rsup.launcher.inventory import begin_nvml, boards_in_proc, load_nvml
from rsup.launcher.visible_devices import Naming, naming_of, read_visible
from rsup.supervisor.wire import Device

TORCH_TIMEOUT_S = 120

_PRINT_NAMED = """
import torch
name = torch._C._get_privateuse1_backend_name()
module = getattr(torch, name, None)
print(name, module.device_count() if module is not None and module.is_available() else 0)
"""


@dataclass(frozen=True)
class DeviceCounters:
    """Who counts what the words of `--nproc-per-node` mean. Each is called only where its word asks for it; 0: none."""

    cpus: Callable[[], int]
    gpus: Callable[[], int]
    xpus: Callable[[], int]
    accelerators: Callable[[], int]
    """Of whatever kind the node has: for `auto`."""
    named: Callable[[str], int | None]
    """Devices that a package adds to torch under a name of their own (`npu`, say); None: there is no such kind."""


def of_this_machine(environ: Mapping[str, str], each_sees_one: bool = False) -> DeviceCounters:
    """Counts without torch; asks torch, in a process of its own, only about devices that only torch knows."""
    return DeviceCounters(
        cpus=lambda: count_cpus(),
        gpus=lambda: count_gpus(environ, each_sees_one),
        xpus=lambda: count_xpus(),
        accelerators=lambda: count_gpus(environ, each_sees_one) or count_xpus() or _count_added()[1],
        named=_count_named,
    )


def count_cpus() -> int:
    """Cores that this process may use; what torchrun counts."""
    return len(os.sched_getaffinity(0))


def count_gpus(environ: Mapping[str, str] | None = None, each_sees_one: bool = False) -> int:
    """GPUs that CUDA or ROCm shows a rank under this environment; 0 if there are none. `each_sees_one`: every rank is to see
    one of them only, so that each MIG instance counts; else CUDA shows the first instance alone."""
    environ = os.environ if environ is None else environ
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if count := _count_nvidia():
        naming = naming_of(shown)
        found = visible_devices(shown, count, _nvidia_uuids() if naming is Naming.UUID else ())
        return min(found, 1) if naming is Naming.MIG and not each_sees_one else found
    if count := _count_amd():
        return visible_devices(environ.get("HIP_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES", shown)), count)
    return 0


def visible_devices(shown: str | None, count: int, uuids: Sequence[str] = ()) -> int:
    """How many of `count` devices a `CUDA_VISIBLE_DEVICES` leaves, read as CUDA reads it (`visible_devices.read_visible`).

    `uuids`: theirs; without them UUIDs are taken at their word, as MIG names are.
    """
    names = uuids or tuple(word.strip() for word in (shown or "").split(",") if word.strip().startswith("GPU-"))
    boards = [Device(names[i] if i < len(names) else "") for i in range(max(count, len(names)))]
    if naming_of(shown) is Naming.INDEX:
        boards = boards[:count]
    return len(read_visible(shown, None, boards, Device).devices)


def count_xpus() -> int:
    """Intel GPUs as torch counts them: asks torch in a process of its own, and only if such a device is there."""
    if not list(Path("/dev/dri").glob("renderD*")) or not _has_intel_gpu():
        return 0
    count = _ask_torch("import torch; print(torch.xpu.device_count())")
    return int(count[0]) if len(count) == 1 and count[0].isdecimal() else 0


def _count_named(name: str) -> int | None:
    found, count = _count_added()
    return count if name and found == name else None


def _count_added() -> tuple[str, int]:
    """Name and number of the devices that an installed package adds to torch; nothing is started where there is no such one."""
    if not metadata.entry_points(group="torch.backends"):
        return "", 0
    words = _ask_torch(_PRINT_NAMED)
    return (words[0], int(words[1])) if len(words) == 2 and words[1].isdecimal() else ("", 0)


def _ask_torch(script: str) -> list[str]:
    """The words that `script` prints, run by the ranks' interpreter; none if it fails."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _count_amd() -> int:
    return count_amd()


def _count_nvidia() -> int:
    return len(_nvidia_uuids())


def _nvidia_uuids() -> Sequence[str]:
    """UUIDs of the boards by PCI address; of the driver's list in /proc where NVML is not to be had."""
    nvml = load_nvml()
    if nvml is None or not begin_nvml(nvml):
        return [board.uuid for board in boards_in_proc()]
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in found]
    except nvml.NVMLError:
        return []  # none of its devices is ours
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def count_amd() -> int:
    """AMD GPUs of the kernel's topology, whoever may see them; nodes that are CPUs have no SIMD units."""
    count = 0
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            words = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue  # a node that our cgroup does not show
        count += words.get("simd_count", "0").strip() != "0"
    return count


def _has_intel_gpu() -> bool:
    for vendor in Path("/sys/class/drm").glob("renderD*/device/vendor"):
        try:
            if vendor.read_text().strip() == "0x8086":
                return True
        except OSError:
            continue
    return False
