"""The allow-list: what NVRx's clients send is understood, and nothing else is so much as looked up."""

import os
import pickle
import signal
import struct
from pathlib import Path

import pytest

from rsup.launcher import nvrx_pickle as nvrx
from rsup.launcher.nvrx_pickle import MAX_FRAME_BYTES, Refused, as_seconds, read_message
from tests.compat.nvrx_client import SectionAction, from_bytes, kind, message, to_bytes

DATA = nvrx.DATA_MODULE


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_messages_keep_what_was_sent(protocol: int) -> None:
    section = read_message(to_bytes(message("SectionMsg", rank="1", section="step", action=SectionAction.OPEN), protocol))
    assert isinstance(section, nvrx.SectionMsg)
    assert section.__dict__ == {"rank": "1", "section": "step", "action": nvrx.SectionAction.OPEN}
    timeouts = message("SectionTimeouts", section={"step": 1.5}, out_of_section=None, calculated_sections={"step"})
    update = read_message(to_bytes(message("UpdateConfigMsg", hb_timeouts=None, section_timeouts=timeouts), protocol))
    assert update.get("section_timeouts").get("section") == {"step": 1.5}
    assert update.get("section_timeouts").get("calculated_sections") == {"step"}


def test_an_enum_pickled_by_name_is_understood() -> None:
    by_name = b"\x80\x04cbuiltins\ngetattr\nc" + f"{DATA}\nSectionAction\n".encode() + b"\x8c\x05CLOSE\x86R."
    assert read_message(by_name) is nvrx.SectionAction.CLOSE


@pytest.mark.parametrize(
    "hostile",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04cbuiltins\neval\n\x8c\x011\x85R.",
        b"\x80\x04c" + f"{DATA}\n__loader__\n".encode() + b".",
        b"\x80\x04c" + f"{DATA}\nSectionMsg.__init__\n".encode() + b".",
        b"\x80\x04cbuiltins\ngetattr\nc" + f"{DATA}\nSectionMsg\n".encode() + b"\x8c\x09__class__\x86R.",
        b"\x80\x04cbuiltins\ngetattr\nc" + f"{DATA}\nSectionAction\n".encode() + b"\x8c\x09__class__\x86R.",
        b"\x80\x04\x8c\x03pid\x85Q.",
        b"\x82\x01.",
        b"",
        b".",
        b"\x80\x04N",
        b"\x80\x04}" + b"(" * 50_000,
        b"\xff" * 100,
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    ],
)
def test_everything_else_is_refused_in_one_line(hostile: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_message(hostile)
    assert str(refused.value) and "\n" not in str(refused.value)


def test_nothing_of_a_refused_pickle_is_done(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for where in (Trap(trap), [1, Trap(trap)], message("HeartbeatMsg", rank=0, state={"x": Trap(trap)})):
        with pytest.raises(Refused, match="mkdir"):
            read_message(to_bytes(where))
    assert not trap.exists()


def test_a_message_cannot_change_our_classes() -> None:
    set_class_attribute = b"\x80\x04c" + f"{DATA}\nSectionMsg\n".encode() + b"N}\x8c\x03getNs\x86b."
    with pytest.raises(Refused):
        read_message(set_class_attribute)
    make = b"\x80\x04c" + f"{DATA}\nSectionAction\n".encode() + b"N}\x8c\x03oneNs\x86b."
    with pytest.raises(Refused):
        read_message(make)
    assert read_message(to_bytes(message("SectionMsg", rank=1))).get("rank") == 1


def test_a_frame_is_bounded() -> None:
    with pytest.raises(Refused, match="more than the"):
        read_message(pickle.dumps("x" * MAX_FRAME_BYTES))


def test_replies_are_what_clients_unpickle() -> None:
    config = {"rank_section_timeouts": {"step": 2.5, "setup": None}, "safety_factor": 5.0, "skip_section_response": True}
    reply = from_bytes(nvrx.config_reply(config | {"rank_termination_signal": signal.SIGKILL, "log_level": 20})[4:])
    assert kind(reply) == "OkMsg" and type(reply.cfg).__name__ == "FaultToleranceConfig"
    assert reply.cfg.rank_section_timeouts == {"step": 2.5, "setup": None} and reply.cfg.skip_section_response is True
    assert reply.cfg.rank_termination_signal is signal.SIGKILL
    assert kind(from_bytes(nvrx.ok_reply()[4:])) == "OkMsg"
    assert from_bytes(nvrx.error_reply("nö")[4:]).cause == "nö"
    assert from_bytes(nvrx.launcher_reply()[4:]) == b"ok"
    assert int.from_bytes(nvrx.ok_reply()[:4], "big") == len(nvrx.ok_reply()) - 4


def test_limits_of_clients() -> None:
    assert [as_seconds(value) for value in (None, 3, 2.5, float("inf"), 0.0)] == [None, 3.0, 2.5, None, None]
    for bad in (True, -1.0, float("nan"), "3", [1]):
        with pytest.raises(Refused):
            as_seconds(bad)
