"""Takes one step in SLURM: looks at the nodes right before, leaves out those that others have changed meanwhile, and acts.

SLURM has no compare-and-set: between the look and the write lie some milliseconds, which nobody can close. Blocks; raises
`SchedulerError`, after which a step may be half done: the next round sees what is left.
"""

from collections.abc import Mapping

from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_terms import ADDED_WEIGHT, Step
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.scheduler_text import RESERVATION


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
    if step.kind == "renew":
        names = [n for n in step.nodes if n in fresh and fresh[n].is_drained and fresh[n].is_ours]
        if names:
            scontrol.explain(names, step.reason)
        return [DrainNoted(name, now_us, "renewed", 0, step.reason) for name in names]
    if step.kind == "undrain":
        names = [n for n in step.nodes if n in fresh and fresh[n].is_drained and fresh[n].is_ours]
        if names:
            scontrol.undrain(names)
        return [DrainNoted(name, now_us, "undrained", 0, fresh[name].reason) for name in names]
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
