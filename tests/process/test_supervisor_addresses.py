"""An agent that knows several supervisors: whom it dials, and when it goes on to the next."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import LinkRefused, SupervisorClient
from rsup.supervisor import places, wire
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Order, StandsBy, SupervisorInfo, ToAgent, Welcome
from tests.process.two_supervisors import wait_for

KEY = places.link_key(b"0123456789abcdef0123456789abcdef")
OTHER_KEY = places.link_key(b"another secret of enough characters")


class Played:
    """A supervisor that leads, or says who does."""

    def __init__(self, address: str, key: places.LinkKey | None = None) -> None:
        self.server = RpcServer(key)
        self.address = self.server.bind(address)
        self.stands_by: StandsBy | None = None
        self.instance = ""
        self.num_hellos = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for received in self.server.receive(0.02):
                self.num_hellos += isinstance(received.message, Hello)
                self.server.send(received.agent_id, self._answer(received.message))

    def _answer(self, message: wire.ToSupervisor) -> ToAgent:
        if self.stands_by is not None:
            return self.stands_by
        if isinstance(message, Hello):
            info = SupervisorInfo(self.instance or self.address, 1, "h", False)
            return Welcome((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, info, "j1", 1, 0, 0)
        return Order("a", 0, 0)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.server.close()


@contextmanager
def agent_of(*addresses: str, key: places.LinkKey | None = None) -> Iterator[SupervisorClient]:
    client = SupervisorClient(",".join(addresses), AgentInfo("a", "n", "127.0.0.1", 1), JobSpec(), Spool(None), key)
    try:
        yield client
    finally:
        client.close()


def polled(client: SupervisorClient, condition: Callable[[], object]) -> None:
    def look() -> object:
        client.poll()
        return condition()

    wait_for(look, "what the agent should do")


@pytest.fixture
def played(tmp_path: Path) -> Iterator[tuple[Played, Played]]:
    pair = Played(f"ipc://{tmp_path}/one"), Played(f"ipc://{tmp_path}/two")
    yield pair
    for one in pair:
        one.end()


def test_the_one_that_leads_is_found_and_left_when_it_stands_aside(played: tuple[Played, Played]) -> None:
    one, two = played
    one.stands_by = StandsBy("", "two", "two leads")
    with agent_of(one.address, two.address) as client:
        polled(client, lambda: client.connected)
        assert client.address == two.address and client.take_note() == "", "the first it finds is no news"
        assert client.all_addresses == f"{two.address},{one.address}"
        one.stands_by, two.stands_by = None, StandsBy("", "one", "one leads")
        client.send_report(1, 0)
        polled(client, lambda: client.connected and client.address == one.address)
        assert client.take_note() == f"the supervisor at {one.address} goes on in place of the one at {two.address}"
        two.instance, two.stands_by, one.stands_by = one.address, None, StandsBy("", "two", "two leads")
        client.send_report(1, 0)
        polled(client, lambda: client.connected and client.address == two.address)
        assert client.take_note() == "", "the same one at another of its addresses"
        client.speaks_for_all, two.instance = False, "two"
        one.stands_by, two.stands_by = None, StandsBy("", "one", "one leads")
        client.send_report(1, 0)
        polled(client, lambda: client.connected and client.address == one.address)
        assert client.take_note() == "", "another agent of this terminal says it"


def test_where_none_leads_it_stays_for_a_while_and_says_why(played: tuple[Played, Played]) -> None:
    one, two = played
    one.stands_by = two.stands_by = StandsBy("", "", "the database is away")
    with agent_of(one.address, two.address) as client:
        polled(client, lambda: two.num_hellos >= 3)
        assert not client.connected and client.standby_note == "the database is away"
        assert client.supervisor is None and one.num_hellos <= 2, "it does not go to and fro"
        two.stands_by = None
        polled(client, lambda: client.connected)
        assert client.standby_note == ""


def test_one_that_stands_by_names_the_leader_to_an_agent_that_does_not_know_it() -> None:
    standing, leading = Played("tcp://127.0.0.1:0", KEY), Played("tcp://127.0.0.1:0", KEY)
    standing.stands_by = StandsBy(leading.address, "leading", "another leads")
    try:
        with agent_of(standing.address, key=KEY) as client:
            polled(client, lambda: client.connected)
            assert client.address == leading.address
    finally:
        standing.end()
        leading.end()


def test_one_refused_key_is_a_note_and_none_that_fits_an_error(tmp_path: Path) -> None:
    wrong, right = Played("tcp://127.0.0.1:0", OTHER_KEY), Played("tcp://127.0.0.1:0", KEY)
    here = Played(f"ipc://{tmp_path}/s")
    try:
        with agent_of(wrong.address, right.address, key=KEY) as client:
            polled(client, lambda: client.connected)
            assert client.address == right.address
            assert "does not take our key" in client.take_note()
        with agent_of(wrong.address, here.address) as client:
            polled(client, lambda: client.connected)
            assert client.address == here.address
            assert "asks for a key and we have none, so it cannot take over: name a copy of their key.pub" in client.take_note()
        third = places.link_key(b"a third secret of many characters")
        with (
            agent_of(wrong.address, right.address, key=third) as client,
            pytest.raises(LinkRefused, match="give both ends the same file"),
        ):
            polled(client, lambda: False)
    finally:
        for played in (wrong, right, here):
            played.end()
