"""What is to be done about nodes in SLURM, from what speaks against them and what SLURM shows. Pure.

    grounds (the history) + SLURM's nodes + our notes -> notes, what gates are told, steps to take or to propose

A node is refused to jobs once the guard has let it pass, and drained where the history allows that (`may_drain`). Nobody else's
hand is overruled: a reason that is not ours stays, a node that somebody else has resumed is left alone until new evidence or
an operator's word, and only a drain of ours is ended. Releases pass no guard.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.guard import Admission, admit
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog, noted
from rsup.supervisor.slurm.scheduler_text import RESERVATION, NodeSeen, reason_text

ADDED_WEIGHT = 1000
"""Suspects come after all nodes whose weights differ by less."""


class Ground(Struct, frozen=True):
    """One device or node that speaks against a node."""

    kind: str
    subject: str
    """The UUID that the device has now, or the node's name."""
    node: str
    state: str
    reason: str
    refuses: bool = True
    """Jobs are to be kept off; else it only comes last."""
    may_drain: str = ""
    newest_us: int = 0
    """Of its evidence, and of operators' words."""
    since_us: int = 0
    until_us: int | None = None
    serial: str = ""
    version: int = 0

    @property
    def text(self) -> str:
        """For a reason."""
        what = "" if self.kind == "node" else f"{self.subject[:12]} "
        return f"{what}{self.state.replace('_', ' ')}: {self.reason}"


class PlanSettings(Struct, frozen=True):
    """As in `config.Settings`."""

    mode: str = "propose"
    quarantine_by: str = "drain"
    bad_gpu: str = "drain"
    avoid_suspects: bool = False


class Step(Struct, frozen=True):
    """One thing to do to some nodes: `drain`, `undrain`, `reserve`, `unreserve`, `weigh`, `unweigh`."""

    kind: str
    nodes: tuple[str, ...]
    reason: str = ""
    """Of `drain`: what SLURM is to show; of `undrain`: that which it must still show (each node's: in its log)."""
    why: str = ""
    weight: int = 0
    by_word: bool = False
    """An operator asked for it: done in mode `propose` too."""


class View(Struct, frozen=True):
    """What is known of the scheduler. `nodes` None: it has not answered, or is not asked."""

    nodes: Mapping[str, NodeSeen] | None = None
    reservations: frozenset[str] | None = None
    is_stale: bool = False
    """It is an earlier answer: good for counting, not for seeing what others do, and no ground for steps."""
    has_forgotten: bool = False
    """SLURM was started anew since the last look: drains that are gone were lost with its state, nobody has ended them."""


class Plan(Struct, frozen=True):
    """What follows. `notes` are to be kept before anything else is done."""

    notes: list[DrainNoted] = []
    steps: list[Step] = []
    proposals: list[Step] = []
    admission: Admission = Admission()
    refused: dict[str, int] = {}
    """Nodes that gates refuse, and the number of each refusal."""
    left_alone: dict[str, str] = {}
    """Nodes that would be refused, but that somebody has let run knowingly: who."""
    waiting: dict[str, str] = {}
    """Nodes that would be refused but for what SLURM shows of them: that."""
    unknown: list[str] = []
    """Nodes that would be refused, and that SLURM does not know."""
    logs: dict[str, NodeLog] = {}


class _Decision:
    """One call of `decide`."""

    def __init__(self, view: View, logs: Mapping[str, NodeLog], now_us: int) -> None:
        self.view, self.now_us = view, now_us
        self.logs = dict(logs)
        self.notes: list[DrainNoted] = []

    def log(self, node: str) -> NodeLog:
        return self.logs.get(node, NOTHING)

    def note(self, node: str, what: str, *, number: int = 0, reason: str = "", principal: str = "") -> None:
        note = DrainNoted(node, self.now_us, what, number, reason, principal)
        self.notes.append(note)
        self.logs[node] = noted(self.log(node), note)

    def seen(self, node: str) -> NodeSeen | None:
        return None if self.view.nodes is None or self.view.is_stale else self.view.nodes.get(node)


