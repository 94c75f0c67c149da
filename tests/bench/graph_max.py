"""What the agreement of all ranks costs inside a graph: an all-reduce of one number (MAX), captured many times in a row.

`python -m tests.bench.graph_max NUM_RANKS`; without GPUs it is called without a graph.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.capture import shared_capture
from tests.bench.graph_ranks import joined, spawn
from tests.bench.table import Row

IN_A_GRAPH = 100
REPLAYS = 30
WITHIN_S = 120.0


def main(num_ranks: int) -> Row:
    """One row, in microseconds, of rank 0."""
    what = f"the agreement inside the graph, {num_ranks} ranks"
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        path = Path(folder, "samples")
        problem = spawn("tests.bench.graph_max", ["rank", str(path)], num_ranks, WITHIN_S)
        samples = json.loads(path.read_text()) if path.exists() else []
    return Row(what, "rsup", samples, "us", note=problem or f"of {IN_A_GRAPH} in a row, {REPLAYS} replays")


def rank_main(path: str) -> None:
    """What each rank runs."""
    with joined() as world:
        code = torch.ones(1, device=world.device)

        def agree() -> torch.Tensor:
            for _ in range(IN_A_GRAPH):
                dist.all_reduce(code, dist.ReduceOp.MAX, world.gradients)
            return code

        agree()
        capture = shared_capture(world.device)
        captured = capture.capture(agree, "the agreement")
        samples = []
        for _ in range(REPLAYS):
            world.wait()
            began_s = time.perf_counter()
            captured.replay()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - began_s) / IN_A_GRAPH * 1e6)
        captured.destroy()
        if world.rank == 0:
            Path(path).write_text(json.dumps(sorted(samples)))
            world.say(f"all-reduce of one number in a graph: median {statistics.median(samples):.1f} us")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2])
    else:
        print(main(int(sys.argv[1])))
