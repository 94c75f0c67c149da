"""What a save costs the training: how long it stands still, how much slower the steps beside it are; and a restore.

`python -m tests.bench.bench_saves [MiB] [rounds]`: size of the whole state (parameters and both moments). Two ranks under
gloo that have the same state, as under DDP, take steps of about 10 ms; every kind of save is made in turn. Peers:
`torch.distributed.checkpoint.async_save` in the same run, with its defaults and with its staging buffers kept. NVRx 0.4's
`TorchAsyncCheckpoint` calls CUDA unconditionally, so it has a row only where there is a GPU. rsup's durable saves read every
file back for its digest; the peers' do not.
"""

import json
import shutil
import sys

from tests.bench.table import Row, Workplace, print_table

RANKS = """
import json, os, statistics, sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rsup.worker.checkpoint import Checkpointer, claim_for_all, find_whole_checkpoint, load_tensors
from rsup.worker.checkpoint_directory import CheckpointDirectory
from rsup.worker.local_checkpoint import LocalCheckpointer
from rsup.worker.local_checkpoint_directory import LocalDirectory, this_launcher
from rsup.worker.local_checkpoint_plan import Replication

rank, mib, rounds, out = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(os.environ["OUT"])
torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), 2), rank=rank, world_size=2)
group = lambda: dist.new_group(backend="gloo")
control, saving, apart, alone = group(), group(), group(), group()
count = 48
state = {f"layer{i}.{kind}": torch.rand(int(mib * (1 << 20) / 4 / 3 / count))
         for i in range(count) for kind in ("weight", "exp_avg", "exp_avg_sq")}
matrix = torch.rand(384, 384)

def step():
    began = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    dist.all_reduce(torch.ones(1), group=control)
    return (time.perf_counter() - began) * 1e3

durable_dir = CheckpointDirectory(out / "durable", keep=1)
saver = Checkpointer(durable_dir, claim_for_all(durable_dir, "bench", 1, saving), saving)
memory = LocalDirectory(out / "shm", "bench", in_memory=False)  # replaced below by shared memory
memory.root = Path("/dev/shm") / out.name
memory.path = memory.root / memory.path.name
local = LocalCheckpointer(memory, this_launcher(None), 1, apart, control)
disk = LocalDirectory(out / f"disk-{rank}", "bench", in_memory=False)
copied = LocalCheckpointer(disk, this_launcher(None), 1, group(), control, Replication(2))

def rsup_durable(number):
    saver.save(number, state, {})
    return lambda: saver.poll() is not None

def rsup_local(which):
    def save(number):
        assert which.save(number, {}, state, {"n": number}) is not None
        def done():
            result = which.poll()
            assert result is None or not result.error, result
            return result is not None
        return done
    return save

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
kept = DefaultStager(StagingOptions(False, False, False, False))  # no pinned memory and no second thread: no GPU
def dcp_default(number):
    return dcp.async_save(state, checkpoint_id=out / "dcp", process_group=alone).done
def dcp_kept(number):
    return dcp.async_save(state, checkpoint_id=out / "dcp-kept", async_stager=kept, process_group=alone).done

kinds = {
    "rsup, durable": rsup_durable,
    "rsup, local in memory": rsup_local(local),
    "rsup, local with a copy on a peer": rsup_local(copied),
    "torch async_save": dcp_default,
    "torch async_save, staging kept": dcp_kept,
}
result = {"stall": {k: [] for k in kinds}, "slowed": {k: [] for k in kinds}, "took": {k: [] for k in kinds}, "plain": []}
number = 0
for turn in range(rounds + 1):
    for kind, save in kinds.items():
        number += 1
        plain = statistics.median(step() for _ in range(20))
        began = time.perf_counter()
        done = save(number)
        stall = (time.perf_counter() - began) * 1e3
        extra, is_done, mine = 0.0, False, False
        while not is_done:
            extra += step() - plain
            mine = mine or done()
            flag = torch.tensor([int(mine)])
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=control)
            is_done = bool(flag)
        took = (time.perf_counter() - began) * 1e3
        if turn:
            for name, value in (("stall", stall), ("slowed", extra), ("took", took)):
                result[name][kind].append(value)
            result["plain"].append(plain)

holder = {name: torch.empty_like(tensor) for name, tensor in state.items()}
restore = {k: [] for k in ("rsup, durable", "rsup, local in memory", "torch load")}
def timed(kind, work):
    dist.barrier(group=control)
    began = time.perf_counter()
    work()
    restore[kind].append((time.perf_counter() - began) * 1e3)
def load_durable():
    found = find_whole_checkpoint(durable_dir, saving, print)
    load_tensors(found.path, holder)
def load_local():
    local.open(*local.saves()[0]).load(holder)
for _ in range(rounds):
    timed("rsup, durable", load_durable)
    timed("rsup, local in memory", load_local)
    timed("torch load", lambda: dcp.load(holder, checkpoint_id=out / "dcp", process_group=alone))
assert all(torch.equal(holder[name], tensor) for name, tensor in state.items())
result["restore"] = restore
if rank == 0:
    (out / "saves.json").write_text(json.dumps(result))
dist.barrier(group=control)
os._exit(0)
"""

BOTH = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(rank), *sys.argv[2:]]) for rank in range(2)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def main(mib: str = "96", rounds: str = "5") -> list[Row]:
    """Rows in milliseconds."""
    with Workplace() as place:
        ranks = place.script("ranks.py", RANKS)
        code, _ = place.run([sys.executable, place.script("both.py", BOTH), ranks, mib, rounds], timeout_s=600)
        shutil.rmtree(f"/dev/shm/{place.folder.name}", ignore_errors=True)
        if code:
            return [Row("saves", "rsup", [], "ms", note=f"exit code {code}: {place.log_tail()[-300:]}")]
        result = json.loads((place.folder / "saves.json").read_text())
    rows = [Row("step without a save", "-", result["plain"], "ms", note=f"{mib} MiB of state, 2 ranks, gloo")]
    for key, what in (
        ("stall", "training stands still for a save"),
        ("slowed", "steps slower beside a save, in all"),
        ("took", "from a save's begin to its end"),
    ):
        for who, samples in result[key].items():
            rows.append(Row(what, who, samples, "ms", "<= async_save" if key == "stall" and who == "rsup, durable" else ""))
    rows += [Row("restore, checked", who, samples, "ms") for who, samples in result["restore"].items()]
    rows.append(Row("training stands still for a save", "NVRx TorchAsyncCheckpoint", [], "ms", note="needs a GPU"))
    return rows


if __name__ == "__main__":
    print_table(main(*sys.argv[1:]))
