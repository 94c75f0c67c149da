"""What a training function may do that a restart must survive or name: swallow the interruption, keep groups, fail for good."""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("nvidia_resiliency_ext")

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import monitor_thread
from nvidia_resiliency_ext.inprocess.state import State
from torch._C._distributed_c10d import HashStore, TCPStore

from rsup.worker.checkpoint_directory import CheckpointError
from rsup.worker.inprocess import callbacks, faults, interruption, leftovers, preconditions
from rsup.worker.inprocess.groups import KeptGroup, OldGroups
from rsup.worker.inprocess.interruption import Interruption, name_of
from rsup.worker.inprocess.job_store import JobStore
from rsup.worker.inprocess.kept import holder_of
from rsup.worker.inprocess.leftovers import Leftovers
from rsup.worker.inprocess.timings import RestartTimings


class Stop(BaseException):
    """Stands for NVRx's interruption."""


# --------------------------------------------------------------------------------------------------------- the interruption


def test_an_interruption_on_its_way_is_met_and_one_that_is_gone_was_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = Interruption(Stop)
    assert not calm.is_under_way
    assert not calm.was_swallowed()
    monkeypatch.setattr(interruption, "DELIVERED_WITHIN_S", 0.05)
    gone = Interruption(Stop)
    gone.begin()
    gone.sent()
    assert gone.was_swallowed()
    gone.begin()  # of the next entry: what was sent for the last one tells nothing
    monkeypatch.setattr(interruption, "SENT_WITHIN_S", 0.05)
    assert not gone.was_swallowed()


def test_nobody_is_accused_before_nvrx_has_raised_the_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stood in a collective for longer than an interruption takes is freed, and NVRx raises it only then."""
    monkeypatch.setattr(interruption, "DELIVERED_WITHIN_S", 0.05)
    monkeypatch.setattr(interruption, "_watched", None)
    monkeypatch.setattr(monitor_thread, "async_raise", monitor_thread.async_raise)
    coming, main = Interruption(Stop), threading.get_ident()
    interruption.watch(coming)
    coming.begin()
    coming._begun_s -= 100

    def asks() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[main])
        return any(frame.f_code is Interruption.was_swallowed.__code__ for frame, _ in stack)

    def raise_it() -> None:
        while not asks():
            time.sleep(0.005)
        time.sleep(0.2)  # longer than one that was raised would take
        monitor_thread.async_raise(main, Stop)

    threading.Thread(target=raise_it, daemon=True).start()
    with pytest.raises(Stop):
        coming.was_swallowed()
    deadline_s = time.monotonic() + 60
    while not coming._sent_s:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert coming.was_swallowed()


def test_an_error_raised_while_the_interruption_was_handled_is_known_by_it() -> None:
    def clean_up_that_fails() -> None:
        try:
            raise Stop
        finally:
            raise ValueError("in a finally")

    with pytest.raises(ValueError, match="finally") as raised:
        clean_up_that_fails()
    assert Interruption(Stop).is_cause_of(raised.value)
    assert not Interruption(Stop).is_cause_of(ValueError("on its own"))
    assert name_of(send_nothing).startswith("send_nothing (") and name_of(send_nothing).endswith(f"{__file__}:{LINE})")


def send_nothing() -> None:
    pass


LINE = send_nothing.__code__.co_firstlineno


# ------------------------------------------------------------------------------------------------------- operating errors


def test_an_operating_error_ends_the_job_unless_it_is_of_a_kind_that_may_pass() -> None:
    def failed(cause: Exception) -> CheckpointError:
        try:
            try:
                raise cause
            except Exception as error:
                raise CheckpointError(f"cannot load it: {error}") from None
        except CheckpointError as error:
            return error

    assert not faults.may_pass(CheckpointError("there is no whole checkpoint"))
    assert not faults.may_pass(failed(FileNotFoundError(errno.ENOENT, "no such file")))
    assert faults.may_pass(failed(OSError(errno.ESTALE, "stale file handle")))
    assert faults.may_pass(failed(RuntimeError("Connection closed by peer [127.0.0.1]:5")))


def test_a_store_that_is_closed_on_its_waiters_makes_victims_in_one_line(tmp_path: Path) -> None:
    """torch's own warning of it, with its C++ frames, does not reach the terminal; its errors would."""
    script = tmp_path / "waiter.py"
    script.write_text(WAITER)
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "victim\n", done
    assert "frame #" not in done.stderr and "Exception raised" not in done.stderr, done.stderr


WAITER = """
import os, signal, threading
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from rsup.worker.inprocess import faults, torch_log
reading, writing = os.pipe()
server = os.fork()
if server == 0:
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(kept.port).encode())
    signal.pause()
torch_log.only_errors()
store = TCPStore("127.0.0.1", int(os.read(reading, 10)), is_master=False, wait_for_workers=False)
threading.Timer(0.2, lambda: os.kill(server, signal.SIGKILL)).start()
try:
    store.wait(["never"], timedelta(seconds=20))
except Exception as error:
    print("victim" if faults.describe(error, 1, 0).victim else repr(error))
"""


# ------------------------------------------------------------------------------------------------------------ what is kept


class Thing:
    pass


