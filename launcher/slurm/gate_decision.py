"""May this job start on this node? Pure: no clock, no files.

A question is refused only for a verdict that is known: signed, confirmed lately, within the limits of the blast guard, about
this node or about a GPU that is surely the job's. All else lets the job in: what cannot be answered is `UNDECIDED`, and says
why.

An index is no GPU: when one falls off the bus the others may move up. `IndexMap` says which boards an index may stand for in
this boot; a job is refused for an index only if every one of them is refused.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

from rsup.launcher.slurm.snapshot_file import AVOID, REFUSE, Listed, Snapshot

MAX_LINE_CHARS = 120
PREFIX = "rsup:"
ACCEPT, REFUSED, UNDECIDED = "accept", "refuse", "undecided"
RESERVATION = "rsup_q_"
"""With the node's name behind it: the reservation in which the supervisor quarantines a node; SLURM lets root alone into it."""
LEAST_LIMIT = 2
"""So many nodes may be refused in the smallest cluster (`max(2, 5 %)` in the supervisor)."""


class Question(NamedTuple):
    """`indexes`: the job's GPUs as SLURM numbers them; `uuids`: where somebody knows them by name. `has_all`: SLURM numbers
    none here, and the job has all GPUs of the node. `is_here`: the node is the one that answers. `num_restarts`: how often
    SLURM has restarted the job. `reservation`: in which SLURM started it."""

    node: str
    cluster: str = ""
    indexes: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    job: str = ""
    num_restarts: int = 0
    has_all: bool = False
    is_here: bool = True
    reservation: str = ""

    @property
    def is_test(self) -> bool:
        """Whether the job was sent into the node's quarantine, to test it."""
        return bool(self.node) and self.reservation == RESERVATION + self.node


class IndexMap(NamedTuple):
    """Which boards each index may stand for, several where that is not sure. `problem`: why nothing is known, else empty.
    `here`: boards of this node whatever their index."""

    boards: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    problem: str = ""
    here: tuple[str, ...] = ()


class Limits(NamedTuple):
    """Of `node.toml`, and how long ago a supervisor confirmed the snapshot; None: nobody knows."""

    age_s: float | None
    max_age_s: float
    max_restarts: int


class Answer(NamedTuple):
    """`verdict`: ACCEPT, REFUSED or UNDECIDED. `why`: one or two words for counting. `line`: for people, at most 120
    characters, without quotes, newlines and `=`. `device`: the refused GPU, empty for a node. `is_alarm`: somebody should
    look."""

    verdict: str
    why: str
    line: str
    device: str = ""
    is_alarm: bool = False


def decide(question: Question, snapshot: Snapshot, boards: IndexMap, limits: Limits, now: datetime) -> Answer:
    """The answer to `question` by what `snapshot` says."""
    doubt = _doubt(question, snapshot, limits)
    if doubt is not None:
        return doubt
    answer = _by_devices(question, snapshot, boards, now)
    by_node = _by_node(question, snapshot, now)
    if by_node is not None and (by_node.verdict == REFUSED or answer.verdict != REFUSED):
        answer = by_node
    if answer.verdict == REFUSED and question.num_restarts >= limits.max_restarts:
        text = f"let in after {question.num_restarts} restarts, against: {answer.line.removeprefix(PREFIX)}"
        return Answer(ACCEPT, "refused enough", _line("cap", text), answer.device, is_alarm=True)
    return answer


def let_in_to_test(question: Question) -> Answer:
    """The answer where `is_test`, whatever is known: SLURM kept all other jobs out of that reservation."""
    return Answer(
        ACCEPT, "test", _line("ok", f"{question.reservation} is where {question.node} is tested: its jobs are let in")
    )


def undecided(why: str, text: str) -> Answer:
    """The answer where something is missing or broken."""
    return Answer(UNDECIDED, why, _line("unknown", text), is_alarm=True)


