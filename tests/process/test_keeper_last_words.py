"""What a keeper does when its agent has died: it ends the ranks, tidies up and speaks for it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rsup.launcher.keeper import Keeper
from rsup.supervisor import wire

AGENT = """
import os, sys, time
from pathlib import Path
from rsup.launcher.keeper import Keeper
from rsup.launcher.spool import Spool
from rsup.supervisor import wire
folder, address = Path(sys.argv[1]), sys.argv[2]
spool = Spool(folder / "spool")
keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", folder / "spool", remove=[folder / "board", folder / "socket"])
(folder / "board").touch(); (folder / "socket").mkdir(); (folder / "socket" / "0").touch()
spec = wire.JobSpec(job_id="t1", command=["train.py"] * 20_000)
keeper.set_supervisor(address)
keeper.set_member(wire.AgentInfo("agent-1", "node", "127.0.0.1", os.getpid(), devices=[wire.Device("GPU-1")]), spec, 7)
spool.append(wire.RankExited(wire.now_us(), 1, 0, 3))
print(keeper.pid, flush=True)
HOW
"""


class Supervisor:
    """As much of a supervisor as acknowledges facts."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.hello: wire.Hello | None = None
        self.epochs: set[int] = set()
        self._acked = 0

    def collect(self, within_s: float, refuse: bool = False) -> list[wire.AnyFact]:
        """Facts until an `AgentGone`, or until the agent is refused."""
        facts: list[wire.AnyFact] = []
        give_up = time.monotonic() + within_s
        while time.monotonic() < give_up:
            if not self._socket.poll(100):
                continue
            sender, data = self._socket.recv_multipart()
            message = wire.decode_to_supervisor(data)
            if isinstance(message, wire.Hello):
                self.hello = message
                self._socket.send_multipart([sender, wire.encode(self._answer(refuse))])
                if refuse:
                    return []
            elif isinstance(message, wire.Report):
                self.epochs.add(message.epoch)
                facts += message.facts[max(0, self._acked + 1 - message.first_sequence) :]  # some may have come twice
                self._acked = max(self._acked, message.first_sequence + len(message.facts) - 1)
                self._socket.send_multipart([sender, wire.encode(wire.Order("agent-1", 7, self._acked))])
                if facts and isinstance(facts[-1], wire.AgentGone):
                    return facts
        raise AssertionError(f"no AgentGone, only {facts}")

    def _answer(self, refuse: bool) -> wire.Welcome | wire.Refusal:
        if refuse:
            return wire.Refusal(2, "unknown agent")
        info = wire.SupervisorInfo("i", 1, "h", True)
        return wire.Welcome((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, info, "t1", 1, 7, 0)

    def hears_anything(self, within_s: float) -> bool:
        return bool(self._socket.poll(int(within_s * 1000)))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def start_agent(folder: Path, address: str, how: str = "time.sleep(600)") -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", AGENT.replace("HOW", how), str(folder), address]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    keeper_pid = int(agent.stdout.readline())
    agent.stdout.close()
    return agent, keeper_pid


def wait_gone(pid: int, within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    with contextlib.suppress(OSError):  # there is no such process
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < give_up, f"process {pid} is still there"
            time.sleep(0.01)


def test_the_spool_and_agent_gone_are_delivered(tmp_path: Path, supervisor: Supervisor) -> None:
    agent, keeper_pid = start_agent(tmp_path, supervisor.address)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(keeper_pid, number)  # the agent's business, not the keeper's
    agent.kill()
    agent.wait()
    exited, gone = supervisor.collect(60)
    assert isinstance(exited, wire.RankExited) and exited.exit_code == 3
    assert isinstance(gone, wire.AgentGone) and str(agent.pid) in gone.reason
    assert supervisor.hello is not None
    assert supervisor.hello.agent.gone and supervisor.hello.agent.agent_id == "agent-1"
    assert supervisor.hello.spec.job_id == "t1" and supervisor.hello.epoch == 7
    assert supervisor.epochs == {7}
    wait_gone(keeper_pid)
    assert list(tmp_path.iterdir()) == []


def test_a_supervisor_that_does_not_know_the_agent_ends_it(tmp_path: Path, supervisor: Supervisor) -> None:
    agent, keeper_pid = start_agent(tmp_path, supervisor.address)
    agent.kill()
    agent.wait()
    supervisor.collect(60, refuse=True)
    wait_gone(keeper_pid)
    assert not (tmp_path / "spool").exists()


def test_after_a_goodbye_the_keeper_says_and_removes_nothing(tmp_path: Path, supervisor: Supervisor) -> None:
    agent, keeper_pid = start_agent(tmp_path, supervisor.address, "keeper.close()")
    assert agent.wait(60) == 0
    wait_gone(keeper_pid)
    assert not supervisor.hears_anything(within_s=1)
    assert {path.name for path in tmp_path.iterdir()} == {"board", "socket", "spool"}


def test_an_agent_that_closes_its_socket_and_lives_on_is_ended(tmp_path: Path) -> None:
    agent, keeper_pid = start_agent(tmp_path, "", "keeper._link.close(); time.sleep(600)")
    assert agent.wait(60) == -signal.SIGKILL
    wait_gone(keeper_pid)
    assert not (tmp_path / "board").exists()
    assert (tmp_path / "spool").exists(), "nobody took it: it stays for whoever looks"


def test_a_keeper_starts_without_torch_and_goes_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.launcher.keeper.GOODBYE_WITHIN_S", 60.0)
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool")
    try:
        give_up, process = time.monotonic() + 60, Path(f"/proc/{keeper.pid}")
        # a process that is just being replaced by its program maps nothing yet, and has the signals of the one before
        while "python" not in (process / "maps").read_text() or not ignores(process, signal.SIGUSR1):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert "libtorch" not in (process / "maps").read_text(), "it has imported all that it needs to serve an agent"
    finally:
        keeper.close()
    assert keeper._popen.returncode == 0, "it has not been killed"


def ignores(process: Path, signum: int) -> bool:
    mask = int((process / "status").read_text().split("SigIgn:")[1].split()[0], 16)
    return bool(mask >> (signum - 1) & 1)
