"""In-process restart: from a fault in rank 1 to every rank back in the training function, and past its first collective.

Peer: NVRx's Wrapper alone, with its defaults and tuned (intervals 0.1 s, last call 0.1 s), started by a launcher that leaves
siblings alone, its workload store prefixed by hand and NCCL set up as its documentation says. gloo on CPU, NCCL where there are
two GPUs. Under the table: what each step of our restarts took; where a row has no sample, the ends of its ranks' logs.
`SIGKILL, reserve`: three ranks, two compute. `SIGKILL, replacement`: two ranks, a new process joins (NVRx has no such thing).

    python -m tests.bench.bench_inprocess [RESTARTS_A_RUN]
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.bench.table import RSUP, Row, Workplace

RESTARTS = 8
RUN_WITHIN_S = 240.0
JOB = "bench"
FOR_NCCL = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}
"""What NVRx's documentation asks of its users, and `restartable` sets by itself: with the first one's default an aborted
communicator ends the process, with the second's multicast memory hangs in the abort."""
MAX_REASON_CHARS = 160

HANG_LIMIT_S = 5
"""Soft limit of the runs that hang."""

TRAINING = (
    f"""
HANG_LIMIT_S = {HANG_LIMIT_S}
"""
    + """
import datetime, json, os, signal, sys, time
import torch, torch.distributed as dist

MODE, FAULT, RESTARTS = os.environ["MODE"], os.environ["FAULT"], int(os.environ["RESTARTS"])
CUDA = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
FIRST_RANK = os.environ["RANK"]
device = f"cuda:{os.environ['LOCAL_RANK']}" if CUDA else "cpu"
out = open(f"{os.environ['OUT']}/times-{FIRST_RANK}-{os.getpid()}", "a", buffering=1)

def note(what, entry, value=None):
    out.write(json.dumps([what, entry, time.time() if value is None else value]) + "\\n")

def work(entry, store=None):
    note("enter", entry)
    if CUDA:
        torch.cuda.set_device(device)
    where = {}
    if store is not None:
        where = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("nccl" if CUDA else "gloo", **where)
    ones = torch.ones(1024, device=device)
    for step in range(8 if entry <= RESTARTS else 2):
        dist.all_reduce(ones)
        ones.fill_(1)
        if CUDA:
            torch.cuda.synchronize()
        if step == 0:
            note("first", entry)
        time.sleep(0.02)
    note("memory", entry, memory_mib())
    if entry <= RESTARTS and FIRST_RANK == "1":
        wait_for_standbys(entry)
        note("fault", entry)
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while FAULT == "hang":
            time.sleep(0.1)
        raise ValueError(f"injected in entry {entry}")
    if entry <= RESTARTS:
        while True:  # a healthy rank waits in its next collective
            dist.all_reduce(ones)
            if CUDA:
                torch.cuda.synchronize()  # as a step does that looks at its loss; else a thousand of them wait to be launched
    dist.barrier()
    dist.destroy_process_group()

def memory_mib():
    if not CUDA:  # of this process; else of the device, all processes
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20

def wait_for_standbys(entry):
    go = f"{os.environ['OUT']}/go-{entry}"
    while FAULT == "kill" and MODE == "rsup" and not os.path.exists(go):
        time.sleep(0.01)

if MODE == "rsup":
    from rsup.worker.inprocess import InProcessSettings, current_entry, restartable
    active = int(os.environ["ACTIVE"])
    limits = {"soft_timeout": HANG_LIMIT_S, "hard_timeout": 4 * HANG_LIMIT_S} if FAULT == "hang" else {}
    settings = InProcessSettings(active_world_size=active or None, granularity="rank", **limits)

    def train():
        note("steps", current_entry().number, current_entry().restart_timings)
        work(current_entry().number)

    restartable(train, settings)()
else:
    from nvidia_resiliency_ext import inprocess
    seconds = lambda value: datetime.timedelta(seconds=value)
    tuned = {}
    if MODE == "tuned":
        names = ("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval")
        tuned = {name: seconds(0.1) for name in (*names, "last_call_wait")}
    os.environ.pop("LOCAL_RANK")  # with it NVRx asks NVML and sysfs for GPU, NVLink and NIC by index: a container has them not
    port, size, rank = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    base = dist.TCPStore("127.0.0.1", port, size, rank == 0, multi_tenant=True, wait_for_workers=True, use_libuv=True)
    active = int(os.environ["ACTIVE"])
    seats = inprocess.Compose(inprocess.rank_assignment.ActivateAllRanks(), inprocess.rank_assignment.ShiftRanks())
    if active:
        layer = inprocess.rank_assignment.Layer
        seats = inprocess.rank_assignment.Tree(
            [layer(min_ranks=active, max_ranks=active, key_or_fn="job", flag=inprocess.rank_assignment.LayerFlag.RESERVE)]
        )

    @inprocess.Wrapper(store_kwargs={"port": port + 1}, rank_assignment=seats, **tuned)
    def train(call: inprocess.CallWrapper = None):
        work(call.iteration + 1, dist.PrefixStore(str(call.iteration), base))

    train()
"""
)


