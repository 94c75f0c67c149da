"""The reference trainer under `rsup launch`: it survives what it should, and ends with the same parameters."""

import os
import signal
from pathlib import Path

import pytest

from tests.jobs.conftest import Place, free_port, wait_until

pytestmark = pytest.mark.slow

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "30", "--save-interval", "5", "--log-interval", "5")
TINY = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --eval-iters 0"
SMALL = (*TRAIN, *TINY.split())


def train(place: Place, job: str, *options: str, ranks: int = 2, restarts: int = 1, launch: tuple[str, ...] = ()) -> str:
    """Run a small training to its end; return its digest. With no restart left it has no standbys, which import torch, too."""
    launched = place.launch(
        *("--max-restarts", str(restarts), "--nproc-per-node", str(ranks), "--job-id", job, *launch, *SMALL),
        *("--save", str(place.folder / job), *options),
    )
    launched.ends(0, within_s=110)
    last = launched.stdout.strip().splitlines()[-1]
    assert last.startswith("digest ") and len(last.split()[1]) == 64
    return last


_calm: dict[int, str] = {}


def calm_digest(place: Place, ranks: int) -> str:
    """Of an undisturbed run on that many ranks, made once."""
    if ranks not in _calm:
        _calm[ranks] = train(place, "calm", ranks=ranks, restarts=0)
        assert len(place.status("calm")["attempts"]) == 1
    return _calm[ranks]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.timeout(240)
def test_a_killed_rank_changes_nothing_of_the_result(place: Place, ranks: int) -> None:
    disturbed = train(place, "t1", "--fault", "rank=1,iteration=13,kind=sigkill", ranks=ranks)
    assert disturbed == calm_digest(place, ranks)
    status = place.status("t1")
    assert len(status["attempts"]) == 2
    (incident,) = status["incidents"]
    assert (incident["rank"], incident["signal_name"], incident["iteration"]) == (1, "SIGKILL", 13)
    assert incident["lost_iterations"] in range(0, 14)
    assert status["job"]["exit_code"] == 0 and status["job"]["state"] == "ended"


@pytest.mark.parametrize(
    ("fault", "section"),
    [
        ("rank=1,iteration=13,kind=sigstop", "step"),
        ("rank=0,iteration=13,kind=hang", "step"),
        ("rank=1,iteration=13,kind=gil-hang", "step"),
        ("rank=1,iteration=10,kind=hang-in-checkpoint", "checkpointing"),
    ],
)
@pytest.mark.timeout(240)
def test_a_hang_is_found_its_stacks_are_kept_and_training_goes_on(place: Place, fault: str, section: str) -> None:
    train(place, "h", "--enable-ft-package", "--fault", fault, launch=("--ft-rank-section-timeouts", "step:6,checkpointing:10"))
    status = place.status("h")
    assert len(status["attempts"]) == 2
    (incident,) = [i for i in status["incidents"] if i["kind"] == "hang"]
    assert incident["section"] == section
    assert incident["rank"] == int(fault[5])
    assert incident["stacks"]


@pytest.mark.timeout(400)
def test_the_supervisors_death_costs_nothing(place: Place) -> None:
    launched = place.launch(
        *("--nproc-per-node", "2", "--job-id", "s", *SMALL, "--iterations", "100000", "--save-interval", "100"),
        *("--save", str(place.folder / "s")),
    )
    for start in (10, 110, 210):
        wait_until(lambda start=start: place.iteration_of("s") >= start, f"iteration {start}", 150)
        before = place.supervisor_pid()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda before=before: place.supervisor_pid() != before, "another supervisor")
    place.rsup("stop", "s")
    launched.ends(0)
    status = place.status("s")
    assert len(status["attempts"]) == 1 and not status["incidents"]
    saved = [c["iteration"] for c in status["checkpoints"]]
    assert saved[-1] > 210
    assert saved == sorted({*range(100, saved[-1], 100), saved[-1]})


@pytest.mark.timeout(240)
def test_checkpoint_and_stop_on_request(place: Place) -> None:
    launched = place.launch(
        *("--nproc-per-node", "2", "--job-id", "r", *SMALL, "--iterations", "100000", "--save-interval", "100000"),
        *("--save", str(place.folder / "r")),
    )
    wait_until(lambda: place.iteration_of("r") >= 10, "iteration 10", 150)
    place.rsup("checkpoint", "r")
    wait_until(lambda: place.status("r").get("checkpoints"), "a checkpoint")
    place.rsup("stop", "r")
    launched.ends(0)
    status = place.status("r")
    assert len(status["checkpoints"]) == 2
    assert status["job"]["exit_code"] == 0


@pytest.mark.timeout(400)
def test_two_nodes_with_directories_of_their_own(place: Place) -> None:
    port = free_port()
    agents = []
    for node in (0, 1):
        home = place.folder / f"n{node}"
        (home / "run").mkdir(parents=True, mode=0o700)
        agents.append(
            place.launch(
                *("--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1"),
                *("--max-restarts", "1", "--job-id", "n2", *SMALL, "--save", str(place.folder / "n2")),
                *("--fault", "rank=1,iteration=13,kind=sigkill"),
                HOME=str(home),
                RSUP_STATE_DIR=str(home / "state"),
                XDG_RUNTIME_DIR=str(home / "run"),
            )
        )
    for agent in agents:
        agent.ends(0, within_s=180)
    assert agents[0].stdout.strip().splitlines()[-1] == calm_digest(place, 2)
    status = place.rsup("status", "n2", "--json", RSUP_STATE_DIR=str(Path(place.folder, "n0", "state")))
    assert '"signal_name": "SIGKILL"' in status
