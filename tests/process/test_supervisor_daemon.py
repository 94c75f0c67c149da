"""The supervisor process: starting, dying, being started again, ending; real processes and signals."""

import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rsup.launcher import supervisor_process
from rsup.launcher.supervisor_process import EmbeddedSupervisor, belongs_to_job, read_live
from rsup.supervisor import places, wire
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.wire import Note, Welcome
from tests.process.supervised_agent import Agent, notes, running, served, until

# ------------------------------------------------------------------------------------------------------------- deaths


def test_500_facts_are_applied_once_though_the_supervisor_is_killed_three_times(state: Path, own_directories: Path) -> None:
    agent = Agent(state, spool=own_directories / "spool")
    until(lambda: agent.first(Welcome), agent.turn)
    kills = {100, 250, 400}
    killed = []
    for i in range(500):
        agent.spool.append(Note(wire.now_us(), "info", f"fact {i}"))
        agent.turn()
        if i in kills:
            killed.append(served(state).pid)
            os.kill(killed[-1], signal.SIGKILL)
            until(lambda: not agent.client.connected, agent.turn)
            until(lambda: agent.client.connected, agent.turn)
    until(lambda: not len(agent.spool), agent.turn, within_s=30)
    assert len(set(killed)) == 3 and served(state).pid not in killed
    assert notes(state) == [f"fact {i}" for i in range(500)]
    agent.close()


def test_a_stopped_supervisor_blocks_nobody_and_is_not_replaced_at_once(state: Path, agent: Agent) -> None:
    until(lambda: agent.client.connected, agent.turn)
    found = served(state)
    starts = agent.embedded.num_starts
    os.kill(found.pid, signal.SIGSTOP)
    try:
        agent.slowest_s = 0.0
        until(lambda: not agent.client.connected, agent.turn)
        turns_s = []
        for i in range(50):
            agent.spool.append(Note(0, "info", f"meanwhile {i}"))
            began_s = time.monotonic()
            agent.turn()
            turns_s.append(time.monotonic() - began_s)
        assert statistics.median(turns_s) < 0.2 and agent.slowest_s < 10, "one may have waited for a processor, but for nobody"
        assert agent.embedded.num_starts == starts
    finally:
        os.kill(found.pid, signal.SIGCONT)
    until(lambda: not len(agent.spool), agent.turn)
    assert notes(state) == [f"meanwhile {i}" for i in range(50)]


def test_only_a_silent_supervisor_of_our_own_is_killed(state: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_process, "SILENT_S", 5.0)
    until(lambda: agent.client.connected, agent.turn)
    found = served(state)
    clock_s = [0.0]
    other = EmbeddedSupervisor(state, in_job=False, clock=lambda: clock_s[0])

    def silent_for(turns: int, step_s: float) -> int:
        other.heard()
        for _ in range(turns):
            clock_s[0] += step_s
            if pid := other.kill_silent():
                return pid
        return 0

    assert not silent_for(4, 1.0), "not yet"
    assert not silent_for(20, 10.0), "it was we who did not run"
    for foreign in ({"embedded": False}, {"host": "elsewhere"}, {"start_ticks": found.start_ticks + 1}, {"boot_id": "before"}):
        replace(found, **foreign).write(state)  # type: ignore[arg-type]
        assert not silent_for(20, 1.0), foreign
    assert running(found.pid)
    found.write(state)
    assert silent_for(20, 1.0) == found.pid
    until(lambda: silent_for(20, 1.0) == 0)  # it is dead, with all its threads
    assert not running(found.pid)


def test_sigterm_ends_in_good_order(state: Path, agent: Agent) -> None:
    until(lambda: agent.first(Welcome), agent.turn)
    found = served(state)
    os.kill(found.pid, signal.SIGTERM)
    until(lambda: not running(found.pid))
    assert places.read_supervisor_file(state) is None
    assert not Path(found.rpc.removeprefix("ipc://")).exists()
    assert "ending: told to" in (state / "supervisor.log").read_text()


