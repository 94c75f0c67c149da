"""The reference trainer with `--cuda-graph-impl full_iteration`: on a CPU bitwise the run without a graph, whatever happens."""

import re
import signal
from pathlib import Path

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker.reference.command_line import parse_options

GRAPH = ("--cuda-graph-impl", "full_iteration")
RUN = (
    "--iterations=12",
    "--num-layers=2",
    "--log-interval=4",
    "--eval-interval=6",
    "--eval-iters=2",
)
NO_DROPOUT = ("--attention-dropout=0", "--hidden-dropout=0")


def said(text: str) -> list[str]:
    """Log lines, evaluations and the digest, without times."""
    lines = [line for line in text.splitlines() if line.startswith((" iteration", " validation", "digest"))]
    return [re.sub(r"iteration \(ms\): [0-9.]+", "", line) for line in lines]


def test_faults_and_skipped_iterations_leave_no_trace(runs) -> None:
    """P, C: a NaN on one rank while the next iteration runs already, on two ranks, with two model chunks."""
    options = (*RUN, "--global-batch-size=8", "--iterations-to-skip=9")
    eager = runs.run(2, *options)
    faults = ("--fault=rank=1,iteration=7,kind=nan,site=loss", "--fault=rank=0,iteration=11,kind=inf,site=grad")
    graph = runs.run(2, *options, *GRAPH, "--num-model-chunks=2", "--optimizer-cuda-graph", *faults, job="graph")
    assert eager.codes() == graph.codes() == [0, 0], graph.text()
    assert said(graph.text()) == said(eager.text()) and len(said(eager.text())) == 8
    told = re.findall(r"rerun: iteration (\d+) \(found on rank (\d)\): (\w+)", graph.text())
    assert told == [("7", "1", "transient"), ("11", "0", "transient")]
    assert "injected fault" not in eager.text()


def test_a_resumed_run_ends_with_the_same_parameters(runs, tmp_path: Path) -> None:
    """With recomputation and offloading of both kinds, which change no number."""
    options = (*RUN, "--global-batch-size=4", *NO_DROPOUT)
    expected = runs.run(1, *options).digest()
    saving = ("--save", str(tmp_path), "--save-interval=5", "--no-async-save", "--fault=rank=0,iteration=8,exit=3")
    offload = ("--activation-offload", "--fine-grained-offloading-max-inflight-offloads=1")
    one = (*options, *saving, *GRAPH, "--recompute-granularity=full", *offload)
    assert runs.run(1, *one).codes() == [3]
    again = runs.run(1, *one, number=2)
    assert "5 iterations, 20 samples" in again.text() and again.digest() == expected
    selective = runs.run(1, *options, *GRAPH, "--recompute-granularity=selective", job="selective")
    assert selective.digest() == expected


def test_asked_to_leave_it_completes_what_was_launched(runs, tmp_path: Path) -> None:
    constant = ("--lr-decay-style=constant", "--log-interval=1000", "--save", str(tmp_path), "--exit-signal-handler")
    run = runs.start(1, *constant, *GRAPH, "--iterations=1000000")
    run.wait_for(lambda: " iteration" in run.text(), "training")
    run.signal(0, signal.SIGTERM)
    assert run.finish() == [0]
    found = re.search(r"leaving after iteration (\d+): signal SIGTERM", run.text())
    assert found is not None and f"iteration {found[1]} is durable" in run.text()
    eager = runs.run(1, *constant[:2], f"--iterations={found[1]}", job="eager")
    assert run.digest() == eager.digest()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--optimizer-cuda-graph", "--optimizer-cuda-graph needs --cuda-graph-impl full_iteration"),
        ("--cuda-graph-warmup-steps 4", "--cuda-graph-warmup-steps needs"),
        ("--no-cuda-graph-use-single-mempool", "--no-cuda-graph-use-single-mempool needs"),
        ("--cuda-graph-fallback eager", "--cuda-graph-fallback needs"),
        ("--num-model-chunks 2", "--num-model-chunks needs"),
        ("--cuda-graph-impl local", "invalid choice: 'local'"),
        ("--cuda-graph-impl full_iteration --num-layers 3 --num-model-chunks 2", "--num-layers 3 is not divisible by"),
        ("--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 0", "--cuda-graph-warmup-steps 0 does not go with"),
        ("--cuda-graph-impl full_iteration --recompute-granularity full", "--attention-dropout 0.1 does not go with"),
        ("--cuda-graph-impl full_iteration --recompute-granularity selective", "--attention-dropout 0.1 does not go with"),
        ("--cuda-graph-impl full_iteration --activation-offload", "--fine-grained-offloading-max-inflight-offloads"),
        ("--fine-grained-offloading-max-inflight-offloads 2", "needs --activation-offload"),
    ],
)
def test_what_does_not_go_together_is_said_at_once(arguments: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        parse_options(arguments.split())


def test_hidden_dropout_goes_with_what_is_not_recomputed() -> None:
    selective = [*GRAPH, "--recompute-granularity=selective", "--attention-dropout=0"]
    assert parse_options(selective).hidden_dropout == 0.1
    with pytest.raises(UsageError, match=r"--hidden-dropout 0\.1 does not go with"):
        parse_options([*GRAPH, "--recompute-granularity=full", "--attention-dropout=0"])
