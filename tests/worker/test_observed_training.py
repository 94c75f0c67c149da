"""The reference trainer's console, TensorBoard and W&B files, read back; and that an interrupted run gives one curve."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from rsup.worker.reference.build import make_schedule
from rsup.worker.reference.command_line import parse_options
from tests.worker.written_files import scalars, wandb_rows

GRAPH = ("--cuda-graph-impl", "full_iteration")
RUN = ("--iterations", "9", "--global-batch-size", "8", "--eval-interval", "6", "--eval-iters", "2", "--log-interval")
LOGGED = (
    *("--log-throughput", "--log-num-zeros-in-grad", "--log-params-norm", "--log-world-size-to-tensorboard"),
    *("--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--timing-log-level", "2"),
)


def lines_of(text: str) -> dict[int, dict[str, str]]:
    """The fields of each iteration's line."""
    found = re.findall(r"^ iteration +(\d+)/\d+ \| (.*) \|$", text, re.MULTILINE)
    return {int(iteration): dict(field.split(": ", 1) for field in fields.split(" | ")) for iteration, fields in found}


def is_printed(value: float, printed: str, digits: int) -> bool:
    """Whether a line has that number, of float32 at best, in so many digits."""
    return math.isclose(value, float(printed), rel_tol=10.0 ** (1 - digits))


