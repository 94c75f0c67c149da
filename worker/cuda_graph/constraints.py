"""What a graph-captured step forbids: by options, asked before torch is imported, and by what live objects show.

    check_constraints(GraphFacts(cuda_graph_warmup_steps=3, fp16=False, **facts_of_environment(os.environ)))
    check_module(module, optimizer)             # later: it imports torch
    check_same_on_all_ranks(facts, group)

Each raises `ConstraintError`: one line that names the option, the reason and the remedy.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rsup.worker.cuda_graph.constraint_table import CONSTRAINTS, Constraint, line_of
from rsup.worker.cuda_graph.contract import ConstraintError
from rsup.worker.cuda_graph.graph_facts import GraphFacts, facts_of_environment
from rsup.worker.cuda_graph.live_constraints import check_module, check_step

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "CONSTRAINTS",
    "Constraint",
    "GraphFacts",
    "check_constraints",
    "check_module",
    "check_same_on_all_ranks",
    "check_step",
    "facts_of_environment",
    "violations",
]


def check_constraints(facts: GraphFacts) -> None:
    """Raise `ConstraintError` for the first thing that a graph forbids, with all that it forbids for the same cause."""
    found = violations(facts)
    if found:
        more = f" ({len(found) - 1} more after that)" if len(found) > 1 else ""
        raise ConstraintError(found[0] + more)


def violations(facts: GraphFacts) -> list[str]:
    """A line for each constraint that `facts` violate; one for those of the same cause."""
    found: dict[str, list[Constraint]] = {}
    for rule in CONSTRAINTS:
        if rule.applies(facts) and rule.is_violated(facts):
            found.setdefault(rule.cause or rule.option + rule.why, []).append(rule)
    return [line_of(rules, facts) for rules in found.values()]


def check_same_on_all_ranks(facts: GraphFacts, group: "dist.ProcessGroup | None" = None) -> None:
    """Raise `ConstraintError` on every rank where ranks were told differently. Collective over `group` (gloo).

    A rank that warms up for longer, or captures less, leaves the others in a collective of theirs for good.
    """
    import torch.distributed as dist

    gathered: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, asdict(facts), group=group)
    for name, value in gathered[0].items():
        others = [rank for rank, of_rank in enumerate(gathered) if of_rank[name] != value]
        if others:
            ranks = ", ".join(str(rank if group is None else dist.get_global_rank(group, rank)) for rank in others)
            raise ConstraintError(
                f"{_option(name)} is {value} on rank 0 of the group and another on rank {ranks}: ranks capture and replay"
                f" together; give all of them the same"
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
