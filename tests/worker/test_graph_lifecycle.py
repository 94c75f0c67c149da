"""Graphs go before what they refer to: process groups, optimizer state that moves, an entry that is over; or nothing goes."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rsup.worker.cuda_graph import lifecycle
from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.optimizer_offload import OptimizerOffload
from rsup.worker.reference.ranks import joined

WITHIN_S = 60.0
CPU = torch.device("cpu")


class FakeGraph:
    """Stands for a captured graph; `on_reset` sees the world as it is when the graph goes."""

    def __init__(self, on_reset: Callable[[], object] = lambda: None) -> None:
        self._on_reset = on_reset
        self.num_resets = 0
        lifecycle.register(self)

    def reset(self) -> None:
        self.num_resets += 1
        self._on_reset()


@pytest.fixture(autouse=True)
def only_graphs_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_graphs", type(lifecycle._graphs)())
    monkeypatch.setattr(lifecycle, "_aborts", [])


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def stuck_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The device is at work, as with a replay that waits for a lost rank, until the event is set."""
    idle = threading.Event()
    of_others = set(threading.enumerate())  # other tests' listeners, which end with the interpreter
    monkeypatch.setattr(lifecycle, "drain", lambda: idle.wait(WITHIN_S))
    yield idle
    idle.set()
    for thread in set(threading.enumerate()) - of_others:
        if thread.name.startswith("rsup-"):
            thread.join(WITHIN_S)
            assert not thread.is_alive(), thread.name


def test_all_graphs_that_somebody_holds_are_reset_and_may_be_again() -> None:
    graphs = [FakeGraph(), FakeGraph()]
    FakeGraph(lambda: pytest.fail("nobody holds it"))
    gc.collect()
    assert set(lifecycle.live_graphs()) == set(graphs)
    assert lifecycle.destroy_graphs() and lifecycle.destroy_graphs()
    assert [graph.num_resets for graph in graphs] == [2, 2]
    assert lifecycle.memory_returned_bytes() == 0  # no device, nothing of it comes back
    told = lifecycle.let_go_of_graphs("for the test")
    assert (told.num_graphs, told.problem) == (2, "") and "destroyed in" in str(told) and str(told).endswith("returned: 0 MiB")


def test_what_comes_back_to_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [5 << 20]
    monkeypatch.setattr(lifecycle, "_reserved_bytes", lambda: reserved[0])
    graph = FakeGraph(lambda: reserved.__setitem__(0, 2 << 20))
    assert lifecycle.destroy_graphs() and graph.num_resets == 1
    assert lifecycle.memory_returned_bytes() == 3 << 20


def test_graphs_go_before_the_process_group_that_the_user_destroys(group: None) -> None:
    seen: list[bool] = []
    graph = FakeGraph(lambda: seen.append(dist.is_initialized()))
    lifecycle.destroy_process_group()
    assert seen == [True] and not dist.is_initialized() and graph.num_resets == 1


def test_a_device_that_does_not_drain_keeps_its_graphs_and_its_groups(group: None, stuck_device: threading.Event) -> None:
    graph = FakeGraph()
    with pytest.raises(GraphError, match="still at work after") as raised:
        lifecycle.destroy_process_group(within_s=0.05)
    assert "process groups cannot be destroyed: 1 CUDA graphs" in str(raised.value) and "starts it anew" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert dist.is_initialized() and graph.num_resets == 0
    assert not lifecycle.destroy_graphs(0.05)
    stuck_device.set()  # it drains after all: whoever has gone on keeps the graph
    for thread in threading.enumerate():
        if thread.name == "rsup-destroy-graphs":
            thread.join(WITHIN_S)
    assert graph.num_resets == 0
    assert lifecycle.destroy_graphs() and graph.num_resets == 1


def test_a_graph_that_cannot_be_destroyed_is_named_and_holds_up_no_other() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with `TORCH_USE_CUDA_DSA`")

    graphs = [FakeGraph(fail), FakeGraph(), FakeGraph()]
    with pytest.raises(GraphError, match="FakeGraph was not destroyed: RuntimeError: CUDA error: an illegal memory") as raised:
        lifecycle.let_go_of_graphs("the test cannot go on")
    assert "\n" not in str(raised.value)
    assert [graph.num_resets for graph in graphs] == [1, 1, 1]


def test_an_abort_is_not_waited_for_while_graphs_live_but_before_groups_go() -> None:
    gone = threading.Event()
    ended: list[bool] = []

    def abort() -> None:  # as NCCL's: it ends when no graph is left that was captured with the communicator
        ended.append(gone.wait(WITHIN_S))

    graph = FakeGraph(gone.set)
    lifecycle.abort_beside([abort, abort])
    assert ended == []
    assert lifecycle.destroy_graphs(WITHIN_S)
    assert ended == [True, True] and graph.num_resets == 1


def test_aborts_without_a_graph_are_waited_for_by_whoever_goes_on() -> None:
    begun, ended = threading.Event(), threading.Event()
    threads = lifecycle.abort_beside([lambda: begun.set() or ended.wait(WITHIN_S)])
    assert begun.wait(WITHIN_S) and [thread.is_alive() for thread in threads] == [True]
    ended.set()
    assert lifecycle.destroy_graphs(WITHIN_S)
    assert [thread.is_alive() for thread in threads] == [False]