def test_what_is_printed_and_written_is_true(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, with everything on; against what follows from the options, and a run of one rank on the same samples."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    still = (*RUN, "1", "--attention-dropout", "0", "--hidden-dropout", "0")
    written = ("--tensorboard-dir", str(tmp_path / "tb"), "--wandb-project", "tiny", "--wandb-save-dir", str(tmp_path))
    environment = {"WANDB_MODE": "offline"}
    run = runs.start(2, *still, *LOGGED, *written, environment=environment)
    assert run.finish() == [0, 0], run.text()
    alone = lines_of(runs.run(1, *still, "--micro-batch-size", "4").text())
    printed, tags = lines_of(run.text()), scalars(tmp_path / "tb")
    schedule = make_schedule(parse_options(["--train-iters", "9", "--global-batch-size", "8"]))
    series = {tag: dict(points) for tag, points in tags.items()}
    assert sorted(printed) == list(range(1, 10)) and sorted(series["lm loss"]) == list(range(1, 10))
    for iteration, fields in printed.items():
        assert fields["consumed samples"] == str(8 * iteration) and fields["global batch size"] == "8"
        assert math.isclose(series["learning-rate"][iteration], schedule.at(8 * (iteration - 1)), rel_tol=1e-6)
        assert is_printed(series["lm loss"][iteration], fields["lm loss"], 7)
        assert math.isclose(float(alone[iteration]["lm loss"]), float(fields["lm loss"]), rel_tol=1e-5)
        assert math.isclose(float(alone[iteration]["grad norm"]), float(fields["grad norm"]), rel_tol=1e-2)
        for key, field in (("grad-norm", "grad norm"), ("params-norm", "params norm"), ("num-zeros", "num zeros")):
            assert math.isclose(series[key][iteration], float(fields[field]), abs_tol=6e-4), key
        assert math.isclose(
            series["iteration-time"][iteration] * 1e3, float(fields["elapsed time per iteration (ms)"]), abs_tol=0.06
        )
    evaluated = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|", run.text())
    for iteration, loss, ppl in ((int(words[0]), *words[1:]) for words in evaluated):
        assert is_printed(series["lm loss validation"][iteration], loss, 7)
        assert is_printed(series["lm loss validation ppl"][iteration], ppl, 6)
        assert math.isclose(float(ppl), math.exp(float(loss)), rel_tol=1e-5)
    assert [iteration for iteration, *_ in evaluated] == ["6", "9"]
    assert set(series["world-size"].values()) == {2} and set(series["loss-scale"].values()) == {1}
    assert set(series["batch-size"].values()) == {8} and len(series["forward-compute-time"]) == 9
    over_samples = dict(scalars(tmp_path / "tb" / "vs-samples")["lm loss vs samples"])
    assert over_samples == {8 * iteration: loss for iteration, loss in series["lm loss"].items()}
    _, rows = wandb_rows(tmp_path)
    for key in ("lm loss", "learning-rate", "lm loss validation"):
        kept = {row["_step"]: row[key] for row in rows if key in row}
        assert kept == pytest.approx(series[key], rel=1e-6), key


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What does not depend on the machine's speed."""
    return {tag: points for tag, points in scalars(folder).items() if not tag.endswith("-time") and tag != "throughput"}


@pytest.mark.parametrize("graph", [(), GRAPH], ids=["eager", "graph"])
def test_an_interrupted_run_gives_the_curves_of_one_that_was_not(runs, tmp_path: Path, graph: tuple[str, ...]) -> None:
    """Bitwise. With a graph losses come one call late, and belong to their own iteration all the same."""
    flags = (*RUN, "4", "--log-params-norm", "--log-num-zeros-in-grad", "--no-async-save")
    whole = runs.run(1, *flags, "--tensorboard-dir", str(tmp_path / "whole"))
    broken = ("--save", str(tmp_path / "save"), "--save-interval", "3", "--fault=rank=0,iteration=8,kind=exception")
    where = ("--tensorboard-dir", str(tmp_path / "broken"))
    first, second = runs.run_with_restarts(1, *flags, *broken, *where, *graph, job="broken")
    assert (whole.codes(), first.codes(), second.codes()) == ([0], [1], [0]), second.text()
    expected, found = curves(tmp_path / "whole"), curves(tmp_path / "broken")
    assert [step for step, _ in expected["lm loss"]] == list(range(1, 10)) and found == expected
    assert "resumed from" in second.text() and first.text().count("iteration 8/9 |") == 0


def progress_of(folder: Path) -> list[str]:
    return [line.split("\t", 3)[3].split("\tJob throughput")[0] for line in (folder / "progress.txt").read_text().splitlines()]


def test_memory_progress_and_ways_out_are_written(runs, tmp_path: Path) -> None:
    """Whoever leaves early has all that was known written."""
    saving = ("--save", str(tmp_path), "--save-interval", "3", "--no-async-save", "--log-progress", "--exit-interval", "5")
    text = runs.run(1, *RUN, "4", *saving, "--tensorboard-dir", str(tmp_path / "tb")).text()
    assert [step for step, _ in scalars(tmp_path / "tb")["lm loss"]] == [1, 2, 3, 4, 5]
    assert progress_of(tmp_path) == [
        "Starting job",
        "Saved checkpoint\tIteration: 3",
        "Saved checkpoint\tIteration: 5",
    ]
    moments = re.findall(r"^\[Rank 0\] \((.*?)\) memory \(MB\) \| resident: [1-9]", text, re.MULTILINE)
    saves = [f"{when} the save of iteration {iteration}" for iteration in (3, 5) for when in ("before", "after")]
    assert moments == ["after 1 iterations", *saves[:2], "after 4 iterations", *saves[2:]]
    assert text.count("theoretical memory footprints") == 1
    rejected = runs.run(
        1, *RUN, "100", "--tensorboard-dir", str(tmp_path / "17"), "--fault=kind=nan-data,iteration=4", job="bad"
    )
    assert rejected.codes() == [17], rejected.text()
    assert [step for step, _ in scalars(tmp_path / "17")["lm loss"]] == [1, 2, 3]


def test_what_cannot_be_written_costs_a_line_and_no_training(runs, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    calm = runs.run(1, *RUN, "4")
    options: list[Any] = ["--tensorboard-dir", str(blocked), "--log-progress", "--log-energy", "--log-memory-to-tensorboard"]
    run = runs.run(1, *RUN, "4", *options, job="blocked")
    assert run.codes() == [0] and run.digest() == calm.digest()
    warnings = sorted(line for line in run.text().splitlines() if line.startswith("warning: "))
    for word in ("TensorBoard", "--log-progress", "energy", "memory is not written"):
        assert [word in line for line in warnings].count(True) == 1, (word, warnings)
