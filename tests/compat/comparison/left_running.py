"""What still runs of a recipe, however it detached itself: known by the recipe's folder, in its environment or as its cwd."""

import contextlib
import os
import signal
import time
from pathlib import Path


def living(folder: Path, argument: str = "") -> list[int]:
    """Pids of processes that were started in a recipe's folder or below it; with `argument`, only those with that word on their
    command line. Zombies are not among them."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_of(pid, folder, argument)]


def wait_living(folder: Path, argument: str, count: int = 1, within_s: float = 60.0) -> list[int]:
    """Pids of the processes with that word, once there are as many as that. Fail if there never are."""
    deadline = time.monotonic() + within_s
    while len(found := living(folder, argument)) < count:
        assert time.monotonic() < deadline, f"{len(found)} instead of {count} processes with the argument {argument}"
        time.sleep(0.02)
    return found


def wait_gone(folder: Path, argument: str, within_s: float) -> bool:
    """Whether no process with that word on its command line is left in the folder, or has gone within that time."""
    deadline = time.monotonic() + within_s
    while living(folder, argument):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_all(folder: Path) -> None:
    """SIGKILL to all of it, also to what comes up meanwhile, and remove the shared memory of launchers among them."""
    killed: set[int] = set()
    deadline = time.monotonic() + 10
    while found := living(folder):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        assert time.monotonic() < deadline, f"cannot be killed: {found}"
        time.sleep(0.02)
    for pid in killed:
        for board in Path("/dev/shm").glob(f"rsup-board-{os.getuid()}-{pid}-*"):
            board.unlink(missing_ok=True)


def _is_of(pid: int, folder: Path, argument: str) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        if pid == os.getpid() or (process / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
            return False
        if argument and argument.encode() not in (process / "cmdline").read_bytes().split(b"\0"):
            return False
        words = (process / "environ").read_bytes().split(b"\0")
        places = [os.readlink(process / "cwd"), *(os.fsdecode(word[7:]) for word in words if word.startswith(b"TMPDIR="))]
    except OSError:
        return False
    return any(place == str(folder) or place.startswith(f"{folder}/") for place in places)
