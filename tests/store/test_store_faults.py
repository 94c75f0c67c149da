"""Bad disks, bad files, bad places: one clear line each, nothing half written, and a way back."""

import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from store_story import event, holder, job_key, saved, story

from rsup.supervisor.database import reader_engine
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreDamaged, StoreError, StoreFull, StoreHeld, StoreRefuses, StoreTooNew

DATA = {"tail": "x" * 50_000}


def num_events(target: Path | str) -> int:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM events")).scalar()
    engine.dispose()
    return int(found or 0)


def mounted(place: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.getuid():
        pytest.skip("only root may mount a small disk")
    mounted(place, "-t", "tmpfs", "-o", "size=1m,mode=700", "none")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_what_was_committed_and_heals(open_store, small_disk: Path) -> None:
    store = open_store(small_disk / "rsup.db")
    store.commit(story(job_key(), 3))
    (small_disk / "filler").write_bytes(b"x" * 400_000)
    number = 3
    with pytest.raises(StoreFull, match="disk full") as caught:
        while number < 100:
            store.commit([event(job_key(), number + 1, data=DATA), event(job_key(), number + 2, data=DATA)])
            number += 2
    assert "\n" not in str(caught.value)
    assert num_events(small_disk / "rsup.db") == number, "all of a transaction or nothing"
    with pytest.raises(StoreFull):
        store.commit([event(job_key(), n, data=DATA) for n in range(number + 1, number + 30)])
    (small_disk / "filler").unlink()
    store.commit([event(job_key(), number + 1, data=DATA)])
    assert num_events(small_disk / "rsup.db") == number + 1


@pytest.mark.parametrize("at_us", [2**63, None])
def test_what_no_column_takes_is_told_from_a_store_that_fails(open_store, sql_target: Path | str, at_us: int | None) -> None:
    store = open_store(sql_target)
    store.commit(story(job_key(), 1))
    with pytest.raises(StoreRefuses, match="does not take that") as caught:
        store.commit([event(job_key(), 2), event(job_key(), 3, at_us=at_us)])
    assert "\n" not in str(caught.value)
    assert num_events(sql_target) == 1
    store.commit([event(job_key(), 2)])


def test_a_full_disk_from_the_start(open_store, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(StoreFull):
        open_store(small_disk / "rsup.db")
    (small_disk / "filler").unlink()
    open_store(small_disk / "rsup.db").commit(story(job_key()))


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from store_story import *
from rsup.supervisor.store import StoreFull
store = SqlStore.open(sys.argv[1], holder=holder(), alone_may_migrate=False)
store.commit(story(job_key(), 3))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    for number in range(4, 100):
        store.commit([event(job_key(), number, data={"tail": "x" * 50_000})])
    print("no limit")
except StoreFull as error:
    print(number - 1, error)
store.close()
""".replace("from store_story import *", "from rsup.supervisor.sql_store import SqlStore\nfrom store_story import *")


def test_over_a_file_size_limit(database: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", LIMITED, str(database), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    number, _, message = done.stdout.partition(" ")
    assert "quota" in message and message.count("\n") == 1, done
    assert num_events(database) == int(number)


def test_a_read_only_file_system(open_store, small_disk: Path) -> None:
    store = open_store(small_disk / "rsup.db")
    store.commit(story(job_key(), 3))
    store.close()
    mounted(small_disk, "-o", "remount,ro")
    with pytest.raises(StoreFull, match=r"(?i)read-only"):
        open_store(small_disk / "rsup.db")
    assert num_events(small_disk / "rsup.db") == 3, "reading needs no writing"


def test_a_dead_writers_log_is_read_where_nothing_can_be_written(database: Path, small_disk: Path) -> None:
    end = "import os\nos.kill(os.getpid(), 9)\n"
    start = LIMITED[: LIMITED.index("resource.setrlimit")]
    subprocess.run([sys.executable, "-c", start + end, str(database), str(Path(__file__).parent)], timeout=90)
    for ending in ("", "-wal"):  # without the shared memory, as in a copied directory
        shutil.copyfile(f"{database}{ending}", small_disk / f"rsup.db{ending}")
    mounted(small_disk, "-o", "remount,ro")
    assert num_events(small_disk / "rsup.db") == 3


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir(mode=0o555)
    script = LIMITED.replace(
        "store = SqlStore", "import os\nif os.getuid() == 0: os.setgid(65534); os.setuid(65534)\nstore = SqlStore"
    )
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    command = [sys.executable, "-c", script, str(folder / "rsup.db"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert "StoreFull: cannot write" in done.stderr and "Permission denied" in done.stderr, done


@pytest.mark.parametrize("damage", ["no database", "first page", "cut short"])
def test_a_damaged_file(open_store, database: Path, damage: str) -> None:
    if damage == "no database":
        database.write_text("this is a letter to my aunt\n" * 100)
    else:
        store = open_store(database)
        store.commit(story(job_key(), 50))
        store.close()
        whole = database.read_bytes()
        database.write_bytes(whole[:100] + b"\x7f" * 4000 + whole[4100:] if damage == "first page" else whole[:5000])
    before = database.read_bytes()
    with pytest.raises(StoreDamaged) as caught:
        open_store(database)
    assert str(database) in str(caught.value) and "\n" not in str(caught.value)
    assert database.read_bytes() == before
    assert not database.with_suffix(".lease").exists(), "the lease is given back"


def test_somebody_elses_database(open_store, database: Path, postgres: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE recipes (id INTEGER)")
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE recipes (id INTEGER)"))
    engine.dispose()
    for target in (database, postgres):
        with pytest.raises(StoreDamaged, match="is not rsup's"):
            open_store(target)


def test_a_newer_schema_is_not_touched(open_store, database: Path, postgres: str) -> None:
    for target in (database, postgres):
        open_store(target).close()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '7777'")
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '7777'"))
    engine.dispose()
    before = (database.read_bytes(), database.stat().st_mtime_ns)
    for target in (database, postgres):
        with pytest.raises(StoreTooNew, match="7777, newer than this release's"):
            open_store(target, alone_may_migrate=True)
    assert (database.read_bytes(), database.stat().st_mtime_ns) == before
    assert not list(database.parent.glob("*.bak*"))


def test_places_where_no_store_can_be(open_store, tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    for path, message in (
        (tmp_path / "missing" / "rsup.db", "does not exist; make it"),
        (tmp_path / "folder.db", "is not a file"),
        (tmp_path / ("x" * 200) / ("y" * 200) / ("z" * 200) / "rsup.db", "too long for SQLite"),
    ):
        with pytest.raises(StoreError, match=message):
            open_store(path)


def test_a_long_path_with_odd_characters(open_store, tmp_path: Path) -> None:
    folder = tmp_path / "ä ?mode=ro&x=%41#;" / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    open_store(folder / "rsup.db").commit(story(job_key(), 3))
    assert num_events(folder / "rsup.db") == 3


def test_files_are_private(open_store, database: Path) -> None:
    old = os.umask(0)
    try:
        open_store(database).commit(story(job_key()))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in database.parent.iterdir()}
    finally:
        os.umask(old)
    assert set(modes) == {"rsup.db", "rsup.db-wal", "rsup.db-shm", "rsup.lock", "rsup.lease"}
    assert set(modes.values()) == {0o600}


COMMITTING = """
import sys
sys.path.insert(0, sys.argv[2])
from store_story import *
from rsup.supervisor.sql_store import SqlStore
store = SqlStore.open(sys.argv[1], holder=holder(), alone_may_migrate=False)
number = 1
while True:
    store.commit([saved(job_key(), epoch=number), event(job_key(), 2 * number - 1), event(job_key(), 2 * number)])
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("num_commits", [1, 7, 40])
def test_sigkill_loses_no_committed_transaction(open_store, sql_target: Path | str, num_commits: int) -> None:
    command = [sys.executable, "-c", COMMITTING, str(sql_target), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == num_commits:
                process.send_signal(signal.SIGKILL)
                break
        rest = process.stdout.read().split()
    committed = int(rest[-1]) if rest else num_commits
    store = _opened_once_free(open_store, sql_target)
    found = num_events(sql_target)
    assert found in (2 * committed, 2 * committed + 2) and found % 2 == 0
    store.commit([saved(job_key()), *(event(job_key(), number) for number in range(1, found + 2))])
    assert num_events(sql_target) == found + 1


def _opened_once_free(open_store, target: Path | str) -> SqlStore:
    """A PostgreSQL server takes a moment to find the killed process's session ended."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return open_store(target)
        except StoreHeld:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def test_another_program_that_locks_the_file(open_store, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.supervisor.database.BUSY_TIMEOUT_S", 0.05)
    store = open_store(database, holder=holder())
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another program"):
            store.commit(story(job_key()))
        other.execute("ROLLBACK")
    store.commit(story(job_key()))
