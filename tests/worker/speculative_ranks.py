"""What two ranks of `test_graph_speculative.py` check: one rank's flag makes both fall back, and facts that differ are named. A
script."""

import os

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.constraints import GraphFacts, check_same_on_all_ranks
from rsup.worker.cuda_graph.contract import Batches, ConstraintError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.speculative import SpeculativeStep
from rsup.worker.rerun.replay_state import ReplayState

CPU = torch.device("cpu")


def check_fallback(rank: int) -> None:
    """Rank 1 alone overflows, in its third step; rank 0 computes that step again, too."""
    flag, runs = torch.zeros(()), []

    def fast(batches: Batches) -> torch.Tensor:
        runs.append("fast")
        x = batches[0][0]
        flag.copy_((x > 2.5).any())
        value: torch.Tensor = x.clamp(max=2.5).sum()
        dist.all_reduce(value)
        return value

    def eager(batches: Batches) -> torch.Tensor:
        runs.append("eager")
        value: torch.Tensor = batches[0][0].sum()
        dist.all_reduce(value)
        return value

    graph = FullIterationGraph(fast, CPU, warmup_steps=1)
    step = SpeculativeStep(graph, eager, flag, None, ReplayState(CPU))
    sums = []
    for number in range(4):
        x = torch.tensor([3.0 if (rank, number) == (1, 2) else 1.0])
        sums.append(float(step([[x]]).materialize()))
    assert sums == [2.0, 2.0, 4.0, 2.0], sums
    assert runs == ["fast", "fast", "fast", "eager", "fast"], runs
    assert step.num_fallbacks == 1 and not graph.captured


def check_facts(rank: int) -> None:
    check_same_on_all_ranks(GraphFacts(), dist.group.WORLD)
    try:
        check_same_on_all_ranks(GraphFacts(cuda_graph_warmup_steps=3 + rank), dist.group.WORLD)
    except ConstraintError as error:
        assert "--cuda-graph-warmup-steps is 3 on rank 0 of the group and another on rank 1: " in str(error), error
    else:
        raise AssertionError("ranks that differ were not named")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_fallback(int(os.environ["RANK"]))
    check_facts(int(os.environ["RANK"]))
    print("fine", flush=True)
