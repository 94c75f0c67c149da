"""A job with a slow rank: found by the sections of an ordinary script, switched on and off while it runs, seen by people."""

import json
from typing import Any

import pytest

from tests.jobs.conftest import Place, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import time

import torch
import torch.distributed as dist

import rsup.worker
from rsup.worker.device import this_device
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.straggler_scores import line

dist.init_process_group("gloo")
rank = dist.get_rank()
device = this_device("cpu")
rsup.worker.device_used(device.uuid)
detector = StragglerDetector(rank=rank, device=device, torch_device=torch.device("cpu"), group=None, warn=print)
was_on, iteration = False, 0
while detector.is_on or not was_on:
    iteration += 1
    rsup.worker.set_iteration(iteration)
    with rsup.worker.section("forward"):
        until = time.perf_counter() + (0.1 if rank == 1 else 0.002)
        while time.perf_counter() < until:
            pass
    with rsup.worker.section("step"):
        dist.all_reduce(torch.zeros(1))
    if iteration % 5 == 0:
        report = detector.report(iteration)
        was_on = was_on or detector.is_on
        if report is not None and rank == 0:
            print(line(report), flush=True)
            rsup.worker.report_straggler(report)
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
def test_a_slow_rank_is_found_once_the_detector_is_switched_on(place: Place) -> None:
    launched = place.launch("--nproc-per-node", "2", "--job-id", "slow", place.script(SCRIPT))
    wait_until(lambda: place.iteration_of("slow") > 5, "the loop")
    assert "stragglers" not in launched.stdout
    place.rsup("stragglers", "slow", "on", "--reason", "it crawls")

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(place.rsup("stragglers", "slow", "--json"))
        return found if any(one["rank"] == 1 for one in found["episodes"]) else {}

    found = wait_until(seen, "an episode")
    (episode,) = [one for one in found["episodes"] if one["rank"] == 1]
    assert found["switched"] and episode["section"] == "forward" and episode["slowdown"] > 2, found
    assert "switched on" in place.rsup("stragglers", "slow")
    place.rsup("stragglers", "slow", "off")
    launched.ends(0)
    lines = [line for line in launched.stdout.splitlines() if line.startswith("stragglers, iterations")]
    assert any("slower in forward" in line and "rank 1 (CPU, " in line for line in lines), launched.stdout
