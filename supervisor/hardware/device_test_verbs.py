"""`rsup devices test` and `rsup nodes test`: the active test, whose results become evidence about devices and nodes.

A node is tested on the node itself: all its devices are, and its own result is the worst of theirs. A device that could not be
tested, or that the store knows there and the driver does not show, is named, and the node has not passed.
"""

import sys
from collections.abc import Sequence
from typing import Any

from rsup.supervisor import places
from rsup.supervisor.device_test_cli import MAX_REASON_CHARS
from rsup.supervisor.device_test_cli import main as run_test
from rsup.supervisor.hardware.client import Hardware
from rsup.supervisor.wire import RsupError, UsageError

STAND_IN = "CPU-"
GONE = ("retired", "in_repair")
"""States of devices that need not be there."""
VALUED = (
    *("--state-dir", "--supervisor", "--reason", "--duration", "--replay", "--replay-command", "--device-inventory", "--fault"),
    "--size",
)
"""Options of the test that take the next word."""
_WORST = {"failed": 2, "skipped": 1, "passed": 0}
_CODES = {"passed": 0, "failed": 1, "skipped": 75}

Json = dict[str, Any]


def test_devices(words: Sequence[str]) -> int:
    """Run `rsup devices test WORDS`; return the exit code. Raise `RsupError`."""
    hardware = _hardware(words)
    return run_test(words, lambda report, sentence: _keep_device(hardware, report, sentence))


def test_node(words: Sequence[str]) -> int:
    """Run `rsup nodes test [NODE] OPTIONS`; return the exit code. Raise `RsupError`."""
    here, left = places.this_node(), list(words)
    if (place := _place_of_name(left)) is not None:
        named = left.pop(place)
        if named != here:
            raise UsageError(f"{named[:100]}: a node is tested on the node itself, and this is {here}: run it there")
    if any(word in ("-h", "--help") for word in left):
        print("rsup nodes test [NODE]: test all devices of this node, and keep the worst result for the node as well.\n")
        return run_test(left)
    hardware, found = _hardware(left), list[Json]()
    code = run_test([*left, "--all"], lambda report, text: _keep_device(hardware, report, text), found.extend)
    if code not in _CODES.values():
        return code
    result, sentence = _of_node(found, _unseen(hardware, here, {report["uuid"] for report in found}))
    print(f"rsup nodes test: {here}: {result}: {sentence}", file=sys.stderr)
    if any(report["injected"] for report in found) and "--accept-injected" not in left:
        print(f"rsup nodes test: {here}: no evidence, since a fault was injected", file=sys.stderr)
    else:
        try:
            kept = hardware.change("node", here, "tested", sentence[:MAX_REASON_CHARS], result=result)
            print(f"rsup nodes test: {kept['message']}", file=sys.stderr)
        except RsupError as error:
            print(f"rsup nodes test: {here}: not kept as evidence: {error}", file=sys.stderr)
    return _CODES[result]


def _place_of_name(words: Sequence[str]) -> int | None:
    """Where the node's name is among options and their values."""
    after = ""
    for place, word in enumerate(words):
        if not word.startswith("-") and after not in VALUED:
            return place
        after = word
    return None


def _of_node(reports: Sequence[Json], unseen: Sequence[str]) -> tuple[str, str]:
    """The node's result, and a sentence that names the devices which have not passed."""
    worst = max((report["outcome"] for report in reports), key=lambda outcome: _WORST[outcome], default="skipped")
    result = "skipped" if unseen and worst == "passed" else worst
    bad = sorted((one for one in reports if one["outcome"] != "passed"), key=lambda one: -_WORST[one["outcome"]])
    passed = len(reports) - len(bad)
    words = [f"{passed} of {len(reports) + len(unseen)} devices passed"]
    words += [f"{one['uuid']} {one['outcome']}: {one['reason']}" for one in bad]
    words += [f"{uuid} was not tested: it is known to be in this node, and is not seen here" for uuid in unseen]
    return result, "; ".join(words)


def _unseen(hardware: Hardware, node: str, seen: set[str]) -> list[str]:
    """Boards that the store knows in this node and that were not among the devices found. What cannot be asked names none."""
    try:
        known = hardware.devices(node=node)
    except RsupError:
        return []
    return [
        device["uuid"]
        for device in known
        if device["uuid"] not in seen and not device["uuid"].startswith(STAND_IN) and device.get("state") not in GONE
    ]


def _keep_device(hardware: Hardware, report: Json, sentence: str) -> str:
    done = hardware.change("device", report["uuid"], "tested", sentence, result=report["outcome"])
    return str(done["message"])


def _hardware(words: Sequence[str]) -> Hardware:
    return Hardware(_value_of(words, "--state-dir") or None, _value_of(words, "--supervisor"))


def _value_of(words: Sequence[str], option: str) -> str:
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
