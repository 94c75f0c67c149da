"""The reference trainer's console, TensorBoard and W&B files, read back; and that an interrupted run gives one curve."""

import dataclasses
import math
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rsup.worker.observe.dump_plan import LABELS, NO_DUMPS
from rsup.worker.reference import trainer
from rsup.worker.reference.build import make_schedule
from rsup.worker.reference.command_line import parse_options
from rsup.worker.reference.dumping import make_dumps
from rsup.worker.reference.evaluate import evaluate
from rsup.worker.reference.loss_scale import doubt_of_loss_scale
from rsup.worker.reference.observed import Observed
from rsup.worker.reference.run_log import RunLog
from rsup.worker.reference.state import Progress
from tests.worker.conftest import TINY
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
    still = (*RUN, "1", "--eval-interval", "3", "--attention-dropout", "0", "--hidden-dropout", "0")
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
    assert [iteration for iteration, *_ in evaluated] == ["3", "6", "9"], "the last once, though two reasons ask for it"
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


SLOW = """
import sys, time
from unittest import mock
from rsup.worker.observe import interval_counters, training_log
from rsup.worker.reference import saving, train, trainer

late_s = 0.0

def counters():
    return interval_counters.IntervalCounters(lambda: time.perf_counter() + late_s)

def slow(function):
    def takes_eleven_days(*arguments):
        global late_s
        late_s += 1e6
        print("slow:", function.__name__)
        return function(*arguments)
    return takes_eleven_days

with (
    mock.patch.object(training_log, "IntervalCounters", counters),
    mock.patch.object(saving.Saves, "save", slow(saving.Saves.save)),
    mock.patch.object(saving.Saves, "save_local", slow(saving.Saves.save_local)),
    mock.patch.object(trainer, "evaluate", slow(trainer.evaluate)),
):
    sys.argv = ["train", *ARGUMENTS]
    train.run_as_program()
"""


def test_neither_saves_nor_evaluations_are_time_of_the_steps_however_slow(runs, tmp_path: Path) -> None:
    """Pitfall 26, of each kind that the trainer has, with a clock that they put forward."""
    local = ("--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", str(tmp_path / "local"))
    saves = ("--save", str(tmp_path / "save"), "--save-interval", "3", "--non-persistent-save-interval", "2", *local)
    script = tmp_path / "slow.py"
    script.write_text(SLOW.replace("ARGUMENTS", repr([*TINY, *RUN, "1", "--eval-interval", "4", "--log-progress", *saves])))
    run = runs.start(1, script=script)
    assert run.finish() == [0], run.text()
    counts = Counter(re.findall(r"^slow: (\w+)$", run.text(), re.MULTILINE))
    assert counts["save"] >= 3 and counts["save_local"] >= 3 and counts["evaluate"] >= 2, counts
    times_ms = [float(fields["elapsed time per iteration (ms)"]) for fields in lines_of(run.text()).values()]
    assert len(times_ms) == 9 and max(times_ms) < 1e8, times_ms
    for iteration in (3, 6, 9):
        said = [line for line in progress_of(tmp_path / "save") if line.endswith(f"\tIteration: {iteration}")]
        assert said == [f"{what} async checkpoint\tIteration: {iteration}" for what in ("Saving", "Saved")]


def test_an_interval_of_zero_is_one_warning_whatever_it_is_of(tmp_path: Path) -> None:
    flags = ("--log-interval", "--eval-interval", "--log-memory-interval", "--tensorboard-log-interval")
    dumps = [f"--save-{label.replace('_', '-')}-interval" for label in LABELS]
    options = parse_options([word for flag in (*flags, *dumps) for word in (flag, "0")] + ["--num-experts", "2"])
    one = trainer.Trainer.__new__(trainer.Trainer)
    one.__dict__["options"] = options
    assert not any(one._is_evaluated(iteration) for iteration in (1, 1000))
    said: list[str] = []
    rank: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), control=None)
    assert make_dumps(options, rank, torch.nn.Linear(1, 1), said.append) is NO_DUMPS
    assert [text.split()[0] for text in said] == list(LABELS) and all("interval is 0" in text for text in said)
    del said[:]
    end_to_end: Any = SimpleNamespace(facts=dataclasses.make_dataclass("Facts", ["flops_before"])(0))
    writers: Any = [SimpleNamespace(name="kept")]
    RunLog(
        options, rank, Progress(), end_to_end, say=print, warn=said.append, writers=writers, observed=Observed(), energy=None
    )
    assert sorted(re.sub(" is 0.*", "", text) for text in said) == [
        "--eval-interval",
        "--log-memory-interval",
        "the log interval",
        "the writers' interval",
    ]


def test_a_fixed_loss_scale_that_is_no_power_of_two_is_doubted() -> None:
    assert [bool(doubt_of_loss_scale(scale)) for scale in (None, 0.0, 1.0, 0.25, 65536.0, 3.0)] == [False] * 5 + [True]


def test_an_evaluation_that_fails_leaves_the_model_training() -> None:
    """Pitfall 28. What evaluates sees it evaluating."""
    module, seen = torch.nn.Linear(1, 1), list[bool]()

    def evaluated(text: torch.Tensor) -> torch.Tensor:
        seen.append(module.training)
        raise ArithmeticError("in vain")

    options = SimpleNamespace(eval_iters=2, samples_per_pass=1, micro_batch_size=1)
    validation = SimpleNamespace(samples=lambda first, count: torch.zeros(count, 2))
    sections, rerun = SimpleNamespace(eval_step=nullcontext), SimpleNamespace(evaluation=nullcontext)
    with pytest.raises(ArithmeticError, match="in vain"):
        arguments: Any = (module, validation, options, SimpleNamespace(rank=0), sections, rerun)
        evaluate(evaluated, *arguments)
    assert (seen, module.training) == ([False], True)


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
