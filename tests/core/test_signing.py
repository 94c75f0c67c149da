"""The key that signs snapshots, and what a snapshot's line says; nodes read it with code of their own."""

import stat
from pathlib import Path

import pytest

from rsup.launcher.slurm.node_settings import NodeProblem
from rsup.launcher.slurm.snapshot_file import public_key_of, read_snapshot
from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.places import PlaceError, read_key_file
from rsup.supervisor.slurm.drain_plan import Plan
from rsup.supervisor.slurm.drain_terms import Ground
from rsup.supervisor.slurm.guard import Admission, admit, fleet_of
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.scheduler_text import NodeSeen
from rsup.supervisor.slurm.signing import BadSnapshot, load_key, verified
from rsup.supervisor.slurm.snapshot import REFRESH_US, Publisher, content_of, is_due, told_refused, verdict_of

NOW = 1_800_000_000_000_000


def test_the_key_is_made_once_and_never_replaced(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    path = tmp_path / "signing-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "signing-key.pub").read_text().strip() == key.public == load_key(tmp_path).public
    assert load_key(tmp_path, str(tmp_path / "other")).public != key.public
    with pytest.raises(NodeProblem, match="private signing key, which no node may have"):
        public_key_of(path.read_bytes())
    path.write_text(path.read_text().removeprefix("rsup-signing-key "))  # of before it was marked
    assert load_key(tmp_path).public == key.public
    path.chmod(0o640)
    with pytest.raises(PlaceError, match="can be read by others"):
        load_key(tmp_path)
    for content in ("", "c2hvcnQ=", "no key"):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(PlaceError, match="restore it, or remove it and tell the nodes"):
            load_key(tmp_path)
    with pytest.raises(PlaceError, match="set --signing-key-file"):
        load_key(tmp_path, str(tmp_path / "missing" / "key"))


def test_a_key_of_another_kind_is_no_secret_of_the_link(tmp_path: Path) -> None:
    load_key(tmp_path)
    (tmp_path / "key.pub").write_text("rsup-public-key " + "x" * 40)
    for name, said in (
        (
            "signing-key.pub",
            "looks like a key that signs snapshots .* name the supervisor's key.pub; if it is the secret after",
        ),
        ("signing-key", "holds the private key that signs snapshots; a launch takes the supervisor's key.pub"),
        ("key.pub", "holds a supervisor's public key, no secret"),
    ):
        with pytest.raises(PlaceError, match=said):
            read_key_file(tmp_path / name)


def test_only_what_the_key_has_signed_is_believed(tmp_path: Path) -> None:
    key, other = load_key(tmp_path), load_key(tmp_path, str(tmp_path / "other"))
    data = key.sign(b'{"schema":1}')
    assert verified(data, key.public) == b'{"schema":1}'
    head, _, body = data.partition(b"\n")
    wrong = {
        "signed by another key": (data, other.public),
        "signature is wrong": (head + b"\n" + body + b" ", key.public),
        "no snapshot of rsup": (b"x" + data, key.public),
        "damaged": (data, "???"),
    }
    for text, (signed, public) in wrong.items():
        with pytest.raises(BadSnapshot, match=text):
            verified(signed, public)


def test_nodes_that_are_out_of_service_anyway_make_no_gate_doubt_the_snapshot() -> None:
    grounds = [Ground("device", f"GPU-{node}", node, "quarantined", "x") for node in ("n1", "n2", "n3", "n4")]

    def told(num_eligible: int, away: set[str], kept_off: set[str] = frozenset()) -> tuple[list[str], int, int]:  # type: ignore[assignment]
        refused = {ground.node: number for number, ground in enumerate(grounds, 1)}
        admission = Admission(num_refused=4 - len(away), num_eligible=num_eligible, limit=2, away=frozenset(away))
        content = content_of("c", grounds, Plan(admission=admission, refused=refused, kept_off=frozenset(kept_off)))
        entries = content["devices"].values()
        names = [entry["node"] for entry in entries if entry["verdict"] == "refuse"]
        assert set(names) == told_refused(content)
        assert len(names) <= min(content["max_refused"], max(2, content["num_nodes"] // 2)), "or gates doubt it"
        return names, content["num_nodes"], content["max_refused"]

    assert told(40, {"n3", "n4"}) == (["n1", "n2", "n3", "n4"], 42, 4)
    assert told(4, {"n3", "n4"}) == (["n1", "n2"], 4, 2), "half of a cluster is never believed"
    # Beyond the guard, by somebody's word: gates would believe nothing at all.
    assert told(4, set(), {"n1", "n3", "n4"})[0] == ["n1", "n2"], "SLURM keeps jobs off the others anyway"
    assert told(4, {"n4"}, {"n1", "n3"})[0] == ["n1", "n2"] and told(6, set(), {"n2"})[0] == ["n1", "n3", "n4"]
    assert told(4, set())[0] == ["n1", "n2"], "without that the oldest"


def test_a_cluster_that_mostly_sleeps_is_no_small_one() -> None:
    nodes = {
        f"n{i}": NodeSeen(f"n{i}", "IDLE", frozenset({"POWERED_DOWN"} if i >= 8 else ()), has_gpus=True) for i in range(40)
    }
    nodes["login"] = NodeSeen("login", "IDLE")
    admitted = [f"n{i}" for i in range(5)]
    admission = admit([], fleet_of(nodes, admitted), [], Guard(), NOW)
    assert (admission.num_eligible, admission.num_shown, admission.max_refused) == (8, 40, 5), "the guard keeps its own count"
    grounds = [Ground("node", name, name, "quarantined", "x") for name in admitted]
    plan = Plan(admission=admission, refused={name: number for number, name in enumerate(admitted, 1)})
    content = content_of("c", grounds, plan)
    refused = [name for name, entry in content["nodes"].items() if entry["verdict"] == "refuse"]
    assert refused == admitted and (content["num_nodes"], content["max_refused"]) == (40, 5)
    assert len(refused) <= min(content["max_refused"], content["num_nodes"] // 2), "or every gate would void all of them"
    assert fleet_of({"a": NodeSeen("a", "IDLE"), "b": NodeSeen("b", "DOWN")}, []).num_shown == 2


def test_a_snapshot_says_what_the_plan_says(tmp_path: Path) -> None:
    grounds = [
        Ground("device", "GPU-a", "n1", "quarantined", "wrong 'results'", serial="S1"),
        Ground("node", "n2", "n2", "quarantined", "two devices", version=3),
        Ground("device", "GPU-c", "n3", "suspect", "1 of 2", refuses=False, until_us=NOW),
        Ground("device", "GPU-d", "n4", "quarantined", "Xid 79"),
    ]
    logs = {"n1": NodeLog(number=7), "n5": NodeLog(number=8, wanted="ann: fan"), "n4": NodeLog()}
    admission = Admission(held={"n2": "limit"}, num_refused=2, num_eligible=40, limit=2)
    plan = Plan(admission=admission, refused={"n1": 7, "n5": 8}, left_alone={"n4": "bob"}, logs=logs)
    content = content_of("c", grounds, plan)
    key = load_key(tmp_path)
    publisher = Publisher(key, tmp_path)
    first = publisher.publish(content, NOW)
    read = read_snapshot(first.data, public_key_of(key.public.encode()))
    assert (read.cluster, read.num_nodes, read.max_refused, read.guard_open) == ("c", 40, 2, True)
    assert {name: (one.verdict, one.id) for name, one in read.nodes.items()} == {
        "n2": ("avoid", "S-3"),
        "n5": ("refuse", "Q-8"),
    }
    found = {uuid: (one.verdict, one.node) for uuid, one in read.devices.items()}
    assert found == {"GPU-a": ("refuse", "n1"), "GPU-c": ("avoid", "n3"), "GPU-d": ("avoid", "n4")}
    assert read.devices["GPU-d"].reason == "let run by bob; Xid 79" and read.devices["GPU-a"].reason == "wrong results"
    assert read.refused_nodes == {"n1", "n5"}

    assert not is_due(first, content, NOW + 1) and is_due(first, content, NOW + REFRESH_US) and is_due(first, content, NOW - 1)
    assert is_due(first, {**content, "guard_open": False}, NOW + 1)
    assert publisher.publish(content, NOW - 10**12).serial == first.serial + 1, "clocks that step back"
    assert Publisher(key, tmp_path).publish(content, NOW - 10**12).serial == first.serial + 2, "and restarts"

    verdicts = {node: verdict_of(content, node)["verdict"] for node in ("n1", "n2", "n3", "n5", "n6")}
    assert verdicts == {"n1": "refuse", "n2": "avoid", "n3": "avoid", "n5": "refuse", "n6": "accept"}
    assert verdict_of(content, "n1", ["GPU-b"])["verdict"] == "accept"
