"""The supervisor process: starting, dying, being started again, ending; real processes and signals."""

import json
import os
import secrets
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.launcher.supervisor_process import EmbeddedSupervisor, belongs_to_job, read_live
from rsup.supervisor import places, wire
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.wire import AgentInfo, JobSpec, Note, Order, Refusal, ToAgent, Welcome

MAIN = [sys.executable, "-P", "-m", "rsup.supervisor.main"]


def until(condition: Callable[[], object], poll: Callable[[], object] = lambda: None, within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        poll()
        time.sleep(0.005)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def state(own_directories: Path) -> Iterator[Path]:
    """A state directory; whoever serves it at the end of the test is killed."""
    folder = own_directories / "state"
    folder.mkdir(mode=0o700)
    yield folder
    kill_supervisors(folder)


def kill_supervisors(state: Path) -> None:
    """End every supervisor of that state directory, whatever its files say."""
    wanted = os.fsencode(state)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in command and b"rsup.supervisor.main" in command:
            os.kill(int(path.name), signal.SIGKILL)
            until(lambda pid=int(path.name): not running(pid))  # type: ignore[misc]


class Agent:
    """A test's agent: a client and whoever starts its supervisor."""

    def __init__(self, state: Path, spec: JobSpec | None = None, *, in_job: bool = False, spool: Path | None = None) -> None:
        self.embedded = EmbeddedSupervisor(state, in_job=in_job)
        self.info = AgentInfo(secrets.token_hex(4), places.this_host(), "127.0.0.1", os.getpid(), places.boot_id())
        self.spool = Spool(spool)
        self.messages: list[ToAgent] = []
        self.acked_command = 0
        self.slowest_s = 0.0
        self._reported_s = 0.0
        self.client = SupervisorClient(self.embedded.ensure(), self.info, spec or JobSpec(owner="ann"), self.spool)

    def turn(self) -> None:
        """What an agent does again and again."""
        started = time.monotonic()
        for message in self.client.poll():
            self.messages.append(message)
            if isinstance(message, Order) and message.commands:
                self.acked_command = max(self.acked_command, message.commands[-1].sequence)
        if self.client.connected:
            self.embedded.heard()
        if started - self._reported_s > 0.2 or self.spool.last > self.spool.acked:
            self._reported_s = started
            self.client.send_report(1, self.acked_command, attempt=1)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        if not self.client.connected:
            address = self.embedded.ensure()
            if address != self.client.address:
                self.client.use_address(address)

    def first(self, kind: type[ToAgent]) -> ToAgent | None:
        return next((message for message in self.messages if isinstance(message, kind)), None)

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def agent(state: Path) -> Iterator[Agent]:
    one = Agent(state)
    yield one
    one.close()


def served(state: Path) -> places.SupervisorFile:
    """The supervisor that serves that directory now."""
    until(lambda: read_live(state))
    found = places.read_supervisor_file(state)
    assert found is not None
    return found


def notes(state: Path) -> list[str]:
    with sqlite3.connect(f"file:{state}/rsup.db?mode=ro", uri=True) as database:
        rows = database.execute("select text from events where kind = 'Note' order by number").fetchall()
    database.close()
    return [row[0] for row in rows]


# ------------------------------------------------------------------------------------------------------------- deaths


def test_500_facts_are_applied_once_though_the_supervisor_is_killed_three_times(state: Path, own_directories: Path) -> None:
    agent = Agent(state, spool=own_directories / "spool")
    until(lambda: agent.first(Welcome), agent.turn)
    kills = {100, 250, 400}
    killed = []
    for i in range(500):
        agent.spool.append(Note(wire.now_us(), "info", f"fact {i}"))
        agent.turn()
        if i in kills:
            killed.append(served(state).pid)
            os.kill(killed[-1], signal.SIGKILL)
            until(lambda: not agent.client.connected, agent.turn)
            until(lambda: agent.client.connected, agent.turn)
    until(lambda: not len(agent.spool), agent.turn, within_s=30)
    assert len(set(killed)) == 3 and served(state).pid not in killed
    assert notes(state) == [f"fact {i}" for i in range(500)]
    agent.close()


def test_a_stopped_supervisor_blocks_nobody_and_is_not_replaced(state: Path, agent: Agent) -> None:
    until(lambda: agent.client.connected, agent.turn)
    found = served(state)
    starts = agent.embedded.num_starts
    os.kill(found.pid, signal.SIGSTOP)
    try:
        agent.slowest_s = 0.0
        until(lambda: not agent.client.connected, agent.turn)
        for i in range(50):
            agent.spool.append(Note(0, "info", f"meanwhile {i}"))
            agent.turn()
        assert agent.slowest_s < 0.2
        assert agent.embedded.num_starts == starts
    finally:
        os.kill(found.pid, signal.SIGCONT)
    until(lambda: not len(agent.spool), agent.turn)
    assert notes(state) == [f"meanwhile {i}" for i in range(50)]


def test_sigterm_ends_in_good_order(state: Path, agent: Agent) -> None:
    until(lambda: agent.first(Welcome), agent.turn)
    found = served(state)
    os.kill(found.pid, signal.SIGTERM)
    until(lambda: not running(found.pid))
    assert places.read_supervisor_file(state) is None
    assert not Path(found.rpc.removeprefix("ipc://")).exists()
    assert "ending: told to" in (state / "supervisor.log").read_text()


def test_it_ends_some_time_after_its_last_agent(state: Path) -> None:
    """RSUP_IDLE_EXIT is 1 s in tests."""
    EmbeddedSupervisor(state, in_job=False).ensure()
    pid = served(state).pid
    started = time.monotonic()
    until(lambda: not running(pid))
    assert time.monotonic() - started > 0.3
    assert places.read_supervisor_file(state) is None


def test_a_live_job_keeps_it_alive(state: Path, agent: Agent) -> None:
    until(lambda: agent.first(Welcome), agent.turn)
    pid = served(state).pid
    ends = time.monotonic() + 2.5
    until(lambda: time.monotonic() > ends)
    assert running(pid)


# ----------------------------------------------------------------------------------------------------------- starting


def test_agents_that_race_end_with_one_supervisor(state: Path) -> None:
    agents: list[Agent] = []
    barrier = threading.Barrier(4)

    def one() -> None:
        barrier.wait(10)
        agent = Agent(state)
        agents.append(agent)
        until(lambda: agent.first(Welcome), agent.turn, within_s=30)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    instances = {message.supervisor.instance for a in agents for message in a.messages if isinstance(message, Welcome)}
    assert len(agents) == 4 and len(instances) == 1 and sum(a.embedded.num_starts for a in agents) > 1
    log = (state / "supervisor.log").read_text()
    assert log.count("serves agents at") == 1 and "Traceback" not in log and "ERROR" not in log
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("lie", ["dead pid", "reused pid", "other boot", "garbage"])
def test_a_stale_supervisor_file_is_seen_through(state: Path, lie: str) -> None:
    rpc = f"ipc://{state}/somewhere"
    stale = places.SupervisorFile(
        os.getpid(), process_start_ticks(os.getpid()), places.this_host(), places.boot_id(), "i", rpc, "", True
    )
    if lie == "dead pid":
        with subprocess.Popen(["true"]) as done:
            done.wait(10)
        stale = replace(stale, pid=done.pid)
    elif lie == "reused pid":
        stale = replace(stale, start_ticks=stale.start_ticks + 1)
    elif lie == "other boot":
        stale = replace(stale, boot_id="another")
    stale.write(state)
    if lie == "garbage":
        (state / "supervisor.json").write_text('{"pid": "many"')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(rpc.removeprefix("ipc://"))
        listener.listen()
        agent = Agent(state)
        until(lambda: agent.first(Welcome), agent.turn)
        assert agent.client.address == places.embedded_address(state)
        agent.close()


def test_a_foreign_supervisor_is_used_by_its_tcp_address(state: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tcp = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        foreign = places.SupervisorFile(1, 1, "another-host", "b", "i", "ipc:///nowhere", "", True, tcp)
        foreign.write(state)
        embedded = EmbeddedSupervisor(state, in_job=False)
        assert embedded.ensure() == tcp and embedded.num_starts == 0
    assert not read_live(state), "it does not accept any more"


SUBREAPER = """
import ctypes, sys
from pathlib import Path
from rsup.launcher.supervisor_process import EmbeddedSupervisor
libc = ctypes.CDLL(None)
assert libc.prctl(36, 1, 0, 0, 0) == 0
EmbeddedSupervisor(Path(sys.argv[1]), in_job=sys.argv[2] == "in-job").ensure()
flag = ctypes.c_int(0)
libc.prctl(37, ctypes.byref(flag), 0, 0, 0)
assert flag.value == 1
sys.stdin.read()
"""


@pytest.mark.parametrize("where", ["in-job", "apart"])
def test_whose_child_it_is(state: Path, where: str) -> None:
    environment = os.environ | {
        "RSUP_MARK": "m1",
        "PET_NNODES": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "RSUP_SUPERVISOR": "tcp://a:1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", SUBREAPER, str(state), where], stdin=subprocess.PIPE, env=environment
    ) as parent:
        found = served(state)
        status = Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()
        variables = Path(f"/proc/{found.pid}/environ").read_bytes().decode()
        assert parent.stdin is not None
        parent.stdin.close()
        assert parent.wait(20) == 0
    assert (int(status[1]) == parent.pid) == (where == "in-job")
    assert int(status[3]) not in (os.getsid(0), parent.pid)
    assert os.readlink(f"/proc/{found.pid}/cwd") == "/"
    for name in ("RSUP_MARK", "PET_", "TORCHELASTIC_", "RSUP_SUPERVISOR"):
        assert f"{name}" not in variables.replace("RSUP_SUPERVISOR_", ""), name
    assert "RSUP_STATE_DIR=" in variables
    assert running(found.pid), "it outlives the launch that started it"


def test_where_it_stays_in_the_jobs_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert belongs_to_job()


def test_a_supervisor_that_cannot_start_is_tried_seldom_and_says_why(state: Path) -> None:
    now_s = 0.0
    embedded = EmbeddedSupervisor(state, ["--no-such-option"], in_job=True, clock=lambda: now_s)
    starts = []
    for _ in range(8):
        embedded.ensure()
        starts.append(embedded.num_starts)
        now_s += 1.0
    assert starts[-1] <= 4
    until(lambda: "no-such-option" in (state / "supervisor.log").read_text())
    assert "Traceback" not in (state / "supervisor.log").read_text()
    until(lambda: not embedded.num_running)


def test_from_spawn_to_welcome(state: Path) -> None:
    """The goal is 0.6 s with an existing database on an idle machine; the bound here is for a busy one."""
    taken = []
    for _ in range(2):
        started = time.monotonic()
        agent = Agent(state)
        until(lambda a=agent: a.first(Welcome), agent.turn)  # type: ignore[misc]
        taken.append(time.monotonic() - started)
        agent.close()
        pid = served(state).pid
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not running(pid))  # type: ignore[misc]
    print(f"spawn to first Welcome: {taken[0]:.3f} s with a fresh database, {taken[1]:.3f} s with an existing one")
    assert taken[1] < 3.0


