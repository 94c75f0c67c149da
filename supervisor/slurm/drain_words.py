"""What an operator's `rsup nodes drain|undrain` means for the notes about nodes. Pure.

All nodes of one word or none. A person's word passes the guard like everything else; `beyond_guard` says that it is meant. It
overrules nobody else's drain: that is SLURM's own `scontrol update ... state=resume`.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.hardware.hostlist import fold
from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.hardware.states import one_line
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_terms import View
from rsup.supervisor.slurm.guard import Fleet, admit, fleet_of, most_believed
from rsup.supervisor.slurm.node_log import NOTHING, NodeLog
from rsup.supervisor.slurm.scheduler_text import NodeSeen, is_same_reason

MAX_NAMED = 8


class Word(Struct, frozen=True, kw_only=True):
    """`verb`: `drain` or `undrain`."""

    verb: str
    nodes: tuple[str, ...]
    reason: str
    principal: str
    dry_run: bool = False
    beyond_guard: bool = False


class Answer(Struct, frozen=True):
    """`refused`: why nothing is done, empty if it is; `notes`: to be kept, after which the plan does the rest; `undone`: nodes
    for which SLURM has not done it, which is tried again."""

    refused: str = ""
    message: str = ""
    notes: list[DrainNoted] = []
    undone: list[str] = []


def answer(
    word: Word,
    view: View,
    logs: Mapping[str, NodeLog],
    admitted_us: Sequence[int],
    next_number: int,
    guard: Guard,
    mode: str,
    trouble: str,
    now_us: int,
) -> Answer:
    """Decide. `trouble`: why SLURM is not known now."""
    if mode == "off":
        return Answer("drains are off here (--drains off): use scontrol, or start the supervisor with --drains propose")
    if view.nodes is None or view.is_stale:
        return Answer(f"SLURM does not answer: {trouble or 'it was not asked yet'}; nothing was done, try again")
    unknown = [name for name in word.nodes if name not in view.nodes]
    if unknown:
        return Answer(f"SLURM knows no node {_named(unknown)}; nothing was done")
    if word.verb == "drain":
        return _drain(word, view.nodes, logs, admitted_us, next_number, guard, now_us)
    return _undrain(word, view.nodes, logs, now_us)


def _drain(
    word: Word,
    nodes: Mapping[str, NodeSeen],
    logs: Mapping[str, NodeLog],
    admitted_us: Sequence[int],
    next_number: int,
    guard: Guard,
    now_us: int,
) -> Answer:
    for name in word.nodes:
        if nodes[name].has_foreign_reason:
            return Answer(f"{_theirs(nodes[name])}: it stays theirs; nothing was done")
        if logs.get(name, NOTHING).wanted:
            return Answer(f"node {name} is drained already: {logs[name].wanted}; nothing was done")
    admitted = {name for name, log in logs.items() if log.number}
    new = [name for name in word.nodes if name not in admitted]
    fleet = fleet_of(nodes, admitted)
    admission = admit(new, fleet, admitted_us, guard, now_us)
    if admission.held and not word.beyond_guard:
        held = next(iter(admission.held))
        what = f"{_named(list(admission.held))}: {admission.held[held]}"
        return Answer(f"the guard holds back {what}; nothing was done; --beyond-guard says that it is meant")
    said = one_line(f"{word.principal}: {word.reason}", 90)
    notes = [DrainNoted(name, now_us, "wanted", 0, said, word.principal) for name in word.nodes]
    for number, name in enumerate(new, next_number):
        notes.append(DrainNoted(name, now_us, "admitted", number, said, word.principal))
    return Answer("", f"{_named(word.nodes)}: drained{_too_many(fleet, len(new))}", notes)


def _too_many(fleet: Fleet, num_new: int) -> str:
    most = most_believed(fleet.num_shown)
    if len(fleet.refused) + num_new <= most:
        return ""
    return (
        f"; that is more than half of {fleet.num_shown} nodes, which no gate believes: gates refuse {most} of them, and on the "
        "others jobs are kept off by SLURM alone"
    )


def _undrain(word: Word, nodes: Mapping[str, NodeSeen], logs: Mapping[str, NodeLog], now_us: int) -> Answer:
    notes = []
    for name in word.nodes:
        seen, log = nodes[name], logs.get(name, NOTHING)
        if seen.is_drained and not seen.is_ours:
            return Answer(f"{_theirs(seen)}: it is not ours to end; use scontrol; nothing was done")
        if seen.is_drained and not is_same_reason(seen.reason, log.drained):
            # Of a store that is not this one, or somebody has added to the reason: the word is about what is shown now.
            notes.append(DrainNoted(name, now_us, "drained", 0, seen.reason))
        elif not (log.drained or log.wanted or log.reserved or log.number):
            return Answer(f"node {name} is not drained by rsup; nothing was done")
        notes.append(DrainNoted(name, now_us + 1, "unwanted", 0, one_line(word.reason), word.principal))
    whom = "it" if len(word.nodes) == 1 else "them"
    return Answer("", f"{_named(word.nodes)}: may run jobs again, until there is new evidence against {whom}", notes)


def outcome(word: Word, told: Answer, logs: Mapping[str, NodeLog], trouble: str) -> Answer:
    """What is to be said once a round was made with that word: not `drained` where SLURM has not done it. `trouble`: what it
    said."""
    if told.refused or word.dry_run:
        return told
    standing = {name: logs.get(name, NOTHING) for name in word.nodes}
    late = [name for name, log in standing.items() if _stands(log) != (word.verb == "drain")]
    waiting = [name for name in late if word.verb == "undrain" and standing[name].waits_for_gate]
    late = [name for name in late if name not in waiting]
    if waiting:
        more = f"; SLURM starts none on {_named(waiting)} before the gate there knows of it (it asks each minute)"
        told = replace(told, message=told.message + more)
    if not late:
        return told
    done = [name for name in word.nodes if name not in late and name not in waiting]
    first = f"{_named(done)}: {word.verb}ed; " if done else ""
    asked = "not drained" if word.verb == "drain" else "drained still"
    again = "it is tried again, until `rsup nodes undrain`" if word.verb == "drain" else "it is tried again"
    return Answer("", f"{first}{_named(late)}: {asked}: {trouble or 'SLURM has not done it yet'}; {again}", undone=late)


def _stands(log: NodeLog) -> bool:
    """Whether jobs are kept off in SLURM."""
    return bool(log.drained) or log.reserved or log.taken_over


def _theirs(seen: NodeSeen) -> str:
    state = "drained" if seen.is_drained else seen.state.lower()
    return f"node {seen.name} is {state} by {seen.reason_by or 'somebody else'}: {seen.reason}"


def _named(names: Sequence[str]) -> str:
    """`n[1-4]`, bounded."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return fold(sorted(names)[:MAX_NAMED] if more else names) + more
