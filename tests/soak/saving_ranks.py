"""A rank of the kill test: goes on from the newest whole checkpoint, checks every value, and saves without a pause until it
is killed.

Where it is in its saves stands in a shared file, a byte for each thread, so that the killer can aim, and knows where it struck.
"""

import mmap
import os
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from rsup.worker.checkpoint import Checkpointer, claim_for_all
from rsup.worker.checkpoint_directory import CheckpointDirectory
from rsup.worker.local_checkpoint import LocalCheckpointer, LocalResult
from rsup.worker.local_checkpoint_directory import LocalDirectory, this_launcher
from rsup.worker.local_checkpoint_plan import Replication
from rsup.worker.reference.resuming import find_newest

DURABLE_POINTS = ("idle", "staged", "written", "committing", "committed")
LOCAL_POINTS = ("idle", "staged", "writing", "written", "copied", "whole")
MOST_ITERATIONS = 400
_RECORD = struct.Struct("<qqq")
_NUM_BYTES = 4096


class Track:
    """The shared file: for rank r the point of its durable and its local save, then what has been reported, by rank 0."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_NUM_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NUM_BYTES)

    def at(self, rank: int, is_local: bool) -> str:
        """The point that a rank's save is at."""
        return (LOCAL_POINTS if is_local else DURABLE_POINTS)[self._map[16 + rank * 2 + is_local]]

    def reach(self, rank: int, is_local: bool, point: str) -> None:
        """A rank's save has come to that point."""
        self._map[16 + rank * 2 + is_local] = (LOCAL_POINTS if is_local else DURABLE_POINTS).index(point)

    @property
    def is_running(self) -> bool:
        """Whether all ranks of the attempt have gone on and save."""
        return self._map[0] != 0

    @is_running.setter
    def is_running(self, value: bool) -> None:
        self._map[0] = int(value)

    def begin_attempt(self) -> None:
        """Nothing is being saved."""
        self._map[0:64] = bytes(64)

    @property
    def reported(self) -> tuple[int, int, int]:
        """The newest iterations that were said to be durable and whole locally, and the one that the last attempt went on
        from."""
        durable, local, resumed = _RECORD.unpack(self._map[1024 : 1024 + _RECORD.size])
        return durable, local, resumed

    @reported.setter
    def reported(self, value: tuple[int, int, int]) -> None:
        self._map[1024 : 1024 + _RECORD.size] = _RECORD.pack(*value)


@dataclass(frozen=True)
class Place:
    """Where an attempt of the kill test runs."""

    folder: Path
    rank: int
    world_size: int
    attempt: int
    num_values: int


def values(rank: int, iteration: int, num_values: int) -> dict[str, torch.Tensor]:
    """The state after an iteration: no two iterations have an equal one."""
    ramp = torch.arange(num_values, dtype=torch.float32)
    return {"weights": ramp + iteration, "moments": ramp * iteration, f"own.{rank}": torch.tensor([rank, iteration])}


def run_rank(place: Place) -> NoReturn:
    """In a process of its own: train until killed; exits 3 where a checkpoint is not what it says it is."""
    code = 0
    try:
        _train(place)
    except BaseException:  # the outermost frame: the killer reads the output
        traceback.print_exc()
        code = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(place: Place) -> None:
    torch.set_num_threads(1)
    rank, track = place.rank, Track(place.folder / "track")
    store = dist.FileStore(str(place.folder / f"store-{place.attempt}"), place.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=place.world_size)
    control, saving, apart = (_group() for _ in range(3))
    directory = CheckpointDirectory(place.folder / "save", keep=2)
    owner = claim_for_all(directory, "soak", place.attempt, saving)

    def committed(iteration: int, path: Path, duration_s: float) -> None:
        track.reported = (iteration, *track.reported[1:])

    def ended(result: LocalResult) -> None:
        if not result.error:
            track.reported = (track.reported[0], result.iteration, track.reported[2])

    saver = Checkpointer(directory, owner, saving, lambda point, _: track.reach(rank, False, point), committed)
    local = LocalCheckpointer(
        LocalDirectory(place.folder / f"node-{rank}", "soak", in_memory=False),
        this_launcher(None),
        place.attempt,
        apart,
        control,
        Replication(2),
        ended=ended,
        probe=lambda point, _: track.reach(rank, True, point),
    )
    iteration = _resume(place, track, local, saving)
    dist.barrier(group=control)
    track.is_running = True
    while iteration < place.attempt * MOST_ITERATIONS:
        iteration += 1
        state = values(rank, iteration, place.num_values)
        if iteration % 3 == 0:
            track.reach(rank, True, "staged")
            shared = {name: tensor for name, tensor in state.items() if not name.startswith("own")}
            own = {name: tensor for name, tensor in state.items() if name.startswith("own")}
            local.save(iteration, own, shared, {"iteration": iteration})
            local.finish()
            continue
        saver.finish()
        track.reach(rank, False, "staged")
        saver.save(iteration, state, {"iteration": iteration})
    saver.finish()


def _group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _resume(place: Place, track: Track, local: LocalCheckpointer, group: dist.ProcessGroup) -> int:
    found = find_newest(place.folder / "save", local, group, lambda text: print(f"warning: {text}", flush=True))
    iteration = 0 if found is None else int(found.progress["iteration"])
    durable, whole, _ = track.reported
    assert iteration >= max(durable, whole), f"went on from {iteration}, though {durable} was durable and {whole} whole"
    if found is not None:
        wanted = values(place.rank, iteration, place.num_values)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        found.load(loaded)
        for name, tensor in wanted.items():
            assert torch.equal(loaded[name], tensor), f"{name} of iteration {iteration} in {found.path} is of another"
    dist.barrier(group=group)
    if place.rank == 0:
        track.reported = (durable, whole, iteration)
    return iteration
