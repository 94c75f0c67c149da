"""The parts of a running supervisor that these tests play, and clients of the server over them."""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx

from rsup.supervisor.events import Now
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.loop_inputs import HardwareReply
from rsup.supervisor.principals import Principal, Role, TokenBook
from rsup.supervisor.records import JobKey
from rsup.supervisor.rest.context import Change, ChangeReply, HardwareAnswer
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.views import LiveBeats
from rsup.supervisor.wire import SupervisorInfo

TOKENS = {"viewer": "viewer-token-0123456789", "user": "user-token-0123456789", "operator": "operator-token-0123456789"}


@dataclass(frozen=True)
class Reply:
    done: bool
    message: str
    request_id: str = "q1"


@dataclass
class PlayedSupervisor:
    """`LiveView` and the loop's end of `submit`."""

    rest: str = ""
    live_beats: dict[JobKey, LiveBeats] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    reply: Reply | None = Reply(True, "taken up")
    store_problem: str = ""
    loop_age: float = 0.05
    store: SqlStore | None = None
    """What changes of devices and nodes are made on; None: nobody answers."""

    def info(self) -> SupervisorInfo:
        return SupervisorInfo("i1", os.getpid(), "here", True, self.rest, "rsup.db")

    def beats(self, job: JobKey) -> LiveBeats | None:
        return self.live_beats.get(job)

    def loop_age_s(self) -> float:
        return self.loop_age

    def store_error(self) -> str:
        return self.store_problem

    def counters(self) -> Mapping[str, float]:
        return {"messages_dropped_total": 3, "commit_seconds": 0.004}

    def change_hardware(self, request: VerbRequest) -> "Future[HardwareAnswer]":
        """By the real core on `store`, as the loop does it."""
        future: Future[HardwareAnswer] = Future()
        if self.store is not None:
            book = Book(self.store)
            book.recover()
            batch = Batch(Now(time.time_ns() // 1000, 0.0), {})
            verdict = book.turn(batch).ask(request)
            self.store.commit(batch.records)
            future.set_result(HardwareReply(verdict.status, verdict.message, verdict.dossier.saved))
        return future

    def submit(self, change: Change) -> "Future[ChangeReply]":
        self.changes.append(change)
        future: Future[ChangeReply] = Future()
        if self.reply is not None:
            future.set_result(self.reply)
        return future


def book() -> TokenBook:
    """A viewer, ann as user, and an operator."""
    people = {"viewer": Principal("guest", Role.VIEWER), "user": Principal("ann", Role.USER)}
    people["operator"] = Principal("root", Role.OPERATOR)
    return TokenBook(tuple((hashlib.sha256(TOKENS[role].encode()).digest(), who) for role, who in people.items()))


@dataclass
class Served:
    """A server's address, how to stop it, and clients of it."""

    address: str
    stop: Callable[[], None]
    clients: list[httpx.Client] = field(default_factory=list)

    def client(self, role: str | None = "operator", **headers: str) -> httpx.Client:
        """A client with that role's token, or none."""
        if role is not None:
            headers["Authorization"] = f"Bearer {TOKENS[role]}"
        client = httpx.Client(base_url=self.address, headers=headers, trust_env=False, timeout=30)
        self.clients.append(client)
        return client
