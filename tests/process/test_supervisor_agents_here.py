"""Which agents of a job are dead for sure, by what this host's processes say; and a supervisor that ends such jobs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rsup.supervisor import agents_here, places
from rsup.supervisor.heartbeat_board import pid_namespace, process_start_ticks
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.lifetime import ABANDONED_AFTER_S
from rsup.supervisor.records import EventLogged, JobKey
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import AgentState, JobState, Phase, Role, decode, job_record
from rsup.supervisor.wire import AgentInfo, JobSpec
from tests.process.supervised_agent import MAIN, until

LONG_S = ABANDONED_AFTER_S + 1
OURS = pid_namespace()


def agent(pid: int, start_ticks: int = 0, pid_namespace: int | None = None, **fields: str) -> AgentInfo:
    values = {"node": places.this_host(), "boot_id": places.boot_id(), "agent_id": "a1"} | fields
    info = AgentInfo(values["agent_id"], values["node"], "127.0.0.1", pid, values["boot_id"], start_ticks=start_ticks)
    return replace(info, pid_namespace=OURS if pid_namespace is None else pid_namespace)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait(60)
    return process.pid


@pytest.fixture
def zombie_pid() -> Iterator[int]:
    with subprocess.Popen(["true"]) as process:
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        yield process.pid


def test_a_process_is_known_by_pid_and_start(dead_pid: int, zombie_pid: int) -> None:
    me, here = process_start_ticks(os.getpid()), agents_here.ThisHost()
    assert not here.look(agent(os.getpid(), me), LONG_S).is_dead
    assert not here.look(agent(os.getpid()), LONG_S).is_dead, "of an older release: the pid alone has to do"
    assert here.look(agent(os.getpid(), me + 1), LONG_S).is_dead, "another process has the pid now"
    assert here.look(agent(dead_pid, me), LONG_S).is_dead
    assert here.look(agent(zombie_pid), LONG_S).is_dead
    assert not here.look(agent(dead_pid), 1.0).is_dead, "its keeper may be about to speak"
    assert here.look(agent(dead_pid, boot_id="before"), 0.0).is_dead, "rebooted: nobody can speak any more"
    assert not here.look(agent(dead_pid, node="elsewhere", boot_id="other"), LONG_S).is_dead
    assert not here.look(agent(dead_pid, boot_id=""), LONG_S).is_dead


def test_what_its_ranks_left_running_counts_as_alive(dead_pid: int) -> None:
    with subprocess.Popen(["sleep", "100"], env=os.environ | {"RSUP_MARK": "a-mark"}) as rank:
        until(lambda: agents_here.has_marked_process("a-mark"))
        assert not agents_here.ThisHost().look(agent(dead_pid, agent_id="a-mark"), LONG_S).is_dead
        rank.kill()
    assert agents_here.ThisHost().look(agent(dead_pid, agent_id="a-mark"), LONG_S).is_dead


def test_what_cannot_be_seen_is_not_dead(dead_pid: int, tmp_path: Path) -> None:
    here = agents_here.ThisHost()
    assert here.look(agent(dead_pid), LONG_S).process_alive is False
    elsewhere = agent(dead_pid, pid_namespace=OURS + 1)
    assert here.look(elsewhere, LONG_S).process_alive is None, "a container has this host's name and boot, and other pids"
    assert here.look(agent(dead_pid, pid_namespace=0), LONG_S).process_alive is None, "of an older release"
    assert agents_here.hides_others(tmp_path), "nothing can be read there"
    with_option = tmp_path / "self"
    with_option.mkdir()
    (with_option / "status").write_text("CapEff:\t0000000000000000\n")
    mount = "22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw,{}\n"
    for option, hidden in (("hidepid=invisible", True), ("gid=5,hidepid=1", True), ("hidepid=0", False), ("gid=5", False)):
        (with_option / "mountinfo").write_text(mount.format(option))
        assert agents_here.hides_others(tmp_path) == hidden, option
    (with_option / "mountinfo").write_text(mount.format("hidepid=2"))
    assert agents_here.ThisHost(tmp_path).look(agent(dead_pid), LONG_S, "nobody").process_alive is None
    (with_option / "status").write_text("CapEff:\t000001ffffffffff\n")
    assert agents_here.ThisHost(tmp_path).look(agent(dead_pid), LONG_S, "nobody").process_alive is False, "root sees all"


_AS_NOBODY = """
import os, sys
from msgspec.structs import replace
from rsup.supervisor import agents_here, places
from rsup.supervisor.heartbeat_board import pid_namespace
from rsup.supervisor.wire import AgentInfo
os.setgid(65534)
os.setuid(65534)
pid, *begins = map(int, sys.argv[1:])
here = agents_here.ThisHost()
gone = AgentInfo("a-mark", here.name, "h", pid, places.boot_id(), pid_namespace=pid_namespace())
for owner in ("daemon", "uid-1", "bin", "no-user-of-this-host"):
    for start_ticks in begins:
        print(owner, here.look(replace(gone, start_ticks=start_ticks), 99.0, owner).process_alive)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")
def test_a_daemon_that_may_not_look_into_ranks_calls_them_unknown(dead_pid: int) -> None:
    with subprocess.Popen(["sleep", "100"], env=os.environ | {"RSUP_MARK": "a-mark"}, user=1, group=1, extra_groups=[]) as rank:
        until(lambda: agents_here.has_marked_process("a-mark"))
        born = process_start_ticks(rank.pid)
        words = [sys.executable, "-c", _AS_NOBODY, str(dead_pid), str(born), str(born + 100_000)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90)
        rank.kill()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "daemon None",
        "daemon False",  # the agent began later than all of this user's processes
        "uid-1 None",
        "uid-1 False",
        "bin False",
        "bin False",
        "no-user-of-this-host None",
        "no-user-of-this-host False",
    ]


def test_a_job_of_another_boot_ends_when_a_supervisor_starts(state: Path, dead_pid: int) -> None:
    key = JobKey("local", "ann", "t1", 1)
    its_agent = AgentState(info=agent(dead_pid, boot_id="before"), role=Role.ACTIVE, joined=1, live_attempt=1, group_rank=0)
    job = JobState(
        key=key,
        spec=JobSpec(job_id="t1", owner="ann"),
        created_us=1,
        phase=Phase.RUNNING,
        attempt=1,
        epoch=1,
        num_joined=1,
        num_events=1,
        agents={"a1": its_agent},
    )
    store = SqlStore.open(state / "rsup.db", holder=LeaseHolder.this_process("test"), alone_may_migrate=True)
    store.commit([job_record(job, 1), EventLogged(key, 1, 1, 1, "Note", "before the reboot")])
    store.close()
    began_s = time.monotonic()
    command = [*MAIN, "--embedded", "--state-dir", str(state)]
    assert subprocess.run(command, capture_output=True, timeout=90).returncode == 0, "it has nothing left to stay for"
    assert time.monotonic() - began_s < ABANDONED_AFTER_S, "at once"
    store = SqlStore.open(state / "rsup.db", holder=LeaseHolder.this_process("test"), alone_may_migrate=True)
    found = store.last_run("local", "ann", "t1")
    store.close()
    assert found is not None
    ended = decode(found[1])
    assert ended.phase is Phase.ENDED and agents_here.REBOOTED in ended.reason
