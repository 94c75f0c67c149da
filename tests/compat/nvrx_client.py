"""Our own NVRx client, of any generation: speaks the protocol from stand-ins for NVRx's classes. Needs neither NVRx nor torch.

`generation` 4 is 0.4.1 (its `InitMsg` has no `iteration`, it waits for every answer), 6 and newer send `iteration` and do what
the configuration says about answers.
"""

import contextlib
import enum
import os
import pickle
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

DATA = "nvidia_resiliency_ext.fault_tolerance.data"
CONFIG = "nvidia_resiliency_ext.fault_tolerance.config"


def _module(name: str) -> types.ModuleType:
    return types.ModuleType(name)


_data, _config = _module(DATA), _module(CONFIG)


def _class(module: types.ModuleType, name: str) -> type:
    cls = type(name, (), {"__module__": module.__name__})
    setattr(module, name, cls)
    return cls


for _name in (
    *("AuthkeyMsg", "InitMsg", "HeartbeatMsg", "SectionMsg", "UpdateConfigMsg", "OkMsg", "ErrorMsg", "RankInfo"),
    *("HeartbeatTimeouts", "SectionTimeouts", "WorkloadControlRequest", "NewerMsg"),
):
    _class(_data, _name)
_class(_config, "FaultToleranceConfig")


class SectionAction(enum.Enum):
    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class WorkloadAction(enum.Enum):
    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


for _enum in (SectionAction, WorkloadAction):
    _enum.__module__ = DATA
    setattr(_data, _enum.__name__, _enum)

_PARENTS = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.fault_tolerance")


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Pickle looks classes up by module: ours, for the time of one call."""
    names = {name: _module(name) for name in _PARENTS} | {DATA: _data, CONFIG: _config}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def message(name: str, **attributes: Any) -> Any:
    """An object of NVRx's class `name`."""
    made = getattr(_data, name)()
    made.__dict__.update(attributes)
    return made


def to_bytes(thing: object, protocol: int | None = None) -> bytes:
    """Its pickle."""
    with _stand_ins():
        return pickle.dumps(thing, protocol=protocol)


def from_bytes(data: bytes) -> Any:
    """What a pickle of the server's holds."""
    with _stand_ins():
        return pickle.loads(data)


def framed(data: bytes) -> bytes:
    """With its length in front."""
    return len(data).to_bytes(4, "big") + data


def kind(reply: object) -> str:
    """`OkMsg` or `ErrorMsg`."""
    return type(reply).__name__


class NvrxClient:
    """One connection to `FT_RANK_MONITOR_IPC_SOCKET`, or to `path`. Every wait is bounded."""

    def __init__(self, path: str = "", generation: int = 4, within_s: float = 60.0) -> None:
        self.generation = generation
        self.cfg: Any = None
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(within_s)
        self.sock.connect(path or os.environ["FT_RANK_MONITOR_IPC_SOCKET"])

    def send(self, thing: object) -> None:
        self.sock.sendall(framed(thing if isinstance(thing, bytes) else to_bytes(thing)))

    def receive(self) -> Any:
        length = int.from_bytes(self._exactly(4), "big")
        return from_bytes(self._exactly(length))

    def ask(self, thing: object) -> Any:
        self.send(thing)
        return self.receive()

    def init(self, rank: int | str = 0, num_warmup_iters: int | None = None) -> Any:
        assert kind(self.ask(message("AuthkeyMsg", authkey=b"key"))) == "OkMsg"
        info = message("RankInfo", global_rank=rank, local_rank=0, host="h", pid=os.getpid())
        newer = {"iteration": None, "num_warmup_iters": num_warmup_iters} if self.generation >= 6 else {}
        reply = self.ask(message("InitMsg", rank_info=info, **newer))
        assert kind(reply) == "OkMsg", reply.__dict__
        self.cfg = reply.cfg
        return self.cfg

    def start(self, section: str, iteration: int | None = None) -> Any:
        return self._one_way("SectionMsg", section=section, action=SectionAction.OPEN, iteration=iteration)

    def end(self, section: str, iteration: int | None = None) -> Any:
        return self._one_way("SectionMsg", section=section, action=SectionAction.CLOSE, iteration=iteration)

    def end_all(self) -> Any:
        return self._one_way("SectionMsg", section=None, action=SectionAction.CLOSE_ALL, iteration=None)

    def heartbeat(self, state: object = None) -> Any:
        return self._one_way("HeartbeatMsg", state=state)

    def set_limits(self, sections: dict[str, float | None] | None = None, out_of_section: float | None = None) -> Any:
        timeouts = message(
            "SectionTimeouts",
            section=sections,
            out_of_section=out_of_section,
            calculated_sections=set(sections or ()),
            is_out_of_section_calculated=True,
        )
        return self.ask(message("UpdateConfigMsg", hb_timeouts=None, section_timeouts=timeouts))

    def _one_way(self, name: str, **attributes: Any) -> Any:
        if self.generation < 6:
            attributes.pop("iteration", None)
        thing = message(name, rank=0, **attributes)
        if self.generation >= 6 and self.cfg.skip_section_response:
            self.send(thing)
            return None
        return self.ask(thing)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            if not part:
                raise ConnectionError("the server has closed the connection")
            data += part
        return data


def control(action: WorkloadAction, description: str = "", rank: int | str = 0, path: str = "") -> object:
    """Send a request to the launcher as `IpcConnector` does; return its answer."""
    client = NvrxClient(path or os.environ["FT_LAUNCHER_IPC_SOCKET"])
    with client.sock:
        return client.ask((rank, message("WorkloadControlRequest", action=action, description=description)))
