"""What is due in SLURM: the steps between what it shows and what is to be. Pure.

No release while the gate there would still refuse the first job by the snapshot that it has.
Where one means takes the place of the other (a drain, a reservation), the new one is there before the old one ends.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from rsup.supervisor.slurm.drain_terms import ADDED_WEIGHT, Decision, Ground, PlanSettings, Step
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.scheduler_text import NodeSeen, reason_text

NOTHING_LEFT = "nothing counts against it any more"


def steps_due(
    at: Decision, refused: Mapping[str, int], against: Mapping[str, Sequence[Ground]], settings: PlanSettings
) -> list[Step]:
    """Drains and reservations to make, to end or to write anew."""
    steps: list[Step] = []
    for node in sorted({*at.logs, *refused}):
        log, seen = at.log(node), at.seen(node)
        if seen is None:
            continue
        grounds = against.get(node, ())
        reason = _drain_reason(node, log, grounds, settings) if node in refused else ""
        why = why_of(grounds) or log.wanted
        if settings.quarantine_by == "drain":
            steps += _by_drain(node, log, seen, reason, why)
        else:
            steps += _by_reservation(node, log, seen, reason, why)
    return steps


def _by_drain(node: str, log: NodeLog, seen: NodeSeen, reason: str, why: str) -> list[Step]:
    steps = []
    if reason and not seen.is_drained and not seen.has_foreign_reason:
        steps.append(Step("drain", (node,), reason, why, by_word=bool(log.wanted)))
    if reason and log.drained not in ("", reason) and seen.is_drained and seen.is_ours:
        steps.append(Step("renew", (node,), reason, why, by_word=bool(log.wanted)))
    ends = not reason and not log.waits_for_gate
    if ends and log.drained and seen.is_drained and seen.is_ours:
        steps.append(Step("undrain", (node,), "", _why_ended(log), by_word=bool(log.left_alone_us)))
    if ends and log.reserved:
        steps.append(Step("unreserve", (node,), "", _why_ended(log), by_word=bool(log.left_alone_us)))
    elif reason and log.reserved and seen.is_drained:
        steps.append(Step("unreserve", (node,), "", "it is drained in its place", by_word=bool(log.wanted)))
    return steps


def _by_reservation(node: str, log: NodeLog, seen: NodeSeen, reason: str, why: str) -> list[Step]:
    steps = []
    ours = bool(log.drained) and seen.is_drained and seen.is_ours
    if reason and not log.reserved and (ours or not seen.is_drained):
        steps.append(Step("reserve", (node,), reason, why, by_word=bool(log.wanted)))
    ends = not reason and not log.waits_for_gate
    if ends and ours:
        steps.append(Step("undrain", (node,), "", _why_ended(log), by_word=bool(log.left_alone_us)))
    elif reason and ours and log.reserved:
        steps.append(Step("undrain", (node,), "", "it is reserved in its place", by_word=bool(log.wanted)))
    if ends and log.reserved:
        steps.append(Step("unreserve", (node,), "", _why_ended(log), by_word=bool(log.left_alone_us)))
    return steps


def _why_ended(log: NodeLog) -> str:
    return f"let run by {log.left_alone_by}" if log.left_alone_us else NOTHING_LEFT


def why_of(grounds: Sequence[Ground]) -> str:
    """What speaks against a node, in one line."""
    return "; ".join(ground.text for ground in grounds)[:500]


def _drain_reason(node: str, log: NodeLog, against: Sequence[Ground], settings: PlanSettings) -> str:
    """What SLURM is to show; empty: the node is not to be drained."""
    if log.wanted:
        return reason_text(0, log.wanted)
    allowing = [g for g in against if g.may_drain and (g.kind == "node" or settings.bad_gpu == "drain")]
    if not allowing:
        return ""
    first = min(allowing, key=lambda ground: (ground.since_us, ground.kind, ground.subject))
    more = f" (+{len(allowing) - 1})" if len(allowing) > 1 else ""
    return reason_text(log.number, first.text + more, node)


def weights_due(at: Decision, soft: set[str]) -> list[Step]:
    """Weights of suspects (`soft`) to set, and to take back."""
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


def batched(steps: Sequence[Step]) -> list[Step]:
    """Steps that can be one call to SLURM are one; releases come first."""
    found: dict[tuple[object, ...], Step] = {}
    for step in steps:
        one_by_one = step.kind not in ("drain", "undrain", "renew")
        key = (step.kind, step.reason, step.by_word, step.nodes if one_by_one else "")
        known = found.get(key)
        found[key] = step if known is None else replace(known, nodes=known.nodes + step.nodes)
    return sorted(found.values(), key=lambda step: not step.kind.startswith("un"))
