"""How many ranks `--nproc-per-node auto|cpu|gpu|xpu` means on this machine, without importing torch into the launcher."""

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

XPU_TIMEOUT_S = 120


def count_cpus() -> int:
    """Cores that this process may use; what torchrun counts."""
    return len(os.sched_getaffinity(0))


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """GPUs that CUDA or ROCm shows a rank under this environment; 0 if there are none."""
    environ = os.environ if environ is None else environ
    if count := _count_nvidia():
        return visible_devices(environ.get("CUDA_VISIBLE_DEVICES"), count)
    if count := _count_amd():
        shown = environ.get("HIP_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
        return visible_devices(shown, count)
    return 0


def visible_devices(shown: str | None, count: int) -> int:
    """How many of `count` devices a `CUDA_VISIBLE_DEVICES` leaves. As CUDA does, reading ends at the first bad entry.

    UUIDs and MIG names are taken at their word; doubles make the whole list invalid.
    """
    if shown is None:
        return count
    found: list[str] = []
    for word in shown.split(","):
        name = word.strip()
        if name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count):
            found.append(name.lstrip("0") or "0" if name.isdecimal() else name)
        else:
            break
    return len(found) if len(set(found)) == len(found) else 0


def count_xpus() -> int:
    """Intel GPUs as torch counts them: asks torch in a process of its own, and only if such a device is there."""
    if not list(Path("/dev/dri").glob("renderD*")) or not _has_intel_gpu():
        return 0
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", "import torch; print(torch.xpu.device_count())"],
            capture_output=True,
            text=True,
            timeout=XPU_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else 0


def _count_nvidia() -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the old package of that name, where that is installed too
            import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0  # no driver, or none of its devices is ours
    return count


def _count_amd() -> int:
    """GPU nodes of the kernel's topology; those of a CPU have no SIMD units."""
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