# -------------------------------------------------------------------------------------------------------------- trouble


def make_trouble(state: Path, kind: str) -> str:
    """Spoil the store of `state`; return what the error must say."""
    database = state / "rsup.db"
    if kind == "damaged":
        database.write_bytes(b"this is no database" * 100)
        return "rsup.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table alembic_version (version_num varchar(32) not null)")
        connection.execute("insert into alembic_version values ('ffff_from_the_future')")
    connection.close()
    return "newer"


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_an_unusable_store_does_not_stop_a_launch(state: Path, kind: str) -> None:
    says = make_trouble(state, kind)
    before = (state / "rsup.db").read_bytes()
    agent = Agent(state)
    until(lambda: agent.first(Welcome), agent.turn)
    welcome = agent.first(Welcome)
    assert isinstance(welcome, Welcome)
    assert "rsup-fallback-" in welcome.supervisor.store and says in welcome.supervisor.store
    assert (state / "rsup.db").read_bytes() == before
    agent.spool.append(Note(0, "info", "kept"))
    os.kill(served(state).pid, signal.SIGKILL)
    until(lambda: not agent.client.connected, agent.turn)
    until(lambda: not len(agent.spool), agent.turn)
    assert len(list(state.glob("rsup-fallback-*.db"))) == 1, "the next one takes up the same store"
    agent.close()


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_serve_says_why_it_cannot_use_the_store(state: Path, kind: str) -> None:
    says = make_trouble(state, kind)
    done = subprocess.run([*MAIN, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1 and not done.stdout


@pytest.fixture
def small_disk(state: Path) -> Iterator[Path]:
    """The state directory on a file system of its own, of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(state)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    yield state
    kill_supervisors(state)
    subprocess.run(["umount", "--lazy", str(state)], check=True, timeout=10)


def fill(state: Path) -> Path:
    """Fill that disk to the last block."""
    path = state / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return path
    raise AssertionError("the disk did not fill up")


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_disk_that_cannot_be_written_does_not_stop_a_launch(small_disk: Path, kind: str) -> None:
    if kind == "full":
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=10)
    agent = Agent(small_disk)
    until(lambda: agent.first(Welcome), agent.turn)
    welcome = agent.first(Welcome)
    assert isinstance(welcome, Welcome)
    runtime = places.supervisor_runtime_dir(small_disk)
    assert welcome.supervisor.store.startswith(f"{runtime}/rsup-fallback-"), welcome.supervisor.store
    agent.spool.append(Note(0, "info", "kept"))
    until(lambda: not len(agent.spool), agent.turn)
    assert "ERROR" in (runtime / "supervisor.log").read_text()
    os.kill(welcome.supervisor.pid, signal.SIGTERM)
    until(lambda: not running(welcome.supervisor.pid))
    agent.close()


def test_a_disk_that_fills_up_loses_nothing(small_disk: Path) -> None:
    agent = Agent(small_disk)
    until(lambda: agent.client.connected, agent.turn)
    filler = fill(small_disk)
    expected = [f"{i} " + "y" * 3000 for i in range(300)]
    for text in expected:
        agent.spool.append(Note(0, "info", text))
    until(lambda: "training goes on" in _log_text(small_disk), agent.turn)
    until(lambda: not agent.first(Refusal), agent.turn)
    assert agent.client.connected and len(agent.spool)
    filler.unlink()
    until(lambda: not len(agent.spool), agent.turn, within_s=30)
    assert notes(small_disk) == expected
    agent.close()


def _log_text(state: Path) -> str:
    return (state / "supervisor.log").read_text(errors="replace")


def test_a_port_in_use_is_refused_in_one_line(state: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        agent = Agent(state, JobSpec(owner="ann", max_nodes=2, min_nodes=2, listen=f"127.0.0.1:{port}"))
        until(lambda: agent.first(Refusal), agent.turn)
        refusal = agent.first(Refusal)
        agent.close()
    assert isinstance(refusal, Refusal)
    assert refusal.message == f"port {port} of 127.0.0.1 is in use; choose another --rdzv-endpoint"


def test_two_nodes_meet_at_the_first_ones_endpoint(state: Path, own_directories: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    spec = JobSpec(owner="ann", min_nodes=2, max_nodes=2, rdzv_id="r1")
    other = AgentInfo("other", "node1", "127.0.0.1", os.getpid(), "b", 1)
    second = SupervisorClient(f"tcp://{endpoint}", other, replace_spec(spec, owner="somebody-else"), Spool(None))
    first = Agent(state, replace_spec(spec, listen=endpoint))
    joined: list[ToAgent] = []
    until(lambda: any(isinstance(m, Welcome) for m in joined) and first.first(Welcome), lambda: _both(first, second, joined))
    jobs = {message.job_id for message in [*joined, *first.messages] if isinstance(message, Welcome)}
    assert len(jobs) == 1
    pid = served(state).pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not second.connected and not first.client.connected, lambda: _both(first, second, joined))
    until(lambda: second.connected and first.client.connected, lambda: _both(first, second, joined))
    first.close()
    second.close()


def replace_spec(spec: JobSpec, **changes: object) -> JobSpec:
    import msgspec

    return msgspec.structs.replace(spec, **changes)


def _both(first: Agent, second: SupervisorClient, joined: list[ToAgent]) -> None:
    first.turn()
    joined.extend(second.poll())


# ---------------------------------------------------------------------------------------------------------- rsup serve


def test_serve_answers_agents_over_tcp_with_a_key_and_people_over_rest(state: Path, own_directories: Path) -> None:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(own_directories / "notify"))
    notify.settimeout(20)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"NOTIFY_SOCKET": str(own_directories / "notify"), "RSUP_IDLE_EXIT": "0"}
    command = [*MAIN, "--listen", "127.0.0.1:0", "--rpc-listen", endpoint]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert notify.recv(100) == b"READY=1"
            found = served(state)
            assert found.pid == process.pid and not found.embedded and found.rpc_tcp == f"tcp://{endpoint}"
            assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600
            secret = places.find_secret(state)
            assert secret is not None
            info = AgentInfo("far", "node1", "127.0.0.1", 1)
            client = SupervisorClient(found.rpc_tcp, info, JobSpec(owner="ann"), Spool(None), places.link_key(secret))
            until(lambda: client.connected, client.poll)
            client.close()
            with urllib.request.urlopen(f"{found.rest}/healthz", timeout=20) as answer:
                assert answer.status == 200
            token = (state / "token").read_text().strip()
            assert stat.S_IMODE((state / "token").stat().st_mode) == 0o600
            request = urllib.request.Request(f"{found.rest}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert len(json.load(answer)["items"]) == 1
            again = subprocess.run([*MAIN, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=30)
            assert again.returncode == 1 and f"pid {process.pid}" in again.stderr
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert notify.recv(100) == b"STOPPING=1"
    notify.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nonsense"], "--nonsense"),
        (["--listen", "here"], "--listen: 'here' is no host:port"),
        (["--idle-exit", "soon"], "'soon' is no number of seconds"),
        (["--rpc", "http://x"], "no ipc:// or tcp:// address"),
        (["--rpc", "tcp://127.0.0.1:0", "--key-file", "/nonexistent/key"], "cannot read the key file"),
        (["--config", "/nonexistent/rsup.toml"], "there is no settings file"),
    ],
)
def test_wrong_use_is_one_line(state: Path, arguments: list[str], says: str) -> None:
    done = subprocess.run([*MAIN, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode in (1, 2)
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1


HOLDER = """
import sys
from pathlib import Path
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.sql_store import SqlStore
store = SqlStore.open(Path(sys.argv[1]), holder=LeaseHolder.this_process("holder"), alone_may_migrate=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_store_that_another_process_holds_refuses_new_jobs_but_not_running_ones(state: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(state / "rsup.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        new = Agent(state)
        runs = Agent(state)
        runs.client.send_report(3, 0, attempt=2)
        until(
            lambda: new.first(Refusal), lambda: (new.client.send_report(0, 0, attempt=0), _poll(new), _poll(runs)), within_s=30
        )
        refusal = new.first(Refusal)
        assert isinstance(refusal, Refusal) and f"pid {holder.pid}" in refusal.message
        assert not runs.messages
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(10)
    until(lambda: runs.first(Welcome), runs.turn, within_s=30)
    new.close()
    runs.close()


def _poll(agent: Agent) -> None:
    agent.messages.extend(agent.client.poll())


def test_on_a_network_file_system_other_hosts_get_an_address_and_a_key(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSUP_ASSUME_NETWORK_FS", "1")
    monkeypatch.setenv("RSUP_LOCAL_DIR", str(state.parent / "local"))
    agent = Agent(state)
    until(lambda: agent.client.connected, agent.turn, within_s=40)
    found = served(state)
    assert found.rpc_tcp.startswith(f"tcp://{places.this_host()}:")
    secret = places.find_secret(state)
    assert secret is not None
    port = places.split_endpoint(found.rpc_tcp.removeprefix("tcp://"))[1]
    far = AgentInfo("far", "node1", "127.0.0.1", 1)
    client = SupervisorClient(f"tcp://127.0.0.1:{port}", far, JobSpec(owner="ann"), Spool(None), places.link_key(secret))
    until(lambda: client.connected, client.poll)
    client.close()
    agent.close()
