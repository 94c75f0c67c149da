"""A fault that follows its rank from board to board accuses neither, and ends the job."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import Record
from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.hardware.device_machine import replay
from rsup.supervisor.records import CaseSaved, TransitionSaved
from rsup.supervisor.rendezvous import resumed_job
from rsup.supervisor.states import Phase
from tests.core.evidence_story import HOUR_US, START_US, History, job, seen
from tests.core.job_driver import Driver, spec
from tests.core.test_case_machine import ended, evidence, finding, join, leave, nodes, report, saved, start, tell
from tests.core.test_hardware_loop import Fleet, gpu

SECOND = "t1.1-a2-i7"


def told(driver: Driver) -> list[tuple[str, str]]:
    return [(one.subject, one.code) for one in evidence(driver)]


def accuse(driver: Driver, device: str, case_id: str, rank: int = 1, **fields: object) -> None:
    named = {"rank": rank, "device": device, "case_id": case_id, "accused": [device], **fields}
    tell(driver, report("persistent", str(named.pop("action", "elsewhere")), **named))


def twice(second: str = "g2", devices: str = "g0 g1 +g2 +g3", rank: int = 1, iteration: int = 7, **where: str) -> Driver:
    """Rank 1's g1 is accused and left out; then rank `rank`'s `second` is."""
    driver = nodes(devices, policy=wire.RestartPolicy(max_restarts=3))
    first = devices.split()[1]
    accuse(driver, first, "t1.1-a1-i7")
    leave(driver, 16)
    start(driver, {0: where.get("zero", "g0"), 1: where.get("one", second)})
    accuse(driver, second, SECOND, rank=rank, iteration=iteration)
    return driver


def test_the_second_board_is_watched_the_first_taken_back_and_the_job_ends_17() -> None:
    driver = twice()
    assert told(driver) == [("g1", "persistent"), ("g1", FOLLOWED_RANK), ("g2", "undecided")] or told(driver) == [
        ("g1", "persistent"),
        ("g2", "undecided"),
        ("g1", FOLLOWED_RANK),
    ]
    assert {one.case_id for one in evidence(driver) if one.subject == "g1"} == {"t1.1-a1-i7"}
    first, second = saved(driver, "t1.1-a1-i7"), saved(driver, SECOND)
    assert (second.verdict, second.accused, second.reason) == ("persistent", ["g2"], "because"), "stored as reported"
    assert "does not count against g2" in second.note and "on g1 before (case t1.1-a1-i7)" in second.note
    assert first.verdict == "persistent" and "taken back against g1" in first.note
    assert [(a.device, a.quarantined) for a in driver.state.avoid] == [("g1", False)]
    leave(driver, 16)
    result = ended(driver)
    assert result.exit_code == 17 and "the fault followed rank 1 from g1 (case t1.1-a1-i7) to g2" in result.reason
    assert f"rsup cases show {SECOND}" in result.reason and driver.state.attempt == 2, "no third board is worn out"
    assert driver.kinds().count("CaseTakenBack") == driver.kinds().count("CaseFollowsRank") == 1


@pytest.mark.parametrize(
    ("what", "driver"),
    [
        ("another iteration", twice(iteration=9)),
        ("another rank", twice(rank=0, second="g2", zero="g2", one="g3")),
        ("the first board is in use again", twice(zero="g1")),
        ("the same node's CPU", twice(devices="CPU-boot-0 CPU-boot-1 +CPU-boot-2", second="CPU-boot-2", zero="CPU-boot-0")),
    ],
)
def test_what_is_another_fault_is_accused_as_ever(what: str, driver: Driver) -> None:
    accusations = [one for one in evidence(driver) if one.kind == "device"]
    assert [one.code for one in accusations] == ["persistent", "persistent"], what
    assert saved(driver, SECOND).note == "" and len(driver.state.avoid) == 2 and "CaseTakenBack" not in driver.kinds()
    leave(driver, 16)
    assert driver.state.phase is not Phase.ENDED or ended(driver).exit_code == 16


def test_a_group_proves_nobody_faulty_and_so_follows_nobody() -> None:
    driver = nodes("g0 g1 +g2")
    accuse(driver, "g1", "one", suspect_of=2)
    leave(driver, 16)
    start(driver, {1: "g2"})
    accuse(driver, "g2", SECOND)
    assert told(driver) == [("g1", "suspect-1-of-n"), ("g2", "persistent")]


def test_of_several_accused_only_those_that_followed_a_rank_are_doubted() -> None:
    driver = nodes("g0 g1 +g2 +g3")
    accuse(driver, "g1", "one")
    leave(driver, 16)
    start(driver, {1: "g2"})
    both = [finding(0, "g0"), finding(1, "g2")]
    accuse(driver, "g2", SECOND, accused=["g0", "g2"], findings=both)
    codes = dict(told(driver)[1:])
    assert codes == {"g0": "persistent", "g1": FOLLOWED_RANK, "g2": "undecided"}
    assert [(a.device, a.quarantined) for a in driver.state.avoid] == [("g1", False), ("g0", True)]
    leave(driver, 16)
    assert ended(driver).exit_code == 17


def test_ranks_that_go_on_go_on_and_a_third_board_takes_nothing_back_again() -> None:
    driver = nodes("g0 g1 +g2 +g3", policy=wire.RestartPolicy(max_restarts=5))
    accuse(driver, "g1", "one")
    leave(driver, 16)
    for device in ("g2", "g3"):
        start(driver, {1: device})
        accuse(driver, device, f"case of {device}", action="continue")
        assert driver.state.phase is Phase.RUNNING
        leave(driver, 1, declared=False)
    assert told(driver).count(("g1", FOLLOWED_RANK)) == 1
    assert [pair for pair in told(driver) if pair[1] == "persistent"] == [("g1", "persistent")]


def test_a_resumed_launch_remembers_whom_the_job_has_accused() -> None:
    driver = nodes("g0")
    accuse(driver, "g0", "one", rank=0)
    leave(driver, 16)
    assert ended(driver).exit_code == 16
    driver.state = resumed_job(driver.state, spec(resume=True), driver.now())
    driver.spec = driver.state.spec
    join(driver, "n", "g7")
    start(driver)
    tell(driver, report("persistent", "elsewhere", rank=0, device="g7", accused=["g7"], case_id=SECOND), name="n")
    assert told(driver)[1:] in ([("g0", FOLLOWED_RANK), ("g7", "undecided")], [("g7", "undecided"), ("g0", FOLLOWED_RANK)])


def test_each_case_is_written_with_one_verdict() -> None:
    driver = twice()
    for case_id in ("t1.1-a1-i7", SECOND):
        rows = [a.record for a in driver.actions if isinstance(a, Record) and isinstance(a.record, CaseSaved)]
        assert {one.verdict for one in rows if one.case_id == case_id} <= {"", "persistent"}


# ------------------------------------------------------------------------------------------------- the device's history

PERSISTENT = seen("verdict", "persistent", job=job("t1"), case_id="one")
TAKEN_BACK = seen(
    "verdict", FOLLOWED_RANK, job=job("t1"), case_id="one", at_h=1, text="the fault followed the rank to another board: rank 1"
)


def test_a_quarantine_for_that_verdict_alone_becomes_a_suspicion() -> None:
    history = History()
    assert history.see(PERSISTENT) == "quarantined" and history.see(TAKEN_BACK) == "suspect"
    change = history.changes[-1]
    assert (change.before, change.after, change.verb) == ("quarantined", "suspect", "evidence")
    assert change.reason.startswith("the fault followed the rank to another board")
    assert not history.dossier.saved.held_by_test and history.dossier.saved.score == 1.0
    assert history.dossier.saved.expires_us is not None and history.wait(49) == "watch"
    dossier, changes = replay("device", "GPU-b", history.dossier.rows.values(), history.policy, START_US + 2 * HOUR_US)
    assert dossier.saved.state == "suspect" and [one.after for one in changes] == ["quarantined", "suspect"]


@pytest.mark.parametrize(
    "more",
    [
        seen("verdict", "persistent", episode="job:local/ann/t2.1", job=job("t2"), case_id="other"),
        seen("verdict", "persistent", job=job("t1"), case_id="of the same job"),
        seen("xid", "79", episode="boot:1"),
        seen("test", "failed", episode="test:1"),
    ],
    ids=["another job", "the same job, another case", "xid", "failed test"],
)
def test_what_other_evidence_holds_stays(more: object) -> None:
    history = History()
    history.see(PERSISTENT)
    history.see(more)  # type: ignore[arg-type]
    assert history.see(TAKEN_BACK) == "quarantined"


def test_a_persons_word_stays_and_what_was_never_accused_is_not_touched() -> None:
    history = History()
    history.ask("quarantine", "burnt smell")
    history.see(PERSISTENT)
    assert history.see(TAKEN_BACK) == "quarantined"
    assert History().see(TAKEN_BACK) == "clear"
    late = History()
    late.see(TAKEN_BACK)
    assert late.see(PERSISTENT) == "suspect", "whatever comes first"


def test_a_flag_on_probation_is_kept_and_does_not_quarantine() -> None:
    """Anyone may flag: that alone must not undo an operator's release."""
    history = History()
    history.see(PERSISTENT)
    assert history.ask("release", without_test=True).done
    for number in range(4):
        history.now_us += HOUR_US
        assert history.ask("flag", f"slow again {number}", principal=f"user{number}", is_operator=False).done
    assert history.state == "probation"
    assert history.see(seen("xid", "94", episode="boot:2", at_h=6)) == "quarantined"


def test_the_loop_takes_the_quarantine_back_in_the_transaction_of_the_second_case() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"), gpu("c"), gpu("d"), policy=wire.RestartPolicy(max_restarts=3))
    fleet.run("a")
    fleet.verdict("a", "GPU-b")
    assert fleet.standing("GPU-b") == "quarantined"
    now = fleet.now_us()
    fleet.say("a", wire.RankExited(now, 1, 0, 1), wire.RanksGone(now, 1))
    fleet.run("a", attempt=2)
    commits = fleet.store.num_commits
    fleet.verdict("a", "GPU-c", attempt=2)
    assert fleet.store.num_commits == commits + 1
    assert (fleet.standing("GPU-b"), fleet.standing("GPU-c")) == ("suspect", "watch")
    assert fleet.avoided("a") == [("GPU-b", False)]
    changes = [row for row in fleet.rows(TransitionSaved) if isinstance(row, TransitionSaved) and row.subject == "GPU-b"]
    assert [row.after for row in changes] == ["quarantined", "suspect"]
    assert "followed the rank to another board" in changes[-1].reason
    fleet.restart()
    assert fleet.standing("GPU-b") == "suspect"
