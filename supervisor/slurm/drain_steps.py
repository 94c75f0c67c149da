"""Takes one step in SLURM: looks at the nodes right before, leaves out those that others have changed meanwhile, and acts.

SLURM has no compare-and-set: between the look and the write lie some milliseconds, which nobody can close. Blocks; raises
`SchedulerError`, after which a step may be half done: the next round sees what is left.
"""

from collections.abc import Mapping

from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_terms import ADDED_WEIGHT, Step
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.scheduler_text import RESERVATION, NodeSeen, is_same_reason


def take(step: Step, scontrol: Scontrol, logs: Mapping[str, NodeLog], now_us: int) -> list[DrainNoted]:
    """The notes about what was done."""
    if step.kind in ("reserve", "unreserve"):
        return _reservation(step, scontrol, now_us)
    fresh = scontrol.nodes(step.nodes)
    if step.kind == "drain":
        names = [n for n in step.nodes if n in fresh and not fresh[n].is_drained and not fresh[n].has_foreign_reason]
        if names:
            scontrol.drain(names, step.reason)
        return [DrainNoted(name, now_us, "drained", 0, step.reason) for name in names]
    if step.kind in ("renew", "undrain"):
        return _of_ours(step, scontrol, fresh, logs, now_us)
    (name,) = step.nodes
    weight, own = (fresh[name].weight if name in fresh else None), logs.get(name, NOTHING).weight
    if step.kind == "weigh":
        if weight is None or weight + ADDED_WEIGHT != step.weight:
            return []
        scontrol.weigh(name, step.weight)
        return [DrainNoted(name, now_us, "weighted", weight, step.why)]
    if own is None or weight != own + ADDED_WEIGHT:
        return []
    scontrol.weigh(name, own)
    return [DrainNoted(name, now_us, "unweighted", 0, step.why)]


def _of_ours(
    step: Step, scontrol: Scontrol, fresh: Mapping[str, NodeSeen], logs: Mapping[str, NodeLog], now_us: int
) -> list[DrainNoted]:
    """What is done to drains of ours. One whose reason somebody has written on is theirs now."""
    drained = [name for name in step.nodes if name in fresh and fresh[name].is_drained and fresh[name].is_ours]
    done = {name for name in drained if step.kind == "renew" and fresh[name].reason == step.reason}  # and could not be noted
    names = [n for n in drained if n not in done and is_same_reason(fresh[n].reason, logs.get(n, NOTHING).drained)]
    if names and step.kind == "renew":
        scontrol.explain(names, step.reason)
    elif names:
        scontrol.undrain(names)
    notes = []
    for name in drained:
        seen = fresh[name]
        if name not in done and name not in names:
            notes.append(DrainNoted(name, now_us, "yielded", 0, seen.reason, seen.reason_by))
        elif step.kind == "renew":
            notes.append(DrainNoted(name, now_us, "renewed", 0, step.reason))
        else:
            notes.append(DrainNoted(name, now_us, "undrained", 0, seen.reason))
    return notes


def _reservation(step: Step, scontrol: Scontrol, now_us: int) -> list[DrainNoted]:
    (name,) = step.nodes
    exists = f"{RESERVATION}{name}" in scontrol.reservations()
    if step.kind == "reserve":
        if not exists:
            scontrol.reserve(name)
        return [DrainNoted(name, now_us, "reserved", 0, step.reason)]
    if exists:
        scontrol.unreserve(name)
    return [DrainNoted(name, now_us, "unreserved", 0, step.why)]
