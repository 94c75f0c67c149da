"""NVRx's monitor process as we extend it, and how many connections in-process restart makes."""

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvidia_resiliency_ext")

from nvidia_resiliency_ext.inprocess import monitor_process
from torch._C import _distributed_c10d as c10d

from rsup.supervisor import wire
from rsup.worker.inprocess import faults, job_store, monitor
from rsup.worker.inprocess.entry_store import AttemptStore
from rsup.worker.inprocess.job_store import JobStore

MONITOR = """
import os, sys
from rsup.worker.inprocess.monitor import outlive_signals
rank = os.getpid()
if os.fork() == 0:
    outlive_signals(rank)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
else:
    import signal
    signal.pause()
"""


@pytest.fixture
def rank() -> Iterator["subprocess.Popen[str]"]:
    """A rank with a monitor, which echoes lines."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MONITOR], stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        yield process
        process.kill()


def test_the_monitor_outlives_signals_as_long_as_its_rank_lives(rank: "subprocess.Popen[str]") -> None:
    """SLURM sends its signals to every process of a step."""
    assert rank.stdin is not None and rank.stdout is not None
    pid = int(rank.stdout.readline())
    for signum in monitor.OUTLIVED:
        os.kill(pid, signum)
    rank.stdin.write("still here\n")
    assert rank.stdout.readline() == "still here\n"
    rank.kill()
    rank.wait()
    os.kill(pid, signal.SIGTERM)
    ready, _, _ = select.select([rank.stdout], [], [], 60)
    assert ready and rank.stdout.readline() == ""


def test_a_rank_that_is_killed_for_the_hard_limit_is_told_of_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(monitor_process, "terminate_process", lambda *_: said.append("killed"))
    monkeypatch.setattr(monitor, "_limit", None)
    limit = monitor.HardLimit(said.append, 90.0)
    terminate: Any = monitor_process.terminate_process
    terminate("the process", "a grace")
    limit.note(waits=True)
    terminate("the process", "a grace", "a log")  # 0.7
    hung, killed, waited, _ = said
    assert isinstance(hung, wire.RankFault) and isinstance(waited, wire.RankFault) and killed == "killed"
    assert (hung.kind, hung.victim, waited.victim) == ("hard-timeout", False, True)
    assert hung.text.startswith(wire.HUNG) and waited.text.startswith(wire.WAITED_IN_VAIN)
    assert "90 s" in hung.text and wire.HARD_LIMIT in hung.text


def test_a_thread_that_waits_for_others_is_told_from_one_that_does_not() -> None:
    stand = faults.stand_of_main_thread()
    assert not stand.waits
    report = faults.soft_timeout(stand, entry=2, iteration=7, limit_s=60.0)
    assert (report.entry, report.iteration, report.victim) == (2, 7, False)
    assert "60 s" in report.text and wire.SOFT_LIMIT in report.text
    assert "it stands in test_a_thread_that_waits_for_others_is_told_from_one_that_does_not (test_inprocess_" in report.text
    frames = traceback.StackSummary.from_list(
        [("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce", ""), ("/home/train.py", 3, "train", "")]
    )
    waiting = faults.Stand(frames)
    assert waiting.waits and waiting.where == "train (train.py:3)"
    of_gpu = faults.Stand(traceback.StackSummary.from_list([("/home/train.py", 3, "train", "x = loss.item()")]))
    assert of_gpu.waits


def stand(*places: tuple[str, str]) -> faults.Stand:
    """Of a thread in those functions of those files, innermost first."""
    return faults.Stand(traceback.StackSummary.from_list([(file, 3, name, "") for name, file in places]))


def test_places_are_named_in_the_users_script() -> None:
    ours, nvrx = str(Path(faults.__file__).with_name("wrapping.py")), "/v/nvidia_resiliency_ext/inprocess/wrap.py"
    outside = (("_enter", ours), ("guarded", ours), ("__call__", nvrx), ("<module>", "/home/train.py"))
    waits = stand(
        ("wait", threading.__file__), ("get", "/v/site-packages/loader/queue.py"), ("load", "/home/data.py"), *outside
    )
    assert waits.where == "load (data.py:3)"
    assert not waits.waits, "for a thread of its own"
    assert stand(("step", "/v/site-packages/megatron/training.py"), *outside).where == "step (training.py:3)"
    joining = stand(("open", ours), ("_begin", ours), ("__call__", nvrx), ("<module>", "/home/train.py"))
    assert joining.waits and joining.joins
    assert "; it waits for the other ranks' restart" in faults.soft_timeout(joining, 2, 0, 60.0).text


# --------------------------------------------------------------------------------------------------------------- connections


class Connections:
    """Counts those that are made to the store behind `port`."""

    def __init__(self) -> None:
        self.made = 0
        self.server = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(self, *arguments: Any, **named: Any) -> object:
        self.made += 1
        return REAL_STORE(*arguments, **named)


REAL_STORE = c10d.TCPStore


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    found = Connections()
    monkeypatch.setattr(c10d, "TCPStore", found.make)
    monkeypatch.setattr(job_store, "TCPStore", found.make)
    monkeypatch.setattr(job_store, "_all_free", {})  # an earlier test's store may have had that port
    return found


def in_thread(store: JobStore, key: str) -> None:
    thread = threading.Thread(target=store.set, args=(key, "1"))
    thread.start()
    thread.join()


def test_threads_of_one_entry_after_the_other_share_a_connection(connections: Connections) -> None:
    """torch asks a name server at each one."""
    first, second = JobStore("127.0.0.1", connections.server.port), JobStore("127.0.0.1", connections.server.port)
    for number in range(5):
        in_thread(first, f"a{number}")
        in_thread(second, f"b{number}")
    assert connections.made == 1
    first.set("here", "1")
    in_thread(first, "there")
    assert connections.made == 2, "two threads that live at the same time"
    assert second.check(["a4", "b4", "there"])


def test_the_store_of_entries_is_asked_and_told_over_one_connection_each(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    attempt = AttemptStore("127.0.0.1", connections.server.port)
    for entry in range(1, 6):
        connections.server.set(f"rsup/entry/port/{entry}", str(4000 + entry))
        attempt.use_store_of(entry)
        assert os.environ["MASTER_PORT"] == str(4000 + entry)
        attempt.entry_over(entry)
    assert connections.made == 2
    assert connections.server.check([f"rsup/entry/over/{entry}" for entry in range(6)])


def test_news_of_a_fault_do_not_wait_for_a_store_that_never_comes(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    attempt = AttemptStore("127.0.0.1", connections.server.port)
    waiting = threading.Thread(target=attempt.use_store_of, args=(1,))
    waiting.start()
    attempt.entry_over(1)
    assert waiting.is_alive() and connections.server.check(["rsup/entry/over/1"])
    connections.server.set("rsup/entry/port/1", "4001")
    waiting.join(30)
    assert not waiting.is_alive()
