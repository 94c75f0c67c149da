"""Damaged numbers in whole jobs under `rsup launch`, with the devices of an inventory file: who is named, what the job does
then, and that it ends with the parameters of an undisturbed run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Launched, Place, wait_until

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "12", "--save-interval", "4", "--log-interval", "4")
SMALL = ("--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--eval-iters", "0", "--global-batch-size", "8")
BROKEN = ("--fault", "device=GPU-b,kind=bitflip,site=grad,bit=30")
CALM = ("--max-restarts", "0")  # so without standbys, which import torch, too
_undisturbed: list[str] = []


@pytest.fixture
def inventory(own_directories: Path) -> str:
    """Three devices of one node."""
    path = own_directories / "devices.json"
    devices = [{"uuid": f"GPU-{name}", "serial": f"S{name}", "model": "H200", "vbios": "1", "driver": "1"} for name in "abc"]
    path.write_text(json.dumps(devices))
    return str(path)


def start(place: Place, inventory: str, job: str, *options: str, ranks: int = 2, launch: tuple[str, ...] = ()) -> Launched:
    return place.launch(
        *("--max-restarts", "3", "--nproc-per-node", str(ranks), "--device-inventory", inventory, "--job-id", job, *launch),
        *(*TRAIN, *SMALL, "--save", str(place.folder / job), *options),
    )


def digest(launched: Launched) -> str:
    last = launched.ends(0, within_s=120).stdout.strip().splitlines()[-1]
    assert last.startswith("digest ") and len(last.split()[1]) == 64
    return last


def undisturbed(place: Place, inventory: str) -> str:
    """Digest of the run without faults; run once."""
    if not _undisturbed:
        _undisturbed.append(digest(start(place, inventory, "calm", launch=CALM)))
    return _undisturbed[0]


def cases(place: Place, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(place.rsup("cases", "list", job, "--json"))
    return found


@pytest.mark.timeout(300)
def test_a_device_that_lies_is_named_and_left_out(place: Place, inventory: str) -> None:
    """S30, P3, P22, P23: decided by rotation in the first iteration of all, inside the launch; training ends on the other two;
    the next launch leaves it out."""
    launched = start(place, inventory, "lies", *BROKEN)
    disturbed = digest(launched)
    (case,) = cases(place, "lies")
    assert (case["verdict"], case["accused"], case["iteration"], case["injected"]) == ("persistent", ["GPU-b"], 1, True)
    assert {finding["rank"] for finding in case["findings"]} == {1} and not case["placements"]
    assert "GPU-c is used in place of GPU-b" in launched.stderr
    assert "persistent" in place.rsup("devices", "why", "GPU-b")
    calm = start(place, inventory, "calm", launch=CALM)
    assert digest(calm) == disturbed
    _undisturbed.append(disturbed)
    assert "GPU-b is left out" in calm.stderr
    assert {rank["device"] for rank in place.status("calm")["ranks"]} == {"GPU-a", "GPU-c"}


@pytest.mark.timeout(300)
def test_a_transient_error_goes_on_and_an_application_fault_ends_17(place: Place, inventory: str) -> None:
    """P21, P45: the exit code and the case say which it was."""
    transient = start(place, inventory, "once", "--fault", "rank=1,iteration=7,kind=nan,site=loss")
    assert digest(transient) == undisturbed(place, inventory)
    (case,) = cases(place, "once")
    assert (case["verdict"], case["action"], case["accused"]) == ("transient", "continue", [])
    assert len(place.status("once")["attempts"]) == 1
    start(place, inventory, "data", "--fault", "kind=nan-data,iteration=7").ends(17)
    (case,) = cases(place, "data")
    assert (case["verdict"], case["action"], case["iteration"], case["accused"]) == ("application", "leave", 7, [])
    assert case["data_position"] == {"consumed_samples": 48}


@pytest.mark.timeout(300)
def test_one_rank_is_moved_to_the_spare_and_decided(place: Place, inventory: str) -> None:
    """S5 in one launch: no peer could run its data."""
    launched = start(place, inventory, "alone", "--fault", "device=GPU-a,kind=inf,site=grad,from=7", ranks=1)
    digest(launched)
    (case,) = cases(place, "alone")
    assert (case["verdict"], case["accused"], case["tried"]) == ("persistent", ["GPU-a"], {"0": ["GPU-a"]})
    assert [(move["rank"], move["from"], move["to"]) for move in case["placements"]] == [(0, "GPU-a", "GPU-b")]
    assert len(place.status("alone")["attempts"]) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["supervisor and rank", "agent"])
def test_a_death_in_the_middle_of_a_case_costs_no_answer(place: Place, inventory: str, killed: str) -> None:
    """In the rotated replay, when the case is open."""
    options = (*BROKEN, "--fault", "rank=0,iteration=1,kind=sigstop,pass=3")
    launched = start(place, inventory, "dies", *options)
    wait_until(lambda: "kind=sigstop,pass=3" in launched.stderr and cases(place, "dies"), "the case is open", 120)
    if killed == "agent":
        os.kill(launched.pid, signal.SIGKILL)
        launched.wait()
        wait_until(lambda: place.status("dies").get("job", {}).get("state") == "ended", "the job has ended")
        launched = start(place, inventory, "dies", *options, launch=("--resume",))
    else:
        os.kill(place.supervisor_pid(), signal.SIGKILL)
        os.kill(next(rank["pid"] for rank in place.status("dies")["ranks"] if rank["rank"] == 0), signal.SIGKILL)
    disturbed = digest(launched)
    found = cases(place, "dies")
    assert [case["accused"] for case in found if case["verdict"] == "persistent"] == [["GPU-b"]]
    assert {case["verdict"] for case in found} <= {"persistent", "undecided"}
    assert disturbed == undisturbed(place, inventory)
