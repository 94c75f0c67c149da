"""The text: the same samples for the same position, wherever and however it is asked."""

from pathlib import Path

import pytest
import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.reference.data import load_text


def test_the_standard_library_is_there_and_samples_are_windows_of_it() -> None:
    training, validation = load_text(None, 128, 1)
    samples = training.samples(1000, 4)
    assert samples.shape == (4, 129) and samples.dtype == torch.int64
    text = b"".join(bytes(sample.tolist()) for sample in samples)
    assert text.count(b" ") > 20 and text.isascii()
    assert training.digest != validation.digest


def test_a_position_names_its_samples(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "a.py").write_bytes(b"print()\n" * 500)
    (tmp_path / "c.bin").write_bytes(b"never read")
    training, _ = load_text(str(tmp_path), 16, 1)
    again, _ = load_text(str(tmp_path), 16, 1)
    assert torch.equal(training.samples(5, 6)[2:], again.samples(7, 4))
    other, _ = load_text(str(tmp_path), 16, 2)
    assert not torch.equal(training.samples(0, 8), other.samples(0, 8)) and other.digest == training.digest
    assert len({tuple(sample.tolist()) for sample in training.samples(0, 200)}) > 100
    (tmp_path / "a.py").write_bytes(b"print(1)\n" * 500)
    assert load_text(str(tmp_path), 16, 1)[0].digest != training.digest


def test_too_little_or_no_text_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UsageError, match="too few for --seq-length 128"):
        load_text(str(tmp_path / "a.txt"), 128, 1)
    with pytest.raises(UsageError, match=r"cannot read the text .*: No such file or directory"):
        load_text(str(tmp_path / "none"), 128, 1)