def decide(
    grounds: Iterable[Ground],
    view: View,
    logs: Mapping[str, NodeLog],
    admitted_us: Sequence[int],
    next_number: int,
    settings: PlanSettings,
    guard: Guard,
    known_nodes: Sequence[str],
    now_us: int,
) -> Plan:
    """The plan. `admitted_us`: when nodes were admitted lately; `known_nodes`: those that stand for SLURM's while it is not
    known."""
    at = _Decision(view, logs, now_us)
    by_node: dict[str, list[Ground]] = {}
    for ground in grounds:
        by_node.setdefault(ground.node, []).append(ground)
    against = {node: found for node, all_ in by_node.items() if node and (found := [g for g in all_ if g.refuses])}
    for node in sorted({*at.logs, *against}):
        _observe(at, node, against.get(node, []))
    left_alone = {n: at.log(n).left_alone_by for n, found in against.items() if at.log(n).is_left_alone(_newest(found))}
    wanted = {*against, *(node for node, log in at.logs.items() if log.wanted)} - left_alone.keys()
    for node, log in sorted(at.logs.items()):
        if log.number and node not in wanted:
            at.note(node, "cleared")
    unknown = sorted(n for n in wanted if view.nodes is not None and n not in view.nodes)
    waiting = _waiting(at, wanted)
    admission = _admit(at, wanted - waiting.keys() - set(unknown), against, admitted_us, guard, known_nodes)
    for number, node in enumerate(admission.passed, next_number):
        at.note(node, "admitted", number=number, reason=_why(against.get(node, [])))
    refused = {node: log.number for node, log in at.logs.items() if log.number}
    steps = _steps(at, refused, against, settings)
    if settings.avoid_suspects:
        soft = {node for node, found in by_node.items() if node and node not in refused and found}
        steps += _weights(at, soft)
    else:
        steps += _weights(at, set())
    acts = settings.mode == "act"
    return Plan(
        notes=at.notes,
        steps=_batched([step for step in steps if acts or (step.by_word and settings.mode == "propose")]),
        proposals=_batched([step for step in steps if settings.mode == "propose" and not step.by_word]),
        admission=admission,
        refused=refused,
        left_alone=left_alone,
        waiting=waiting,
        unknown=unknown,
        logs=at.logs,
    )


# --------------------------------------------------------------------------------------------------------- what others did


def _observe(at: _Decision, node: str, against: Sequence[Ground]) -> None:
    """What has been done to a node since we last looked."""
    log, seen = at.log(node), at.seen(node)
    if seen is None:
        return
    if log.drained and not seen.is_drained:
        at.note(node, "undrained" if at.view.has_forgotten else "resumed", reason=log.drained)
    elif log.drained and seen.has_foreign_reason:
        at.note(node, "yielded", reason=seen.reason, principal=seen.reason_by)
    elif log.taken_over and not seen.is_drained:
        at.note(node, "resumed", reason="after a drain of somebody else")
    elif not log.drained and seen.is_drained and seen.is_ours and (against or log.wanted):
        at.note(node, "drained", reason=seen.reason)  # by the gate, or by a supervisor that died before it could note it
    if at.view.reservations is not None and log.reserved and _reservation(node) not in at.view.reservations:
        at.note(node, "unreserved" if at.view.has_forgotten else "resumed", reason="its reservation is gone")


def _waiting(at: _Decision, wanted: Iterable[str]) -> dict[str, str]:
    """Nodes that are out of service by another hand, or in a state that we do not know, and not refused yet."""
    found = {}
    for node in sorted(wanted):
        seen = at.seen(node)
        if seen is None or seen.is_eligible or at.log(node).number:
            continue
        state = "+".join([seen.state, *sorted(seen.flags)])
        found[node] = f"{state}: {seen.reason} [{seen.reason_by or '?'}]" if seen.reason else state
    return found


