"""What the daemon does each turn: messages and requests into the loop, time, and once a second the housekeeping."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rsup.supervisor import agents_here, lifetime, local_sockets, places, wire
from rsup.supervisor.config import Settings
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.node_report import NodeReport, NodeReportReply
from rsup.supervisor.hardware.policy import Policy, built_in, configured, draining_at_once
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.loop import AgentKnownDead, Loop, OperatorReply, OperatorRequest, SystemClock
from rsup.supervisor.loop_inputs import HardwareReply, HardwareRequest, Input, NodeReported, RecordsToKeep
from rsup.supervisor.records import EvidenceSaved, JobKey, Record, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.rest_thread import RestThread
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import JobState, Phase, Role
from rsup.supervisor.store import Store, StoreError, StoreHeld
from rsup.supervisor.store_opening import OpenedStore
from rsup.supervisor.wire import Hello, RsupError, SupervisorInfo, UsageError

if TYPE_CHECKING:
    from rsup.supervisor.slurm.drain_keeper import DrainKeeper

HOUSEKEEPING_EVERY_S = 1.0
PRUNE_EVERY_S = 60.0
_AGENT_THERE_S = 3.0

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


@dataclass
class CommitTimes:
    """How long commits took, in seconds, since the start."""

    num: int = 0
    last: float = 0.0
    longest: float = 0.0
    total: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one more."""
        self.num += 1
        self.last = took_s
        self.longest = max(self.longest, took_s)
        self.total += took_s


