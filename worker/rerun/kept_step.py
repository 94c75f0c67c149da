"""A failing iteration of one rank as a file: all that one device needs to compute it again, long after the job.

    DIR/rerun-steps/JOB.1-a1-i7/rank00001.pt       DIR: where the job's checkpoints are

Batches, random numbers, registered state, the parameters before the iteration (up to a size; else the checkpoint that holds
them), what had been rejected, and what a device computed that the verdict cleared. Plain values and tensors, read with
`weights_only`: nothing in such a file is ever run.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.contract import RankDevice, RerunError
from rsup.worker.unreadable import why_unreadable

FOLDER = "rerun-steps"
"""Beside the checkpoints."""
MAX_CASES = 8
"""Of one folder: those of older cases are removed."""
MAX_BYTES = 4 << 30
"""Of all steps in a folder, but for the newest case's."""
MAX_RANKS = 2
"""Of one case: the first ones that failed."""
_FORMAT = 1


@dataclass(frozen=True)
class KeptStep:
    """One rank's iteration. Tensors are on the CPU."""

    case_id: str
    iteration: int
    rank: int
    world_size: int
    verdict: str
    """Of the case; empty while it is open."""
    device: RankDevice
    """On which the checks failed."""
    software: str
    """What besides the device decides which bits it computes."""
    flagged: dict[str, float]
    """The rejected values, by check."""
    tolerances: dict[str, float]
    rng: bytes
    state: dict[str, Any]
    """Registered state and buffers, as `ReplayState` keeps them."""
    batches: list[list[Any]]
    """By iterator, packed."""
    parameters: dict[str, torch.Tensor] | None
    checkpoint: str = ""
    """Where the parameters are, if they are not here."""
    reference: dict[str, float] = field(default_factory=dict)
    """What `reference_device` computed, if the verdict cleared it."""
    reference_device: RankDevice | None = None
    program: dict[str, Any] = field(default_factory=dict)
    """What the loop says of its model: plain values (`RerunStateMachine.program`)."""
    num_threads: int = 1

    def batches_on(self, device: torch.device) -> list[list[Any]]:
        """By iterator; those of a GPU come to `device`."""
        return [[unpack_batch(batch, device) for batch in batches] for batches in self.batches]


def pack_batches(batches: Sequence[Sequence[Any] | None]) -> list[list[Any]]:
    """For `KeptStep.batches`. Raise `RerunError` for a batch without a plain form."""
    return [[pack_batch(batch) for batch in one or ()] for one in batches]


def software(device: torch.device) -> str:
    """Versions that decide which bits a healthy device computes."""
    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        words.append(f"cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    else:
        words.append(str(torch.backends.cpu.get_cpu_capability()))
    return ", ".join(words)


def likeness(device: RankDevice, software: str) -> str:
    """Results of devices with equal ones can be compared."""
    return " / ".join((*device.likeness, software))


# ------------------------------------------------------------------------------------------------------------------ files


def case_folder(folder: Path, case_id: str) -> Path:
    """Where the steps of a case are, below `folder` (that of the checkpoints)."""
    name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in case_id)
    return folder / FOLDER / name[-200:].lstrip(".")


def write_step(step: KeptStep, folder: Path) -> Path:
    """Keep it in the case's folder, in one piece; raise `OSError` or `RuntimeError` (torch's, of a full disk)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{step.rank:05}.pt"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            torch.save(_plain(step), file)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return path


def read_step(path: Path) -> KeptStep:
    """The step of that file. Raise `RerunError` where it cannot be used."""
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            raise RerunError(f"{path} was written by another release: its step cannot be repeated")
        return _of_plain(plain)
    except RerunError:
        raise
    except Exception as error:  # torch raises whatever a damaged file makes of its reader
        raise RerunError(f"{path} cannot be read: {why_unreadable(error)[:200]}") from None


def prune(folder: Path, newest: Path) -> None:
    """Remove the steps of older cases than fit. `newest` stays."""
    cases = [path for path in (folder / FOLDER).iterdir() if path.is_dir() and path != newest]
    room, size = MAX_CASES - 1, 0
    for path in sorted(cases, key=lambda path: path.stat().st_mtime, reverse=True):
        size += sum(file.stat().st_size for file in path.iterdir())
        room -= 1
        if room < 0 or size > MAX_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def _plain(step: KeptStep) -> dict[str, Any]:
    fields = {name: getattr(step, name) for name in KeptStep.__dataclass_fields__}
    devices = {
        name: None if fields[name] is None else msgspec.to_builtins(fields[name]) for name in ("device", "reference_device")
    }
    return {"format": _FORMAT, **fields, **devices, "rng": step.rng.hex()}


def _of_plain(plain: Mapping[str, Any]) -> KeptStep:
    values = {name: plain[name] for name in KeptStep.__dataclass_fields__}
    for name in ("device", "reference_device"):
        values[name] = msgspec.convert(values[name], RankDevice | None)
    values["rng"] = bytes.fromhex(values["rng"])
    for name in ("flagged", "tolerances", "reference"):
        values[name] = msgspec.convert(values[name], dict[str, float])
    return KeptStep(**values)