def test_the_holder_is_named_by_its_variable() -> None:
    module = types.ModuleType("users_script")
    sys.modules[module.__name__] = module
    in_list, in_closure, in_local = Thing(), Thing(), Thing()
    try:
        module.__dict__["KEPT"] = [in_list]
        module.__dict__["step"] = closed_over(in_closure)
        del in_list, in_closure
        gc.freeze()  # as before the first entry
        found = holder_of(module.__dict__["KEPT"][0], within_s=60.0)
        assert found == "the global variable KEPT of users_script (a list)"
        found = holder_of(module.__dict__["step"](), within_s=60.0)
        assert found.startswith("the global variable step of users_script (a ")
    finally:
        del sys.modules[module.__name__]
        gc.unfreeze()
    assert "the local variable in_local in test_the_holder_is_named_by_its_variable" in holder_of(in_local)
    assert holder_of(in_local, within_s=0.0) == holder_of(in_local)  # what is near costs no search


def closed_over(thing: Thing) -> Any:
    def step() -> Thing:
        return thing

    return step


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_groups_that_are_kept_are_told_apart_from_those_that_go(group: None) -> None:
    preconditions.import_early()
    groups = OldGroups(RestartTimings())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    groups.abort()
    assert [kept.has_sockets for kept in groups.destroy()] == [True]
    assert not dist.is_initialized()
    del model
    assert groups.destroy() == []


def test_nothing_is_kept_by_ddp_itself(group: None) -> None:
    """torch.distributed.nn would keep the group of the moment in which it is imported, in default arguments."""
    preconditions.import_early()
    groups = OldGroups(RestartTimings())
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    groups.look()
    gc.collect()
    assert groups.destroy() == []


class Leaving:
    """A rank with leftovers of its own, and what it says."""

    def __init__(self, port: int, hard_limit_s: float) -> None:
        self.said: list[str] = []
        self.ended: list[str] = []
        self.leftovers = Leftovers(JobStore("127.0.0.1", port), self.said.append, self._end, hard_limit_s)

    def _end(self, text: str) -> None:
        self.ended.append(text)
        raise SystemExit


HELD = Thing()


def test_a_rank_ends_only_where_its_open_connections_hold_others_up() -> None:
    """And well before the hard limit of those that it holds up."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Leaving(server.port, hard_limit_s=0.8)
    assert rank.leftovers._within_s < 0.4
    assert Leaving(server.port, hard_limit_s=90.0).leftovers._within_s == leftovers.LONGEST_WAIT_S
    here, other = State(0, 2).freeze(), State(1, 2).freeze()
    rank.leftovers.left(here)
    rank.leftovers.kept(here, [KeptGroup(HELD, has_sockets=False)])
    assert len(rank.said) == 1
    assert "the global variable HELD of tests.worker.test_inprocess_misuse keeps a process group" in rank.said[0]
    with pytest.raises(SystemExit):
        rank.leftovers.kept(here, [KeptGroup(HELD, has_sockets=True)])
    assert "in which rank 1 waits: this process ends" in rank.ended[0]
    rank.leftovers.left(other)
    rank.leftovers.kept(here, [KeptGroup(HELD, has_sockets=True)])
    assert (len(rank.said), len(rank.ended)) == (1, 1)


# ------------------------------------------------------------------------------------------------- devices, times, the rest


def test_the_health_check_asks_the_device_in_use_and_makes_no_context_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank was moved to GPU 1, by `device_id` only: the current device is still 0, and `LOCAL_RANK` says 3."""
    asked: list[tuple[int, str | None]] = []
    current = [0]

    class Device:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def synchronize(device: Any = None) -> None:
        asked.append((device.index, os.environ.get("LOCAL_RANK")))

    monkeypatch.setenv("LOCAL_RANK", "3")
    for name, fake in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: f"cuda:{current[-1]}",
        "device": Device,
        "synchronize": synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False)
    failures: list[str] = []
    check = callbacks.DeviceAnswers(failures.append)
    state = State(0, 2).freeze()
    assert check(state) is state
    assert asked == [(1, None), (1, None)]
    assert os.environ["LOCAL_RANK"] == "3"

    def broken(device: Any = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check(state)
    assert failures == ["RuntimeError: CUDA error: an illegal memory access was encountered"]


def test_the_steps_of_a_restart_add_up_to_its_time() -> None:
    timings = RestartTimings()
    timings.mark("of no restart")
    assert timings.end() == (0.0, {})
    timings.begin()
    timings.mark("left the function")
    timings.begin()
    timings.beside("abort", 7.0)
    timings.mark("groups")
    took_s, steps = timings.end()
    assert list(steps) == ["left the function", "(abort)", "groups"]
    assert steps["left the function"] + steps["groups"] <= took_s < 7.0
    assert timings.end() == (0.0, {})


def test_an_abort_is_waited_for_by_who_leaves_and_not_by_who_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread is freed when an abort begins; the next entry may begin when it has ended."""
    from rsup.worker.cuda_graph import lifecycle

    go = threading.Event()
    timings = RestartTimings()
    timings.begin()
    groups = OldGroups(timings)

    class Backend:
        def abort(self) -> None:
            assert go.wait(60)

    groups._aborts += lifecycle.abort_beside([lambda: groups._abort(Backend())])
    threading.Timer(0.1, go.set).start()
    began_s = time.monotonic()
    groups.wait_until_aborted()
    assert go.is_set()
    assert "(abort)" in timings.end()[1]
    assert time.monotonic() - began_s < 20
    assert lifecycle.destroy_graphs(5.0)
