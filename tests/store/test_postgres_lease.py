"""The lease of a store in PostgreSQL: who may say that it leads, and when another may begin."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, select, text
from store_story import event, holder, job_key, story

from rsup.supervisor import database, lease_watch, postgres_lease, tables
from rsup.supervisor.daemon_turns import WatchedStore
from rsup.supervisor.db_cli import main
from rsup.supervisor.lease_watch import LeaseWatch
from rsup.supervisor.record_rows import save_meta
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreError, StoreHeld
from tests.process.two_supervisors import Wire, wait_for


def texts(url: str) -> list[str]:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        found = list(connection.execute(select(tables.events.c.text).order_by(tables.events.c.number)).scalars())
    engine.dispose()
    return found


def test_a_holder_that_is_cut_off_doubts_before_anybody_else_may_begin(
    postgres: str, postgres_server, open_store, own_directories: Path
) -> None:
    wire = Wire(own_directories / "wire", postgres_server.folder)
    doubts_when_free: list[str] = []
    watch = LeaseWatch(postgres, lambda: doubts_when_free.append(store.lease_doubt()))
    try:
        store = open_store(postgres.replace(str(postgres_server.folder), str(wire.folder)), holder=holder(host="far"))
        store.announce("tcp://far:1", "http://far:2")
        store.commit(story(job_key()))
        watch.start()
        wait_for(lambda: watch.sight.leader, "the watch sees the holder")
        leader = watch.sight.leader
        assert leader is not None and leader.rpc == "tcp://far:1" and store.lease_doubt() == ""
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:  # a holder with nothing to do keeps its lease, here for longer than a beat
            assert not doubts_when_free
            wait_for(lambda: store.lease_doubt() == "", "it is sure of its lease")

        wire.cut()
        wait_for(store.lease_doubt, "it doubts")
        assert "has not answered" in store.lease_doubt()
        with pytest.raises(StoreError, match="has not answered"):
            store.commit([event(job_key(), 4, text="of a holder that cannot know")])
        wait_for(lambda: doubts_when_free, "the watch ends its session")
        assert doubts_when_free[0] != "", "it doubted before"
        other = open_store(postgres, holder=holder(host="near"))
        other.commit([event(job_key(), 4, text="of the next")])

        wire.mend()
        wait_for(lambda: _is_held(store), "it learns of the next")
        assert store.lease_doubt() != ""
        assert texts(postgres) == ["event 1", "event 2", "event 3", "of the next"]
    finally:
        watch.stop()
        wire.close()


def _is_held(store: SqlStore) -> bool:
    try:
        store.commit([event(job_key(), 5, text="of the first again")])
    except StoreHeld as held:
        assert "on near" in str(held)
        return True
    except StoreError:
        return False
    raise AssertionError("both can commit")


def test_a_session_that_the_server_ends_is_noticed_at_once(postgres: str, open_store) -> None:
    store = open_store(postgres)
    store.commit(story(job_key()))
    end_session_of_the_holder(postgres)
    wait_for(lambda: "broke" in store.lease_doubt(), "it notices")
    store.probe()
    assert store.lease_doubt() == "", "nobody else had taken it"


def end_session_of_the_holder(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE locktype = 'advisory'"))
    engine.dispose()


def test_who_led_before_another_does_not_go_on_although_the_lease_is_free(postgres: str, open_store) -> None:
    """What it knows of the jobs is older than what the other wrote."""
    first = open_store(postgres, holder=holder(host="far"))
    first.commit(story(job_key()))
    end_session_of_the_holder(postgres)
    other = open_store(postgres, holder=holder(host="near"))
    other.commit([event(job_key(), 4, text="of the other")])
    other.close()

    watched = WatchedStore(first)
    for _ in range(2):
        with pytest.raises(StoreHeld, match=r"was held by the supervisor with pid \d+ on near while"):
            watched.commit([event(job_key(), 5, text="of the first again")])
    assert watched.lost is not None
    third = open_store(postgres, holder=holder(host="far"))  # the same may lead again, once it has read anew
    third.commit([event(job_key(), 5, text="of the third")])
    assert texts(postgres) == ["event 1", "event 2", "event 3", "of the other", "of the third"]


def test_who_takes_anothers_session_for_its_own_earlier_one_does_not_go_on(
    postgres: str, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its question who holds the lease and the end of that session another has begun."""
    first = open_store(postgres, holder=holder(host="far"))
    first.commit(story(job_key()))
    rows = [first.change(postgres_lease.read_holder)]
    end_session_of_the_holder(postgres)
    other = open_store(postgres, holder=holder(host="near"))
    read_holder = postgres_lease.read_holder
    monkeypatch.setattr(postgres_lease, "read_holder", lambda connection: rows.pop() if rows else read_holder(connection))

    for number in (4, 5):
        with pytest.raises(StoreHeld, match="on near"):
            first.commit([event(job_key(), number, text="of the first again")])
    assert not rows
    other.commit([event(job_key(), 4, text="of the other")])
    assert texts(postgres) == ["event 1", "event 2", "event 3", "of the other"]


