"""Accusations that follow the rank: the second `persistent` of one rank and iteration, on another board, accuses neither. Pure.

A board that was proven faulty is out of use from the next attempt on. If the rank's next board is then proven faulty as well,
in the very iteration that the first was accused of, the fault went with the rank: its program or its state does it. The second
board is watched, no more; what was said against the first is taken back to a suspicion, unless other evidence holds it; and the
job ends instead of wearing out board after board.
"""

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.case_evidence import is_stand_in, tell_of
from rsup.supervisor.case_sentences import findings_of
from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.records import CaseSaved
from rsup.supervisor.states import Case, JobState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import AvoidedDevice

MAX_ACCUSING = 8
"""Cases of a job that are remembered for what they accuse, the newest."""


class Doubt(Struct, frozen=True):
    """An accused device that has come after another one of the same rank and iteration."""

    device: str
    rank: int
    before: CaseSaved
    """The case that accuses the other one."""
    before_device: str


def doubts_about(state: JobState, saved: CaseSaved, attempt: int) -> list[Doubt]:
    """What of a `persistent` case, told in `attempt`, follows a rank from board to board."""
    if not is_proof(saved):
        return []
    in_use = _in_use(state, saved, attempt)
    found = []
    for rank, device in _by_rank(saved):
        for before in state.accusing:
            if before.iteration != saved.iteration or before.case_id == saved.case_id or before.attempt >= attempt:
                continue
            others = (other for its_rank, other in _by_rank(before) if its_rank == rank)
            other = next((one for one in others if _board_of(one) != _board_of(device) and one not in in_use), "")
            if other:
                found.append(Doubt(device, rank, before, other))
                break
    return found


def doubted(case: Case, found: list[Doubt]) -> Case:
    """The case with what these doubts make of it."""
    if not found:
        return case
    first = found[0]
    told = f"rank {first.rank} was accused of the same iteration on {first.before_device} before (case {first.before.case_id})"
    note = f"does not count against {', '.join(one.device for one in found)}: {told}, which is out of use here"
    follows = (
        f"the fault followed rank {first.rank} from {first.before_device} (case {first.before.case_id}) to {first.device}, so "
        f"it is the program's or that rank's state, not a board's: iteration {case.saved.iteration} fails wherever it runs"
    )
    saved = replace(case.saved, note=f"{note}: the fault follows the rank, not the board")
    return replace(case, saved=saved, follows=follows, doubted=[one.device for one in found])


def settle_accusations(turn: Turn, saved: CaseSaved, found: list[Doubt]) -> None:
    """The case has its verdict: take back what its doubts clear, and remember whom it accuses."""
    if not is_proof(saved):
        return
    for doubt in found:
        _take_back(turn, doubt, saved)
    turn.change(accusing=[*turn.state.accusing, saved][-MAX_ACCUSING:])


def is_proof(saved: CaseSaved) -> bool:
    """Whether it says of single boards that they are faulty."""
    return saved.verdict == "persistent" and saved.fatal and saved.suspect_of == 1


def _take_back(turn: Turn, doubt: Doubt, saved: CaseSaved) -> None:
    state, device = turn.state, doubt.before_device
    if any(one.case_id == doubt.before.case_id and one.note for one in state.accusing):
        return
    what = f"the fault followed the rank to another board: rank {doubt.rank} to {doubt.device}, case {saved.case_id}"
    noted = replace(doubt.before, note=f"taken back against {device}: {what}")
    tell_of(turn, doubt.before, device, FOLLOWED_RANK, what, turn.now.us)
    turn.record(noted)
    data: dict[str, object] = {"case_id": noted.case_id, "device": device}
    turn.log("CaseTakenBack", f"case {noted.case_id}: {noted.note}", "warning", data=data)
    mine = f"case {noted.case_id}:"
    avoid = [replace(a, quarantined=False) if _is_for(a, device, mine) else a for a in state.avoid]
    turn.change(accusing=[noted if one.case_id == noted.case_id else one for one in state.accusing], avoid=avoid)


def _is_for(avoided: AvoidedDevice, device: str, reason: str) -> bool:
    return avoided.device == device and avoided.rank is None and avoided.reason.startswith(reason)


def _in_use(state: JobState, saved: CaseSaved, attempt: int) -> set[str]:
    """Devices that computed in that attempt, as far as is known of one that is over."""
    found = {device for one in findings_of(saved) for device in (one.device, one.elsewhere_device)}
    found |= {device for devices in saved.tried.values() for device in devices}
    if attempt == state.attempt:
        found |= {device for agent in state.agents.values() if agent.group_rank >= 0 for device in agent.devices_used.values()}
    return found


def _by_rank(saved: CaseSaved) -> list[tuple[int, str]]:
    """Whom it accuses, by the rank that computed there."""
    pairs = [(one.rank, one.device) for one in findings_of(saved) if one.fatal and one.device in saved.accused]
    pairs += [(int(rank), one) for rank, devices in saved.tried.items() for one in devices if one in saved.accused]
    return list(dict.fromkeys(pairs))


def _board_of(device: str) -> str:
    """Stand-ins of one boot are one node's CPU."""
    return device.rpartition("-")[0] if is_stand_in(device) else device
