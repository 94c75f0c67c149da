"""Who may write: one holder at a time on one host, and in a state directory that hosts share."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_host import BUMP_S, COPY_S, STALE_S, OtherHost
from sqlalchemy import select
from store_story import event, holder, job_key, saved, story

from rsup.supervisor import tables
from rsup.supervisor.database import find_database, reader_engine
from rsup.supervisor.db_cli import main
from rsup.supervisor.lease import LeaseRecord, Timing, held_error, read_record
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.state_disk import file_system_type, is_network_file_system, live_database
from rsup.supervisor.store import StoreError, StoreFull, StoreHeld
from rsup.supervisor.wire import UsageError

TIMING = Timing(BUMP_S, STALE_S, COPY_S)
"""Where a holder dies, which others see only after they have watched for so long."""
CALM = Timing(BUMP_S, 60.0, COPY_S)
"""Where none does."""

MakeHost = Callable[..., OtherHost]


def numbers(target: Path | str) -> list[int]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = list(connection.execute(select(tables.events.c.number).order_by(tables.events.c.number)).scalars())
    engine.dispose()
    return found


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------ one host


def test_a_held_store_names_its_holder(open_store, database: Path) -> None:
    first = open_store(database, holder=holder(rpc="ipc:///run/x"))
    first.announce("ipc:///run/y", "http://127.0.0.1:5")
    with pytest.raises(StoreHeld, match=rf"held by the supervisor with pid {os.getpid()}") as caught:
        open_store(database)
    assert (caught.value.address, caught.value.rest) == ("ipc:///run/y", "http://127.0.0.1:5")
    first.close()
    open_store(database)


def test_a_store_closed_twice_does_not_end_the_next_lease(open_store, database: Path) -> None:
    first = open_store(database)
    first.close()
    open_store(database)
    first.close()
    with pytest.raises(StoreHeld):
        open_store(database)


@pytest.mark.parametrize("record", ["dead", "reused pid", "other boot", "garbage", "none"])
def test_what_a_dead_holder_left_means_nothing(open_store, database: Path, record: str) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = {"dead": {"pid": dead.pid}, "reused pid": {"start_ticks": 1}, "other boot": {"boot_id": "earlier"}}
    store = open_store(database, holder=holder(**left.get(record, {})))
    lease = database.with_suffix(".lease").read_bytes()
    store.close()
    if record != "none":
        database.with_suffix(".lease").write_bytes(b"\0garbage" if record == "garbage" else lease)
    open_store(database).commit(story(job_key()))


def test_a_child_process_does_not_inherit_the_lease(open_store, database: Path) -> None:
    store = open_store(database)
    with subprocess.Popen(["sleep", "100"], close_fds=False) as child:
        store.close()
        open_store(database)
        child.kill()


def test_the_type_of_a_file_system_is_found() -> None:
    assert file_system_type(Path("/proc/self")) == "proc"
    assert file_system_type(Path("/does/not/exist")) == ""
    assert not is_network_file_system(Path("/dev/shm"))


# ------------------------------------------------------------------------------- a state directory that two hosts share


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory as on a network file system; this process is host "here"."""
    monkeypatch.setenv("RSUP_ASSUME_NETWORK_FS", "1")
    monkeypatch.setenv("RSUP_LOCAL_DIR", str(tmp_path / "disk-of-here"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "rsup.db"


@pytest.fixture
def make_host(shared: Path, tmp_path: Path) -> Iterator[MakeHost]:
    made: list[OtherHost] = []

    def make(name: str, prefix: tuple[str, ...] = ()) -> OtherHost:
        made.append(OtherHost(shared, name, tmp_path / f"disk-of-{name or 'namespace'}", prefix))
        return made[-1]

    yield make
    for host in made:
        host.end()


def test_the_live_file_is_local_and_a_copy_is_left(open_store, shared: Path) -> None:
    store = open_store(shared, holder=holder("here"), timing=CALM)
    store.commit(story(job_key(), 3))
    wait_until(lambda: shared.exists() and numbers(shared) == [1, 2, 3], "the copy")
    assert numbers(live_database(shared)) == [1, 2, 3]
    store.commit([event(job_key(), 4)])
    store.close()
    assert numbers(shared) == [1, 2, 3, 4], "the copy at the end is complete"
    names = {path.name for path in shared.parent.iterdir()}
    assert names == {"rsup.db", "rsup.lease", "rsup.claim-1"}
    assert {oct(path.stat().st_mode)[-3:] for path in shared.parent.iterdir()} <= {"600", "644"}
    assert oct(shared.stat().st_mode)[-3:] == "600"


def test_a_command_here_reads_the_live_file_and_elsewhere_the_copy(open_store, shared: Path, monkeypatch, tmp_path) -> None:
    slow = Timing(BUMP_S, CALM.stale_s, copy_s=600)
    store = open_store(shared, holder=holder(), timing=slow)
    wait_until(shared.exists, "the first copy")
    store.commit(story(job_key(), 3))
    assert find_database(shared.parent) == live_database(shared)
    assert numbers(shared) == numbers(live_database(shared)) == [1, 2, 3]
    monkeypatch.setenv("RSUP_LOCAL_DIR", str(tmp_path / "disk-of-another"))
    assert find_database(shared.parent) == shared
    assert numbers(shared) == []


def test_a_live_holder_on_another_host_keeps_the_lease(open_store, shared: Path, make_host: MakeHost) -> None:
    other = make_host("there")
    assert other.ask("open") == "done"
    with pytest.raises(StoreHeld, match="on there") as caught:
        open_store(shared, holder=holder("here"), timing=CALM)
    assert (caught.value.address, caught.value.rest) == ("tcp://there:1", "http://x:2")
    assert other.ask("commit 1") == "done"
    assert other.ask("close") == "done"
    started = time.monotonic()
    open_store(shared, holder=holder("here"), timing=CALM)
    assert time.monotonic() - started < CALM.stale_s, "what was given back needs no watching"
    assert numbers(live_database(shared)) == [1]


def test_a_dead_host_is_followed_from_its_copy(open_store, shared: Path, make_host: MakeHost) -> None:
    other = make_host("there")
    assert other.ask("open") == "done"
    assert other.ask("commit 1 2") == "done"
    wait_until(lambda: shared.exists() and numbers(shared) == [1, 2], "the copy")
    other.kill()
    started = time.monotonic()
    store = open_store(shared, holder=holder("here"), timing=TIMING)
    assert time.monotonic() - started >= STALE_S, "stale only after watching"
    assert [key for key, _ in store.live_jobs()] == [job_key()]
    store.commit([event(job_key(), 3)])
    store.close()
    assert numbers(shared) == [1, 2, 3]


def test_on_the_same_host_a_dead_holder_is_followed_at_once_and_without_loss(open_store, shared: Path, make_host) -> None:
    here = make_host("here")
    assert here.ask("open 600") == "done"  # no copy within the test
    assert here.ask("commit 1 2 3") == "done"
    here.kill()
    started = time.monotonic()
    open_store(shared, holder=holder("here"), timing=CALM)
    assert time.monotonic() - started < CALM.stale_s
    assert numbers(live_database(shared)) == [1, 2, 3]


def test_an_old_live_file_does_not_come_back(open_store, shared: Path, make_host: MakeHost) -> None:
    first = open_store(shared, holder=holder("here"), timing=CALM)
    first.commit(story(job_key(), 1))
    first.close()
    other = make_host("there")
    assert [other.ask(line) for line in ("open", "commit 2", "close")] == ["done"] * 3
    open_store(shared, holder=holder("here"), timing=CALM)
    assert numbers(live_database(shared)) == [1, 2]


def test_a_stopped_holder_writes_nothing_more_when_it_wakes(open_store, shared: Path, make_host: MakeHost) -> None:
    other = make_host("there")
    assert other.ask("open") == "done"
    assert other.ask("commit 1") == "done"
    wait_until(lambda: shared.exists() and numbers(shared) == [1], "the copy")
    os.kill(other.process.pid, 19)
    store = open_store(shared, holder=holder("here"), timing=TIMING)
    store.commit([saved(job_key()), event(job_key(), 2)])
    other.send("commit 77")
    os.kill(other.process.pid, 18)
    assert other.answer().startswith(("StoreHeld", "StoreFull")), "its time was up"
    wait_until(lambda: other.ask("commit 78").startswith("StoreHeld"), "it notices who holds the lease now")
    assert other.ask("close") == "done"
    store.commit([event(job_key(), 3)])
    store.close()
    assert numbers(shared) == [1, 2, 3]


def test_of_several_that_follow_a_dead_host_one_wins(shared: Path, make_host: MakeHost) -> None:
    dead = make_host("there")
    assert [dead.ask(line) for line in ("open", "commit 1")] == ["done"] * 2
    wait_until(lambda: shared.exists() and numbers(shared) == [1], "the copy")
    dead.kill()
    hosts = [make_host(f"n{number}") for number in range(4)]
    for host in hosts:
        host.send("open")
    answers = [host.answer().split()[0] for host in hosts]
    assert sorted(answers) == ["StoreHeld", "StoreHeld", "StoreHeld", "done"], answers
    winner = hosts[answers.index("done")]
    assert [winner.ask(line) for line in ("commit 2", "close")] == ["done"] * 2
    assert numbers(shared) == [1, 2]


def test_a_claimant_that_died_does_not_block_the_lease_for_ever(open_store, shared: Path) -> None:
    shared.with_name("rsup.claim-1").write_text("")
    open_store(shared, holder=holder("here"), timing=TIMING).commit(story(job_key()))
    record = read_record(shared)
    assert record is not None and record.term == 2


def test_an_unreachable_directory_stops_writing_until_it_is_back(open_store, shared: Path) -> None:
    store: SqlStore = open_store(shared, holder=holder("here"), timing=TIMING)
    store.commit(story(job_key(), 1))
    away = shared.parent.with_name("away")
    shared.parent.rename(away)

    def refused() -> bool:
        try:
            store.commit([event(job_key(), 2)])
        except StoreFull as error:
            return "could not be renewed" in str(error)
        return False

    wait_until(refused, "the lease runs out")
    away.rename(shared.parent)

    def taken() -> bool:
        try:
            store.commit([event(job_key(), 3)])
        except StoreFull:
            return False
        return True

    wait_until(taken, "the lease is renewed")


def test_over_quota_the_lease_is_still_renewed(open_store, shared: Path) -> None:
    if os.getuid():
        pytest.skip("only root may mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(shared.parent)]).returncode:
        pytest.skip("may not mount here")
    try:
        store = open_store(shared, holder=holder("here"), timing=CALM)
        with (shared.parent / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        before = read_record(shared)
        wait_until(lambda: (read_record(shared) or before).counter > before.counter + 3, "the counter moves")
        store.commit(story(job_key()))
        (shared.parent / "filler").unlink()
        store.close()
        assert numbers(shared) == [1, 2, 3]
    finally:
        subprocess.run(["umount", "-l", str(shared.parent)], check=True)


def test_two_host_names_and_mount_namespaces(open_store, shared: Path, make_host: MakeHost, tmp_path: Path) -> None:
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    enter = ("unshare", "--uts", "--mount", "--fork", "--kill-child", "sh", "-c", 'hostname nodeb && exec "$@"', "sh")
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("may not make namespaces here")
    other = make_host("", enter)
    assert other.ask("open") == "done"
    with pytest.raises(StoreHeld, match="on nodeb"):
        open_store(shared, holder=holder(), timing=CALM)
    assert [other.ask(line) for line in ("commit 1", "close")] == ["done"] * 2
    open_store(shared, holder=holder(), timing=CALM)
    assert numbers(live_database(shared)) == [1]


def test_a_local_directory_of_somebody_else_is_refused(open_store, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "disk-of-here").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="not a directory of our own with mode 0700"):
        open_store(shared, holder=holder("here"), timing=TIMING)


def test_who_holds_a_store_is_called_what_it_is(tmp_path: Path) -> None:
    """A command is no supervisor to use in its place, and no state directory helps where a URL was given."""
    for instance, database, says in (
        ("db-1f", "postgresql://h/d", "is held by an rsup command that changes it (pid 7 on far); wait for it"),
        ("verb-2", "/s/rsup.db", "is held by an rsup command that changes it"),
        (
            "a1b2",
            "postgresql://h/d",
            "held by the supervisor with pid 7 on far; use that one, stop it, or choose another --database-url",
        ),
        ("a1b2", "/s/rsup.db", "or choose another --state-dir"),
    ):
        assert says in str(held_error(database, LeaseRecord("far", "b", 7, 1, instance)))
    assert "another --database-url" in str(held_error("postgresql://h/d", None))
    dump = tmp_path / "x.dump"
    dump.write_bytes(b"PGDMP\x01\x10")
    with pytest.raises(UsageError, match=r"x.dump is a dump, which only pg_restore reads"):
        main(["check", "--database-url", str(dump)])
    with pytest.raises(UsageError, match=r"port is no number: .*in a password write @ as %40"):
        main(["check", "--database-url", "postgresql://rsup:p@ss:x@h/d"])
