"""Phases of a job: which one an attempt is in, when the next follows and what that costs; and the file that describes them."""

import json
from pathlib import Path

import pytest

from rsup.launcher.launch_options import LaunchOptions, job_spec, rank_command
from rsup.launcher.launch_parser import parse_launch
from rsup.launcher.phases_option import LaunchPhase
from rsup.launcher.rank_environment import SessionPlaces, rank_environment
from rsup.supervisor import wire
from rsup.supervisor.phases import phase_at
from rsup.supervisor.rendezvous import resumed_job
from rsup.supervisor.states import Phase
from tests.core.job_driver import Driver, spec

PHASES = [wire.PhaseSpec(8, "web"), wire.PhaseSpec(14), wire.PhaseSpec()]


def leave(driver: Driver, iteration: int, kind: str = "phase", *, durable: bool = True, samples: int = 0) -> None:
    """The ranks of node a save, leave after `iteration` for a reason of that kind, and are gone."""
    attempt, at_us = driver.state.attempt, driver.now().us
    if durable:
        driver.say("a", wire.CheckpointCommitted(at_us, attempt, iteration, f"/c/{iteration}", 2.5))
    driver.say("a", wire.RankLeaves(at_us, attempt, iteration, kind, "why", durable, samples))
    for rank in (0, 1):
        driver.exit("a", rank, 0)
    driver.gone("a")


def started(driver: Driver) -> wire.StartAttempt:
    """The order of the current attempt."""
    orders = [c for c in driver.state.agents["a"].outbox if isinstance(c, wire.StartAttempt)]
    return orders[-1]


def phase(driver: Driver) -> wire.PhaseStart:
    found = started(driver).phase
    assert found is not None
    return found


@pytest.mark.parametrize(("iteration", "number"), [(0, 0), (7, 0), (8, 1), (13, 1), (14, 2), (10**9, 2)])
def test_the_phase_follows_from_the_iteration(iteration: int, number: int) -> None:
    assert phase_at(PHASES, iteration) == number


def test_three_phases_cost_no_restart() -> None:
    driver = Driver(spec(phases=PHASES)).run_nodes("a")
    assert phase(driver) == wire.PhaseStart(0, 3, "web", 0, 0, 8)
    leave(driver, 8, samples=64)
    assert driver.state.phase is Phase.STARTING
    driver.start()
    assert phase(driver) == wire.PhaseStart(1, 3, "", 8, 64, 14)
    assert started(driver).save_s == 2.5 and started(driver).restarts_spent == 0
    leave(driver, 14, samples=112)
    driver.start()
    assert phase(driver) == wire.PhaseStart(2, 3, "", 14, 112, 0)
    leave(driver, 20, "finished", samples=160)
    assert driver.state.result and driver.state.result.exit_code == 0
    assert (driver.state.attempt, driver.state.budget.restarts, driver.state.free_restarts) == (3, 0, 2)
    assert not driver.state.num_incidents


def test_a_failure_within_a_phase_comes_back_to_that_phase_and_costs_a_restart() -> None:
    driver = Driver(spec(phases=PHASES, policy=wire.RestartPolicy(max_restarts=1))).run_nodes("a")
    leave(driver, 8, samples=64)
    driver.start()
    driver.exit("a", 0, 1, error="ValueError: no")
    driver.exit("a", 1, 143, signal=15, by_us="told to")
    driver.gone("a")
    driver.start()
    assert phase(driver) == wire.PhaseStart(1, 3, "", 8, 64, 14) and driver.state.budget.restarts == 1


def test_a_crash_right_after_the_last_save_of_a_phase_begins_the_next_one() -> None:
    """The ranks did not live to say that they leave: the supervisor then does not know the samples, the checkpoint does."""
    driver = Driver(spec(phases=PHASES, policy=wire.RestartPolicy(max_restarts=1))).run_nodes("a")
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 8, "/c/8", 0.1))
    driver.exit("a", 0, 137, signal=9)
    driver.exit("a", 1, 143, signal=15, by_us="told to")
    driver.gone("a")
    driver.start()
    assert phase(driver) == wire.PhaseStart(1, 3, "", 8, -1, 14)


