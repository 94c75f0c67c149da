"""What the rerun checks cost a training step: none, rsup's, and the same checks written as one `.item()` per parameter.

`python -m tests.bench.bench_checks [cpu|cuda]`. One rank under DDP with the reference trainer's model; the three take turns
step by step, so that a machine that slows down slows them all. "cost" is a step's time less that of the plain step beside it.
rsup's has the snapshots in it that make a replay possible: of random numbers, buffers and the batch.
"""

import json
import sys

from tests.bench.table import Row, Workplace, print_table

STEPS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rsup.worker.reference.model import GPT
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine

name, layers, hidden, heads, length, batch, steps, warmup = sys.argv[1], *map(int, sys.argv[2:])
device = torch.device(name, 0) if name == "cuda" else torch.device(name)
torch.set_num_threads(1 if name == "cpu" else 8)
if name == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if name == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

def make():
    torch.manual_seed(1)
    ddp = DistributedDataParallel(GPT(layers, hidden, heads, length, 0.1, 0.1).to(device))
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)

def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, 256, (batch, length + 1), generator=generator).to(device)

def forward_backward(ddp, optimizer, text):
    optimizer.zero_grad()
    with torch.autocast(name, torch.bfloat16, enabled=name == "cuda"):
        loss = ddp(text)
    return loss.float()

class Plain:
    def __init__(self):
        self.ddp, self.optimizer = make()
        self.data = batches()
    def step(self, iteration):
        forward_backward(self.ddp, self.optimizer, next(self.data)).backward()
        self.optimizer.step()

class Ours(Plain):
    def __init__(self):
        super().__init__()
        self.data = RerunDataIterator(self.data)
        self.rerun = RerunStateMachine(torch_device=device)
        self.rerun.attach(self.ddp, self.optimizer)
    def step(self, iteration):
        while self.rerun.should_run_forward_backward(self.data, iteration):
            loss = forward_backward(self.ddp, self.optimizer, next(self.data))
            self.rerun.validate_loss(loss)
            loss.backward()
        assert not self.rerun.should_checkpoint_and_exit().should_exit
        self.optimizer.step()

class Naive(Plain):
    def step(self, iteration):
        loss = forward_backward(self.ddp, self.optimizer, next(self.data))
        value = loss.item()
        if value != value or abs(value) == float("inf"):
            raise RuntimeError(value)
        loss.backward()
        for parameter in self.ddp.parameters():
            norm = parameter.grad.norm().item()
            if norm != norm or norm == float("inf"):
                raise RuntimeError(norm)
        self.optimizer.step()

def wait():
    if name == "cuda":
        torch.cuda.synchronize()

kinds = {"no checks": Plain(), "rsup": Ours(), "one .item() per parameter": Naive()}
times = {kind: [] for kind in kinds}
for iteration in range(1, warmup + steps + 1):
    for kind, training in kinds.items():
        wait()
        started = time.perf_counter()
        training.step(iteration)
        wait()
        if iteration > warmup:
            times[kind].append((time.perf_counter() - started) * 1e3)
num = sum(parameter.numel() for parameter in kinds["rsup"].ddp.parameters())
count = len(list(kinds["rsup"].ddp.parameters()))
where = torch.cuda.get_device_name() if name == "cuda" else "1 CPU thread"
note = f"{where}, {num / 1e6:.1f} M parameters in {count} tensors"
with open(os.environ["OUT"] + "/times.json", "w") as file:
    json.dump({"times": times, "note": note}, file)
os._exit(0)
"""
SIZES = {
    "cpu": (2, 128, 4, 64, 4, 60, 10),
    "cuda": (12, 1024, 16, 1024, 8, 100, 20),
}
"""Layers, hidden size, heads, sequence length, batch, steps, warm-up steps."""


def main(device: str = "cpu") -> list[Row]:
    """Rows in milliseconds."""
    with Workplace() as place:
        code, _ = place.run([sys.executable, place.script("steps.py", STEPS), device, *map(str, SIZES[device])])
        if code:
            return [Row(f"checked step, {device}", "rsup", [], "ms", note=f"exit code {code}: {place.log_tail()[-200:]}")]
        result = json.loads((place.folder / "times.json").read_text())
    times: dict[str, list[float]] = result["times"]
    rows = [Row(f"training step, {device}", who, samples, "ms", note=result["note"]) for who, samples in times.items()]
    plain = times["no checks"]
    for who, samples in times.items():
        if who != "no checks":
            cost = [checked - without for checked, without in zip(samples, plain, strict=True)]
            goal = "< one .item() per parameter" if who == "rsup" and device == "cuda" else ""  # on a CPU none of it waits
            rows.append(Row(f"cost of the checks, {device}", who, cost, "ms", goal))
    return rows


if __name__ == "__main__":
    print_table(main(*sys.argv[1:]))
