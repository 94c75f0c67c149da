"""What a launch inside a SLURM job finds out before it starts anything: where its nodes meet, when SLURM ends the job, and
whether the gate refuses one of its nodes.

All of it is bounded in time, and none of it keeps training from starting but a refusal that is known (and in mode `enforce`).
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.slurm import gate, scontrol
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.launcher.slurm.meeting import first_address, meeting_ports
from rsup.supervisor.wire import EXIT_REQUEUE, GATE_REFUSES, RsupError, UsageError

END_WITHIN_S = 3.0


class Refused(RsupError):
    """The gate refuses this node."""

    exit_code = EXIT_REQUEUE


def prepare(options: LaunchOptions, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> LaunchOptions:
    """`options` with what only this machine and SLURM can tell. `say` gets lines for people. Raise `UsageError` if the step's
    nodes have no place to meet, `Refused` for a launch of one node that the gate refuses."""
    place = options.slurm
    if place is None:
        return options
    if options.rdzv_id == place.group and options.max_nodes > 1:
        options = _fitting(options, place, say)
    if options.asks_for_end:
        options = replace(options, deadline=_end_time(place))
    if place.in_step and options.max_nodes > 1 and not options.rdzv_endpoint:
        options = _with_meeting(options, place, say, environ)
    return _past_the_gate(options, place, say, environ)


def _fitting(options: LaunchOptions, place: SlurmPlace, say: Callable[[str], None]) -> LaunchOptions:
    """Only the agents of this step can join what the step's name stands for: every one of them sees what cannot work, so that
    none waits for the others."""
    step = f"step {place.job}.{place.step}"
    if options.min_nodes > place.num_nodes:
        raise UsageError(
            f"the launch needs {options.min_nodes} nodes, and {step} has {place.num_nodes}: start it with"
            f" srun --nodes={options.min_nodes}, or give --nnodes {place.num_nodes}"
        )
    if options.rdzv_endpoint or options.node_rank in (-1, place.node_index):
        return options
    say(f"rsup: --node-rank {options.node_rank} has no effect: this is node {place.node_index} of {step}")
    return replace(options, node_rank=place.node_index)


def _with_meeting(
    options: LaunchOptions, place: SlurmPlace, say: Callable[[str], None], environ: Mapping[str, str]
) -> LaunchOptions:
    address, note = first_address(place)
    if not address and not options.supervisor:
        raise UsageError(f"where do the nodes of step {place.job}.{place.step} meet? {note}; give --rdzv-endpoint HOST:PORT")
    if note and place.node_index == 0:
        say(f"rsup: {note}")
    if not address:
        return options
    ports = meeting_ports(place, environ)
    host = f"[{address}]" if ":" in address else address
    local_addr = options.local_addr or (address if place.node_index == 0 else None)
    return replace(options, rdzv_endpoint=f"{host}:{ports[0]}", meeting_ports=ports, local_addr=local_addr)


def _end_time(place: SlurmPlace) -> float | None:
    """When SLURM ends the job, where its variables do not tell (before 23.02); None: it has no end, or cannot be asked."""
    try:
        text = scontrol.show_job(place.job, END_WITHIN_S).get("EndTime", "")
        end_s = datetime.fromisoformat(text).timestamp()
    except (scontrol.SlurmUnavailable, ValueError):
        return None
    return end_s if end_s > time.time() else None


def _past_the_gate(
    options: LaunchOptions, place: SlurmPlace, say: Callable[[str], None], environ: Mapping[str, str]
) -> LaunchOptions:
    """The first node asks for all nodes of the step, the others for themselves: what one of them says stops the start of
    all."""
    names = place.nodes if place.in_step and place.node_index == 0 else (place.node,)
    refused: list[str] = []
    for name in filter(None, names):
        gpus = ",".join(place.gpu_indexes) if name == place.node else ""
        asked = gate.ask(environ, {"node": name, "gpus": gpus})
        if asked.exit_code == gate.EXIT_REFUSE:
            refused.append(name)
        if asked.answer.verdict == gate.REFUSED:
            say(f"rsup: the gate{'' if asked.exit_code else ', which only observes'}: {asked.line}")
    if not refused:
        return options
    text = f"{GATE_REFUSES} {', '.join(refused)}: nothing was started here"
    if options.max_nodes == 1:
        raise Refused(f"{text}; exit 88: please requeue")
    return replace(options, refused_nodes=tuple(refused), gate_refusal=text)
