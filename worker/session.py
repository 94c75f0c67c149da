"""A rank's session with its agent: the heartbeat board, and a small thread that owns the rank's socket.

The training thread only ever writes words of shared memory and appends to a deque: it makes no system call but a
non-blocking eventfd write when it has a message, takes no lock, and waits for nobody. If the agent stops, dies or was never
there, training goes on and the messages are dropped.
"""

import collections
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from rsup.supervisor import heartbeat_board as board_layout
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Board, BoardError, Section, Slot
from rsup.worker.observe.metric_outbox import MetricOutbox
from rsup.worker.warned import warn_safely

BEAT_INTERVAL_S = 0.25
MAX_QUEUED_MESSAGES = 256
STACKS_SIGNAL = signal.SIGRTMIN + 5
"""On this signal faulthandler writes all stacks to `RSUP_STACKS_DIR/rank-<rank>.txt`."""

_PR_SET_PTRACER = 0x59616D61
_DEBUGGER_MODULES = {"pdb", "bdb", "pydevd", "debugpy", "IPython.core.debugger"}


@dataclass(frozen=True)
class Request:
    """Something asked of the training loop from outside: save at the next iteration, and, with `leave`, then exit 0."""

    request_id: str
    leave: bool


class SectionLike(Protocol):
    """What `section()` gives: enter and exit it by hand, or use it as a context manager."""

    def enter(self) -> None: ...

    def exit(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _NoSection:
    """A section outside `rsup launch`."""

    __slots__ = ()

    def enter(self) -> None:
        pass

    def exit(self) -> None:
        pass

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        pass


_NO_SECTION = _NoSection()


class NoSession:
    """The session of a process that `rsup launch` did not start: every call does nothing."""

    supervised = False
    agent_pid: int | None = None
    attempt = 1
    job_key = ""
    limits: wire.Limits | None = None
    switches: Mapping[str, bool] = MappingProxyType({})

    def section(self, name: str) -> SectionLike:
        return _NO_SECTION

    def section_totals(self) -> dict[str, tuple[int, int]]:
        return {}

    def write(self, field: int, value: int) -> None:
        pass

    def set_flag(self, flag: int) -> None:
        pass

    def beat(self, iteration: int) -> None:
        pass

    def heartbeat(self) -> None:
        pass

    def requested(self) -> Request | None:
        return None

    def send(self, message: wire.RankToAgent) -> None:
        pass

    def request_done(self, request_id: str, iteration: int, failure: str = "") -> None:
        pass

    def device_used(self, uuid: str) -> None:
        pass

    def report_case(self, report: wire.CaseReport, within_s: float) -> bool:
        return False

    def report_metrics(
        self,
        iteration: int,
        values: Mapping[str, float],
        consumed_samples: int,
        kind: str,
        at_s: float | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        pass

    def flush(self, within_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


class Session:
    """The session of a rank under `rsup launch`; made by `connect`."""

    supervised = True

    def __init__(self, board: Board, slot: Slot, link: socket.socket | None, rank: int, attempt: int, job_key: str) -> None:
        self.rank = rank
        self.attempt = attempt
        self.job_key = job_key
        self.limits: wire.Limits | None = None
        self.switches: Mapping[str, bool] = MappingProxyType({})
        self.peers_failed: Callable[[wire.PeersFailed], None] | None = None
        """Called by the beat thread, and must not wait: in-process restart listens here."""
        self.agent_pid: int | None = board.owner_pid
        self._board = board
        self._slot = slot
        self._link = link
        self._device_uuid = ""
        self._takes_requests = False
        self._request: Request | None = None
        self._heartbeats = 0
        self._flags = 0
        self._outbox: collections.deque[wire.RankToAgent] = collections.deque(maxlen=MAX_QUEUED_MESSAGES)
        self._metrics = MetricOutbox()
        self._flushing = False
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._has_said_lost = False
        self._has_said_odd_metrics = False
        self._stored_cases: dict[str, str] = {}
        self._case_stored = threading.Event()
        self._sections: dict[str, SectionLike] = {}
        self._main_thread_id = threading.main_thread().ident or 0
        self.send(self._hello())
        self._thread = threading.Thread(target=self._run, name="rsup-beat", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- by the training thread

    def section(self, name: str) -> SectionLike:
        """The section of that name. One name is open once at a time; different ones may nest or overlap."""
        section = self._sections.get(name)
        return section if section is not None else self._add_section(name)

    def _add_section(self, name: str) -> SectionLike:
        section: SectionLike
        try:
            made: Section = self._slot.section(name)
            section = made
        except BoardError as error:
            warn_safely(str(error), 4)
            section = _NO_SECTION
        self._sections[name] = section
        return section

    def section_totals(self) -> dict[str, tuple[int, int]]:
        """Of each section of this rank the times it was entered, and the total of its closed stretches in ns."""
        return self._slot.section_totals()

    def write(self, field: int, value: int) -> None:
        """Write one word of this rank's slot."""
        self._slot.set(field, value)

    def set_flag(self, flag: int) -> None:
        """Set a flag of the slot for good; it shows at the next beat."""
        self._flags |= flag

    def beat(self, iteration: int) -> None:
        """The training thread reached `iteration` (1-based, global)."""
        try:
            self._slot.set(board_layout.ITERATION, iteration)
        except (TypeError, ValueError):
            warn_safely("set_iteration takes whole numbers from 0 on: what is none is left out", 3)
        self._slot.set(board_layout.MAIN_NS, board_layout.monotonic_ns())

    @property
    def iteration(self) -> int:
        """The one that the training thread has reached last, as far as it says."""
        return self._slot.get(board_layout.ITERATION)

    def heartbeat(self) -> None:
        """An explicit sign of progress, for scripts without sections."""
        self._heartbeats += 1
        now_ns = board_layout.monotonic_ns()
        self._slot.set(board_layout.HEARTBEATS, self._heartbeats)
        self._slot.set(board_layout.HEARTBEAT_NS, now_ns)
        self._slot.set(board_layout.MAIN_NS, now_ns)

    def requested(self) -> Request | None:
        """The open request, seen by each rank at a moment of its own: agree on it over all ranks before acting."""
        if not self._takes_requests:
            self._takes_requests = True
            self.send(self._hello())
        return self._request

    def request_done(self, request_id: str, iteration: int, failure: str = "") -> None:
        """The loop has saved for `request_id` at `iteration`; or could not, for the reason `failure`."""
        if self._request is not None and self._request.request_id == request_id:
            self._request = None
        self.send(wire.RankRequestDone(request_id, iteration, not failure, wire.clip(failure, 1024)))

    def device_used(self, uuid: str) -> None:
        """Name the device that this rank really computes on."""
        self._device_uuid = uuid
        self.send(self._hello())

    def report_case(self, report: wire.CaseReport, within_s: float) -> bool:
        """Tell a rerun case and wait until that report is stored, at most `within_s`; whether it is. 0: do not wait."""
        self._case_stored.clear()
        self.send(wire.RankCase(report))
        deadline_s = time.monotonic() + within_s
        while within_s:
            if self._stored_cases.get(report.case_id) == report.verdict:
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._case_stored.wait(left_s)
            self._case_stored.clear()
        return False

    def report_metrics(
        self,
        iteration: int,
        values: Mapping[str, float],
        consumed_samples: int,
        kind: str,
        at_s: float | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Keep these numbers; the session's thread sends them within a second or so. No system call."""
        try:
            where, told, samples = int(iteration), dict(values), int(consumed_samples)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last is a tensor's of several numbers
            if not self._has_said_odd_metrics:
                self._has_said_odd_metrics = True
                text = f"metrics of iteration {iteration!r} are left out, and all further ones that are wrong: {error}"
                warn_safely(text, 3) if warn is None else warn(text)
            return
        self._metrics.take(where, told, samples, kind, at_s, warn)

    def send(self, message: wire.RankToAgent) -> None:
        """Queue a message to the agent; the oldest is dropped when more than `MAX_QUEUED_MESSAGES` wait."""
        if isinstance(message, wire.RankEntered):
            self._metrics.entry = message.entry
        self._outbox.append(message)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup_fd, 1)

    def send_from_fork(self, message: wire.RankToAgent) -> None:
        """In a process that was forked off this one, where nobody sends what is queued: send at once, or not at all."""
        with contextlib.suppress(OSError):
            if self._link is not None:
                self._link.send(wire.encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Send what is queued, within a second, and stop the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup_fd, 1)
        self._thread.join(timeout=1.0)

    def flush(self, within_s: float) -> bool:
        """Wait until what is queued has been sent, at most `within_s`; whether it was."""
        deadline_s = time.monotonic() + within_s
        self._flushing = True
        while self._has_unsent and self._thread.is_alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wakeup_fd, 1)
            time.sleep(0.001)
        self._flushing = False
        return not self._has_unsent

    @property
    def _has_unsent(self) -> bool:
        return bool(self._outbox) or not self._metrics.is_empty

    def _hello(self) -> wire.RankHello:
        return wire.RankHello(self.rank, self.attempt, os.getpid(), self._device_uuid, self._takes_requests)

    # ------------------------------------------------------------------------------------------------ by the beat thread

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wakeup_fd, select.POLLIN)
        if self._link is not None:
            poller.register(self._link, select.POLLIN)
        while True:
            ready = poller.poll(BEAT_INTERVAL_S * 1000)
            self._slot.set(board_layout.LIVENESS_NS, board_layout.monotonic_ns())
            is_closing = self._closing
            try:
                self._turn(poller, [fd for fd, _ in ready], is_closing)
            except Exception as error:  # the thread's outermost frame: a rank without it looks hung, whatever it met
                self._say_lost(error)
            if is_closing:
                return

    def _turn(self, poller: select.poll, ready: Sequence[int], is_closing: bool) -> None:
        self._write_flags()
        for fd in ready:
            if fd == self._wakeup_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup_fd)
            elif self._link is not None and not self._receive():
                poller.unregister(self._link)
                self._link.close()
                self._link = None
        self._flush()
        self._send_metrics(all_of_it=is_closing or self._flushing)

    def _say_lost(self, error: Exception) -> None:
        """Once: standard error is the only place where this thread may say anything."""
        if not self._has_said_lost:
            self._has_said_lost = True
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(
                    f"warning: rsup: rank {self.rank}: a message was lost between it and its agent:"
                    f" {type(error).__name__}: {error}\n"
                )

    def _send_metrics(self, *, all_of_it: bool) -> None:
        """Behind the queue, and only where that is empty: numbers must not push out what others wait for."""
        if self._outbox or (self._metrics.is_empty and not all_of_it):
            return
        for message in self._metrics.due(time.monotonic(), all_of_it=all_of_it):
            self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            if self._link is None:
                self._outbox.clear()
                return
            message = self._outbox.popleft()
            try:
                self._link.send(wire.encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if len(self._outbox) < MAX_QUEUED_MESSAGES:  # a full deque would drop its newest for this, the oldest
                    self._outbox.appendleft(message)  # the agent is stopped or slow: try at the next beat
                return
            except OSError:
                return

    def _receive(self) -> bool:
        assert self._link is not None
        try:
            data = self._link.recv(wire.MAX_RANK_MESSAGE_BYTES + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            message = wire.decode_agent_to_rank(data)
        except wire.MessageError:
            return True
        if isinstance(message, wire.SaveNow):
            self._request = Request(message.request_id, message.leave)
        elif isinstance(message, wire.CaseStored):
            self._stored_cases[message.case_id] = message.verdict
            self._case_stored.set()
        elif isinstance(message, wire.SwitchesNow):
            self.switches = MappingProxyType(message.switches)
        elif isinstance(message, wire.PeersFailed):
            if self.peers_failed is not None:
                self.peers_failed(message)
        else:
            self.limits = message.limits
        return True

    def _write_flags(self) -> None:
        """This thread is the only writer of the flags. A person at a debugger's prompt is not a hang: mark it."""
        held = not _DEBUGGER_MODULES.isdisjoint(sys.modules) and self._debugger_holds()
        self._slot.set(board_layout.FLAGS, self._flags | board_layout.FLAG_DEBUGGER if held else self._flags)

    def _debugger_holds(self) -> bool:
        frame = sys._current_frames().get(self._main_thread_id)
        for _ in range(20):
            if frame is None:
                return False
            if frame.f_globals.get("__name__") in _DEBUGGER_MODULES:
                return True
            frame = frame.f_back
        return False


def connect() -> Session | NoSession:
    """The session that the environment describes. Trouble is warned about, and means no session: training goes on."""
    board_path, socket_path = os.environ.get("RSUP_BOARD"), os.environ.get("RSUP_RANK_SOCKET")
    if not board_path:
        return NoSession()
    try:
        local_rank = int(os.environ.get("RSUP_SLOT", os.environ["LOCAL_RANK"]))
        rank, attempt = int(os.environ["RANK"]), int(os.environ["RSUP_ATTEMPT"])
        board = Board.open(Path(board_path))
        slot = board.slot(local_rank)
    except (BoardError, KeyError, ValueError) as error:
        warnings.warn(f"rsup: this rank is not watched: {error}", RuntimeWarning, stacklevel=3)
        return NoSession()
    _permit_stacks(board.owner_pid, rank)
    slot.take_over(os.getpid(), attempt)
    slot.set(board_layout.CALLS, 1)
    now_ns = board_layout.monotonic_ns()
    for field in (board_layout.LIVENESS_NS, board_layout.MAIN_NS, board_layout.CLOSED_SINCE_NS):
        slot.set(field, now_ns)
    job_key = f"{os.environ.get('RSUP_JOB_ID', '')}.{os.environ.get('RSUP_RUN', '1')}"
    return Session(board, slot, _dial(socket_path), rank, attempt, job_key)


def _dial(socket_path: str | None) -> socket.socket | None:
    if not socket_path:
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.setblocking(False)
        link.connect(socket_path)
    except OSError as error:
        link.close()
        warnings.warn(f"rsup: no link to the agent: {error}", RuntimeWarning, stacklevel=4)
        return None
    return link


def _permit_stacks(agent_pid: int, rank: int) -> None:
    """Let the agent's py-spy trace us where Yama guards processes, and write stacks ourselves where nobody may."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, agent_pid, 0, 0, 0)
    folder = os.environ.get("RSUP_STACKS_DIR")
    if folder and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            file = open(Path(folder, f"rank-{rank}.txt"), "w")  # noqa: SIM115 - faulthandler keeps it for good
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
