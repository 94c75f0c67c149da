"""The reference trainer with `--fp16`: overflows are skipped steps, alike on all ranks, and no interruption shows."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rsup.worker.reference.loss_scale import LossScale, ScaleRules

RUN = ("--iterations=24", "--global-batch-size=8", "--log-interval=1", "--fp16", "--lr-decay-style=constant")
DYNAMIC = ("--initial-loss-scale=67108864", "--loss-scale-window=4", "--lr=0.01", "--lr-warmup-samples=1000")
RULES = ScaleRules(initial=2.0**26, window=4)

NAMES = ("learning rate", "lm loss", "loss scale", "grad norm")


class Line(NamedTuple):
    """What is logged of an iteration. `loss`, `norm`: NaN where it has none."""

    iteration: int
    lr: float
    loss: float
    scale: float
    norm: float
    skipped: bool


def lines(text: str) -> list[Line]:
    """The log of a run, an iteration a line."""
    found = []
    for printed in re.findall(r"iteration +(\d+)/\d+ \|(.*)", text):
        fields = {name.strip(): value for name, _, value in (part.partition(": ") for part in printed[1].split(" | "))}
        rate, loss, scale, norm = (float(fields.get(name, "nan").strip(" |")) for name in NAMES)
        skipped = int(fields.get("number of skipped iterations", "0").strip(" |")) > 0
        found.append(Line(int(printed[0]), rate, loss, scale, norm, skipped))
    return found


def test_overflows_are_skipped_steps_and_no_interruption_shows(runs: Any, tmp_path: Path) -> None:
    """One rank's gradient that is no number is an overflow for both; killed runs, and other ranks, go on with their scale."""
    options = (*RUN, *DYNAMIC, "--fault=rank=1,iteration=15,kind=nan,site=grad")
    whole = runs.run(2, *options, "--save", str(tmp_path / "whole"), "--save-interval=24")
    assert whole.codes() == [0, 0] and "rerun:" not in whole.text() and "differ" not in whole.text(), whole.text()
    seen = lines(whole.text())
    skipped = [one.iteration for one in seen if one.skipped]
    assert len(seen) == 24 and 15 in skipped and 3 <= len(skipped) <= 15, whole.text()
    scale, num_made = LossScale(RULES), 0
    for one in seen:
        assert one.lr == pytest.approx(0.01 * 8 * num_made / 1000, rel=1e-6), one  # the schedule stands still in skipped steps
        scale.update(one.skipped)
        num_made += not one.skipped
        assert one.scale == scale.value and math.isfinite(one.norm) != one.skipped, one
    assert max(one.scale for one in seen[15:]) > min(one.scale for one in seen[:15])  # it grew again
    assert seen[-1].loss < 5.5

    saving = ("--save", str(tmp_path / "killed"), "--save-interval=4", "--no-async-save")
    *_, again = runs.run_with_restarts(2, *options, *saving, "--fault=rank=0,iteration=11,kind=sigkill", job="killed")
    assert "resumed from" in again.text() and ": 8 iterations, 64 samples" in again.text()
    assert str(lines(again.text())) == str(seen[8:]) and again.digest() == whole.digest()

    local = ("--save", str(tmp_path / "local"), "--no-async-save", "--non-persistent-save-interval=5")
    in_memory = (*local, "--non-persistent-ckpt-type=in_memory", "--fault=rank=0,iteration=13,kind=sigkill")
    *_, again = runs.run_with_restarts(2, *options, *in_memory, job="local")
    assert "resumed from the local checkpoint" in again.text() and again.digest() == whole.digest()


def test_a_fixed_scale_with_and_without_a_graph(runs: Any, tmp_path: Path) -> None:
    """A power of 2 changes no bit of the gradients but those that it saves, and a NaN is the rerun machine's business."""
    fault = "--fault=rank=0,iteration=9,kind=nan,site=grad"
    options = (*RUN, "--loss-scale=1024", fault)
    eager = runs.run(1, *options)
    graph = runs.run(1, *options, "--cuda-graph-impl=full_iteration", job="graph")
    for run in (eager, graph):
        assert run.codes() == [0] and "rerun: iteration 9 (found on rank 0): transient" in run.text(), run.text()
        assert {(one.scale, one.skipped) for one in lines(run.text())} == {(1024.0, False)}
    assert graph.digest() == eager.digest() and lines(graph.text()) == lines(eager.text())

    unchecked = ("--no-check-for-nan-in-loss-and-grad", "--fault=rank=0,iteration=10,kind=inf,site=grad")
    run = runs.run(1, *options, *unchecked, job="unchecked")
    assert [one.iteration for one in lines(run.text()) if one.skipped] == [9, 10]
    assert "warning: iteration 9 is skipped: its gradients overflow with the loss scale 1024, which goes no lower" in run.text()
    assert "warning: iteration 10 is skipped" not in run.text() and "rerun:" not in run.text()


def test_going_on_from_a_run_without_a_loss_scale(runs: Any, tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path), "--iterations=6", "--save-interval=3")
    assert runs.run(1, *saving, "--exit-interval=3").codes() == [0]
    run = runs.run(1, *saving, "--fp16", "--initial-loss-scale=4096", number=2)
    assert run.codes() == [0] and "has no loss scale: it begins with 4096 (--initial-loss-scale)" in run.text()
