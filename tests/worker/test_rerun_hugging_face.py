"""Hugging Face's `Trainer` under the rerun machine: whole runs, real values corrupted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed; it is no dependency of rsup")
pytest.importorskip("accelerate", reason="accelerate is not installed; transformers.Trainer needs it")

from rsup.worker.integrations.hugging_face import add_rerun  # noqa: E402
from rsup.worker.rerun.contract import RerunConfig, RerunError  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
STEPS = 6


class Model(torch.nn.Module):
    """Dropout and batch normalisation: a replay that does not restore everything shows."""

    def __init__(self, strike: Any = None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.num_passes = 0
        self.strike = strike

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_passes += 1
        found = self.layers(x * 1.0)
        if self.strike is not None and self.strike(self.num_passes):
            found = found * float("nan")
        x.zero_()  # a loop that changes its batch in place
        return {"loss": torch.nn.functional.mse_loss(found.squeeze(-1), y)}


def run(
    folder: Path, strike: Any = None, nan_at: int | None = None, resume: bool = False, evaluate: bool = False, **config: Any
) -> tuple[list[float], Model, Any]:
    transformers.set_seed(3)
    model = Model(strike)
    draw = torch.Generator().manual_seed(1)
    data: list[dict[str, torch.Tensor]] = [
        {"x": torch.randn(4, generator=draw), "y": torch.randn((), generator=draw)} for _ in range(64)
    ]
    if nan_at is not None:
        data[nan_at]["x"][0] = float("nan")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        disable_tqdm=True,
        seed=3,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=1,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    add_rerun(trainer, RerunConfig(**config))
    trainer.train(resume_from_checkpoint=resume)
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()], model, trainer


def test_a_transient_fault_is_replayed_and_leaves_no_trace(tmp_path: Path) -> None:
    """S4, S13, S15, P11: both micro-batches are run again with their data, dropout and batch statistics."""
    undisturbed, model, _ = run(tmp_path / "a")
    assert model.num_passes == 2 * STEPS
    healed, model, trainer = run(tmp_path / "b", strike=lambda n: n == 5)
    assert healed == undisturbed and model.num_passes == 2 * STEPS + 2
    assert trainer.state.global_step == STEPS


def test_evaluation_is_not_replayed(tmp_path: Path) -> None:
    """S24: a NaN in it ends nothing and marks no iteration."""
    tracker = tmp_path / "rejected"
    _, model, trainer = run(
        tmp_path / "a", strike=lambda n: n in (3, 6), evaluate=True, result_rejected_tracker_filename=str(tracker)
    )
    assert trainer.state.global_step == STEPS and model.num_passes == 2 * STEPS + STEPS  # of 8 samples: one batch
    assert Path(f"{tracker}.rank0000.jsonl").read_text() == ""


def test_a_fault_of_the_device_is_decided_on_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: 16 with a checkpoint of the completed steps; on another device the step is healthy, and training finishes."""
    undisturbed, _, _ = run(tmp_path / "a")
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-a")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "b", strike=lambda n: n >= 5)
    assert left.value.code == 16
    assert (tmp_path / "b" / "checkpoint-2" / "rsup_rerun_0.pt").exists()
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "b", strike=lambda n: True, resume=True)  # S7: the same device again
    assert left.value.code == 16
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-b")
    finished, _, trainer = run(tmp_path / "b", resume=True)
    assert finished == undisturbed and trainer.state.global_step == STEPS
    assert '"persistent"' in (tmp_path / "b" / "rerun-verdicts.jsonl").read_text()


def test_a_fault_of_the_data_ends_the_job_or_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: the same on two devices is the application's."""
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-a")
    bad = 8 * 2 + 5  # the third step
    with pytest.raises(SystemExit) as left:
        run(tmp_path, nan_at=bad)
    assert left.value.code == 16
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-b")
    finished, _, trainer = run(tmp_path, nan_at=bad, resume=True, on_application="skip")
    assert trainer.state.global_step == STEPS and all(number == number for number in finished)
    assert '"application"' in (tmp_path / "rerun-verdicts.jsonl").read_text()


@pytest.mark.timeout(240)
def test_two_ranks_rotate(tmp_path: Path) -> None:
    """One rank's device lies whenever it computes: found by the other one's, without a checkpoint or a restart."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stderr
    verdict = json.loads((tmp_path / "faulty" / "rerun-verdicts.jsonl").read_text().splitlines()[-1])
    assert verdict["verdict"] == "persistent" and verdict["reason"].startswith("rank 1:"), ended.stderr
    assert all((tmp_path / name).exists() for name in ("same-0", "same-1", "left-0-16", "left-1-16")), ended.stderr


def two_ranks(folder: Path) -> None:
    """One of two processes."""
    rank = os.environ["RANK"]
    os.environ["RSUP_DEVICE_UUID"] = f"GPU-{rank}"
    undisturbed, _, _ = run(folder / "healthy")
    healed, _, _ = run(folder / "healed", strike=lambda n: n == 5 and rank == "1")
    if healed == undisturbed:
        (folder / f"same-{rank}").touch()
    try:
        run(folder / "faulty", strike=lambda n: n >= 5 and rank == "1")
    except SystemExit as left:
        (folder / f"left-{rank}-{left.code}").touch()


def test_back_ends_that_step_in_backward_are_refused() -> None:
    class Accelerator:
        distributed_type = "DistributedType.DEEPSPEED"

    class Trainer:
        accelerator = Accelerator()

    with pytest.raises(RerunError, match="DEEPSPEED"):
        add_rerun(Trainer())


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
