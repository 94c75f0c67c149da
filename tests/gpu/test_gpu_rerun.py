"""Whose fault was it, on real boards: rotation between two of them, and a rank that is moved to the other one."""

import json
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from tests.jobs.conftest import Place

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "16", "--save-interval", "5", "--log-interval", "5")
UUIDS = (
    "import torch; print(*['GPU-' + str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())])"
)


def boards() -> list[str]:
    """UUIDs of the GPUs that torch sees, in its order."""
    command = [sys.executable, "-W", "ignore", "-c", UUIDS]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()


def train(place: Place, job: str, num_ranks: int, code: int, *options: str) -> str:
    """Run it to its end; return the last line, which is the digest."""
    launched = place.launch(
        *("--max-restarts", "3", "--nproc-per-node", str(num_ranks), "--job-id", job, *TRAIN),
        *("--save", str(place.folder / job), "--deterministic-mode", *options),
    )
    launched.ends(code, within_s=200)
    return launched.stdout.strip().splitlines()[-1]


def the_case(place: Place, job: str) -> dict[str, Any]:
    """The only case of a job; says how long it took from the report of the fault to the verdict."""
    (case,) = json.loads(place.rsup("cases", "list", job, "--json"))
    took_s = (datetime.fromisoformat(case["closed"]) - datetime.fromisoformat(case["opened"])).total_seconds()
    print(f"{job}: {case['verdict']} {took_s:.3f} s after the case was opened; {case['reason']}")
    found: dict[str, Any] = case
    return found


def test_two_ranks_rotate_and_name_the_board(place: Place) -> None:
    bad = boards()[1]
    train(place, "rotate", 2, 16, "--fault", f"device={bad},kind=bitflip,site=grad,bit=30,from=4")
    case = the_case(place, "rotate")
    assert (case["verdict"], case["accused"]) == ("persistent", [bad])


def test_one_rank_is_moved_to_the_other_board_and_that_decides(place: Place) -> None:
    bad = boards()[0]
    disturbed = train(place, "moved", 1, 0, "--fault", f"device={bad},kind=nan,site=loss,from=4")
    case = the_case(place, "moved")
    assert (case["verdict"], case["accused"]) == ("persistent", [bad])
    assert disturbed == train(place, "undisturbed", 1, 0)


def test_a_transient_fault_changes_nothing(place: Place) -> None:
    disturbed = train(place, "transient", 2, 0, "--fault", "rank=1,iteration=7,kind=nan,site=grad")
    assert the_case(place, "transient")["verdict"] == "transient"
    assert disturbed == train(place, "plain", 2, 0)
