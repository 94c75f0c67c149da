"""What failed jobs have in common: the statistic alone, and over a store."""

import math
import random
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from rsup.supervisor.common_devices import common_devices
from rsup.supervisor.database import reader_engine
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.rate_ratio import log_bayes_factor, probabilities, rate_ratio
from rsup.supervisor.records import Record
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.wire import UsageError
from tests.rest.history_story import HOUR, at, attempt, case, device, job, key

FLEET = [f"GPU-{number:04}-0000" for number in range(40)]
NOW = 1000 * HOUR


# --------------------------------------------------------------------------------------------------------- the statistic


def test_ten_times_the_use_explains_ten_times_the_failures() -> None:
    share = 1 / 800  # of 100 failures of 8 devices each one is expected with it
    little, much = log_bayes_factor([8], 100, share), log_bayes_factor([8] * 10, 100, 10 * share)
    assert little < 0.2 and much < 0.2
    assert log_bayes_factor([8] * 10, 100, share) > 5
    assert rate_ratio(10, 10.0).ratio == rate_ratio(1, 1.0).ratio == 1.0


def test_use_without_failures_clears() -> None:
    assert log_bayes_factor([], 20, 0.2) < log_bayes_factor([], 20, 0.02) < 0
    assert rate_ratio(0, 9.0).ratio == 0.1 and rate_ratio(0, 9.0).above_one < 0.001


@pytest.mark.parametrize(("failures", "expected"), [(0, 0.0), (3, 0.1), (5, 5.0), (40, 800.0), (0, 1e6)])
def test_the_posterior_probability_is_the_integral(failures: int, expected: float) -> None:
    found = rate_ratio(failures, expected)
    if expected > 100:
        assert found.above_one < 1e-6
        return
    rate, step = 1 + expected, 0.001
    density = [(x * step) ** failures * math.exp(-rate * x * step) for x in range(1, 60_000)]
    assert found.above_one == pytest.approx(sum(density[999:]) / sum(density), abs=0.01)


def test_a_larger_fleet_makes_coincidence_likelier() -> None:
    factor = math.log(1000.0)
    small, _ = probabilities([factor], 10)
    large, none = probabilities([factor], 100_000)
    assert small[0] > 0.9 > 0.1 > large[0] and none > 0.9
    assert probabilities([], 0) == ([], 1.0)


def test_nothing_overflows() -> None:
    found, none = probabilities([log_bayes_factor([1] * 500, 500, 1e-9), log_bayes_factor([], 500, 1.0)], 1_000_000)
    assert found[0] == pytest.approx(1.0) and 0 <= none < 1e-6 and found[1] == pytest.approx(0.0)


# ----------------------------------------------------------------------------------------------------------- over a store


@pytest.fixture
def connection(store: SqlStore) -> Iterator[Connection]:
    store.commit(
        [record for number, uuid in enumerate(FLEET) for record in device(uuid, 0, f"n{number // 8}", f"{number % 8:02}")]
    )
    engine = reader_engine(store.database)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def on(*numbers: int) -> list[str]:
    return [f"{FLEET[number]}@n{number // 8}" for number in numbers]


def run(name: str, begin: float, hours: float, devices: list[str], outcome: str) -> list[Record]:
    end = begin + hours * HOUR
    return [job(key(name), begin, end), *attempt(key(name), 1, begin, end, devices, outcome)]


def played(seed: int, bad: int, busy: int) -> list[Record]:
    """60 jobs of 6 devices with `busy` in every second one; a job with `bad` fails, and every tenth other one too."""
    chance, records = random.Random(seed), list[Record]()
    for number in range(60):
        members = chance.sample([n for n in range(40) if n != busy], 6)
        if number % 2 == 0:
            members[0] = busy if bad not in members[:1] else members[0]
        failed = bad in members or chance.random() < 0.1
        records += run(f"j{number}", number * 10 * HOUR, 8.0, on(*members), "failed" if failed else "succeeded")
    return records


@pytest.mark.parametrize("seed", range(6))
def test_the_bad_device_is_found_and_the_busy_one_is_not(store: SqlStore, connection: Connection, seed: int) -> None:
    """A device with several times the exposure must not look several times worse."""
    bad, busy = 17, 3
    store.commit(played(seed, bad, busy))
    found = common_devices(connection, failed_since_us=at(-1), now_us=at(NOW), limit=40)
    rows = {row["device"]: row for row in found["devices"]}
    first, second = found["devices"][:2]
    assert first["device"] == FLEET[bad] and first["probability"] > 3 * second["probability"]
    assert rows[FLEET[busy]]["exposure_hours"] > 2 * rows[FLEET[bad]]["exposure_hours"]
    assert rows[FLEET[busy]]["probability"] < 0.02 and rows[FLEET[bad]]["ratio"] > 2 * rows[FLEET[busy]]["ratio"]
    total = sum(row["probability"] for row in (*found["devices"], *found["nodes"])) + found["none"]
    assert 0.95 < total <= 1.0 + 1e-9


