"""What the trainer's checkpoints hold: parameters, AdamW's state, this rank's random number generators, and the progress."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.checkpoint import WholeCheckpoint, load_tensors, tensor_sizes
from rsup.worker.checkpoint_directory import CheckpointError
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rng import capture_rng, restore_rng, seed_rng

MODEL_OPTIONS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


@dataclass
class Progress:
    """How far training is: `iteration` completed iterations, and the samples they took."""

    iteration: int = 0
    consumed_samples: int = 0


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
        "text": text_digest,
        "model": {name: getattr(options, name) for name in MODEL_OPTIONS},
    }


def restore(
    found: WholeCheckpoint,
    tensors: dict[str, torch.Tensor],
    options: Options,
    ranks: Ranks,
    text_digest: str,
    warn: Callable[[str], None],
) -> Progress:
    """Load a checkpoint into `tensors` and the generators; return where it stands. Raises `CheckpointError`,
    or `UsageError` for another model.
    """
    record = found.commit.progress
    for name in MODEL_OPTIONS:
        if record["model"][name] != getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            made_with = f"{flag} {record['model'][name]}"
            raise UsageError(f"{found.path} was made with {made_with}: start with that, or with another --save")
    progress = Progress(record["iteration"], record["consumed_samples"])
    load_tensors(found.path, tensors)
    if found.commit.world_size == ranks.world_size:
        _restore_rng(found.path, ranks)
    else:
        warn(f"{found.path} was made by {found.commit.world_size} ranks, now there are {ranks.world_size}: new dropout seeds")
        seed_for(options.seed, ranks.rank, progress.iteration)
    if record["text"] != text_digest:
        warn(f"{found.path} was trained on another text (digest {record['text']}, now {text_digest})")
    return progress


def _restore_rng(path: Path, ranks: Ranks) -> None:
    name = _rng_name(ranks.rank)
    size = tensor_sizes(path).get(name)
    if size is None:
        raise CheckpointError(f"cannot load {path}: it has no random state of rank {ranks.rank}")
    holder = {name: torch.zeros(size, dtype=torch.uint8)}
    load_tensors(path, holder)
    restore_rng(holder[name].numpy().tobytes(), ranks.device)


def _rng_name(rank: int) -> str:
    return f"rng.rank{rank}"


def seed_for(seed: int, rank: int, iteration: int) -> None:
    """Seed this rank's generators, each rank and starting point another way."""
    digest = hashlib.blake2b(f"{seed}:{rank}:{iteration}".encode(), digest_size=6).digest()
    seed_rng(int.from_bytes(digest, "little"))
