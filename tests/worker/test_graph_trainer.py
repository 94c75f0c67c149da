"""The reference trainer with `--cuda-graph-impl full_iteration`: on a CPU bitwise the run without a graph, whatever happens."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker.reference.command_line import doubts, parse_options

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
    assert said(graph.text()) == said(eager.text()) and len(said(eager.text())) == 7
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


def test_three_ranks_with_faults_at_both_ends_and_in_a_row(runs, tmp_path: Path) -> None:
    """Reduction goes by rank, so that an odd number of ranks changes no bit; a killed rank goes on from a local save."""
    options = (*RUN, "--global-batch-size=12")
    eager = runs.run(3, *options, "--no-async-save")
    kinds = ("rank=2,iteration=1,kind=nan,site=loss", "rank=0,iteration=6,kind=inf,site=grad")
    kinds += ("rank=1,iteration=7,kind=nan,site=loss", "rank=1,iteration=12,kind=nan,site=grad")
    faults = [f"--fault={kind}" for kind in kinds]
    graph = (*options, *GRAPH, "--optimizer-cuda-graph", *faults)
    calm = runs.run(3, *graph, job="graph")
    assert calm.codes() == [0, 0, 0] and said(calm.text()) == said(eager.text()), calm.text()
    told = re.findall(r"rerun: iteration (\d+) \(found on rank (\d)\): transient", calm.text())
    assert told == [("1", "2"), ("6", "0"), ("7", "1"), ("12", "1")]
    local = (
        "--save",
        str(tmp_path),
        "--no-async-save",
        "--non-persistent-save-interval=3",
        "--non-persistent-ckpt-type=in_memory",
    )
    killed, resumed = runs.run_with_restarts(3, *graph, *local, "--fault=rank=1,iteration=10,kind=sigkill", job="local")
    assert killed.codes()[1] == -9 and "local checkpoint of iteration 9 is whole" in killed.text()
    assert "resumed from the local checkpoint in" in resumed.text() and ": 9 iterations, 108 samples" in resumed.text()
    assert "rerun: iteration 12 (found on rank 1): transient" in resumed.text() and resumed.digest() == eager.digest()


def test_exits_16_and_17_and_resumes_with_and_without_a_graph(runs, tmp_path: Path) -> None:
    """Whoever wrote a checkpoint, and whoever goes on from it: the parameters at the end are those of the eager run."""
    options = ("--iterations=12", "--global-batch-size=4", "--save-interval=4", "--no-async-save")
    expected = runs.run(1, *options, "--save", str(tmp_path / "calm")).digest()

    def attempt(job: str, number: int, *more: str, on: str = "") -> tuple[int, Any]:
        environment = {"RSUP_DEVICE_UUID": on} if on else {}
        run = runs.start(1, *options, "--save", str(tmp_path / job), *more, number=number, job=job, environment=environment)
        return run.finish()[0], run

    broken = "--fault=device=GPU-a,kind=bitflip,bit=30,site=grad,from=7"
    code, _ = attempt("elsewhere", 1, *GRAPH, broken, on="GPU-a")
    assert code == 16 and (tmp_path / "elsewhere" / "iter_0000006").exists()
    code, eager = attempt("elsewhere", 2, broken, on="GPU-b")
    assert code == 0 and "persistent: another, healthy value came out on another device" in eager.text()
    assert eager.digest() == expected

    assert attempt("again", 1, "--fault=rank=0,iteration=6,exit=3")[0] == 3
    transient = ("--fault=rank=0,iteration=7,kind=inf,site=grad", "--on-transient=restart")
    code, rejected = attempt("again", 2, *GRAPH, *transient)
    assert code == 17 and "4 iterations, 16 samples" in rejected.text()
    assert {path.name for path in (tmp_path / "again").glob("iter_*")} == {"iter_0000004"}
    code, graph = attempt("again", 3, *GRAPH, *transient)
    assert code == 0 and "4 iterations, 16 samples" in graph.text() and graph.digest() == expected


def test_a_run_that_is_over_before_its_graph_is_warned_of(runs) -> None:
    warned = runs.run(1, *GRAPH, "--train-iters=2", "--cuda-graph-warmup-steps=5")
    assert warned.codes() == [0] and warned.text().startswith("warning: no iteration is run as a graph: ")
    assert doubts(parse_options([*GRAPH, "--train-iters=6", "--cuda-graph-warmup-steps=5"])) == []
    assert doubts(parse_options(["--train-iters=2"])) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--optimizer-cuda-graph", "--optimizer-cuda-graph needs --cuda-graph-impl full_iteration"),
        ("--cuda-graph-warmup-steps 4", "--cuda-graph-warmup-steps needs"),
        ("--no-cuda-graph-use-single-mempool", "--no-cuda-graph-use-single-mempool needs"),
        ("--cuda-graph-fallback eager", "--cuda-graph-fallback needs"),
        ("--num-model-chunks 2", "--num-model-chunks needs"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local does not go with"),
        ("--cuda-graph-impl transformer_engine", "use full_iteration or none"),
        ("--cuda-graph-impl none --cuda-graph-impl partial", "'partial' is neither none nor full_iteration"),
        ("--cuda-graph-impl local --cpu-offloading", "--cpu-offloading does not go with"),
        ("--cuda-graph-impl full_iteration --cpu-offloading", "--cpu-offloading is not available yet"),
        ("--cuda-graph-impl full_iteration --cuda-graph-modules attn mlp --lr 1", "--cuda-graph-modules attn,mlp does not go"),
        ("--cuda-graph-modules attn --cuda-graph-impl full_iteration", "never takes a choice of modules; leave it out"),
        ("--cuda-graph-modules attn", "--cuda-graph-modules is not available yet"),
        ("--cuda-graph-impl full_iteration --inference-cuda-graph-scope block", "never go into graphs of their own"),
        ("--inference-cuda-graph-scope block", "--inference-cuda-graph-scope is no option of this trainer"),
        (
            "--cuda-graph-impl full_iteration --timing-log-level 1 --timing-mode sync",
            "--timing-log-level 1 does not go with a CUDA graph",
        ),
        (
            "--cuda-graph-impl full_iteration --straggler-ctrlr-port 65535",
            "--straggler-ctrlr-port is no option of this trainer",
        ),
        ("--cuda-graph-impl full_iteration --save-wgrads", "--save-wgrads needs --save: dumps lie beside"),
        ("--cuda-graph-impl full_iteration --moe-input-jitter-eps 0.1", "--moe-input-jitter-eps is not available yet"),
        (
            "--cuda-graph-impl full_iteration --moe-input-jitter-eps 0.1 --recompute-granularity full",
            "--hidden-dropout 0.1 (the default) and --moe-input-jitter-eps 0.1 do not go with",
        ),
        (
            "--cuda-graph-impl full_iteration --optimizer-cuda-graph --log-num-zeros-in-grad",
            "leave it out, or leave out --optimizer-cuda-graph",
        ),
        ("--cuda-graph-impl full_iteration --num-layers 3 --num-model-chunks 2", "--num-layers 3 is not divisible by"),
        ("--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 0", "--cuda-graph-warmup-steps 0 does not go with"),
        (
            "--cuda-graph-impl full_iteration --recompute-granularity full",
            "; use --attention-dropout 0 and --hidden-dropout 0, or leave out --recompute-granularity",
        ),
        (
            "--cuda-graph-impl full_iteration --recompute-granularity selective",
            "--attention-dropout 0.1 (the default) does not go with",
        ),
        (
            "--cuda-graph-impl full_iteration --activation-offload",
            "--activation-offload without --fine-grained-offloading-max-inflight-offloads does not go with",
        ),
        ("--fine-grained-offloading-max-inflight-offloads 2", "needs --activation-offload"),
    ],
)
def test_what_does_not_go_together_is_said_at_once(arguments: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        parse_options(arguments.split())


def test_hidden_dropout_goes_with_what_is_not_recomputed() -> None:
    selective = [*GRAPH, "--recompute-granularity=selective", "--attention-dropout=0"]
    assert parse_options(selective).hidden_dropout == 0.1
    with pytest.raises(UsageError, match=r"^--hidden-dropout 0\.1 \(the default\) does not go with"):
        parse_options([*GRAPH, "--recompute-granularity=full", "--attention-dropout=0"])
