"""Signals to a launcher with real ranks: what is passed on, to whom, how long ranks have, and Ctrl-Z."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.launcher.process_table import read_stat
from rsup.launcher.stop_signals import SignalInbox

WRAPPED = '#!/bin/sh\n"$PYTHON" rank.py\nexit $?\n'
"""As many scripts are started: the shell is the rank's own process, and has no handler for anything."""
RANK = """
import os, signal, sys, time
rank = os.environ["RANK"]
def note(name): open(f"{name}-{rank}", "w").close()
signal.signal(signal.SIGUSR1, lambda *_: note("usr1"))
signal.signal(signal.SIGRTMIN + 3, lambda *_: note("rt3"))
def leave(*_):
    note("told")
    time.sleep(float(os.environ.get("SAVES_FOR", "0")))
    note("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
note("up")
while not os.path.exists("end"): time.sleep(0.02)
"""


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


class Launch:
    """`rsup launch` of two ranks in a folder of its own, in a process group but not a session of its own."""

    def __init__(self, folder: Path, script: str, *options: str, **env: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        wrapper = folder / "wrapper.sh"
        wrapper.write_text(WRAPPED)
        wrapper.chmod(0o755)
        words = [sys.executable, "-m", "rsup.launcher", "launch", "--nproc-per-node", "2", *options, script]
        with open(folder / "said", "w") as said:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ | {"PYTHON": sys.executable} | env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )
        until(lambda: self.has("up"))

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def has(self, name: str) -> bool:
        return all((self.folder / f"{name}-{rank}").exists() for rank in (0, 1))

    def states(self) -> list[str]:
        """Of the ranks' processes."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                if (
                    "rank.py" in words
                    and int(name) != self.process.pid
                    and os.readlink(f"/proc/{name}/cwd") == str(self.folder)
                ):
                    stat = read_stat(int(name))
                    found.append(stat.state if stat else "?")
            except OSError:
                continue
        return found


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    made: list[Launch] = []

    def start(script: str, *options: str, **env: str) -> Launch:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Launch(folder, script, *options, **env))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGCONT)
            one.process.kill()
        one.process.wait()


def test_signals_reach_the_training_behind_a_shell_and_it_goes_on(launch: Callable[..., Launch]) -> None:
    one = launch("./wrapper.sh", "--no-python")
    for signum in (signal.SIGUSR1, signal.SIGRTMIN + 3, signal.SIGXCPU, signal.SIGUSR1):
        one.process.send_signal(signum)
    until(lambda: one.has("usr1") and one.has("rt3") and "SIGXCPU" in one.said)
    (one.folder / "end").touch()
    assert one.process.wait(60) == 0, one.said
    assert one.said.count("rsup: SIGUSR1 passed on to all 2 ranks; training goes on\n") == 1
    assert "rsup: SIGRTMIN+3 passed on to all 2 ranks; training goes on\n" in one.said
    assert "rsup: SIGXCPU was not passed on: no rank has a handler for it; training goes on\n" in one.said


def test_the_training_behind_a_shell_has_the_grace_too(launch: Callable[..., Launch]) -> None:
    """The shell dies of SIGTERM at once; what it ran is told then, and has what is left. The grace is the signal's own."""
    one = launch(
        "./wrapper.sh",
        "--no-python",
        "--shutdown-timeout",
        "1",
        "--stop-grace",
        "1",
        "--signal-grace",
        "TERM=60",
        SAVES_FOR="1.5",
    )
    one.process.terminate()
    assert one.process.wait(90) == 143, one.said
    assert one.has("saved")


def test_the_schedulers_end_shortens_a_grace_and_is_said(launch: Callable[..., Launch]) -> None:
    for ahead_s in (13, 60):  # the end is counted from the launch on: the later one for a machine on which that takes long
        end_s = int(time.time()) + ahead_s
        options = ("--deadline-margin", "4", "--signal-grace", "TERM=300")
        one = launch("rank.py", *options, SLURM_JOB_END_TIME=str(end_s), SAVES_FOR="600")
        if time.time() < end_s - 8:
            break
        one.process.kill()
    one.process.terminate()
    assert one.process.wait(100) == 143, one.said
    assert one.has("told") and not one.has("saved")
    assert "rsup: the scheduler ends the job in " in one.said and " s instead of 300 s\n" in one.said


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(launch: Callable[..., Launch]) -> None:
    one = launch("rank.py")
    one.process.send_signal(signal.SIGTSTP)
    until(lambda: (stat := read_stat(one.process.pid)) is not None and stat.state == "T")
    until(lambda: one.states() == ["T", "T"])
    one.process.send_signal(signal.SIGCONT)
    until(lambda: one.states() and "T" not in one.states())
    (one.folder / "end").touch()
    assert one.process.wait(60) == 0, one.said


def test_a_signal_that_the_program_around_us_uses_is_left_to_it() -> None:
    """`rsup.launcher.main` in a program of the user's: pytest's own time limit uses SIGALRM, say."""
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGPROF, mine)
    try:
        inbox = SignalInbox([signal.SIGTERM])
        try:
            assert signal.getsignal(signal.SIGPROF) is mine
            assert signal.getsignal(signal.SIGHUP) not in (signal.SIG_DFL, mine)
            os.kill(os.getpid(), signal.SIGXCPU)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGHUP)
            found = sorted(inbox.read())
        finally:
            inbox.close()
        assert found == sorted([(signal.SIGXCPU, False), (signal.SIGINT, True), (signal.SIGHUP, False)])
        assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGPROF, before)
