"""The keeper as host of the attempts' TCPStores, with real ranks."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.launcher import keeper_process as companion
from rsup.launcher.keeper import Keeper, PortInUse, bind_store_socket

pytestmark = pytest.mark.timeout(300)  # ranks and each keeper import torch

RANKS = """
import json, os, sys, torch, torch.distributed as dist
for line in sys.stdin:  # ranks of one attempt: forked, so that torch is imported once for all tests
    environments, script = json.loads(line)
    pids = []
    for environment in environments:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.clear()
            os.environ.update(environment)
            exec(script, {"__name__": "__main__"})
            os._exit(0)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""

RANK = """
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
total = torch.ones(1); dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.new_group([0]); dist.destroy_process_group()
"""

ENTRIES = """
import os, time, torch, torch.distributed as dist
from rsup.worker.inprocess.entry_store import attempt_store
attempt = attempt_store()
num_descriptors = lambda: len(os.listdir(f"/proc/{KEEPER}/fd"))
last = NUM_ENTRIES
for entry in range(1, last + 1):
    if entry == 7:
        continue  # every rank left it before it began
    attempt.use_store_of(entry)
    dist.init_process_group("gloo")
    total = torch.ones(1); dist.all_reduce(total)
    assert total.item() == 2
    if entry == 4:
        early = num_descriptors()
    elif entry == last:
        give_up = time.monotonic() + 60  # a store is dropped a moment after its entry
        while num_descriptors() > early:
            assert time.monotonic() < give_up, "stores of entries that are over are dropped"
            time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()
    attempt.entry_over(entry)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy keeper has time to close the socket of the store before."""
    monkeypatch.setattr("rsup.launcher.keeper.DROP_WITHIN_S", 60.0)


class Ranks:
    """A process that has imported torch and forks ranks; one that raises ends with its traceback and another code than 0."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", RANKS]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    def run(self, port: int, attempt: int, script: str = RANK, world_size: int = 2) -> list[int]:
        """Exit codes of the ranks of an attempt with the store at `port`."""
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
            "OMP_NUM_THREADS": "1",
        }
        numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([[os.environ | shared | own for own in numbers], script]) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], 200)[0], "the ranks did not end"
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        self._process.communicate(timeout=100)


@pytest.fixture(scope="module")
def ranks(nothing_is_left: None) -> Iterator[Ranks]:
    pytest.importorskip("torch")
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("backend", ["libuv", "plain"])
def test_three_attempts_each_on_a_store_of_its_own(
    tmp_path: Path, ranks: Ranks, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "plain":
        monkeypatch.setenv("USE_LIBUV", "0")
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    try:
        port = 0
        for attempt in (1, 2, 3):
            port = keeper.host_store(attempt, "127.0.0.1", port)  # from the second on an exact port
            assert ranks.run(port, attempt) == [0, 0]
            keeper.drop_store(attempt)
        assert keeper.read_notices() == []
        assert (tmp_path / "spool.keeper").read_text() == ""
    finally:
        keeper.close()


@pytest.mark.parametrize(("backend", "num_entries"), [("libuv", 25), ("plain", 12)])
def test_each_entry_into_the_training_has_a_store_of_its_own(
    tmp_path: Path, ranks: Ranks, backend: str, num_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P28: the third `init_process_group` on one store would read the addresses of the first."""
    if backend == "plain":
        monkeypatch.setenv("USE_LIBUV", "0")
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    try:
        port = keeper.host_store(1, "127.0.0.1")
        script = ENTRIES.replace("KEEPER", str(keeper.pid)).replace("NUM_ENTRIES", str(num_entries))
        assert ranks.run(port, 1, script) == [0, 0]
        keeper.drop_store(1)
        give_up = time.monotonic() + 60
        while (num_left := num_descriptors(keeper.pid)) > MAX_IDLE_DESCRIPTORS:
            assert time.monotonic() < give_up, f"with the attempt all of its stores go; {num_left} descriptors are left"
            time.sleep(0.01)
        assert keeper.read_notices() == []
        assert (tmp_path / "spool.keeper").read_text() == ""
    finally:
        keeper.close()


MAX_IDLE_DESCRIPTORS = 18
"""Of a keeper without a store; each store has six or more."""


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_store_dropped_before_torch_is_there_frees_its_port_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_torch(tmp_path / "slow", "import time\ntime.sleep(600)\n", monkeypatch)
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    try:
        keeper.hosts_stores = True
        port = keeper.host_store(1, "127.0.0.1")
        keeper.drop_store(1)
        assert keeper.host_store(2, "127.0.0.1", port) == port
    finally:
        keeper.close()
    assert [path.name for path in tmp_path.iterdir()] == ["slow"]


def use_as_torch(folder: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a keeper imports as torch be this."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_port_in_use_names_its_holder() -> None:
    with bind_store_socket("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(PortInUse) as error:
            bind_store_socket("127.0.0.1", port)
        assert str(error.value).startswith(f"port {port} is in use by process {os.getpid()} (")
        assert str(error.value).endswith("choose another --master-port")
        with pytest.raises(PortInUse):
            bind_store_socket("somewhere.example", port)


def test_loopback_is_bound_alone_and_other_hosts_on_all_addresses() -> None:
    with bind_store_socket("localhost", 0) as alone, bind_store_socket(socket.gethostname(), 0) as everywhere:
        assert alone.getsockname()[0] == "127.0.0.1"
        assert everywhere.getsockname()[0] in ("::", "0.0.0.0")
        with socket.create_connection(("127.0.0.1", everywhere.getsockname()[1]), 60):
            pass


def test_the_agent_sees_its_keeper_die_and_starts_another(tmp_path: Path) -> None:
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    os.kill(keeper.pid, 9)
    assert select.select([keeper], [], [], 60)[0]
    keeper.close()
    another = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    assert another.host_store(2, "127.0.0.1") > 0
    another.close()


def test_a_keeper_that_does_not_read_gets_the_newest_of_each_kind_later(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["sleep", "60"]) as process, theirs:
        keeper = Keeper(process, ours, tmp_path / "log")
        for number in range(2000):
            keeper.set_sessions([number] * 500)
        keeper.set_supervisor("ipc:///there")
        keeper.set_files([tmp_path / "board"])

        def read() -> list[companion.ToKeeper]:
            messages = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    messages.append(companion.decode(theirs.recv(companion.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)))
            return messages

        before = read()
        assert 0 < len(before) < 2000 and all(isinstance(message, companion.UseSessions) for message in before)
        keeper.flush()
        newest = [companion.UseSessions([1999] * 500), companion.UseSupervisor("ipc:///there")]
        assert read() == [*newest, companion.UseFiles([str(tmp_path / "board")])]
        keeper.flush()
        assert read() == []
        process.kill()
        keeper.close()


def test_torch_that_cannot_be_imported_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_torch(tmp_path / "broken", "raise OSError('libcudart.so is missing')\n", monkeypatch)
    keeper = Keeper.start(os.getpid(), "agent-1", "agent-1", tmp_path / "spool", "")
    try:
        keeper.hosts_stores = True
        ports = [keeper.host_store(attempt, "127.0.0.1") for attempt in (1, 2)]
        assert select.select([keeper.notices_fileno()], [], [], 60)[0]
        wait_until_refused(ports[1])
        assert keeper.read_notices() == [
            "no TCPStore for the ranks, torch cannot be imported: OSError: libcudart.so is missing"
        ]
    finally:
        keeper.close()


def wait_until_refused(port: int) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionError:
            return
        except TimeoutError:  # nobody takes our connections from the backlog
            pass
        time.sleep(0.05)
    raise AssertionError(f"port {port} still listens")