def test_what_is_nearly_sure_is_to_be_tested(store: SqlStore, connection: Connection) -> None:
    for number in range(5):
        others = [n for n in range(number * 7, number * 7 + 8) if n != 39][:5]
        store.commit(run(f"f{number}", number * 10 * HOUR, 4.0, on(39, *others), "failed"))
    store.commit([r for n in range(30) for r in run(f"s{n}", n * 10 * HOUR, 9.0, on(*range(n % 30, n % 30 + 6)), "succeeded")])
    jobs = [find_job(connection, f"f{number}") for number in range(5)]
    found = common_devices(connection, jobs, now_us=at(NOW))
    assert found["devices"][0]["device"] == FLEET[39] and found["devices"][0]["failures"] == 5
    step = found["experiment"]
    assert (step["do"], step["devices"], step["hours"]) == ("test", [FLEET[39]], 12.0)
    assert f"rsup devices test {FLEET[39]}" in step["text"]


def test_doubt_is_split_in_halves(store: SqlStore, connection: Connection) -> None:
    for number in range(6):
        store.commit(run(f"f{number}", number * 10 * HOUR, 4.0, on(1, 9, 17, 25), "failed"))
    store.commit([r for n in range(60) for r in run(f"s{n}", n * 10 * HOUR, 9.0, on(2, 10, 18, 26, 33, 34), "succeeded")])
    found = common_devices(connection, failed_since_us=at(-1), now_us=at(NOW))
    step = found["experiment"]
    assert step["do"] == "split" and 1 <= len(step["devices"]) + len(step["nodes"]) <= 4
    assert "if it fails within 12 h the culprit is among them" in step["text"]


def test_one_failure_accuses_nobody(store: SqlStore, connection: Connection) -> None:
    store.commit(run("f", 0, 4.0, on(1, 2, 3, 4), "hung"))
    store.commit([r for n in range(60) for r in run(f"s{n}", n * 10 * HOUR, 9.0, on(*range(n % 30, n % 30 + 6)), "succeeded")])
    found = common_devices(connection, failed_since_us=at(-1), now_us=at(NOW))
    assert len(found["failures"]) == 1 and found["none"] > 0.4
    assert all(row["probability"] < 0.2 for row in found["devices"])


def test_a_program_that_crashes_a_hundred_times_counts_once(store: SqlStore, connection: Connection) -> None:
    records: list[Record] = [job(key("loop"), 0, 100 * HOUR)]
    for number in range(1, 101):
        records += attempt(key("loop"), number, number * HOUR / 2, (number + 0.5) * HOUR / 2, on(1, 2, 3, 4), "failed")
    store.commit(records)
    found = common_devices(connection, [find_job(connection, "loop")], now_us=at(NOW))
    assert len(found["failures"]) == 1 and found["devices"][0]["failures"] == 1


def test_failures_of_the_application_are_left_out_unless_named(store: SqlStore, connection: Connection) -> None:
    store.commit([*run("app", 0, 4.0, on(1, 2), "failed"), case(key("app"), 1, 3, 10, FLEET[1], verdict="application")])
    assert common_devices(connection, failed_since_us=at(-1), now_us=at(NOW))["failures"] == []
    assert common_devices(connection, [find_job(connection, "app")], now_us=at(NOW))["failures"]


def test_a_node_explains_what_its_devices_share(store: SqlStore, connection: Connection) -> None:
    for number in range(8):
        store.commit(run(f"f{number}", number * 10 * HOUR, 4.0, on(16 + number, number), "failed"))
    store.commit(
        [r for n in range(60) for r in run(f"s{n}", n * 10 * HOUR, 9.0, on(n % 8, 8 + n % 8, 24 + n % 8), "succeeded")]
    )
    found = common_devices(connection, failed_since_us=at(-1), now_us=at(NOW))
    assert found["nodes"][0]["node"] == "n2" and found["nodes"][0]["failures"] == 8
    assert found["nodes"][0]["probability"] > 0.9 > 0.05 > found["devices"][0]["probability"]
    assert (found["experiment"]["do"], found["experiment"]["nodes"]) == ("test", ["n2"])


def test_a_job_that_did_not_fail_is_wrong_usage(store: SqlStore, connection: Connection) -> None:
    store.commit(run("fine", 0, 4.0, on(1, 2), "succeeded"))
    with pytest.raises(UsageError, match="job fine has no failed attempt"):
        common_devices(connection, [find_job(connection, "fine")], now_us=at(NOW))


def test_no_failures_at_all(connection: Connection) -> None:
    found = common_devices(connection, failed_since_us=at(0), now_us=at(NOW))
    assert found["none"] == 1.0 and found["experiment"]["do"] == "nothing"