class Found(NamedTuple):
    """Seconds from each fault to re-entry of the last rank that computes, and to its first collective. `steps`: of each
    restart, by name, on the slowest rank. `why`: the last lines of the ranks where there is no sample. `memory_mib`: by entry,
    the most that a rank saw in use."""

    re_entry: list[float]
    first: list[float]
    steps: dict[str, list[float]]
    why: list[str]
    memory_mib: dict[int, float]


def main(restarts: int = RESTARTS) -> list[Row]:
    """Rows in seconds."""
    rows: list[Row] = []
    who = {"rsup": "rsup", "defaults": "NVRx", "tuned": "NVRx tuned"}
    for mode, name in who.items():
        rows += rows_of("exception", name, one_run(mode, "exception", 2, 0, restarts))
    for mode, name in who.items():
        rows += rows_of("SIGKILL, reserve", name, one_run(mode, "kill", 3, 2, 1))
    rows += rows_of("SIGKILL, replacement", "rsup", one_run("rsup", "kill", 2, 0, restarts))
    return rows


def rows_of(what: str, who: str, found: Found) -> list[Row]:
    """Two rows in seconds; on standard error what took how long."""
    goal = ("<= 0.2 s on CPU", "<= 0.4 s on 2 H200") if who == "rsup" and what == "exception" else ("", "")
    for line in found.why:
        print(f"{what}, {who}: no sample: {line}", file=sys.stderr)
    if found.steps:
        steps = ", ".join(f"{step} {median(seconds):.3f}" for step, seconds in found.steps.items())
        print(f"{what}, {who}: median seconds of each step, on the slowest rank: {steps}", file=sys.stderr)
    why = found.why[-1][:MAX_REASON_CHARS] if found.why else ""
    return [
        Row(f"{what} to re-entry", who, found.re_entry, "s", goal[0], why),
        Row(f"{what} to first collective", who, found.first, "s", goal[1], why),
    ]


def one_run(mode: str, fault: str, world_size: int, active: int, restarts: int) -> Found:
    """One row's run, from its start to its end."""
    with Workplace() as place:
        place.environment |= {"MODE": mode, "FAULT": fault, "RESTARTS": str(restarts), "ACTIVE": str(active)}
        script = place.script("training.py", TRAINING)
        if mode == "rsup":
            no_limits = ["--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0"]
            options = ["--nproc-per-node", str(world_size), "--job-id", JOB, *no_limits]
            processes = [_start(place, "launch", [*RSUP, "launch", *options, script])]
        else:
            processes = _alone(place, script, world_size)
        try:
            _wait(place, processes, active or world_size, restarts)
            ended = [process.poll() for process in processes]
        finally:
            for process in processes:
                place.kill(process)
        re_entry, first = _samples(place.folder, restarts, active or world_size)
        is_asked_for = bool(os.environ.get("RSUP_BENCH_DEBUG"))
        why = _last_lines(place, ended, 40 if is_asked_for else 4) if is_asked_for or not first else []
        memory_mib = {entry: max(found) for entry, found in sorted(_read(place.folder, "memory").items())}
        return Found(re_entry, first, _steps(place.folder), why, memory_mib)


