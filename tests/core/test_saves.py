"""What the supervisor remembers of saves, and what it says of them in the job's story."""

import msgspec

from rsup.supervisor import wire
from rsup.supervisor.records import EventLogged
from rsup.supervisor.states import JobState, encode
from tests.core.job_driver import Driver, spec


def running() -> Driver:
    """A job of one node whose ranks have stepped."""
    driver = Driver(spec(policy=wire.RestartPolicy(max_restarts=3))).run_nodes("a")
    for iteration in (1, 2):
        driver.beat("a", iteration)
    return driver


def save(driver: Driver, iteration: int, stage: str, **fields: object) -> None:
    driver.say("a", wire.SaveSeen(driver.now().us, driver.state.attempt, iteration, stage, **fields))  # type: ignore[arg-type]


def told(driver: Driver, kind: str) -> list[EventLogged]:
    return [event for event in driver.events() if event.kind == kind]


def test_a_save_is_under_way_until_it_is_durable_or_has_failed() -> None:
    driver = running()
    save(driver, 5, "begun", stall_s=0.25)
    assert driver.state.saves.under_way == {5: driver.now().us}
    driver.now_s += 2
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 5, "/c/5", 2.0))
    assert not driver.state.saves.under_way and driver.state.saves.num_durable == 1
    assert driver.state.saves.durable is not None and driver.state.saves.durable.path == "/c/5"
    (committed,) = told(driver, "CheckpointCommitted")
    assert committed.data == {"iteration": 5, "path": "/c/5", "duration_s": 2.0}
    save(driver, 9, "begun", stall_s=0.5)
    save(driver, 9, "failed", text="cannot write /c/9:\n no space left", stall_s=1.25)
    saves = driver.state.saves
    assert not saves.under_way and saves.stall_us == {1: 2_000_000}
    assert saves.failed is not None and saves.failed.iteration == 9
    (failed,) = told(driver, "SaveFailed")
    assert failed.level == "warning" and failed.text == (
        "the save of iteration 9 has failed: cannot write /c/9: no space left; the newest durable one stays that of iteration 5"
    )
    (begun,) = told(driver, "SaveBegun")
    assert begun.text == "a save of iteration 5 has begun; training stood still for 0.2 s"


def test_frequent_local_checkpoints_do_not_flood_the_store() -> None:
    """One every quarter of a second costs a line a minute, and its state does not grow."""
    driver = running()
    sizes = []
    for iteration in range(10, 1010):
        driver.now_s += 0.25
        save(driver, iteration, "begun")
        save(driver, iteration, "local", path=f"/dev/shm/c/{iteration}", stall_s=0.001)
        sizes.append(len(encode(driver.state)))
    saves = driver.state.saves
    assert (saves.num_begun, saves.num_local, saves.stall_us) == (1000, 1000, {1: 1_000_000})
    assert saves.local is not None and (saves.local.iteration, saves.local.path) == (1009, "/dev/shm/c/1009")
    lines = told(driver, "SaveLocal")
    assert 4 <= len(lines) <= 6 and len(told(driver, "SaveBegun")) == len(lines)
    assert "(it can go with its node)" in lines[0].text and "(239 more of these since the last such line)" in lines[1].text
    assert driver.state.checkpoint == -1, "a local one is not durable"
    assert max(sizes[100:]) < sizes[100] + 60


def test_a_save_that_training_stood_still_for_counts_once_and_its_time_is_kept() -> None:
    """As a loop of one's own reports it: begun, durable, then how long it took; no line and no count for the last."""
    driver = running()
    save(driver, 5, "begun", path="/c/5")
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 5, "/c/5", 1.5))
    save(driver, 5, "stood", path="/c/5", stall_s=1.5)
    saves = driver.state.saves
    assert (saves.num_begun, saves.num_durable, saves.num_failed, saves.stall_us) == (1, 1, 0, {1: 1_500_000})
    assert not saves.under_way and driver.state.checkpoint == 5
    assert len(told(driver, "SaveBegun")) == len(told(driver, "CheckpointCommitted")) == 1


def test_a_save_dies_with_its_attempt() -> None:
    driver = running()
    save(driver, 5, "begun", stall_s=1.0)
    driver.exit("a", 0, 1)
    driver.gone("a")
    driver.wait(60)
    driver.start()
    save(driver, 6, "begun", stall_s=2.0)
    saves = driver.state.saves
    assert (saves.attempt, list(saves.under_way), saves.stall_us) == (2, [6], {1: 1_000_000, 2: 2_000_000})
    assert len(told(driver, "SaveBegun")) == 2, "each attempt's first one is told"


def test_saves_that_nobody_closes_and_broken_numbers_stay_small() -> None:
    driver = running()
    for iteration in range(100):
        save(driver, iteration, "begun", stall_s=(float("nan"), float("inf"), -5.0)[iteration % 3])
    save(driver, 7, "of a later release")
    saves = driver.state.saves
    assert list(saves.under_way) == list(range(92, 100)) and not saves.stall_us and saves.num_begun == 100


def test_the_state_of_an_older_release_has_no_saves() -> None:
    """A job that began under a release without them goes on."""
    driver = running()
    fields = msgspec.msgpack.decode(encode(driver.state))
    assert fields.pop("saves") is not None
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=JobState)
    driver.state = old
    save(driver, 5, "local")
    assert driver.state.saves.num_local == 1