def test_ranks_that_find_an_older_checkpoint_go_back_a_phase() -> None:
    driver = Driver(spec(phases=PHASES)).run_nodes("a")
    leave(driver, 8, samples=64)
    driver.start()
    driver.say("a", wire.ResumedFrom(driver.now().us, 2, 5, "/c/5"))
    driver.say("a", wire.RankLeaves(driver.now().us, 2, 5, "phase", "", True, 40))
    for rank in (0, 1):
        driver.exit("a", rank, 0)
    driver.gone("a")
    driver.start()
    assert phase(driver).number == 0 and driver.state.free_restarts == 2


def test_ranks_that_never_get_further_end_the_job() -> None:
    driver = Driver(spec(phases=PHASES)).run_nodes("a")
    for iteration in (8, 5, 8, 5, 8, 5, 8, 5):
        if driver.state.phase is Phase.ENDED:
            break
        driver.say("a", wire.RankLeaves(driver.now().us, driver.state.attempt, iteration, "phase", "", True))
        for rank in (0, 1):
            driver.exit("a", rank, 0)
        driver.gone("a")
        if driver.state.phase is Phase.STARTING:
            driver.start()
    assert driver.state.result and driver.state.result.exit_code == wire.EXIT_NO_REQUEUE
    assert "get no further" in driver.state.result.reason


@pytest.mark.parametrize("kind", ["signal", "duration", "interval", "deadline", "request"])
def test_another_way_out_ends_the_job_and_its_resume_goes_on_in_the_right_phase(kind: str) -> None:
    driver = Driver(spec(phases=PHASES)).run_nodes("a")
    leave(driver, 8, kind, samples=64)
    assert driver.state.result and driver.state.result.exit_code == 0
    driver.state = resumed_job(driver.state, spec(phases=PHASES), driver.now())
    driver.run_nodes("b")
    orders = [c for c in driver.state.agents["b"].outbox if isinstance(c, wire.StartAttempt)]
    assert orders[-1].phase == wire.PhaseStart(1, 3, "", 8, 64, 14)


def test_a_stop_between_two_phases_stops_and_is_clean() -> None:
    driver = Driver(spec(phases=PHASES)).run_nodes("a")
    driver.say("a", wire.RankLeaves(driver.now().us, 1, 8, "phase", "", True, 64))
    for rank in (0, 1):
        driver.exit("a", rank, 0)
    assert driver.state.phase is Phase.STOPPING
    driver.say("a", wire.SignalReceived(driver.now().us, 15))
    driver.gone("a")
    assert driver.state.result and (driver.state.result.exit_code, driver.state.attempt) == (0, 1)


def test_a_durable_way_out_makes_a_stop_clean_also_where_its_save_is_older() -> None:
    """The checkpoint of this very iteration was durable before the signal came: nothing is saved again."""
    for durable, code in ((True, 0), (False, 143)):
        driver = Driver(spec()).run_nodes("a")
        driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 8, "/c/8", 0.1))
        driver.say("a", wire.SignalReceived(driver.now().us, 15))
        driver.say("a", wire.RankLeaves(driver.now().us, 1, 8, "signal", "signal SIGTERM", durable))
        for rank in (0, 1):
            driver.exit("a", rank, 0)
        driver.gone("a")
        assert driver.state.result and driver.state.result.exit_code == code


def test_without_phases_a_way_out_for_a_phase_ends_the_job() -> None:
    driver = Driver(spec()).run_nodes("a")
    leave(driver, 8)
    assert driver.state.result and driver.state.result.exit_code == 0 and driver.state.attempt == 1


def test_a_node_with_other_phases_is_refused() -> None:
    driver = Driver(spec(phases=PHASES, min_nodes=2, max_nodes=2))
    driver.join("a")
    driver.spec = spec(phases=PHASES[1:], min_nodes=2, max_nodes=2)
    driver.join("b")
    assert "b" not in driver.state.agents


# ---------------------------------------------------------------------------------------------------------------- the file

TOML = """
[[phases]]
name = "web"
until_iteration = 8
arguments = ["--data-path", "/web"]
[[phases]]
environment = { MIX = "books" }
"""


def parse(folder: Path, text: str, name: str = "phases.toml") -> LaunchOptions:
    (folder / name).write_text(text)
    return parse_launch(["--phases", str(folder / name), "train.py", "--x"], {})


