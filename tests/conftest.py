"""Every test runs with a state and a runtime directory of its own, and nothing that it started may outlive the run."""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.launcher.processes import PR_SET_CHILD_SUBREAPER

RUN_MARK = f"RSUP_TEST_RUN={uuid.uuid4().hex}"

# torch asks a name server about each connection to its store; where an answer is lost, glibc asks again after 1 s, not after 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# The tests start thousands of interpreters: each would compile a fresh checkout's files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until the tests are collected: there is no garbage among them


def pytest_collection_finish() -> None:
    """What is there now stays: modules and thousands of tests, which no later collection need look through."""
    gc.freeze()
    gc.enable()


def survivors() -> dict[int, str]:
    """Processes that carry this test run's mark, other than this one: pid -> command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            if pid == os.getpid() or RUN_MARK.encode() not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            found[pid] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        except OSError:
            continue
    return found


def orphaned_boards() -> set[Path]:
    """Boards in shared memory whose agent is gone. (Others' jobs live on.)"""
    boards = Path("/dev/shm").glob("rsup-board-*")
    return {path for path in boards if not Path(f"/proc/{path.name.split('-')[3]}").exists()}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail the run when a process that a test started is still there, or a board still lies in shared memory."""
    name, _, value = RUN_MARK.partition("=")
    os.environ[name] = value
    boards_before = set(Path("/dev/shm").glob("rsup-board-*"))
    yield
    deadline = time.monotonic() + 60
    while (left := survivors()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left running: {left}"
    # a test beside us may just have killed an agent, whose board goes in a moment
    while (orphans := orphaned_boards() - boards_before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not orphans, f"left lying about: {orphans}"


@pytest.fixture(autouse=True)
def orphans_go_to_init() -> Iterator[None]:
    """A test that made itself the parent of orphans does so for itself only: later ones would find zombies of daemons."""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def own_directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short paths (a UNIX socket's ends at 107 bytes), removed afterwards. The state directory's parent is returned."""
    folder = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    for variable in list(os.environ):
        if variable.startswith(("RSUP_", "PET_", "TORCHELASTIC_", "SLURM_")) and variable != "RSUP_TEST_RUN":
            monkeypatch.delenv(variable)
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.setenv("RSUP_STATE_DIR", str(folder / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("RSUP_IDLE_EXIT", "1")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
