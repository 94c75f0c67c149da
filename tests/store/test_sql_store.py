"""What the SQL stores add: rows as records, idempotence, all or nothing, odd texts, reading beside the writer."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, func, select, text
from store_story import event, holder, job_key, saved, story

from rsup.supervisor import tables
from rsup.supervisor.database import reader_engine
from rsup.supervisor.records import (
    AttemptSaved,
    BeatsSaved,
    DeviceSeen,
    EventLogged,
    IncidentSaved,
    NodeSeen,
    RankSaved,
    Record,
    SectionSaved,
)
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreError

Target = Path | str


def rows(target: Target, table: object) -> list[dict[str, object]]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = [dict(row._mapping) for row in connection.execute(select(table).order_by(*table.primary_key))]
    engine.dispose()
    return found


@pytest.fixture
def store(open_store, sql_target: Target) -> SqlStore:
    return open_store(sql_target)


def test_rows_are_the_records(store: SqlStore, sql_target: Target) -> None:
    key = job_key()
    logged = event(key, 1, rank=3, level="error", data={"code": 9, "text": "ü"}, principal="ann")
    incident = IncidentSaved(
        key, 1, 1, 50, "hang", rank=1, victims=[0, 2], stacks=[{"ranks": [0], "text": "a\nb"}], iteration=25
    )
    section = SectionSaved(key, "step", None, False, 0.25, 12)
    store.commit([saved(key, injected=True, iteration=2**40), logged, incident, section])
    (job,) = rows(sql_target, tables.jobs)
    assert (job["job_id"], job["run"], job["state"], job["injected"], job["iteration"]) == (
        "t1",
        1,
        b"\x00\xffstate",
        True,
        2**40,
    )
    for record, table in ((logged, tables.events), (incident, tables.incidents), (section, tables.sections)):
        (row,) = rows(sql_target, table)
        assert row.pop("job") == job["id"]
        assert row == {name: getattr(record, name) for name in record.__struct_fields__ if name != "job"}


def test_columns_have_the_names_of_the_fields() -> None:
    own = {"jobs": {"id", "cluster", "owner", "job_id", "run"}, "nodes": {"first_us"}, "devices": {"first_us"}}
    records = {
        "jobs": saved(job_key()),
        "events": event(job_key(), 1),
        "attempts": AttemptSaved(job_key(), 1, 1, 1),
        "ranks": RankSaved(job_key(), 1, 0, "n"),
        "incidents": IncidentSaved(job_key(), 1, 1, 1, "exit"),
        "sections": SectionSaved(job_key(), "step", None, False, 0, 0),
        "nodes": NodeSeen("n", 1, job_key(), "active"),
        "beats": BeatsSaved(job_key(), 1, []),
    }
    for name, record in records.items():
        fields = set(record.__struct_fields__) - ({"job"} if name == "jobs" else set())
        assert {column.name for column in tables.metadata.tables[name].c} - own.get(name, set()) == fields, name


def test_the_same_commit_again_changes_nothing(store: SqlStore, sql_target: Target) -> None:
    key = job_key()
    records: list[Record] = [
        *story(key),
        NodeSeen("n1", 7, key, "active"),
        DeviceSeen("G", 8, "n1", job=key, attempt=1, rank=0),
    ]
    store.commit(records)
    before = [rows(sql_target, table) for table in tables.metadata.sorted_tables]
    store.commit(records)
    store.commit([*records[:2], event(key, 1, text="another story")])
    assert [rows(sql_target, table) for table in tables.metadata.sorted_tables] == before


def test_a_store_opened_again_goes_on(open_store, store: SqlStore, sql_target: Target) -> None:
    store.commit(story(job_key()))
    store.close()
    again = open_store(sql_target)
    again.commit([saved(job_key(), epoch=2), event(job_key(), 4)])
    assert [row["number"] for row in rows(sql_target, tables.events)] == [1, 2, 3, 4]
    assert [row["epoch"] for row in rows(sql_target, tables.jobs)] == [2]


def test_a_commit_that_fails_leaves_nothing(store: SqlStore, sql_target: Target) -> None:
    too_big = event(job_key("two"), 1, at_us=2**70)
    with pytest.raises(StoreError):
        store.commit([*story(job_key("one")), saved(job_key("two")), too_big])
    assert rows(sql_target, tables.jobs) == []
    store.commit(story(job_key("two")))
    assert [row["job_id"] for row in rows(sql_target, tables.jobs)] == ["two"]


def test_texts_that_no_database_takes_are_cleaned(store: SqlStore, sql_target: Target) -> None:
    key = job_key()
    broken = "bytes \udcff and \0 end"
    data = {"tail": broken, "more": [broken, {"x": "\0"}]}
    store.commit([saved(key, reason=broken, command=broken), EventLogged(key, 1, 1, 1, "Note", broken, data=data)])
    (row,) = rows(sql_target, tables.events)
    assert row["text"] == "bytes ? and \ufffd end"
    assert row["data"] == {"tail": row["text"], "more": [row["text"], {"x": "\ufffd"}]}


def test_an_older_sighting_does_not_replace_a_newer_one(store: SqlStore, sql_target: Target) -> None:
    key = job_key()
    store.commit([saved(key), NodeSeen("n", 50, key, "active"), BeatsSaved(key, 50, [{"rank": 1}]), DeviceSeen("G", 50, "n")])
    store.commit([NodeSeen("n", 40, key, "lost"), BeatsSaved(key, 40, []), DeviceSeen("G", 40, "other")])
    assert [(row["role"], row["first_us"]) for row in rows(sql_target, tables.job_nodes)] == [("active", 50)]
    assert [row["ranks"] for row in rows(sql_target, tables.beats)] == [[{"rank": 1}]]
    store.commit([NodeSeen("n", 60, key, "lost"), DeviceSeen("G", 60, "other")])
    assert [(row["role"], row["first_us"], row["at_us"]) for row in rows(sql_target, tables.nodes)] == [("lost", 50, 60)]
    assert [(row["node"], row["first_us"]) for row in rows(sql_target, tables.devices)] == [("other", 50)]


def test_a_placement_lasts_until_its_attempt_stops(store: SqlStore, sql_target: Target) -> None:
    key = job_key()
    store.commit([saved(key), AttemptSaved(key, 1, 1, 100), DeviceSeen("G", 110, "n", job=key, attempt=1, rank=0)])
    store.commit([DeviceSeen("G", 150, "n", job=key, attempt=1, rank=0)])
    (row,) = rows(sql_target, tables.placements)
    assert (row["device"], row["node"], row["from_us"], row["to_us"]) == ("G", "n", 110, None)
    store.commit([AttemptSaved(key, 1, 1, 100, stopped_us=200, outcome="failed")])
    assert [row["to_us"] for row in rows(sql_target, tables.placements)] == [200]


def test_job_ids_do_not_run_out_by_updates(store: SqlStore, sql_target: Target) -> None:
    for number in range(20):
        store.commit([saved(job_key("a"), epoch=number)])
    store.commit([saved(job_key("b"))])
    assert [row["id"] for row in rows(sql_target, tables.jobs)] == [1, 2]


def test_a_reader_sees_one_moment_and_cannot_write(store: SqlStore, sql_target: Target) -> None:
    store.commit(story(job_key(), 2))
    engine = reader_engine(sql_target)
    count = select(func.count()).select_from(tables.events)
    with engine.connect() as connection:
        assert connection.execute(count).scalar() == 2
        store.commit([event(job_key(), 3)])
        assert connection.execute(count).scalar() == 2, "a transaction of the reader must not see later commits"
    with engine.connect() as connection:
        assert connection.execute(count).scalar() == 3
        with pytest.raises(Exception, match=r"(?i)read.?only"):
            connection.execute(tables.events.delete())
    engine.dispose()


def test_a_connection_that_breaks_is_made_again(open_store, postgres: str) -> None:
    store = open_store(postgres)
    store.commit(story(job_key()))
    cut_sessions(postgres)
    store.commit([event(job_key(), 4)])
    assert len(rows(postgres, tables.events)) == 4


def test_a_lease_lost_with_the_connection_is_not_taken_back(open_store, postgres: str) -> None:
    store = open_store(postgres)
    store.commit(story(job_key()))
    cut_sessions(postgres)
    other = open_store(postgres, holder=holder("other", rpc="tcp://other:1"))
    with pytest.raises(StoreError, match=r"held by the supervisor with pid .* on other") as caught:
        store.commit([event(job_key(), 4)])
    assert caught.value.address == "tcp://other:1"
    assert len(rows(postgres, tables.events)) == 3
    other.close()
    with pytest.raises(StoreError, match=r"was held by the supervisor with pid .* on other") as caught:
        store.commit([event(job_key(), 4)])  # free again, but what this one knows is from before the other
    assert len(rows(postgres, tables.events)) == 3


def cut_sessions(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(text(f"SELECT pg_terminate_backend(pid, 60000) {others}"))
    engine.dispose()


def test_two_holders_of_a_server(open_store, postgres: str) -> None:
    first = open_store(postgres, holder=holder("one"))
    first.announce("tcp://one:5", "http://one:6")
    with pytest.raises(StoreError, match="use that one") as caught:
        open_store(postgres, holder=holder("two"))
    assert (caught.value.address, caught.value.rest) == ("tcp://one:5", "http://one:6")
    first.close()
    open_store(postgres, holder=holder("two")).commit(story(job_key()))


def test_an_unreachable_server_is_one_line(open_store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot reach the database postgresql") as caught:
        open_store(f"postgresql://user:secret@/x?host={tmp_path}")
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_every_transaction_is_synced(open_store, database: Path) -> None:
    store = open_store(database)
    connection = store._connection
    assert connection is not None
    names = ("journal_mode", "synchronous", "foreign_keys")
    found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]
    connection.rollback()
    assert found == ["wal", 2, 1]
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()