class WatchedStore:
    """The store as the loop sees it; times its commits, and remembers a lost lease, which no waiting brings back."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lost: StoreHeld | None = None
        self.commit_s = CommitTimes()

    def live_jobs(self) -> list[tuple[JobKey, bytes]]:
        """See `store.Store`."""
        return self._store.live_jobs()

    def last_run(self, cluster: str, owner: str, job_id: str) -> tuple[JobKey, bytes] | None:
        """See `store.Store`."""
        return self._store.last_run(cluster, owner, job_id)

    def open_subjects(self) -> list[SubjectSaved]:
        """See `store.Store`."""
        return self._store.open_subjects()

    def subjects_named(self, kind: str, names: Sequence[str], serials: Sequence[str]) -> list[SubjectSaved]:
        """See `store.Store`."""
        return self._store.subjects_named(kind, names, serials)

    def evidence_about(self, kind: str, subject: str) -> list[EvidenceSaved]:
        """See `store.Store`."""
        return self._store.evidence_about(kind, subject)

    def last_transition(self, kind: str, subject: str) -> TransitionSaved | None:
        """See `store.Store`."""
        return self._store.last_transition(kind, subject)

    def open_seats(self) -> list[SeatSaved]:
        """See `store.Store`."""
        return self._store.open_seats()

    def last_node(self, uuid: str) -> str:
        """See `store.Store`."""
        return self._store.last_node(uuid)

    def commit(self, records: Sequence[Record]) -> None:
        """See `store.Store`."""
        began_s = time.monotonic()
        self._noting_a_loss(lambda: self._store.commit(records))
        self.commit_s.add(time.monotonic() - began_s)

    def probe(self) -> None:
        """See `store.Store`."""
        self._noting_a_loss(self._store.probe)

    def _noting_a_loss(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StoreHeld as held:
            self.lost = held
            raise

    def close(self) -> None:
        """See `store.Store`."""
        self._store.close()


class Turns:
    """The loop with everything around it. Raise `StoreError` from the start if live jobs cannot be taken over."""

    def __init__(self, settings: Settings, server: RpcServer, opened: OpenedStore, instance: str) -> None:
        self._settings = settings
        self._server = server
        self._opened = opened
        self._store = WatchedStore(opened.store)
        self._endpoints: set[str] = set()
        self._here = agents_here.ThisHost()
        now_s = time.monotonic()
        self.turned_s = now_s
        """When the last turn began, monotonic."""
        self._heard_s = now_s
        self._kept_house_s = self._pruned_s = now_s
        self._lifetime = lifetime.Lifetime(settings.idle_exit_s, now_s)
        self._over = False
        self.rest = self._bind_rest(settings)
        self._rest_watched = self.rest is not None
        if self.rest is not None:
            for fd in self.rest.filenos():
                server.watch(fd, True)
        info = SupervisorInfo(
            instance=instance,
            pid=os.getpid(),
            host=places.this_host(),
            embedded=settings.embedded,
            rest=self.rest.public_address if self.rest else "",
            store=opened.text,
            store_id=opened.store_id,
            notice=opened.notice,
        )
        self.drains: DrainKeeper | None = None
        policy = device_policy(settings)
        book = Book(
            self._store,
            policy,
            accepts_injected=settings.embedded or settings.accept_injected,
        )
        self.loop = Loop(self._store, server, SystemClock(), info, self._listen, book=book)
        if isinstance(opened.store, SqlStore):
            self.loop.lease_doubt = opened.store.lease_doubt
        server.known_agent = self.loop.known_agent
        try:
            self.loop.recover()
            self.drains = self._start_drains(policy)
        except BaseException:
            self.close()
            raise
        self._tell_links()

    @property
    def lost(self) -> StoreHeld | None:
        """Who has taken the store over, None: it is ours."""
        return self._store.lost

    def is_over(self) -> bool:
        """Whether nothing is left to do here: idle for long enough, or another supervisor has the store."""
        return self._over

    def close(self) -> None:
        """Stop serving REST, drains, and the endpoints of jobs: the next one knows nothing of those, and another supervisor of
        this host may want them. The server and the store are not ours."""
        if self.drains is not None:
            self.drains.stop()
        for endpoint in self._endpoints:
            self._server.unlisten(endpoint)
        self._endpoints.clear()
        if self.rest is not None:
            if self._rest_watched:
                self._unwatch_rest()
            self.rest.stop()

    def one(self) -> None:
        """Wait for something to do, and do it."""
        received = self._server.receive(self.loop.next_wakeup_s())
        self.turned_s = now_s = time.monotonic()
        self.loop.listened(has_read_all=self._server.has_read_all)
        inputs: list[Input] = [*received, *self._requests()]
        known = self.loop.hardware_changes
        if received:
            self._heard_s = now_s
        if inputs:
            self.loop.handle(inputs)
            if any(isinstance(one.message, Hello) for one in received):
                self._tell_links()
        if self.loop.next_wakeup_s() <= 0:
            self.loop.tick()
        if self.drains is not None and self.loop.hardware_changes != known:
            self.drains.wake()
        if self._rest_watched and self.rest is not None and self.rest.start_if_due():
            self._unwatch_rest()
        if now_s - self._kept_house_s >= HOUSEKEEPING_EVERY_S:
            self._kept_house_s = now_s
            self._keep_house(now_s)

    # ---------------------------------------------------------------------------------------------------- operators, REST

    def submit(
        self, job: JobKey, kind: str, principal: str, reason: str, *, node: str = "", dry_run: bool = False
    ) -> "Future[OperatorReply]":
        """From any thread: ask the loop for `stop`, `checkpoint` or `fence`. Raise `rpc_server.Busy`."""
        answer: Future[OperatorReply] = Future()
        reply = partial(_answer, answer)
        self._server.submit(OperatorRequest(job, kind, principal, reason, reply, node=node, dry_run=dry_run))
        return answer

    def change_hardware(self, request: VerbRequest) -> "Future[HardwareReply]":
        """From any thread: ask the loop for a change of a device or node. Raise `rpc_server.Busy`."""
        answer: Future[HardwareReply] = Future()
        self._server.submit(HardwareRequest(request, partial(_answer, answer)))
        return answer

    def report(self, report: NodeReport) -> "Future[NodeReportReply | None]":
        """From any thread: hand the loop what a node's root says. Raise `rpc_server.Busy`."""
        answer: Future[NodeReportReply | None] = Future()
        self._server.submit(NodeReported(report, partial(_answer, answer)))
        return answer

    def keep_records(self, records: Sequence[Record]) -> "Future[bool]":
        """From any thread: have the loop keep these. Raise `rpc_server.Busy`."""
        answer: Future[bool] = Future()
        self._server.submit(RecordsToKeep(records, partial(_answer, answer)))
        return answer

    def _start_drains(self, policy: Policy) -> "DrainKeeper | None":
        """What keeps SLURM and gates in step; a shared supervisor's only. Raise `UsageError`."""
        if self._settings.embedded or not isinstance(self._opened.store, SqlStore):
            return None
        from rsup.supervisor.slurm.start import start_keeper

        doubt = lambda: self.loop.store_error or self.loop.lease_doubt()  # noqa: E731
        return start_keeper(self._settings, self._opened.target, policy.guard, self.keep_records, doubt)

    def _requests(self) -> list[OperatorRequest | HardwareRequest | NodeReported | RecordsToKeep]:
        taken: list[OperatorRequest | HardwareRequest | NodeReported | RecordsToKeep] = []
        for request, future in self._server.take_requests():
            if isinstance(request, (NodeReported, RecordsToKeep)):
                taken.append(request)
            elif isinstance(request, HardwareRequest):
                taken.append(replace(request, reply=_both(request.reply, future)))
            else:
                assert isinstance(request, OperatorRequest)
                taken.append(replace(request, reply=_both(request.reply, future)))
        return taken

    def _unwatch_rest(self) -> None:
        assert self.rest is not None
        self._rest_watched = False
        for fd in self.rest.filenos():
            self._server.watch(fd, False)

    def _bind_rest(self, settings: Settings) -> RestThread | None:
        local = None
        try:
            local = local_sockets.listen_for_rest(settings)
        except (RsupError, OSError) as error:
            if not settings.embedded:
                raise
            _log.warning("%s", error)
        try:
            return RestThread(settings.rest_endpoint, self._serve_rest, local)
        except RsupError as error:
            if local is not None:
                local.close()
            if not settings.embedded:
                raise
            _log.warning("%s", error)
            return None

    def _serve_rest(self, listening: socket.socket) -> Callable[[], None]:
        from rsup.supervisor.rest_view import serve

        assert self.rest is not None
        target: str | Path | None = None
        if isinstance(self._opened.store, SqlStore):
            target = self._opened.target
        return serve(self, target, self._settings, self.rest.host, listening, self.rest.local)

    # ------------------------------------------------------------------------------------------------------ housekeeping

    def counters(self) -> dict[str, float]:
        """Numbers for `/metrics`. From any thread."""
        counters = self._server.counters
        return {
            "messages_received_total": counters.received,
            "messages_sent_total": counters.sent,
            "messages_bad_total": counters.bad,
            "messages_dropped_total": counters.dropped,
            "inputs_dropped_total": self.loop.num_dropped,
            "hellos_refused_total": counters.refused,
            "store_commits_total": self._store.commit_s.num,
            "store_commit_seconds": self._store.commit_s.last,
            "store_commit_seconds_max": self._store.commit_s.longest,
            "store_commit_seconds_total": self._store.commit_s.total,
        }

    def _keep_house(self, now_s: float) -> None:
        if self._store.lost is not None:
            _log.warning("this supervisor decides nothing more: %s", self._store.lost)
            self._over = True
            return
        if not self.loop.store_error and self.loop.lease_doubt():
            self.loop.tick()  # it has nothing else to do where there are no jobs
        jobs = self.loop.jobs()
        self._tell_links()
        if not self.loop.store_error:
            for state in jobs:
                self._end_abandoned(state)
        num_agents = int(now_s - self._heard_s < _AGENT_THERE_S)
        self._over = self._lifetime.is_over(now_s, len(jobs), num_agents)
        if now_s - self._pruned_s >= PRUNE_EVERY_S and isinstance(self._opened.store, SqlStore):
            try:
                more = self._opened.store.prune(wire.now_us())
            except StoreError as error:
                _log.debug("nothing old was dropped: %s", error)
                more = False
            self._pruned_s = now_s - (PRUNE_EVERY_S - HOUSEKEEPING_EVERY_S if more else 0.0)

    def _listen(self, endpoint: str) -> None:
        self._server.listen(endpoint)
        if endpoint not in self._settings.rpc_listen:
            self._endpoints.add(endpoint)

    def _tell_links(self) -> None:
        """Say which jobs each endpoint is for; stop listening for jobs that are over."""
        for endpoint in list(self._endpoints):
            states = [state for state in self.loop.jobs() if state.spec.listen == endpoint]
            jobs = [state.key for state in states]
            self._server.set_jobs(endpoint, jobs, [state.spec.rdzv_id for state in states])
            if not jobs:
                self._endpoints.discard(endpoint)
                self._server.unlisten(endpoint)

    def _end_abandoned(self, state: JobState) -> None:
        if state.phase is Phase.ENDED:
            return
        agents = [agent.info for agent in state.agents.values() if agent.role is not Role.GONE]
        if any(agent.node != self._here.name for agent in agents):
            return
        seen = [self._here.look(agent, self.loop.silent_s(agent.agent_id), state.spec.owner) for agent in agents]
        reasons = {one.agent_id: agents_here.REBOOTED if one.rebooted else agents_here.ALL_GONE for one in seen}
        dead: list[Input] = [AgentKnownDead(agent_id, reasons[agent_id]) for agent_id in lifetime.abandoned(seen)]
        if dead:
            self.loop.handle(dead)


def device_policy(settings: Settings) -> Policy:
    """The rules for evidence. Raise `UsageError` for a file that cannot be used; an embedded supervisor, whose launch has
    looked at the file before, goes on with the built-in rules: training must not stop for it."""
    try:
        policy = configured(settings.device_policy)
        return draining_at_once(policy) if settings.drain_after == "one" else policy
    except UsageError as error:
        if not settings.embedded:
            raise
        _log.error("%s; going on with the built-in rules", error)
        return built_in()


def _answer(future: "Future[_Reply]", reply: "_Reply") -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(reply)


def _both(reply: Callable[["_Reply"], None], future: "Future[object]") -> Callable[["_Reply"], None]:
    def tell(answer: "_Reply") -> None:
        reply(answer)
        if future.set_running_or_notify_cancel():
            future.set_result(answer)

    return tell
