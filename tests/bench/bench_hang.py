"""How long after its limit a hang is noticed, and how long until the hung rank is dead; peer: ft_launcher.

Rank 1 opens `step` with a limit of 3 s and sleeps. Ours records when it noticed (the incident in the store) and dies after
its stacks are taken; ft_launcher kills first, so its death is when it noticed.
"""

import json
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

from tests.bench.table import RSUP, Row, Workplace, peer

RUNS = 5
LIMIT_S = 3
OURS = """
import os, sys, time, rsup.worker
if os.environ["RSUP_ATTEMPT"] != "1":
    sys.exit(0)
rsup.worker.set_iteration(1)
if os.environ["RANK"] == "1":
    rsup.worker.section("step").enter()
    with open(os.environ["OUT"] + "/opened.tmp", "w") as file:
        file.write(f"{time.time()} {os.getpid()}")
    os.rename(os.environ["OUT"] + "/opened.tmp", os.environ["OUT"] + "/opened")
time.sleep(60)
"""
NVRX = """
import os, sys, time
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
if os.path.exists(os.environ["OUT"] + "/opened"):
    sys.exit(0)
client = RankMonitorClient()
client.init_workload_monitoring()
if os.environ["RANK"] == "1":
    client.start_section("step")
    with open(os.environ["OUT"] + "/opened.tmp", "w") as file:
        file.write(f"{time.time()} {os.getpid()}")
    os.rename(os.environ["OUT"] + "/opened.tmp", os.environ["OUT"] + "/opened")
time.sleep(60)
"""


def watch_death(folder: Path, found: list[float]) -> None:
    """Put seconds from the opened section to the rank's death into `found`."""
    deadline = time.monotonic() + 60
    while not (folder / "opened").exists():
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    opened, pid = (folder / "opened").read_text().split()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except OSError:
            break
        time.sleep(0.002)
    found.append(time.time() - float(opened))


def one_run(place: Workplace, command: list[str]) -> float | None:
    """Seconds from the opened section to the rank's death."""
    found: list[float] = []
    watcher = threading.Thread(target=watch_death, args=(place.folder, found))
    watcher.start()
    place.run(command, timeout_s=60)
    watcher.join()
    return found[0] if found else None


def noticed_after_limit_s(place: Workplace) -> float | None:
    """From the store: when the hang was noticed, after the limit."""
    done = subprocess.run(
        [*RSUP, "status", "h", "--json"], env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
    )
    hangs = [i for i in json.loads(done.stdout)["incidents"] if i["kind"] == "hang"]
    if not hangs:
        return None
    opened = float((place.folder / "opened").read_text().split()[0])
    hang = hangs[0]
    began = datetime.fromisoformat(hang["at"]).timestamp()  # when the rank last got on, by the supervisor's account
    return began + float(hang["detection_s"]) - opened - LIMIT_S


def main(runs: int = RUNS) -> list[Row]:
    """Rows in seconds past the limit."""
    noticed, died, theirs = [], [], []
    limits = ["--nproc-per-node", "2", "--max-restarts", "1", "--ft-rank-section-timeouts", f"step:{LIMIT_S}"]
    for _ in range(runs):
        with Workplace() as place:
            script = place.script("hangs.py", OURS)
            death = one_run(place, [*RSUP, "launch", "--job-id", "h", "--stop-grace", "0", *limits, script])
            if death is not None:
                died.append(death - LIMIT_S)
            if (after := noticed_after_limit_s(place)) is not None:
                noticed.append(after)
    rows = [
        Row("hang noticed after its limit", "rsup", noticed, "s", "<= 0.25 s"),
        Row("hung rank dead after the limit", "rsup, stacks taken first", died, "s"),
    ]
    if ft_launcher := peer("ft_launcher"):
        for _ in range(runs):
            with Workplace() as place:
                rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
                death = one_run(place, [ft_launcher, *rendezvous, *limits, place.script("hangs.py", NVRX)])
                if death is not None:
                    theirs.append(death - LIMIT_S)
        rows.append(Row("hung rank dead after the limit", "ft_launcher, no stacks", theirs, "s"))
    return rows


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
