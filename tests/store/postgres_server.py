"""A real PostgreSQL server from the distribution's package, for tests, which may stop it and start it again."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


def postgres_programs() -> Path | None:
    """The folder of `postgres`, `initdb`, ...; None where no server is installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


class PostgresServer:
    """A server of our own on a UNIX socket, run by an unprivileged user as PostgreSQL demands. `fsync`: as safe as it is by
    default; tests are quicker without."""

    def __init__(self, programs: Path, folder: Path, *, fsync: bool = False) -> None:
        self._fsync = "on" if fsync else "off"
        self._programs = programs
        self.folder = folder
        self._user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make the cluster and start the server."""
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self._run(["initdb", "-D", str(self.folder / "data"), "-U", "rsup", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"])
        self.start_again()

    def start_again(self) -> None:
        """Start the server on the data that it has."""
        with (self.folder / "log").open("ab") as log:
            command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
            command += ["-c", "listen_addresses=", "-c", f"fsync={self._fsync}", "-c", "max_connections=40"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        self._run(["pg_isready", "-h", str(self.folder), "-U", "rsup"], tries=600)

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {"cwd": self.folder}
        return {"cwd": self.folder, "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _run(self, command: list[str], tries: int = 1) -> None:
        command = [str(self._programs / command[0]), *command[1:]]
        said = b""
        for _ in range(tries):
            done = subprocess.run(command, capture_output=True, timeout=120, **self._as_user())
            said = done.stderr
            if done.returncode == 0:
                return
            if tries > 1:
                try:
                    assert self._process is not None
                    self._process.wait(0.1)
                    break  # it ended: no use to ask again
                except subprocess.TimeoutExpired:
                    continue
        log = self.folder / "log"
        raise RuntimeError(f"{command}: {said.decode()} {log.read_text() if log.exists() else ''}")

    def new_database(self, encoding: str = "UTF8") -> str:
        """URL of a fresh, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        other = [] if encoding == "UTF8" else ["-E", encoding, "-T", "template0"]
        self._run(["createdb", "-h", str(self.folder), "-U", "rsup", *other, name])
        return f"postgresql://rsup@/{name}?host={self.folder}"

    def stop_at_once(self) -> None:
        """End it without waiting for anybody, as a crash would; what was committed stays."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "data" / "postmaster.pid").unlink()

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)  # at once, its clients are gone
                self._process.wait(60)


def started_server(*, fsync: bool = False) -> Generator[PostgresServer, None, None]:
    """A server until the generator ends; skips the test where there is none to start."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed here (Debian: postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed")
    folder = Path(tempfile.mkdtemp(prefix="rsup-pg-", dir="/tmp"))
    server = PostgresServer(programs, folder, fsync=fsync)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    yield from started_server()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()