def test_it_ends_some_time_after_its_last_agent(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSUP_IDLE_EXIT", "5")
    started = time.monotonic()
    EmbeddedSupervisor(state, in_job=False).ensure()
    pid = served(state).pid
    until(lambda: not running(pid), within_s=60)
    assert time.monotonic() - started > 5
    assert places.read_supervisor_file(state) is None


def test_a_live_job_keeps_it_alive(state: Path, agent: Agent) -> None:
    until(lambda: agent.first(Welcome), agent.turn)
    pid = served(state).pid
    ends = time.monotonic() + 2.5
    until(lambda: time.monotonic() > ends)
    assert running(pid)


# ----------------------------------------------------------------------------------------------------------- starting


def test_agents_that_race_end_with_one_supervisor(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[Agent] = []
    barrier = threading.Barrier(4)
    start = EmbeddedSupervisor._start

    def start_together(self: EmbeddedSupervisor, address: str) -> None:
        if not self.num_starts:
            barrier.wait(60)  # none starts one before all have found that there is none
        start(self, address)

    def one() -> None:
        agent = Agent(state)
        agents.append(agent)
        until(lambda: agent.first(Welcome), agent.turn, within_s=60)

    monkeypatch.setattr(EmbeddedSupervisor, "_start", start_together)
    monkeypatch.setenv("RSUP_IDLE_EXIT", "100")  # none goes before the first agent has spoken
    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    instances = {message.supervisor.instance for a in agents for message in a.messages if isinstance(message, Welcome)}
    assert len(agents) == 4 and len(instances) == 1 and sum(a.embedded.num_starts for a in agents) >= 4
    log = (state / "supervisor.log").read_text()
    assert log.count("serves agents at") == 1 and "Traceback" not in log and "ERROR" not in log
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("lie", ["dead pid", "reused pid", "other boot", "garbage"])
def test_a_stale_supervisor_file_is_seen_through(state: Path, lie: str) -> None:
    rpc = f"ipc://{state}/somewhere"
    stale = places.SupervisorFile(
        os.getpid(), process_start_ticks(os.getpid()), places.this_host(), places.boot_id(), "i", rpc, "", True
    )
    if lie == "dead pid":
        with subprocess.Popen(["true"]) as done:
            done.wait(60)
        stale = replace(stale, pid=done.pid)
    elif lie == "reused pid":
        stale = replace(stale, start_ticks=stale.start_ticks + 1)
    elif lie == "other boot":
        stale = replace(stale, boot_id="another")
    stale.write(state)
    if lie == "garbage":
        (state / "supervisor.json").write_text('{"pid": "many"')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(rpc.removeprefix("ipc://"))
        listener.listen()
        agent = Agent(state)
        until(lambda: agent.first(Welcome), agent.turn)
        assert agent.client.address == places.embedded_address(state)
        agent.close()


def test_a_foreign_supervisor_is_used_by_its_tcp_address(state: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tcp = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        foreign = places.SupervisorFile(1, 1, "another-host", "b", "i", "ipc:///nowhere", "", True, tcp)
        foreign.write(state)
        embedded = EmbeddedSupervisor(state, in_job=False)
        assert embedded.ensure() == tcp and embedded.num_starts == 0
    assert not read_live(state), "it does not accept any more"


SUBREAPER = """
import ctypes, sys
from pathlib import Path
from rsup.launcher.supervisor_process import EmbeddedSupervisor
libc = ctypes.CDLL(None)
assert libc.prctl(36, 1, 0, 0, 0) == 0
EmbeddedSupervisor(Path(sys.argv[1]), in_job=sys.argv[2] == "in-job").ensure()
flag = ctypes.c_int(0)
libc.prctl(37, ctypes.byref(flag), 0, 0, 0)
assert flag.value == 1
sys.stdin.read()
"""


@pytest.mark.parametrize("where", ["in-job", "apart"])
def test_whose_child_it_is(state: Path, where: str) -> None:
    environment = os.environ | {
        "RSUP_MARK": "m1",
        "PET_NNODES": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "RSUP_SUPERVISOR": "tcp://a:1",
        "RSUP_IDLE_EXIT": "100",
    }
    with subprocess.Popen(
        [sys.executable, "-c", SUBREAPER, str(state), where], stdin=subprocess.PIPE, env=environment
    ) as parent:
        found = served(state)
        status = Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()
        variables = Path(f"/proc/{found.pid}/environ").read_bytes().decode()
        assert parent.stdin is not None
        parent.stdin.close()
        assert parent.wait(60) == 0
    assert (int(status[1]) == parent.pid) == (where == "in-job")
    assert int(status[3]) not in (os.getsid(0), parent.pid)
    assert os.readlink(f"/proc/{found.pid}/cwd") == "/"
    for name in ("RSUP_MARK", "PET_", "TORCHELASTIC_", "RSUP_SUPERVISOR"):
        assert f"{name}" not in variables.replace("RSUP_SUPERVISOR_", ""), name
    assert "RSUP_STATE_DIR=" in variables
    assert running(found.pid), "it outlives the launch that started it"


def test_where_it_stays_in_the_jobs_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert belongs_to_job()


def test_a_supervisor_that_cannot_start_is_tried_seldom_and_says_why(state: Path) -> None:
    now_s = 0.0
    embedded = EmbeddedSupervisor(state, ["--no-such-option"], in_job=True, clock=lambda: now_s)
    starts = []
    for _ in range(8):
        embedded.ensure()
        starts.append(embedded.num_starts)
        now_s += 1.0
    assert starts[-1] <= 4
    until(lambda: "no-such-option" in (state / "supervisor.log").read_text())
    assert "Traceback" not in (state / "supervisor.log").read_text()
    until(lambda: all(child.poll() is not None for child in embedded._children))


def test_from_spawn_to_welcome(state: Path) -> None:
    """The goal is 0.6 s with an existing database on an idle machine; the bound here is for a busy one."""
    taken = []
    for _ in range(2):
        started = time.monotonic()
        agent = Agent(state)
        until(lambda a=agent: a.first(Welcome), agent.turn)  # type: ignore[misc]
        taken.append(time.monotonic() - started)
        agent.close()
        pid = served(state).pid
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not running(pid))  # type: ignore[misc]
    print(f"spawn to first Welcome: {taken[0]:.3f} s with a fresh database, {taken[1]:.3f} s with an existing one")
    assert taken[1] < 30.0
