"""The lease of a store in PostgreSQL: who may say that it leads, and when another may begin."""

import time
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text
from store_story import event, holder, job_key, story

from rsup.supervisor import tables
from rsup.supervisor.lease_watch import LeaseWatch
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
    free_s: list[float] = []
    watch = LeaseWatch(postgres, lambda: free_s.append(time.monotonic()))
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
            assert not free_s and store.lease_doubt() == ""

        wire.cut()
        wait_for(store.lease_doubt, "it doubts")
        doubted_s = time.monotonic()
        assert "has not answered" in store.lease_doubt()
        with pytest.raises(StoreError, match="has not answered"):
            store.commit([event(job_key(), 4, text="of a holder that cannot know")])
        wait_for(lambda: free_s, "the watch ends its session")
        assert free_s[0] > doubted_s
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
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'"))
    engine.dispose()
    wait_for(lambda: "broke" in store.lease_doubt(), "it notices")
    store.probe()
    assert store.lease_doubt() == "", "nobody else had taken it"


def test_only_a_holder_that_says_it_beats_is_judged_by_its_silence(postgres: str, open_store) -> None:
    """A supervisor of a release that did not beat is idle for long, and is left alone."""
    store = open_store(postgres)
    store.change(lambda connection: connection.execute(text("DELETE FROM meta WHERE key = 'holder_beats'")))
    store.lease._stop.set()  # no more beats
    ended: list[bool] = []
    watch = LeaseWatch(postgres, lambda: ended.append(True))
    watch.start()
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
