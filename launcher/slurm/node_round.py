"""The two halves of a healthcheck's round: looking at this node (`look`), and speaking to the supervisor (`speak`)."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rsup.launcher.slurm.gate import blindness, read_key
from rsup.launcher.slurm.gres_order import numbers, read_gres
from rsup.launcher.slurm.node_devices import DriverHangs, Found, read_devices
from rsup.launcher.slurm.node_events import jobs_by_device, reading_events, xid_events
from rsup.launcher.slurm.node_inventory import Numbering, merged, missing, read_content
from rsup.launcher.slurm.node_link import NodeLink, Reply
from rsup.launcher.slurm.node_settings import (
    ROOT_VARIABLE,
    UNUSABLE,
    NodePlaces,
    NodeProblem,
    NodeSettings,
    boot_id,
    read_trusted,
    write_atomically,
)
from rsup.launcher.slurm.node_spool import NodeEvent, NodeSpool, now_us
from rsup.launcher.slurm.node_token import token_problem
from rsup.launcher.slurm.snapshot_file import MAX_SNAPSHOT_BYTES, Snapshot, read_snapshot
from rsup.launcher.slurm.told import read_told, write_told

NVML_WITHIN_S = 10.0
BATCH = 200
"""Events in one report; the supervisor takes 256."""
MAX_BATCHES = 10
INVENTORY_EVERY_S = 3600.0
GATE_EVERY_S = 600.0
"""So often a gate that sees says so; one that does not says it in each round."""
Devices = list[dict[str, Any]] | None
"""Of the inventory; None: nobody could look in this boot."""
NOT_UNDERSTOOD = (400, 422)
NOT_TAKEN = (*NOT_UNDERSTOOD, 413)


@dataclass
class Round:
    """One run of the healthcheck. `said`: what went well, `problems`: what did not, for its one line."""

    places: NodePlaces
    settings: NodeSettings
    node: str
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    """Events that were not taken even alone, and stay in the spool."""
    is_heard: bool = False
    """A supervisor has answered that leads."""

    def __post_init__(self) -> None:
        self.boot = boot_id(self.places.root)
        self.spool = NodeSpool(self.places.spool)

    # ------------------------------------------------------------------------------------------------------- this node

    def look(self) -> None:
        """Renew the inventory, and spool what is new in the kernel's log and in what NVML says. Raise OSError where /run or the
        spool cannot be written."""
        told, found = read_told(self.places, self.boot), list[NodeEvent]()
        old = read_content(self.places.inventory)
        inventory: Mapping[str, Any] = merged(None if isinstance(old, str) else old, self.boot, [])
        jobs = jobs_by_device(self.places, self.boot)
        try:
            read = read_devices(self.places, self.node, NVML_WITHIN_S)
            inventory = merged(None if isinstance(old, str) else old, self.boot, read.devices, self._numbering(read))
            write_atomically(self.places.inventory, json.dumps(inventory).encode())
            found += reading_events(read.readings, self.boot, jobs)
            gone = missing(inventory)
            found += [self._event(f"missing:{self.boot}:{uuid}", "missing", uuid, jobs, "not there any more") for uuid in gone]
            self.said.append(f"{len(read.devices)} GPUs" + (f", {len(gone)} missing" if gone else ""))
        except DriverHangs as problem:
            found.append(self._event(f"unreadable:{self.boot}", "unreadable", None, {}, str(problem)))
            self.problems.append(str(problem))
        except NodeProblem as problem:
            self.problems.append(str(problem))
        log = list(xid_events(self.places, inventory, self.boot, told.sequence, jobs))
        found += [event for _, event in log if event is not None]
        sequence = log[-1][0] if log else told.sequence
        new = [event for event in found if event.key not in told.keys]
        for event in new:
            self.spool.add(event)
        lasting = [event.key for event in new if event.kind != "xid"]
        if lasting or sequence != told.sequence:
            write_told(self.places, told.more(sequence, lasting))
        if new:
            self.said.append(f"{len(new)} new events")

    def _numbering(self, read: Found) -> Numbering | None:
        """How SLURM numbers these GPUs; None: as they are, by the operator's word, or because it numbers none."""
        if read.is_listed or self.settings.whole_node:
            return None
        gres = read_gres(os.environ, self.node)
        return lambda devices: numbers(devices, gres)

    def _event(self, key: str, kind: str, device: str | None, jobs: Mapping[str, str], detail: str) -> NodeEvent:
        return NodeEvent(key, now_us(), kind, device, None, detail, jobs.get(device or ""))

    # -------------------------------------------------------------------------------------------------- the supervisor

    def speak(self) -> None:
        """Fetch the snapshot from the first supervisor that has one, and deliver the spool there."""
        if not self.settings.supervisor:
            self.problems.append("no supervisor is named in node.toml: the gate lets all jobs in")
            return
        silent: list[str] = []
        unbelieved: list[NodeLink] = []
        token = self._token()
        for address in self.settings.supervisor:
            try:
                link = NodeLink(address, token, self.settings.ca_file)
                doubt = self._fetch(link)
            except NodeProblem as problem:
                silent.append(str(problem))
                continue
            if doubt:
                silent.append(doubt)
                unbelieved.append(link)
                continue
            self.is_heard = True
            self.said += silent  # another one leads, or stands in for it
            self._tell_gate(link)
            self._deliver(link)
            return
        self.problems += silent
        for link in unbelieved:  # no event goes there, but somebody should hear that this gate is blind
            self._tell_gate(link, "; ".join(silent))

    def _token(self) -> str:
        path = self.places.under(self.settings.token_file)
        try:
            token = read_trusted(path, 4096).decode("ascii", "replace").strip()
            mode = path.stat().st_mode
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise NodeProblem(f"cannot read {path}: {error.strerror}") from None
        if problem := token_problem(token, mode, self.node):
            self.problems.append(f"{path} {problem}")
        return token

    def _fetch(self, link: NodeLink) -> str:
        """Take that supervisor's snapshot, which counts only if its key signed it; why it does not count, else empty. Raise
        `NodeProblem` where it has none."""
        have, etag = self._current()
        reply = link.snapshot(etag)
        if reply.status == 304 and have is not None:
            self._confirm(have.serial, etag)
            self.said.append(f"snapshot {have.serial} is the newest")
            return ""
        if reply.status != 200:
            raise NodeProblem(_refused(link, "snapshot", reply))
        try:
            new = self._believed(link, reply, have)
        except NodeProblem as problem:
            return str(problem)
        self._confirm(new.serial, reply.etag, have)  # first: a job that comes in between finds either of them confirmed
        write_atomically(self.places.snapshot, reply.data)
        num = len(new.refused_nodes)
        self.said.append(f"snapshot {new.serial}: {num} node{'s'[: num != 1]} refused")
        return ""

    def _believed(self, link: NodeLink, reply: Reply, have: Snapshot | None) -> Snapshot:
        new = read_snapshot(reply.data, read_key(self.places, self.settings))
        if self.settings.cluster and new.cluster and new.cluster != self.settings.cluster:
            raise NodeProblem(f"{link.address} speaks for cluster {new.cluster}, this is {self.settings.cluster}")
        if have is not None and new.serial < have.serial and new.made_us <= have.made_us:
            raise NodeProblem(f"{link.address} sends snapshot {new.serial}, older than {have.serial}, which we have")
        return new

    def _tell_gate(self, link: NodeLink, unbelieved: str = "") -> None:
        """Tell whether this node's gate sees: it lets jobs in when it does not, so that nobody else would notice."""
        environ = {ROOT_VARIABLE: str(self.places.root), "SLURMD_NODENAME": self.node}
        trouble = blindness(environ, self.settings)
        if trouble and not unbelieved and not self.problems:
            self.problems.append(f"the gate decides nothing: {trouble}")
        if unbelieved and not trouble:
            trouble = f"it goes by an older snapshot, since: {unbelieved}"
        gate = {"mode": self.settings.mode, "trouble": trouble[:500]}
        path, now_s = self.places.run / "gate-told.json", time.clock_gettime(time.CLOCK_BOOTTIME)
        if not gate["trouble"]:
            with suppress(*UNUSABLE):
                told = json.loads(read_trusted(path, 1 << 16))
                if told["gate"] == gate and told["boot_id"] == self.boot and now_s - told["boottime_s"] < GATE_EVERY_S:
                    return
        try:
            reply = link.report(self.node, self.boot, None, [], gate)
        except NodeProblem as problem:
            self.problems.append(str(problem))
            return
        if _is_good(reply):
            write_atomically(path, json.dumps({"gate": gate, "boot_id": self.boot, "boottime_s": now_s}).encode())
        else:
            self.problems.append(_refused(link, "report", reply))

    def _current(self) -> tuple[Snapshot | None, str]:
        """The snapshot that lies here, if it is sound, and the ETag with which it came."""
        with suppress(*UNUSABLE):
            key = read_key(self.places, self.settings)
            have = read_snapshot(read_trusted(self.places.snapshot, MAX_SNAPSHOT_BYTES), key)
            etag = ""
            with suppress(*UNUSABLE):
                confirmed = json.loads(read_trusted(self.places.confirmed, 4096))
                etag = str(confirmed["etag"]) if confirmed["serial"] == have.serial else ""
            return have, etag
        return None, ""

    def _confirm(self, serial: int, etag: str, replaced: Snapshot | None = None) -> None:
        """By the boot clock: the gate measures the snapshot's age with it. `before` has that of the one which is replaced."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        before: dict[str, float] = {}
        with suppress(*UNUSABLE):
            old = json.loads(read_trusted(self.places.confirmed, 4096))
            if replaced is not None and (old["boot_id"], old["serial"]) == (self.boot, replaced.serial):
                before = {str(replaced.serial): float(old["boottime_s"])}
        confirmed = {"boot_id": self.boot, "boottime_s": now_s, "serial": serial, "etag": etag, "before": before}
        write_atomically(self.places.confirmed, json.dumps(confirmed).encode())

    def _deliver(self, link: NodeLink) -> None:
        content = read_content(self.places.inventory)
        devices: Devices = None if isinstance(content, str) or content["boot_id"] != self.boot else content["devices"]
        num_told = 0
        for turn in range(MAX_BATCHES):
            pending = [one for one in self.spool.pending(BATCH + len(self.kept)) if one[0] not in self.kept]
            if not pending and (turn or not self._inventory_is_due(devices)):
                break
            reply = link.report(self.node, self.boot, devices, [event for _, event in pending])
            if reply.status in NOT_TAKEN and devices is not None:
                if pending:  # is it the events, or what the node has?
                    reply = link.report(self.node, self.boot, devices, [])
                if reply.status in NOT_TAKEN:
                    self.problems.append(
                        f"{_refused(link, f'inventory of {len(devices)} devices', reply)}; events go without it"
                    )
                    devices = None
                if pending and (devices is None or _is_good(reply)):
                    reply = link.report(self.node, self.boot, None, [event for _, event in pending])
            if reply.status in NOT_TAKEN:
                num_told += self._deliver_parts(link, pending)
            elif _is_good(reply):
                self.spool.remove([name for name, _ in pending])
                num_told += len(pending)
            else:
                self.problems.append(_refused(link, "report", reply))
                return
            if devices is not None:
                self._inventory_told(devices)
        if num_told:
            self.said.append(f"{num_told} events delivered")
        if lost := self.spool.take_lost():
            self.problems.append(f"{lost} events had no room in the spool")

    def _deliver_parts(self, link: NodeLink, refused: Sequence[tuple[str, dict[str, object]]]) -> int:
        """One event that the supervisor does not understand must not hold up the others: it is dropped, and said. `refused`:
        what it has not taken in one report; how many of them it takes."""
        num_told, half = 0, len(refused) // 2
        for part in filter(None, (refused[:half], refused[half:])):
            reply = link.report(self.node, self.boot, None, [event for _, event in part])
            if _is_good(reply):
                num_told += len(part)
                self.spool.remove([name for name, _ in part])
            elif reply.status in NOT_TAKEN and len(part) > 1:
                num_told += self._deliver_parts(link, part)
            elif reply.status in NOT_UNDERSTOOD:
                self.problems.append(f"event {str(part[0][1].get('key'))[:100]} dropped: {reply.text}")
                self.spool.remove([part[0][0]])
            elif reply.status in NOT_TAKEN:  # by whatever stands between: it stays, and is in nobody's way
                self.problems.append(_refused(link, f"event {str(part[0][1].get('key'))[:100]}", reply))
                self.kept.add(part[0][0])
            else:
                raise NodeProblem(_refused(link, "report", reply))
        return num_told

    def _inventory_is_due(self, devices: Devices) -> bool:
        """Whether it has changed since it was told, or that was long ago: a supervisor with a new store must learn it."""
        if devices is None:
            return False
        with suppress(*UNUSABLE):
            told = json.loads(read_trusted(self.places.run / "reported.json", 1 << 20))
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(told["boottime_s"])
            return told["devices"] != devices or told["boot_id"] != self.boot or age_s > INVENTORY_EVERY_S
        return True

    def _inventory_told(self, devices: Devices) -> None:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        told = {"boot_id": self.boot, "boottime_s": now_s, "devices": devices}
        write_atomically(self.places.run / "reported.json", json.dumps(told).encode())


def _is_good(reply: Reply) -> bool:
    return 200 <= reply.status < 300


def _refused(link: NodeLink, what: str, reply: Reply) -> str:
    return f"{link.address} refuses the {what}: {reply.status} {reply.text}".rstrip()
