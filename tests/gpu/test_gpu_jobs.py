"""The reference trainer on two GPUs with NCCL under `rsup launch`."""

import pytest

from tests.jobs.conftest import Place

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "40", "--save-interval", "10", "--log-interval", "10")


def train(place: Place, job: str, *options: str, launch: tuple[str, ...] = ()) -> str:
    """Run it to its end; return the digest."""
    launched = place.launch(
        *("--max-restarts", "3", "--nproc-per-node", "2", "--job-id", job, *launch, *TRAIN),
        *("--save", str(place.folder / job), "--deterministic-mode", *options),
    )
    launched.ends(0, within_s=200)
    assert "cuda" in launched.stdout
    return launched.stdout.strip().splitlines()[-1]


def test_a_killed_rank_changes_nothing_of_the_result(place: Place) -> None:
    disturbed = train(place, "g1", "--fault", "rank=1,iteration=25,kind=sigkill")
    assert disturbed == train(place, "g2")
    status = place.status("g1")
    assert len(status["attempts"]) == 2
    (incident,) = status["incidents"]
    assert (incident["rank"], incident["signal_name"], incident["iteration"]) == (1, "SIGKILL", 25)
    assert all(str(rank["device"]).startswith("GPU-") for rank in status["ranks"]), "each rank names the board it used"


@pytest.mark.parametrize("fault", ["rank=0,iteration=25,kind=hang", "rank=1,iteration=25,kind=sigstop"])
def test_a_hang_in_front_of_nccl_is_found_and_named(place: Place, fault: str) -> None:
    train(place, "h", "--enable-ft-package", "--fault", fault, launch=("--ft-rank-section-timeouts", "step:5"))
    (incident,) = [i for i in place.status("h")["incidents"] if i["kind"] == "hang"]
    assert incident["rank"] == int(fault[5]) and incident["section"] == "step"
    assert incident["stacks"]
