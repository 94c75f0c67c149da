"""What the job's machine makes of 16 and 17: confirmed by the tracker, or not."""

import pytest

from rsup.launcher.device_placement import place
from rsup.launcher.visible_devices import VisibleList
from rsup.supervisor import wire
from rsup.supervisor.other_devices import has_seats, ranks_of
from rsup.supervisor.rerun_elsewhere import MAX_RERUNS
from rsup.supervisor.states import Phase
from rsup.supervisor.wire import Device
from tests.core.job_driver import Driver, info, spec

ASKS, TRANSIENT = "FIRST_RERUN_REPRODUCIBLE", "FIRST_RERUN_NOT_REPRODUCIBLE"


def line(rank: int, status: str, device: str, iteration: int = 5, ordinal: int = 0) -> wire.RejectedResult:
    return wire.RejectedResult(rank, status, iteration, device, ordinal, "found NaN", "nan")


def nodes(*devices: str, **fields: object) -> Driver:
    """A job on nodes a, b, ..., whose devices are given, blank-separated; as many ranks as devices but for `+spare`."""
    names = "abcdef"[: len(devices)]
    driver = Driver(spec(min_nodes=fields.pop("min_nodes", len(devices)), max_nodes=len(devices), **fields))
    for name, listed in zip(names, devices, strict=True):
        words = listed.split()
        ranks = sum(not word.startswith("+") for word in words)
        agent = info(name, num_ranks=ranks, devices=[Device(word.lstrip("+")) for word in words])
        driver.join(name, agent=agent)
    driver.start()
    return driver


def end_attempt(driver: Driver, code: int, rejected: dict[int, list[wire.RejectedResult]]) -> None:
    """Every rank leaves with the code, the last one first; the nodes are clear."""
    for name, agent in reversed(driver.state.active):
        for rank in reversed(range(agent.first_rank, agent.first_rank + agent.info.num_ranks)):
            driver.exit(name, rank, code, rejected=rejected.get(rank, []))
    for name, _ in driver.state.active:
        driver.gone(name)


def avoided(driver: Driver, name: str) -> list[tuple[int | None, str]]:
    command = driver.last_command(name)
    assert isinstance(command, wire.StartAttempt)
    return [(a.rank, a.device) for a in command.avoid]


def test_16_restarts_free_of_charge_and_says_what_to_avoid() -> None:
    driver = nodes("g0 g1", "g2 g3")
    end_attempt(driver, 16, {1: [line(1, "INITIAL_RUN", "g1"), line(1, ASKS, "g1", ordinal=1)]})
    assert driver.state.phase is Phase.STARTING and driver.state.attempt == 2
    assert driver.state.budget.restarts == 0 and driver.state.budget.identical == 0
    driver.start()
    assert avoided(driver, "a") == [(1, "g1")] and avoided(driver, "b") == []
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.device, incident.iteration, incident.exit_code) == (1, "g1", 5, 16)
    assert "RerunElsewhere" in driver.kinds() and "Restart" in driver.kinds()
    end_attempt(driver, 17, {1: [line(1, "SECOND_RERUN_NOT_REPRODUCIBLE", "g0")]})
    result = driver.state.result
    assert result is not None and result.exit_code == 17 and "persistent error, g1 is suspect" in result.reason
    assert [(a.rank, a.device) for a in driver.state.avoid] == [(None, "g1")]


@pytest.mark.parametrize(
    ("code", "lines", "word"),
    [
        (17, [line(0, TRANSIENT, "g0")], "transient"),
        (17, [line(0, "SECOND_RERUN_REPRODUCIBLE", "g0")], "application"),
    ],
)
def test_17_is_a_verdict(code: int, lines: list[wire.RejectedResult], word: str) -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=3))
    end_attempt(driver, code, {0: lines})
    result = driver.state.result
    assert result is not None and (result.exit_code, result.rank) == (17, 0) and word in result.reason
    assert driver.state.avoid == []


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (16, []),
        (17, []),
        (16, [line(0, "INITIAL_RUN", "g0")]),
        (16, [line(0, TRANSIENT, "g0")]),
        (17, [line(0, ASKS, "g0")]),
        (16, [line(0, ASKS, "g0"), line(0, "INITIAL_RUN", "g0", 6)]),
        (3, [line(0, ASKS, "g0")]),
    ],
)
def test_without_the_line_that_means_it_a_code_means_nothing(code: int, lines: list[wire.RejectedResult]) -> None:
    driver = nodes("g0 g1")
    end_attempt(driver, code, {0: lines})
    result = driver.state.result
    assert result is not None and result.exit_code == (3 if code == 3 else 1)
    assert not {"RerunElsewhere", "RerunVerdict"} & set(driver.kinds())


def test_a_line_of_a_rank_that_we_had_to_kill_counts() -> None:
    driver = nodes("g0 g1")
    driver.exit("a", 1, 16)
    driver.exit("a", 0, 143, signal=15, by_us="attempt 1 has failed", rejected=[line(0, ASKS, "g0")])
    driver.gone("a")
    assert driver.state.attempt == 2 and [(a.rank, a.device) for a in driver.state.avoid] == [(0, "g0")]


