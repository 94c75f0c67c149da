"""One supervisor and many nodes: 2,048 simulated agents with 16,384 ranks, on SQLite and on PostgreSQL.

`python -m tests.bench.bench_fleet [--agents 2048] [--seconds 300] [--database-url URL | --only sqlite|postgres]`. Without a
URL a PostgreSQL server is started on the local disk with its safe defaults (fsync on). Goals: nothing lost, nothing refused,
nobody called lost but the one agent that falls silent.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import func, select

from rsup.supervisor import tables
from rsup.supervisor.database import reader_engine
from tests.bench.table import Row, print_table
from tests.process.two_supervisors import Serving
from tests.store.postgres_server import started_server

NODES_PER_JOB = 32
REST_EVERY_S = 0.5
PATHS = ("/api/v1/jobs?limit=100", "/api/v1/jobs/fleet-1-0", "/api/v1/devices?limit=100")
GOAL_REST = "<= 100 ms p99"


@contextlib.contextmanager
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as folder:
        (Path(folder) / "run").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = f"{folder}/run"
        yield Path(folder)


def one_run(folder: Path, url: str, name: str, num_agents: int, seconds: float) -> list[Row]:
    """Rows of one supervisor on that database."""
    key = folder / "key"
    key.write_text("a secret of the benchmark's fleet")
    key.chmod(0o600)
    serving = Serving(folder / name, url or f"sqlite:///{folder}/{name}.db", key)
    try:
        serving.leads().ask("/healthz")  # REST's libraries are loaded when somebody first asks
        arguments = [serving.rpc, str(key), str(num_agents), str(min(NODES_PER_JOB, num_agents)), str(seconds), "1"]
        answer = folder / f"{name}.json"  # no pipe, which nobody would read before the fleet has ended: it may be long
        with answer.open("wb") as file:
            fleet = subprocess.Popen([sys.executable, "-m", "tests.bench.fleet_agents", *arguments], stdout=file)
        asked, late_ms, peak_mib, cpu = watch(serving, fleet)
        told = json.loads(answer.read_bytes())
        stored = stored_events(url or f"sqlite:///{folder}/{name}.db")
        lost = told["exits_told"] - stored.get("RankExited", 0)
        called_lost = stored_losses(url or f"sqlite:///{folder}/{name}.db")
    finally:
        serving.end()
    what = f"{num_agents} agents, {8 * num_agents} ranks"
    wrongly = sum(node != told["silent_node"] for node, _ in called_lost)
    counts = f"{told['facts_told']} facts: {told['unacknowledged']} not acknowledged, {lost} exits lost"
    counts += f", {len(told['refused'])} refused; {wrongly} live agents called lost"
    counts += f", {stored.get('StartAbandoned', 0)} starts given up"
    found_s = [(at_us - told["silent_us"]) / 1e6 for node, at_us in called_lost if node == told["silent_node"]]
    detections_ms = [1000 * s for s in told["detections_s"]]
    return [
        Row(f"{what}: death to stop order, per agent", name, detections_ms, "ms", "", counts),
        Row(f"{what}: silence to its line in the story (15 s is the rule)", name, found_s, "s"),
        *rest_rows(what, name, asked, told["ready_at_s"] or float("inf")),
        Row(f"{what}: this program slept too long by", name, late_ms, "ms", "", "the machine; it is in REST's times too"),
        Row(f"{what}: memory of the supervisor", name, [peak_mib], "MiB"),
        Row(
            f"{what}: processor of the supervisor", name, [cpu], "% of a core", "", f"all started after {told['ready_s']:.1f} s"
        ),
    ]


@dataclass(frozen=True)
class Asked:
    """A REST request: when it was sent (monotonic), and how long the whole answer took."""

    at_s: float
    path: str
    took_ms: float


def rest_rows(what: str, name: str, asked: list[Asked], ready_at_s: float) -> list[Row]:
    """While agents join, each a transaction of its own, and afterwards. Notes: p50 and p99 of each path."""
    rows = []
    for when, goal, some in (
        ("while agents join", "", [one for one in asked if one.at_s < ready_at_s]),
        ("all have started", GOAL_REST, [one for one in asked if one.at_s >= ready_at_s]),
    ):
        by_path = {path: sorted(one.took_ms for one in some if one.path == path) or [0.0] for path in PATHS}
        note = "; ".join(f"{path} {ms[len(ms) // 2]:.0f}, {ms[int(len(ms) * 0.99)]:.0f}" for path, ms in by_path.items())
        rows.append(Row(f"{what}: REST, {when}", name, [one.took_ms for one in some], "ms", goal, note))
    return rows


def watch(serving: Serving, fleet: "subprocess.Popen[bytes]") -> tuple[list[Asked], list[float], float, float]:
    """REST requests, how much later than asked for this program was woken (ms), the supervisor's peak memory in MiB and mean
    processor use in %, until the fleet ends."""
    supervisor = psutil.Process(serving.process.pid)
    token = (serving.state / "token").read_text().strip()
    asked, late_ms, peak, began_s = list[Asked](), list[float](), 0.0, time.monotonic()
    while fleet.poll() is None:
        slept_s = time.monotonic()
        time.sleep(REST_EVERY_S)
        late_ms.append(1e3 * (time.monotonic() - slept_s - REST_EVERY_S))
        peak = max(peak, supervisor.memory_info().rss / 2**20)
        path = PATHS[len(late_ms) % len(PATHS)]
        at_s = time.monotonic()
        request = urllib.request.Request(serving.rest + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()
            asked.append(Asked(at_s, path, 1e3 * (time.monotonic() - at_s)))
        except urllib.error.HTTPError as error:  # no job has joined yet
            error.close()
    times = supervisor.cpu_times()
    return asked, late_ms, peak, 100 * (times.user + times.system) / (time.monotonic() - began_s)


def stored_events(url: str) -> dict[str, int]:
    """How many of each kind."""
    engine = reader_engine(url)
    with engine.connect() as connection:
        kinds = connection.execute(select(tables.events.c.kind, func.count()).group_by(tables.events.c.kind))
        found = {str(kind): int(number) for kind, number in kinds}
    engine.dispose()
    return found


def stored_losses(url: str) -> list[tuple[str, int]]:
    """Nodes that were called lost, and when (UTC microseconds)."""
    engine = reader_engine(url)
    with engine.connect() as connection:
        events = tables.events.c
        found = connection.execute(select(events.node, events.recorded_us).where(events.kind == "AgentLost"))
        losses = [(str(node), int(at_us)) for node, at_us in found]
    engine.dispose()
    return losses


def main(argv: list[str] | None = None) -> list[Row]:
    """Both databases, or the one that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--database-url", default="")
    parser.add_argument("--only", choices=("sqlite", "postgres"), default="")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    if options.only != "postgres" and not options.database_url:
        with place() as folder:
            rows += one_run(folder, "", "sqlite", options.agents, options.seconds)
    if options.only != "sqlite":
        with place() as folder, contextlib.closing(started_server(fsync=True)) as servers:
            url = options.database_url or next(servers).new_database()
            rows += one_run(folder, url, "postgres", options.agents, options.seconds)
    return rows


if __name__ == "__main__":
    print_table(main())
