"""Whose a process is: nothing of a rank escapes, and nobody else is ever hit."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rsup.launcher import rank_cgroup, rank_tag
from rsup.launcher.orphans import OrphanWatch
from rsup.launcher.process_table import all_processes, is_dead, read_stat
from rsup.launcher.processes import RankProcess, become_subreaper, marked_processes, reap_everything, spawn_rank

FREEZER = Path("/sys/fs/cgroup/freezer")
DAEMON_WITHOUT_ENVIRONMENT = '(env -i setsid sh -c "sleep 600 & echo \\$! > pid" &)'


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def number_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"own-{os.getpid()}-{time.monotonic_ns()}"
    become_subreaper()
    yield mark
    assert reap_everything(mark, [], time.monotonic() + 60) == []


@pytest.fixture
def no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most machines: the user may not make cgroups."""
    monkeypatch.setattr(rank_cgroup, "_own_cgroup", lambda: None)


def start(mark: str, *command: str, cwd: Path) -> RankProcess:
    return spawn_rank(
        command, os.environ | {"RSUP_MARK": mark}, local_rank=0, stdin=None, stdout_fd=1, stderr_fd=2, cwd=str(cwd)
    )


def elsewhere(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as somebody who is no parent of anything, like the keeper."""
    words = [sys.executable, "-c", "import os, sys, time\n" + script, *arguments]
    return subprocess.run(words, check=True, timeout=100, start_new_session=True, capture_output=True, text=True)


def test_the_tag_says_whose_a_process_is() -> None:
    largest = rank_tag.tag_for(4_194_303, "a-mark")
    assert (largest.agent_pid, largest.limit < 1 << 62) == (4_194_303, True)
    tag = rank_tag.tag_for(os.getpid(), "a-mark")  # of a launcher that lives: launches beside us end what dead ones left
    tell = "import os, sys; from rsup.launcher import rank_tag; print(rank_tag.read_tag(os.getpid()))"
    told = subprocess.run(
        [sys.executable, "-c", tell], preexec_fn=lambda: rank_tag.set_tag(tag), capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(tag)
    assert rank_tag.read_tag(os.getpid()) is None or "RSUP_MARK" in os.environ


@pytest.mark.usefixtures("no_cgroup")
def test_a_daemon_that_left_everything_behind_is_found_even_after_its_agent_and_rank(mark: str, tmp_path: Path) -> None:
    rank = start(mark, "sh", "-c", DAEMON_WITHOUT_ENVIRONMENT, cwd=tmp_path)
    daemon = number_in(tmp_path / "pid")
    until(lambda: rank.exit_status() is not None)
    rank.close()
    elsewhere(
        "from rsup.launcher import rank_cgroup\nfrom rsup.launcher.reaping import reap_everything\n"
        "rank_cgroup._own_cgroup = lambda: None\nassert reap_everything(sys.argv[1], [], time.monotonic() + 60) == []",
        mark,
    )
    until(lambda: not alive(daemon))


COMET = """
import os, signal, sys, time
until = time.monotonic() + 90
os.write(1, b"x")
if os.fork(): os._exit(0)
while time.monotonic() < until:
    os.setsid()
    if os.fork(): os._exit(0)
open("escaped", "w").close()
"""


@pytest.mark.usefixtures("no_cgroup")
def test_a_process_that_is_never_there_when_one_looks(mark: str, tmp_path: Path) -> None:
    """Each lives for less than a look through /proc takes, and has a child when it ends."""
    rank = start(mark, "env", "-i", sys.executable, "-c", COMET, cwd=tmp_path)
    until(lambda: rank.exit_status() is not None)
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    rank.close()
    time.sleep(0.05)  # it would have been elsewhere a hundred times
    tag = rank_tag.tag_for(os.getpid(), mark)
    assert not [stat for stat in all_processes() if not is_dead(stat) and rank_tag.read_tag(stat.pid) == tag]


def test_another_jobs_processes_are_left_alone(mark: str, tmp_path: Path) -> None:
    """Another mark that begins alike, in the environment and in the tag; a session whose number was a rank's; no mark."""
    other = start(mark + "0", "sleep", "600", cwd=tmp_path)
    plain = subprocess.Popen(["sleep", "600"], start_new_session=True, env=os.environ | {"RSUP_MARK_OF": mark})
    elsewhere(
        "import subprocess\nquiet = {'stdout': -3, 'stderr': -3}\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, **quiet)\n"
        "open(sys.argv[1], 'w').write(f'{child.pid}\\n')",
        str(tmp_path / "pid"),
    )
    reused = number_in(tmp_path / "pid")  # came to us as an orphan, leader of a session
    try:
        found = {process.pid for process in marked_processes(mark, [reused])}
        assert not found & {other.pid, plain.pid}
        elsewhere(
            "from rsup.launcher.reaping import reap_everything\n"
            "assert reap_everything(sys.argv[1], [int(sys.argv[2])], time.monotonic() + 60) == []",
            *(mark, str(plain.pid)),
        )
        assert alive(other.pid) and alive(plain.pid)
    finally:
        os.kill(reused, signal.SIGKILL)
        until(lambda: not alive(reused))
        os.waitpid(reused, 0)
        plain.kill()
        plain.wait()
        assert reap_everything(mark + "0", [other.pid], time.monotonic() + 60) == []
        other.close()


AGENT = """
import os, sys, time
from rsup.launcher.processes import become_subreaper, reap_everything, spawn_rank
become_subreaper()
mark = f"m-{time.monotonic_ns()}"
rank = spawn_rank(["sleep", "600"], {**os.environ, "RSUP_MARK": mark}, local_rank=0, stdin=None, stdout_fd=1, stderr_fd=2)
open("spawned", "w").close()
while not os.path.exists("adopted"): time.sleep(0.01)
assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
rank.close()
open("reaped", "w").close()
time.sleep(600)
"""
ENTRY = """
setsid sleep 601 &
(while [ ! -e spawned ]; do sleep 0.02; done
 (setsid sh -c 'echo $$ > orphan; exec sleep 602' &)
 until [ -s orphan ] && [ "$(cut -d ' ' -f 4 "/proc/$(cat orphan)/stat")" = $$ ]; do sleep 0.02; done
 : > adopted) &
exec "$@"
"""


@pytest.mark.parametrize("prefix", [(), ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")], ids=["shell", "PID 1"])
def test_daemons_of_the_shell_that_became_the_launcher_live_on(prefix: Sequence[str], tmp_path: Path) -> None:
    """A container's entry point starts sshd, say, and execs the launcher; what it started is an orphan that came to us."""
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace")
    (tmp_path / "agent.py").write_text(AGENT)
    words = [*prefix, "sh", "-c", ENTRY, "sh", sys.executable, "agent.py"]
    agent = subprocess.Popen(words, cwd=tmp_path, start_new_session=True)
    try:
        until(lambda: (tmp_path / "reaped").exists())
        until(lambda: sleepers(tmp_path) == ["601", "602"])  # they may still be about to become what they are
    finally:
        for pid in children_in(tmp_path):
            with contextlib.suppress(ProcessLookupError):  # the first one of a pid namespace takes the others with it
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        until(lambda: not children_in(tmp_path))


def children_in(folder: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == str(folder):
                found.append(int(name))
        except OSError:
            continue
    return found


def sleepers(folder: Path) -> list[str]:
    """The numbers of those of the shell's daemons that live."""
    return sorted(word for pid in children_in(folder) for word in arguments(pid) if word in ("601", "602"))


def arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def test_helpers_and_what_they_start_are_spared(mark: str, tmp_path: Path) -> None:
    """A warm standby carries the mark and the tag; what its imports run must live too."""
    standby = start(mark, "sh", "-c", "setsid sleep 600 & echo $! > pid; wait", cwd=tmp_path)
    child = number_in(tmp_path / "pid")
    assert marked_processes(mark, [], keep=[standby.pid]) == []
    assert reap_everything(mark, [], time.monotonic() + 60, keep=[standby.pid]) == []
    assert alive(standby.pid) and alive(child)
    assert reap_everything(mark, [standby.pid], time.monotonic() + 60) == []
    standby.close()


def test_the_dead_among_a_ranks_descendants_are_reaped_while_it_runs(mark: str, tmp_path: Path) -> None:
    def zombies() -> set[int]:
        stats = [read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
        return {stat.pid for stat in stats if stat is not None and stat.parent == os.getpid() and stat.state == "Z"}

    before = zombies()
    script = "for i in 1 2 3 4 5; do (setsid sleep 0.01 &); done; exec sleep 600"
    rank = start(mark, "sh", "-c", script, cwd=tmp_path)
    mine = subprocess.Popen(["true"], start_new_session=True)  # who started it wants to know how it ended
    until(lambda: len(zombies() - before) == 6)
    watch = OrphanWatch(mark)
    watch.look(0.0, [rank.pid], [])
    assert zombies() - before == {mine.pid}
    assert mine.wait() == 0
    assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
    rank.close()


def test_a_process_blocked_in_the_kernel_is_named_and_not_waited_for(mark: str, tmp_path: Path) -> None:
    """The freezer of cgroup v1 makes a real state D, which SIGKILL does not end."""
    frozen = FREEZER / f"rsup-test-{os.getpid()}"
    try:
        frozen.mkdir()
    except OSError:
        pytest.skip("no cgroup v1 freezer that this user may write to")
    rank = start(mark, "sleep", "600", cwd=tmp_path)
    try:
        (frozen / "cgroup.procs").write_text(str(rank.pid))
        (frozen / "freezer.state").write_text("FROZEN")
        until(lambda: (stat := read_stat(rank.pid)) is not None and stat.state == "D")
        began = time.monotonic()
        (survivor,) = reap_everything(mark, [rank.pid], began + 60)
        assert str(survivor) == f"{rank.pid} (sleep, D)"
        assert time.monotonic() - began < 20
        assert rank.exit_status() is None
    finally:
        (frozen / "freezer.state").write_text("THAWED")
        until(lambda: rank.exit_status() is not None)
        assert reap_everything(mark, [rank.pid], time.monotonic() + 60) == []
        rank.close()
        until(lambda: not (frozen / "cgroup.procs").read_text())
        frozen.rmdir()


DEAD_LAUNCH = """
from rsup.launcher.processes import become_subreaper, spawn_rank
become_subreaper()
words = ["sh", "-c", "(env -i setsid sh -c 'sleep 600 & echo $! > pid' &); sleep 600"]
rank = spawn_rank(words, {**os.environ, "RSUP_MARK": "d"}, local_rank=0, stdin=None, stdout_fd=1, stderr_fd=2, cwd=sys.argv[1])
while not os.path.exists(sys.argv[1] + "/pid"): time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""
END_STRAYS = "from rsup.launcher.stray_ranks import end_strays\nprint([str(found.process.pid) for found in end_strays()])"

SAY_STRAYS = "from rsup.launcher.stray_ranks import end_strays, strays_text\nprint(strays_text(end_strays(), 50))"


def test_the_next_launch_ends_what_a_dead_one_left(mark: str, tmp_path: Path) -> None:
    """Launcher and keeper were killed. Ranks of launchers that live are left alone, and so is who carries the tag himself."""
    mine = start(mark, "sleep", "600", cwd=tmp_path)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        launcher, stray, said = left_by_a_dead_launch(tmp_path / str(number))
        told = [part for part in said.split("; ") if f" {stray} (sleep, S)" in part]
        if told and "of job lost" in told[0]:
            break  # else a launch beside us was sooner
    (line,) = told
    assert line.startswith(f"launcher {launcher} of job lost (dead): "), "told by the one that has an environment"
    assert alive(mine.pid)
    assert reap_everything(mark, [mine.pid], time.monotonic() + 60) == []
    mine.close()


def left_by_a_dead_launch(folder: Path) -> tuple[int, int, str]:
    """Pids of a launcher and of what it left, once both are gone, and what was said of it: nothing where a launch beside us
    ended it."""
    words = [sys.executable, "-c", "import os, sys, time\n" + DEAD_LAUNCH, str(folder), "600"]
    launcher = subprocess.Popen(words, start_new_session=True, env={**os.environ, "RSUP_JOB_ID": "lost"})
    stray = number_in(folder / "pid")
    until(lambda: (stat := read_stat(stray)) is not None and stat.state == "S" and arguments(stray)[:1] == ["sleep"])
    assert f"'{stray}'" not in elsewhere(END_STRAYS).stdout, "its launcher lives"
    launcher.kill()
    launcher.wait()
    tag = rank_tag.tag_for(launcher.pid, "d")
    kin = subprocess.run(
        [sys.executable, "-c", END_STRAYS], preexec_fn=lambda: rank_tag.set_tag(tag), capture_output=True, text=True
    )
    was_ended = kin.returncode == -signal.SIGKILL  # as a stray itself, by a launch beside us
    assert was_ended or (kin.returncode == 0 and f"'{stray}'" not in kin.stdout), "a launch below that rank is a part of it"
    said = elsewhere(SAY_STRAYS).stdout
    until(lambda: not alive(stray))
    return launcher.pid, stray, "" if was_ended else said
