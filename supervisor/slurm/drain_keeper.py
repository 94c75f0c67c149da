"""The thread that keeps SLURM and the gates in step with what is known of hardware.

Each round: read what speaks against nodes, look at SLURM, decide (`drain_plan`), keep what was noted, publish the snapshot,
then take the steps that the mode allows. Only the supervisor that leads has such a thread, and it changes nothing once the
store is in doubt. A scheduler that hangs or is not there costs a round its time limit; jobs, and the loop, do not notice.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from queue import SimpleQueue

from msgspec import Struct
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rsup.supervisor import wire
from rsup.supervisor.hardware.hostlist import fold
from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.records import DrainNoted, Record
from rsup.supervisor.slurm import drain_rows, drain_words
from rsup.supervisor.slurm.drain_plan import Plan, decide
from rsup.supervisor.slurm.drain_status import Counters, status_of
from rsup.supervisor.slurm.drain_terms import Ground, PlanSettings, View
from rsup.supervisor.slurm.drain_words import Answer, Word
from rsup.supervisor.slurm.guard import HOUR_US, WITH_THOSE_BEFORE
from rsup.supervisor.slurm.lookout import ClusterFile, Lookout
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog, logs_of, noted
from rsup.supervisor.slurm.said_once import SaidOnce
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.snapshot import Publisher, Snapshot, content_of, is_due
from rsup.supervisor.slurm.step_taker import StepTaker
from rsup.supervisor.wire import RsupError

LEAST_GAP_S = 0.5
"""Between two rounds, however often something changes."""
KEPT_WITHIN_S = 10.0
STOP_LOOK_S = 0.2

_log = logging.getLogger(__name__)


class KeeperSettings(Struct, frozen=True):
    """Of one cluster."""

    cluster: str
    plan: PlanSettings = PlanSettings()
    every_s: float = 10.0
    expects_slurm: bool = True
    """Somebody wants nodes drained, or SLURM is set up here: else its absence is nothing to speak of."""


class NotKept(RsupError):
    """What was to be noted could not be written now."""


class DrainKeeper:
    """`keep` hands records to the loop; `doubt` says why nothing may be changed now, empty if it may. `publisher` makes what
    signs snapshots; while it raises `RsupError` gates get none (`no_snapshot` says why), and the rest goes on. From any thread:
    `snapshot`, `no_snapshot`, `slurm_nodes`, `status`, `ask`, `wake`, `counters`."""

    def __init__(
        self,
        engine: Engine,
        scontrol: Scontrol,
        publisher: Callable[[], Publisher],
        keep: "Callable[[Sequence[Record]], Future[bool]]",
        guard: Guard,
        settings: KeeperSettings,
        doubt: Callable[[], str] = lambda: "",
        remembered: ClusterFile | None = None,
    ) -> None:
        self._engine, self._make_publisher = engine, publisher
        self._publisher: Publisher | None = None
        self._keep, self._guard, self._settings, self._doubt = keep, guard, settings, doubt
        self.snapshot: Snapshot | None = None
        self.no_snapshot = ""
        self.slurm_nodes: frozenset[str] = frozenset()
        self.counters = Counters()
        self._status: dict[str, object] = {}
        self._logs: dict[str, NodeLog] | None = None
        self._noted_us = 0
        """Of the newest note that was there at the start."""
        self._admitted_us: list[int] = []
        self._next_number = 1
        self._unkept: list[DrainNoted] = []
        self._said = SaidOnce(_log)
        self._lookout = Lookout(
            scontrol, settings.cluster, self._said, wire.now_us, is_expected=settings.expects_slurm, remembered=remembered
        )
        self._taker = StepTaker(scontrol, self._said, wire.now_us)
        self._words: SimpleQueue[tuple[Word, Future[Answer]]] = SimpleQueue()
        self._heard: list[tuple[Word, Future[Answer], Answer]] = []
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rsup-drains", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is being taken. The engine is ours to close."""
        self._stopped = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=15)
        self._engine.dispose()

    def wake(self) -> None:
        """Something has changed."""
        self._wake.set()

    def status(self) -> dict[str, object]:
        """`drain_status.status_of` after the last round; empty before the first."""
        return self._status

    def ask(self, word: Word) -> "Future[Answer]":
        """An operator's word; the future hears what became of it."""
        future: Future[Answer] = Future()
        self._words.put((word, future))
        self._wake.set()
        return future

    # ------------------------------------------------------------------------------------------------------------ rounds

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            try:
                self.round()
                self._said.over("round")
            except (SQLAlchemyError, RsupError) as error:
                self._said.say("round", f"nothing is decided about nodes now, gates keep what they have: {_line(error)}")
                self._refuse_words(f"nothing was done: {_line(error)}")
            except Exception:  # a fault of ours must not end the thread: the next round may do
                _log.exception("a fault of rsup itself, in the decisions about nodes")
                self._refuse_words("nothing was done; the supervisor's log says why")
            time.sleep(min(LEAST_GAP_S, self._settings.every_s))
            self._wake.wait(self._settings.every_s)
        self._refuse_words("nothing was done: the supervisor stops")

    def round(self) -> None:
        """One round. Raise `SQLAlchemyError`, `RsupError` where nothing can be decided."""
        self._read_notes()
        assert self._logs is not None
        view = self._look(self._logs)
        if view.nodes is not None:
            self.slurm_nodes = frozenset(view.nodes)
        now_us = wire.now_us()
        with self._engine.connect() as connection:
            grounds = drain_rows.read_grounds(connection, now_us)
            known = drain_rows.known_nodes(connection, now_us) if view.nodes is None else []
        self._heard = heard = self._hear(view, now_us)
        plan = self._decide(grounds, view, known, now_us + 2)
        self._kept(plan.notes)
        self._logs = plan.logs
        self._tell(plan)
        self._publish(grounds, plan, now_us)
        self._take(plan)
        self.counters.rounds += 1
        mode = self._settings.plan.mode
        self._status = status_of(
            mode,
            self._lookout.cluster,
            view,
            plan,
            self._logs,
            self.snapshot,
            self._lookout.trouble,
            self.counters.rounds,
            self._taker.failing.values(),
            self.no_snapshot,
            is_expected=mode != "off" and self._settings.expects_slurm,
        )
        for word, future, told in heard:
            self._reply(word, future, told)
        self._heard = []

    def _read_notes(self) -> None:
        if self._logs is None:
            with self._engine.connect() as connection:
                notes = drain_rows.read_notes(connection)
                for node, kind, detail, at_us in drain_rows.read_gate_words(connection, wire.now_us()):
                    self.counters.watch.decided(node, kind, detail, at_us)
            self._logs = logs_of(notes)
            self._noted_us = max((note.at_us for note in notes), default=0)
            admissions = [note for note in notes if note.what == "admitted"]
            self._admitted_us = [note.at_us for note in admissions]
            self._next_number = 1 + max((note.number for note in admissions), default=0)
        if self._unkept:
            self._kept([])

    def _look(self, logs: Mapping[str, NodeLog]) -> View:
        plan = self._settings.plan
        if plan.mode == "off":
            return View()
        return self._lookout.look(logs, reservations_too=plan.quarantine_by == "reservation", noted_us=self._noted_us)

    def _decide(self, grounds: Sequence[Ground], view: View, known: Sequence[str], now_us: int) -> Plan:
        assert self._logs is not None
        self._admitted_us = [at_us for at_us in self._admitted_us if now_us - at_us < HOUR_US]
        lately, number, settings = self._admitted_us, self._next_number, self._settings.plan
        gates = self.counters.watch.seen()
        return decide(grounds, view, self._logs, lately, number, settings, self._guard, known, now_us, gates)

    # ------------------------------------------------------------------------------------------------------------- words

    def _hear(self, view: View, now_us: int) -> list[tuple[Word, "Future[Answer]", Answer]]:
        """Take up what operators have said: their words are notes, and the plan does the rest."""
        words, heard = self._taken(), []
        for number, (word, future) in enumerate(words):
            assert self._logs is not None
            at_us = now_us - 4 * (len(words) - number)  # before the plan's own notes, and in order
            told = drain_words.answer(
                word,
                view,
                self._logs,
                self._admitted_us,
                self._next_number,
                self._guard,
                self._settings.plan.mode,
                self._lookout.trouble,
                at_us,
            )
            if told.notes and not word.dry_run:
                try:
                    self._kept(told.notes)
                except NotKept as error:
                    told = Answer(f"{error}; nothing was done")
                else:
                    for note in told.notes:
                        self._logs[note.node] = noted(self._logs.get(note.node, NOTHING), note)
            heard.append((word, future, told))
        return heard

    def _reply(self, word: Word, future: "Future[Answer]", told: Answer) -> None:
        assert self._logs is not None
        trouble = self._taker.trouble(word.nodes) or self._lookout.trouble or self._doubt()
        told = drain_words.outcome(word, told, self._logs, trouble)
        if future.set_running_or_notify_cancel():
            future.set_result(told)

    def _taken(self) -> "list[tuple[Word, Future[Answer]]]":
        found = []
        while not self._words.empty():
            found.append(self._words.get())
        return found

    def _refuse_words(self, why: str) -> None:
        """Words that a round which failed has left."""
        heard, self._heard = self._heard, []
        for word, future, told in heard:  # taken up, and then the round failed
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_result(drain_words.outcome(word, told, self._logs or {}, why))
        for _, future in self._taken():
            if future.set_running_or_notify_cancel():
                future.set_result(Answer(why))

    # ------------------------------------------------------------------------------------------------------------ keeping

    def _kept(self, notes: Sequence[DrainNoted]) -> None:
        """Have them written, with those that could not be before. Raise `NotKept`."""
        records = [*self._unkept, *notes]
        if not records:
            return
        try:
            future = self._keep(records)
        except RsupError as error:
            raise NotKept(str(error)) from None
        deadline_s = time.monotonic() + KEPT_WITHIN_S
        kept = False
        while not kept:
            try:
                kept = future.result(STOP_LOOK_S)
            except NotInTime:
                if not self._stopped and time.monotonic() < deadline_s:
                    continue
            if not kept:
                raise NotKept("the store cannot be written now")
        self._unkept = []
        for note in notes:
            self.counters.count(note)
            if note.what == "admitted":
                self._admitted_us.append(note.at_us)
                self._next_number = max(self._next_number, note.number + 1)

    def _take(self, plan: Plan) -> None:
        assert self._logs is not None
        may_go_on = lambda: not (self._stopped or self._doubt())  # noqa: E731
        for step, notes in self._taker.take_all(plan.steps, self._logs, may_go_on):
            self._wake.set()  # and look what has come of it
            for note in notes:
                self._logs[note.node] = noted(self._logs.get(note.node, NOTHING), note)
                _tell_other_hand(note)
            done = [note for note in notes if note.what != "yielded"]
            if done and step.kind != "renew":
                _log.warning("%s in SLURM: %s (%s)", done[0].what, fold(note.node for note in done), step.reason or step.why)
            try:
                self._kept(notes)
            except NotKept:  # what was done is done: it is noted when the store can be written
                self._unkept += notes
        self.counters.failed = self._taker.num_failed

    def _publish(self, grounds: Sequence[Ground], plan: Plan, now_us: int) -> None:
        if self._publisher is None:
            try:
                self._publisher = self._make_publisher()
            except RsupError as error:
                self.no_snapshot = str(error)
                self._said.say("key", f"{error}; until then gates get no snapshot", logging.ERROR)
                return
            self.no_snapshot = ""
            self._said.over("key", "gates get their snapshot again")
        content = content_of(self._lookout.cluster, grounds, plan)
        if self._lookout.cluster:
            self._said.over("cluster", "gates are told the cluster's name again")
        elif self._settings.expects_slurm:
            self._said.say("cluster", "gates believe no snapshot that names no cluster: start rsup serve with --cluster NAME")
        if is_due(self.snapshot, content, now_us):
            self.snapshot = self._publisher.publish(content, now_us)

    # ------------------------------------------------------------------------------------------------------------- saying

    def _tell(self, plan: Plan) -> None:
        for note in plan.notes:
            _tell_other_hand(note)
        held = plan.admission.held
        if held:
            name, why = next(iter(sorted(held.items())))
            why = why.removesuffix(WITH_THOSE_BEFORE)  # of this round alone: the next would say the same anew
            text = f"the guard holds back {fold(sorted(held))}: {why}; gates accept them; see rsup slurm status"
            self._said.say("guard", text if len(held) > 1 else f"the guard holds back {name}: {why}; see rsup slurm status")
        else:
            self._said.over("guard", "the guard holds nothing back any more")
        if plan.unknown:
            self._said.say("unknown", f"SLURM knows no node {fold(plan.unknown)}, which jobs were to be kept from")
        for step in plan.proposals:
            self._said.say(
                f"{step.kind} {step.nodes}", f"would {step.kind} {fold(step.nodes)}: {step.reason or step.why}", logging.INFO
            )


def _tell_other_hand(note: DrainNoted) -> None:
    if note.what == "resumed":
        _log.warning("node %s: somebody else let it run (%s): it is left alone until new evidence", note.node, note.reason)
    elif note.what == "yielded":
        _log.warning("node %s: %s has drained it for another reason: the drain is theirs", note.node, note.principal or "?")


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
