"""A real job's curve over a restart, its slow ranks, and the switch of their detection, from the script to the commands."""

import json
from typing import Any

import pytest

from tests.jobs.conftest import Place, wait_until

TRAINS = """
import os, sys, time
import rsup.worker as worker
from rsup.supervisor import wire
worker.init()
out, rank, attempt = os.environ["OUT"], int(os.environ["RANK"]), worker.attempt()
start, end = (1, 57) if attempt == 1 else (41, 80)
for at in range(start, end + 1):
    worker.set_iteration(at)
    if rank == 0:
        worker.report_metrics(at, {"lm loss": 100.0 / at if attempt == 2 or at <= 40 else -1.0, "iteration-time": 0.1}, 8 * at)
if attempt == 1:
    if rank == 0:
        worker.report_checkpoint(40, out + "/c", 0.1)
        worker.init().flush(60)
        sys.exit(3)
    time.sleep(600)
if rank == 0:
    worker.resumed(40, out + "/c")
    worker.init().flush(60)
    open(f"{out}/reported", "w").close()
while worker.requested_switches() != {"stragglers": True}:
    time.sleep(0.02)
open(f"{out}/saw-{rank}", "w").close()
if rank == 0:
    slow = [wire.Straggler(1, "", "", "step", 1.8, 0.5, "", "rank 1 is slow")]
    for at in (60, 70, 80):
        worker.report_straggler(wire.StragglerReport(at - 9, at, 2, stragglers=slow))
    worker.init().flush(60)
    open(f"{out}/slow", "w").close()
while not os.path.exists(out + "/finish"):
    time.sleep(0.02)
worker.shutdown()
"""


def points(place: Place) -> list[list[Any]]:
    """Of the job's loss, as its status has it."""
    curves = {one["name"]: one for one in place.status("m").get("curves", [])}
    found: list[list[Any]] = curves["lm loss"]["points"] if "lm loss" in curves else []
    return found


@pytest.mark.timeout(240)
def test_one_curve_over_a_restart_and_a_switch_in_a_running_job(place: Place) -> None:
    words = ("--nproc-per-node", "2", "--job-id", "m", "--max-restarts", "1")
    launched = place.launch(*words, place.script(TRAINS))
    wait_until((place.folder / "reported").exists, "both attempts")
    wait_until(lambda: points(place) and points(place)[-1][0] == 80, "the last iteration's loss")
    curve = points(place)
    assert [point[0] for point in curve] == list(range(1, 81))
    assert [point[2] for point in curve] == [100.0 / i for i in range(1, 81)]
    answer = json.loads(place.rsup("stragglers", "m", "on", "--reason", "it is slow", "--json"))
    assert answer["verb"] == "stragglers" and "switched on" in answer["message"]
    wait_until(lambda: all((place.folder / name).exists() for name in ("saw-0", "saw-1", "slow")), "both ranks to follow")

    def told() -> dict[str, Any]:
        now: dict[str, Any] = place.status("m").get("stragglers", {})
        return now if any(one["num_reports"] == 3 for one in now.get("episodes", [])) else {}

    found = wait_until(told, "all three reports")
    (episode,) = found["episodes"]
    assert (found["switched"], episode["rank"], episode["goes_on"], episode["num_reports"]) == (True, 1, True, 3)
    (place.folder / "finish").touch()
    launched.ends(0)
    text = place.rsup("status", "m")
    assert "lm loss" in text and "in iterations 1 to 80" in text and "straggler:" not in text
    told = [event["kind"] for event in json.loads(place.rsup("events", "m", "--json"))]
    assert told.count("Switched") == 1 and told.count("StragglerSeen") == 1
