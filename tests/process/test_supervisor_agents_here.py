"""Which agents of a job are dead for sure, by what this host's processes say; and a supervisor that ends such jobs."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.supervisor import agents_here, places
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.lifetime import ABANDONED_AFTER_S
from rsup.supervisor.records import EventLogged, JobKey
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import AgentState, JobState, Phase, Role, decode, job_record
from rsup.supervisor.wire import AgentInfo, JobSpec
from tests.process.supervised_agent import MAIN, until

LONG_S = ABANDONED_AFTER_S + 1


def agent(pid: int, start_ticks: int = 0, **fields: str) -> AgentInfo:
    values = {"node": places.this_host(), "boot_id": places.boot_id(), "agent_id": "a1"} | fields
    return AgentInfo(values["agent_id"], values["node"], "127.0.0.1", pid, values["boot_id"], start_ticks=start_ticks)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait(10)
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
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"RSUP_MARK": "a-mark"}) as rank:
        until(lambda: agents_here.has_marked_process("a-mark"))
        assert not agents_here.ThisHost().look(agent(dead_pid, agent_id="a-mark"), LONG_S).is_dead
        rank.kill()
    assert agents_here.ThisHost().look(agent(dead_pid, agent_id="a-mark"), LONG_S).is_dead


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
    assert subprocess.run(command, capture_output=True, timeout=30).returncode == 0, "it has nothing left to stay for"
    assert time.monotonic() - began_s < 15
    store = SqlStore.open(state / "rsup.db", holder=LeaseHolder.this_process("test"), alone_may_migrate=True)
    found = store.last_run("local", "ann", "t1")
    store.close()
    assert found is not None
    ended = decode(found[1])
    assert ended.phase is Phase.ENDED and agents_here.REBOOTED in ended.reason
