"""Dumps of a run whose iterations are replayed as graphs: one that dumps runs eagerly, and nobody can tell afterwards."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.conftest import Launched, Place

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "16", "--log-interval", "4", "--micro-batch-size", "4")
MODEL = ("--global-batch-size", "8", "--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "0.01")
SURE = ("--deterministic-mode", "--bf16")
GRAPHS = ("--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph")
DUMPS = tuple(f"--save-{what}-interval=7" for what in ("activations", "dgrads", "wgrads", "params", "tokens-per-expert"))
WITHIN_S = 200.0
DEVICE: tuple[str, ...] = ()
"""`--device cpu` shows that the test itself is right where there is no GPU."""


def start(place: Place, job: str, *options: str) -> Launched:
    """One rank of the trainer, with dropout and experts."""
    launch = ("--nproc-per-node", "1", "--job-id", job)
    return place.launch(*launch, *TRAIN, *MODEL, *SURE, *DEVICE, "--save", str(place.folder / job), *options)


def dumps(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("mp_rank_00.pth")):
        for chunk, tensors in torch.load(path, weights_only=True).items():
            found |= {f"{path.relative_to(folder)} {chunk} {key}": value for key, value in tensors.items()}
    return found


def test_an_iteration_that_dumps_leaves_no_trace_in_a_run_of_graphs(place: Place) -> None:
    """Iterations 7 and 14 are dumped, behind the capture in the fourth; also in a run whose capture would be the seventh."""
    jobs = {
        "graphs": start(place, "graphs", *GRAPHS),
        "dumped": start(place, "dumped", *GRAPHS, *DUMPS),
        "captured": start(place, "captured", *GRAPHS, *DUMPS, "--cuda-graph-warmup-steps", "6"),
        "plain": start(place, "plain", *DUMPS),
    }
    began, last = time.monotonic(), {}
    for job, launched in jobs.items():
        launched.ends(0, within_s=max(1.0, WITHIN_S - (time.monotonic() - began)))
        last[job] = launched.stdout.strip().splitlines()[-1]
    assert last["graphs"] == last["dumped"] == last["captured"] and last["graphs"].startswith("digest ")
    of_graph, of_plain = dumps(place.folder / "dumped"), dumps(place.folder / "plain")
    assert of_graph.keys() == of_plain.keys() and {name.split("/")[0] for name in of_graph} == {
        "activations",
        "dgrads",
        "wgrads",
        "params",
    }
    again = dumps(place.folder / "captured")
    assert [name for name, one in of_graph.items() if not torch.equal(one, again[name])] == []
    differ = [name for name, one in of_graph.items() if not torch.equal(one, of_plain[name])]
    print(f"of {len(of_graph)} dumped tensors {len(differ)} are not the same to the bit with DistributedDataParallel")
    assert all(of_graph[name].shape == of_plain[name].shape for name in of_graph)
    data = "activations/iter_0000014/mp_rank_00.pth model_chunk0 tokens/input0"
    assert torch.equal(of_graph[data], of_plain[data])
    lines = [(place.folder / job / "tokens_per_expert" / "rank0.jsonl").read_text() for job in ("dumped", "captured")]
    assert lines[0] == lines[1] and len(lines[0].splitlines()) == 4
