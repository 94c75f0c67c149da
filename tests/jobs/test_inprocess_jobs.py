"""In-process restart in whole jobs: what strikes ranks, and that training goes on in the same attempt, or at least goes on."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Launched, Place, wait_until

pytest.importorskip("nvidia_resiliency_ext")
pytestmark = pytest.mark.slow

LOOP = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import rsup.worker
from rsup.worker.inprocess import InProcessSettings, current_entry, restartable

PLAN = json.loads(os.environ["PLAN"])  # [[entry, rank, kind], ...]
SETTINGS = json.loads(os.environ.get("SETTINGS", "{}"))
FIRST_RANK = int(os.environ["RANK"])
out = open(f"{os.environ['OUT']}/rank-{FIRST_RANK}", "a", buffering=1)

def strike(entry, moment):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    for when, rank, kind in PLAN:
        if when == entry and rank == FIRST_RANK and kind.endswith("-at-start") == (moment == "start"):
            kind = kind.removesuffix("-at-start")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "exit":
                sys.exit(3)
            if kind == "hard-exit":
                os._exit(5)
            if kind == "busy":
                while True:
                    time.sleep(0.01)
            if kind == "gil-hang":
                import ctypes
                ctypes.PyDLL(None).sleep(300)  # a PyDLL keeps the interpreter lock
            if kind == "swallow":
                while True:
                    try:
                        while True:
                            time.sleep(0.01)
                    except BaseException:
                        pass
            raise ValueError(f"{kind} in entry {entry}")

def train():
    entry = current_entry()
    out.write(json.dumps({"entry": entry.number, "pid": os.getpid(), "joined": entry.joined}) + "\\n")
    strike(entry.number, "start")
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    for iteration in range(1, 6):
        rsup.worker.set_iteration(iteration)
        dist.all_reduce(ones)
        assert float(ones) == dist.get_world_size(), "another entry's numbers"
        ones.fill_(1)
        if iteration == 3:
            strike(entry.number, "step")
        time.sleep(0.02)
    last = entry.number
    dist.destroy_process_group()
    return last

last = restartable(train, InProcessSettings(**SETTINGS))()
print(f"rank {FIRST_RANK} ends in entry {last}", flush=True)
"""

FAST = {
    "monitor_thread_interval": 0.2,
    "monitor_process_interval": 0.2,
    "progress_watchdog_interval": 0.2,
    "soft_timeout": 8.0,
    "hard_timeout": 16.0,
    "heartbeat_interval": 1.0,
    "heartbeat_timeout": 30.0,
    "barrier_timeout": 60.0,
}


def run(place: Place, job: str, plan: list[list[Any]], ranks: int, *options: str, **settings: Any) -> list[str]:
    """Run the loop with that plan of faults to its end; the lines that its ranks print."""
    script = place.script(LOOP)
    arguments = ("--nproc-per-node", str(ranks), "--job-id", job, "--max-restarts", "1", *options)
    launched = place.launch(*arguments, script, PLAN=json.dumps(plan), SETTINGS=json.dumps(settings))
    launched.ends(0, within_s=220)
    return sorted(line for line in launched.stdout.splitlines() if line.startswith("rank "))


def entries(place: Place, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place.folder / f"rank-{rank}").read_text().splitlines()]


@pytest.mark.timeout(240)
def test_one_attempt_survives_everything_that_happens_to_its_ranks(place: Place) -> None:
    """P28: each entry has a store of its own, also when rank 0, its usual host, has died. Who is well keeps its process."""
    plan = [
        [1, 1, "exception"],
        [2, 1, "kill"],
        [3, 0, "kill"],  # rank 0 hosts nothing that others need
        [4, 0, "exception"],
        [4, 1, "exception"],  # two at once
        [5, 0, "kill"],
        [5, 1, "kill"],
        [6, 1, "exit"],  # SystemExit: not a restart's business, the process ends
        [7, 2, "exception-at-start"],  # a fault during the restart
        [8, 1, "kill"],
        [9, 1, "kill-at-start"],  # the replacement dies as well
        [10, 0, "hard-exit"],
    ]
    limits = ("--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0")  # it never gets further
    lines = run(place, "all", plan, 3, *limits)
    assert lines == [f"rank {rank} ends in entry 11" for rank in range(3)]
    status = place.status("all")
    assert len(status["attempts"]) == 1
    survivor = entries(place, 2)
    assert [line["entry"] for line in survivor] == list(range(1, 12))
    assert len({line["pid"] for line in survivor}) == 1
    replaced = entries(place, 1)
    joined = [line["entry"] for line in replaced if line["joined"]]
    assert joined in ([3, 6, 7, 9, 10], [3, 6, 8, 9, 10])  # the fault at the start of entry 7 may come before the newcomer
    assert len({line["pid"] for line in entries(place, 0)}) == 4


