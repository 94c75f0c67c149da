"""What goes into the supervisor's loop, and the seams through which it acts: data and protocols only."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rsup.supervisor import wire
from rsup.supervisor.hardware.node_report import NodeReport, NodeReportReply
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.records import JobKey, Record, SubjectSaved
from rsup.supervisor.wire import ToAgent


class Transport(Protocol):
    """How messages leave. Must not block and may lose them."""

    def send(self, agent_id: str, message: ToAgent) -> None:
        """Send to an agent, if it is connected."""
        ...


class Clock(Protocol):
    """The two clocks."""

    def now_us(self) -> int:
        """UTC microseconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never jump."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now_us(self) -> int:
        """UTC microseconds."""
        return wire.now_us()

    def monotonic_s(self) -> float:
        """Seconds that never jump."""
        return time.monotonic()


class MessageOfAgent(Protocol):
    """A message of an agent: `rpc_server.Received`, or an `AgentMessage`."""

    @property
    def agent_id(self) -> str: ...

    @property
    def message(self) -> wire.ToSupervisor: ...


@dataclass(frozen=True)
class AgentMessage:
    """What an agent has sent."""

    agent_id: str
    message: wire.ToSupervisor


@dataclass(frozen=True)
class OperatorReply:
    """Answer to an `OperatorRequest`, given after the commit. `message` is a sentence; `job` None: no such job lives."""

    done: bool
    message: str
    job: JobKey | None = None
    request_id: str = ""


@dataclass(frozen=True)
class HardwareReply:
    """Answer to a `HardwareRequest`. `status` as in `hardware.verbs.Verdict`, or `busy`; `subject`: the state that follows."""

    status: str
    message: str
    subject: SubjectSaved | None = None


@dataclass(frozen=True)
class OperatorRequest:
    """Somebody asks for something (`events.OperatorAsked`). `job`: its key, or `ID` or `ID.RUN` of a live one."""

    job: JobKey | str
    kind: str
    principal: str
    reason: str
    reply: Callable[[OperatorReply], None]
    node: str = ""
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    dry_run: bool = False
    """Only say what would be done."""


@dataclass(frozen=True)
class AgentKnownDead:
    """The shell found out by itself that an agent and its ranks are dead."""

    agent_id: str
    reason: str


@dataclass(frozen=True)
class HardwareRequest:
    """Somebody asks for a change of a device or node. `reply` hears what becomes of it, after the commit."""

    request: VerbRequest
    reply: Callable[[HardwareReply], None]


@dataclass(frozen=True)
class NodeReported:
    """A node's root has told what happened there. `reply` hears what was new, after the commit; None: it was not taken up."""

    report: NodeReport
    reply: Callable[[NodeReportReply | None], None]


@dataclass(frozen=True)
class RecordsToKeep:
    """Another part of the supervisor has something to keep. `reply` hears whether it is kept, after the commit."""

    records: Sequence[Record]
    reply: Callable[[bool], None]


Input = MessageOfAgent | OperatorRequest | HardwareRequest | AgentKnownDead | NodeReported | RecordsToKeep
