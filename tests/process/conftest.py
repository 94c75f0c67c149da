"""What tests of the supervisor process share: a state directory that is left alone at the end, and an agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.supervised_agent import Agent, kill_supervisors


@pytest.fixture
def state(own_directories: Path) -> Iterator[Path]:
    """A state directory; whoever serves it at the end of the test is killed."""
    folder = own_directories / "state"
    folder.mkdir(mode=0o700)
    yield folder
    kill_supervisors(folder)


@pytest.fixture
def agent(state: Path) -> Iterator[Agent]:
    one = Agent(state)
    yield one
    one.close()