def test_an_abort_that_does_not_end_is_told() -> None:
    never = threading.Event()
    graph = FakeGraph()
    lifecycle.abort_beside([never.wait])
    with pytest.raises(GraphError, match=r"still being aborted after 0\.05 s \(a CUDA graph that nobody"):
        lifecycle.let_go_of_graphs("the test cannot go on", 0.05)
    never.set()
    assert lifecycle.destroy_graphs(WITHIN_S) and graph.num_resets == 2


def test_graphs_go_before_the_optimizers_state_moves_either_way() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    seen: list[int] = []
    graph = FakeGraph(lambda: seen.append(optimizer.state[module.weight]["exp_avg"].data_ptr()))
    offload = OptimizerOffload(optimizer, is_away=lambda tensor: True)
    here = optimizer.state[module.weight]["exp_avg"].data_ptr()
    with offload.away():
        away = optimizer.state[module.weight]["exp_avg"].data_ptr()
    assert seen == [here, away] and here != away and graph.num_resets == 2


def test_state_stays_where_a_graph_still_runs(stuck_device: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    graph = FakeGraph()
    offload = OptimizerOffload(optimizer, is_away=lambda tensor: True)
    monkeypatch.setattr(lifecycle, "_destroy", lambda within_s, destroy=lifecycle._destroy: destroy(0.05))
    with pytest.raises(GraphError, match="the optimizer's state cannot be moved: 1 CUDA graphs"):
        offload.offload_to_cpu()
    assert not offload.is_offloaded and graph.num_resets == 0


def test_the_trainer_leaves_its_groups_without_graphs_and_only_on_a_clean_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    seen: list[bool] = []
    graph = FakeGraph(lambda: seen.append(dist.is_initialized()))
    with joined(CPU, 10.0):
        assert graph.num_resets == 0
    assert seen == [True] and not dist.is_initialized()
    with contextlib.suppress(RuntimeError), joined(CPU, 10.0):
        raise RuntimeError("of the training")
    assert dist.is_initialized() and graph.num_resets == 1
    lifecycle.destroy_process_group()


def test_an_interpreter_that_ends_destroys_its_graphs_and_a_forked_child_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise GraphError("it is captured just now")

    graphs = [FakeGraph(fail), FakeGraph()]
    lifecycle._leave_interpreter(os.getpid() + 1)
    assert [graph.num_resets for graph in graphs] == [0, 0]
    answers = [True, False, False]
    monkeypatch.setattr(lifecycle, "is_idle", answers.pop)
    lifecycle._leave_interpreter(os.getpid())
    assert [graph.num_resets for graph in graphs] == [1, 1] and answers == []


def test_an_interpreter_that_ends_leaves_a_device_that_is_at_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FakeGraph()
    monkeypatch.setattr(lifecycle, "is_idle", lambda: False)
    monkeypatch.setattr(lifecycle, "AT_EXIT_WITHIN_S", 0.05)
    lifecycle._leave_interpreter(os.getpid())
    assert graph.num_resets == 0


# ------------------------------------------------------------------------------------------------------ in-process restart


class Backend:
    """As NCCL's: an abort ends the kernels at once, and returns when no graph is left."""

    def __init__(self, idle: threading.Event) -> None:
        self.graphs_gone = threading.Event()
        self.events: list[str] = []
        self._idle = idle

    def abort(self) -> None:
        self._idle.set()
        assert self.graphs_gone.wait(WITHIN_S)
        self.events.append("aborted")


class Leaving:
    """The steps of a restart, as `inprocess.wrapping` puts them together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend | None = None) -> None:
        pytest.importorskip("nvidia_resiliency_ext")
        from rsup.worker.inprocess import callbacks, groups
        from rsup.worker.inprocess.timings import RestartTimings

        if backend is not None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(groups, "_nccl", lambda group: backend)
        self.events = backend.events if backend is not None else []
        self.failed: list[Exception] = []
        old = groups.OldGroups(RestartTimings())
        self.abort = callbacks.AbortGroups(old, lambda: None, lambda: None)
        self.leave = callbacks.LeaveEntry(
            old,
            RestartTimings(),
            left=lambda state: None,
            clean_up=lambda: self.events.append("cleaned up"),
            keeps=lambda state, kept: None,
            failed=self.failed.append,
            empty_cuda_cache=False,
        )


def test_a_restart_aborts_first_then_destroys_graphs_then_groups(
    group: None, stuck_device: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(stuck_device)

    def reset() -> None:
        assert stuck_device.is_set() and dist.is_initialized()
        backend.events.append("graph destroyed")
        backend.graphs_gone.set()

    graph = FakeGraph(reset)
    restart = Leaving(monkeypatch, backend)
    restart.abort("state")  # returns, though the abort has not
    restart.leave("state")
    assert backend.events == ["cleaned up", "graph destroyed", "aborted"]
    assert graph.num_resets == 1 and not dist.is_initialized() and not restart.failed


def test_an_entry_whose_graph_does_not_end_fails_and_keeps_its_groups(
    group: None, stuck_device: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = FakeGraph()
    monkeypatch.setattr(lifecycle, "_destroy", lambda within_s, destroy=lifecycle._destroy: destroy(0.05))
    restart = Leaving(monkeypatch)
    with pytest.raises(GraphError, match="this entry's process groups cannot be destroyed: 1 CUDA graphs"):
        restart.leave("state")
    assert dist.is_initialized() and graph.num_resets == 0 and len(restart.failed) == 1
