"""What all ranks agree on: the worst of small numbers, and small objects of each. Over a gloo group; alone: itself."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Agreement:
    """The ranks of a run. Every method is collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: a gloo group of all ranks; made here where none is given and torch.distributed is initialised."""
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            made: Any = dist.new_group(backend="gloo")
            group = made
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self._number = torch.zeros(1, dtype=torch.int32)

    def worst(self, mine: int) -> int:
        """The greatest number of all ranks."""
        if self.world_size == 1:
            return mine
        self._number[0] = mine
        dist.all_reduce(self._number, dist.ReduceOp.MAX, group=self.group)
        return int(self._number[0])

    def gather(self, mine: T) -> list[T]:
        """Every rank's object, by rank."""
        if self.world_size == 1:
            return [mine]
        all_of_them: list[Any] = [None] * self.world_size
        dist.all_gather_object(all_of_them, mine, group=self.group)
        return all_of_them
