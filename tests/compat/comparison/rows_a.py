"""Rows A: the lifetime of processes. Who dies with whom, what is left behind, which signal does what."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.compat.comparison.left_running import kill_all, living, wait_gone, wait_living
from tests.compat.comparison.row import Peer, Row, Seen

TWO = ("--nproc-per-node", "2")
PLAIN: frozenset[str] = frozenset()
SLOW = frozenset({"slow"})
TABLE_ONLY = frozenset({"table only"})
"""torchrun is run for the table, and not by the test suite: it fails as in the row above."""
LEFT = "4177"
"""Argument of a `sleep` that a rank starts: it stands for a data worker, an uploader, a profiler."""
READY = "import os, signal, sys, time\nready = lambda: open(f\"ready-{os.environ['RANK']}\", 'w').close()\n"
SLEEPS = READY + "ready(); time.sleep(600)"
IGNORES_TERM = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)"


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def _started(peer: Peer, folder: Path, text: str, *options: str, ranks: int = 2, **popen: object) -> "subprocess.Popen[str]":
    """The launcher, with so many ranks past their `ready()`. Their script is marked by the argument `rank`."""
    popen = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | popen
    words = (*options, "--nproc-per-node", str(ranks), _script(folder, text), "rank")
    launcher = peer.start(folder, *words, **popen)  # type: ignore[arg-type]
    assert _wait_files(folder, *(f"ready-{rank}" for rank in range(ranks)))
    return launcher


def _run(peer: Peer, folder: Path, text: str, *options: str) -> int:
    """Run a script with two ranks to its end. Nothing is read from it: what it leaves behind would hold a pipe open."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return peer.start(folder, *options, *TWO, _script(folder, text), **quiet).wait(60)  # type: ignore[arg-type]