def test_only_the_newest_iteration_is_the_fatal_one() -> None:
    driver = nodes("g0 g1 g2")
    end_attempt(driver, 16, {2: [line(2, ASKS, "g2", iteration=3)], 0: [line(0, ASKS, "g0", iteration=9)]})
    assert [(a.rank, a.device) for a in driver.state.avoid] == [(0, "g0")]


@pytest.mark.parametrize(
    ("devices", "goes_on"), [("g0", False), ("g0 +g1", True), ("g0 g1", True), ("g0 g0", False), ("g0 g0 g1", True)]
)
def test_a_node_with_another_device(devices: str, goes_on: bool) -> None:
    driver = nodes(devices)
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    if goes_on:
        assert driver.state.attempt == 2
    else:
        result = driver.state.result
        assert result is not None and result.exit_code == 16 and "no other device for rank 0" in result.reason


def test_nodes_with_one_device_each_change_places() -> None:
    driver = nodes("g0", "g1", "g2")
    end_attempt(driver, 16, {2: [line(2, ASKS, "g2")]})
    assert [name for name, _ in driver.state.active] == ["c", "b", "a"]
    driver.start()
    assert avoided(driver, "a") == [(2, "g2")]
    assert any("runs it again on node node-a" in event.text for event in driver.events())
    end_attempt(driver, 16, {2: [line(2, ASKS, "g0")]})
    assert driver.state.active[2][0] == "b"
    driver.start()
    end_attempt(driver, 16, {2: [line(2, ASKS, "g1")]})
    result = driver.state.result
    assert result is not None and result.exit_code == 16


def test_a_spare_node_comes_before_a_busy_one() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    for name, device in (("a", "g0"), ("b", "g1")):
        driver.join(name, agent=info(name, num_ranks=1, devices=[Device(device)]))
    driver.start()
    driver.join("c", agent=info("c", num_ranks=1, devices=[Device("g2")]))
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    assert [name for name, _ in driver.state.active] == ["c", "b"]
    assert driver.commands("a")[-1] == "Park"


def test_nodes_of_other_sizes_do_not_change_places() -> None:
    driver = nodes("g0", "g1 g2")
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    result = driver.state.result
    assert result is not None and result.exit_code == 16


def test_the_same_device_again_ends_with_16() -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=3))
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    driver.start()
    end_attempt(driver, 16, {})
    result = driver.state.result
    assert result is not None and result.exit_code == 16 and "on the same device again" in result.reason


def test_a_replay_that_does_not_reach_the_result_ends_with_17() -> None:
    driver = nodes("g0 g1")
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    driver.start()
    end_attempt(driver, 17, {})
    result = driver.state.result
    assert result is not None and result.exit_code == 17 and "not reached again" in result.reason


def test_reruns_have_a_bound() -> None:
    driver = nodes(" ".join(f"g{i}" for i in range(8)))
    for number in range(MAX_RERUNS):
        end_attempt(driver, 16, {0: [line(0, ASKS, f"g{number}", iteration=number, ordinal=number)]})
        driver.start()
    end_attempt(driver, 16, {0: [line(0, ASKS, "g7", iteration=9)]})
    result = driver.state.result
    assert result is not None and result.exit_code == 16 and f"{MAX_RERUNS} reruns" in result.reason


def test_another_failure_between_is_charged_and_the_device_stays_avoided() -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=1))
    end_attempt(driver, 16, {0: [line(0, ASKS, "g0")]})
    driver.start()
    end_attempt(driver, 9, {})
    assert driver.state.budget.restarts == 1
    driver.start()
    assert avoided(driver, "a") == [(0, "g0")]


@pytest.mark.parametrize(
    "flags",
    [
        [(0, 0)],
        [(0, 0), (1, 1)],
        [(0, 0), (0, 1)],
        [(0, 0), (1, 0)],
        [(0, 0), (1, 1), (2, 2)],
        [(0, 0), (0, 1), (0, 2)],
        [(0, 0), (1, 0), (2, 0)],
        [(0, 1), (1, 1), (2, 0)],
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_the_supervisor_finds_possible_the_agent_can_do(ranks: int, flags: list[tuple[int, int]]) -> None:
    """Both sides decide on their own whether a node has a device for its flagged ranks."""
    stand_ins = [Device(f"g{i}", model="CPU") for i in range(ranks)]
    avoid = [wire.AvoidedDevice(f"g{d}", "NaN", rank=r, ordinal=d) for r, d in flags if r < ranks and d < ranks]
    agent = nodes(" ".join(device.uuid for device in stand_ins)).state.agents["a"]
    placed = place(VisibleList(), stand_ins, ranks, avoid)
    satisfied = all(placed.devices[a.rank].uuid != a.device for a in avoid if a.rank is not None)
    assert has_seats(agent.devices, ranks_of(agent), avoid) == satisfied
