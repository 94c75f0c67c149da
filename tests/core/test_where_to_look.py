"""The line at the start of a job: what is told of its size, and the command that shows it from here."""

import os
from pathlib import Path

import pytest

from rsup.launcher.agent_parts import where_to_look
from rsup.launcher.launch_options import LaunchOptions
from rsup.supervisor import places, wire

HERE = places.this_host()


def line(state: Path, host: str = HERE, rest: str = "", store: str = "", embedded: bool = False, nodes: int = 1) -> str:
    info = wire.SupervisorInfo("i1", 1, host, embedded, rest, store)
    options = LaunchOptions("train.py", min_nodes=1, max_nodes=nodes, nproc_per_node=2, state_dir=state)
    return where_to_look(options, wire.Welcome((1, 3), "0", info, "j", 1, 0, 0), is_embedded=embedded)


def test_ones_own_supervisor_needs_no_address(tmp_path: Path) -> None:
    said = line(tmp_path, rest="http://127.0.0.1:5", embedded=True)
    assert said == "rsup: job j: 2 ranks; see rsup status j (--page: in a browser)"
    assert line(tmp_path, embedded=True, nodes=2) == "rsup: job j: 2 ranks on this node, of 1 to 2 nodes; see rsup status j"


@pytest.mark.parametrize(
    ("host", "rest", "where"),
    [
        (HERE, "http://127.0.0.1:5", " --supervisor http://127.0.0.1:5 (--page: in a browser)"),
        ("far", "http://0.0.0.0:5", " --supervisor http://far:5 (--page: in a browser)"),
        ("far", "http://far:5", " --supervisor http://far:5 (--page: in a browser)"),
        ("far", "http://127.0.0.1:5", " on far"),
        ("far", "", " on far"),
    ],
)
def test_another_supervisor_is_named(tmp_path: Path, host: str, rest: str, where: str) -> None:
    assert line(tmp_path, host, rest, "postgresql://db/rsup").endswith(f"see rsup status j{where}")


def test_a_state_directory_that_can_be_read_is_enough(tmp_path: Path) -> None:
    theirs = tmp_path / "of theirs"
    theirs.mkdir()
    (theirs / "token").write_text("x" * 32)
    store = str(theirs / "rsup.db")
    assert line(tmp_path, store=store).endswith(f"see rsup status j --state-dir '{theirs}'")
    assert line(theirs, store=store).endswith("see rsup status j"), "it is ours"


def test_a_supervisor_elsewhere_that_serves_our_state_directory_needs_no_address(tmp_path: Path) -> None:
    places.SupervisorFile(os.getpid(), 1, "far", "", "i1", "ipc:///x", "", True).write(tmp_path)
    assert line(tmp_path, "far").endswith("see rsup status j")