def _start(place: Workplace, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a command with a log of its own."""
    with (place.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=place.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _last_lines(place: Workplace, ended: list[int | None], most: int) -> list[str]:
    """What each process wrote last, and how it ended."""
    found = []
    for path, code in zip(sorted(place.folder.glob("*.log")), ended, strict=True):
        how = "was still running" if code is None else f"exited with {code}"
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        found += [f"{path.stem} {how}: {line}" for line in lines[-most:] or ["it wrote nothing"]]
    return found


def _steps(folder: Path) -> dict[str, list[float]]:
    """Of each restart, the seconds of each step on the rank that took longest for it."""
    found: dict[str, list[float]] = {}
    for of_ranks in _read(folder, "steps").values():
        for step in dict.fromkeys(step for of_one in of_ranks for step in of_one):
            found.setdefault(step, []).append(max(of_one.get(step, 0.0) for of_one in of_ranks))
    return found


def _alone(place: Workplace, script: str, world_size: int) -> "list[subprocess.Popen[bytes]]":
    port = _free_port()
    found = []
    for rank in range(world_size):
        place.environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "TORCH_CPP_LOG_LEVEL": "error",
            **FOR_NCCL,
        }
        found.append(_start(place, f"rank-{rank}", [sys.executable, "-W", "ignore", script]))
    return found


def _free_port() -> int:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        try:
            two.bind(("127.0.0.1", port + 1))
        except OSError:
            return _free_port()
        return port


def _wait(place: Workplace, processes: "list[subprocess.Popen[bytes]]", active: int, restarts: int) -> None:
    """Until every rank that computes is past its first collective of the last entry. Lets rank 1 die when standbys wait."""
    end = time.monotonic() + RUN_WITHIN_S
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if len(_times(place.folder, "first").get(restarts + 1, [])) >= active:
            time.sleep(1.0)  # to see how it ends
            return
        if place.environment["FAULT"] == "kill":
            for entry in range(1, _times_ready(place) + 1):
                (place.folder / f"go-{entry}").touch()
        time.sleep(0.2)


def _times_ready(place: Workplace) -> int:
    """How often a full set of standbys has become ready."""
    if place.environment["MODE"] != "rsup":
        return 1
    events = subprocess.run([*RSUP, "events", JOB], env=place.environment, capture_output=True, text=True)
    return events.stdout.count("warm standbys are ready")


def _times(folder: Path, what: str) -> dict[int, list[float]]:
    """Moments of that kind by entry."""
    return _read(folder, what)


def _read(folder: Path, what: str) -> dict[int, list[Any]]:
    """What the ranks noted of that kind, by entry."""
    found: dict[int, list[Any]] = {}
    for path in folder.glob("times-*"):
        for line in path.read_text().splitlines():
            kind, entry, value = json.loads(line)
            if kind == what and value:
                found.setdefault(entry, []).append(value)
    return found


def _samples(folder: Path, restarts: int, active: int) -> tuple[list[float], list[float]]:
    faults, entered, stepped = (_times(folder, what) for what in ("fault", "enter", "first"))
    re_entry, first = [], []
    for entry in range(1, restarts + 1):
        if entry in faults and len(stepped.get(entry + 1, [])) >= active:
            re_entry.append(max(entered[entry + 1]) - faults[entry][0])
            first.append(max(stepped[entry + 1]) - faults[entry][0])
    return re_entry, first


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RESTARTS))
