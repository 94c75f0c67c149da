"""In-process restart with NCCL on two GPUs: 20 entries in one process, memory and all; and the trainer's digest."""

import json

import pytest

from tests.jobs.conftest import Place

pytest.importorskip("nvidia_resiliency_ext")

MEMORY = """
import json, os
import torch, torch.distributed as dist
import rsup.worker
from rsup.worker.inprocess import current_entry, restartable
from rsup.worker.inprocess.entry import finish_backend_init

RANK, LOCAL = os.environ["RANK"], int(os.environ["LOCAL_RANK"])
out = open(f"{os.environ['OUT']}/memory-{RANK}", "a", buffering=1)

def train():
    entry = current_entry().number
    torch.cuda.set_device(LOCAL)
    device = torch.device("cuda", LOCAL)
    dist.init_process_group("nccl", device_id=device)
    finish_backend_init(device)
    linear = torch.nn.Linear(2048, 2048, device=device)
    model = torch.nn.parallel.DistributedDataParallel(linear, device_ids=[LOCAL])
    linear(torch.ones(64, 2048, device=device))  # cuBLAS starts outside of the capture
    graph, still = torch.cuda.CUDAGraph(), torch.ones(64, 2048, device=device)
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks events
        linear(still)
    current_entry().at_restart(graph.reset)  # graphs go before process groups
    for iteration in range(1, 6):
        rsup.worker.set_iteration(iteration)
        model(still).sum().backward()
        graph.replay()
        torch.cuda.synchronize()
    rss_mib = int(open("/proc/self/statm").read().split()[1]) * 4 // 1024
    seen = {"entry": entry, "rss_mib": rss_mib, "allocated_mib": torch.cuda.memory_allocated() >> 20}
    seen |= {"free_mib": torch.cuda.mem_get_info()[0] >> 20, "threads": len(os.listdir("/proc/self/task"))}
    seen |= {"descriptors": len(os.listdir("/proc/self/fd")), "pid": os.getpid()}
    seen |= {"steps": {name: round(took_s, 3) for name, took_s in current_entry().restart_timings.items()}}
    out.write(json.dumps(seen) + "\\n")
    if entry < 21:
        if RANK == "1":
            raise ValueError(f"in entry {entry}")
        while True:
            model(still).sum().backward()
            torch.cuda.synchronize()
    dist.destroy_process_group()

restartable(train)()
"""


@pytest.mark.gpu(2)
@pytest.mark.timeout(240)
def test_twenty_restarts_in_one_process_take_no_more_memory(place: Place) -> None:
    limits = ("--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0")
    place.launch("--nproc-per-node", "2", "--job-id", "m", *limits, place.script(MEMORY)).ends(0, 220)
    for rank in range(2):
        seen = [json.loads(line) for line in (place.folder / f"memory-{rank}").read_text().splitlines()]
        assert [one["entry"] for one in seen] == list(range(1, 22))
        assert len({one["pid"] for one in seen}) == 1
        fifth, last = seen[4], seen[-1]
        print(f"rank {rank}: entry 5 {fifth}, entry 21 {last}")
        assert last["allocated_mib"] <= fifth["allocated_mib"] + 64  # a model kept by each entry would be 256
        assert last["free_mib"] >= fifth["free_mib"] - 64
        assert last["rss_mib"] <= fifth["rss_mib"] + 100
        assert last["descriptors"] <= fifth["descriptors"] + 8
        assert last["threads"] <= fifth["threads"] + 4


GRAPH = """
import os
import torch, torch.distributed as dist
from rsup.worker.inprocess import current_entry, restartable
from rsup.worker.inprocess.entry import finish_backend_init

RANK, LOCAL = os.environ["RANK"], int(os.environ["LOCAL_RANK"])

def train():
    torch.cuda.set_device(LOCAL)
    device = torch.device("cuda", LOCAL)
    dist.init_process_group("nccl", device_id=device)
    finish_backend_init(device)
    graph, ones = torch.cuda.CUDAGraph(), torch.ones(1024, device=device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(ones)
    current_entry().at_restart(graph.reset)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    if current_entry().number < 4:
        if RANK == "1":
            raise ValueError("boom")
        while True:
            graph.replay()
            torch.cuda.synchronize()
    graph.reset()
    dist.destroy_process_group()

restartable(train)()
"""


@pytest.mark.gpu(2)
@pytest.mark.timeout(150)
def test_an_abort_does_not_wait_for_graphs_that_go_after_it(place: Place) -> None:
    """An abort ends when no graph is left that holds its kernels; the training thread, which lets go of it, is freed before."""
    limits = ("--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0")
    place.launch("--nproc-per-node", "2", "--job-id", "g", *limits, place.script(GRAPH)).ends(0, 120)
    assert len(place.status("g")["attempts"]) == 1
    assert "every rank is in entry 4" in place.rsup("events", "g")


TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "30", "--save-interval", "5", "--deterministic-mode")


def train(place: Place, job: str, *options: str) -> str:
    launched = place.launch(
        *("--nproc-per-node", "2", "--job-id", job, *TRAIN, "--inprocess-restart", "--save", str(place.folder / job), *options)
    )
    launched.ends(0, 200)
    last = launched.stdout.strip().splitlines()[-1]
    assert last.startswith("digest ")
    return last


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
def test_exceptions_and_kills_do_not_change_the_result(place: Place) -> None:
    faults = ["rank=1,iteration=8,kind=exception", "rank=0,iteration=14,kind=out-of-memory", "rank=1,iteration=19,kind=sigkill"]
    disturbed = train(place, "d", *(part for fault in faults for part in ("--fault", fault)))
    assert disturbed == train(place, "c")
    assert len(place.status("d")["attempts"]) == 1
