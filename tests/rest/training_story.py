"""A job that the real machine decides about, told second by second: saves, an in-process restart, work at risk."""

from rsup.supervisor import wire
from rsup.supervisor.actions import Record as RecordAction
from rsup.supervisor.records import Record
from rsup.supervisor.states import job_record
from tests.core.in_process_driver import InProcessDriver
from tests.core.job_driver import START_US, info, spec

BEGIN_S = 100.0


def at_us(second: float, begin_s: float = BEGIN_S) -> int:
    """The moment so many seconds after the job's begin."""
    return START_US + round((begin_s + second) * 1e6)


def training_job(begin_s: float = BEGIN_S) -> InProcessDriver:
    """At second 100: iteration 45, durable up to 20, local up to 40, a save of 42 under way since second 97.

    Three ranks enter at 8 and step at 10, one iteration a second. At 50 (iteration 40) rank 1 fails; all are in again at 51,
    go on from 20, and have stepped at 53. Saves have stalled training for 3 s.
    """
    policy = wire.RestartPolicy(max_restarts=2)
    driver = InProcessDriver(spec(policy=policy, ranks_per_node=3), now_s=begin_s)
    driver.join("a", agent=info("a", num_ranks=3))
    driver.start()

    def go_to(second: float) -> None:
        driver.now_s = begin_s + second

    def save(iteration: int, stage: str, **fields: object) -> None:
        fact = wire.SaveSeen(driver.now().us, driver.state.attempt, iteration, stage, **fields)  # type: ignore[arg-type]
        driver.say("a", fact)

    go_to(8)
    driver.enter_all(1)
    go_to(10)
    driver.beat_all(1)
    go_to(30)
    driver.beat_all(22)
    save(20, "begun", stall_s=2.0)
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 20, "/c/20", 1.5))
    go_to(45)
    save(36, "local", path="/dev/shm/c/36", stall_s=1.0)
    go_to(50)
    driver.beat_all(40)
    driver.fault(1, 1, text="ValueError: <b>a bug</b>", iteration=40)
    go_to(51)
    driver.enter_all(2)
    driver.say("a", wire.ResumedFrom(driver.now().us, 1, 20, "/c/20"))
    driver.beat_all(20)
    go_to(53)
    driver.beat_all(21)
    assert driver.state.in_process.open is None
    go_to(90)
    save(40, "local", path="/dev/shm/c/40")
    go_to(97)
    save(42, "begun")
    go_to(100)
    driver.beat_all(45)
    return driver


def records_of(driver: InProcessDriver) -> list[Record]:
    """All that the job has in a store."""
    made = [action.record for action in driver.actions if isinstance(action, RecordAction)]
    return [job_record(driver.state, driver.now().us), *made]
