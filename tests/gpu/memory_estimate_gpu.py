"""Estimated beside measured: the reference trainer's peak of GPU memory, for sizes, recompute, precision and optimizers.

    python -m tests.gpu.memory_estimate_gpu [N|NAME...]

Trains the first N configurations (all of them unless given) for a few steps, each in a process of its own on GPU 0, and prints
a table: what `reference_memory` says, what torch's allocator has had at its peak, and the difference. Without a GPU it prints
the estimates.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rsup.worker.observe.memory_estimate import OPTIMIZERS
from rsup.worker.observe.parameter_count import parameter_counts
from rsup.worker.observe.reference_memory import ReferenceMemory, reference_description, reference_memory
from rsup.worker.reference.command_line import parse_options
from tests.gpu.conftest import num_gpus

GOAL_PERCENT = 5.0
TIMEOUT_S = 240
MIB = 1 << 20
_EVERY = "--train-iters 6 --eval-iters 0 --log-interval 3 --lr 1e-4 --device auto"
_SMALL = "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 8"
_LARGE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048"


@dataclass(frozen=True)
class Configuration:
    """Arguments of the trainer. `optimizer`: a name of `OPTIMIZERS`; other ones than AdamW take its place in the trainer."""

    arguments: str
    optimizer: str = "adamw-fp32"


CONFIGURATIONS = {
    "0.15 B, bf16": Configuration(f"{_SMALL} --bf16"),
    "0.15 B, fp32": Configuration(_SMALL),
    "1.2 B, bf16": Configuration(f"{_LARGE} --bf16 --micro-batch-size 4"),
    "1.2 B, bf16, full recompute": Configuration(f"{_LARGE} --bf16 --micro-batch-size 16 --recompute-granularity full"),
    "1.2 B, bf16, selective recompute": Configuration(
        f"{_LARGE} --bf16 --micro-batch-size 4 --recompute-granularity selective --hidden-dropout 0"
    ),
    "1.2 B, bf16, 4 micro-batches": Configuration(f"{_LARGE} --bf16 --micro-batch-size 2 --global-batch-size 8"),
    "1.2 B, fp32, full, SGD with momentum": Configuration(
        f"{_LARGE} --micro-batch-size 8 --recompute-granularity full", "sgd-momentum-fp32"
    ),
    "1.2 B, bf16, SGD": Configuration(f"{_LARGE} --bf16 --micro-batch-size 4", "sgd-fp32"),
    "1.2 B, bf16, graph, 2 micro-batches": Configuration(
        f"{_LARGE} --bf16 --micro-batch-size 4 --global-batch-size 8 --cuda-graph-impl full_iteration"
    ),
    "8 experts, bf16": Configuration(f"{_SMALL} --bf16 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"),
    "2.6 B, bf16, full recompute": Configuration(
        "--num-layers 32 --hidden-size 2560 --num-attention-heads 20 --seq-length 2048 --bf16 --micro-batch-size 8"
        " --recompute-granularity full"
    ),
}


def main(chosen: Sequence[str]) -> int:
    """Print the table; 1 if a difference is beyond the goal or a configuration failed."""
    names = list(CONFIGURATIONS)
    if chosen and chosen[0].isdigit():
        names = names[: int(chosen[0])]
    elif chosen:
        names = list(chosen)
    on_gpu = num_gpus() > 0
    print(
        f"{'configuration':38}  {'parameters':>10}  {'estimated':>10}  {'measured':>10}  {'asked for':>10}  difference",
        flush=True,
    )
    print(f"{'':38}  {'millions':>10}  {'MB':>10}  {'MB':>10}  {'MB':>10}", flush=True)
    num_bad = sum(not _row(name, on_gpu) for name in names)
    if not on_gpu:
        print("no GPU here: nothing was measured")
    return 1 if num_bad else 0


def _row(name: str, on_gpu: bool) -> bool:
    """Print one row; whether it is as it should be."""
    configuration = CONFIGURATIONS[name]
    options = parse_options(_words(configuration), world_size=1)
    theory = reference_memory(options, OPTIMIZERS[configuration.optimizer].state)
    millions = parameter_counts(reference_description(options)).total / 1e6
    begin = f"{name:38}  {millions:10.1f}  {theory.peak / MIB:10.1f}"
    if not on_gpu:
        print(f"{begin}  {_parts(theory)}", flush=True)
        return True
    measured = _measured(name)
    if "error" in measured:
        print(f"{begin}  failed: {measured['error']}", flush=True)
        return False
    percent = 100 * (theory.peak - measured["peak"]) / measured["peak"]
    sizes = f"{measured['peak'] / MIB:10.1f}  {measured['requested'] / MIB:10.1f}"
    print(f"{begin}  {sizes}  {percent:+.2f} %  {_parts(theory)}", flush=True)
    return bool(abs(percent) <= GOAL_PERCENT)


def _parts(theory: ReferenceMemory) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "workspace")
    return ", ".join(f"{name} {getattr(theory, name) / MIB:.0f}" for name in names)


def _words(configuration: Configuration) -> list[str]:
    return f"{_EVERY} {configuration.arguments}".split()


def _measured(name: str) -> dict[str, Any]:
    """What the process of one configuration found."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.memory_estimate_gpu", "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {TIMEOUT_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def train_one(configuration: Configuration) -> None:
    """Train, in this process, and print what the allocator has had at its peak."""
    import torch

    from rsup.worker.reference import train, trainer

    if configuration.optimizer != "adamw-fp32":
        momentum = 0.9 if "momentum" in configuration.optimizer else 0.0

        def make_optimizer(module: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=options.lr, momentum=momentum, fused=True)

        for attribute, replacement in (("make_optimizer", make_optimizer), ("prepare_optimizer", lambda optimizer: None)):
            assert hasattr(trainer, attribute)
            setattr(trainer, attribute, replacement)
    code = train.main(_words(configuration))
    statistics = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    print(
        json.dumps(
            {
                "peak": statistics.get("allocated_bytes.all.peak", 0),
                "requested": statistics.get("requested_bytes.all.peak", 0),
                "reserved": statistics.get("reserved_bytes.all.peak", 0),
            }
        ),
        flush=True,
    )
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train_one(CONFIGURATIONS[sys.argv[2]])
    sys.exit(main(sys.argv[1:]))
