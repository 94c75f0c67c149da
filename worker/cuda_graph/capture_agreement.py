"""What ranks tell one another before a graph is captured: one that captured alone would wait for ever in its collectives."""

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.rerun.exchange import gather


class Action(IntEnum):
    """What a call of a graph does."""

    EAGER = 0
    """Run as it is: it was asked for, or the inputs are others than the graph's, or the step cannot be captured."""
    WARM_UP = 1
    CAPTURE = 2
    REPLAY = 3
    BY_INPUTS = 4
    """Follows from the inputs of all ranks, which are told with it."""


class RankState(tuple[int, int, int, int]):
    """(calls so far, resets so far, `Action`, whether the call counts): equal on all ranks, or they fall apart."""

    def __str__(self) -> str:
        calls, resets, action, counts = self
        name = "to follow its inputs" if action == Action.BY_INPUTS else f"to {Action(action).name.lower().replace('_', ' ')}"
        name = "to run eagerly" if action == Action.EAGER else name
        return f"{name} after {calls} calls and {resets} resets{'' if counts else ', as a rerun'}"


class Ranks:
    """The ranks that call a graph together. `group`: a group that takes CPU tensors (gloo); None: the default one if
    torch.distributed is in use. Raises `GraphError` for a group that takes none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        in_use = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if in_use else 1
        if self.size > 1 and "cpu" not in {device.type for device in _devices_of(group)}:
            raise GraphError("the ranks of a graph agree over host memory: give it a gloo group (torch.distributed.new_group)")

    def agree(self, state: RankState, inputs: int, name: str) -> tuple[int, ...]:
        """Check that all ranks are about to do the same; return every rank's number of its inputs. Collective.

        Raises `GraphError`, on all ranks, that names those which differ.
        """
        if self.size == 1:
            return (inputs,)
        mine = torch.tensor([*state, inputs], dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        told = [row.tolist() for row in rows]
        by_state: dict[RankState, list[int]] = {}
        for index, row in enumerate(told):
            by_state.setdefault(RankState(row[:4]), []).append(self._global_rank(index))
        if len(by_state) > 1:
            groups = "; ".join(f"{_ranks_text(ranks)} {state}" for state, ranks in by_state.items())
            raise GraphError(
                f"the ranks of the {name} graph are about to do different things: {groups}: call and reset it alike"
            )
        return tuple(row[4] for row in told)

    def failures(self, failure: str) -> str:
        """What went wrong on this rank (empty: nothing) and on the others, in one line; alike on all ranks. Collective."""
        if self.size == 1:
            return failure
        found = {self._global_rank(index): text for index, text in enumerate(gather(failure, self._group)) if text}
        ranks = _ranks_text(list(found))
        return f"{ranks}: {next(iter(found.values()))}" if found else ""

    def _global_rank(self, index: int) -> int:
        return dist.get_global_rank(self._group, index) if self._group is not None else index


def _devices_of(group: dist.ProcessGroup | None) -> Sequence[torch.device]:
    devices: Sequence[torch.device] = (group or dist.group.WORLD)._device_types  # type: ignore[union-attr]
    return devices


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
