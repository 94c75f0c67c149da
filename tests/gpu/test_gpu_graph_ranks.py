"""Full-iteration graphs on two GPUs, in the reference trainer: faults inside, the way out, a rank that hangs in a replay."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.jobs.conftest import Launched, Place

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(400)]

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "24", "--save-interval", "5", "--log-interval", "5")
GRAPHS = ("--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph", "--deterministic-mode", "--bf16")
NUMBERS = ("--global-batch-size", "16", "--micro-batch-size", "4")
WITHIN_S = 240.0
DEVICE: tuple[str, ...] = ()
"""`--device cpu` shows that the tests themselves are right where there is no GPU."""


def start(place: Place, job: str, *options: str, launch: Sequence[str] = ()) -> Launched:
    """Two ranks of the trainer with graphs."""
    return place.launch(
        *("--max-restarts", "3", "--nproc-per-node", "2", "--job-id", job, *launch, *TRAIN, *GRAPHS, *NUMBERS, *DEVICE),
        *("--save", str(place.folder / job), *options),
    )


def finish(jobs: Mapping[str, Launched], codes: Mapping[str, int]) -> dict[str, str]:
    """Wait for all; their last lines. All that went wrong is told at once: time on GPUs is short."""
    began, wrong, last = time.monotonic(), [], {}
    for job, launched in jobs.items():
        try:
            launched.ends(codes.get(job, 0), within_s=max(1.0, WITHIN_S - (time.monotonic() - began)))
            last[job] = (launched.stdout.strip().splitlines() or [""])[-1]
        except AssertionError as error:
            wrong.append(f"===== {job}: {error}")
    print(f"{', '.join(jobs)}: {time.monotonic() - began:.1f} s together")
    assert not wrong, "\n".join(wrong)
    return last


def cases(place: Place, job: str) -> list[dict[str, Any]]:
    """The cases of a job."""
    found: list[dict[str, Any]] = json.loads(place.rsup("cases", "list", job, "--json"))
    for case in found:
        print(f"{job}: {case['verdict']}; {case['reason']}")
    return found


def test_faults_inside_the_graph_get_their_verdicts_and_change_nothing(place: Place) -> None:
    """At once, on the same two GPUs: only results are compared."""
    faults: dict[str, tuple[str, ...]] = {
        "undisturbed": (),
        "nan": ("--fault", "rank=1,iteration=9,kind=nan,site=loss"),
        "flip": ("--fault", "rank=1,iteration=10,kind=bitflip,site=grad,bit=30"),
        "warmup": ("--fault", "rank=0,iteration=2,kind=nan,site=loss"),
        "capture": ("--fault", "rank=1,iteration=4,kind=nan,site=grad"),
        "data": ("--fault", "rank=1,iteration=8,kind=nan-data"),
    }
    jobs = {job: start(place, job, *options) for job, options in faults.items()}
    last = finish(jobs, {"data": 17})
    for job in ("nan", "flip", "warmup", "capture"):
        assert [case["verdict"] for case in cases(place, job)] == ["transient"], job
        assert last[job] == last["undisturbed"], f"{job} has left a trace"
    assert [case["verdict"] for case in cases(place, "data")] == ["application"]
    assert "digest" in last["undisturbed"]


def test_bad_data_are_skipped_as_an_eager_run_skips_them(place: Place) -> None:
    """Losses of eager and graph runs: the same to the bit here, where kernels are deterministic."""
    bad = ("--fault", "rank=1,iteration=8,kind=nan-data", "--on-application", "skip")
    jobs = {"graphs": start(place, "graphs", *bad), "plain": _eager(place, "plain", *bad)}
    last = finish(jobs, {})
    of_graphs, of_plain = (_losses(jobs[job].stdout) for job in ("graphs", "plain"))
    assert of_graphs and len(of_graphs) == len(of_plain)
    far = max(abs(one - other) / abs(other) for one, other in zip(of_graphs, of_plain, strict=True))
    print(f"largest relative difference of a loss between graph and eager run: {far:.2g}")
    assert far <= 1e-3  # norms and clipping add numbers up in another order
    assert [case["verdict"] for case in cases(place, "graphs")] == ["application"]
    print(f"parameters of both are {'the same' if last['graphs'] == last['plain'] else 'not the same'} to the bit")


def _eager(place: Place, job: str, *options: str) -> Launched:
    return place.launch(
        *("--max-restarts", "3", "--nproc-per-node", "2", "--job-id", job, *TRAIN, *NUMBERS, *DEVICE),
        *("--deterministic-mode", "--bf16", "--save", str(place.folder / job), *options),
    )


def _losses(printed: str) -> list[float]:
    lines = [line for line in printed.splitlines() if line.startswith((" iteration", " validation"))]
    return [float(line.split("lm loss:")[-1].split("lm loss value:")[-1].split("|")[0]) for line in lines]


def test_recompute_offload_and_model_chunks_work_in_the_graph_and_change_nothing(place: Place) -> None:
    """What is computed again, or fetched back, is the same to the bit."""
    plain = ("--attention-dropout", "0", "--hidden-dropout", "0")
    variants: dict[str, tuple[str, ...]] = {
        "plain": (),
        "full": ("--recompute-granularity", "full"),
        "selective": ("--recompute-granularity", "selective"),
        "offload": ("--activation-offload", "--fine-grained-offloading-max-inflight-offloads", "2"),
        "chunks": ("--num-model-chunks", "2"),
    }
    jobs = {job: start(place, job, *plain, *options) for job, options in variants.items()}
    last = finish(jobs, {})
    assert "digest" in last["plain"]
    assert {job: line for job, line in last.items() if line != last["plain"]} == {}


IN_PROCESS = ("--inprocess-restart", "--inprocess-soft-timeout", "8", "--inprocess-hard-timeout", "30")
QUICK = ("--inprocess-monitor-thread-interval", "0.2", "--inprocess-monitor-process-interval", "0.2")


def test_a_replay_that_hangs_in_its_collective_is_left(place: Place) -> None:
    """Rank 1 does not launch its replay, so that of rank 0 waits for it inside NCCL. Communicators are aborted and graphs
    destroyed; training is entered again in the same processes, or else restarted in the same job, with the same result."""
    exception, hang = ("--fault", "rank=1,iteration=13,kind=exception"), ("--fault", "rank=1,iteration=13,kind=hang")
    jobs = {
        "undisturbed": start(place, "undisturbed"),
        "raises": start(place, "raises", *IN_PROCESS, *QUICK, *exception),
        "hangs": start(place, "hangs", *IN_PROCESS, *QUICK, *hang),
        "killed": start(place, "killed", "--enable-ft-package", *hang, launch=("--ft-rank-section-timeouts", "step:8")),
    }
    last = finish(jobs, {})
    for job in ("raises", "hangs", "killed"):
        attempts = place.status(job)["attempts"]
        entries = [line for line in jobs[job].stderr.splitlines() if "entry" in line or "graphs destroyed" in line]
        print(f"{job}: {len(attempts)} attempts", *entries[-4:], sep="\n  ")
        assert last[job] == last["undisturbed"], f"{job} has left a trace"
        assert len(attempts) == 2 if job == "killed" else len(attempts) <= 2
    (incident,) = [one for one in place.status("killed")["incidents"] if one["kind"] == "hang"]
    assert incident["rank"] == 1


LEAVES = """
import json, os, sys, time
import torch, torch.distributed as dist
from rsup.worker.cuda_graph.capture import shared_capture
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.lifecycle import destroy_process_group

rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
is_cuda = torch.cuda.is_available()
device = torch.device("cuda", local) if is_cuda else torch.device("cpu")
if is_cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
control = dist.new_group(backend="gloo")
capture = shared_capture(device)
with capture.on_stream():
    linear = torch.nn.Linear(2048, 2048, device=device)
    groups = GradientGroups(list(linear.parameters()))

def forward_backward(batches):
    groups.zero_()
    loss = linear(batches[0][0]).square().mean()
    loss.backward()
    groups.reduce(lambda number, norm: None)
    return loss.detach()

graph = FullIterationGraph(forward_backward, device, group=control, capture=capture)
for step in range(8):
    value = float(graph([[torch.ones(64, 2048) * rank]]).value)
assert graph.captured
before = torch.cuda.memory_reserved() if is_cuda else 0
began = time.monotonic()
if sys.argv[1] == "destroyed":
    graph.reset()
destroy_process_group()
took_s = time.monotonic() - began
torch.cuda.empty_cache()
after = torch.cuda.memory_reserved() if is_cuda else 0
with open(f"{os.environ['OUT']}/{sys.argv[1]}-{rank}", "w") as file:
    json.dump({"took_s": took_s, "before_mib": before >> 20, "after_mib": after >> 20}, file)
"""


@pytest.mark.parametrize("how", ["live", "destroyed"])
def test_a_way_out_with_live_graphs_does_not_hang(place: Place, how: str) -> None:
    place.launch("--nproc-per-node", "2", "--job-id", how, place.script(LEAVES), how).ends(0, 100)
    for rank in range(2):
        print(how, json.loads((place.folder / f"{how}-{rank}").read_text()))