def _admit(
    at: _Decision,
    wanted: Iterable[str],
    against: Mapping[str, Sequence[Ground]],
    admitted_us: Sequence[int],
    guard: Guard,
    known_nodes: Sequence[str],
) -> Admission:
    nodes = at.view.nodes
    admitted = {node for node, log in at.logs.items() if log.number}
    eligible = {*known_nodes} if nodes is None else {name for name, seen in nodes.items() if seen.is_eligible}
    order = sorted(wanted, key=lambda node: (min((g.since_us for g in against.get(node, ())), default=0), node))
    eligible |= admitted if nodes is None else admitted & nodes.keys()
    return admit(order, eligible, admitted, admitted_us, guard, at.now_us)


def _newest(grounds: Iterable[Ground]) -> int:
    return max((ground.newest_us for ground in grounds), default=0)


def _why(grounds: Iterable[Ground]) -> str:
    return "; ".join(ground.text for ground in grounds)[:500]


# ------------------------------------------------------------------------------------------------------------------ steps


def _steps(
    at: _Decision, refused: Mapping[str, int], against: Mapping[str, Sequence[Ground]], settings: PlanSettings
) -> list[Step]:
    steps = []
    for node in sorted({*at.logs, *refused}):
        log, seen = at.log(node), at.seen(node)
        if seen is None:
            continue
        reason = _drain_reason(node, log, against.get(node, ()), settings) if node in refused else ""
        by_drain = settings.quarantine_by == "drain"
        if reason and by_drain and not seen.is_drained and not seen.has_foreign_reason:
            steps.append(Step("drain", (node,), reason, _why(against.get(node, ())) or log.wanted, by_word=bool(log.wanted)))
        if log.drained and not (reason and by_drain) and seen.is_drained and seen.is_ours:
            why = f"let run by {log.left_alone_by}" if log.left_alone_us else "nothing counts against it any more"
            steps.append(Step("undrain", (node,), "", why, by_word=bool(log.left_alone_us)))
        if reason and not by_drain and not log.reserved and not seen.is_drained:
            steps.append(Step("reserve", (node,), reason, _why(against.get(node, ())) or log.wanted, by_word=bool(log.wanted)))
        if log.reserved and not (reason and not by_drain):
            steps.append(Step("unreserve", (node,), "", "nothing counts against it any more", by_word=bool(log.left_alone_us)))
    return steps


def _drain_reason(node: str, log: NodeLog, against: Sequence[Ground], settings: PlanSettings) -> str:
    """What SLURM is to show; empty: the node is not to be drained."""
    if log.wanted:
        return reason_text(0, log.wanted)
    allowing = [g for g in against if g.may_drain and (g.kind == "node" or settings.bad_gpu == "drain")]
    if not allowing:
        return ""
    more = f" (+{len(allowing) - 1})" if len(allowing) > 1 else ""
    return reason_text(log.number, allowing[0].text + more, node)


def _weights(at: _Decision, soft: set[str]) -> list[Step]:
    steps = []
    for node in sorted({*soft, *(name for name, log in at.logs.items() if log.weight is not None)}):
        log, seen = at.log(node), at.seen(node)
        if seen is None or seen.weight is None:
            continue
        if node in soft and log.weight in (None, seen.weight):
            steps.append(Step("weigh", (node,), "", "suspect: it comes last", weight=seen.weight + ADDED_WEIGHT))
        elif node not in soft and log.weight is not None:
            if seen.weight == log.weight + ADDED_WEIGHT:
                steps.append(Step("unweigh", (node,), "", "suspect no more", weight=log.weight))
            else:
                at.note(node, "unweighted", reason="somebody else has changed it")
    return steps


def _batched(steps: Sequence[Step]) -> list[Step]:
    """Steps that can be one call to SLURM are one; releases come first."""
    found: dict[tuple[object, ...], Step] = {}
    for step in steps:
        one_by_one = step.kind not in ("drain", "undrain")
        key = (step.kind, step.reason, step.by_word, step.nodes if one_by_one else "")
        known = found.get(key)
        found[key] = step if known is None else replace(known, nodes=known.nodes + step.nodes)
    return sorted(found.values(), key=lambda step: not step.kind.startswith("un"))


def _reservation(node: str) -> str:
    return f"{RESERVATION}{node}"
