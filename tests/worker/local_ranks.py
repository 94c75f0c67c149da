"""One rank that makes and opens local checkpoints, as `PLAN` says: JSON, a list of steps, each a word and its arguments.

Ranks `PER_NODE * n` and following are on node n, whose directory is `ROOT/node-n`. Every rank prints what became of each step.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rsup.supervisor.wire import RsupError
from rsup.worker.local_checkpoint import LocalCheckpointer
from rsup.worker.local_checkpoint_directory import LocalDirectory, this_launcher
from rsup.worker.local_checkpoint_plan import Replication
from rsup.worker.reference.ranks import joined

MANY = 1 << 15
ROOM_FOR_ONE = 300_000
"""Bytes: enough for what one of two ranks writes, and not for both."""


def values(rank: int, iteration: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank has of its own at an iteration, and what all ranks have alike."""
    own = {f"own.{rank}": torch.full((MANY,), rank * 1000 + iteration, dtype=torch.int32), "empty": torch.empty(0, 3)}
    shared = {f"shared.{n}": torch.full((MANY >> n, 2), iteration + n, dtype=torch.bfloat16) for n in range(5)}
    return own, shared | {"step": torch.tensor(float(iteration)), "mask": torch.tensor([True, False, True])}


def save(saver: LocalCheckpointer, rank: int, iteration: int) -> str:
    """Save at `iteration`; say how it ended."""
    own, shared = values(rank, iteration)
    stall_s = saver.save(iteration, own, shared, {"iteration": iteration})
    for tensor in (*own.values(), *shared.values()):
        tensor.zero_()
    result = saver.finish()
    assert result is not None and stall_s is not None
    return f"saved {iteration}: error={result.error!r} lost={result.lost_copies!r}"


def open_newest(saver: LocalCheckpointer, rank: int) -> str:
    """Open the newest save; say which it was, having compared every value."""
    for save_id, files in saver.saves():
        found = saver.open(save_id, files)
        if found is None:
            continue
        iteration = int(found.progress["iteration"])
        wanted = {**values(rank, iteration)[0], **values(rank, iteration)[1]}
        loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        found.load(loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
        assert found.sizes().items() >= {name: tuple(tensor.shape) for name, tensor in wanted.items()}.items()
        return f"opened {iteration}"
    return "opened nothing"


def perform(saver: LocalCheckpointer, directory: LocalDirectory, rank: int, word: str, arguments: list[Any]) -> str:
    """One step of the plan."""
    if word == "save":
        return save(saver, rank, *arguments)
    if word == "open":
        return open_newest(saver, rank)
    if rank not in arguments:
        return ""
    if word == "fill":
        directory.free_bytes = lambda: 1000  # type: ignore[method-assign]
    elif word == "room":
        directory.free_bytes = lambda: ROOM_FOR_ONE * len(arguments)  # type: ignore[method-assign]
    elif word == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (MANY, resource.RLIM_INFINITY))
    elif word == "unlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif word == "vanish":
        directory.remove()
    return ""


def main() -> None:
    """Join the others and follow the plan."""
    rank = int(os.environ["RANK"])
    root = Path(os.environ["ROOT"], f"node-{rank // int(os.environ['PER_NODE'])}")
    replicas = json.loads(os.environ.get("REPLICATION", "null"))
    with joined(torch.device("cpu"), 60) as ranks:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        directory = LocalDirectory(root, os.environ.get("JOB", "a.1"), in_memory=False)
        launcher = this_launcher(None)
        replication = None if replicas is None else Replication(*replicas)
        warn = (lambda text: print(f"warning: {text}")) if rank == 0 else None
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
        try:
            saver = LocalCheckpointer(directory, launcher, attempt, group, ranks.control, replication, warn=warn)
        except RsupError as error:
            print(f"error {error.exit_code}: {error}")
            return
        for word, *arguments in json.loads(os.environ["PLAN"]):
            if text := perform(saver, directory, rank, word, arguments):
                print(text, flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