def test_the_file_gives_each_phase_its_arguments_and_environment(tmp_path: Path) -> None:
    expected = (LaunchPhase(8, ("--data-path", "/web"), {}, "web"), LaunchPhase(0, (), {"MIX": "books"}))
    options = parse(tmp_path, TOML)
    assert options.phases == expected
    as_json = [{"name": "web", "until_iteration": 8, "arguments": ["--data-path", "/web"]}, {"environment": {"MIX": "books"}}]
    assert parse(tmp_path, json.dumps({"phases": as_json}), "a.json").phases == expected
    assert parse(tmp_path, json.dumps(as_json), "b.json").phases == expected
    assert rank_command(options)[-4:] == ["train.py", "--x", "--data-path", "/web"]
    assert rank_command(options, phase=1)[-2:] == ["train.py", "--x"]
    told = job_spec(options, "alice").phases
    assert [(p.until_iteration, p.name) for p in told] == [(8, "web"), (0, "")] and told[0].digest != told[1].digest
    assert "/web" not in str(told), "arguments may be secrets: they stay with the launcher"


def test_a_rank_sees_its_phase_and_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(TOML)
    given = ["--phases", str(tmp_path / "p.toml"), "--deadline", "4000000000", "--deadline-margin", "7", "train.py"]
    options = parse_launch(given, {})
    start = wire.StartAttempt(
        1, "", 2, 1, 0, 2, 2, 0, 1, "h", 1, "j", 1, 0, phase=wire.PhaseStart(1, 2, "", 8, 64, 0), save_s=2.5
    )
    inherited = {"RSUP_PHASE_UNTIL_ITERATION": "7", "RSUP_PHASE_NAME": "outer"}
    found = rank_environment(inherited, options, start, 0, SessionPlaces("m", "b", "s", "d", True))
    mine = {
        name: value for name, value in found.items() if "PHASE" in name or "DEADLINE" in name or name in ("MIX", "RSUP_SAVE_S")
    }
    assert mine == {
        "MIX": "books",
        "RSUP_PHASE": "1",
        "RSUP_PHASE_NAME": "",
        "RSUP_PHASE_ITERATION_OFFSET": "8",
        "RSUP_PHASE_SAMPLE_OFFSET": "64",
        "RSUP_PHASE_ENDS": "8",
        "RSUP_DEADLINE": "4000000000",
        "RSUP_DEADLINE_MARGIN": "7",
        "RSUP_SAVE_S": "2.500",
    }
    assert "RSUP_PHASE" not in rank_environment(
        found, parse_launch(["train.py"], {}), start, 0, SessionPlaces("m", "b", "s", "d", True)
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[phases]\n", "is not TOML"),
        ("x = 1", "unknown key x"),
        ("phases = []", "has no list phases"),
        ("phases = [1]", "phase 1 is no table"),
        ("[[phases]]\nuntil_iterations = 3", "phase 1: unknown key until_iterations"),
        ("[[phases]]\nuntil_iteration = 0", "phase 1: until_iteration must be a whole number of at least 1, not 0"),
        ("[[phases]]\nuntil_iteration = 3", "phase 1 is the last one"),
        ("[[phases]]\n[[phases]]", "phase 1 needs until_iteration: 1 more come after it"),
        ("[[phases]]\nuntil_iteration = 3\n[[phases]]\nuntil_iteration = 3\n[[phases]]", "phase 2 ends at iteration 3"),
        ('[[phases]]\narguments = "--x"', "phase 1: arguments must be a list of texts"),
        ("[[phases]]\nenvironment = { A = 1 }", "phase 1: environment must be a table of texts"),
        ('[[phases]]\nenvironment = { RANK = "1" }', "phase 1: RANK is set by the launcher"),
        ('[[phases]]\nenvironment = { RSUP_X = "1" }', "phase 1: RSUP_X is set by the launcher"),
        ("[[phases]]\nname = 1", "phase 1: name must be a text"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(wire.UsageError) as refused:
        parse(tmp_path, text)
    assert complaint in str(refused.value) and "phases.toml" in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(wire.UsageError, match="--phases /nowhere: No such file"):
        parse_launch(["--phases", "/nowhere", "train.py"], {})


def test_a_deadline_may_be_counted_from_now_on() -> None:
    at = parse_launch(["--deadline", "+3600", "train.py"], {}).deadline
    assert at is not None and at > 1_700_000_000
    with pytest.raises(wire.UsageError, match="--deadline"):
        parse_launch(["--deadline", "+soon", "train.py"], {})
