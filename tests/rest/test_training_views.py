"""Where time went, what is saved and what is at risk, as each interface shows it."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rsup.supervisor import places, wire
from rsup.supervisor.database import DATABASE_NAME, reader_engine
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.records import JobSaved
from rsup.supervisor.report_story import incidents_section
from rsup.supervisor.report_text import report_text
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.status_text import status_text
from rsup.supervisor.training_text import at_risk_line
from rsup.supervisor.views import job_status
from tests.core.in_process_driver import InProcessDriver
from tests.core.job_driver import START_US
from tests.rest.played import Served
from tests.rest.test_page import CHROMIUM, dom_of, part, signed_in
from tests.rest.training_story import at_us, records_of, training_job


def status_at(second: float) -> dict[str, Any]:
    """The status of the job in the store, at that second of its story."""
    engine = reader_engine(places.state_dir() / DATABASE_NAME)
    with engine.connect() as connection:
        status = job_status(connection, find_job(connection, "t1"), now_us=at_us(second))
    engine.dispose()
    return status


def status_of(store: SqlStore, driver: InProcessDriver, second: float) -> dict[str, Any]:
    """The same, once all that the machine has written down is there."""
    store.commit(records_of(driver))
    return status_at(second)


def test_the_time_of_a_job_with_an_in_process_restart_is_told_part_by_part(store: SqlStore) -> None:
    goodput = status_of(store, training_job(), 100)["goodput"]
    # 87 s of iterations, 3 of them stalled; 65 were computed, of which 20 a second time
    moving = 100 - 10 - 3 - 3
    lost = moving * 20 / 65
    expected = {"startup": 10, "in_process_restart": 3, "checkpoint": 3, "lost": lost, "productive": moving - lost}
    assert {name: s for name, s in goodput["parts"].items() if s} == pytest.approx(expected, abs=2e-6)
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"]) and goodput["wall_s"] == 100
    assert goodput["ratio"] == pytest.approx((moving - lost) / 100) and goodput["iteration_s"] == pytest.approx(moving / 65)


def test_saves_and_work_at_risk(store: SqlStore) -> None:
    status = status_of(store, training_job(), 100)
    work = status["work"]
    assert work["at_risk"] == {"iterations": 25, "since_iteration": 20, "about_s": pytest.approx(25 * 84 / 65)}
    assert (work["durable"]["iteration"], work["durable"]["path"]) == (20, "/c/20")
    assert (work["local"]["iteration"], work["local"]["path"]) == (40, "/dev/shm/c/40")
    assert (work["saving"]["iteration"], work["saving"]["for_s"]) == (42, 3.0) and work["failed"] is None
    assert work["saves"] == {"begun": 2, "durable": 1, "local": 2, "failed": 0, "stall_s": 3.0}
    text = status_text(status)
    assert "newest local checkpoint: iteration 40" in text and "a save of iteration 42 has been under way for 3.0 s" in text
    assert "at risk: 25 iterations since iteration 20 (about 32.3 s of work)" in text
    assert "training that was kept" in text and "in all                    1 min 40 s  100.0 %" in text


def test_in_process_restarts_are_counted_and_the_last_one_is_told(store: SqlStore) -> None:
    status = status_of(store, training_job(), 100)
    told = status["in_process"]
    assert (told["restartable"], told["restarts"], told["restarts_in_all"], told["under_way"]) == (True, 1, 1, None)
    assert (told["last"]["rank"], told["last"]["took_s"], told["last"]["lost_iterations"]) == (1, 3.0, 20)
    assert status["attempts"][0]["in_process_restarts"] == 1 and status["attempts"][0]["last_iteration"] == 45
    assert [one["in_process"] for one in status["incidents"]] == [True]
    assert "in-process restarts: 1 in attempt 1; the last at" in status_text(status)
    assert "took 3.0 s, 20 iterations done again: rank 1 on node-a left entry 1" in status_text(status)
    assert "In-process restarts: 1 in attempt 1" in report_text(status)


def test_a_restart_under_way_takes_its_time_until_now(store: SqlStore) -> None:
    driver = training_job()
    driver.fault(2, 2, text="ValueError: another", iteration=45)
    status = status_of(store, driver, 110)
    assert status["goodput"]["parts"]["in_process_restart"] == pytest.approx(13)
    assert status["in_process"]["under_way"]["why"].endswith("ValueError: another")
    assert "an in-process restart is under way since" in status_text(status)


def test_a_failed_save_is_shown_until_a_later_one_is_durable(store: SqlStore) -> None:
    driver = training_job()
    driver.say("a", wire.SaveSeen(driver.now().us, 1, 42, "failed", text="no space left\nin /c"))
    status = status_of(store, driver, 101)
    assert status["work"]["failed"]["text"] == "no space left in /c" and status["work"]["saving"] is None
    assert "the save of iteration 42 failed at" in status_text(status)
    driver.now_s += 5
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 46, "/c/46", 1.0))
    status = status_of(store, driver, 106)
    assert status["work"]["failed"] is None and status["work"]["at_risk"]["iterations"] == 0
    assert "at risk: nothing, all is saved" in status_text(status)


def test_why_the_ranks_left_and_that_nothing_is_at_risk_any_more(store: SqlStore) -> None:
    driver = training_job()
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 45, "/c/45", 1.0))
    driver.say("a", wire.RankLeaves(driver.now().us, 1, 45, "duration", "--exit-duration-in-mins 2 is over", True))
    for rank in range(3):
        driver.exit("a", rank, 0)
    status = status_of(store, driver, 101)
    assert status["job"]["outcome"] == "succeeded" and status["work"]["at_risk"] is None
    assert (status["left"]["kind"], status["left"]["iteration"], status["left"]["durable"]) == ("duration", 45, True)
    text = status_text(status)
    assert "the ranks left on purpose after iteration 45, after a durable save: --exit-duration-in-mins 2 is over" in text
    status["left"] |= {"kind": "finished", "reason": "all 45 iterations are done"}
    assert "training is finished, after a durable save: all 45 iterations are done" in status_text(status)
    risk = {"iterations": 0, "since_iteration": 0, "about_s": None}
    fresh = {**status, "job": {**status["job"], "ended": None}, "work": {**status["work"], "at_risk": risk, "durable": None}}
    assert at_risk_line(fresh).startswith("at risk: nothing yet; no iteration is saved"), "a restart without a checkpoint"
    assert "all is saved" not in report_text(fresh)
    fresh["job"]["ended"] = "then"
    assert at_risk_line(fresh) == "not saved: anything of what was done up to iteration 45"


def test_what_went_wrong_beside_incidents_is_told(store: SqlStore) -> None:
    driver = training_job()
    status = status_of(store, driver, 100)
    status |= {"incidents": [], "cases": []}
    assert "Nothing went wrong that rsup noticed." in report_text(status)
    text = "rank 1 (CPU-8c7e-1, node-a) 15.9x slower in forward-compute"
    slow = {"attempt": 1, "first_iteration": 481, "last_iteration": 800, "goes_on": False, "device": "CPU-8c7e-1", "cause": ""}
    status["stragglers"] = {"episodes": [{**slow, "text": text}], "num_episodes": 3}
    told = report_text(status)
    assert "Nothing went wrong" not in told and "Slow ranks: 3 episodes, the newest 1:" in told
    assert "  attempt 1, iterations 481 to 800: rank 1 (CPU, node-a) 15.9x slower" in told
    assert "no incident<" in incidents_section(status)
    status["stragglers"] = {"episodes": [], "num_episodes": 0}
    assert "nothing went wrong" in incidents_section(status)
    status["work"]["saves"] |= {"failed": 2}
    assert "2 failed saves" in report_text(status) and "Nothing went wrong" not in report_text(status)
    assert "at risk" not in text and "not saved" not in text


def test_a_job_that_failed_says_what_was_not_saved(store: SqlStore) -> None:
    driver = training_job()
    driver.exit("a", 0, 17, declared=17, declared_reason="no")
    driver.gone("a")
    status = status_of(store, driver, 100)
    assert status["job"]["outcome"] == "failed"
    assert "not saved: 25 iterations since iteration 20" in status_text(status)
    assert "Not saved: 25 iterations" in report_text(status)


def test_an_older_releases_job_shows_what_its_rows_tell(store: SqlStore) -> None:
    """Its state cannot be read or knows nothing of saves: unknown is null, and the rest is told."""
    records = records_of(training_job())
    store.commit(
        [replace(one, state=b"s", phase="ended", exit_code=1) if isinstance(one, JobSaved) else one for one in records]
    )
    status = status_at(100)
    assert status["goodput"]["parts"]["checkpoint"] is None and status["left"] is None
    assert (status["work"]["local"], status["work"]["saving"], status["work"]["saves"]) == (None, None, None)
    assert status["work"]["durable"]["iteration"] == 20 and status["in_process"]["restartable"] is None
    assert "last checkpoint: iteration 20" in status_text(status)


def recently() -> InProcessDriver:
    """The job as it stands now."""
    return training_job(time.time() - 100 - START_US / 1e6)


def sample(text: str, name: str, *labels: str) -> float:
    """The value of the one series of that name that has these labels."""
    (line,) = [one for one in text.splitlines() if one.startswith(name + "{") and all(label in one for label in labels)]
    return float(line.rpartition(" ")[2])


def test_metrics_tell_the_same_to_who_may_read_the_job(store: SqlStore, serve: Callable[[], Served]) -> None:
    store.commit(records_of(recently()))
    served = serve()
    text = served.client().get("/metrics").text
    assert sample(text, "rsup_job_goodput_seconds", 'id="t1"', 'run="1"', 'part="in_process_restart"') == pytest.approx(3)
    assert sample(text, "rsup_job_goodput_seconds", 'part="checkpoint"') == 3
    assert 0.4 < sample(text, "rsup_job_goodput_ratio") < 0.6
    assert sample(text, "rsup_job_at_risk_iterations", 'owner="alice"') == 25 and sample(text, "rsup_job_at_risk_seconds") > 25
    assert sample(text, "rsup_job_checkpoint_iteration") == 20 and sample(text, "rsup_job_local_checkpoint_iteration") == 40
    assert sample(text, "rsup_job_in_process_restarts") == 1 and sample(text, "rsup_job_saves_failed") == 0
    assert sample(text, "rsup_job_save_seconds") >= 3
    others = served.client("user").get("/metrics").text
    assert "rsup_job_goodput" not in others and "rsup_job_at_risk" not in others and "rsup_jobs" in others


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_page_shows_where_the_time_went(store: SqlStore, serve: Callable[[], Served], own_directories: Path) -> None:
    store.commit(records_of(recently()))
    dom = dom_of(signed_in(serve(), job="t1"), own_directories, "--virtual-time-budget=4000")
    shown = dict(re.findall(r"<b>([^<]*)</b><span>([^<]*)</span>", part(dom, "time")))
    assert shown["in-process restarts"] == "3.0 s" and shown["start-up"] == "10.0 s" and "work done again" in shown
    assert len(re.findall(r'<i class="part-', part(dom, "time-bar").split("</div>", 1)[0])) == len(shown)
    work = part(dom, "work")
    assert "newest local checkpoint: iteration 40" in work and "a save of iteration 42 has been under way" in work
    assert "in-process restarts: 1 in attempt 1" in work and "&lt;b&gt;a bug&lt;/b&gt;" in work
    assert re.search(r"<dt>iterations at risk</dt><dd>25 <small>≈ \d", part(dom, "facts"))
