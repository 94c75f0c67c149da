"""From a fault to its verdict: by rotation, and by moving the rank to another device; and what an audit costs.

`python -m tests.bench.bench_rerun [cpu|cuda]`. By rotation: from the start of the pass that fails until every rank has the
verdict stored, in seconds and in passes of the iteration's length. By moving: from the report of the case (after the replay
in place) to its verdict on the other device, restart included. Peer: Megatron-LM needs a requeue for either, not run here.
"""

import json
import os
import statistics
import sys
from datetime import datetime

from tests.bench.table import RSUP, Row, Workplace, print_table

RUNS = int(os.environ.get("RUNS", "3"))
RANKS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rsup.worker.reference.model import GPT
from rsup.worker.rerun import RerunConfig, RerunDataIterator, RerunMode, RerunStateMachine

name, layers, hidden, heads, length, batch = sys.argv[1], *map(int, sys.argv[2:])
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = torch.device(name, local) if name == "cuda" else torch.device(name)
torch.set_num_threads(1 if name == "cpu" else 8)
if name == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if name == "cuda" else "gloo")

def run(fault, **config):
    torch.manual_seed(1)
    ddp = DistributedDataParallel(GPT(layers, hidden, heads, length, 0.1, 0.1).to(device))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    rerun = RerunStateMachine(RerunConfig(**config), torch_device=device)
    rerun.attach(ddp, optimizer)
    generator = torch.Generator().manual_seed(rank)
    data = RerunDataIterator(torch.randint(0, 256, (batch, length + 1), generator=generator).to(device) for _ in range(100))
    seen = []
    for iteration in range(1, 17):
        began, passes = time.monotonic(), 0
        while rerun.should_run_forward_backward(data, iteration):
            passes += 1
            optimizer.zero_grad()
            with torch.autocast(name, torch.bfloat16, enabled=name == "cuda"):
                loss = ddp(next(data)).float()
            if fault and rank == 1 and iteration >= 12:
                loss = loss * float("nan")
            rerun.validate_loss(loss)
            loss.backward()
        if rerun.should_checkpoint_and_exit().should_exit:
            return seen, time.monotonic() - began, passes
        optimizer.step()
        if name == "cuda":
            torch.cuda.synchronize()
        seen.append((time.monotonic() - began, passes))
    return seen, 0.0, 0

healthy, verdict_s, passes = run(True)
audited, _, _ = run(False, mode=RerunMode.AUDIT, audit_interval=4)
if rank == 0:
    with open(os.environ["OUT"] + "/measured.json", "w") as file:
        json.dump({"healthy": healthy, "verdict_s": verdict_s, "passes": passes, "audited": audited}, file)
dist.barrier()
os._exit(0)
"""
SIZES = {"cpu": ("2", "128", "4", "128", "4"), "cuda": ("8", "1024", "16", "1024", "8")}
TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "12", "--save-interval", "5", "--eval-iters", "0")


def main(name: str = "cpu") -> list[Row]:
    """Run all of it on `cpu`, or on two GPUs."""
    rows: list[Row] = []
    with Workplace() as place:
        rows += rotation(place, name)
        rows.append(moving(place, name))
    return rows


def rotation(place: Workplace, name: str) -> list[Row]:
    """Two ranks; the second has the faulty device."""
    script = place.script("ranks.py", RANKS)
    verdicts: list[float] = []
    passes: list[float] = []
    audits: list[float] = []
    for _ in range(RUNS):
        code, _ = place.run([*RSUP, "launch", "--nproc-per-node", "2", script, name, *SIZES[name]])
        if code != 0:
            raise SystemExit(f"exit {code}: {place.log_tail()}")
        measured = json.loads((place.folder / "measured.json").read_text())
        plain = statistics.median(seconds for seconds, _ in measured["healthy"][3:])
        verdicts.append(measured["verdict_s"])
        passes.append(measured["passes"])
        audits += [seconds / plain for seconds, count in measured["audited"][3:] if count == 3]
    return [
        Row(f"fault to verdict by rotation, 2 ranks, {name}", "rsup", verdicts, "s"),
        Row("the same in passes, the failing one included", "rsup", passes, "passes", "<= 3"),
        Row(f"an audited iteration, {name}", "rsup", audits, "iterations", "", "every N-th iteration"),
    ]


def moving(place: Workplace, name: str) -> Row:
    """One rank, two devices: the first is faulty."""
    samples = []
    for run in range(RUNS):
        inventory = place.script("inventory.json", json.dumps([{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]))
        bad, options = "GPU-a", ["--device-inventory", inventory]
        if name == "cuda":
            import torch

            bad, options = f"GPU-{torch.cuda.get_device_properties(0).uuid}", []
        job, save = f"move-{run}", str(place.folder / f"move-{run}")
        apart = {"RSUP_STATE_DIR": str(place.folder / f"state-{run}")}  # the next launch leaves the bad device out
        fault = f"device={bad},kind=nan,site=loss,from=4"
        command = [*RSUP, "launch", "--max-restarts", "1", "--job-id", job, *options, *TRAIN, "--device", name]
        code, _ = place.run([*command, "--save", save, "--fault", fault], **apart)
        if code != 0:
            raise SystemExit(f"exit {code}: {place.log_tail()}")
        place.run([*RSUP, "cases", "list", job, "--json"], **apart)
        printed = (place.folder / "last.log").read_text()
        (case,), _ = json.JSONDecoder().raw_decode(printed[printed.index("[") :])
        assert case["verdict"] == "persistent", case
        times = [datetime.fromisoformat(case[end]) for end in ("opened", "closed")]
        samples.append((times[1] - times[0]).total_seconds())
    return Row(f"case to verdict by moving the rank, {name}", "rsup", samples, "s", "", "restart included")


if __name__ == "__main__":
    print_table(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
