"""`rsup serve`, and supervisors that other nodes reach: addresses, keys, wrong use."""

import json
import os
import signal
import socket
import stat
import subprocess
import urllib.request
from pathlib import Path

import pytest
import zmq

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.supervisor import places
from rsup.supervisor.rest_thread import RestThread
from rsup.supervisor.sources import Sources
from rsup.supervisor.wire import AgentInfo, JobSpec, Refusal, ToAgent, Welcome
from tests.jobs.conftest import free_port
from tests.process.supervised_agent import MAIN, Agent, served, until

# ---------------------------------------------------------------------------------------------------------- rsup serve


def test_serve_answers_agents_over_tcp_with_a_key_and_people_over_rest(state: Path, own_directories: Path) -> None:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(own_directories / "notify"))
    notify.settimeout(60)
    endpoint = f"127.0.0.1:{free_port()}"
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
            with urllib.request.urlopen(f"{found.rest}/healthz", timeout=60) as answer:
                assert answer.status == 200
            token = (state / "token").read_text().strip()
            assert stat.S_IMODE((state / "token").stat().st_mode) == 0o600
            request = urllib.request.Request(f"{found.rest}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert len(json.load(answer)["items"]) == 1
            request = urllib.request.Request(f"{found.rest}/metrics", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
            assert float(metrics["rsup_store_commits_total"]) >= 1
            assert 0 < float(metrics["rsup_store_commit_seconds"]) <= float(metrics["rsup_store_commit_seconds_max"])
            again = subprocess.run([*MAIN, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=90)
            assert again.returncode == 1 and f"pid {process.pid}" in again.stderr
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert notify.recv(100) == b"STOPPING=1"
    notify.close()


def test_one_that_stood_still_while_a_launch_went_on_without_it_keeps_no_job_of_it(
    state: Path, own_directories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([*MAIN, "--listen", "127.0.0.1:0", "--rpc-listen", f"127.0.0.1:{free_port()}"]) as process:
        try:
            until(lambda: (state / "supervisor.json").exists() and bool(served(state).rpc_tcp))
            found, secret = served(state), places.find_secret(state)
            assert secret is not None
            key = places.link_key(secret)
            agents = [
                SupervisorClient(
                    found.rpc_tcp, AgentInfo(name, name, "127.0.0.1", 1), JobSpec(owner="ann", job_id=name), Spool(None), key
                )
                for name in ("gone", "stays")
            ]
            leaves, stays = agents
            monkeypatch.setattr(leaves._credentials, "take", lambda address, keyed: None)
            monkeypatch.setattr(stays._credentials, "take", lambda address, keyed: None)
            for one in agents:
                until(lambda one=one: int(one._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT, one.poll)  # type: ignore[misc]
            os.kill(process.pid, signal.SIGSTOP)
            monkeypatch.setattr(leaves._credentials, "take", lambda address, keyed: "")
            until(lambda: leaves._num_hellos > 0, leaves.poll)
            leaves.leave_for(f"ipc://{own_directories}/other")
            os.kill(process.pid, signal.SIGCONT)
            monkeypatch.setattr(stays._credentials, "take", lambda address, keyed: "")
            until(lambda: stays.connected, stays.poll)
            sources = Sources(state, "", note=lambda text: None)
            until(lambda: {job["id"]: job["outcome"] for job in sources.jobs(9, "", "")} in KEEPS_NOTHING_OF_GONE, stays.poll)
            for one in agents:
                one.close()
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


KEEPS_NOTHING_OF_GONE: list[dict[str, str | None]] = [{"stays": None}, {"stays": None, "gone": "given up"}]


def test_serve_does_not_start_on_a_store_that_has_moved_away(state: Path) -> None:
    state.mkdir(mode=0o700, exist_ok=True)
    (state / "database-url").write_text("postgresql://rsup:hunter2@db/rsup\n")
    done = subprocess.run([*MAIN, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=90)
    assert done.returncode and f"the store of {state} is at postgresql+psycopg://rsup:***@db/rsup: start" in done.stderr
    assert "hunter2" not in done.stderr and len(done.stderr.splitlines()) == 1 and not (state / "rsup.db").exists()


def test_an_address_that_stands_for_all_of_ours_is_named_by_the_host_to_others() -> None:
    page = RestThread("0.0.0.0:0", lambda _: lambda: None)
    assert page.public_address == page.address.replace("0.0.0.0", places.this_host())
    page.stop()


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
    done = subprocess.run([*MAIN, *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode in (1, 2)
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_on_a_network_file_system_other_hosts_get_an_address_and_a_key(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSUP_ASSUME_NETWORK_FS", "1")
    monkeypatch.setenv("RSUP_LOCAL_DIR", str(state.parent / "local"))
    agent = Agent(state)
    until(lambda: agent.client.connected, agent.turn, within_s=60)
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
    endpoint = f"127.0.0.1:{free_port()}"
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
    lost: set[SupervisorClient] = set()  # not at one moment: the first may have started the next one by then

    def note_lost() -> bool:
        lost.update(link for link in (first.client, second) if not link.connected)
        return len(lost) == 2

    until(note_lost, lambda: _both(first, second, joined))
    until(lambda: second.connected and first.client.connected, lambda: _both(first, second, joined))
    first.close()
    second.close()


def replace_spec(spec: JobSpec, **changes: object) -> JobSpec:
    import msgspec

    return msgspec.structs.replace(spec, **changes)


def _both(first: Agent, second: SupervisorClient, joined: list[ToAgent]) -> None:
    first.turn()
    joined.extend(second.poll())