def test_only_a_holder_that_says_it_beats_is_judged_by_its_silence(postgres: str, open_store) -> None:
    """A supervisor of a release that did not beat is idle for long, and is left alone."""
    store = open_store(postgres)
    store.change(lambda connection: connection.execute(text("DELETE FROM meta WHERE key = 'holder_beats'")))
    store.lease._stop.set()  # no more beats
    ended: list[bool] = []
    watch = LeaseWatch(postgres, lambda: ended.append(True))
    watch.start()
    wait_for(lambda: watch.sight.leader, "the watch sees the holder")
    until_s = time.monotonic() + 5.0
    while time.monotonic() < until_s:
        assert not ended
        time.sleep(0.05)
    assert watch.sight.leader is not None
    watch.stop()
    store.commit(story(job_key()))


def test_commits_are_on_disk_whatever_the_servers_default(postgres: str, open_store) -> None:
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f"ALTER DATABASE {name} SET synchronous_commit = off"))
    engine.dispose()
    store = open_store(postgres)
    assert store.change(lambda connection: connection.execute(text("SHOW synchronous_commit")).scalar()) == "on"


def test_a_commit_that_hangs_is_told_of_and_given_up(
    postgres: str, postgres_server, open_store, own_directories: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The connection is cut in the middle of a transaction: the loop sits in it, and others must hear that it may be over."""
    for name, seconds in (("BEAT_S", 0.3), ("FRESH_S", 1.0), ("CUT_S", 1.2)):
        monkeypatch.setattr(postgres_lease, name, seconds)
    monkeypatch.setattr(database, "RECONNECT_S", 6)
    wire = Wire(own_directories / "wire", postgres_server.folder)
    failed: list[StoreError] = []
    store = open_store(postgres.replace(str(postgres_server.folder), str(wire.folder)))
    store.announce("tcp://far:1", "http://far:2")

    def hang(connection: Connection) -> None:
        wire.cut()
        connection.execute(text("SELECT 1"))

    def change() -> None:
        try:
            store.change(hang)
        except StoreError as error:
            failed.append(error)

    loop = threading.Thread(target=change)
    try:
        loop.start()
        wait_for(store.lease_doubt, "it doubts while the loop hangs")
        assert not failed
        wait_for(lambda: [r for r in caplog.records if "has not answered for" in r.message], "its log says so")
        loop.join(60)
        assert failed and store.lease_doubt(), "the loop goes on, and may tell its agents"
    finally:
        wire.mend()
        loop.join(60)
        wire.close()


def test_a_command_may_take_its_time_for_a_transaction(postgres: str, open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_S", 0.1), ("FRESH_S", 0.1), ("CUT_S", 0.1)):
        monkeypatch.setattr(postgres_lease, name, seconds)
    store = open_store(postgres)
    assert store.change(lambda connection: connection.execute(text("SELECT pg_sleep(0.6)")).all())
    store.announce("tcp://near:1", "")  # and a supervisor too, as long as the server is at work for it
    assert store.change(lambda connection: connection.execute(text("SELECT pg_sleep(0.6)")).all())
    store.probe()


def test_a_session_that_does_not_end_is_not_said_to_have_ended(
    postgres: str, open_store, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(lease_watch, "STALE_S", 1.0)
    store = open_store(postgres, holder=holder(host="far"))
    store.announce("tcp://far:1", "")
    pid = store.change(lambda connection: connection.execute(text("SELECT pg_backend_pid()")).scalar())
    watch = LeaseWatch(postgres, lambda: None)
    os.kill(pid, signal.SIGSTOP)
    try:
        watch.start()
        wait_for(
            lambda: [r for r in caplog.records if f"(process {pid} of the server) does not end" in r.message], "it is said"
        )
        assert not [r for r in caplog.records if "its session was ended" in r.message]
    finally:
        os.kill(pid, signal.SIGCONT)
        watch.stop()


def test_a_session_that_may_only_read_is_not_kept(postgres: str, open_store) -> None:
    store = open_store(postgres)
    store.commit(story(job_key()))
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
        connection.execute(text("SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE locktype = 'advisory'"))
        for _ in range(2):
            with pytest.raises(StoreError, match=r"may only be read now.*default_transaction_read_only") as caught:
                store.probe()
            assert "free some space" not in str(caught.value)
            assert "broke" in store.lease_doubt()
        connection.execute(text(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
    engine.dispose()
    store.probe()
    assert store.lease_doubt() == ""


def test_a_row_of_the_holder_that_cannot_be_read_keeps_nobody_from_taking_over(postgres: str, open_store, capsys) -> None:
    """The lock says who leads, not the row."""
    store = open_store(postgres, holder=holder(host="far"))
    seen: list[bool] = []
    watch = LeaseWatch(postgres, lambda: seen.append(True))
    watch.start()
    try:
        wait_for(lambda: watch.sight.leader, "the watch sees the holder")
        for row in (
            '{"host":"vm"}',
            "[1]",
            "{",
            '{"host": 7, "boot_id": "b", "pid": "x", "start_ticks": 1, "instance": "i"}',
            "7",
        ):
            store.change(lambda connection, row=row: save_meta(connection, "holder", row))
            wait_for(lambda: watch.sight.leader is None, f"the watch has read {row}")
            assert main(["check", "--database-url", postgres, "--json"]) == 0 and not watch.sight.is_free
            store.lease.write_holder()
            wait_for(lambda: watch.sight.leader, "it reads a good one again")
        store.change(lambda connection: save_meta(connection, "holder", '{"host":"vm"}'))
        with pytest.raises(StoreHeld, match="in use by another rsup process"):
            open_store(postgres, holder=holder(host="near"))
        store.close()
        wait_for(lambda: seen, "the watch says that it is free")
        other = open_store(postgres, holder=holder(host="near"))
        other.commit(story(job_key()))
    finally:
        watch.stop()


def test_a_fault_of_ours_does_not_end_the_watch(postgres: str, open_store, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Without it nobody would take over."""
    open_store(postgres).close()
    looks = [KeyError("a fault")]
    look = LeaseWatch._look
    monkeypatch.setattr(lease_watch, "RETRY_EVERY_S", 0.1)
    monkeypatch.setattr(lease_watch, "FRESH_S", 0.1)

    def faulty(self: LeaseWatch, connection: Connection) -> lease_watch.Sight:
        if looks:
            raise looks.pop()
        return look(self, connection)

    monkeypatch.setattr(LeaseWatch, "_look", faulty)
    seen: list[bool] = []
    watch = LeaseWatch(postgres, lambda: seen.append(True))
    watch.start()
    wait_for(lambda: seen, "it goes on")
    watch.stop()
    assert "cannot be watched; trying again" in caplog.text
