"""A real SQLite store with a story in it, and a real server over it; only the supervisor's loop is played."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.supervisor import places
from rsup.supervisor.database import DATABASE_NAME, reader_engine
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.rest.app import make_app
from rsup.supervisor.rest.context import RestContext
from rsup.supervisor.rest.server import RestServer
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.views import LiveBeats
from tests.rest.played import TOKENS, PlayedSupervisor, Served, book
from tests.rest.story import RUNNING, at, beats_of, whole_story


@pytest.fixture
def state(own_directories: Path) -> Path:
    """The state directory, made."""
    return places.make_state_dir(places.state_dir())


@pytest.fixture
def store(state: Path) -> Iterator[SqlStore]:
    """An empty store in it."""
    opened = SqlStore.open(state / DATABASE_NAME, holder=LeaseHolder.this_process("test"), alone_may_migrate=False)
    yield opened
    opened.close()


@pytest.fixture
def story(store: SqlStore) -> SqlStore:
    """The store with the whole story."""
    store.commit(whole_story())
    return store


@pytest.fixture
def played() -> PlayedSupervisor:
    """A running supervisor that knows fresh beats of bob's job."""
    return PlayedSupervisor(live_beats={RUNNING: LiveBeats(at(10), beats_of())})


@pytest.fixture
def serve(state: Path, played: PlayedSupervisor) -> Iterator[Callable[[], Served]]:
    """Start a server over the store of the state directory, which must exist by then."""
    running: list[tuple[RestServer, Served, RestContext]] = []

    def start() -> Served:
        server = RestServer("127.0.0.1", 0)
        engine = reader_engine(state / DATABASE_NAME)
        context = RestContext(engine, played.submit, book(), played, server.allowed_hosts, 0.2, played.change_hardware)
        played.rest = server.address
        server.start(make_app(context))
        running.append((server, Served(server.address, server.stop), context))
        return running[-1][1]

    yield start
    for server, served, context in running:
        for client in served.clients:
            client.close()
        server.stop()
        context.engine.dispose()


@pytest.fixture
def served(story: SqlStore, serve: Callable[[], Served]) -> Served:
    """A server over the whole story."""
    return serve()


@pytest.fixture
def announced(served: Served, state: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The same, found by commands through `supervisor.json`, with the operator's token."""
    token_file = state / "test-token"
    token_file.write_text(TOKENS["operator"])
    token_file.chmod(0o600)
    monkeypatch.setenv("RSUP_TOKEN_FILE", str(token_file))
    monkeypatch.setattr("rsup.supervisor.rest_source.REQUEST_TIMEOUT_S", 60.0)  # a command would read the store then
    pid = os.getpid()
    places.SupervisorFile(
        pid, process_start_ticks(pid), places.this_host(), places.boot_id(), "i1", "ipc://x", served.address, True
    ).write(state)
    return served
