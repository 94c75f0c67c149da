"""The failing step of a whole job, repeated long after it by `rsup devices test --replay`, on CPU stand-ins of an inventory."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.jobs.conftest import RSUP, Place

TRAIN = ("-m", "rsup.worker.reference.train", "--iterations", "6", "--save-interval", "3", "--log-interval", "3")
SMALL = ("--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--eval-iters", "0", "--global-batch-size", "8")


@pytest.mark.timeout(300)
def test_the_failing_step_comes_again_on_the_faulty_device_alone(place: Place, own_directories: Path) -> None:
    """Verdict by rotation in iteration 2, before the first checkpoint: its step is kept, with the other device's healthy value.
    The faulty device fails at it, healthy ones pass; nobody needs to know the job's options. `rsup nodes test` does it on every
    device of the node."""
    own = own_directories.name[3:]
    bad, good, spare = (f"GPU-{own}{letter}" for letter in "bac")
    inventory = own_directories / "devices.json"
    like = {"model": "H200", "vbios": "1", "driver": "1"}
    inventory.write_text(json.dumps([{"uuid": uuid, "serial": f"S{uuid}", **like} for uuid in (good, bad, spare)]))
    fault = f"device={bad},kind=bitflip,site=grad,bit=30"
    place.launch(
        *("--max-restarts", "3", "--nproc-per-node", "2", "--device-inventory", str(inventory), "--job-id", "lies"),
        *(*TRAIN, *SMALL, "--save", str(place.folder / "lies"), "--fault", f"{fault},from=2"),
    ).ends(0)
    (case,) = json.loads(place.rsup("cases", "list", "lies", "--json"))
    assert (case["verdict"], case["accused"]) == ("persistent", [bad])
    assert Path(case["checkpoint"]).parent == place.folder / "lies" / "rerun-steps"

    test = ["test", "--replay", case["case_id"], "--device-inventory", str(inventory), "--duration", "0", "--json"]
    both = subprocess.run([*RSUP, "devices", *test, bad, spare, "--fault", fault], capture_output=True, text=True, timeout=110)
    assert both.returncode == 1, both.stderr
    failed, passed = json.loads(both.stdout)
    replay = failed["tests"][-1]
    assert (replay["name"], replay["outcome"]) == (f"replay of {case['case_id']}, rank 1", "failed")
    assert f"reference ({good})" in replay["reason"] and "overflows float32" in replay["reason"] and failed["injected"]
    assert [one["outcome"] for one in failed["tests"][:-1]] == ["passed"] * 11, "the screen alone does not see it"
    assert (passed["outcome"], passed["injected"]) == ("passed", False)
    assert passed["tests"][-1]["compared_with"] == ["itself", f"reference ({good})"]
    assert "no evidence, since a fault was injected" in both.stderr

    node = subprocess.run([*RSUP, "nodes", *test], capture_output=True, text=True, timeout=110)
    assert node.returncode == 0, node.stderr
    assert [one["tests"][-1]["outcome"] for one in json.loads(node.stdout)] == ["passed"] * 3
    assert "passed: 3 of 3 devices passed" in node.stderr and "the test is kept (passed)" in node.stderr
    other = subprocess.run([*RSUP, "nodes", "test", "elsewhere"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2 and "a node is tested on the node itself" in other.stderr
