"""Rank processes: whatever they leave behind is found and ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.launcher import rank_cgroup
from rsup.launcher.processes import RankProcess, SpawnError, become_subreaper, marked_processes, reap_everything, spawn_rank
from rsup.launcher.reaping import describe, read_stat

PRELUDE = "import os, subprocess, sys, time, signal, json\n"
TELL = PRELUDE + "def tell(**pids): print(json.dumps(pids), flush=True)\n"


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    become_subreaper()
    yield mark
    assert reap_everything(mark, [], time.monotonic() + 60) == []


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "condition not met in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def start(mark: str, script: str, env: dict[str, str] | None = None) -> tuple[RankProcess, dict[str, int]]:
    """Start a rank and read the line of pids that it tells."""
    reader, writer = os.pipe()
    environ = {**os.environ, "RSUP_MARK": mark, **(env or {})}
    rank = spawn_rank([sys.executable, "-c", TELL + script], environ, local_rank=0, stdin=None, stdout_fd=writer, stderr_fd=2)
    os.close(writer)
    with open(reader) as lines:
        line = lines.readline()
    return rank, json.loads(line) if line.strip() else {}


def wait_end(rank: RankProcess) -> tuple[int, int]:
    wait_for(lambda: rank.exit_status() is not None)
    status = rank.exit_status()
    assert status is not None
    return status


def test_exit_code_and_signal(mark: str) -> None:
    for script, expected in (("sys.exit(3)", (3, 0)), ("os.kill(os.getpid(), 11)", (139, 11))):
        rank, _ = start(mark, script)
        assert wait_end(rank) == expected
        assert rank.exit_status() == expected
        rank.close()
        rank.close()


def test_a_rank_is_a_session_with_default_signals(mark: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        rank, told = start(
            mark,
            "tell(sid=os.getsid(0), pid=os.getpid(), mask=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "
            "pipe=int(open('/proc/self/status').read().split('SigIgn:')[1].split()[0], 16))",
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert told["sid"] == told["pid"] == rank.pid
    assert told["mask"] == 0
    pythons_own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    below_rt_min = (1 << (signal.SIGRTMIN - 1)) - 1 & ~(0b11 << 31)  # 32 and 33 are the C library's, nobody can set them
    assert told["pipe"] & below_rt_min & ~pythons_own == 0
    assert wait_end(rank) == (0, 0)
    rank.close()


@pytest.mark.parametrize("ignored", [True, False])
def test_an_ignored_hangup_stays_ignored(mark: str, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        rank, told = start(mark, "tell(ignored=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told["ignored"] is ignored
    wait_end(rank)
    rank.close()


def test_a_program_that_cannot_start(mark: str, tmp_path: Path) -> None:
    no_magic, not_executable = tmp_path / "no-magic", tmp_path / "not-executable"
    no_magic.write_text("echo hello\n")
    no_magic.chmod(0o755)
    not_executable.write_text("#!/bin/sh\n")
    lost = tmp_path / "lost-interpreter"
    lost.write_text("#!/no/such/sh\n")
    lost.chmod(0o755)
    for program, code in (("/no/such", 127), ("no-such-9", 127), (no_magic, 126), (not_executable, 126), (lost, 126)):
        with pytest.raises(SpawnError) as error:
            spawn_rank([str(program)], dict(os.environ), local_rank=0, stdin=None, stdout_fd=1, stderr_fd=2)
        assert error.value.exit_code == code
        assert str(program) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SpawnError, match="working directory /no/such"):
        spawn_rank(["true"], {}, local_rank=0, stdin=None, stdout_fd=1, stderr_fd=2, cwd="/no/such")


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        tell(daemon=os.getpid())
        time.sleep(600)
    os._exit(0)
os.wait()
"""
LEAVE_BEHIND = {
    "daemonised grandchild": DAEMON + "time.sleep(600)",
    "daemonised grandchild of a rank that exited 0": DAEMON,
    "child of a rank that exited 0": "tell(child=subprocess.Popen(['sleep', '600']).pid)",
    "child of a rank that failed": "tell(child=subprocess.Popen(['sleep', '600']).pid); os._exit(5)",
    "own process group": "tell(child=subprocess.Popen(['sleep', '600'], process_group=0).pid); time.sleep(600)",
    "own session": "tell(child=subprocess.Popen(['sleep', '600'], start_new_session=True).pid)",
    "wiped environment": "tell(child=subprocess.Popen(['sleep', '600'], env={}).pid)",
    "wiped environment, own session": "tell(child=subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid)",
    "stopped": "tell(child=os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores all signals": "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 15)]; tell(p=os.getpid()); time.sleep(600)",
}


@pytest.mark.parametrize("script", LEAVE_BEHIND.values(), ids=LEAVE_BEHIND.keys())
def test_everything_is_found_and_ended(mark: str, script: str) -> None:
    rank, told = start(mark, script)
    (left,) = told.values()
    if "time.sleep(600)" not in script.splitlines()[-1] and "SIGSTOP" not in script:
        wait_end(rank)
    assert left in {process.pid for process in marked_processes(mark, [rank.pid])}
    started = time.monotonic()
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    assert time.monotonic() - started < 20
    assert not alive(left)
    assert rank.exit_status() is not None
    assert left == rank.pid or read_stat(left) is None, "a zombie was left"
    rank.close()
    assert read_stat(rank.pid) is None
    assert marked_processes(mark) == []


