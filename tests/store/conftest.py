"""Stores to test: in memory, a SQLite file, and a real PostgreSQL server that is started for the run."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.supervisor.sql_store import SqlStore

sys.path.insert(0, str(Path(__file__).parent))

from postgres_server import postgres, postgres_server  # fixtures, by being names here
from store_story import holder

__all__ = ["postgres", "postgres_server"]

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


@pytest.fixture(params=["sqlite", "postgres"])
def sql_target(request: pytest.FixtureRequest) -> Path | str:
    """A place for a store in either database."""
    return request.getfixturevalue("database" if request.param == "sqlite" else "postgres")
