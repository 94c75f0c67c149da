"""Options that the trainer will have. Today they are refused rather than taken without effect; where a graph forbids one for
good, that is said instead.
"""

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_STILL_TO_COME = """
    --cuda-graph-modules --cpu-offloading --moe-expert-rank-capacity-factor --moe-input-jitter-eps
"""
STILL_TO_COME = frozenset(_STILL_TO_COME.split())

NEVER = {
    "--inference-cuda-graph-scope": "is no option of this trainer: with --cuda-graph-impl full_iteration evaluation has a graph"
    " of its own",
    "--straggler-ctrlr-port": "is no option of this trainer: there is no port, rsup stragglers JOB on|off does it",
}
"""Options of Megatron-LM's that stay without a meaning here, and why."""


class LaterOptions(NamedTuple):
    """What a command line has of them. `facts`: fields of `GraphFacts`."""

    refusal: str
    facts: dict[str, Any]


def take_later_options(arguments: Sequence[str]) -> tuple[LaterOptions | None, list[str]]:
    """Those given, None for none; and the other arguments."""
    names = [argument.partition("=")[0] for argument in arguments]
    first = next((name for name in names if name in STILL_TO_COME or name in NEVER), None)
    if first is None:
        return None, list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*STILL_TO_COME, *NEVER):
        parser.add_argument(name, dest=name, nargs="*", default=argparse.SUPPRESS)
    given, others = parser.parse_known_args(arguments)
    return LaterOptions(f"{first} {NEVER.get(first, 'is not available yet')}", _facts(vars(given))), others


def _facts(given: dict[str, list[str]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"cpu_offloading": "--cpu-offloading" in given}
    if words := given.get("--cuda-graph-modules"):
        facts["cuda_graph_modules"] = tuple(",".join(words).split(","))
    if words := given.get("--inference-cuda-graph-scope"):
        facts["inference_cuda_graph_scope"] = ",".join(words)
    for name in ("--moe-input-jitter-eps", "--moe-expert-rank-capacity-factor"):
        with contextlib.suppress(ValueError):  # what is no number is refused all the same
            facts |= {_field(name): float(word) for word in given.get(name, [])[:1]}
    return facts


def _field(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