def _wait_files(folder: Path, *names: str, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not all((folder / name).exists() for name in names):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _ranks(folder: Path, launcher: "subprocess.Popen[str]") -> list[int]:
    return [pid for pid in living(folder, "rank") if pid != launcher.pid]


def _code(launcher: "subprocess.Popen[str]", within_s: float) -> int | None:
    """As a shell shows it; None if it has not ended by then."""
    try:
        code = launcher.wait(within_s)
    except subprocess.TimeoutExpired:
        return None
    return code if code >= 0 else 128 - code


def _since(start_s: float) -> str:
    return f"{time.monotonic() - start_s:.1f} s"


def _many(found: list[int], what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{len(found) or 'no'} {what if len(found) == 1 else plural}"


# ---------------------------------------------------------------------------------------------------- 1: who dies with whom

WITH_CHILD = (
    READY + f"import subprocess; subprocess.Popen(['sleep', '{LEFT}'], start_new_session=True); ready(); time.sleep(600)"
)


def _launcher_killed(peer: Peer, folder: Path) -> Seen:
    launcher = _started(peer, folder, WITH_CHILD)
    wait_living(folder, LEFT, 2)
    launcher.kill()
    launcher.wait()
    return _all_gone(folder)


def _all_gone(folder: Path) -> Seen:
    start_s = time.monotonic()
    gone = wait_gone(folder, "rank", 2.0) and wait_gone(folder, LEFT, 2.0)
    left = living(folder, "rank") + living(folder, LEFT)
    return Seen(gone, f"all gone after {_since(start_s)}" if gone else f"{_many(left, 'process')} live on")


def _launcher_killed_with_its_helpers(peer: Peer, folder: Path) -> Seen:
    """Nobody is left to clean up."""
    launcher = _started(peer, folder, SLEEPS)
    helpers = [pid for pid in living(folder) if pid not in living(folder, "rank")]
    for pid in (*helpers, launcher.pid):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    return _all_gone(folder)


def _helpers_killed(peer: Peer, folder: Path) -> Seen:
    """Keeper and supervisor. Training must not notice."""
    text = READY + "ready()\nwhile not os.path.exists('go'): time.sleep(0.02)\nsys.exit(0)"
    launcher = _started(peer, folder, text)
    for pid in living(folder):
        if pid not in living(folder, "rank"):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # long enough for a mistake to show
    alive = len(_ranks(folder, launcher))
    (folder / "go").touch()
    code = _code(launcher, 30)
    return Seen(alive == 2 and code == 0, f"{alive} of 2 ranks went on, rc {code}")


# ---------------------------------------------------------------------------------------- 2, 3, 8b: what ranks leave behind

FAILS_WITH_CHILD = f"""
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    subprocess.Popen(["sleep", "{LEFT}"])
    os._exit(5)
time.sleep(600)
"""
RESTARTED = f"""
import os, pathlib, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    subprocess.Popen(["sleep", "{LEFT}"], start_new_session=True)
    os._exit(5)
words = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words += path.read_bytes().split(b"\\0")
    except OSError:
        pass
sys.exit(66 if b"{LEFT}" in words else 0)
"""
LEAVES = {
    "a plain child": f"sleep {LEFT} &",
    "a child in its own session": f"setsid sleep {LEFT} &",
    "a daemon": f'(setsid sh -c "sleep {LEFT} &" &)',
    "a daemon without environment": f'(env -i setsid sh -c "sleep {LEFT} &" &)',
}
DATA_WORKERS = f"""
import multiprocessing, os, time
if __name__ == "__main__":
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=({LEFT},), daemon=True).start()
    os._exit(3 if os.environ["RANK"] == "0" else 0)
"""


def _failed_rank_leaves_child(peer: Peer, folder: Path) -> Seen:
    code = _run(peer, folder, FAILS_WITH_CHILD)
    left = living(folder, LEFT)
    return Seen(not left, f"rc {code}, its child {'lives on' if left else 'is gone'}")


def _restart_meets_child(peer: Peer, folder: Path) -> Seen:
    clean = _run(peer, folder, RESTARTED, "--max-restarts", "1") == 0
    return Seen(clean, "gone before the restart" if clean else "the restarted rank runs beside it")


def _left_by_success(command: str) -> Callable[[Peer, Path], Seen]:
    def recipe(peer: Peer, folder: Path) -> Seen:
        text = f"import os; os.system({command!r})"
        code = _run(peer, folder, text)
        left = living(folder, LEFT)
        return Seen(code == 0 and not left, f"rc {code}, {_many(left, 'process')} left")

    return recipe


def _data_workers(peer: Peer, folder: Path) -> Seen:
    code = _run(peer, folder, DATA_WORKERS)
    left = living(folder, str(folder / "script.py"))
    return Seen(not left, f"rc {code}, {_many(left, 'data worker')} left")


# ------------------------------------------------------------------------------------------------------- 4, 5, 8a: graces


def _grace_of_signal(peer: Peer, folder: Path) -> Seen:
    launcher = _started(peer, folder, IGNORES_TERM, "--shutdown-timeout", "1")
    return _ends_in_time(folder, launcher)


def _grace_of_signal_in_environment(peer: Peer, folder: Path) -> Seen:
    launcher = _started(peer, folder, IGNORES_TERM, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"})
    return _ends_in_time(folder, launcher)


def _ends_in_time(folder: Path, launcher: "subprocess.Popen[str]", within_s: float = 8.0) -> Seen:
    """TERM to the launcher: it and its ranks are gone in time."""
    start_s = time.monotonic()
    launcher.terminate()
    code = _code(launcher, within_s)
    left = _ranks(folder, launcher)
    if code is None:
        return Seen(False, f"still waiting after {within_s:.0f} s")
    return Seen(not left, f"rc {code} after {_since(start_s)}, {_many(left, 'rank')} left")


def _grace_after_peer_failure(peer: Peer, folder: Path) -> Seen:
    fails = "while os.environ['RANK'] == '0':\n    time.sleep(0.01)\n    if os.path.exists('ready-1'): sys.exit(4)\n"
    text = IGNORES_TERM.replace("ready(); ", f"ready()\n{fails}")
    start_s = time.monotonic()
    launcher = _started(peer, folder, text, "--shutdown-timeout", "2")
    code = _code(launcher, 9)
    if code is None:
        return Seen(False, "still waiting 9 s after the failure")
    return Seen(not _ranks(folder, launcher), f"rc {code} after {_since(start_s)} in all")


def _stopped_rank(peer: Peer, folder: Path) -> Seen:
    """SIGTERM to a stopped process only waits; a launcher that just sends it spends its whole grace."""
    text = SLEEPS.replace("ready(); ", "ready()\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n")
    return _ends_in_time(folder, _started(peer, folder, text, "--shutdown-timeout", "60"))


# ------------------------------------------------------------------------------------------------------ 6, 7, 8c: signals


def _takes(name: str) -> str:
    """A rank that notes the signal and trains on, and saves and leaves upon TERM."""
    return READY + (
        f"signal.signal(signal.{name}, lambda *_: open(f\"got-{{os.environ['RANK']}}\", 'w').close())\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nready()\nwhile True: time.sleep(600)"
    )


def _forwarded(name: str, *options: str) -> Callable[[Peer, Path], Seen]:
    def recipe(peer: Peer, folder: Path) -> Seen:
        launcher = _started(peer, folder, _takes(name), *options)
        launcher.send_signal(getattr(signal, name))
        got = _wait_files(folder, "got-0", "got-1", within_s=3.0)
        code = _code(launcher, 0.5)
        orphans = _ranks(folder, launcher) if code is not None else []
        if code is None:
            return Seen(got, "both ranks got it and train on" if got else "no rank got it")
        return Seen(False, f"the launcher died of it (rc {code}), {_many(orphans, 'rank')} left as orphans")

    return recipe


def _nohup(peer: Peer, folder: Path) -> Seen:
    text = READY + "ready()\nwhile not os.path.exists('go'): time.sleep(0.02)\nsys.exit(0)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        launcher = _started(peer, folder, text)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.killpg(launcher.pid, signal.SIGHUP)
    code = _code(launcher, 1.5)
    (folder / "go").touch()
    if code is not None:
        return Seen(False, f"the hang-up ended it, rc {code}")
    code = _code(launcher, 20)
    return Seen(code == 0, f"ran to its end, rc {code}")


LEADER_FIRST = (
    READY
    + f"""
import subprocess
worker = subprocess.Popen(["sleep", "{LEFT}"])  # as a data worker: without it the last checkpoint cannot be written
def save(*_):
    time.sleep(0.3)
    open(("saved-" if worker.poll() is None else "lost-") + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
ready()
while True: time.sleep(600)
"""
)


def _leader_first(peer: Peer, folder: Path) -> Seen:
    launcher = _started(peer, folder, LEADER_FIRST)
    launcher.terminate()
    code = _code(launcher, 20)
    saved, left = len(list(folder.glob("saved-*"))), living(folder, LEFT)
    return Seen(saved == 2 and not left, f"rc {code}, {saved} of 2 ranks could save, {_many(left, 'data worker')} left")


def _each_ends_it(peer: Peer, folder: Path) -> Seen:
    """TERM, INT, HUP and QUIT alike, to a launcher that `ssh` waits for: nothing may hold its pipes open."""
    seen = []
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        for path in folder.glob("ready-*"):
            path.unlink()
        launcher = _started(peer, folder, WITH_CHILD, stdout=subprocess.PIPE)
        launcher.send_signal(getattr(signal, name))
        try:
            launcher.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            return Seen(False, f"{name}: still running, or its pipe is held open, after 5 s")
        left = _ranks(folder, launcher) + living(folder, LEFT)
        if left:
            return Seen(False, f"{name}: {_many(left, 'process')} left")
        seen.append(f"{launcher.returncode}")
    return Seen(True, f"rc {', '.join(seen)} for TERM, INT, HUP, QUIT; nothing left")


IN_ITS_GROUP = '"$@"; echo $? > code; sleep 600'
"""A shell without job control: what it starts is in its process group."""


def _pipe(peer: Peer, folder: Path) -> Seen:
    """`launch | tee log`, and `ssh node launch`, end when nobody holds the pipe any more."""
    text = f"import subprocess; subprocess.Popen(['sleep', '{LEFT}'])"
    launcher = peer.start(folder, *TWO, _script(folder, text))
    launcher.wait(60)
    try:
        launcher.communicate(timeout=2)
    except subprocess.TimeoutExpired:
        return Seen(False, "the pipe is still open 2 s after its end")
    return Seen(True, "the pipe ends with it")


def _foreign_group(peer: Peer, folder: Path) -> Seen:
    shell = Peer(peer.name, ("sh", "-c", IN_ITS_GROUP, "sh", *peer.program)).start(
        folder, *TWO, _script(folder, FAILS_WITH_CHILD), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    done = _wait_files(folder, "code")
    alive = shell.poll() is None
    shell.kill()
    shell.wait()
    return Seen(done and alive, "who started it lives on" if alive else "it killed who started it")


# ------------------------------------------------------------------------------------------------------------- 8: lost host

UNTIL_THE_OTHER_IS_GONE = READY + "ready()\nwhile not os.path.exists('gone'): time.sleep(0.02)\nsys.exit(7)"


def _host_lost(peer: Peer, folder: Path) -> Seen:
    """Two nodes; the one that holds the store and decides dies with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = []
    for name in ("0", "1"):
        (folder / name).mkdir()
        words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--node-rank", name]
        words += ["--supervisor-grace", "3"] if peer.name == "rsup" else []
        script = _script(folder / name, UNTIL_THE_OTHER_IS_GONE)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        nodes.append(peer.start(folder / name, *words, script, "rank", **quiet))  # type: ignore[arg-type]
    assert _wait_files(folder, "0/ready-0", "1/ready-1")
    kill_all(folder / "0")
    nodes[0].wait()
    (folder / "1/gone").touch()
    start_s = time.monotonic()
    code = _code(nodes[1], 30)
    left = living(folder / "1", "rank")
    return Seen(bool(code) and not left, f"rc {code} after {_since(start_s)}" if code else "still waiting after 30 s")


ROWS = (
    Row("1", "launcher killed: its ranks live on", _launcher_killed, True, "all gone within 2 s"),
    Row("1+", "launcher killed with its helpers", _launcher_killed_with_its_helpers, True, "all gone within 2 s"),
    Row("1++", "keeper and supervisor killed", _helpers_killed, False, "training goes on"),
    Row("2", "a failed rank's children remain", _failed_rank_leaves_child, True, "gone with the launcher"),
    Row("2+", "a failed rank's children meet its restart", _restart_meets_child, True, "gone before the restart"),
    *(
        Row(number, f"rank exits 0 and leaves {what} behind", _left_by_success(command), True, "gone with the launcher", tags)
        for number, tags, (what, command) in zip(
            ("3", "3+", "3++", "3+++"), (PLAIN, TABLE_ONLY, TABLE_ONLY, PLAIN), LEAVES.items(), strict=True
        )
    ),
    Row("4", "grace after a signal", _grace_of_signal, False, "as `--shutdown-timeout` says"),
    Row("4+", "grace after a signal, by variable", _grace_of_signal_in_environment, False, "as the variable says"),
    Row("5", "`--shutdown-timeout 2` when a peer fails", _grace_after_peer_failure, True, "2 s and no more", SLOW),
    Row("6", "SIGUSR1 to the launcher", _forwarded("SIGUSR1"), True, "forwarded, training goes on"),
    Row("6+", "SIGUSR2 to the launcher", _forwarded("SIGUSR2"), True, "forwarded, training goes on", TABLE_ONLY),
    Row("6++", "SIGXCPU to the launcher", _forwarded("SIGXCPU"), True, "forwarded, training goes on", TABLE_ONLY),
    Row("7", "`nohup`, and the terminal goes", _nohup, True, "an ignored SIGHUP stays ignored"),
    Row("8", "the node that holds the store dies", _host_lost, False, "the others end in bounded time, not with 0"),
    Row("8a", "a stopped rank, and SIGTERM", _stopped_rank, True, "ends without waiting out the grace", SLOW),
    Row("8b", "data workers of a rank that ends by `os._exit`", _data_workers, True, "gone with the launcher"),
    Row("8c", "SIGTERM reaches data workers first", _leader_first, True, "ranks first, the rest after them"),
    Row("8d", "TERM, INT, HUP, QUIT; pipes held open", _each_ends_it, True, "all end it, nothing left"),
    Row("8d+", "`launch | tee log` does not end", _pipe, True, "ends with the launcher"),
    Row("8e", "launcher in its starter's process group", _foreign_group, False, "that group is never signalled"),
)
