"""How long an abort of NCCL's communicators takes on two GPUs, with its sleeping threads woken and without.

`python -m tests.bench.bench_nccl_abort [COMMUNICATORS]`: one rank of two waits in an all-reduce that the other does not join,
as when a rank fails; both abort, at different moments after the communicator was made.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rsup.worker.inprocess.nccl_wake import wake_until
from tests.bench.table import Row, print_table

WITHIN_S = 120.0
STEP_S = 0.13
"""Between the moments: no divisor of the 500 ms after which NCCL's threads look up."""


def main(num_communicators: str = "6") -> list[Row]:
    """Rows in seconds; none where there are no two GPUs."""
    if torch.cuda.device_count() < 2:
        print("needs two GPUs")
        return []
    rows = [Row("abort", who, _run(wakes, int(num_communicators)), "s") for who, wakes in (("NCCL alone", ""), ("rsup", "1"))]
    print_table(rows)
    return rows


def _run(wakes: str, num_communicators: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        ranks = []
        for rank in range(2):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "OUT": folder,
                "WAKES": wakes,
                "PORT": str(_free_port(rank, folder)),
            }
            environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [sys.executable, "-W", "ignore", "-m", "tests.bench.bench_nccl_abort", "rank", str(num_communicators)]
            ranks.append(subprocess.Popen(command, env=environment))
        for process in ranks:
            process.wait(WITHIN_S)
        return [float(value) for rank in range(2) for value in json.loads(Path(folder, str(rank)).read_text())]


def _free_port(rank: int, folder: str) -> int:
    """One for both ranks."""
    kept = Path(folder, "port")
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            kept.write_text(str(server.getsockname()[1]))
    return int(kept.read_text())


def rank_main(num_communicators: int) -> None:
    """What a rank runs."""
    rank, took_s = int(os.environ["RANK"]), []
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, rank == 0)
    for number in range(num_communicators):
        prefix = dist.PrefixStore(str(number), store)
        dist.init_process_group("nccl", store=prefix, rank=rank, world_size=2, device_id=device)
        numbers = torch.ones(1 << 20, device=device)
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        if rank == 0:
            dist.all_reduce(numbers)  # the other does not come
        time.sleep(0.2 + STEP_S * number)
        took_s.append(_abort(device))
        dist.destroy_process_group()
    Path(os.environ["OUT"], str(rank)).write_text(json.dumps(took_s))
    os._exit(0)


def _abort(device: torch.device) -> float:
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(device)
    abort = threading.Thread(target=backend.abort, daemon=True)
    began_s = time.monotonic()
    abort.start()
    if os.environ["WAKES"]:
        wake_until(lambda: not abort.is_alive())
    abort.join()
    return time.monotonic() - began_s


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
