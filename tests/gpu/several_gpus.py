"""What two GPUs cannot show, on one host with three or more: attribution with a spare, restarts, graphs, the launcher.

    python -m tests.gpu.several_gpus [NUM_DEVICES] [spare|restart|graph|launch]...

Prints one table. NUM_DEVICES: the GPUs that torch sees, unless given; on a host without GPUs so many ranks run on the CPU, with
devices of an inventory file, which shows that the script works and nothing of GPUs. Rows of sizes that this host does not have
stand there without a sample.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.bench import bench_graph, bench_inprocess, bench_restart, graph_max
from tests.bench.table import RSUP, Row, Workplace, print_table
from tests.gpu.conftest import num_gpus

RESTARTS = 10
RUNS = 3
NOT_RUN = "not run: this host has no {} GPUs"
TRAIN = ["-m", "rsup.worker.reference.train", "--iterations", "16", "--save-interval", "4", "--log-interval", "4"]
SMALL = ["--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--eval-iters", "0"]


def main(num_devices: int, parts: Sequence[str] = ()) -> list[Row]:
    """The rows; a part that fails becomes a row that says how."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        if not parts or name in parts:
            try:
                rows += part(num_devices)
            except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
                rows.append(Row(name, "rsup", [], "", note=f"failed: {str(error).splitlines()[0][:200]}"))
            print_table(rows)
    return rows


def spare(num_devices: int) -> list[Row]:
    """All devices but one in use, one of those broken: who is named, where its rank goes, what is kept of it."""
    what = f"fault to verdict, {num_devices - 1} of {num_devices} devices"
    with Workplace() as place:
        devices = _devices(place, num_devices)
        bad = devices[1 % (num_devices - 1)]
        command = [*RSUP, "launch", "--job-id", "spare", "--max-restarts", "3", "--nproc-per-node", str(num_devices - 1)]
        fault = ["--fault", f"device={bad},kind=bitflip,site=grad,bit=30,from=5"]
        size = ["--global-batch-size", str(2 * (num_devices - 1)), "--micro-batch-size", "2"]
        save = ["--save", str(place.folder / "save"), "--deterministic-mode"]
        code, wall_s = place.run([*command, *TRAIN, *SMALL, *size, *save, *fault], 240)
        if code:
            raise RuntimeError(f"the training ended with {code}: {place.log_tail()}")
        (case,) = _ask(place, "cases", "list", "spare")
        quarantined = [device["uuid"] for device in _ask(place, "devices", "list", "--state", "quarantined")]
        used = {rank["device"] for rank in _ask(place, "status", "spare")["ranks"]}
    took_s = (datetime.fromisoformat(case["closed"]) - datetime.fromisoformat(case["opened"])).total_seconds()
    note = f"{case['verdict']}, accused {'the broken one' if case['accused'] == [bad] else case['accused']};"
    note += f" {'quarantined' if quarantined == [bad] else f'quarantined: {quarantined}'};"
    note += f" at the end {'the spare computes' if devices[-1] in used and bad not in used else f'on {sorted(used)}'}"
    return [Row(what, "rsup", [took_s], "s", note=note), Row("the whole training", "rsup", [wall_s], "s", note="exit code 0")]


def restart(num_devices: int) -> list[Row]:
    """In-process restart with a rank a device; a reserve rank shares none."""
    kinds: list[tuple[str, str, int, int]] = [
        ("exception", "exception", 0, RESTARTS),
        (f"hang in a collective (soft limit {bench_inprocess.HANG_LIMIT_S} s)", "hang", 0, 1),
        (f"SIGKILL, {num_devices - 1} computing and a reserve", "kill", num_devices - 1, 1),
    ]
    rows: list[Row] = []
    for what, fault, active, restarts in kinds:
        if active == 1:
            rows.append(Row(what, "rsup", [], "s", note=NOT_RUN.format(3)))
            continue
        found = bench_inprocess.one_run("rsup", fault, num_devices, active, restarts)
        rows += bench_inprocess.rows_of(f"{what}, {num_devices} ranks:", "rsup", found)
        if fault == "exception" and found.memory_mib:
            entries = sorted(found.memory_mib)
            grown_mib = found.memory_mib[entries[-1]] - found.memory_mib[entries[min(1, len(entries) - 1)]]
            rows.append(Row("memory, more in the last entry than in the second", "rsup", [grown_mib], "MiB"))
    return rows


def graph(num_devices: int) -> list[Row]:
    """Whole iterations as graphs, on 2, 4 and 8 ranks."""
    rows: list[Row] = []
    for num_ranks in (2, 4, 8):
        if num_ranks > num_devices:
            rows.append(Row(f"graph with checks, {num_ranks} ranks", "rsup", [], "ms", note=NOT_RUN.format(num_ranks)))
            continue
        found = bench_graph.main("quick", str(num_ranks))
        rows += [_of(row, num_ranks) for row in found if row.what.startswith(("step, device", "more than"))]
        rows.append(graph_max.main(num_ranks))
    return rows


def launch(num_devices: int) -> list[Row]:
    """`rsup launch` beside torchrun."""
    found = bench_restart.main(RUNS, ("rsup", "torchrun"), num_devices)
    return [_of(row, num_devices) for row in found]


PARTS: dict[str, Callable[[int], list[Row]]] = {"spare": spare, "restart": restart, "graph": graph, "launch": launch}


def _of(row: Row, num_ranks: int) -> Row:
    return Row(f"{row.what}, {num_ranks} ranks", row.who, row.samples, row.unit, row.goal, row.note)


def _devices(place: Workplace, num_devices: int) -> list[str]:
    """Their UUIDs in torch's order; without GPUs those of an inventory that the launch reads."""
    if num_gpus() >= num_devices:
        script = "import torch; print(*['GPU-' + str(torch.cuda.get_device_properties(i).uuid) for i in range(NUM)])"
        command = [sys.executable, "-W", "ignore", "-c", script.replace("NUM", str(num_devices))]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    found = [f"GPU-{number}" for number in range(num_devices)]
    records = [{"uuid": uuid, "serial": f"S{uuid}", "model": "none", "vbios": "1", "driver": "1"} for uuid in found]
    Path(place.folder, "devices.json").write_text(json.dumps(records))
    place.environment["RSUP_DEVICE_INVENTORY"] = str(place.folder / "devices.json")
    return found


def _ask(place: Workplace, *question: str) -> Any:
    done = subprocess.run([*RSUP, *question, "--json"], env=place.environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"rsup {' '.join(question)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    began_s = time.monotonic()
    given = sys.argv[1:]
    num = int(given.pop(0)) if given and given[0].isdigit() else num_gpus()
    if num < 2:
        sys.exit("needs two devices or more: give a number to run on the CPU")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    print_table(main(num, given))
    print(f"{num} devices ({num_gpus()} GPUs), {time.monotonic() - began_s:.0f} s")
