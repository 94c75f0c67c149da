"""The parts of in-process restart, on a real TCPStore: settings, the store, other ranks' deaths, seats."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")
pytest.importorskip("nvidia_resiliency_ext")

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignmentCtx, RankDiscarded, Tree
from nvidia_resiliency_ext.inprocess.state import Mode, State
from torch._C._distributed_c10d import TCPStore

from rsup.supervisor import wire
from rsup.supervisor.wire import UsageError
from rsup.worker.inprocess import faults, job_store
from rsup.worker.inprocess.entry import Entry
from rsup.worker.inprocess.job_store import JobStore, look_now
from rsup.worker.inprocess.newcomers import meet_newcomers
from rsup.worker.inprocess.peers import Peers, death_key
from rsup.worker.inprocess.seats import SameSeats, make_seats
from rsup.worker.inprocess.settings import InProcessSettings, check_settings


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(job_store, "_all_free", {})  # an earlier test's store may have had that port
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port


def peers_on(store: JobStore, iteration: int, world_size: int = 3) -> Peers:
    said: list[str] = []
    peers = Peers(store, world_size, InProcessSettings(), said.append)
    peers.iteration = iteration
    return peers


def until(condition: object, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (InProcessSettings(soft_timeout=90.0), "--inprocess-soft-timeout (90 s) must be shorter than --inprocess-hard-timeout"),
        (InProcessSettings(barrier_timeout=90.0), "--inprocess-hard-timeout (90 s) must be shorter than --inprocess-barrier"),
        (InProcessSettings(heartbeat_interval=60.0), "--inprocess-heartbeat-interval (60 s) must be shorter"),
        (InProcessSettings(monitor_process_interval=61.0, soft_timeout=60.0), "--inprocess-monitor-process-interval (61 s)"),
        (InProcessSettings(monitor_thread_interval=0.0), "--inprocess-monitor-thread-interval must be more than 0"),
        (InProcessSettings(progress_watchdog_interval=60.0), "--inprocess-progress-watchdog-interval (60 s) must be shorter"),
        (InProcessSettings(last_call_wait=120.0), "--inprocess-last-call-wait (120 s) must be shorter"),
        (InProcessSettings(termination_grace_time=120.0), "--inprocess-termination-grace-time (120 s) must be shorter"),
        (InProcessSettings(active_world_size=5), "--inprocess-active-world-size 5: there are 4 ranks"),
        (InProcessSettings(active_world_size=3), "is no multiple of the 2 ranks of a node"),
        (InProcessSettings(max_iterations=0), "--inprocess-max-iterations must be 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: InProcessSettings, complaint: str) -> None:
    with pytest.raises(UsageError, match="--inprocess") as raised:
        check_settings(settings, world_size=4, local_world_size=2)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_defaults_work_and_reserves_are_counted() -> None:
    check_settings(InProcessSettings(), 4, 2)
    check_settings(InProcessSettings(active_world_size=3, granularity="rank"), 4, 2)
    assert InProcessSettings().reserves(4) == 0
    assert InProcessSettings(active_world_size=3).reserves(4) == 1


# ---------------------------------------------------------------------------------------------------------------- store


def test_a_wait_for_a_fault_holds_up_no_other_thread_and_ends_when_told(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    iteration = store.of_iteration(0)
    woken_s: list[float] = []

    def wait() -> None:
        iteration.wait_for_interrupted(timedelta(seconds=30))
        woken_s.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    began_s = time.monotonic()
    iteration.record_interrupted()
    assert time.monotonic() - began_s < 20
    look_now()
    thread.join(20)
    assert woken_s


def test_a_short_wait_in_vain_says_so_and_writes_no_warning(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    store = JobStore("127.0.0.1", port)
    with pytest.raises(dist.DistStoreError, match=r"never: not there after 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))
    assert "timed out" not in capfd.readouterr().err


def test_who_joins_does_not_wait_for_the_first_meeting(port: int) -> None:
    JobStore("127.0.0.1", port, joining=True).initial_barrier(ranks=[1], rendezvous_count=2, timeout=timedelta(seconds=5))
    with pytest.raises(Exception, match="initial_barrier"):
        JobStore("127.0.0.1", port).initial_barrier(ranks=[1], rendezvous_count=2, timeout=timedelta(seconds=0.1))


# --------------------------------------------------------------------------------------------------- deaths of other ranks


def test_a_death_is_recorded_once_by_all_who_hear_of_it(port: int) -> None:
    """The dead rank's arrival at the barrier is made for it, so survivors wait for nobody."""
    for _ in range(2):
        peers_on(JobStore("127.0.0.1", port), iteration=0).hear(wire.PeersFailed([1], [1], "killed", deaths=[1]))
    store = JobStore("127.0.0.1", port)
    first = store.of_iteration(0)
    until(lambda: first.is_rank_at_reentrant_barrier(rank=1, group_name=first.ITERATION_BARRIER))
    assert first.check([first.ANY_RANK_INTERRUPTED])
    assert first.get_terminated_ranks() == {1}
    assert store.get(death_key(1, 1)) == b"0"


