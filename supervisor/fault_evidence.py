"""What hangs, lost ranks and lost nodes say of hardware. Pure.

Slow to accuse: most of what ends a job is its script's doing. A rank that leaves with an exception, is killed by the kernel for
want of memory, or by a signal that people and schedulers send, says nothing. A hang speaks against the culprit's device only if
that rank stands out from the others; a stopped process does not. Where a rank has no GPU, or the fault cannot be one of a GPU,
the node is meant. How much all this weighs the hardware's policy says.
"""

import re
import signal as signals
from collections.abc import Sequence

from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.case_evidence import episode_of, held_devices, is_stand_in
from rsup.supervisor.end_report import all_exits
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.failure import Hung, signal_name, waits_for_peers
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.states import AgentState, JobState, RankExit
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import NOT_OURS

GPU_ERROR = re.compile(
    r"\bXid\b|uncorrectable (nvlink|ecc)|ecc uncorrectable|fallen off the bus|gpu is lost|hardware stack error|"
    r"contained memory error|CUDA_ERROR_(ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR)",
    re.IGNORECASE,
)
"""What the driver says of a broken board, as it stands in the last line of a rank."""
_OF_THE_GPU = (signals.SIGBUS,)
"""A board that is gone leaves its mapped memory behind."""
_OF_THE_NODE = (signals.SIGSEGV, signals.SIGILL)
_INJECTORS = ("--fault", "--error-injection-rate")


def is_injected(state: JobState) -> bool:
    """Whether the job's own command asks for faults."""
    words = (word.partition("=")[0] for word in state.spec.command)
    return any(word in _INJECTORS for word in words) or any(case.saved.injected for case in state.cases)


def hang_evidence(turn: Turn, first: Hung, ranks: Sequence[Hung], incident: IncidentSaved) -> None:
    """A hang with a culprit that stands out."""
    if first.process_state not in ("T", "t") and stands_out(first, ranks):
        _tell(turn, "hang", "hang", incident.device, first.node, incident)


def stands_out(first: Hung, ranks: Sequence[Hung]) -> bool:
    """Whether one rank of a hang differs from all others in what tells a culprit; one that is alone must wait inside torch."""
    others = [one for one in ranks if one.rank != first.rank]
    if not others:
        return waits_for_peers(first.stack)
    if first.is_silent and not any(one.is_silent for one in others):
        return True
    if first.iteration and all(first.iteration < one.iteration for one in others):
        return True
    stacks = [one.stack for one in others]
    return bool(first.stack) and not waits_for_peers(first.stack) and all(stacks) and all(map(waits_for_peers, stacks))


def lost_rank_evidence(turn: Turn) -> None:
    """The attempt's first mover is known: did it die of something that hardware does?"""
    state = turn.state
    incident = state.incident
    if state.stop is not None or incident is None or incident.attempt != state.attempt or incident.rank is None:
        return
    exit_ = next((exit_ for rank, exit_, _ in all_exits(state) if rank == incident.rank), None)
    if exit_ is None or exit_.by_us or not exit_.exit_code or incident.kind not in ("exit", "signal"):
        return
    code, of_gpu = _code(exit_)
    if code:
        _tell(turn, "rank-lost", code, incident.device if of_gpu else "", incident.node, incident)


def lost_in_process_evidence(turn: Turn) -> None:
    """The same of a rank whose process was replaced, or that left its training function, while the attempt goes on."""
    state, restart = turn.state, turn.state.in_process.open
    if state.stop is not None or restart is None or restart.incident.rank is None or restart.kind not in ("exit", "signal"):
        return
    exit_ = restart.exits.get(restart.incident.rank) or RankExit(0, 1, restart.incident.at_us, error=restart.error)
    code, of_gpu = _code(exit_) if not exit_.by_us else ("", False)
    if code:
        incident = restart.incident
        _tell(turn, "rank-lost", code, incident.device if of_gpu else "", incident.node, incident)


def _code(exit_: RankExit) -> tuple[str, bool]:
    """What the exit says, and whether a GPU can be behind it; empty: nothing."""
    if GPU_ERROR.search(exit_.error):
        return "gpu-error", True
    if exit_.signal and exit_.killer in ("", NOT_OURS) and exit_.signal in (*_OF_THE_GPU, *_OF_THE_NODE):
        return signal_name(exit_.signal), exit_.signal in _OF_THE_GPU
    return "", False


def lost_node_evidence(turn: Turn, agent: AgentState, reason: str) -> None:
    """A node is gone, and with it ranks that were alive."""
    if agent.live_attempt:
        turn.act(FoundEvidence(_evidence(turn, "node", agent.info.node, "rank-lost", "agent-lost", reason)))


def _tell(turn: Turn, source: str, code: str, device: str, node: str, incident: IncidentSaved) -> None:
    is_device = bool(device) and not is_stand_in(device)
    if not is_device and not node:
        return
    kind, subject = ("device", device) if is_device else ("node", node)
    evidence = _evidence(turn, kind, subject, source, code, incident.text, node, incident.rank, incident.iteration)
    turn.act(FoundEvidence(evidence))


def _evidence(
    turn: Turn,
    kind: str,
    subject: str,
    source: str,
    code: str,
    text: str,
    node: str = "",
    rank: int | None = None,
    iteration: int = 0,
) -> Evidence:
    state = turn.state
    return Evidence(
        kind=kind,
        subject=subject,
        source=source,
        code=code,
        episode=episode_of(state.key),
        at_us=turn.now.us,
        text=text,
        node=node or subject,
        job=state.key,
        attempt=state.attempt,
        rank=rank,
        iteration=iteration,
        injected=is_injected(state),
        is_held=kind == "node" or subject in held_devices(state),
    )
