"""Dumps of the reference trainer: the same files with a graph and without one, and a run that goes on as if there were none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rsup.worker.deterministic import parameter_digest
from rsup.worker.reference.build import make_model
from rsup.worker.reference.command_line import parse_options

TINY = ("--num-layers=1", "--hidden-size=16", "--num-attention-heads=2", "--seq-length=16", "--micro-batch-size=2")
"""As the fixture `runs` has it."""
EXPERTS = ("--num-experts=4", "--moe-ffn-hidden-size=8", "--moe-aux-loss-coeff=0.01", "--num-layers=2")
RUN = (*EXPERTS, "--iterations=7", "--global-batch-size=8", "--log-interval=1", "--no-async-save", "--save-interval=4")
DUMPS = (
    "--save-activations-interval=3",
    "--save-params-interval=7",
    "--save-tokens-per-expert-interval=3",
    "--save-grads",
    "--save-wgrads-interval=3",
    "--save-dgrads-interval=3",
)
GRAPH = ("--cuda-graph-impl=full_iteration", "--optimizer-cuda-graph", "--num-model-chunks=2")


def losses(text: str) -> list[tuple[float, float]]:
    """Both losses of each line."""
    lines = [line for line in text.splitlines() if line.startswith(" iteration")]
    return [(_field(line, "lm loss"), _field(line, "load_balancing_loss")) for line in lines]


def _field(line: str, name: str) -> float:
    return float(line.split(f" {name}: ")[1].split(" |")[0])


def files(folder: Path) -> dict[str, Any]:
    """All dumps in it, by their path."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("mp_rank_*")):
        found[str(path.relative_to(folder))] = torch.load(path, weights_only=True)
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_with_a_graph_and_without_one_the_same_is_dumped_and_nothing_else_changes(runs: Any, tmp_path: Path) -> None:
    """With a NaN in an iteration that dumps, so that it is computed twice."""
    plain = runs.run(2, *RUN, "--save", str(tmp_path / "plain"))
    fault = "--fault=rank=1,iteration=6,kind=nan,site=grad"
    eager = runs.run(2, *RUN, *DUMPS, "--save", str(tmp_path / "eager"), fault, job="eager")
    graph = runs.run(2, *RUN, *DUMPS, *GRAPH, "--save", str(tmp_path / "graph"), fault, "--log-interval=7", job="graph")
    assert plain.codes() == eager.codes() == graph.codes() == [0, 0], eager.text() + graph.text()
    assert plain.digest() == eager.digest() == graph.digest()
    printed = losses(plain.text())
    assert printed == losses(eager.text()) and len(printed) == 7 and losses(graph.text())[0] == printed[0]
    for of_interval, of_each in zip(losses(graph.text())[1], zip(*printed, strict=True), strict=True):
        assert of_interval == pytest.approx(sum(of_each) / 7, abs=1e-6), "though the iterations ran ahead of the log"
    assert "rerun: iteration 6 (found on rank 1): transient" in graph.text() and "not dumped" not in eager.text() + graph.text()

    dumped = files(tmp_path / "eager")
    assert equal(dumped, files(tmp_path / "graph")) and files(tmp_path / "plain") == {}
    place = "iter_{:07d}/mp_rank_00.pth"
    assert set(dumped) == {
        "params/" + place.format(7),
        *(f"{label}/{place.format(iteration)}" for label in ("activations", "dgrads", "wgrads") for iteration in (3, 6)),
    }
    options = parse_options([*TINY, *EXPERTS])
    model = make_model(options, torch.device("cpu"))
    model.load_state_dict(dumped["params/" + place.format(7)]["model_chunk0"])
    assert f"digest {parameter_digest(model)}" == plain.digest()
    activations, dgrads = (dumped[f"{label}/{place.format(6)}"]["model_chunk0"] for label in ("activations", "dgrads"))
    assert {"blocks.1.mlp.router/output0", "blocks.0.attention.qkv/input0", "tokens/output0"} <= activations.keys()
    assert {"blocks.1.mlp.experts.linear_fc2/input0", "tokens/output0"} <= dgrads.keys() and "tokens/input0" not in dgrads

    bad = ("--fault=rank=1,iteration=5,kind=nan-data", "--log-interval=100")
    left = runs.run(2, *RUN, *DUMPS, *GRAPH, "--save", str(tmp_path / "left"), *bad, job="left")
    assert 17 in left.codes() and {name.split("/")[1] for name in files(tmp_path / "left")} == {"iter_0000003"}, (
        "what was launched behind the rejected iteration is no dump"
    )

    for rank in (0, 1):
        lines = (tmp_path / f"eager/tokens_per_expert/rank{rank}.jsonl").read_text()
        assert lines == (tmp_path / f"graph/tokens_per_expert/rank{rank}.jsonl").read_text()
        told = [json.loads(line) for line in lines.splitlines()]
        assert [(one["iter"], one["block"], one["layer"]) for one in told] == [
            (i, "decoder", n) for i in (3, 6) for n in (0, 1)
        ]
        assert all(len(one["tpe"]) == 2 and {sum(counts) for counts in one["tpe"]} == {2 * 16 * 2} for one in told)
    of_last = json.loads((tmp_path / "eager/tokens_per_expert/rank0.jsonl").read_text().splitlines()[-1])["tpe"][-1]
    best = activations["blocks.1.mlp.router/output0"].topk(2).indices
    assert of_last == best.flatten().bincount(minlength=4).tolist()
