"""Where ranks run again after a rejected iteration, in whole jobs: what tells data, board and rank apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Launched, Place

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "6", "--save-interval", "2", "--log-interval", "3")
SMALL = ("--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--eval-iters", "0", "--global-batch-size", "8")


@pytest.fixture
def inventory(own_directories: Path) -> str:
    """Two devices for two ranks, and a spare."""
    path = own_directories / "devices.json"
    devices = [{"uuid": f"GPU-{name}", "serial": f"S{name}", "model": "H200", "vbios": "1", "driver": "1"} for name in "abc"]
    path.write_text(json.dumps(devices))
    return str(path)


def start(place: Place, inventory: str, job: str, *faults: str) -> Launched:
    options = [word for fault in faults for word in ("--fault", fault)]
    return place.launch(
        *("--max-restarts", "3", "--nproc-per-node", "2", "--device-inventory", inventory, "--job-id", job),
        *(*TRAIN, *SMALL, "--save", str(place.folder / job), *options),
    )


def cases(place: Place, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(place.rsup("cases", "list", job, "--json"))
    return sorted(found, key=lambda case: str(case["case_id"]))


@pytest.mark.timeout(180)
def test_all_ranks_data_is_bad_and_one_spare_decides(place: Place, inventory: str) -> None:
    """Rotation cannot tell; one rank's data fails on the spare too, which clears its board for the other: no case is open."""
    start(place, inventory, "data", *(f"kind=nan-data,iteration=4,rank={rank}" for rank in (0, 1))).ends(17, within_s=160)
    (case,) = cases(place, "data")
    assert (case["verdict"], case["accused"], len(case["placements"])) == ("application", [], 2)
    assert "GPU-c" in {move["to"] for move in case["placements"]}
    assert len(place.status("data")["attempts"]) == 2
    assert {device["state"] for device in json.loads(place.rsup("devices", "list", "--json"))} <= {"clear", "watch"}


@pytest.mark.timeout(180)
def test_a_fault_that_follows_the_rank_accuses_no_board(place: Place, inventory: str) -> None:
    """The program of rank 1 spoils iteration 4 wherever it runs: its first board is accused and left out, its second one as
    well; then the accusation is taken back, and the job ends instead of wearing out board after board."""
    launched = start(place, inventory, "rank", "rank=1,iteration=4,kind=nan,site=loss,repeat").ends(17, within_s=160)
    assert "the fault followed rank 1 from GPU-b (case rank.1-a1-i4) to GPU-c" in launched.stderr
    first, second = cases(place, "rank")
    assert (first["accused"], second["accused"]) == (["GPU-b"], ["GPU-c"])
    assert "taken back against GPU-b" in first["note"] and "does not count against GPU-c" in second["note"]
    states = {device["uuid"]: device["state"] for device in json.loads(place.rsup("devices", "list", "--json"))}
    assert "quarantined" not in states.values() and states["GPU-b"] == "suspect"