@pytest.mark.timeout(240)
def test_twenty_entries_in_one_process(place: Place) -> None:
    plan = [[entry, entry % 2, "exception"] for entry in range(1, 20)]
    assert run(place, "twenty", plan, 2, "--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0") == [
        f"rank {rank} ends in entry 20" for rank in range(2)
    ]
    assert len(place.status("twenty")["attempts"]) == 1


@pytest.mark.timeout(240)
def test_hangs_without_limits_of_ours_are_blamed_on_the_rank_that_hangs_and_cost_no_other_its_process(place: Place) -> None:
    """nvrx.md 5d: with NVRx alone the innocent victim was killed, and the job with it."""
    lines = run(place, "hangs", [[1, 1, "busy"], [2, 0, "gil-hang"]], 2, **FAST)
    assert lines == [f"rank {rank} ends in entry 3" for rank in range(2)]
    status = place.status("hangs")
    assert len(status["attempts"]) == 1
    assert [len({line["pid"] for line in entries(place, rank)}) for rank in range(2)] == [2, 1], "one process was killed"
    hung, busy = sorted(status["incidents"], key=lambda incident: int(incident["rank"]))
    assert (busy["rank"], busy["victims"], busy["found_by"]) == (1, [0], "in-process restart's soft limit")
    assert "no progress for 8 s" in busy["text"] and "it stands in strike (script.py" in busy["text"]
    assert (hung["rank"], hung["victims"], hung["found_by"]) == (0, [1], "in-process restart's hard limit")
    assert "since it hung: no sign of progress for 16 s" in hung["text"]


@pytest.mark.timeout(240)
def test_a_function_that_swallows_everything_becomes_a_restart_of_the_processes(place: Place) -> None:
    lines = run(place, "swallow", [[1, 1, "swallow"]], 2, "--inprocess-restart-within", "10", **FAST)
    assert [line.split()[:2] for line in lines] == [["rank", "0"], ["rank", "1"]]
    assert len(place.status("swallow")["attempts"]) <= 2


@pytest.mark.timeout(240)
def test_the_same_fault_again_and_again_becomes_a_restart_of_the_processes(place: Place) -> None:
    script = place.script("""
import os
from rsup.worker.inprocess import current_entry, restartable
import torch.distributed as dist

def train():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("cannot be entered again")
    dist.init_process_group("gloo")
    dist.destroy_process_group()

restartable(train)()
""")
    place.launch("--nproc-per-node", "2", "--job-id", "again", "--max-restarts", "1", script).ends(0)
    status = place.status("again")
    assert len(status["attempts"]) == 2
    story = place.rsup("events", "again")
    assert "cannot be entered again" in story


@pytest.mark.timeout(240)
def test_reserves_step_in_and_the_world_shrinks(place: Place) -> None:
    """`--inprocess-active-world-size`, `--inprocess-granularity`: NVRx's tree picks who computes."""
    settings = {"active_world_size": 2, "granularity": "rank"}
    lines = run(place, "reserve", [[1, 1, "kill"]], 3, **settings)
    assert lines == ["rank 0 ends in entry 2", "rank 2 ends in entry 2"]
    assert len(place.status("reserve")["attempts"]) == 1


@pytest.mark.timeout(240)
def test_a_process_group_made_too_early_is_said_in_one_line(place: Place) -> None:
    script = place.script("""
import torch.distributed as dist
from rsup.worker.inprocess import restartable
dist.init_process_group("gloo")
restartable(lambda: None)()
""")
    launched = place.launch("--nproc-per-node", "2", "--job-id", "early", script)
    assert launched.wait() == 1
    assert "torch.distributed is initialised before the training function is entered" in launched.stderr


# ------------------------------------------------------------------------------------------------- the reference trainer

TRAINER = ("-m", "rsup.worker.reference.train")
OFTEN = ("--save-interval", "5", "--log-interval", "10")
TRAIN = (*TRAINER, "--iterations", "30", *OFTEN)
TINY = (
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "16",
    "--micro-batch-size",
    "2",
)


def train(place: Place, job: str, ranks: int, *options: str, launch: tuple[str, ...] = ()) -> str:
    """Run a small training with in-process restart to its end; its digest."""
    launched = place.launch(
        *("--max-restarts", "2", "--nproc-per-node", str(ranks), "--job-id", job, *launch, *TRAIN, *TINY, "--eval-iters", "0"),
        *("--inprocess-restart", "--save", str(place.folder / job), *options),
    )
    launched.ends(0, within_s=140)
    last = launched.stdout.strip().splitlines()[-1]
    assert last.startswith("digest ")
    return last


def calm_digest(place: Place) -> str:
    """Of an undisturbed run on two ranks, made once."""
    if not _calm:
        _calm.append(train(place, "calm", 2, launch=("--max-restarts", "0")))  # so without standbys, which import torch, too
    return _calm[0]


_calm: list[str] = []


