"""Screens one device in a process of its own: `python -m rsup.worker.device_test.one_device JSON`. Prints its report as JSON.

The process sees that device alone; a CPU stand-in is bound to its share of the cores, so that another one is a like device.
"""

import gc
import os
import platform
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from rsup.supervisor.wire import now_us
from rsup.worker.device_test.results import SKIPPED, DeviceReport, whole

READ_EVERY_S = 1.0


class Order(Struct, kw_only=True):
    """What to screen. `kind`: `cuda` or `cpu`; `share`: which of how many shares of the cores."""

    uuid: str
    kind: str
    duration_s: float
    node: str = ""
    model: str = ""
    fault: str = ""
    size: str = ""
    share: tuple[int, int] = (0, 1)


def run(order: Order) -> DeviceReport:
    """Screen it. Imports torch. Raises only what torch raises when it is loaded."""
    started_s, at_us = time.monotonic(), now_us()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if order.kind == "cpu":
        _bind(*order.share)
    gc.disable()  # it finds nothing in an import, and takes a quarter of its time
    import torch
    import torch._dynamo  # by use_deterministic_algorithms

    gc.enable()
    from rsup.worker.device_test.computations import computations, size_of
    from rsup.worker.device_test.injected_fault import read_fault
    from rsup.worker.device_test.screen import Screen
    from rsup.worker.device_test.sensors import Sensors

    report = DeviceReport(uuid=order.uuid, outcome=SKIPPED, node=order.node, model=order.model, at_us=at_us)
    report.torch, report.cuda = str(torch.__version__), torch.version.cuda or ""
    fault = read_fault(order.fault)
    fault = fault if fault is not None and fault.device in ("", order.uuid) else None
    report.injected = fault is not None
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if order.kind == "cuda" and not torch.cuda.is_available():
        report.reason = "torch cannot use the GPU here"
        return report
    device = torch.device(order.kind, 0) if order.kind == "cuda" else torch.device("cpu")
    size = order.size or size_of(device)
    report.model = report.model or _model(device)
    report.likeness = _likeness(device, size)
    sensors = Sensors(order.uuid if order.kind == "cuda" else "")
    read_s = [0.0]

    def read_sensors() -> None:
        if time.monotonic() - read_s[0] >= READ_EVERY_S:
            read_s[0] = time.monotonic()
            sensors.read()

    screen = Screen(device, computations(device, size), fault)
    report.tests = screen.run(order.duration_s, read_sensors)
    report.outcome, report.reason = whole(report.tests)
    report.rounds, report.seconds = screen.rounds, time.monotonic() - started_s
    report.temperature_c, report.sm_clock_mhz, report.power_w = sensors.temperature_c, sensors.sm_clock_mhz, sensors.power_w
    for name, value in sensors.facts.items():
        setattr(report, name, value)
    return report


def _bind(share: int, num_shares: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[share % len(cores) :: num_shares] or cores
    os.sched_setaffinity(0, mine[:1])
    os.environ["OMP_NUM_THREADS"] = "1"


def _model(device: "object") -> str:
    import torch

    if getattr(device, "type", "") == "cuda":
        return torch.cuda.get_device_name(0)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _likeness(device: "object", size: str) -> str:
    """What decides which bits a healthy device computes, as far as that is known."""
    import torch

    words = [size, str(torch.__version__)]
    if getattr(device, "type", "") == "cuda":
        shown = torch.cuda.get_device_properties(0)
        libraries = f"cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
        words += [shown.name, f"{shown.major}.{shown.minor}", f"{shown.multi_processor_count} SMs", libraries]
    else:
        words += [_model(device), str(torch.backends.cpu.get_cpu_capability())]
    return ", ".join(words)


def main(argv: list[str]) -> None:
    """The report on stdout, whatever happens."""
    order = msgspec.json.decode(argv[0], type=Order)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what torch prints is no report
    try:
        report = run(order)
    except Exception as error:  # the outermost frame: a device that cannot even begin
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        report = DeviceReport(uuid=order.uuid, outcome=SKIPPED, reason=what, node=order.node, model=order.model, at_us=now_us())
    out.write(msgspec.json.encode(report))
    out.close()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # Python's and torch's clean-up takes half a second
