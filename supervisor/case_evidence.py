"""What a closed rerun case says of devices. Pure.

`persistent` speaks against each device that it accuses, `transient` against where it happened, `corrupted state` and
`undecided` (accused, but not proven) more lightly; `application` against none. A device that the job does not hold is named in
the evidence as such, and the hardware's history refuses it.
"""

from collections.abc import Collection

from msgspec.structs import replace

from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.case_sentences import findings_of, verdict_text
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.records import CaseSaved, JobKey
from rsup.supervisor.states import JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import CaseFinding


def accuse(turn: Turn, saved: CaseSaved, doubted: Collection[str] = ()) -> None:
    """Tell the hardware's history. Of the devices in `doubted` no more than that the case is undecided."""
    for device in dict.fromkeys(_accused(saved, findings_of(saved))):
        code = "undecided" if device in doubted else _code(saved)
        tell_of(turn, saved, device, code, verdict_text(saved), saved.closed_us or turn.now.us)


def tell_of(turn: Turn, saved: CaseSaved, device: str, code: str, text: str, at_us: int) -> None:
    """One piece of evidence of the case about `device`, and about its node where a rank computes on the node's CPU."""
    finding = next((one for one in findings_of(saved) if one.device == device), None)
    node = finding.node if finding is not None else ""
    evidence = Evidence(
        kind="device",
        subject=device,
        source="verdict",
        code=code,
        episode=episode_of(saved.job),
        at_us=at_us,
        text=text,
        node=node or _node_of(turn.state, device),
        job=saved.job,
        attempt=saved.attempt,
        rank=finding.rank if finding is not None else None,
        iteration=saved.iteration,
        case_id=saved.case_id,
        injected=saved.injected,
        is_held=device in held_devices(turn.state),
        share=1 / _share_of(saved),
    )
    turn.act(FoundEvidence(evidence))
    if is_stand_in(device) and evidence.is_held and evidence.node:
        turn.act(FoundEvidence(replace(evidence, kind="node", subject=evidence.node)))


def held_devices(state: JobState) -> set[str]:
    """Devices that are the job's: those of its nodes, and those that its ranks say they use."""
    agents = state.agents.values()
    return {uuid for agent in agents for uuid in (*agent.devices, *agent.devices_used.values()) if uuid}


def episode_of(job: JobKey) -> str:
    """What all that ranks of one job find has in common."""
    return f"job:{job.cluster}/{job.owner}/{job.job_id}.{job.run}"


def is_stand_in(device: str) -> bool:
    """Whether a rank without a GPU computes there: what is wrong is then wrong with its node."""
    return device.startswith("CPU-")


def _accused(saved: CaseSaved, findings: list[CaseFinding]) -> list[str]:
    if saved.verdict == "application":
        return []
    if saved.verdict == "transient" and not saved.accused:
        return [one.device for one in findings if one.fatal]
    return saved.accused


def _code(saved: CaseSaved) -> str:
    if saved.verdict == "persistent":
        if saved.suspect_of > 1:
            return "suspect-1-of-n"
        return "persistent-data-dependent" if saved.data_dependent else "persistent"
    return saved.verdict.replace(" ", "-")


def _share_of(saved: CaseSaved) -> int:
    """Of how many one is meant: the group; of an undecided case all that it names."""
    return max(saved.suspect_of, len(saved.accused) if saved.verdict == "undecided" else 1)


def _node_of(state: JobState, device: str) -> str:
    return next((a.info.node for a in state.agents.values() if device in a.devices or device in a.devices_used.values()), "")
