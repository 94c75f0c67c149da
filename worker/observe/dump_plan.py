"""What is dumped when, and where it lies. No torch is needed to import it.

    FOLDER/activations/iter_0000100/mp_rank_00.pth     what linear layers got and gave
    FOLDER/dgrads/...                                  the gradients of these
    FOLDER/wgrads/...                                  gradients of parameters: reduced, not yet clipped
    FOLDER/params/...                                  parameters behind the update
    FOLDER/tokens_per_expert/rank0.jsonl               one line a layer and iteration, from every rank

Names and layouts are Megatron-LM's. Source: the seed's section 2.4.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

ACTIVATIONS, DGRADS, WGRADS, PARAMS = "activations", "dgrads", "wgrads", "params"
TOKENS_PER_EXPERT = "tokens_per_expert"
LABELS = (ACTIVATIONS, DGRADS, WGRADS, PARAMS, TOKENS_PER_EXPERT)
"""What can be dumped; also the names of the folders."""


class MicroBatchChoice(StrEnum):
    """Of which micro-batches of an iteration activations and data gradients are kept."""

    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class ModelPosition:
    """Where this rank's part of the model is. `is_writer`: of the ranks that hold the same part, this one writes it."""

    tensor_rank: int = 0
    pipeline_rank: int = 0
    pipeline_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    is_writer: bool = True

    @property
    def file_name(self) -> str:
        """`mp_rank_00.pth`, `mp_rank_01_002.pth`: an axis of one rank is left out."""
        pipeline = f"_{self.pipeline_rank:03d}" if self.pipeline_size > 1 else ""
        expert = f"_{self.expert_rank:03d}" if self.expert_size > 1 else ""
        return f"mp_rank_{self.tensor_rank:02d}{pipeline}{expert}.pth"


@dataclass(frozen=True)
class DumpPlan:
    """`intervals`: iterations between dumps, by label; what is missing, or below 1, is off. Equal on all ranks but for
    `position` and `rank`. `keep_free_bytes`: a dump that would leave less on the disk is refused."""

    folder: Path
    intervals: Mapping[str, int]
    micro_batches: MicroBatchChoice = MicroBatchChoice.LAST
    position: ModelPosition = field(default_factory=ModelPosition)
    rank: int = 0
    keep_free_bytes: int = 1 << 30
    num_writers_of_node: int = 0
    """Ranks of this node that write parts of a model at the same time, and share its memory and disk; 0: all of them, as
    LOCAL_WORLD_SIZE says."""

    @property
    def share(self) -> float:
        """What this rank may take of the node's memory and disk."""
        of_node = os.environ.get("LOCAL_WORLD_SIZE", "")
        return 1 / max(1, self.num_writers_of_node or (int(of_node) if of_node.isdecimal() else 1))

    def problems(self) -> list[str]:
        """Sentences about what the plan asks for and nobody can do; those dumps are off."""
        unknown = [
            f"nothing is dumped as {label!r}: there are {', '.join(LABELS)}" for label in self.intervals.keys() - {*LABELS}
        ]
        off = [
            f"{label} are not dumped: their interval is {interval}, and has to be 1 or more"
            for label, interval in self.intervals.items()
            if label in LABELS and interval < 1
        ]
        return sorted(unknown) + off

    def due(self, iteration: int) -> frozenset[str]:
        """What is dumped in that iteration (1-based, global), on any rank: so the answer is alike on all."""
        return frozenset(
            label
            for label, interval in self.intervals.items()
            if label in LABELS and interval >= 1 and iteration % interval == 0
        )

    def due_here(self, iteration: int) -> frozenset[str]:
        """What this rank dumps itself: where it is not the writer of its part, only what each rank has of its own."""
        due = self.due(iteration)
        return due if self.position.is_writer else due & {TOKENS_PER_EXPERT}

    def path(self, label: str, iteration: int) -> Path:
        """The file of a dump."""
        return self.folder / label / f"iter_{iteration:07d}" / self.position.file_name

    @property
    def tokens_path(self) -> Path:
        """The file that lines of tokens per expert are appended to."""
        return self.folder / TOKENS_PER_EXPERT / f"rank{self.rank}.jsonl"


class Dumps(Protocol):
    """What a training step and its loop tell whoever dumps. On the training thread; see `tensor_dump.TensorDumps`."""

    def due(self, iteration: int) -> bool:
        """Whether anything is dumped in that iteration, on any rank: then it has to run eagerly, and be settled in itself."""
        ...

    def iteration(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        """Around all passes of an iteration and its update."""
        ...

    def begin_pass(self) -> None:
        """Forward and backward begin: what an earlier pass of the iteration left counts no more."""
        ...

    def micro_batch(self, number: int, count: int) -> None:
        """Before the forward of micro-batch `number` (0-based) of `count`."""
        ...

    def gradients(self) -> None:
        """Gradients are reduced, and nothing has changed them since."""
        ...

    def updated(self) -> None:
        """Parameters are updated."""
        ...

    def write(self, iteration: int | None = None) -> list[Path]:
        """Write what the last `iteration` has collected; the files. What is due of `iteration` (None: of that one) and was not
        there to collect is said: its update was skipped, or all of it."""
        ...

    def resumed(self, iteration: int) -> None:
        """The run goes on behind `iteration`: what it has written of later ones will come again."""
        ...


class NoDumps:
    """Nothing is dumped."""

    def due(self, iteration: int) -> bool:
        return False

    def iteration(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin_pass(self) -> None:
        pass

    def micro_batch(self, number: int, count: int) -> None:
        pass

    def gradients(self) -> None:
        pass

    def updated(self) -> None:
        pass

    def write(self, iteration: int | None = None) -> list[Path]:
        return []

    def resumed(self, iteration: int) -> None:
        pass


NO_DUMPS = NoDumps()


def size_text(size_bytes: float) -> str:
    """`12.3 MB`, in powers of 1024."""
    units = ("B", "KB", "MB", "GB", "TB", "PB")
    power = min(int(math.log(max(size_bytes, 1), 1024)), len(units) - 1)
    return f"{size_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"
