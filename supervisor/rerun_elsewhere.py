"""Megatron-LM's rerun machine asks for another device, or has its verdict: exit codes 16 and 17 that its tracker confirms.

16 says "the rejected result came out the same again: run this iteration on another device". The rank goes to another device of
its node where there is one (the agent finds out which: `launcher/device_placement`), else its node changes places with another
one; the restart costs nothing. Where there is no other device, or one was tried often enough, the job ends with 16. 17 is a
verdict, and ends the job. What confirms either is a line of the tracker file about a rank of this attempt; once that has opened
a case, later ones need no line of their own (Megatron writes none when it finds itself on the same device again). All else that
leaves with 16 or 17 is an ordinary failure. Pure.
Source: spec of Megatron-LM's rerun_state_machine.py; it tells devices apart by node name and CUDA ordinal.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.end_report import all_exits
from rsup.supervisor.failure import first_mover
from rsup.supervisor.other_devices import arranged, change_places, ranks_of
from rsup.supervisor.restart_policy import Verdict
from rsup.supervisor.states import JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, AvoidedDevice, RejectedResult

MAX_RERUNS = 3
"""Reruns on other devices that a launch gets; each should have brought a verdict."""

_ASKS = "FIRST_RERUN_REPRODUCIBLE"
_PERSISTENT = "SECOND_RERUN_NOT_REPRODUCIBLE"
_VERDICTS = {
    "FIRST_RERUN_NOT_REPRODUCIBLE": "transient error (it came out otherwise on the same device)",
    _PERSISTENT: "persistent error, {before} is suspect (it came out otherwise on another device)",
    "SECOND_RERUN_REPRODUCIBLE": "the application's or the data's, not the device's (it came out the same on another one)",
}


class Rerun(Struct, frozen=True):
    """What follows from a confirmed 16 or 17."""

    verdict: Verdict
    found: list[RejectedResult]
    """The lines that confirm it, one a rank; empty where the case was open already."""
    avoid: list[AvoidedDevice]
    """The job's list from now on."""
    order: list[str] = []
    """The agents of the next attempt in the order of the current one's, where nodes change places."""
    why: str = "restart for a rerun on another device"


def confirmed_rerun(state: JobState) -> Rerun | None:
    """What the failed attempt asks for; None if it did not fail with a confirmed 16 or 17."""
    exits = all_exits(state)
    first = first_mover((rank, exit_) for rank, exit_, _ in exits)
    if state.failure is None or state.failure.kind != "exit" or first is None:
        return None
    code = first[1].exit_code
    if code not in (EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED) or first[1].declared == code:
        return None
    found = _telling_lines(code, (exit_.rejected[-1] for _, exit_, _ in exits if exit_.rejected))
    is_open = any(avoided.rank is not None for avoided in state.avoid)
    if not found and not is_open:
        return None
    return _elsewhere(state, found) if code == EXIT_RERUN_ELSEWHERE else _judged(state, found)


def carry_out(turn: Turn, rerun: Rerun) -> None:
    """Remember what is to be avoided, name whose result it was, and let nodes change places."""
    state = turn.state
    turn.change(avoid=rerun.avoid, reruns=state.reruns + rerun.verdict.restart)
    if rerun.found:
        _name_suspect(turn, rerun.found[0], rerun.verdict)
    kind = "RerunElsewhere" if rerun.verdict.restart else "RerunVerdict"
    first = rerun.found[0] if rerun.found else None
    data: dict[str, object] = {
        "avoid": [{"rank": a.rank, "device": a.device, "reason": a.reason} for a in rerun.avoid],
        "status": first.status if first else "",
    }
    rank = first.rank if first else None
    turn.log(kind, rerun.verdict.reason, "warning" if rerun.verdict.restart else "error", rank=rank, data=data)
    if rerun.order:
        change_places(turn, rerun.order)


def _telling_lines(code: int, newest: Iterable[RejectedResult]) -> list[RejectedResult]:
    """Of the newest lines of all ranks those that mean this exit: an older iteration's was not fatal, training went on."""
    accepted = (_ASKS,) if code == EXIT_RERUN_ELSEWHERE else tuple(_VERDICTS)
    found = [line for line in newest if line.status in accepted]
    last = max((line.iteration for line in found), default=0)
    return sorted((line for line in found if line.iteration == last), key=lambda line: line.rank)


