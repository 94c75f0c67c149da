"""What hangs, lost ranks and lost nodes say of hardware, and what says nothing."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.events import AgentJoined, AgentLeft, AgentSilent, OperatorAsked
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.fault_evidence import stands_out
from rsup.supervisor.states import Phase
from rsup.supervisor.wire import Device, RankOverdue, RankStack, StacksTaken
from tests.core.job_driver import Driver, hello, info, spec

WAITS = "Thread 1 (MainThread)\n    all_reduce (torch/distributed/distributed_c10d.py:2)\n"
WORKS = "Thread 1 (MainThread)\n    forward (train.py:7)\n"


def running(device: str = "GPU", **fields: object) -> Driver:
    """Nodes a and b with two ranks each, on devices named after node and rank."""
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=wire.RestartPolicy(max_restarts=3), **fields))
    for name in ("a", "b"):
        driver.join(name, agent=info(name, devices=[Device(f"{device}-{name}{i}") for i in (0, 1)]))
    driver.start()
    for name, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
        driver.say(name, wire.DeviceUsed(driver.now().us, 1, rank, f"{device}-{name}{rank % 2}"))
    return driver


def evidence(driver: Driver) -> list[tuple[str, str, str, str]]:
    found: list[Evidence] = [action.evidence for action in driver.actions if isinstance(action, FoundEvidence)]
    assert all(one.text and one.episode == "job:local/alice/t1.1" and one.is_held for one in found)
    return [(one.kind, one.subject, one.source, one.code) for one in found]


def fail(driver: Driver, **fields: object) -> None:
    """Rank 2 ends first, the others are ended by us."""
    driver.exit("b", 2, **fields)  # type: ignore[arg-type]
    for name, rank in (("a", 0), ("a", 1), ("b", 3)):
        driver.exit(name, rank, 143, signal=15, by_us="attempt 1 has failed")
    driver.gone("a")
    driver.gone("b")
    assert driver.state.attempt == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"exit_code": 1, "error": "ValueError: a bug"}, []),
        ({"exit_code": 1, "error": "torch.AcceleratorError: CUDA error: out of memory"}, []),
        ({"exit_code": 1, "error": "RuntimeError: Connection closed by peer"}, []),
        ({"exit_code": 137, "signal": 9}, []),
        ({"exit_code": 137, "signal": 9, "killer": "the kernel, for want of memory"}, []),
        ({"exit_code": 143, "signal": 15, "killer": wire.NOT_OURS}, []),
        ({"exit_code": 134, "signal": 6, "error": "terminate called after throwing an exception"}, []),
        ({"exit_code": 135, "signal": 7, "killer": "process 5 of alice"}, []),
        ({"exit_code": 135, "signal": 7}, [("device", "GPU-b0", "rank-lost", "SIGBUS")]),
        ({"exit_code": 135, "signal": 7, "killer": wire.NOT_OURS}, [("device", "GPU-b0", "rank-lost", "SIGBUS")]),
        ({"exit_code": 139, "signal": 11}, [("node", "node-b", "rank-lost", "SIGSEGV")]),
        (
            {"exit_code": 1, "error": "RuntimeError: CUDA error: uncorrectable ECC error encountered"},
            [("device", "GPU-b0", "rank-lost", "gpu-error")],
        ),
    ],
)
def test_a_lost_rank_speaks_only_where_hardware_can_be_behind_it(
    fields: dict[str, object], expected: list[tuple[str, str, str, str]]
) -> None:
    driver = running()
    fail(driver, **fields)
    assert evidence(driver) == expected


def test_a_rank_without_a_gpu_speaks_of_its_node() -> None:
    driver = running("CPU-boot")
    fail(driver, exit_code=135, signal=7)
    assert evidence(driver) == [("node", "node-b", "rank-lost", "SIGBUS")]


def test_what_a_fault_injector_does_is_marked() -> None:
    driver = running(command=["train.py", "--fault", "rank=2,iteration=3,kind=signal"])
    fail(driver, exit_code=135, signal=7)
    (one,) = [action.evidence for action in driver.actions if isinstance(action, FoundEvidence)]
    assert one.injected


def hang(
    driver: Driver, iterations: tuple[int, ...] = (5, 5, 4, 5), stacks: tuple[str, ...] = (WAITS,) * 4, state: str = "S"
) -> None:
    """All four ranks are overdue; stacks are taken."""
    us, names = driver.now().us, ("a", "a", "b", "b")
    for rank, name in enumerate(names):
        driver.say(name, RankOverdue(us, 1, rank, "step", 3.1, 3.0, iterations[rank], 3.0, beat_age_s=0.1))
    for name in ("a", "b"):
        taken = [
            RankStack(rank, 10 + rank, "py-spy", stacks[rank], state if rank == 2 else "S", iterations[rank])
            for rank, its in enumerate(names)
            if its == name
        ]
        driver.say(name, StacksTaken(us, 1, taken))
    assert driver.state.phase is Phase.STOPPING and driver.incidents()[-1].rank == 2


def test_a_hang_speaks_against_the_culprits_device() -> None:
    driver = running()
    hang(driver)
    assert evidence(driver) == [("device", "GPU-b0", "hang", "hang")]


def test_a_stopped_process_is_a_persons_doing() -> None:
    driver = running()
    hang(driver, state="T")
    assert evidence(driver) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"iteration": 4}, True),
        ({"is_silent": True}, True),
        ({"stack": WORKS}, True),
        ({"stack": ""}, False),
    ],
)
def test_who_stands_out_of_a_hang(changes: dict[str, object], expected: bool) -> None:
    from msgspec.structs import replace

    from rsup.supervisor.failure import Hung

    others = [Hung("a", rank, "n", 5, 3.0, "S", WAITS) for rank in (1, 2)]
    first = replace(Hung("a", 0, "n", 5, 3.0, "S", WAITS), **changes)
    assert stands_out(first, [first, *others]) == expected
    assert stands_out(first, [first]) == (first.stack == WAITS)


@pytest.mark.parametrize(
    ("how", "is_lost"), [("fence", True), ("fence timeout", True), ("reboot", True), ("keeper", False), ("left", False)]
)
def test_a_lost_node_is_evidence_a_dead_launcher_is_not(how: str, is_lost: bool) -> None:
    driver = running(fence_timeout_s=20.0)
    if how == "keeper":
        driver.say("b", wire.AgentGone(driver.now().us, "killed"))
    elif how == "left":
        driver.feed(AgentLeft("b"))
    elif how == "reboot":
        driver.feed(AgentJoined(hello("c", driver.spec, agent=info("c", boot_id="new", node_rank=-1))))
        again = wire.msgspec.structs.replace(info("d", boot_id="new"), node="node-b")
        driver.feed(AgentJoined(hello("d", driver.spec, agent=again)))
    else:
        driver.feed(AgentSilent("b", 20.0))
        event = OperatorAsked("fence", "root", "", "r1", "node-b") if how == "fence" else AgentSilent("b", 500.0)
        driver.feed(event)
    assert driver.state.agents["b"].live_attempt == 0
    assert evidence(driver) == ([("node", "node-b", "rank-lost", "agent-lost")] if is_lost else [])
