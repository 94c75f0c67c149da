"""What a job's status says from its machine's state: what it waits for, and where its ranks ended."""

from typing import Any

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import Record
from rsup.supervisor.database import DATABASE_NAME, reader_engine
from rsup.supervisor.events import AgentSilent
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.places import state_dir
from rsup.supervisor.records import BeatsSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import job_record
from rsup.supervisor.status_text import status_text
from rsup.supervisor.views import job_status
from tests.core.job_driver import KEY, Driver, spec

TWO = spec(min_nodes=2, max_nodes=2, join_timeout_s=600.0, policy=wire.RestartPolicy(max_restarts=3))


def status_of(store: SqlStore, driver: Driver, later_s: float = 0.0) -> dict[str, Any]:
    """The status `later_s` after the machine's last decision was kept."""
    rows = [action.record for action in driver.actions if isinstance(action, Record)]
    store.commit([job_record(driver.state, driver.now().us), *rows])
    engine = reader_engine(state_dir() / DATABASE_NAME)
    try:
        with engine.connect() as connection:
            found = find_job(connection, "t1")
            return job_status(connection, found, now_us=driver.now().us + int(later_s * 1e6))
    finally:
        engine.dispose()


def test_nodes_that_have_yet_to_join(store: SqlStore) -> None:
    driver = Driver(TWO)
    driver.join("a")
    status = status_of(store, driver, later_s=60.0)
    assert status["job"]["waiting_for"] == "nodes: 1 of 2 have joined, at most 9 min more"
    assert "waits for: nodes: 1 of 2 have joined" in status_text(status)


def test_a_node_that_does_not_answer_is_no_hang(store: SqlStore) -> None:
    driver = Driver(TWO).run_nodes("a", "b")
    assert status_of(store, driver)["job"]["waiting_for"] == ""
    driver.feed(AgentSilent("b", 16.0))
    status = status_of(store, driver, later_s=4.0)
    assert status["job"]["waiting_for"] == "nothing heard of node node-b for 20.0 s"
    driver.exit("a", 0, 1)
    driver.gone("a")
    waiting = status_of(store, driver)["job"]["waiting_for"]
    assert waiting == "the ranks of attempt 1 to end on node-b; nothing heard of node node-b for 16.0 s"


@pytest.mark.parametrize("exit_code", [0, 7])
def test_ranks_stand_where_they_ended_not_where_they_were_last_sampled(store: SqlStore, exit_code: int) -> None:
    driver = Driver(spec()).run_nodes("a")
    store.commit([job_record(driver.state, driver.now().us)])
    ranks: list[dict[str, object]] = [{"rank": rank, "iteration": 110, "beat_age_s": 0.1, "pid": 0} for rank in (0, 1)]
    store.commit([BeatsSaved(KEY, driver.now().us, ranks)])
    driver.exit("a", 0, exit_code, iteration=120)
    driver.exit("a", 1, 0, iteration=119)
    driver.gone("a")
    status = status_of(store, driver)
    assert status["job"]["state"] == "ended" and status["job"]["waiting_for"] == ""
    assert [rank["iteration"] for rank in status["ranks"]] == [120, 119]
