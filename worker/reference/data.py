"""Real text that every machine has: the sources of Python's standard library, as bytes.

Sample `i` of a split is a window whose place is a hash of (seed, split, i): the whole position of a run in its data is one
number, the samples consumed so far, whatever the number of ranks.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch

from rsup.supervisor.wire import UsageError

VALIDATION_PART = 20  # one byte in 20, at the end, is kept for evaluation


class Text:
    """A training or validation split. `digest` names its content: two runs with equal digests see equal samples."""

    def __init__(self, data: bytes, seq_length: int, seed: int, split: str, source: str = "the text") -> None:
        if len(data) < seq_length + 2:
            raise UsageError(
                f"{source} has {len(data)} bytes for {split}: too few for --seq-length {seq_length}; give more with --data-path"
            )
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._window = seq_length + 1
        self._key = f"{seed}:{split}".encode()

    def samples(self, first: int, count: int) -> torch.Tensor:
        """Samples `first`, `first + 1`, ...: [count, sequence + 1], int64, on the CPU."""
        starts = [self._start(first + i) for i in range(count)]
        return torch.stack([self._data[start : start + self._window] for start in starts]).long()

    def _start(self, sample: int) -> int:
        draw = hashlib.blake2b(sample.to_bytes(8, "little"), digest_size=8, key=self._key[:64]).digest()
        return int.from_bytes(draw, "little") % (len(self._data) - self._window)


def load_text(data_path: str | None, seq_length: int, seed: int) -> tuple[Text, Text]:
    """The training and the validation split of `data_path` (a file, or a folder of .py and .txt files), or of Python's
    own sources. Raises `UsageError` where there is too little text or it cannot be read.
    """
    folder = Path(data_path) if data_path else Path(sysconfig.get_path("stdlib"))
    try:
        files = [folder] if folder.is_file() else _text_files(folder)
        data = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"cannot read the text {error.filename}: {error.strerror}; choose another with --data-path") from None
    cut = len(data) - len(data) // VALIDATION_PART
    training = Text(data[:cut], seq_length, seed, "training", str(folder))
    return training, Text(data[cut:], seq_length, seed, "validation", str(folder))


def _text_files(folder: Path) -> list[Path]:
    """The .py and .txt files right in `folder`, by name: the same list on every rank."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".py", ".txt") and path.is_file())
