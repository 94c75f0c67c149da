"""Lightning's `Trainer` under the rerun machine: whole runs, real values corrupted."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

lightning: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; it is no dependency of rsup")

from rsup.worker.integrations.lightning import rerun_callback  # noqa: E402
from rsup.worker.rerun.contract import RerunConfig, RerunError  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
STEPS = 6


class Loader:
    """A stateful one: it goes on in the middle of an epoch."""

    def __init__(self, nan_at: int | None = None) -> None:
        draw = torch.Generator().manual_seed(1)
        self.batches = [(torch.randn(4, 4, generator=draw), torch.randn(4, generator=draw)) for _ in range(2 * STEPS)]
        if nan_at is not None:
            self.batches[nan_at][0][0, 0] = float("nan")
        self.at = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.batches):
            self.at += 1
            x, y = self.batches[self.at - 1]
            yield x.clone(), y.clone()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_model(strike: Any = None) -> Any:
    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
            )
            self.num_passes = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.num_passes += 1
            x, y = batch
            found = self.layers(x * 1.0)
            if strike is not None and strike(self.num_passes):
                found = found * float("nan")
            x.zero_()  # a loop that changes its batch in place
            return torch.nn.functional.mse_loss(found.squeeze(-1), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            callback = next(one for one in self.trainer.callbacks if hasattr(one, "rerun"))
            if callback.rerun is not None:
                callback.rerun.machine.validate_loss(torch.tensor(float("nan")))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Model()


def run(
    folder: Path, strike: Any = None, nan_at: int | None = None, resume: bool = False, validate: bool = False, **config: Any
) -> tuple[list[float], Any, Any]:
    lightning.seed_everything(3, verbose=False)
    model = make_model(strike)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        default_root_dir=folder,
        callbacks=[rerun_callback(RerunConfig(**config)), lightning.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=0)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        val_check_interval=4 if validate else None,
        limit_val_batches=1 if validate else 0,
    )
    trainer.fit(model, Loader(nan_at), Loader() if validate else None, ckpt_path="last" if resume else None)
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()], model, trainer


def test_a_transient_fault_is_replayed_and_leaves_no_trace(tmp_path: Path) -> None:
    """S4, S13, S15, P11: both batches are run again with their data, dropout and batch statistics."""
    undisturbed, model, _ = run(tmp_path)
    assert model.num_passes == 2 * STEPS
    healed, model, trainer = run(tmp_path, strike=lambda n: n == 5)
    assert healed == undisturbed and model.num_passes == 2 * STEPS + 2 and trainer.global_step == STEPS


def test_validation_is_not_replayed(tmp_path: Path) -> None:
    """S24: a NaN in it ends nothing and leaves the machine as it was."""
    _, model, trainer = run(tmp_path, validate=True)
    assert trainer.global_step == STEPS and model.num_passes == 2 * STEPS


def test_a_fault_of_the_device_is_decided_on_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5, S7, S14: 16 with a checkpoint of the completed steps; on another device the step is healthy, training finishes, and
    each batch of a stateful loader is used once."""
    undisturbed, _, _ = run(tmp_path / "a")
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-a")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "b", strike=lambda n: n >= 5)
    assert left.value.code == 16 and (tmp_path / "b" / "last-2.ckpt").exists()
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "b", strike=lambda n: True, resume=True)
    assert left.value.code == 16
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-b")
    finished, _, trainer = run(tmp_path / "b", resume=True)
    assert trainer.global_step == STEPS
    assert '"persistent"' in (tmp_path / "b" / "rerun-verdicts.jsonl").read_text()
    assert finished == undisturbed


def test_a_fault_of_the_data_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: the same on two devices is the application's."""
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-a")
    with pytest.raises(SystemExit) as left:
        run(tmp_path, nan_at=5)
    assert left.value.code == 16
    monkeypatch.setenv("RSUP_DEVICE_UUID", "GPU-b")
    finished, _, _ = run(tmp_path, nan_at=5, resume=True, on_application="skip")
    assert all(number == number for number in finished)
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


def test_loops_that_cannot_be_replayed_are_refused(tmp_path: Path) -> None:
    model = make_model()
    model.automatic_optimization = False
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, logger=False, callbacks=[rerun_callback()]
    )
    with pytest.raises(RerunError, match="automatic optimization"):
        trainer.fit(model, Loader())


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
