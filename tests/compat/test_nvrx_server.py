"""The node's NVRx server as a process: it answers whatever the agent does, and whatever a client sends."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher.nvrx_pickle import MAX_FRAME_BYTES
from rsup.launcher.nvrx_server import FromRank
from rsup.launcher.nvrx_service import NvrxService
from rsup.launcher.stacks import process_state
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Board
from tests.compat.nvrx_client import NvrxClient, WorkloadAction, control, framed, kind, message, to_bytes

LIMITS = wire.Limits(sections={"step": 60.0})


class Agent:
    """As much of an agent as the server needs: a selector that is served when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.notes: list[str] = []
        self.heard: list[FromRank] = []
        self.clients: list[NvrxClient] = []
        self.board = Board.create(4, folder)
        self.service = NvrxService(folder / "ft", 2, self.board.path, self.selector, self.notes.append)
        self.service.begin(1, 4, LIMITS)

    def path(self, name: str = "0") -> str:
        return str(self.service.folder / name)

    def connected(self, name: str, generation: int = 4) -> NvrxClient:
        """A connection on which nothing has been said."""
        self.clients.append(NvrxClient(self.path(name), generation))
        return self.clients[-1]

    def client(self, name: str = "0", generation: int = 4) -> NvrxClient:
        """A client that has begun; the first one makes the agent start the server."""
        client = self.connected(name, generation)
        if not self.service.pids:
            self.until(lambda: self.service.pids)
        client.init()
        return client

    def until(self, condition: Callable[[], Any], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s; notes: {self.notes}"
            for key, _ in self.selector.select(0.02):
                key.data()
            self.service.look_after()
            self.heard += self.service.take_messages()

    def close(self) -> None:
        for client in self.clients:
            client.sock.close()
        self.service.close()
        self.board.close()
        self.board.unlink()
        self.selector.close()


@pytest.fixture
def agent(own_directories: Path) -> Iterator[Agent]:
    made = Agent(own_directories / "run")
    yield made
    made.close()


def open_sections(agent: Agent, local_rank: int) -> list[str]:
    return [s.name for s in agent.board.read(2 + local_rank).sections if s.open_since_ns]


def test_nothing_runs_until_a_client_comes_and_only_its_own_rank_is_written(agent: Agent) -> None:
    assert agent.service.pids == ()
    assert Path(agent.path()).stat().st_mode & 0o777 == 0o600 and agent.service.folder.stat().st_mode & 0o777 == 0o700
    client = agent.client("1")
    client.start("step")
    assert (open_sections(agent, 0), open_sections(agent, 1)) == ([], ["step"])
    assert client.cfg.rank_section_timeouts == {"step": 60.0}


@pytest.mark.parametrize("generation", [4, 6])
def test_clients_of_a_stopped_agent_never_wait(agent: Agent, generation: int) -> None:
    """The agent is not served from here on. More messages than a socket's buffer holds, and more news than the agent's does."""
    client = agent.client(generation=generation)
    for i in range(1500):
        client.start("step", i)
        client.end("step", i)
        client.heartbeat()
    for i in range(300):
        assert kind(client.set_limits({"step": 10.0 + i})) == "OkMsg"
    assert agent.board.read(2).heartbeats == 1500
    agent.until(lambda: len(agent.heard) == 300)
    last = agent.heard[-1].message
    assert isinstance(last, wire.RankSetsLimits) and last.change.sections == {"step": 309.0}


def test_limits_are_the_nodes_and_the_agents_word_is_the_last(agent: Agent) -> None:
    assert kind(agent.client("0").set_limits({"step": 3.0}, out_of_section=4.0)) == "OkMsg"
    assert agent.client("1").cfg.rank_section_timeouts == {"step": 3.0}
    agent.service.use_limits(wire.Limits(sections={"step": 7.0}))
    assert agent.client("1").cfg.rank_section_timeouts == {"step": 7.0}
    agent.until(lambda: agent.heard)
    assert agent.heard == [FromRank(1, 0, wire.RankSetsLimits(wire.LimitsChange({"step": 3.0}, 4.0)))]


def test_requests_to_the_launcher(agent: Agent) -> None:
    agent.client()
    assert control(WorkloadAction.ExcludeThisNode, "hot", rank="5", path=agent.path("L")) == b"ok"
    assert control(WorkloadAction.ShutdownWorkload, "enough", rank=4, path=agent.path("L")) == b"ok"
    assert control(WorkloadAction.Continue, path=agent.path("L"), rank=99) == b"ok"
    other = agent.connected("L")
    assert other.ask({"any": ["plain", 1]}) == b"ok"
    agent.until(lambda: len(agent.heard) == 4)
    said = [(said.local_rank, said.message) for said in agent.heard]
    assert said[:3] == [
        (1, wire.RankControls("exclude", "hot")),
        (0, wire.RankControls("shutdown", "enough")),
        (1, wire.RankControls("continue", "")),
    ]
    assert isinstance(said[3][1], wire.RankNote)


def test_hostile_bytes_get_an_error_and_disturb_nobody(agent: Agent) -> None:
    good = agent.client("1")
    hostile = [
        framed(b"cposix\nsystem\n(S'true'\ntR."),
        framed(b"\x80\x04" + b"r\xff\xff\xff\x7f" + b"N."),  # a memo index of two milliards
        framed(b"\x80\x04Nr\xff\xff\xff\x7f."),
        framed(b""),
        framed(to_bytes(message("NewerMsg", anything=1))),
        framed(b"x" * (MAX_FRAME_BYTES + 1)),
    ]
    bad = agent.client("0")
    for data in hostile:
        bad.sock.sendall(data)
        assert kind(bad.receive()) == "ErrorMsg"
        assert kind(good.heartbeat()) == "OkMsg"
    assert kind(bad.start("step")) == "OkMsg", "the connection goes on"
    assert kind(good.set_limits({"step": 9.0})) == "OkMsg"
    agent.until(lambda: any(isinstance(said.message, wire.RankSetsLimits) for said in agent.heard))  # the last that is said
    notes = [said for said in agent.heard if isinstance(said.message, wire.RankNote)]
    assert len(notes) == 1 and "posix.system" in str(notes[0]), "said once a connection"
    assert open_sections(agent, 0) == ["step"]


def test_a_length_of_four_gigabytes_is_skipped_not_stored(agent: Agent) -> None:
    client = agent.client()
    client.sock.sendall(b"\xff\xff\xff\xff" + b"x" * 1_000_000)
    good = agent.client("1")
    assert kind(good.heartbeat()) == "OkMsg"
    assert int(Path(f"/proc/{agent.service.pids[0]}/statm").read_text().split()[1]) * 4096 < 200e6


def test_a_slow_sender_holds_up_nobody_and_a_truncated_one_is_forgotten(agent: Agent) -> None:
    slow, good = agent.client("0"), agent.client("1")
    data = framed(to_bytes(message("HeartbeatMsg", rank=0, state=None)))
    for i in range(len(data)):
        slow.sock.sendall(data[i : i + 1])
        assert kind(good.heartbeat()) == "OkMsg"
    assert kind(slow.receive()) == "OkMsg"
    slow.sock.sendall(data[:-1])
    slow.sock.close()
    assert kind(agent.client("0").heartbeat()) == "OkMsg"


def test_who_does_not_read_its_answers_can_go_on_sending(agent: Agent) -> None:
    client, good = agent.client("0"), agent.client("1")
    data = framed(to_bytes(message("HeartbeatMsg", rank=0, state=None)))
    for _ in range(20_000):
        client.sock.sendall(data)
    assert kind(good.heartbeat()) == "OkMsg"
    agent.until(lambda: agent.board.read(2).heartbeats == 20_000)


def test_a_hundred_connections(agent: Agent) -> None:
    clients = [agent.client(str(i % 2)) for i in range(100)]
    for i, client in enumerate(clients):
        assert kind(client.start(f"s{i % 10}")) == "OkMsg"
    assert len(open_sections(agent, 0)) == len(open_sections(agent, 1)) == 5
    for client in clients[2:]:
        client.sock.close()
    agent.until(lambda: len(open_sections(agent, 0)) == len(open_sections(agent, 1)) == 1)
    assert kind(clients[0].end("s0")) == "OkMsg"


def test_another_attempt_begins_before_its_ranks_are_heard(agent: Agent) -> None:
    before = agent.client()
    before.start("step")
    agent.service.begin(2, 0, LIMITS)
    after = agent.client()
    assert kind(after.start("setup")) == "OkMsg"
    assert (agent.board.read(2).attempt, open_sections(agent, 0)) == (2, ["setup"])
    assert control(WorkloadAction.Continue, rank=1, path=agent.path("L")) == b"ok"
    agent.until(lambda: agent.heard)
    assert (agent.heard[0].attempt, agent.heard[0].local_rank) == (2, 1)


def test_a_stopped_server_is_continued(agent: Agent) -> None:
    client = agent.client()
    (pid,) = agent.service.pids
    os.kill(pid, signal.SIGSTOP)
    agent.until(lambda: process_state(pid) == "T" or agent.notes)
    agent.until(lambda: agent.notes)
    assert kind(client.heartbeat()) == "OkMsg" and "has been continued" in agent.notes[0]


def test_a_dead_server_is_replaced_for_who_connects_next(agent: Agent) -> None:
    client = agent.client()
    client.set_limits({"step": 2.0})
    agent.until(lambda: agent.heard)
    agent.service.use_limits(wire.Limits(sections={"step": 2.0}))
    (pid,) = agent.service.pids
    os.kill(pid, signal.SIGKILL)
    agent.until(lambda: not agent.service.pids)
    with pytest.raises(OSError):
        client.heartbeat()
        client.heartbeat()
    again = agent.client()
    assert again.cfg.rank_section_timeouts == {"step": 2.0} and kind(again.start("step")) == "OkMsg"
    assert open_sections(agent, 0) == ["step"] and agent.service.pids != (pid,)


def test_the_server_ends_with_the_agent(agent: Agent) -> None:
    agent.client()
    (pid,) = agent.service.pids
    agent.service._link.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    agent.until(lambda: not agent.service.pids)
    assert not Path(f"/proc/{pid}").exists()


def test_a_path_too_long_for_sockets_is_said_and_no_more(own_directories: Path) -> None:
    notes: list[str] = []
    with selectors.DefaultSelector() as selector:
        service = NvrxService(own_directories / ("x" * 100), 2, None, selector, notes.append)
        assert not service.is_served and service.pids == () and "too long" in notes[0]
        service.close()