@pytest.mark.timeout(300)
def test_the_trainer_ends_with_the_digest_of_an_undisturbed_run(place: Place) -> None:
    """P29: what belongs to one entry is made anew for the next. A save may be under way when a fault strikes."""
    kinds = ["exception", "out-of-memory", "sigkill", "exit=3"]
    faults = [f"rank={i % 2},iteration={7 + 5 * i},kind={kind}" for i, kind in enumerate(kinds)]
    faults += ["rank=0,iteration=11,kind=exception"]  # right after a save was begun
    disturbed = train(place, "d", 2, *(part for fault in faults for part in ("--fault", fault)), "--enable-ft-package")
    assert disturbed == calm_digest(place)
    assert len(place.status("d")["attempts"]) == 1


@pytest.mark.timeout(300)
def test_a_training_with_a_graph_is_entered_again(place: Place) -> None:
    """What was launched and not settled is dropped with the entry, and the run ends like one without a graph."""
    graph = ("--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph")
    disturbed = train(place, "g", 2, *graph, "--fault", "rank=1,iteration=8,kind=exception")
    assert disturbed == calm_digest(place)
    assert len(place.status("g")["attempts"]) == 1


def begin(place: Place, job: str, *options: str, program: tuple[str, ...] = TRAINER) -> Launched:
    """A small training that goes on for long, with in-process restart and an exit signal. `program`: what runs it."""
    more = ("--iterations", "100000", "--inprocess-restart", "--exit-signal-handler", "--save", str(place.folder / job))
    arguments = ("--nproc-per-node", "2", "--job-id", job, "--max-restarts", "1", *program, *OFTEN)
    return place.launch(*arguments, *TINY, "--eval-iters", "0", *more, *options)


def monitors(ranks: list[int]) -> list[int]:
    """NVRx's daemons of those processes: they have the same environment, but for nobody's being their parent."""
    slots = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_leader = os.getsid(int(folder.name)) in ranks
            if int(folder.name) not in ranks and not is_leader and (folder / "environ").read_bytes() in slots.values():
                found.append(int(folder.name))
    return found


@pytest.mark.timeout(240)
def test_a_signal_to_every_process_of_a_step_is_the_ranks_business(place: Place) -> None:
    """SLURM sends it to NVRx's daemons, too. A monitor that is gone would be a fault of its rank."""
    launched = begin(place, "slurm")
    wait_until(lambda: "iteration" in launched.stdout, "the ranks train", within_s=90)

    def pids() -> list[int]:
        found = [rank["pid"] for rank in place.status("slurm").get("ranks", []) if rank["pid"]]
        return found if len(found) == 2 else []

    ranks = wait_until(pids, "the supervisor to hear of both ranks")
    daemons = wait_until(lambda: len(found := monitors(ranks)) == 2 and found, "a monitor for each rank")
    for pid in daemons:
        os.kill(pid, signal.SIGTERM)
    reached = launched.stdout.count("iteration")
    wait_until(lambda: launched.stdout.count("iteration") > reached, "training goes on")
    assert all(Path(f"/proc/{pid}").exists() for pid in daemons)
    for pid in (*daemons, *ranks):
        os.kill(pid, signal.SIGTERM)
    launched.ends(0)
    status = place.status("slurm")
    assert not status["incidents"] and len(status["attempts"]) == 1 and status["counts"]["checkpoints"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in daemons)


COMES_BACK_LATE = """
import os, time
from pathlib import Path
out = Path(os.environ["OUT"])
if os.environ["RANK"] == "1":
    try:
        (out / "first").touch(exist_ok=False)
    except FileExistsError:
        (out / "again").touch()
        time.sleep(600)
from rsup.worker.reference.train import run_as_program
run_as_program()
"""


@pytest.mark.timeout(240)
def test_a_stop_during_a_restart_does_not_wait_for_a_save_that_cannot_be(place: Place) -> None:
    options = ("--no-standby", "--shutdown-timeout", "300", place.script(COMES_BACK_LATE))
    launched = begin(place, "stopped", "--fault", "rank=1,iteration=12,kind=sigkill", program=options)
    wait_until((place.folder / "again").exists, "a new process that has yet to join", within_s=90)
    wait_until(lambda: "rank 1 gets a new process" in launched.stderr, "the line about it")
    launched.process.send_signal(signal.SIGTERM)
    launched.ends(143)  # long before the grace is over
    lines = [line for line in launched.stderr.splitlines() if "the ranks cannot save, and are ended" in line]
    assert len(lines) == 1 and "received SIGTERM" in lines[0]


@pytest.mark.timeout(300)
def test_a_hang_with_limits_costs_the_culprits_process_only(place: Place) -> None:
    fault = "rank=1,iteration=13,kind=gil-hang"
    limits = ("--ft-rank-section-timeouts", "step:6,checkpointing:20")
    hung = train(place, "h", 2, "--fault", fault, "--enable-ft-package", launch=limits)
    assert hung == calm_digest(place)
    status = place.status("h")
    assert len(status["attempts"]) == 1
    assert [incident["rank"] for incident in status["incidents"]] == [1]
