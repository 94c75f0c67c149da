"""The supervisor process whose store is damaged, newer, held by another, or on a disk that cannot be written."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.supervisor import places
from rsup.supervisor.wire import Note, Refusal, Welcome
from tests.process.supervised_agent import MAIN, Agent, kill_supervisors, notes, running, served, until


def make_trouble(state: Path, kind: str) -> str:
    """Spoil the store of `state`; return what the error must say."""
    database = state / "rsup.db"
    if kind == "damaged":
        database.write_bytes(b"this is no database" * 100)
        return "rsup.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table alembic_version (version_num varchar(32) not null)")
        connection.execute("insert into alembic_version values ('ffff_from_the_future')")
    connection.close()
    return "newer"


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_an_unusable_store_does_not_stop_a_launch(state: Path, kind: str) -> None:
    says = make_trouble(state, kind)
    before = (state / "rsup.db").read_bytes()
    agent = Agent(state)
    until(lambda: agent.first(Welcome), agent.turn)
    welcome = agent.first(Welcome)
    assert isinstance(welcome, Welcome)
    assert "rsup-fallback-" in welcome.supervisor.store and says in welcome.supervisor.store
    assert (state / "rsup.db").read_bytes() == before
    (store,) = state.glob("rsup-fallback-*.db")
    assert says in welcome.supervisor.notice and f"kept in {store}" in welcome.supervisor.notice
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as database:
        rows = database.execute("select kind, level, text from events order by number").fetchall()
    database.close()
    assert [row[0] for row in rows].index("StoreTrouble") == 1, "after the line that begins the story"
    assert [row[1:] for row in rows if row[0] == "StoreTrouble"] == [("warning", welcome.supervisor.notice)]
    agent.spool.append(Note(0, "info", "kept"))
    os.kill(served(state).pid, signal.SIGKILL)
    until(lambda: not agent.client.connected, agent.turn)
    until(lambda: not len(agent.spool), agent.turn)
    assert len(list(state.glob("rsup-fallback-*.db"))) == 1, "the next one takes up the same store"
    agent.close()


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_serve_says_why_it_cannot_use_the_store(state: Path, kind: str) -> None:
    says = make_trouble(state, kind)
    done = subprocess.run([*MAIN, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1 and not done.stdout


@pytest.fixture
def small_disk(state: Path) -> Iterator[Path]:
    """The state directory on a file system of its own, of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(state)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=60).returncode:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    yield state
    kill_supervisors(state)
    subprocess.run(["umount", "--lazy", str(state)], check=True, timeout=60)


def fill(state: Path) -> Path:
    """Fill that disk to the last block."""
    path = state / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return path
    raise AssertionError("the disk did not fill up")


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_disk_that_cannot_be_written_does_not_stop_a_launch(small_disk: Path, kind: str) -> None:
    if kind == "full":
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=60)
    agent = Agent(small_disk)
    until(lambda: agent.first(Welcome), agent.turn)
    welcome = agent.first(Welcome)
    assert isinstance(welcome, Welcome)
    runtime = places.supervisor_runtime_dir(small_disk)
    assert welcome.supervisor.store.startswith(f"{runtime}/rsup-fallback-"), welcome.supervisor.store
    agent.spool.append(Note(0, "info", "kept"))
    until(lambda: not len(agent.spool), agent.turn)
    assert "ERROR" in (runtime / "supervisor.log").read_text()
    os.kill(welcome.supervisor.pid, signal.SIGTERM)
    until(lambda: not running(welcome.supervisor.pid))
    agent.close()


def test_a_disk_that_fills_up_under_an_idle_supervisor_is_told_to_the_next_launch(small_disk: Path) -> None:
    idle = Agent(small_disk)
    until(lambda: idle.client.connected, idle.turn)
    idle.close()
    filler = fill(small_disk)
    turned_away = Agent(small_disk)
    until(lambda: turned_away.first(Refusal), lambda: (turned_away.client.send_report(0, 0, attempt=0), _poll(turned_away)))
    refusal = turned_away.first(Refusal)
    assert isinstance(refusal, Refusal) and refusal.exit_code == 1
    assert "no job can be started now: cannot write the store" in refusal.message and "free some space" in refusal.message
    turned_away.close()
    filler.unlink()
    until(lambda: "can be written again" in _log_text(small_disk))
    with contextlib.closing(sqlite3.connect(f"file:{small_disk}/rsup.db?mode=ro", uri=True)) as database:
        assert database.execute("select count(*) from jobs").fetchone() == (1,), "no job of the agent that was turned away"


def test_the_next_supervisor_in_the_same_trouble_takes_up_the_same_store(state: Path) -> None:
    make_trouble(state, "damaged")
    for _ in range(2):
        agent = Agent(state)
        until(lambda agent=agent: agent.first(Welcome), agent.turn)  # type: ignore[misc]
        agent.close()
        pid = served(state).pid
        os.kill(pid, signal.SIGTERM)
        until(lambda pid=pid: not running(pid))  # type: ignore[misc]
    assert len(list(state.glob("rsup-fallback-*.db"))) == 1


def test_a_disk_that_fills_up_loses_nothing(small_disk: Path) -> None:
    agent = Agent(small_disk)
    until(lambda: agent.client.connected, agent.turn)
    filler = fill(small_disk)
    expected = [f"{i} " + "y" * 3000 for i in range(300)]
    for text in expected:
        agent.spool.append(Note(0, "info", text))
    until(lambda: "training goes on" in _log_text(small_disk), agent.turn)
    until(lambda: not agent.first(Refusal), agent.turn)
    until(lambda: agent.client.connected, agent.turn)
    assert len(agent.spool)
    filler.unlink()
    until(lambda: not len(agent.spool), agent.turn, within_s=60)
    assert notes(small_disk) == expected
    agent.close()


def _log_text(state: Path) -> str:
    return (state / "supervisor.log").read_text(errors="replace")


HOLDER = """
import sys
from pathlib import Path
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.sql_store import SqlStore
store = SqlStore.open(Path(sys.argv[1]), holder=LeaseHolder.this_process("holder"), alone_may_migrate=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_store_that_another_process_holds_refuses_new_jobs_but_not_running_ones(state: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(state / "rsup.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        new = Agent(state)
        runs = Agent(state)
        runs.client.send_report(3, 0, attempt=2)
        until(
            lambda: new.first(Refusal), lambda: (new.client.send_report(0, 0, attempt=0), _poll(new), _poll(runs)), within_s=60
        )
        refusal = new.first(Refusal)
        assert isinstance(refusal, Refusal) and f"pid {holder.pid}" in refusal.message
        assert not runs.messages
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(60)
    until(lambda: runs.first(Welcome), runs.turn, within_s=60)
    new.close()
    runs.close()


def _poll(agent: Agent) -> None:
    agent.messages.extend(agent.client.poll())
