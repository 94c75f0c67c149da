"""A part of the matrix of reruns. The whole: `python -m tests.rerun_matrix`."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.rerun_matrix.runs import all_runs
from tests.rerun_matrix.supervision import Placement

ROOT = Path(__file__).parents[2]


def test_the_matrix_has_what_it_should() -> None:
    """Over 200 runs, no two alike; each dimension in many of them; some that cannot be told apart."""
    runs = all_runs()
    assert len(runs) >= 200 and [run.number for run in runs] == list(range(len(runs)))
    for has in (
        lambda run: run.dropout,
        lambda run: run.own_position,
        lambda run: run.kill_at,
        lambda run: len(run.faults) > 1,
    ):
        assert 40 <= sum(bool(has(run)) for run in runs) <= len(runs) - 40
    kinds = Counter(run.name for run in runs)
    assert min(kinds.values()) >= 6 and len(kinds) >= 20
    assert {run.world_size for run in runs} == {1, 2, 3, 4}
    assert any(run.expected.ends == "no second device" for run in runs)


@pytest.mark.timeout(420)
def test_each_answer_of_a_part_is_right() -> None:
    """S10 to S16, P3 to P10, P12, P24 and all rows of the outcome table; no healthy device is ever accused."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rerun_matrix", "--part", "12"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert " 0 wrong, 0 with a healthy device accused" in done.stdout


def test_a_placement_moves_as_few_ranks_as_it_can() -> None:
    placement = Placement(["D0", "D1", "D2"], ["S0"])
    assert placement.elsewhere({1: ["D1"]}) and placement.devices == ["D0", "S0", "D2"]
    assert placement.without(["D2"]) and placement.devices == ["D0", "S0", "D1"]
    assert not placement.elsewhere({0: ["D0", "D1", "S0"]}) and not placement.without(["D0"])
