"""Questions about the history of 100,000 devices with 5 million pieces of evidence in a SQLite file: goal p99 <= 100 ms each.

`python -m tests.bench.bench_history --scale 0.05` tries it with a twentieth; `--file PATH` keeps the file for the next time.
"""

import argparse
import pickle
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine

from rsup.supervisor import hardware_views
from rsup.supervisor.common_devices import common_devices
from rsup.supervisor.contamination import touched
from rsup.supervisor.database import reader_engine
from rsup.supervisor.hardware import policy
from rsup.supervisor.hardware.hardware_rows import open_subjects
from rsup.supervisor.hardware_clusters import clusters
from rsup.supervisor.history_views import timeline
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.offenders import offenders
from rsup.supervisor.repair_times import expiring, history_stats
from rsup.supervisor.rule_replay import replay_policy
from rsup.supervisor.vendor_export import device_record
from tests.bench.history_fleet import BEGIN_US, DAY_US, END_US, Fleet, make_fleet
from tests.bench.table import Row, print_table

NUM_CALLS = 200
NUM_REPLAYS = 3
GOAL = "p99 <= 100 ms"

Ask = Callable[[Connection, random.Random], object]


def main(scale: float = 1.0, file: Path | None = None, num_calls: int = NUM_CALLS) -> list[Row]:
    """Make the fleet, ask every question of random subjects, each over a connection of its own as REST does."""
    with tempfile.TemporaryDirectory(prefix="rsup-bench-") as folder:
        started = time.perf_counter()
        fleet = _fleet(file or Path(folder, "rsup.db"), scale)
        made_s = time.perf_counter() - started
        size = f"{len(fleet.uuids)} devices, {fleet.num_evidence} evidence, {fleet.path.stat().st_size >> 20} MiB"
        engine = reader_engine(fleet.path)
        rows = [Row("making the history", "rsup, SQLite", [made_s], "s", note=size)]
        for what, ask in _questions(fleet).items():
            rows.append(_measured(engine, what, ask, num_calls))
            print(f"{what}: median {statistics.median(rows[-1].samples):.1f} ms", file=sys.stderr, flush=True)
        rows += [_replays(engine), *_loading(engine)]
        engine.dispose()
    return rows


def _fleet(path: Path, scale: float) -> Fleet:
    kept = path.with_name(path.name + ".fleet")
    if kept.exists():
        found: Fleet = pickle.loads(kept.read_bytes())
        return found
    fleet = make_fleet(path, scale)
    kept.write_bytes(pickle.dumps(fleet))
    return fleet


def _questions(fleet: Fleet) -> dict[str, Ask]:
    def device(chance: random.Random) -> str:
        """One that people ask about: three of four are not clear."""
        return chance.choice(fleet.told if chance.random() < 0.75 else fleet.uuids)

    def then(chance: random.Random) -> int:
        return chance.randrange(BEGIN_US, END_US)

    def place(chance: random.Random) -> str:
        number = chance.randrange(len(fleet.uuids))
        return f"r{number // 64:03}-n{number // 8:05}:{16 + number % 8:02x}:00.0"

    def older(connection: Connection, chance: random.Random) -> object:
        cursor = f"{then(chance)}-0"
        return timeline(connection, device(chance), cursor=cursor)

    def failed(connection: Connection, chance: random.Random) -> object:
        jobs = [find_job(connection, f"j{number}") for number in chance.sample(fleet.failed, 3)]
        return common_devices(connection, jobs, now_us=END_US)

    def failed_since(connection: Connection, chance: random.Random) -> object:
        return common_devices(connection, failed_since_us=END_US - round(chance.uniform(2.1, 4) * DAY_US), now_us=END_US)

    return {
        "who is quarantined and why, first 100": lambda c, r: hardware_views.list_devices(c, state="quarantined", limit=100),
        "one device's page": lambda c, r: hardware_views.device_detail(c, device(r)),
        "everything about a UUID": lambda c, r: timeline(c, device(r)),
        "everything about a serial at a time": lambda c, r: timeline(c, f"165{r.randrange(len(fleet.uuids)):010}", then(r)),
        "everything about NODE:PCI at a time": lambda c, r: timeline(c, place(r), then(r)),
        "a later page of it": older,
        "everything about a node": lambda c, r: timeline(c, place(r).split(":")[0], kind="node"),
        "what a device touched": lambda c, r: touched(c, device(r)),
        "what it touched since a time": lambda c, r: touched(c, device(r), END_US - round(r.uniform(1, 60) * DAY_US)),
        "what 3 failed jobs have in common": failed,
        "what all of the last days have in common": failed_since,
        "repeat offenders and lemons of 30 days": lambda c, r: offenders(c, now_us=END_US),
        **{
            f"clusters by {by}": lambda c, r, by=by: clusters(c, by, now_us=END_US)  # type: ignore[misc]
            for by in ("vbios", "driver", "model", "node", "rack")
        },
        "what expires within a week": lambda c, r: expiring(c, now_us=END_US),
        "repair times and precision of 90 days": lambda c, r: history_stats(c, now_us=END_US),
        "record for the vendor": lambda c, r: device_record(c, device(r), now_us=END_US),
    }


def _measured(engine: Engine, what: str, ask: Ask, num_calls: int) -> Row:
    """Wall time of each call; the note has what of it was this process's, which other work on the machine does not change."""
    chance, samples, own = random.Random(what), [], []
    for number in range(num_calls + 5):
        started, own_started = time.perf_counter(), time.thread_time()
        with engine.connect() as connection:
            ask(connection, chance)
        if number >= 5:
            samples.append(1000 * (time.perf_counter() - started))
            own.append(1000 * (time.thread_time() - own_started))
    own_p99 = sorted(own)[int(len(own) * 0.99)]
    return Row(what, "rsup, SQLite", samples, "ms", GOAL, f"own CPU time: p99 {own_p99:.3g} ms")


def _replays(engine: Engine) -> Row:
    strict = policy.parse('[rules.xid-contained]\nfirst = "suspect"\n', "strict.toml")
    samples, told = [], {}
    for _ in range(NUM_REPLAYS):
        started = time.perf_counter()
        with engine.connect() as connection:
            told = replay_policy(connection, strict, now_us=END_US)
        samples.append(time.perf_counter() - started)
    return Row("replay of 30 days with another policy", "rsup, SQLite", samples, "s", note=f"{told['num_evidence']} evidence")


def _loading(engine: Engine) -> list[Row]:
    """What the supervisor's book holds: every subject that is not clear."""
    samples, kept = [], []
    for number in range(11):
        if number == 10:
            tracemalloc.start()  # slows the last one down, which is not counted
        started = time.perf_counter()
        with engine.connect() as connection:
            kept = open_subjects(connection)
        samples.append(1000 * (time.perf_counter() - started))
    size_mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    note = f"{len(kept)} subjects, {size_mib:.1f} MiB"
    return [Row("load all that is not clear (the book)", "rsup, SQLite", samples[:-1], "ms", note=note)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--file", type=Path, default=None)
    parser.add_argument("--calls", type=int, default=NUM_CALLS)
    options = parser.parse_args()
    print_table(main(options.scale, options.file, options.calls))
