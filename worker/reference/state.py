"""What the trainer's checkpoints hold: parameters, AdamW's state, this rank's random number generators, and the progress."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.checkpoint_directory import CheckpointError
from rsup.worker.reference.options import Options
from rsup.worker.reference.phase_start import FROM_THE_BEGINNING, PhaseStart
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rng import capture_rng, restore_rng, seed_rng

MODEL_OPTIONS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


class Restorable(Protocol):
    """What a durable and a local checkpoint have in common. `load` fills tensors in place; for those that all ranks have alike
    all ranks ask together."""

    @property
    def path(self) -> Path: ...
    @property
    def progress(self) -> dict[str, Any]: ...
    @property
    def world_size(self) -> int: ...
    def sizes(self) -> dict[str, tuple[int, ...]]: ...
    def load(self, tensors: dict[str, torch.Tensor]) -> None: ...


@dataclass
class Progress:
    """How far training is: `iteration` completed iterations, and the samples they took."""

    iteration: int = 0
    consumed_samples: int = 0
    phase_start: PhaseStart = FROM_THE_BEGINNING
    overflow_samples: int = 0
    """Of those consumed, the ones of steps that were skipped for an overflow of float16: the learning rate stands still in
    them, as Megatron-LM's does."""


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's state, which it would make in its first step, so that it can be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def model_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state by name; the tensors themselves, equal on all ranks."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        tensors[f"model.{name}"] = parameter.data
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def rng_tensor(ranks: Ranks) -> dict[str, torch.Tensor]:
    """This rank's generators, as bytes under a name of its own."""
    return {_rng_name(ranks.rank): torch.frombuffer(bytearray(capture_rng(ranks.device)), dtype=torch.uint8)}


def progress_record(progress: Progress, options: Options, text_digest: str) -> dict[str, Any]:
    """What goes into `commit.json` for the run that resumes."""
    return {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "phase_start": [progress.phase_start.iteration, progress.phase_start.samples],
        "overflow_samples": progress.overflow_samples,
        "text": text_digest,
        "model": {name: getattr(options, name) for name in MODEL_OPTIONS},
    }


def restore(
    found: Restorable,
    tensors: dict[str, torch.Tensor],
    options: Options,
    ranks: Ranks,
    text_digest: str,
    warn: Callable[[str], None],
) -> Progress:
    """Load a checkpoint into `tensors` and the generators; return where it stands. Raises `CheckpointError`,
    or `UsageError` for another model.
    """
    record = found.progress
    for name in MODEL_OPTIONS:
        if record["model"][name] != getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            made_with = f"{flag} {record['model'][name]}"
            raise UsageError(f"{found.path} was made with {made_with}: start with that, or with another --save")
    phase_start = PhaseStart(*record.get("phase_start", (0, 0)))
    progress = Progress(record["iteration"], record["consumed_samples"], phase_start, record.get("overflow_samples", 0))
    found.load(tensors)
    if found.world_size == ranks.world_size:
        _restore_rng(found, ranks)
    else:
        warn(f"{found.path} was made by {found.world_size} ranks, now there are {ranks.world_size}: new dropout seeds")
        seed_for(options.seed, ranks.rank, progress.iteration)
    if record["text"] != text_digest and not options.begins_phase_at(progress.iteration):
        warn(f"{found.path} was trained on another text (digest {record['text']}, now {text_digest})")
    return progress


def _restore_rng(found: Restorable, ranks: Ranks) -> None:
    name = _rng_name(ranks.rank)
    size = found.sizes().get(name)
    if size is None:
        raise CheckpointError(f"cannot load {found.path}: it has no random state of rank {ranks.rank}")
    holder = {name: torch.zeros(size, dtype=torch.uint8)}
    found.load(holder)
    restore_rng(holder[name].numpy().tobytes(), ranks.device)


def _rng_name(rank: int) -> str:
    return f"rng.rank{rank}"


def seed_for(seed: int, rank: int, iteration: int) -> None:
    """Seed this rank's generators, each rank and starting point another way."""
    digest = hashlib.blake2b(f"{seed}:{rank}:{iteration}".encode(), digest_size=6).digest()
    seed_rng(int.from_bytes(digest, "little"))
