"""P30 of the reliability specification: a fault that is asked for strikes, or is refused; it is never without effect."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rsup.supervisor.wire import UsageError
from rsup.worker import faults
from rsup.worker.reference import train
from tests.worker.conftest import TINY, Runs

WHERE = {
    **{kind: f"rank=0,iteration={1 + i},kind={kind}" for i, kind in enumerate(faults.STEP_KINDS) if kind != "exit"},
    **{kind: f"rank=0,iteration={1 + i},kind={kind}" for i, kind in enumerate(faults.CHECKPOINT_KINDS)},
    **{kind: f"rank=0,kind={kind}" for kind in faults.START_KINDS},
    "exit": f"rank=0,iteration={len(faults.STEP_KINDS)},kind=exit=3",
}
DRIVER = """
import json, os, sys
from rsup.worker import faults
faults._perform = lambda fault: print("struck:", fault, flush=True)
from rsup.worker.reference.train import run_as_program
sys.argv = ["train", *json.loads(os.environ["ARGUMENTS"])]
run_as_program()
"""


def test_p30_every_kind_of_fault_has_its_hook_in_the_trainer(runs: Runs, tmp_path: Path) -> None:
    """Upstream's entry point had lost its only caller, and `FT_SIM_FAULT_DESC` did nothing."""
    assert set(WHERE) == set(faults.KINDS)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    asked = [part for text in WHERE.values() for part in ("--fault", text)]
    saves = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "1", "--eval-iters", "0")
    arguments = [*TINY, "--iterations", "10", *saves, *asked]
    attempt = runs.start(1, environment={"ARGUMENTS": json.dumps(arguments)}, script=driver)
    assert attempt.finish() == [0], attempt.text()
    lines = attempt.text().splitlines()
    said = [line for line in lines if line.startswith("rank 0: injected fault: ")]
    struck = [line for line in lines if line.startswith("struck: ")]
    assert sorted(line.removeprefix("struck: ") for line in struck) == sorted(map(_words, WHERE.values()))
    assert sorted(line.removeprefix("rank 0: injected fault: ") for line in said) == sorted(map(_words, WHERE.values()))


def _words(text: str) -> str:
    return str(faults.parse_fault(text))


@pytest.mark.parametrize("text", ["rank=1,iteration=1,kind=sigkill", "rank=0,iteration=9,kind=hang"])
def test_p30_a_fault_that_cannot_strike_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(UsageError, match="--fault rank="):
        faults.check_fault(faults.parse_fault(text), 1, 8, lambda iteration: False)


def test_p30_a_save_that_never_comes_is_no_place_for_a_fault() -> None:
    with pytest.raises(UsageError, match="nothing is saved after iteration 3"):
        faults.check_fault(faults.parse_fault("rank=0,iteration=3,kind=sigkill-in-checkpoint"), 1, 8, lambda iteration: False)


def test_p30_upstreams_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SIM_FAULT_DESC", "rank_killed;1;5")
    with pytest.raises(UsageError, match=r"FT_SIM_FAULT_DESC=rank_killed;1;5 has no effect here: use --fault"):
        train.main(["--iterations", "1"])