def _doubt(question: Question, snapshot: Snapshot, limits: Limits) -> Answer | None:
    """Why this snapshot must not be used, None if it may."""
    if not snapshot.cluster:
        return undecided(
            "other cluster", "the snapshot names no cluster, so whose it is is not sure; rsup serve --cluster NAME"
        )
    if question.cluster and question.cluster != snapshot.cluster:
        return undecided("other cluster", f"the snapshot is of cluster {snapshot.cluster}, this is {question.cluster}")
    if limits.age_s is None:
        return undecided("old", "no supervisor has confirmed this snapshot in this boot; see rsup slurm healthcheck")
    if limits.age_s > limits.max_age_s:
        return undecided(
            "old", f"no supervisor has confirmed the snapshot for {limits.age_s:.0f} s; see rsup slurm healthcheck"
        )
    num_refused = len(snapshot.refused_nodes)
    # Half of a cluster is never believed, whatever the snapshot says its limit is.
    limit = min(snapshot.max_refused, max(LEAST_LIMIT, snapshot.num_nodes // 2))
    if num_refused > limit:
        return undecided(
            "too many", f"the snapshot refuses {num_refused} of {snapshot.num_nodes} nodes, above the limit of {limit}"
        )
    return None


def _by_node(question: Question, snapshot: Snapshot, now: datetime) -> Answer | None:
    listed = snapshot.nodes.get(question.node)
    if listed is None or listed.verdict != REFUSE or _is_over(listed, now):
        return None
    if _end_of(listed) is None:
        return undecided("end", f"node {question.node} is refused, but {_doubtful_end(listed)}")
    return Answer(REFUSED, "node", _refusal(question.node, f"node {question.node}", listed))


def _by_devices(question: Question, snapshot: Snapshot, boards: IndexMap, now: datetime) -> Answer:
    listed = {uuid: one for uuid, one in snapshot.devices.items() if one.verdict == REFUSE and not _is_over(one, now)}
    doubtful = {uuid: one for uuid, one in listed.items() if _end_of(one) is None}
    refused = {uuid: one for uuid, one in listed.items() if uuid not in doubtful}
    for uuid in question.uuids:
        if uuid in refused:
            return Answer(REFUSED, "device", _refusal(question.node, f"GPU {uuid}", refused[uuid]), uuid)
    here = {*boards.here, *(uuid for found in boards.boards.values() for uuid in found)}
    doubts: list[str] = []
    for index in question.indexes:
        found = boards.boards.get(index, ())
        against = [uuid for uuid in found if uuid in refused]
        if found and len(against) == len(found):
            return Answer(REFUSED, "device", _refusal(question.node, f"GPU {index}", refused[against[0]]), against[0])
        if against:
            doubts.append(f"index {index} may be {' or '.join(found)}")
        elif not found and any(one.node == question.node or uuid in here for uuid, one in refused.items()):
            doubts.append(f"GPU index {index}: {boards.problem or 'not in the inventory of this boot'}")
    if question.has_all:
        for uuid, one in refused.items():
            if uuid in here:
                return Answer(REFUSED, "device", _refusal(question.node, f"GPU {uuid}", one), uuid)
            if one.node == question.node:
                doubts.append(f"{uuid}: {boards.problem or 'not in the inventory of this boot'}")
    if doubts:
        return undecided("index", f"a GPU of this node is refused, but which the job has is not sure: {doubts[0]}")
    theirs = {*question.uuids, *(here if question.has_all else (u for i in question.indexes for u in boards.boards.get(i, ())))}
    for uuid in sorted(theirs & doubtful.keys()):
        return undecided("end", f"GPU {uuid} is refused, but {_doubtful_end(doubtful[uuid])}")
    return _acceptance(question, snapshot, boards, refused)


def _acceptance(question: Question, snapshot: Snapshot, boards: IndexMap, refused: Mapping[str, Listed]) -> Answer:
    ours = {*question.uuids, *(uuid for index in question.indexes for uuid in boards.boards.get(index, ()))}
    listed = [snapshot.nodes.get(question.node), *(snapshot.devices.get(uuid) for uuid in ours)]
    if any(one is not None and one.verdict == AVOID for one in listed):
        return Answer(ACCEPT, "suspect", _line("ok", f"{question.node} has a suspect, better used last"))
    others = [(uuid, one) for uuid, one in refused.items() if one.node == question.node]
    if others:
        uuid, one = others[0]
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        whose = f"{question.node} or the GPUs in question" if ours else f"{question.node} itself"
        text = f"nothing against {whose}; refused to jobs that get it: {uuid}{more}, {one.id} {one.reason}"
        return Answer(ACCEPT, "clear", _line("ok", text))
    # Only what is not clear is listed, so that a node that does not exist reads like one that is sound.
    doubt = "" if question.is_here else ", if there is such a node"
    return Answer(ACCEPT, "clear", _line("ok", f"nothing known against {question.node}{doubt}"))


NEVER = datetime.max.replace(tzinfo=UTC)


def _end_of(listed: Listed) -> datetime | None:
    """When the verdict is over; None where that cannot be read, so that nobody knows whether it still stands."""
    if not listed.until:
        return NEVER
    try:
        end = datetime.fromisoformat(listed.until)
    except ValueError:
        return None
    return end if end.tzinfo else end.replace(tzinfo=UTC)


def _is_over(listed: Listed, now: datetime) -> bool:
    end = _end_of(listed)
    return end is not None and now >= end


def _doubtful_end(listed: Listed) -> str:
    return f"when {listed.id or 'that'} is over cannot be read: {listed.until[:30]}; upgrade rsup on this node"


def _refusal(node: str, what: str, listed: Listed) -> str:
    """`rsup:Q-17 GPU 3 serial 1650 SDC vote 3/3; until 2026-12-01; rsup nodes why n17`; the reason gives way, never the
    rest."""
    serial = f" serial {listed.serial}" if listed.serial and what.startswith("GPU") else ""
    until = f"; until {listed.until[:10]}" if listed.until else ""
    tail = f"{until}; rsup nodes why {node}"
    head = f"{listed.id or listed.state or 'refused'} {what}{serial} "
    room = MAX_LINE_CHARS - len(PREFIX) - len(head) - len(tail)
    reason = listed.reason.removeprefix(f"{PREFIX} ")  # the word of a user whose name is rsup
    return _clean(f"{PREFIX}{head}{reason[: max(0, room)].rstrip()}{tail}")


def _line(word: str, text: str) -> str:
    return _clean(f"{PREFIX}{word} {text}")


def _clean(text: str) -> str:
    """SLURM's log and reasons take neither newlines nor quotes nor `=`."""
    kept = "".join(letter if letter.isprintable() else " " for letter in text)
    return kept.replace("'", "").replace('"', "").replace("=", ":")[:MAX_LINE_CHARS]