def test_whoever_hears_late_does_not_interrupt_the_next_entry(port: int) -> None:
    """A survivor that is already in the next entry finds the death where the first one has put it."""
    store = JobStore("127.0.0.1", port)
    early, late = peers_on(JobStore("127.0.0.1", port), 0), peers_on(JobStore("127.0.0.1", port), 1)
    told = wire.PeersFailed([1], [1], "killed", deaths=[1])
    early.hear(told)
    until(lambda: store.check([death_key(1, 1)]))
    late.hear(told)
    late.hear(wire.PeersFailed([2], [2], "marks the end of the queue", deaths=[1]))
    until(lambda: 2 in store.of_iteration(1).get_terminated_ranks())
    assert store.get(death_key(1, 1)) == b"0"
    assert [record.rank for record in store.of_iteration(1).get_interruption_records()] == [2]


class StoreKey:
    INTERRUPTED = JobStore.ANY_RANK_INTERRUPTED


def test_a_rank_that_recorded_its_own_end_is_not_taken_for_dead_twice(port: int) -> None:
    """It left by SystemExit in iteration 0, and the others had gone on when its process was gone."""
    store = JobStore("127.0.0.1", port)
    store.of_iteration(0).record_terminated_ranks([1])
    store.of_iteration(0).iteration_barrier(ranks=[1], rendezvous_count=3, timeout=timedelta(0))
    peers_on(store, iteration=1).hear(wire.PeersFailed([1], [1], "exited", deaths=[1]))
    until(lambda: store.check([death_key(1, 1)]))
    assert store.get(death_key(1, 1)) == b"0"


