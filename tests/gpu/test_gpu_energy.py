"""Energy of the GPU that computes, by NVML's own counter and by integrated power: they must agree."""

import time

import pytest
import torch

from rsup.worker.device import this_device
from rsup.worker.observe.energy import EnergyMeter, PowerIntegral

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]

BURN_S = 3.0


def burn(seconds: float) -> float:
    """Keep the device busy; how long it was, in seconds."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    began_s = time.monotonic()
    while time.monotonic() - began_s < seconds:
        for _ in range(50):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
    return time.monotonic() - began_s


def test_a_lap_holds_what_the_device_took_and_nothing_of_a_pause() -> None:
    pynvml = pytest.importorskip("pynvml")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    uuid, said = this_device(torch.device("cuda", 0)).uuid, list[str]()
    meter = EnergyMeter(uuid, said.append)
    assert meter.works, said
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    burn(1.0)  # clocks and power are up
    power = PowerIntegral(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, every_s=0.02)
    meter.resume()
    took_s = burn(BURN_S)
    lap_j, integral_j = meter.lap_j(), power.read_j()
    meter.pause()
    burn(1.0)
    meter.resume()
    power.close()
    assert lap_j is not None and said == []
    print(f"{lap_j:.0f} J by the counter, {integral_j:.0f} J by power, {lap_j / took_s:.0f} W")
    assert lap_j == pytest.approx(integral_j, rel=0.15)
    rest_j = meter.peek_j()
    assert rest_j is not None and rest_j < lap_j / 10
    meter.close()
