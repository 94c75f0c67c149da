"""Which boards SLURM may mean by a number: gres.conf, slurm.conf, and what the gate makes of it."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rsup.launcher.slurm.gate_decision import ACCEPT, REFUSED, UNDECIDED, Limits, Question, decide
from rsup.launcher.slurm.gres_order import Gres, gres_of, numbers, read_gres
from rsup.launcher.slurm.node_inventory import merged, read_boards
from rsup.launcher.slurm.snapshot_file import REFUSE, Listed, Snapshot

CONF = "NodeName=DEFAULT Gres=gpu:2\nNodeName=n[0-1] CPUs=8 Gres=gpu:a100:4(S:0-1),nic:1\nNodeName=n2 CPUs=8\n"


def board(minor: int, bus: int | None = None, model: str = "A") -> dict[str, object]:
    bus_id = f"00000000:{(minor if bus is None else bus) + 1:02x}:00.0"
    return {"index": minor, "uuid": f"u{minor}", "pci_bus_id": bus_id, "model": model}


FOUR = [board(minor) for minor in range(4)]


@pytest.mark.parametrize(
    ("text", "files", "problem"),
    [
        ("NodeName=n[0-1] Name=gpu File=/dev/nvidia[0,2-3]", [("", 0), ("", 2), ("", 3)], ""),
        ("name=gpu type=B file=/dev/nvidia1\nName=gpu Type=A File=/dev/nvidia0", [("b", 1), ("a", 0)], ""),
        ("NodeName=n[5-9] Name=gpu File=/dev/nvidia3\nName=nic File=/dev/nvidia9", [], ""),
        ("AutoDetect=off\nName=gpu File=/x/nvidia0", [("", 0)], ""),
        ("AutoDetect=nvml\nName=gpu File=/dev/nvidia0", [], ""),
        ("Name=gpu Count=4", [], ""),
        ("Name=gpu File=/dev/nvidia-caps/cap1", [], "otherwise than by /dev/nvidiaN"),
        ("Name=gpu MultipleFiles=/dev/nvidia0,/dev/x", [], "otherwise than by /dev/nvidiaN"),
    ],
)
def test_what_gres_conf_says_of_a_node(text: str, files: list[tuple[str, int]], problem: str) -> None:
    found = gres_of(CONF, text, "n1")
    assert (found.files, found.count) == (tuple(files), 4) and problem in found.problem and bool(problem) == bool(found.problem)


def test_how_many_gpus_slurm_conf_gives_a_node() -> None:
    assert [gres_of(CONF, "", name).count for name in ("n0", "n2", "n7")] == [4, 2, None]


@pytest.mark.parametrize(
    ("devices", "gres", "expected"),
    [
        (FOUR, Gres((("", 0), ("", 1), ("", 2), ("", 3))), {"u0": "0", "u1": "1", "u2": "2", "u3": "3"}),
        # One is left out: 1 is surely nvidia2, 2 may be nvidia3 by its place, or nvidia2 by its number.
        (FOUR, Gres((("", 0), ("", 2), ("", 3))), {"u0": "0", "u2": "12", "u3": "23"}),
        # slurmd sorts by rules of its own.
        (FOUR[:2], Gres((("b", 0), ("a", 1))), {"u0": "01", "u1": "01"}),
        # A board that does not answer is meant by its numbers all the same.
        (FOUR[:3], Gres((("", 0), ("", 2), ("", 3))), {"u0": "0", "u2": "12", "/dev/nvidia3": "23"}),
        (FOUR[:2], Gres((("", 1), ("", 0))), {"u0": "01", "u1": "01"}),
        (FOUR[:2], Gres((("a", 0), ("b", 1), ("c", 2), ("d", 3))), "4 types"),
        # slurmd finds them by itself.
        (FOUR, Gres(count=4), {"u0": "0", "u1": "1", "u2": "2", "u3": "3"}),
        (FOUR, Gres(count=3), "gives this node 3 GPUs"),
        (FOUR[:3], Gres(count=4), "gives this node 4 GPUs"),
        (FOUR, Gres(), "does not say how many"),
        ([board(0, 1), board(1, 0)], Gres(count=2), "order of their PCI addresses"),
        ([board(0), board(1) | {"pci_bus_id": ""}], Gres(count=2), "order of their PCI addresses"),
        ([board(0), board(1, model="B")], Gres(count=2), "several models"),
        (FOUR, Gres(problem="no slurm.conf"), "no slurm.conf"),
        (FOUR, Gres(count=0), {}),
        ([], Gres(problem="no slurm.conf"), {}),
    ],
)
def test_the_numbers_of_boards(devices: list[dict[str, object]], gres: Gres, expected: Mapping[str, str] | str) -> None:
    found = numbers(devices, gres)
    if isinstance(expected, str):
        assert isinstance(found, str) and expected in found
    else:
        assert isinstance(found, dict) and {uuid: "".join(given) for uuid, given in found.items()} == dict(expected)


def test_the_files_are_read_with_what_they_include(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    assert read_gres({}, "n1", ()).problem.startswith("no slurm.conf was found")
    assert read_gres({"SLURM_CONF": str(conf)}, "n1").count is None
    conf.write_text("include nodes.conf  # below\n")
    (tmp_path / "nodes.conf").write_text("NodeName=n1 CPUs=8 \\\n  Gres=gpu:2\n")
    (tmp_path / "gres.conf").write_text("Name=gpu File=/dev/nvidia0 # File=/dev/nvidia5\n")
    assert read_gres({}, "n1", (str(conf),)) == Gres((("", 0),), 2)
    conf.unlink()
    conf.mkdir()
    assert read_gres({"SLURM_CONF": str(conf)}, "n1").problem.startswith("cannot read")


def test_a_board_without_a_name_has_one_when_it_answers() -> None:
    gres = Gres((("", 0), ("", 2), ("", 3)))
    first = merged(None, "boot", FOUR[:3], lambda devices: numbers(devices, gres))
    assert first["boards"] == {"0": ["u0"], "1": ["u2"], "2": ["u2", "/dev/nvidia3"], "3": ["/dev/nvidia3"]}
    second = merged(first, "boot", FOUR, lambda devices: numbers(devices, gres))
    assert second["boards"] == {"0": ["u0"], "1": ["u2"], "2": ["u2", "u3"], "3": ["u3"]}
    assert merged(second, "boot", FOUR[:3], lambda devices: numbers(devices, gres))["boards"] == second["boards"]


def test_the_gate_refuses_a_number_only_for_the_board_that_it_surely_is(tmp_path: Path) -> None:
    """gres.conf leaves nvidia1 out, or nobody knows: what the number says by itself is the wrong board."""
    path = tmp_path / "inventory.json"
    answers = {}
    for name, gres in (("left out", Gres((("", 0), ("", 2), ("", 3)))), ("unknown", Gres(problem="no slurm.conf"))):
        path.write_text(json.dumps(merged(None, "boot", FOUR, lambda devices, gres=gres: numbers(devices, gres))))
        boards = read_boards(path, "boot")
        for bad in ("u1", "u2", "u3"):
            devices = {bad: Listed(REFUSE, "Q-1", "bad", "quarantined", node="n1")}
            snapshot = Snapshot("c", 7, 0, 40, 2, False, {}, devices)
            for asked in ("1", "2", "3", "all"):
                indexes = () if asked == "all" else (asked,)
                question = Question("n1", "c", indexes, has_all=asked == "all")
                answer = decide(question, snapshot, boards, Limits(0, 60, 3), datetime(2026, 11, 30, tzinfo=UTC))
                answers[name, bad, asked] = answer.verdict
    left_out = {key[1:]: verdict for key, verdict in answers.items() if key[0] == "left out"}
    assert left_out["u1", "1"] == ACCEPT and left_out["u2", "1"] == REFUSED and left_out["u3", "1"] == ACCEPT
    assert left_out["u3", "2"] == left_out["u2", "2"] == UNDECIDED and left_out["u3", "3"] == REFUSED
    unknown = {key[1:]: verdict for key, verdict in answers.items() if key[0] == "unknown"}
    assert {verdict for (_, asked), verdict in unknown.items() if asked != "all"} == {UNDECIDED}
    assert {verdict for (_, asked), verdict in unknown.items() if asked == "all"} == {REFUSED}
