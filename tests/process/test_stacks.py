"""Stacks of hung and stopped ranks, and what there is where py-spy cannot look."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.launcher import stacks
from rsup.launcher.stacks import STACK_SIGNAL, process_state, take_stacks

HUNG = "import time\ndef all_reduce_for_ever():\n    print('ready', flush=True)\n    while True: time.sleep(60)\n"
RUN = "all_reduce_for_ever()\n"
REGISTER = f"""
import faulthandler, os
file = open(os.environ['RSUP_STACKS_DIR'] + '/rank-3.txt', 'a')
faulthandler.register({STACK_SIGNAL}, file)
"""

pytestmark = pytest.mark.skipif(stacks._find_py_spy() is None, reason="py-spy is not installed")


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    started = []

    def start(script: str, **environ: str) -> int:
        command = [sys.executable, "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environ})
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "condition not met in time"
        time.sleep(0.01)


def test_hung_and_stopped_ranks_in_the_order_asked(start: Callable[..., int]) -> None:
    hung, stopped = start(HUNG + RUN), start(HUNG + RUN)
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: process_state(stopped) == "T")
    first, second = take_stacks([(5, stopped, 7), (4, hung, 8)], within_s=60)
    assert (first.rank, first.pid, first.iteration, first.process_state) == (5, stopped, 7, "T")
    assert (second.rank, second.pid, second.iteration) == (4, hung, 8)
    for taken in (first, second):
        assert taken.source == "py-spy" and "all_reduce_for_ever" in taken.text
    assert process_state(stopped) == "T", "it must stay as it was"
    wait_for(lambda: process_state(hung) in ("S", "R"))


def test_a_process_that_has_ended() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (taken,) = take_stacks([(0, gone.pid, 0)])
    assert taken.source == "none" and taken.text == "the process has ended"


def spy_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "_find_py_spy", lambda: str(program))


REFUSED = 'echo "Error: Failed to suspend process\nCaused by:\n    0: EPERM: Operation not permitted" >&2; exit 1'


def test_faulthandler_where_tracing_is_refused(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy_that(tmp_path, monkeypatch, REFUSED)
    monkeypatch.setattr(stacks, "POLL_S", 0.5)  # it takes what has not grown for so long for the whole
    pid = start(REGISTER + HUNG + RUN, RSUP_STACKS_DIR=str(tmp_path))
    for _ in range(2):
        (taken,) = take_stacks([(3, pid, 0)], within_s=60)
        assert taken.source == "faulthandler"
        assert taken.text.count("all_reduce_for_ever") == 1


def test_a_rank_without_faulthandler_is_not_killed_by_asking(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy_that(tmp_path, monkeypatch, REFUSED)
    pid = start(HUNG + RUN, RSUP_STACKS_DIR=str(tmp_path))
    (taken,) = take_stacks([(3, pid, 0)], within_s=60)
    assert taken.source == "none"
    assert "Operation not permitted" in taken.text and "no faulthandler" in taken.text
    wait_for(lambda: process_state(pid) in ("S", "R"))


def test_a_wedged_spy_costs_no_more_than_its_time(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy_that(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/pids; exec sleep 600")
    pid = start(REGISTER + HUNG + RUN, RSUP_STACKS_DIR=str(tmp_path))
    started = time.monotonic()
    (first, *others) = take_stacks([(3, pid, 0), *((rank, pid, 0) for rank in range(4, 10))], within_s=8.0, parallel=4)
    assert time.monotonic() - started < 15, "less than two turns of those that are asked at once"
    assert first.source == "faulthandler"
    assert all("did not answer" in taken.text or "no time" in taken.text for taken in others)
    for spy in (tmp_path / "pids").read_text().split():
        wait_for(lambda spy=spy: process_state(int(spy)) in ("", "Z"))  # type: ignore[misc]
