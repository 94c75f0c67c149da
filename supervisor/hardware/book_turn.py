"""One turn of the loop as far as hardware is concerned: agents that join, evidence, people's verbs, time.

Everything it decides stands in `batch.records` and in itself until the loop has committed. Jobs that use what has changed are
told by events of their own (`DevicesKnown`), in the same transaction.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from rsup.supervisor.events import DevicesKnown
from rsup.supervisor.evidence import FOLLOWED_RANK, Evidence
from rsup.supervisor.hardware.device_machine import COUNTED, RanClean, Rows, Sighted, TimePassed, decide
from rsup.supervisor.hardware.identity import is_stand_in, normal_pci, seat
from rsup.supervisor.hardware.node_report import MAX_EVENTS, NodeReport, NodeReportReply, evidence_of, seating_of
from rsup.supervisor.hardware.policy import Policy
from rsup.supervisor.hardware.seat_index import SeatIndex
from rsup.supervisor.hardware.states import OUT, Dossier, Standing, avoided, clear_dossier, is_open
from rsup.supervisor.hardware.verbs import VerbRequest, Verdict, ask
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.records import DeviceSeen, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.states import AgentState, JobState, Phase, Role
from rsup.supervisor.store import Store
from rsup.supervisor.wire import AvoidedDevice, Device, Hello

Key = tuple[str, str]
"""Kind and name of a subject."""
CLEAN_EVERY_US = 60_000_000
SEEN_EVERY_US = 600_000_000
MAX_CLEAN_STEP_US = 3 * CLEAN_EVERY_US
"""Longer between two looks, and it was the supervisor that did not run."""


class Known(Protocol):
    """What a turn reads of the book; see `book.Book`."""

    store: Store
    policy: Policy
    accepts_injected: bool
    open: dict[Key, SubjectSaved]
    by_serial: dict[str, list[str]]
    names: dict[str, str]
    contested: dict[tuple[str, str], str]
    seats: SeatIndex
    models: dict[str, str]
    cleaned_us: int

    def dossier(self, key: Key, /) -> Dossier | None: ...

    def due(self, now_us: int, /) -> list[SubjectSaved]: ...

    def on_probation(self) -> list[SubjectSaved]: ...


class BookTurn:
    """Made by `Book.turn`. Raises `StoreError`."""

    def __init__(self, book: Known, batch: Batch) -> None:
        self._book, self._batch = book, batch
        self._policy = book.policy
        self.dossiers: dict[Key, Dossier] = {}
        self.seats: list[SeatSaved] = []
        self._moved = SeatIndex()
        self.names: dict[str, str] = {}
        self.models: dict[str, str] = {}
        self.claims: dict[tuple[str, str], str] = {}
        self.cleaned_us = 0
        self._changed: set[Key] = set()

    # ------------------------------------------------------------------------------------------------------------- agents

    def joined(self, hello: Hello) -> tuple[DevicesKnown, list[str]]:
        """An agent has said which devices it has: where they sit now, and what is known against them and its node; and lines
        about claims that cannot be true."""
        info = hello.agent
        if info.gone:
            return DevicesKnown(info.agent_id), []
        uuids = [device.uuid for device in info.devices]
        serials = [device.serial for device in info.devices if device.serial]
        lines: list[str] = []
        if any(not is_stand_in(uuid) for uuid in uuids):
            known = self._open_seats(uuids, serials, info.node)
            seating = seat(info.devices, info.node, info.boot_id, known, self._is_alive, self._batch.now.us)
            self._keep_seats(seating.seats, known)
            for uuid in uuids:
                self.claims[uuid, info.agent_id] = seating.contested.get(uuid, "")
            lines = [f"{why}: nothing that {info.node} says of it counts" for why in seating.contested.values()]
        for device in info.devices:
            self.models[device.uuid] = device.model
            self._find_record(device.uuid, device.serial, uuids)
        return self._known_of(info.agent_id, info.node, uuids), lines

    def _keep_seats(self, seats: list[SeatSaved], known: list[SeatSaved]) -> None:
        """Agents say `Hello` often: what was only seen again is not written each time."""
        seen = {(one.uuid, one.from_us): one for one in known}
        for one in seats:
            before = seen.get((one.uuid, one.from_us))
            same = before is not None and replace(one, seen_us=before.seen_us) == before
            if before is None or not same or one.seen_us - before.seen_us >= SEEN_EVERY_US:
                self.seats.append(one)
                self._moved.put(one)
                self._batch.records.append(one)

    def _open_seats(self, uuids: list[str], serials: list[str], node: str) -> list[SeatSaved]:
        """Of these boards and on that node, as this turn has changed them."""
        found = {(one.uuid, one.from_us): self._moved.get(one) or one for one in self._book.seats.find(uuids, serials, node)}
        found.update({(one.uuid, one.from_us): one for one in self._moved.find(uuids, serials, node)})
        return [one for one in found.values() if one.to_us is None]

    def _is_alive(self, uuid: str, node: str) -> bool:
        return any(
            agent.info.node == node and uuid in agent.devices
            for state in self._live_jobs()
            for agent in state.agents.values()
            if agent.reachable and (uuid, agent.info.agent_id) not in self._book.contested
        )

    def _live_jobs(self) -> Iterable[JobState]:
        return (state for state in self._batch.live() if state.phase is not Phase.ENDED)

    def _find_record(self, uuid: str, serial: str, here: list[str]) -> None:
        """A board whose record is kept under another UUID, which is not beside it on the same node, continues that."""
        if not serial or ("device", uuid) in self._book.open:
            return
        older = [name for name in self._book.by_serial.get(serial, ()) if name not in here]
        if older:
            self.names[uuid] = older[0]

    def _known_of(self, agent_id: str, node: str, uuids: list[str]) -> DevicesKnown:
        now_us = self._batch.now.us
        found = []
        for uuid in dict.fromkeys(uuids):
            saved = self._open_saved(("device", self._name(uuid)))
            one = None if saved is None or self._is_contested(uuid, agent_id) else avoided(saved, uuid, now_us)
            if one is not None:
                found.append(one)
        of_node = self._open_saved(("node", node))
        known: AvoidedDevice | None = None if of_node is None else avoided(of_node, node, now_us)
        return DevicesKnown(agent_id, found, known)

    def _is_contested(self, uuid: str, agent_id: str) -> str:
        claim = (uuid, agent_id)
        return self.claims[claim] if claim in self.claims else self._book.contested.get(claim, "")

    def recovered(self) -> None:
        """The supervisor has started anew: jobs hear what has changed while none ran. Their agents will say `Hello` again."""
        for state in list(self._live_jobs()):
            for agent_id, agent in state.agents.items():
                now = self._batch.get(state.key)
                if agent.role is Role.GONE or now is None:
                    continue
                self._remember(agent_id, agent)
                self._batch.decide(now, self._known_of(agent_id, agent.info.node, agent.devices))

    def _remember(self, agent_id: str, agent: AgentState) -> None:
        """What an agent's `Hello` had told of its devices, as far as seats tell it."""
        boards = [uuid for uuid in dict.fromkeys(agent.devices) if not is_stand_in(uuid)]
        known = {one.uuid: one for one in self._open_seats(boards, [], "")} if boards else {}
        for uuid in boards:
            sits = known.get(uuid)
            if sits is not None and sits.node != agent.info.node and self._is_alive(uuid, sits.node):
                self.claims[uuid, agent_id] = f"{uuid} is alive on node {sits.node}"
            elif sits is not None:
                self._find_record(uuid, sits.serial, boards)

    def _open_saved(self, key: Key) -> SubjectSaved | None:
        mine = self.dossiers.get(key)
        return self._book.open.get(key) if mine is None else mine.saved if is_open(mine.saved) else None

    def _name(self, uuid: str) -> str:
        return self.names.get(uuid) or self._book.names.get(uuid) or uuid

    # ----------------------------------------------------------------------------------------------------------- evidence

    def weigh(self) -> None:
        """All evidence that the turn has found, and what it makes of devices and nodes; then tell their jobs."""
        while self._batch.evidence:
            self._weigh(self._batch.evidence.pop(0))
        self._tell_jobs()

    def _weigh(self, evidence: Evidence) -> None:
        subject, serial, effect = evidence.subject, evidence.serial, COUNTED
        state = None if evidence.job is None else self._batch.get(evidence.job)
        agents = [] if state is None else list(state.agents.values())
        if evidence.kind == "device":
            serial = self._serial_of(evidence.subject) or evidence.serial
            holders = [agent for agent in agents if subject in agent.devices]
            effect = self._why_refused(evidence, serial, holders, state)
            if holders:
                evidence = replace(evidence, node=holders[0].info.node)
            if effect == COUNTED:
                subject = self._record_of(evidence.subject, serial)
        elif agents and all(agent.info.node != subject for agent in agents):
            effect = f"refused: job {evidence.job} has no such node"
        if effect == COUNTED and evidence.injected and not self._book.accepts_injected:
            effect = "inert: injected"
        self._decide_on(replace(evidence, subject=subject, serial=serial, at_us=self._time_of(evidence, state)), effect)

    def _decide_on(self, evidence: Evidence, effect: str) -> None:
        before = self._get((evidence.kind, evidence.subject), evidence.serial)
        generation = self._policy.generation(self._model(evidence.subject))
        after, rows = decide(before, Sighted(evidence, effect, generation), self._policy, self._batch.now.us)
        self._put(before, after, rows)
        if rows and effect == COUNTED and evidence.kind == "device":
            self._weigh_node(evidence, before.saved, after.saved)

    def reported(self, report: NodeReport) -> NodeReportReply:
        """A node's own root has said which boards it has, and what happened there."""
        listed = report.devices or []
        uuids = list(dict.fromkeys([*(one.uuid for one in listed), *(event.device for event in report.events if event.device)]))
        known = self._open_seats(uuids, [one.serial for one in listed if one.serial], report.node)
        seating, lines = seating_of(report, known, self._is_alive, self._batch.now.us)
        self._keep_seats(seating.seats, known)
        arrived = {stay.uuid for stay in seating.seats if stay.to_us is None and stay.from_us >= self._batch.now.us}
        self._batch.records += [_seen(device, report.node, self._batch.now.us) for device in listed if device.uuid in arrived]
        seats = self._open_seats(uuids, [], report.node)
        kinds: dict[str, int] = {}
        refused = 0
        for event in report.events[:MAX_EVENTS]:
            last_node = "" if not event.device else self._book.store.last_node(event.device)
            evidence = evidence_of(report, event, seats, last_node, self._batch.now.us)
            if isinstance(evidence, str):
                refused += 1
                lines += [evidence] if evidence else []
                continue
            before = len(self._batch.records)
            self._weigh(evidence)
            if len(self._batch.records) > before:
                kinds[event.kind] = kinds.get(event.kind, 0) + 1
        self._tell_jobs()
        new = sum(kinds.values())
        return NodeReportReply(new, len(report.events[:MAX_EVENTS]) - new - refused, lines, kinds)

    def _time_of(self, evidence: Evidence, state: JobState | None) -> int:
        """When it was seen, as far as a node's clock can be right: not before its job, and not yet to come."""
        earliest_us = 0 if state is None else state.created_us
        return min(max(evidence.at_us, earliest_us), self._batch.now.us)

    def _why_refused(self, evidence: Evidence, serial: str, holders: list[AgentState], state: JobState | None) -> str:
        """`counted`, or why evidence about a device is not believed. What nobody's job tells has no holder."""
        if evidence.job is None or evidence.code == FOLLOWED_RANK:  # that lightens only what the same job has said before
            return COUNTED
        if evidence.serial and serial and evidence.serial != serial:
            return f"refused: the board has serial {serial}, not {evidence.serial}"
        if not evidence.is_held or (state is not None and not holders):
            return f"refused: job {evidence.job} does not hold the device"
        doubts = [self._is_contested(evidence.subject, agent.info.agent_id) for agent in holders]
        if doubts and all(doubts):
            return f"refused: {doubts[0]}"
        return COUNTED

    def _weigh_node(self, evidence: Evidence, before: SubjectSaved, after: SubjectSaved) -> None:
        """What a device's evidence says of its node: all of it, where the device is the node's CPU; else that it is suspect."""
        if not evidence.node:
            return
        of_node = replace(evidence, kind="node", subject=evidence.node, serial="", node=evidence.node)
        if is_stand_in(evidence.subject):
            self._weigh(of_node)
        elif _is_bad(after) and not _is_bad(before):
            text = f"device {evidence.subject} is {after.state}: {after.reason}"
            told = {"source": "devices", "code": evidence.subject, "episode": f"device:{evidence.subject}", "text": text}
            self._weigh(replace(of_node, **told, share=1.0, count=1, is_total=False))

    def _serial_of(self, uuid: str) -> str:
        """Of the board, as its agent has told it."""
        sits = [one for one in self._open_seats([uuid], [], "") if one.uuid == uuid]
        return sits[-1].serial if sits else ""

    def _record_of(self, uuid: str, serial: str) -> str:
        """The UUID under which the board's record is kept."""
        if self._name(uuid) != uuid or not serial or ("device", uuid) in self.dossiers:
            return self._name(uuid)
        rows = self._book.store.subjects_named("device", [uuid], [serial])
        if any(row.subject == uuid for row in rows):
            return uuid
        older = [row for row in rows if not self._sits_beside(row.subject, uuid)]
        if older:
            self.names[uuid] = min(older, key=lambda row: row.since_us).subject
        return self._name(uuid)

    def _sits_beside(self, other: str, uuid: str) -> bool:
        """Whether two GPUs of one board are in use: then neither is the other under a new name."""
        return any(other in a.devices and uuid in a.devices for state in self._live_jobs() for a in state.agents.values())

    def _model(self, uuid: str) -> str:
        return self.models.get(uuid) or self._book.models.get(uuid, "")

    # -------------------------------------------------------------------------------------------------------------- verbs

    def ask(self, request: VerbRequest) -> Verdict:
        """What a person asks for. A dry run decides nothing."""
        name = self._record_of(request.subject, request.serial) if request.kind == "device" else request.subject
        before = self._get((request.kind, name), request.serial)
        last = self._last(before.saved)
        verdict = ask(before, replace(request, subject=name), last, self._policy, self._batch.now.us)
        if verdict.rows and not request.dry_run:
            self._put(before, verdict.dossier, verdict.rows)
            evidence = request.evidence
            if evidence is not None and evidence.kind == "device":
                self._weigh_node(evidence, before.saved, verdict.dossier.saved)
            self._tell_jobs()
        return verdict

    def _last(self, saved: SubjectSaved) -> TransitionSaved | None:
        changes = [record for record in self._batch.records if isinstance(record, TransitionSaved)]
        mine = [one for one in changes if (one.kind, one.subject) == (saved.kind, saved.subject)]
        if mine:
            return mine[-1]
        return self._book.store.last_transition(saved.kind, saved.subject) if saved.version else None

    # --------------------------------------------------------------------------------------------------------------- time

    def time_passes(self) -> None:
        """What has expired, and clean run time of what is on probation."""
        now_us = self._batch.now.us
        for saved in self._book.due(now_us):
            self._decide((saved.kind, saved.subject), TimePassed(self._policy.generation(self._model(saved.subject))))
        passed_us = now_us - self._book.cleaned_us
        if passed_us >= CLEAN_EVERY_US:
            self.cleaned_us = now_us
            if passed_us <= MAX_CLEAN_STEP_US:
                for saved in self._book.on_probation():
                    if self._is_in_use(saved):
                        self._decide((saved.kind, saved.subject), RanClean(passed_us))
        self._tell_jobs()

    def _decide(self, key: Key, event: TimePassed | RanClean) -> None:
        before = self._get(key, "")
        after, rows = decide(before, event, self._policy, self._batch.now.us)
        self._put(before, after, rows)

    def _is_in_use(self, saved: SubjectSaved) -> bool:
        names = {saved.subject, *(uuid for uuid, name in self._book.names.items() if name == saved.subject)}
        for state in self._live_jobs():
            for agent in state.agents.values():
                if state.phase is not Phase.RUNNING or agent.role is not Role.ACTIVE or not agent.live_attempt:
                    continue
                if agent.info.node in names if saved.kind == "node" else names.intersection(_used(agent)):
                    return True
        return False

    # ------------------------------------------------------------------------------------------------------------ keeping

    def _get(self, key: Key, serial: str) -> Dossier:
        """The dossier as decided so far, with its evidence."""
        found = self.dossiers.get(key) or self._book.dossier(key)
        if found is not None:
            return found
        store = self._book.store
        saved = self._book.open.get(key) or next(iter(store.subjects_named(key[0], [key[1]], [])), None)
        rows = {row.fingerprint: row for row in store.evidence_about(*key)}
        return Dossier(saved or clear_dossier(*key, serial).saved, rows)

    def _put(self, before: Dossier, after: Dossier, rows: Rows) -> None:
        if not rows:
            return
        key = (after.saved.kind, after.saved.subject)
        self.dossiers[key] = after
        self._batch.records += rows
        if after.saved.version != before.saved.version:
            self._changed.add(key)

    def _tell_jobs(self) -> None:
        """Jobs that have what has changed know it before their next attempt."""
        changed, self._changed = self._changed, set()
        if not changed:
            return
        for state in list(self._live_jobs()):
            for agent_id, agent in state.agents.items():
                has = {("device", self._name(uuid)) for uuid in agent.devices} | {("node", agent.info.node)}
                now = self._batch.get(state.key)
                if agent.role is not Role.GONE and has & changed and now is not None:
                    self._batch.decide(now, self._known_of(agent_id, agent.info.node, agent.devices))


def _used(agent: AgentState) -> list[str]:
    """Devices that its ranks run on: what they said, else those that come first."""
    return list(agent.devices_used.values()) or agent.devices[: agent.info.num_ranks]


def _seen(device: Device, node: str, now_us: int) -> DeviceSeen:
    bus = normal_pci(device.pci_bus_id)
    return DeviceSeen(device.uuid, now_us, node, device.model, device.serial, device.board, bus, device.vbios, device.driver)


def _is_bad(saved: SubjectSaved) -> bool:
    return saved.state == Standing.SUSPECT or Standing(saved.state) in OUT
