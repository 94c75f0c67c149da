"""`--fp16` on a GPU: a dynamic loss scale finds its height and survives a kill, and a fixed one works in a graph."""

import re

import pytest

from tests.jobs.conftest import Launched, Place

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "40", "--save-interval", "10", "--log-interval", "1")
NUMBERS = ("--deterministic-mode", "--fp16", "--micro-batch-size", "4", "--global-batch-size", "8")
DEVICE: tuple[str, ...] = ()
"""`--device cpu` shows that the tests themselves are right where there is no GPU."""


def start(place: Place, job: str, *options: str) -> Launched:
    """One rank of the trainer."""
    return place.launch(
        *("--max-restarts", "1", "--nproc-per-node", "1", "--job-id", job, *TRAIN, *NUMBERS, *DEVICE),
        *("--save", str(place.folder / job), *options),
    )


def logged(printed: str, name: str) -> list[float]:
    """That field of all log lines."""
    return [float(value) for value in re.findall(rf"\| {name}: (\S+) \|", printed)]


def test_a_dynamic_scale_goes_on_where_it_was(place: Place) -> None:
    scale = ("--initial-loss-scale", str(2**36), "--loss-scale-window", "5")
    jobs = {
        "whole": start(place, "whole", *scale),
        "killed": start(place, "killed", *scale, "--fault", "rank=0,iteration=25,kind=sigkill"),
    }
    for launched in jobs.values():
        launched.ends(0, within_s=200)
    last = [launched.stdout.strip().splitlines()[-1] for launched in jobs.values()]
    assert last[0].startswith("digest ") and last[0] == last[1]
    scales, losses = logged(jobs["whole"].stdout, "loss scale"), logged(jobs["whole"].stdout, "lm loss")
    print(f"loss scales: {scales}")
    assert scales[0] > 4 * min(scales) and scales[-1] >= 1.0
    assert logged(jobs["killed"].stdout, "loss scale")[-20:] == scales[-20:]
    assert losses[-1] < losses[0] or losses[0] != losses[0]
    assert jobs["whole"].stdout.count("number of skipped iterations: 1 ") >= 3


def test_a_fixed_scale_is_the_same_in_a_graph(place: Place) -> None:
    scale = ("--loss-scale", "1024")
    graph = start(place, "graph", *scale, "--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph")
    plain = start(place, "plain", *scale)
    for launched in (graph, plain):
        launched.ends(0, within_s=200)
    losses = [logged(launched.stdout, "lm loss") for launched in (graph, plain)]
    far = max(abs(one - other) / abs(other) for one, other in zip(*losses, strict=True))
    print(f"largest relative difference of a loss between graph and eager run: {far:.2g}")
    assert len(losses[0]) == 40 and far <= 1e-3 and losses[0][-1] < losses[0][0]
    assert set(logged(graph.stdout, "loss scale")) == {1024.0}
