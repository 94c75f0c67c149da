"""The real supervisor loop under simulated clocks, networks, agents and crashes, a world for each seed.

RSUP_SEED=123 pytest tests/simulation         one seed, with its story
RSUP_SEEDS=5000 pytest tests/simulation       more seeds
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.sql_store import SqlStore
from tests.simulation.sim_scenario import Scenario

ONE_SEED = os.environ.get("RSUP_SEED", "")  # read before the fixtures clean the environment
NUM_SEEDS = int(os.environ.get("RSUP_SEEDS", "1000"))
SEEDS_A_TEST = 50
EVERY_NTH_IN_SQLITE = 25


def run_seed(seed: int, folder: Path) -> None:
    """One world; an assertion names the seed and how to see it again."""
    sqlite = seed % EVERY_NTH_IN_SQLITE == 0
    holder = LeaseHolder.this_process(f"simulation-{seed}")
    store = SqlStore.open(folder / f"{seed}.db", holder=holder, alone_may_migrate=True) if sqlite else MemoryStore()
    scenario = Scenario(seed, store)
    try:
        scenario.run()
    except Exception as error:
        story = [f"{e.number} {e.kind}: {e.text}" for events in scenario.world.watcher.events.values() for e in events]
        print("\n".join(story))
        raise AssertionError(f"seed {seed}: {error}\n  again: RSUP_SEED={seed} pytest tests/simulation") from error
    finally:
        store.close()
    if ONE_SEED:
        for events in scenario.world.watcher.events.values():
            print("\n".join(f"{e.number} {e.at_us / 1e6 % 10000:.2f} {e.kind}: {e.text}" for e in events))


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder for databases, in memory where there is some: the simulation is about logic, not about fsync."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="rsup-sim-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("first", range(0, 1 if ONE_SEED else NUM_SEEDS, SEEDS_A_TEST))
def test_every_job_ends_and_nothing_is_lost(first: int, disk: Path) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        run_seed(int(ONE_SEED or seed), disk)
        if ONE_SEED:
            return
