"""Stores to test: in memory, a SQLite file, and a real PostgreSQL server that is started for the run."""

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.supervisor.sql_store import SqlStore

sys.path.insert(0, str(Path(__file__).parent))

from store_story import holder

HAS_MEMORY_STORE = importlib.util.find_spec("rsup.supervisor.memory_store") is not None

OpenStore = Callable[..., SqlStore]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens stores, and closes those that the test left open."""
    opened: list[SqlStore] = []

    def open_it(target: Path | str, **options: object) -> SqlStore:
        options = {"holder": holder(), "alone_may_migrate": False} | options
        opened.append(SqlStore.open(target, **options))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "rsup.db"


# ----------------------------------------------------------------------------------------------------------- PostgreSQL


def _postgres_programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


class PostgresServer:
    """A server of our own on a UNIX socket, run by an unprivileged user as PostgreSQL demands."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        data = self._folder / "data"
        self._run(["initdb", "-D", str(data), "-U", "rsup", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"])
        with (self._folder / "log").open("wb") as log:
            command = [str(self._programs / "postgres"), "-D", str(data), "-k", str(self._folder), "-c", "listen_addresses="]
            command += ["-c", "fsync=off", "-c", "max_connections=20"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        self._run(["pg_isready", "-h", str(self._folder), "-U", "rsup"], tries=100)

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": self._folder}
        return {"cwd": self._folder, "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _run(self, command: list[str], tries: int = 1) -> None:
        command = [str(self._programs / command[0]), *command[1:]]
        for _ in range(tries):
            done = subprocess.run(command, capture_output=True, timeout=60, **self._as_user())
            if done.returncode == 0:
                return
            if tries > 1:
                try:
                    assert self._process is not None
                    self._process.wait(0.1)
                    break  # it ended: no use to ask again
                except subprocess.TimeoutExpired:
                    continue
        log = self._folder / "log"
        raise RuntimeError(f"{command}: {done.stderr.decode()} {log.read_text() if log.exists() else ''}")

    def new_database(self) -> str:
        """URL of a fresh, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self._run(["createdb", "-h", str(self._folder), "-U", "rsup", name])
        return f"postgresql://rsup@/{name}?host={self._folder}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                self._process.send_signal(3)  # SIGQUIT: at once, its clients are gone
                self._process.wait(10)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    programs = _postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed here (Debian: postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed")
    folder = Path(tempfile.mkdtemp(prefix="rsup-pg-", dir="/tmp"))
    server = PostgresServer(programs, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture(params=["sqlite", "postgres"])
def sql_target(request: pytest.FixtureRequest) -> Path | str:
    """A place for a store in either database."""
    return request.getfixturevalue("database" if request.param == "sqlite" else "postgres")