def _text(line: RejectedResult) -> str:
    what = f"{line.message}: {line.result}" if line.message else line.result
    return f"rank {line.rank}'s result at iteration {line.iteration} was rejected ({what})"


def _judged(state: JobState, found: list[RejectedResult]) -> Rerun:
    if not found:
        reason = "Megatron-LM's rerun ended without a verdict: the rejected result was not reached again"
        return Rerun(_end(EXIT_VALIDATION_FAILED, reason), [], _without_case(state))
    line = found[0]
    before = next((a.device for a in state.avoid if a.rank == line.rank), "the device before")
    reason = f"Megatron-LM's verdict: {_VERDICTS[line.status].format(before=before)}; {_text(line)}"
    avoid = _without_case(state)
    if line.status == _PERSISTENT:
        avoid += [
            AvoidedDevice(a.device, f"a result of rank {a.rank} came out otherwise elsewhere: {a.reason}")
            for a in state.avoid
            if a.rank == line.rank
        ]
    return Rerun(_end(EXIT_VALIDATION_FAILED, reason), found, avoid)


def _without_case(state: JobState) -> list[AvoidedDevice]:
    return [avoided for avoided in state.avoid if avoided.rank is None]


def _end(code: int, reason: str) -> Verdict:
    return Verdict(False, code, reason)


def _elsewhere(state: JobState, found: list[RejectedResult]) -> Rerun:
    if not found:
        reason = "Megatron-LM says that it ran on the same device again; resume the job on other nodes"
        return Rerun(_end(EXIT_RERUN_ELSEWHERE, reason), [], state.avoid)
    avoid = list(state.avoid)
    for line in found:
        reason = f"{_text(line)} and came out the same there again"
        avoid.append(AvoidedDevice(line.device, reason, rank=line.rank, ordinal=line.ordinal))
    asked = f"{_text(found[0])} and came out the same again on device {found[0].device}"
    if state.reruns >= MAX_RERUNS:
        reason = f"{MAX_RERUNS} reruns on other devices have brought no verdict; {asked}"
        return Rerun(_end(EXIT_RERUN_ELSEWHERE, reason), found, avoid)
    suspects = sorted({line.rank for line in found})
    active = state.active
    order = [agent_id for agent_id, _ in active]
    places = arranged(state, order, [agent.first_rank for _, agent in active], avoid)
    if places is None:
        reason = f"there is no other device for rank {suspects[0]} in this allocation, resume the job elsewhere: {asked}"
        return Rerun(_end(EXIT_RERUN_ELSEWHERE, reason), found, avoid)
    who = f"rank{'s' if len(suspects) > 1 else ''} {', '.join(map(str, suspects))}"
    moved = [
        state.agents[there].info.node
        for there, (here, agent) in zip(places, active, strict=True)
        if there != here and any(rank in ranks_of(agent) for rank in suspects)
    ]
    where = f"node {', '.join(moved)}" if moved else "another device"
    reason = f"{asked}: {who} run{'s' if len(suspects) == 1 else ''} it again on {where}, which costs no restart"
    return Rerun(Verdict(True, 0, reason), found, avoid, places if places != order else [])


def _name_suspect(turn: Turn, line: RejectedResult, verdict: Verdict) -> None:
    code = verdict.exit_code or EXIT_RERUN_ELSEWHERE
    name_suspect(turn, line.rank, line.device, line.iteration, code, "rerun machine of Megatron-LM")


def name_suspect(turn: Turn, rank: int, device: str, iteration: int, exit_code: int, found_by: str) -> None:
    """The incident is about the rank whose result it was, not about the one that happened to leave first."""
    state = turn.state
    owners = [agent for other, _, agent in all_exits(state) if other == rank]
    if state.failure is None or not owners:
        return
    node = owners[0].info.node
    text = f"rank {rank} on {node} left with exit code {exit_code}: its result at iteration {iteration} was rejected"
    turn.change(failure=replace(state.failure, text=text, exit_code=exit_code, rank=rank, node=node))
    if state.incident is not None and state.incident.attempt == state.attempt:
        incident = replace(
            state.incident, rank=rank, node=node, device=device, iteration=iteration, found_by=found_by, text=text
        )
        turn.change(incident=incident)
        turn.record(incident)
