"""NVRx's messages as bytes: a 4-byte big-endian length, then a pickle. Needs neither NVRx nor torch.

What comes is unpickled with an allow-list: a name of NVRx's own messages gives a `Record` of ours, which has the attributes
that were sent and no behaviour; every other name is refused before anything of it is looked up. Nothing is ever imported
because a pickle says so. What goes out is written opcode by opcode, since pickle itself would have to import NVRx's classes.

Sources: NVRx 0.4.1 to 0.7 (`fault_tolerance/data.py`), read for behaviour; PEP 307 and PEP 3154 for the opcodes.
"""

import io
import math
import pickle
import signal
from collections.abc import Mapping
from enum import Enum
from typing import Any

MAX_FRAME_BYTES = 256 * 1024
"""Messages seen have 100 to 300 bytes; one with limits for a thousand sections has 40 KB."""
LENGTH_BYTES = 4

DATA_MODULE = "nvidia_resiliency_ext.fault_tolerance.data"
CONFIG_MODULE = "nvidia_resiliency_ext.fault_tolerance.config"


class Refused(Exception):
    """Bytes that are no message of NVRx's; the text is one line and says why."""


class _Unchangeable(type):
    """A pickle can set attributes of whatever it gets hold of; of these classes it cannot."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused(f"a message may not change {cls.__name__}.{name[:80]}")


class Record(metaclass=_Unchangeable):
    """One object of a message: the attributes that were sent, and nothing else."""

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The attribute as it came, of whatever type that is."""
        return self.__dict__.get(name, otherwise)


class AuthkeyMsg(Record):
    pass


class InitMsg(Record):
    pass


class HeartbeatMsg(Record):
    pass


class SectionMsg(Record):
    pass


class UpdateConfigMsg(Record):
    pass


class RankInfo(Record):
    pass


class HeartbeatTimeouts(Record):
    pass


class SectionTimeouts(Record):
    pass


class WorkloadControlRequest(Record):
    pass


class SectionAction(Enum):
    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class WorkloadAction(Enum):
    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class _MakeSectionAction:
    """What a pickle gets for the enum: an object without attributes, so that there is nothing to change."""

    __slots__ = ()

    def __call__(self, value: object) -> SectionAction:
        return SectionAction(value)


class _MakeWorkloadAction:
    __slots__ = ()

    def __call__(self, value: object) -> WorkloadAction:
        return WorkloadAction(value)


_ENUMS = {"SectionAction": _MakeSectionAction(), "WorkloadAction": _MakeWorkloadAction()}
_RECORDS = (
    *(AuthkeyMsg, InitMsg, HeartbeatMsg, SectionMsg, UpdateConfigMsg),
    *(RankInfo, HeartbeatTimeouts, SectionTimeouts, WorkloadControlRequest),
)


def _member(enum: object, name: object) -> Enum:
    """Stands in for getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    for known, members in ((_ENUMS["SectionAction"], SectionAction), (_ENUMS["WorkloadAction"], WorkloadAction)):
        if enum is known and isinstance(name, str) and name in members.__members__:
            member: Enum = members[name]
            return member
    raise Refused("getattr of something that is no member of NVRx's enums")


_ALLOWED: dict[tuple[str, str], object] = {
    **{(DATA_MODULE, cls.__name__): cls for cls in _RECORDS},
    **{(DATA_MODULE, name): maker for name, maker in _ENUMS.items()},
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise Refused(f"{module[:80]}.{name[:80]} is not among NVRx's messages")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("persistent ids are not among NVRx's messages")


def read_message(frame: bytes) -> Any:
    """The object in one frame. Raise `Refused` for anything that NVRx's clients do not send."""
    if len(frame) > MAX_FRAME_BYTES:
        raise Refused(f"message of {len(frame)} bytes, more than the {MAX_FRAME_BYTES} allowed")
    try:
        return _Unpickler(io.BytesIO(frame)).load()
    except Refused:
        raise
    except MemoryError:
        raise Refused("the message asks for more memory than there is") from None
    except Exception as error:  # pickle raises nearly anything for damaged bytes; what it does is bounded above
        raise Refused(f"not a pickle that can be read: {type(error).__name__}") from None


# ------------------------------------------------------------------------------------------------------------- replies


def ok_reply() -> bytes:
    """The frame of an `OkMsg` without attributes."""
    return _OK


def config_reply(config: Mapping[str, object]) -> bytes:
    """The frame of an `OkMsg` whose `cfg` is a `FaultToleranceConfig` with those fields. A `signal.Signals` may be among
    them."""
    return _framed(_instance("OkMsg", {"cfg": _instance("FaultToleranceConfig", config, CONFIG_MODULE)}))


def error_reply(cause: str) -> bytes:
    """The frame of an `ErrorMsg`."""
    return _framed(_instance("ErrorMsg", {"cause": cause[:1000]}))


def launcher_reply() -> bytes:
    """The frame that `IpcConnector.send` waits for."""
    return _LAUNCHER_OK


class _Opcodes(bytes):
    """A part of a pickle that leaves one object on the stack."""


def _instance(name: str, state: Mapping[str, object], module: str = DATA_MODULE) -> _Opcodes:
    """An object made without calling `__init__`, with `state` as its attributes."""
    return _Opcodes(_global(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _mapping(state) + pickle.BUILD)


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _mapping(items: Mapping[str, object]) -> bytes:
    pairs = b"".join(_value(key) + _value(value) for key, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def _value(value: object) -> bytes:
    if isinstance(value, _Opcodes):
        return value
    if isinstance(value, signal.Signals):
        return _global("signal", "Signals") + _value(int(value)) + pickle.TUPLE1 + pickle.REDUCE
    if isinstance(value, Mapping):
        return _mapping(value)
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return pickle.dumps(value, protocol=2)[2:-1]  # without the protocol's mark and the final stop


def _framed(opcodes: bytes) -> bytes:
    body = pickle.PROTO + b"\x03" + opcodes + pickle.STOP
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


_OK = _framed(_instance("OkMsg", {}))
_LAUNCHER_OK = _framed(pickle.SHORT_BINBYTES + b"\x02ok")


# ------------------------------------------------------------------------------------------------------- what came in


def as_seconds(value: object) -> float | None:
    """A limit of a client's: None is unlimited, and so are infinity and 0. Raise `Refused` for what is no time."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
        raise Refused(f"{str(value)[:40]!r} is not a number of seconds")
    return float(value) if 0 < value < 1e9 else None
