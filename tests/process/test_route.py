"""Where an agent looks for its supervisor, and what it says when nobody answers there."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rsup.launcher import route as route_module
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.route import Route, choose_route, reachable_host, why_silent
from rsup.supervisor.wire import UsageError

NOBODYS = "192.0.2.1"  # RFC 5737: for documentation
UNKNOWN = "no-such-host.invalid"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def route(tmp: Path, **options: object) -> Iterator[Route]:
    chosen = choose_route(LaunchOptions("x.py", state_dir=tmp, max_nodes=2, min_nodes=2, **options))  # type: ignore[arg-type]
    yield chosen
    if chosen.claim:
        chosen.claim.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7", socket.gethostname()])
@pytest.mark.parametrize("node_rank", [-1, 0])
def test_one_agent_of_the_host_with_that_address_lets_its_supervisor_listen(
    tmp_path: Path, port: int, host: str, node_rank: int
) -> None:
    with route(tmp_path, rdzv_endpoint=f"{host}:{port}", node_rank=node_rank) as first:
        assert first.is_embedded and first.listen == f"{host}:{port}" and not first.note
        with route(tmp_path, rdzv_endpoint=f"{host}:{port}", node_rank=node_rank) as second:
            assert second.address == f"tcp://{host}:{port}"


def test_an_ipv6_endpoint(tmp_path: Path, port: int) -> None:
    with route(tmp_path, rdzv_endpoint=f"[::1]:{port}", node_rank=0) as first:
        assert first.listen == f"[::1]:{port}"


@pytest.mark.parametrize("host", [NOBODYS, UNKNOWN])
def test_node_rank_0_serves_an_endpoint_that_is_not_its_own_and_says_so(tmp_path: Path, port: int, host: str) -> None:
    with route(tmp_path, rdzv_endpoint=f"{host}:{port}", node_rank=0) as first:
        assert first.is_embedded and first.listen in (f"[::]:{port}", f"0.0.0.0:{port}")
        assert host in first.note and "--rdzv-endpoint" in first.note
        options = LaunchOptions("x.py", state_dir=tmp_path, max_nodes=2, rdzv_endpoint=f"{host}:{port}")
        assert reachable_host(options, first) not in ("::", "0.0.0.0", "")


@pytest.mark.parametrize("node_rank", [-1, 1])
def test_others_only_look_for_it_there(tmp_path: Path, port: int, node_rank: int) -> None:
    with route(tmp_path, rdzv_endpoint=f"{NOBODYS}:{port}", node_rank=node_rank) as found:
        assert found.address == f"tcp://{NOBODYS}:{port}" and not found.note
    with route(tmp_path, rdzv_endpoint=f"{UNKNOWN}:{port}", node_rank=node_rank) as found:
        assert found.address == f"tcp://{UNKNOWN}:{port}" and "has no address here" in found.note


def test_several_nodes_need_a_place_to_meet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        choose_route(LaunchOptions("x.py", state_dir=tmp_path, max_nodes=2))


def test_why_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # held, so that nobody else listens there meanwhile
        port = silent.getsockname()[1]
        assert "has no address here" in why_silent(UNKNOWN, port)
        assert "the first node of this step has not come so far" in why_silent("127.0.0.1", port, in_step=True)
        assert "nothing listens" in why_silent("127.0.0.1", port) and "--node-rank 0" in why_silent("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = why_silent("127.0.0.1", other.getsockname()[1])
    assert "something accepts connections there, but is no rsup supervisor, or one that hangs: process" in said
    monkeypatch.setattr(route_module, "_CONNECT_WITHIN_S", 30.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        said = why_silent("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"))
    assert "speaks ZeroMQ" in said and "--key-file" in said


def test_who_answers_in_another_way_is_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_module, "_CONNECT_WITHIN_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].close())
        thread.start()
        said = why_silent("127.0.0.1", other.getsockname()[1])
        thread.join()
    assert "is no rsup supervisor: process" in said
