"""`rsup devices test` as people run it, on CPU stand-ins of an inventory file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # each test starts processes that import torch, one by one

TEST = [sys.executable, "-W", "ignore", "-m", "rsup.launcher", "devices", "test"]


@pytest.fixture
def own(own_directories: Path) -> str:
    """Part of the devices' names, so that no other job of this machine has such ones."""
    return own_directories.name[3:]


@pytest.fixture
def inventory(own_directories: Path, own: str) -> str:
    path = own_directories / "inventory.json"
    path.write_text(json.dumps({"devices": [{"uuid": f"GPU-{own}{i}", "serial": f"s{i}"} for i in "abc"]}))
    return str(path)


def screen(*words: str, **extra: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*TEST, *words], env=os.environ | extra, capture_output=True, text=True, timeout=280)


def reports(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_faulty_device_fails_and_what_no_bound_sees_the_record_does(inventory: str, own: str) -> None:
    """Two like devices pass and make the record; a steady flip of the last bit, which rounding could explain, is then found."""
    good = screen("sa", "sb", "--duration", "0", "--json", "--device-inventory", inventory)
    assert good.returncode == 0, good.stderr
    assert [(one["uuid"], one["outcome"], one["injected"]) for one in reports(good)] == [
        (f"GPU-{own}a", "passed", False),
        (f"GPU-{own}b", "passed", False),
    ]
    assert f"GPU-{own}b" in reports(good)[0]["tests"][0]["compared_with"] and reports(good)[0]["temperature_c"] is None
    folder = Path(os.environ["RSUP_STATE_DIR"]) / "device-tests"
    assert len(list(folder.glob(f"GPU-{own}a-*.json"))) == 1 and (folder / "known.json").exists()

    fault = f"kind=bitflip,device=GPU-{own}c,bit=0,steady=1"
    bad = screen("sc", "--duration", "0", "--fault", fault, RSUP_DEVICE_INVENTORY=inventory)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert f"screening GPU-{own}c, beside GPU-{own}a" in bad.stderr
    assert f"differs from GPU-{own}a, GPU-{own}b before, which agree with each other" in bad.stdout
    assert "no evidence, since a fault was injected" in bad.stderr
    known = json.loads((folder / "known.json").read_text())
    assert bad.stdout.splitlines()[-1].startswith("failed: 1 device in "), "the one beside it is no result"
    assert {uuid for tests in known.values() for test in tests.values() for uuid in test["devices"]} == {
        f"GPU-{own}{i}" for i in "ab"
    }


def test_a_device_in_use_is_left_alone(inventory: str, own: str) -> None:
    """Ranks of a live job carry the name of their stand-in."""
    rank = os.environ | {"RSUP_DEVICE_UUID": f"GPU-{own}b", "RSUP_JOB_ID": "train7"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=rank, stdin=subprocess.PIPE) as process:
        done = screen("sb", "--json", "--device-inventory", inventory)
        assert process.stdin is not None
        process.stdin.close()
    assert done.returncode == 75
    (found,) = reports(done)
    assert found["outcome"] == "skipped" and "job train7 uses it: wait for its end, or --force" in found["reason"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["GPU-not-of-this-node"], 2, "this node has no device that name"),
        (["sa", "--replay", "no-such-case"], 2, "no case 'no-such-case'"),
        (["sa", "--fault", "kind=what"], 2, "write kind=bitflip"),
        (["--state-dir"], 2, "--state-dir needs a value"),
        (["--help"], 0, "Exit codes: 0 passed, 1 failed, 75 could not decide"),
    ],
)
def test_wrong_usage_is_one_line_and_no_verdict(inventory: str, words: list[str], code: int, says: str) -> None:
    done = screen(*words, RSUP_DEVICE_INVENTORY=inventory)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert code == 0 or len(done.stderr.strip().splitlines()) == 1


def test_an_inventory_that_cannot_be_read(own_directories: Path) -> None:
    (own_directories / "bad").write_text("[{")
    done = screen("--all", "--device-inventory", str(own_directories / "bad"))
    assert done.returncode == 2 and "--device-inventory" in done.stderr
