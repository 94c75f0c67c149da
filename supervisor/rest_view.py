"""Puts REST together inside the daemon: the read-only engine, the tokens, and what only the running supervisor knows."""

import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from rsup.supervisor import principals, wire
from rsup.supervisor.agent_links import beat_row
from rsup.supervisor.config import Settings
from rsup.supervisor.database import reader_engine
from rsup.supervisor.hardware.node_report import NodeReport, NodeReportReply
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.identities import Identities
from rsup.supervisor.loop import Loop, OperatorReply
from rsup.supervisor.loop_inputs import HardwareReply
from rsup.supervisor.peer_identity import Peers
from rsup.supervisor.records import JobKey
from rsup.supervisor.rest.app import make_app
from rsup.supervisor.rest.context import Change, ChangeReply, RestContext
from rsup.supervisor.rest.server import RestServer
from rsup.supervisor.slurm.drain_keeper import DrainKeeper
from rsup.supervisor.store import StoreError
from rsup.supervisor.views import LiveBeats
from rsup.supervisor.wire import SupervisorInfo

SWITCH_S = 0.001
"""How long the loop may keep Python's lock from a request that waits for it. A request needs it some dozen times (each query,
each row, each change of threads); with Python's 5 ms an answer takes about twice as long while agents join."""


class RunningLoop(Protocol):
    """What REST needs of the daemon (`daemon_turns.Turns`); everything may be called from any thread."""

    @property
    def loop(self) -> Loop: ...

    @property
    def turned_s(self) -> float: ...

    def submit(
        self, job: JobKey, kind: str, principal: str, reason: str, *, node: str = "", dry_run: bool = False
    ) -> "Future[OperatorReply]": ...

    def change_hardware(self, request: VerbRequest) -> "Future[HardwareReply]": ...

    def counters(self) -> Mapping[str, float]: ...

    def report(self, report: NodeReport) -> "Future[NodeReportReply | None]": ...

    @property
    def drains(self) -> DrainKeeper | None: ...


def serve(
    turns: RunningLoop,
    target: str | Path | None,
    settings: Settings,
    host: str,
    listening: socket.socket,
    local: socket.socket | None = None,
) -> Callable[[], None]:
    """Serve REST on `listening`, bound to `host`, and on the UNIX socket `local`, from threads of its own; return what stops
    it. Raise `RsupError`."""
    if target is None:
        raise StoreError("there is no database to read")
    server = RestServer(host, listening.getsockname()[1], listening, local)
    tokens = principals.WatchedTokens(settings.state_path)

    def submit(change: Change) -> "Future[ChangeReply]":
        answer: Future[ChangeReply] = turns.submit(  # type: ignore[assignment]
            change.job, change.verb, change.principal.name, change.reason, node=change.node, dry_run=change.dry_run
        )
        return answer

    context = RestContext(
        engine=reader_engine(target),
        submit=submit,
        tokens=tokens,
        identities=Identities(tokens, Peers(not settings.embedded, settings.operators), settings.munge_socket),
        rest_ports=(server.port,),
        live=LoopView(turns),
        allowed_hosts=server.allowed_hosts,
        change_hardware=turns.change_hardware,  # type: ignore[arg-type]
        report_node=turns.report,
        gates=turns.drains,
    )
    sys.setswitchinterval(SWITCH_S)
    server.start(make_app(context))
    return server.stop


class LoopView:
    """`rest.context.LiveView` over the running loop; from any thread."""

    def __init__(self, turns: RunningLoop) -> None:
        self._turns = turns

    def info(self) -> SupervisorInfo:
        """This supervisor."""
        return self._turns.loop.info

    def beats(self, job: JobKey) -> LiveBeats | None:
        """The newest beats of a live job, ages brought up to now; None for a job without any."""
        now_s = time.monotonic()
        rows = []
        for agent in self._turns.loop.live_beats(job):
            for beat in agent.beats:
                row = beat_row(agent, beat)
                waited_s = now_s - agent.at_s
                for name in ("beat_age_s", "main_beat_age_s"):
                    age_s = row[name]
                    if isinstance(age_s, float) and age_s >= 0:
                        row[name] = age_s + waited_s
                row["open_sections"] = [[section.name, section.age_s + waited_s] for section in beat.open_sections]
                rows.append(row)
        return LiveBeats(wire.now_us(), rows) if rows else None

    def loop_age_s(self) -> float:
        """Time since the loop last turned."""
        return time.monotonic() - self._turns.turned_s

    def store_error(self) -> str:
        """Why the store cannot be written now, or another may do so in our place by now; empty if neither."""
        return self._turns.loop.store_trouble() or self._turns.loop.lease_doubt()

    def counters(self) -> Mapping[str, float]:
        """Numbers for `/metrics`."""
        return self._turns.counters()
