"""What the REST interface needs of the supervisor, and nothing more: the seam to `main`, faked in tests.

Requests run on threads of their own. They read the store over `engine`, which is read-only; they change nothing themselves:
a `Change` goes to the supervisor's loop, which stores it with its principal.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request
from sqlalchemy import Connection, Engine

from rsup.supervisor.hardware.node_report import NodeReport, NodeReportReply
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.identities import Identities
from rsup.supervisor.principals import Principal, Tokens
from rsup.supervisor.records import JobKey
from rsup.supervisor.slurm.drain_status import Counters
from rsup.supervisor.slurm.drain_words import Answer, Word
from rsup.supervisor.slurm.snapshot import Snapshot
from rsup.supervisor.views import LiveBeats
from rsup.supervisor.wire import SupervisorInfo


@dataclass(frozen=True)
class Change:
    """What somebody asks for. `verb` is a kind of `events.OperatorAsked` (`fence` of `node`); `reason` is theirs, cleaned and
    bounded; `dry_run`: only the answer is wanted."""

    verb: str
    job: JobKey
    principal: Principal
    reason: str
    node: str = ""
    dry_run: bool = False


class ChangeReply(Protocol):
    """The loop's answer: whether the request was taken up, a sentence about it, and its id in the job's story
    (`loop.OperatorReply`)."""

    @property
    def done(self) -> bool: ...

    @property
    def message(self) -> str: ...

    @property
    def request_id(self) -> str: ...


class HardwareAnswer(Protocol):
    """The loop's answer to a change of a device or node (`loop_inputs.HardwareReply`)."""

    @property
    def status(self) -> str: ...

    @property
    def message(self) -> str: ...


class Gates(Protocol):
    """What gates and operators need of the drain keeper (`slurm.drain_keeper.DrainKeeper`); from any thread."""

    @property
    def snapshot(self) -> Snapshot | None: ...

    @property
    def no_snapshot(self) -> str: ...

    @property
    def slurm_nodes(self) -> Collection[str]: ...

    @property
    def counters(self) -> Counters: ...

    def status(self) -> Mapping[str, Any]: ...

    def ask(self, word: Word) -> "Future[Answer]": ...


class LiveView(Protocol):
    """What only the running supervisor knows. Called from request threads, so each answer must be safe to make there."""

    def info(self) -> SupervisorInfo:
        """This supervisor."""
        ...

    def beats(self, job: JobKey) -> LiveBeats | None:
        """The newest beats of a live job, ages brought up to now; None for a job without any."""
        ...

    def loop_age_s(self) -> float:
        """Time since the loop last turned; it turns at least every second."""
        ...

    def store_error(self) -> str:
        """Why the store cannot be written now, empty if it can."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Numbers for `/metrics`, by name without `rsup_`: see `metrics.live_metrics`."""
        ...


@dataclass(frozen=True)
class RestContext:
    """Everything a request may use. With `allowed_hosts` a request must name one of them as its Host (names without
    port): set it for a loopback address, against DNS rebinding."""

    engine: Engine
    submit: "Callable[[Change], Future[ChangeReply]]"
    tokens: Tokens
    live: LiveView
    allowed_hosts: tuple[str, ...] = ()
    reply_timeout_s: float = 10.0
    change_hardware: "Callable[[VerbRequest], Future[HardwareAnswer]] | None" = None
    """Hands a change of a device or node to the loop."""
    report_node: "Callable[[NodeReport], Future[NodeReportReply | None]] | None" = None
    """Hands what a node says of itself to the loop."""
    gates: Gates | None = None
    """None: this supervisor has none."""
    identities: Identities | None = None
    """Who peers of the UNIX socket and makers of MUNGE credentials are; None: only tokens count."""
    rest_ports: tuple[int, ...] = ()

    @property
    def slurm_nodes(self) -> Collection[str]:
        """Nodes that SLURM knows, as far as it is asked."""
        return () if self.gates is None else self.gates.slurm_nodes

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for one answer."""
        with self.engine.connect() as connection:
            yield connection

    def supervisor(self) -> dict[str, Any]:
        """The supervisor as job status shows it. `address` is the page's."""
        info = self.live.info()
        same = {"instance": info.instance, "pid": info.pid, "host": info.host, "embedded": info.embedded, "store": info.store}
        return {"address": info.rest or None, **same}


PEER_UID = "peer-uid"
"""In a request's `client`: it came over the UNIX socket, and the port is the peer's uid. No address reads like that."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def context_of(request: Request) -> RestContext:
    """The context that `app.make_app` was given."""
    context: RestContext = request.app.state.context
    return context


Context = Annotated[RestContext, Depends(context_of)]