def test_a_rank_that_forks_as_fast_as_it_can(mark: str) -> None:
    script = "tell()\nfor _ in range(200):\n    if os.fork() == 0: os.setsid(); time.sleep(600)\ntime.sleep(600)"
    rank, _ = start(mark, script)
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    assert wait_end(rank) == (137, 9)
    rank.close()


def test_helpers_are_spared(mark: str, tmp_path: Path) -> None:
    """The keeper by pid, a helper in our own session, and a supervisor that a rank's inner launch started."""
    package = tmp_path / "rsup" / "supervisor"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import time\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "RSUP_MARK": mark}
    keeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    helper = subprocess.Popen(["sleep", "600"])
    supervisor = subprocess.Popen([sys.executable, "-m", "rsup.supervisor.main"], env=env, start_new_session=True)
    rank, _ = start(mark, "tell(); time.sleep(600)")
    try:
        wait_for(lambda: b"rsup.supervisor.main" in Path(f"/proc/{supervisor.pid}/cmdline").read_bytes())
        assert reap_everything(mark, [rank.pid], time.monotonic() + 60, keep=[keeper.pid]) == []
        assert [p.poll() for p in (keeper, helper, supervisor)] == [None, None, None]
        assert rank.exit_status() == (137, 9)
        rank.close()
    finally:
        for process in (keeper, helper, supervisor):
            process.kill()
            process.wait()


def test_signals_for_leader_and_session(mark: str) -> None:
    script = (
        "signal.signal(15, lambda *_: sys.exit(7))\n"
        "tell(child=subprocess.Popen(['sleep', '600'], process_group=0).pid)\ntime.sleep(600)"
    )
    rank, told = start(mark, script)
    assert rank.signal_leader(signal.SIGTERM)
    assert wait_end(rank) == (7, 0)
    assert alive(told["child"]), "the leader alone was told"
    assert rank.signal_session(signal.SIGTERM) == 1
    wait_for(lambda: not alive(told["child"]))
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    rank.close()
    assert not rank.signal_leader(signal.SIGTERM)


AGENT = """
import os, sys, time
from pathlib import Path
from rsup.launcher.keeper import Keeper
from rsup.launcher.processes import become_subreaper, spawn_rank
become_subreaper()
folder, mark = Path(sys.argv[1]), sys.argv[2]
keeper = Keeper.start(os.getpid(), mark, mark, folder / "spool", remove=[folder / "board"])
(folder / "board").touch()
script = '''
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
wiped = subprocess.Popen(["sleep", "600"], env={})
os.write(1, f"{os.getpid()} {child.pid} {wiped.pid}{chr(10)}".encode())  # in one piece: there are two of us
open(f"{sys.argv[1]}/ready-{os.getpid()}", "w").close()
time.sleep(600)
'''
command = [sys.executable, "-c", script, str(folder)]
ranks = [
    spawn_rank(command, {**os.environ, "RSUP_MARK": mark}, local_rank=i, stdin=None, stdout_fd=1, stderr_fd=2)
    for i in range(2)
]
keeper.set_sessions([rank.pid for rank in ranks])
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
print("keeper", keeper.pid, 0, flush=True)
HOW
"""


@pytest.mark.parametrize("how", ["time.sleep(600)", "sys.exit(1)"])
def test_the_agents_death_takes_all_with_it(tmp_path: Path, how: str) -> None:
    mark = f"test-{time.monotonic_ns()}"
    command = [sys.executable, "-c", AGENT.replace("HOW", how), str(tmp_path), mark]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    lines = [agent.stdout.readline().split() for _ in range(3)]
    keeper_pid = next(int(line[1]) for line in lines if line[0] == "keeper")
    pids = [int(word) for line in lines if line[0] != "keeper" for word in line]
    assert len(pids) == 6
    if how.startswith("time"):
        agent.kill()
    wait_for(lambda: not any(map(alive, pids)), within_s=20.0)
    agent.wait()
    wait_for(lambda: not alive(keeper_pid), within_s=20.0)
    assert not (tmp_path / "board").exists()
    agent.stdout.close()


def test_a_survivor_is_named_with_its_command_and_state(mark: str) -> None:
    rank, told = start(mark, WITHOUT_ENVIRONMENT)
    os.kill(rank.pid, signal.SIGSTOP)
    wait_for(lambda: (stat := read_stat(rank.pid)) is not None and stat.state == "T")
    (found,) = marked_processes(mark, [rank.pid])
    assert str(describe(found)) == f"{told['pid']} (python, T)"
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    rank.close()


WITHOUT_ENVIRONMENT = "import json, os, time; print(json.dumps({'pid': os.getpid()}), flush=True); time.sleep(600)"
ESCAPED = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", {WITHOUT_ENVIRONMENT!r}], {{}})
    os._exit(0)
os.wait()
time.sleep(600)
"""
REAP_ELSEWHERE = """
import sys, time
from rsup.launcher.reaping import reap_everything
assert reap_everything(sys.argv[1], [], time.monotonic() + 60) == []
"""


def test_a_process_that_left_everything_is_in_the_cgroup(mark: str) -> None:
    """As the keeper finds it: it is no parent of anything, and knows the mark."""
    rank, told = start(mark, ESCAPED)
    if told["pid"] not in rank_cgroup.members(mark):
        assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
        rank.close()
        pytest.skip("no cgroup v2 that this user may write to")
    subprocess.run([sys.executable, "-c", REAP_ELSEWHERE, mark], check=True, timeout=100, start_new_session=True)
    assert not alive(told["pid"])
    assert rank.exit_status() == (137, 9)
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    rank.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/rsup-{mark}"))
