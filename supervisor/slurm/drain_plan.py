"""What is to be done about nodes in SLURM, from what speaks against them and what SLURM shows. Pure.

    grounds (the history) + SLURM's nodes + our notes -> notes, what gates are told, steps to take or to propose

A node is refused to jobs once the guard has let it pass, and drained where the history allows that (`may_drain`). Nobody else's
hand is overruled: a reason that is not ours stays, a node that somebody else has resumed is left alone until new evidence or
an operator's word, and only a drain of ours is ended. Releases pass no guard; they wait for the node's gate, whose prolog
would else refuse the first job, which drains the node in SLURM for good (`Prolog error`).
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_due import batched, steps_due, weights_due, why_of
from rsup.supervisor.slurm.drain_terms import Decision, Ground, PlanSettings, Step, View
from rsup.supervisor.slurm.gate_watch import NO_GATES, TAKEN_UP_US, Gate, GatesSeen
from rsup.supervisor.slurm.guard import Admission, admit, fleet_of
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.scheduler_text import RESERVATION, NodeSeen


class Plan(Struct, frozen=True):
    """What follows. `notes` are to be kept before anything else is done."""

    notes: list[DrainNoted] = []
    steps: list[Step] = []
    proposals: list[Step] = []
    admission: Admission = Admission()
    refused: dict[str, int] = {}
    """Nodes that gates refuse, and the number of each refusal."""
    kept_off: frozenset[str] = frozenset()
    """Those of them on which SLURM starts no job anyway: drained, by whomever, or reserved by us."""
    left_alone: dict[str, str] = {}
    """Nodes that would be refused, but that somebody has let run knowingly: who."""
    waiting: dict[str, str] = {}
    """Nodes that would be refused but for what SLURM shows of them: that."""
    unknown: list[str] = []
    """Nodes that would be refused, and that SLURM does not know."""
    for_gates: dict[str, int] = {}
    """Nodes whose release waits until their gates know of it, each until then at the latest."""
    logs: dict[str, NodeLog] = {}


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
    gates: GatesSeen = NO_GATES,
) -> Plan:
    """The plan. `admitted_us`: when nodes were admitted lately; `known_nodes`: those that stand for SLURM's while it is not
    known."""
    at = Decision(view, logs, now_us)
    by_node: dict[str, list[Ground]] = {}
    for ground in grounds:
        by_node.setdefault(ground.node, []).append(ground)
    against = {node: found for node, all_ in by_node.items() if node and (found := [g for g in all_ if g.refuses])}
    for node in sorted({*at.logs, *against}):
        _observe(at, node, against.get(node, []))
        _observe_gate(at, node, gates)
    left_alone = {n: at.log(n).left_alone_by for n, found in against.items() if at.log(n).is_left_alone(_newest(found))}
    wanted = {*against, *(node for node, log in at.logs.items() if log.wanted)} - left_alone.keys()
    for node, log in sorted(at.logs.items()):
        if log.number and node not in wanted:
            at.note(node, "cleared")
    unknown = sorted(n for n in wanted if view.nodes is not None and n not in view.nodes)
    waiting = _waiting(at, wanted)
    admission = _admit(at, wanted - waiting.keys() - set(unknown), against, admitted_us, guard, known_nodes)
    for number, node in enumerate(admission.passed, next_number):
        at.note(node, "admitted", number=number, reason=why_of(against.get(node, ())))
    refused = {node: log.number for node, log in at.logs.items() if log.number}
    steps = steps_due(at, refused, against, settings)
    if settings.avoid_suspects:
        soft = {node for node, found in by_node.items() if node and node not in refused and found}
        steps += weights_due(at, soft)
    else:
        steps += weights_due(at, set())
    acts = settings.mode == "act"
    return Plan(
        notes=at.notes,
        steps=batched([step for step in steps if acts or (step.by_word and settings.mode == "propose")]),
        proposals=batched([s for s in steps if settings.mode == "propose" and not s.by_word and s.kind != "renew"]),
        admission=admission,
        refused=refused,
        kept_off=frozenset(node for node in refused if _is_kept_off(at, node)),
        left_alone=left_alone,
        waiting=waiting,
        unknown=unknown,
        for_gates={n: gates.believes_until_us(n) for n, log in at.logs.items() if log.waits_for_gate},
        logs=at.logs,
    )


# --------------------------------------------------------------------------------------------------------- what others did


def _observe(at: Decision, node: str, against: Sequence[Ground]) -> None:
    """What has been done to a node since we last looked."""
    seen = at.seen(node)
    if seen is None:
        return
    if (at.log(node).drained or at.log(node).taken_over) and not _observe_reboot(at, node, seen):
        _observe_drain(at, node, seen, against)
    log = at.log(node)
    if not (log.drained or log.taken_over) and seen.is_drained and seen.is_ours and (against or log.wanted):
        at.note(node, "drained", reason=seen.reason)  # by the gate, or by a supervisor that died before it could note it
    if at.view.reservations is not None and log.reserved and _reservation(node) not in at.view.reservations:
        at.note(node, "unreserved" if at.view.has_forgotten else "resumed", reason="its reservation is gone")


def _observe_reboot(at: Decision, node: str, seen: NodeSeen) -> bool:
    """Whether SLURM reboots it (`scontrol reboot`), or has: reason and return are then SLURM's doing, nobody's word."""
    if seen.is_rebooting:
        if not at.log(node).rebooting:
            at.note(node, "rebooting")
        return True
    if at.log(node).rebooting and seen.is_drained:
        at.note(node, "rebooted")
    elif at.log(node).rebooting:
        at.note(node, "undrained", reason="SLURM has rebooted it")
        return True
    return False


def _observe_drain(at: Decision, node: str, seen: NodeSeen, against: Sequence[Ground]) -> None:
    log = at.log(node)
    if log.drained and not seen.is_drained:
        is_over = not (log.number or log.wanted) and (not against or log.is_left_alone(_newest(against)))
        # Where its end was due it was ours, and a crash has kept us from noting it.
        at.note(node, "undrained" if at.view.has_forgotten or is_over else "resumed", reason=log.drained)
    elif log.drained and seen.has_foreign_reason:
        at.note(node, "yielded", reason=seen.reason, principal=seen.reason_by)
    elif log.taken_over and not seen.is_drained:
        at.note(node, "resumed", reason="after a drain of somebody else")


def _observe_gate(at: Decision, node: str, gates: GatesSeen) -> None:
    """Whether a job that starts there would be refused, by what its gate has fetched."""
    log, gate = at.log(node), gates.gates.get(node, Gate())
    refuses = gate.refuses_jobs(at.now_us)
    if refuses and not log.gate_refuses:
        at.note(node, "told")
    elif log.gate_refuses and not refuses and gate.got_us and at.now_us - gate.got_us >= TAKEN_UP_US:
        at.note(node, "untold")
    elif log.gate_refuses and at.now_us > gates.believes_until_us(node):
        at.note(node, "untold", reason="it has not asked for so long that it believes no snapshot")


def _waiting(at: Decision, wanted: Iterable[str]) -> dict[str, str]:
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
    at: Decision,
    wanted: Iterable[str],
    against: Mapping[str, Sequence[Ground]],
    admitted_us: Sequence[int],
    guard: Guard,
    known_nodes: Sequence[str],
) -> Admission:
    order = sorted(wanted, key=lambda node: (min((g.since_us for g in against.get(node, ())), default=0), node))
    fleet = fleet_of(at.view.nodes, {node for node, log in at.logs.items() if log.number}, known_nodes)
    return admit(order, fleet, admitted_us, guard, at.now_us)


def _is_kept_off(at: Decision, node: str) -> bool:
    log, seen = at.log(node), at.seen(node)
    return bool(log.drained) or log.reserved or log.taken_over or (seen is not None and seen.is_drained)


def _newest(grounds: Iterable[Ground]) -> int:
    return max((ground.newest_us for ground in grounds), default=0)


def _reservation(node: str) -> str:
    return f"{RESERVATION}{node}"
