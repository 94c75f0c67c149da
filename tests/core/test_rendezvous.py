"""Who takes part, in which order, and who is refused."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import SendNotice, SendRefusal, SendWelcome
from rsup.supervisor.events import AgentHeard, AgentSilent
from rsup.supervisor.states import Phase
from tests.core.job_driver import Driver, info, spec

POLICY = wire.RestartPolicy(max_restarts=5)


def order(driver: Driver) -> list[str]:
    return [agent_id for agent_id, _ in driver.state.active]


@pytest.mark.parametrize(
    ("joins", "expected"),
    [
        ([("x", -1), ("y", -1), ("z", -1)], ["x", "y", "z"]),
        ([("x", 2), ("y", 1), ("z", 0)], ["z", "y", "x"]),
        ([("x", -1), ("y", 0), ("z", -1)], ["y", "x", "z"]),
        ([("x", -1), ("y", 2), ("z", -1)], ["x", "z", "y"]),
    ],
)
def test_node_ranks_are_kept_and_the_order_of_joining_fills_the_rest(joins: list[tuple[str, int]], expected: list[str]) -> None:
    driver = Driver(spec(min_nodes=3, max_nodes=3))
    for name, hint in joins:
        driver.join(name, agent=info(name, node_rank=hint, num_ranks=1))
    assert order(driver) == expected
    assert driver.commands(expected[0]) == ["HostStore"]


def test_different_numbers_of_ranks_per_node() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    driver.join("a", agent=info("a", num_ranks=3))
    driver.join("b", agent=info("b", num_ranks=1))
    driver.start()
    starts = [driver.last_command(name) for name in ("a", "b")]
    assert [(s.first_rank, s.num_ranks, s.world_size) for s in starts if isinstance(s, wire.StartAttempt)] == [
        (0, 3, 4),
        (3, 1, 4),
    ]


def test_ranks_stay_where_they_were_after_a_restart() -> None:
    driver = Driver(spec(min_nodes=3, max_nodes=3, policy=POLICY)).run_nodes("a", "b", "c")
    driver.exit("a", 0, 1)
    for name in ("c", "b", "a"):
        driver.gone(name)
    assert order(driver) == ["a", "b", "c"]
    driver.start()
    driver.join("d")
    driver.say("b", wire.AgentGone(0, "dead"))
    driver.gone("a")
    driver.gone("c")
    assert order(driver) == ["a", "d", "c"], "the newcomer takes the free place"


def test_a_node_numbered_beyond_the_job_is_a_spare_also_when_it_comes_early() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, last_call_s=5.0))
    driver.join("s", agent=info("s", node_rank=2))
    driver.join("b", agent=info("b", node_rank=1))
    assert driver.state.phase is Phase.FORMING
    (said,) = [event.text for event in driver.events() if event.kind == "LastCall"]
    assert "1 more node may join within 5 s" in said
    driver.join("a", agent=info("a", node_rank=0))
    assert order(driver) == ["a", "b"] and driver.commands("s") == ["Park"]


def test_a_spare_takes_part_where_the_others_do_not_come() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, last_call_s=5.0))
    driver.join("s", agent=info("s", node_rank=2))
    driver.join("b", agent=info("b", node_rank=1))
    driver.wait(5.0)
    assert driver.state.phase is Phase.STARTING and order(driver) == ["s", "b"]


def test_nodes_of_another_rendezvous_are_refused() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, rdzv_id="one"))
    driver.join("a")
    driver.spec = spec(min_nodes=2, max_nodes=2, rdzv_id="two")
    (refused,) = [action for action in driver.join("b") if isinstance(action, SendRefusal)]
    assert refused.exit_code == 2 and "--rdzv-id one" in refused.message and "--rdzv-id two" in refused.message


def test_a_node_rank_is_free_again_when_its_holder_does_not_answer() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    for name, rank in (("a", 0), ("b", 1)):
        driver.join(name, agent=info(name, node_rank=rank))
    driver.start()
    again = info("b2", node_rank=1)
    assert any(isinstance(action, SendRefusal) for action in driver.join("b2", agent=again)), "b answers"
    driver.feed(AgentSilent("b", 16.0))
    assert not any(isinstance(action, SendRefusal) for action in driver.join("b2", agent=again))
    assert driver.commands("b2") == ["Park"], "the ranks of b may be alive"


@pytest.mark.parametrize(
    ("newcomer", "said"),
    [
        ({"python": "3.11", "torch": "2.13.0"}, ""),
        ({}, ""),
        ({"torch": "2.13.0", "nccl": "2.28"}, ""),
        ({"rsup": "0.0.9", "python": "3.11"}, "node-b has rsup 0.0.9, node node-a has rsup 0.1.0"),
        ({"python": "3.11", "torch": "2.12.1"}, "node-b has torch 2.12.1, node node-a has torch 2.13.0"),
        (
            {"python": "3.12", "torch": "2.12.1"},
            "node-b has python 3.12, torch 2.12.1, node node-a has python 3.11, torch 2.13.0",
        ),
    ],
)
def test_a_node_with_other_versions_is_warned_of_and_welcome(newcomer: dict[str, str], said: str) -> None:
    driver = Driver(spec(min_nodes=3, max_nodes=3))
    driver.join("a", agent=info("a", versions={"rsup": "0.1.0", "python": "3.11", "torch": "2.13.0"}))
    actions = driver.join("b", agent=info("b", versions=newcomer))
    assert any(isinstance(action, SendWelcome) for action in actions)
    notices = [action for action in actions if isinstance(action, SendNotice)]
    assert [notice.agent_id for notice in notices] == (["a", "b"] if said else [])
    assert all(said in notice.text for notice in notices)
    actions = driver.join("c", agent=info("c", versions=newcomer))
    assert not [action for action in actions if isinstance(action, SendNotice)], "said once"


def test_last_call_of_an_elastic_job() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=3, last_call_s=5.0))
    driver.join("a")
    driver.join("b")
    assert driver.state.phase is Phase.FORMING
    (said,) = [event.text for event in driver.events() if event.kind == "LastCall"]
    assert "2 of 2:3 nodes are here: 1 more node may join within 5 s" in said
    driver.wait(4.0)
    assert driver.state.phase is Phase.FORMING
    driver.wait(1.0)
    assert driver.state.phase is Phase.STARTING and len(order(driver)) == 2
    driver.start()
    driver.join("c")
    assert driver.commands("c") == ["Park"] and driver.state.phase is Phase.RUNNING, "a newcomer disturbs nothing"


def test_a_restart_with_the_same_nodes_does_not_wait_for_more() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=3, last_call_s=5.0, policy=POLICY))
    driver.join("a")
    driver.join("b")
    driver.wait(5.0)
    driver.start()
    driver.exit("a", 0, 1)
    driver.gone("a")
    driver.gone("b")
    assert driver.state.attempt == 2


def test_too_few_nodes_in_time_end_the_job_with_a_reason() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, join_timeout_s=60.0))
    driver.join("a")
    driver.wait(59.0)
    assert driver.state.phase is Phase.FORMING
    driver.wait(1.0)
    end = driver.last_command("a")
    assert isinstance(end, wire.EndJob) and end.result.exit_code == 1
    assert "1 of at least 2 nodes" in end.result.reason and "1 of at least 2 nodes" in end.report


def test_a_node_that_leaves_during_the_last_call_takes_the_call_back() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=3, last_call_s=5.0))
    driver.join("a")
    driver.join("b")
    driver.feed(AgentSilent("b", 16.0))
    driver.wait(6.0)
    assert driver.state.phase is Phase.FORMING
    driver.feed(AgentHeard("b", 0, 0))
    driver.wait(4.0)
    assert driver.state.phase is Phase.FORMING, "the call begins anew"


def refused(driver: Driver, name: str, **fields: object) -> SendRefusal | None:
    return next((a for a in driver.join(name, **fields) if isinstance(a, SendRefusal)), None)


def test_refusals_say_what_to_do() -> None:
    single = Driver(spec()).run_nodes("a")
    no = refused(single, "b")
    assert no and no.exit_code == 2
    assert "job t1 is already running (attempt 1, since 2027-" in no.message and "`rsup stop t1`" in no.message

    multi = Driver(spec(min_nodes=2, max_nodes=2))
    multi.join("a", agent=info("a", node_rank=0))
    no = refused(multi, "b", agent=info("b", node_rank=0))
    assert no and no.exit_code == 2 and "--node-rank 0" in no.message and "node-a" in no.message
    multi.spec = spec(min_nodes=3, max_nodes=3)
    no = refused(multi, "c")
    assert no and "--nnodes 2, this node asks for 3" in no.message
    assert "\n" not in no.message


def test_surplus_nodes_are_spares_and_end_with_the_job() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    for name in ("a", "b", "c", "d"):
        driver.join(name)
    driver.start()
    assert driver.commands("c") == driver.commands("d") == ["Park"]
    for name, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
        driver.exit(name, rank, 0)
    end = driver.last_command("d")
    assert isinstance(end, wire.EndJob) and end.result.exit_code == 0
