"""What is known of devices reaches the next launch: left out where others suffice, used with a line where they do not."""

import json
from typing import Any

from tests.jobs.conftest import Place, wait_until

SEAT = """
import os, time
out, rank = os.environ["OUT"], os.environ["RANK"]
with open(f"{out}/device-{os.environ['RSUP_JOB_ID']}-{os.environ['RSUP_ATTEMPT']}-{rank}", "w") as file:
    file.write(os.environ["RSUP_DEVICE_UUID"])
while os.environ["RSUP_JOB_ID"] == "slow" and os.environ["RSUP_ATTEMPT"] == "1":
    time.sleep(0.02)
    if os.path.exists(out + "/go"):
        raise SystemExit(int(rank == "1"))
"""


def inventory(place: Place) -> str:
    path = place.folder / "inventory.json"
    path.write_text(json.dumps([{"uuid": f"GPU-{i}", "serial": f"S-{i}", "pci_bus_id": f"0:1{i}:0"} for i in "abc"]))
    return str(path)


def seats(place: Place, job: str, attempt: int = 1) -> list[str]:
    return [path.read_text() for path in sorted(place.folder.glob(f"device-{job}-{attempt}-*"))]


def states(place: Place) -> dict[str, Any]:
    return {one["uuid"]: one["state"] for one in json.loads(place.rsup("devices", "list", "--json"))}


def test_the_next_launch_goes_by_what_is_known(place: Place) -> None:
    """A quarantined device is left out, a launch that must use it says so, an operator's word meanwhile waits for the next
    attempt, and a malformed policy starts nothing."""
    path, script = inventory(place), place.script(SEAT)
    options = ("--device-inventory", path, "--nproc-per-node")
    slow = place.launch("--job-id", "slow", "--max-restarts", "1", *options, "2", script)
    wait_until(lambda: seats(place, "slow") == ["GPU-a", "GPU-b"], "both ranks run")
    wait_until(lambda: place.status("slow").get("job", {}).get("state") == "running", "the supervisor to hear of it")
    place.rsup("devices", "quarantine", "GPU-b", "--reason", "noise")
    assert slow.process.poll() is None and place.status("slow")["job"]["state"] == "running"
    (place.folder / "go").touch()
    slow.ends(0)
    assert seats(place, "slow", 2) == ["GPU-a", "GPU-c"]
    assert "GPU-c is used in place of GPU-b: quarantined" in slow.stderr

    must = place.launch("--job-id", "must", *options, "3", script).ends(0)
    assert seats(place, "must") == ["GPU-a", "GPU-b", "GPU-c"]
    assert [line for line in must.stderr.splitlines() if "GPU-b stays in use, no other device is free: quarantined" in line]

    assert states(place) == {"GPU-a": "clear", "GPU-b": "quarantined", "GPU-c": "clear"}
    story = place.rsup("events", "slow")
    assert "known of" in story and "GPU-b is quarantined" in story
    assert "quarantined" in place.rsup("devices", "why", "S-b")

    bad = place.folder / "bad.toml"
    bad.write_text('[rules.persistent]\nfirst = "forgiven"\n')
    refused = place.launch("--device-policy", str(bad), "--nproc-per-node", "1", script).ends(2)
    (line,) = refused.stderr.splitlines()
    assert str(bad) in line and "rules.persistent.first" in line
