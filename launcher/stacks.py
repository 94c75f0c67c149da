"""Stacks of hung ranks, taken from outside before anything is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rsup.supervisor.wire import RankStack, clip

STACK_SIGNAL = signal.SIGRTMIN + 5
"""A rank that wants to be asked registers faulthandler for this signal, writing to `$RSUP_STACKS_DIR/rank-N.txt`."""
MAX_STACK_CHARS = 48 * 1024
MAX_FRAME_CHARS = 200
_THREAD = re.compile(r"^Thread .*$", re.MULTILINE)
POLL_S = 0.02


def take_stacks(
    ranks: Sequence[tuple[int, int, int]], within_s: float = 10.0, parallel: int = 4, *, stacks_dir: Path | None = None
) -> list[RankStack]:
    """Stacks of `(rank, pid, iteration)` in the order given, within `within_s` in all; nothing is killed or changed.

    Blocks: call it from a thread of its own. py-spy first (without stopping a process that is stopped already); where that
    fails, the rank's own faulthandler, if it has registered one (`STACK_SIGNAL`, writing to `stacks_dir`/rank-N.txt or
    `$RSUP_STACKS_DIR/rank-N.txt` of its environment); else `source` is `none` and `text` the reason. May be repeated.
    """
    deadline = time.monotonic() + within_s
    # with more ranks than can be asked at once, each gets its share of the time, and what others left of theirs
    rounds = max(1, -(-len(ranks) // parallel))
    share_s = max(within_s / rounds, min(2.0, within_s))

    def take(asked: tuple[int, int, int]) -> RankStack:
        return _take_one(*asked, min(deadline, time.monotonic() + share_s), stacks_dir)

    with ThreadPoolExecutor(parallel, thread_name_prefix="stacks") as pool:
        return list(pool.map(take, ranks))


def innermost_frame(text: str, pid: int = 0) -> str:
    """`function (file.py:12)`: where the training thread of py-spy's stacks stood; empty if they do not tell. Programs without
    other threads have no names for them: it is then the process's first."""
    headers = list(_THREAD.finditer(text))
    main = [found for found in headers if '"MainThread"' in found.group() or f"Thread {pid} " in found.group()]
    lines = text[main[0].end() :].strip("\n").splitlines() if main else []
    return clip(lines[0].strip(), MAX_FRAME_CHARS) if lines and lines[0].startswith(" ") else ""


def process_state(pid: int) -> str:
    """State letter of /proc (`R`, `S`, `D`, `T` stopped, `t` traced, `Z`), empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _take_one(rank: int, pid: int, iteration: int, deadline: float, stacks_dir: Path | None) -> RankStack:
    state = process_state(pid)
    if state in ("", "Z"):
        return RankStack(rank, pid, "none", "the process has ended", state, iteration)
    # half of the time is for faulthandler, in case py-spy hangs
    text, reason = _py_spy(pid, state, time.monotonic() + (deadline - time.monotonic()) * 0.6)
    if text:
        return RankStack(rank, pid, "py-spy", text, state, iteration)
    text, other_reason = _faulthandler(rank, pid, state, deadline, stacks_dir)
    if text:
        return RankStack(rank, pid, "faulthandler", text, state, iteration)
    return RankStack(rank, pid, "none", f"{reason}; {other_reason}{_kernel_place(pid)}", state, iteration)


def _py_spy(pid: int, state: str, deadline: float) -> tuple[str, str]:
    """py-spy's text, or why there is none."""
    program = _find_py_spy()
    if program is None:
        return "", "py-spy is not installed beside this Python"
    command = [program, "dump", "--pid", str(pid)]
    if state in ("T", "t", "D"):  # it cannot be stopped to look at it, and need not be
        command.append("--nonblocking")
    within_s = max(0.1, deadline - time.monotonic())
    try:
        spy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    try:
        output, errors = spy.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        _end(spy)
        return "", f"py-spy did not answer within {within_s:.1f} s"
    text = output.decode(errors="replace").strip()
    if spy.returncode == 0 and "hread" in text:
        return clip(text, MAX_STACK_CHARS), ""
    message = errors.decode(errors="replace").strip().splitlines() or ["no message"]
    return "", f"py-spy failed: {_telling_error(message)}"


def _end(spy: subprocess.Popen[bytes]) -> None:
    """Kill it, without waiting long: it can be blocked in the kernel beside the process that it looks at."""
    spy.kill()
    for pipe in (spy.stdout, spy.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        spy.wait(0.5)


def _telling_error(lines: list[str]) -> str:
    """The innermost cause that py-spy names, in one line."""
    causes = [line.strip() for line in lines[: _index_of(lines, "Stack backtrace")] if line.strip()]
    cause = causes[-1].partition(": ")[2] if causes[-1][:1].isdigit() else causes[-1]
    return (cause.removeprefix("Error: ") or lines[0])[:300]


def _index_of(lines: list[str], start: str) -> int | None:
    return next((i for i, line in enumerate(lines) if line.startswith(start)), None)


def _find_py_spy() -> str | None:
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if os.access(folder / "py-spy", os.X_OK):
            return str(folder / "py-spy")
    return shutil.which("py-spy")


def _faulthandler(rank: int, pid: int, state: str, deadline: float, stacks_dir: Path | None) -> tuple[str, str]:
    """What the rank's faulthandler wrote when asked, or why it was not asked or wrote nothing."""
    folder = stacks_dir or _stacks_dir_of(pid)
    if folder is None or not _catches(pid):
        return "", "the rank has registered no faulthandler"
    if state in ("T", "t"):
        return "", "its faulthandler cannot run while it is stopped"
    path = folder / f"rank-{rank}.txt"
    before = _size(path)
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return "", f"its faulthandler cannot be asked: {error.strerror}"
    _wait_until(lambda: _size(path) > before and _has_settled(path), deadline)
    try:
        with path.open("rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return clip(text, MAX_STACK_CHARS), "" if text else "its faulthandler wrote nothing"


def _stacks_dir_of(pid: int) -> Path | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [entry.partition(b"=")[2] for entry in environment if entry.startswith(b"RSUP_STACKS_DIR=")]
    return Path(os.fsdecode(values[0])) if values and values[0] else None


def _catches(pid: int) -> bool:
    """Whether it has a handler for `STACK_SIGNAL`: without one the signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def _has_settled(path: Path) -> bool:
    """Whether the file stopped growing for a moment: faulthandler marks no end."""
    before = _size(path)
    time.sleep(2 * POLL_S)
    return _size(path) == before


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_until(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _kernel_place(pid: int) -> str:
    """Where it waits in the kernel, which even a process in state D tells."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return f"; it waits in the kernel at {place}" if place not in ("", "0") else ""