def test_a_replacement_that_dies_belongs_to_a_later_iteration(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    peers = peers_on(store, iteration=0)
    peers.hear(wire.PeersFailed([1], [1], "killed", deaths=[1]))
    until(lambda: store.check([death_key(1, 1)]))
    peers.hear(wire.PeersFailed([1], [1], "killed again before it had joined", deaths=[2]))
    until(lambda: store.check([death_key(1, 2)]))
    assert store.get(death_key(1, 2)) == b"1"
    until(lambda: store.of_iteration(1).get_terminated_ranks() == {1})


def test_a_death_after_the_barrier_belongs_to_the_next_iteration(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    store.of_iteration(0).iteration_barrier(ranks=[2], rendezvous_count=3, timeout=timedelta(0))
    peers_on(store, iteration=0).hear(wire.PeersFailed([2], [2], "killed", deaths=[1]))
    until(lambda: store.check([death_key(2, 1)]))
    assert store.get(death_key(2, 1)) == b"1"


@pytest.mark.parametrize(("entry", "interrupts"), [(1, True), (2, False)])
def test_a_fault_of_a_live_rank_interrupts_only_the_entry_it_was_in(port: int, entry: int, interrupts: bool) -> None:
    store = JobStore("127.0.0.1", port)
    peers = peers_on(store, iteration=0)
    peers.hear(wire.PeersFailed([1], [], "exception", entry=entry))
    peers.hear(wire.PeersFailed([2], [2], "marks the end of the queue", deaths=[1]))
    until(lambda: store.of_iteration(0).check([StoreKey.INTERRUPTED]) and store.of_iteration(0).get_terminated_ranks() == {2})
    records = store.of_iteration(0).get_interruption_records()
    assert [record.rank for record in records] == [2]
    if not interrupts:
        assert not store.of_iteration(1).check([StoreKey.INTERRUPTED])


def test_an_own_soft_timeout_is_told_from_another_ranks(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    peers = peers_on(store, iteration=0)
    store.of_iteration(0).record_interrupted([InterruptionRecord(2, Interruption.SOFT_TIMEOUT)])
    assert peers.timed_out(2)
    assert peers.timed_out(1)  # which shows signs of progress, and may well be the one that the others wait for
    store.of_iteration(0).record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
    assert peers.timed_out(2)
    assert not peers.timed_out(1)


# ---------------------------------------------------------------------------------------------------------------- seats


def test_every_rank_keeps_its_seat_and_the_newcomer_gets_the_dead_ones(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    store.set(death_key(1, 2), "4")
    survivor = SameSeats(store, 0, timedelta(seconds=5))(RankAssignmentCtx(State(0, 3, iteration=4), store, {1}))
    newcomer = SameSeats(store, 2, timedelta(seconds=5))(RankAssignmentCtx(State(1, 3), store, set()))
    assert (survivor.state.active_rank, survivor.state.active_world_size, survivor.state.iteration) == (0, 3, 4)
    assert (newcomer.state.active_rank, newcomer.state.active_world_size, newcomer.state.iteration) == (1, 3, 5)
    assert survivor.state.mode is newcomer.state.mode is Mode.ACTIVE


def test_a_rank_that_was_given_up_does_not_come_back(port: int) -> None:
    store = JobStore("127.0.0.1", port)
    with pytest.raises(RankDiscarded, match="rank 1 was taken for dead"):
        SameSeats(store, 0, timedelta(seconds=5))(RankAssignmentCtx(State(1, 3), store, {1}))


def test_reserves_are_nvrxs_tree_with_a_layer_of_nodes_if_asked(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore("127.0.0.1", port)
    by_node = make_seats(InProcessSettings(active_world_size=2), 4, 2, store, 0)
    by_rank = make_seats(InProcessSettings(active_world_size=2, granularity="rank"), 4, 2, store, 0)
    assert isinstance(by_node, Tree)
    assert isinstance(by_rank, Tree)
    assert [(layer.min_ranks, layer.max_ranks) for layer in by_node.layers] == [(2, 2), (2, 2)]
    assert [(layer.min_ranks, layer.max_ranks) for layer in by_rank.layers] == [(2, 2)]


# ------------------------------------------------------------------------------------------------------ faults and entries


def test_equal_faults_have_equal_signatures_and_victims_are_named() -> None:
    one = faults.describe(ValueError("iteration 7 at 0x7f01: bad\nmore"), entry=1, iteration=7)
    two = faults.describe(ValueError("iteration 19 at 0x7f99: bad"), entry=2, iteration=19)
    lost = faults.describe(RuntimeError("[pair.cc:5] Connection closed by peer [127.0.0.1]:5"), 1, 7)
    assert one.signature == two.signature == "ValueError: iteration # at #: bad"
    assert one.text == "ValueError: iteration 7 at 0x7f01: bad"
    assert "ValueError" in one.traceback
    assert (one.victim, lost.victim) == (False, True)


def test_frames_let_go_of_what_they_held() -> None:
    class Model:
        pass

    gone = threading.Event()

    def step() -> None:
        model = Model()
        import weakref

        weakref.finalize(model, gone.set)
        raise ValueError("with a model in its frame")

    try:
        step()
    except ValueError as error:
        assert not gone.is_set()
        faults.drop_frames(error)
    assert gone.is_set()


def test_an_entry_cleans_up_in_reverse_and_once_also_after_an_error() -> None:
    done: list[str] = []
    entry = Entry(1, 0, 2)
    entry.at_restart(lambda: done.append("first"))
    entry.at_restart(lambda: done.append(str(1 // 0)))
    entry.at_restart(lambda: done.append("last"))
    with pytest.raises(ZeroDivisionError):
        entry.clean_up()
    assert done == ["last", "first"]
    entry.clean_up()
    assert done == ["last", "first"]


def test_what_may_be_stuck_is_unblocked_at_every_abort_also_after_an_error() -> None:
    done: list[str] = []
    entry = Entry(1, 0, 2)
    entry.at_abort(lambda: done.append("first"))
    entry.at_abort(lambda: done.append(str(1 // 0)))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            entry.abort()
    assert done == ["first", "first"]


def test_local_rank_is_back_after_the_wrapper_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvrx.md 2.6b: with it NVRx 0.5 and later checks a GPU by index, and fails everywhere that has none."""
    from rsup.worker.inprocess.preconditions import without

    monkeypatch.setenv("LOCAL_RANK", "3")
    with without("LOCAL_RANK"):
        assert "LOCAL_RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == "3"


# ------------------------------------------------------------------------------------------------------------ newcomers


def test_a_dead_ranks_new_process_is_waited_for_in_python(port: int) -> None:
    """Its imports may take longer than the soft limit; nobody waits for ranks that live."""
    store, late = JobStore("127.0.0.1", port), State(1, 3)
    store.of_iteration(0).record_terminated_ranks([1])
    survivor = State(0, 3)
    assert meet_newcomers(store, survivor.freeze()), "the first entry has no newcomers"
    survivor.iteration = late.iteration = 1
    assert not meet_newcomers(store, survivor.freeze(), within_s=0.05)
    newcomer = threading.Timer(0.1, lambda: meet_newcomers(JobStore("127.0.0.1", port, joining=True), late.freeze()))
    newcomer.start()
    assert meet_newcomers(store, survivor.freeze(), within_s=60.0)
    newcomer.join(60)
    survivor.iteration = 2
    assert meet_newcomers(store, survivor.freeze(), within_s=0.0)
