"""What one section enter + exit costs in a rank, and what a call costs outside `rsup launch`; peer: NVRx's client."""

import os
import sys
import time
from pathlib import Path

from rsup.supervisor.heartbeat_board import Board
from tests.bench.table import RSUP, Row, Workplace, peer

PAIRS = 20_000

OURS = f"""
import os, time, rsup.worker
session = rsup.worker.init()
pairs = {PAIRS}
out = []
for _ in range(pairs):
    t = time.perf_counter_ns()
    with rsup.worker.section("step"):
        pass
    out.append(time.perf_counter_ns() - t)
rsup.worker.shutdown()
open(os.environ["OUT"] + "/pairs-" + os.environ.get("RANK", "0"), "w").write("\\n".join(map(str, out)))
"""

NVRX = """
import os, time
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
out = []
for _ in range(2000):
    t = time.perf_counter_ns()
    client.start_section("step")
    client.end_section("step")
    out.append(time.perf_counter_ns() - t)
client.shutdown_workload_monitoring()
open(os.environ["OUT"] + "/pairs-" + os.environ["RANK"], "w").write("\\n".join(map(str, out)))
"""


def main() -> list[Row]:
    """Rows in microseconds; each sample is one pair, the timer's own two calls included."""
    rows = []
    for who, goal, in_board in (("rsup", "<= 1 us", True), ("rsup, outside a launch", "", False)):
        with Workplace() as place:
            extra = {}
            if in_board:
                board = Board.create(1, place.folder)
                extra = {"RSUP_BOARD": str(board.path), "RSUP_ATTEMPT": "1", "RANK": "0", "LOCAL_RANK": "0"}
            place.run([sys.executable, place.script("ours.py", OURS)], **extra)
            rows.append(Row("section pair", who, read_samples(place.folder), "us", goal))
            if in_board:
                board.close()
                board.unlink()
    return rows + nvrx_rows()


def nvrx_rows() -> list[Row]:
    """NVRx's own client, unmodified, under its launcher and under ours: one after the other, the same command line."""
    ft_launcher = peer("ft_launcher")
    if not ft_launcher:
        return []
    rows = []
    for who, launcher, goal in (("ft_launcher", [ft_launcher], ""), ("rsup", [*RSUP, "launch"], "<= ft_launcher's")):
        with Workplace() as place:
            place.run(
                [
                    *(*launcher, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
                    *("--ft-rank-section-timeouts", "step:60", place.script("nvrx.py", NVRX)),
                ]
            )
            rows.append(Row("section pair", f"NVRx's client under {who}", read_samples(place.folder), "us", goal))
    return rows


def read_samples(folder: Path) -> list[float]:
    """All samples that the ranks wrote, in microseconds."""
    return [int(line) / 1000 for path in folder.glob("pairs-*") for line in path.read_text().split()]


if __name__ == "__main__":
    from tests.bench.table import print_table

    print(f"{os.cpu_count()} cores, {time.strftime('%F')}")
    print_table(main())
