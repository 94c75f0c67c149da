"""`rsup gate`: may a job start on this node? Answers from local files within a second, never from the network.

Exit codes: 0 accept, 1 refuse, 75 could not decide, 2 wrong usage. One line on stdout, which begins with `rsup:`. In mode
`observe` a refusal is said and accepted. An exit code of 1 without that line is no refusal but a crash of the interpreter.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import NamedTuple

from rsup.launcher.slurm.gate_decision import REFUSED as REFUSED
from rsup.launcher.slurm.gate_decision import UNDECIDED, Answer, IndexMap, Limits, Question, decide, let_in_to_test, undecided
from rsup.launcher.slurm.node_inventory import read_boards
from rsup.launcher.slurm.node_settings import (
    UNUSABLE,
    NodePlaces,
    NodeProblem,
    NodeSettings,
    boot_id,
    cluster_name,
    node_name,
    places_of,
    read_settings,
    read_trusted,
)
from rsup.launcher.slurm.snapshot_file import MAX_SNAPSHOT_BYTES, NotPublic, public_key_of, read_snapshot

EXIT_ACCEPT, EXIT_REFUSE, EXIT_USAGE, EXIT_UNDECIDED = 0, 1, 2, 75
FIRST_BOX_S = 4.0
"""Until the settings are read, which have the real one; the script around us gives 5 s."""
MAX_INDEXES = 4096
USAGE = """usage: rsup gate [--node NAME] [--gpus INDEXES] [--uuids UUIDS] [--json]

May a job start on this node? Asks the signed snapshot under /run/rsup, never the network.

  --node NAME      one node; default: SLURMD_NODENAME, else node in /etc/rsup/node.toml, else the host's short name
  --gpus INDEXES   as SLURM writes them, 0,2-3; default: SLURM_JOB_GPUS. Without any only the node itself is asked about
                   (with whole_node in node.toml: all its GPUs)
  --uuids UUIDS    GPUs by name, separated by commas
  --json           the answer as one JSON object

Exit codes: 0 accept, 1 refuse, 75 could not decide, 2 wrong usage. In mode observe a refusal is said, and the code is 0."""


class _UsageProblem(Exception):
    """What is wrong with the arguments."""


class Asked(NamedTuple):
    """A question and its answer. `exit_code`: of the mode, too."""

    question: Question
    answer: Answer
    settings: NodeSettings
    boards: IndexMap
    places: NodePlaces

    @property
    def exit_code(self) -> int:
        if self.answer.verdict == REFUSED:
            return EXIT_REFUSE if self.settings.mode == "enforce" else EXIT_ACCEPT
        return EXIT_UNDECIDED if self.answer.verdict == UNDECIDED else EXIT_ACCEPT

    @property
    def line(self) -> str:
        """For stdout: the answer's, marked where the mode only observes."""
        if self.answer.verdict != REFUSED or self.settings.mode == "enforce":
            return self.answer.line
        return f"rsup:observe would refuse: {self.answer.line.removeprefix('rsup:')}"[:120]


def main(words: Sequence[str]) -> int:
    """The verb. Never raises."""
    start_time_box()
    try:
        given, as_json = _parse(words)
    except _UsageProblem as problem:
        if str(problem):
            print(f"rsup gate: {problem}; see rsup gate --help", file=sys.stderr)
            return EXIT_USAGE
        print(USAGE)
        return 0
    asked = ask_in_time(given)
    if as_json:
        say(json.dumps(_as_json(asked)))
    else:
        say(asked.line)
    end_time_box()
    return asked.exit_code


def _as_json(asked: Asked) -> dict[str, object]:
    answer = asked.answer
    return {
        "schema": 1,
        "verdict": answer.verdict,
        "why": answer.why,
        "line": answer.line,
        "mode": asked.settings.mode,
        "node": asked.question.node,
        "device": answer.device or None,
        "exit_code": asked.exit_code,
    }


def start_time_box(seconds: float = FIRST_BOX_S) -> None:
    """From now on the process ends undecided after that time, in the middle of whatever it does."""

    def give_up(number: int, frame: FrameType | None) -> None:
        os.write(1, f"rsup:unknown the gate took longer than {seconds:g} s\n".encode())
        os._exit(EXIT_UNDECIDED)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end_time_box() -> None:
    """The answer is said: the interpreter may take its time to end."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def ask_in_time(given: Mapping[str, str] | None = None) -> Asked:
    """`ask` of this process's environment within the time of the settings, which begins now. For programs of our own only: it
    takes SIGALRM, and ends the process."""
    settings = read_settings(places_of(os.environ).settings)
    start_time_box(settings.time_box_s)
    return ask(os.environ, given, settings)


def ask(environ: Mapping[str, str], given: Mapping[str, str] | None = None, settings: NodeSettings | None = None) -> Asked:
    """The question that the environment of a prolog puts (`given` goes before it), and its answer. `settings`: where they are
    read already. Never raises."""
    places = places_of(environ)
    question, boards = Question(""), IndexMap()
    settings = settings or read_settings(places.settings)
    try:
        question = question_of(environ, given or {}, settings)
        boot = boot_id(places.root)
        if question.node == node_name(environ, settings):
            boards = read_boards(places.inventory, boot)
        else:
            boards = IndexMap(problem=f"the inventory here is not that of {question.node}; name its GPUs with --uuids")
        answer = _answer(question, settings, places, boards, boot)
    except NodeProblem as problem:
        answer = undecided("problem", str(problem))
    except Exception as error:  # the outermost frame of the prolog: whatever is wrong with us is no job's fault
        answer = undecided("fault", f"internal error: {type(error).__name__}: {error}")
    return Asked(question, answer, settings, boards, places)


def question_of(environ: Mapping[str, str], given: Mapping[str, str], settings: NodeSettings) -> Question:
    """Raise `NodeProblem` for indexes that are none."""
    own = node_name(environ, settings)
    node = given.get("node") or own
    own_gpus = environ.get("SLURM_JOB_GPUS", "") if node == own else ""
    gpus = given.get("gpus", own_gpus)
    uuids = tuple(word for word in given.get("uuids", "").split(",") if word)
    restarts = environ.get("SLURM_JOB_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or "0"
    return Question(
        node=node,
        cluster=cluster_name(environ, settings),
        indexes=indexes_of(gpus),
        uuids=uuids,
        job=environ.get("SLURM_JOB_ID", ""),
        num_restarts=int(restarts) if restarts.isdigit() else 0,
        has_all=settings.whole_node and not gpus and not uuids and node == own,
        is_here=node == own,
        reservation=environ.get("SLURM_JOB_RESERVATION", ""),
    )


def indexes_of(text: str) -> tuple[str, ...]:
    """`0,2-3` as words. Raise `NodeProblem`."""
    found: list[str] = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or len(part) > 12:
            raise NodeProblem(f"{part[:20]!r} is no GPU index as SLURM writes it, 0,2-3")
        if int(last or first) < int(first):
            raise NodeProblem(f"{part!r} is no range of GPU indexes: it ends before it begins")
        if int(last or first) - int(first) + len(found) >= MAX_INDEXES:
            raise NodeProblem(f"{part!r}: more than {MAX_INDEXES} GPU indexes")
        found += map(str, range(int(first), int(last or first) + 1))
    return tuple(found)


def _answer(question: Question, settings: NodeSettings, places: NodePlaces, boards: IndexMap, boot: str) -> Answer:
    if question.is_test:
        return let_in_to_test(question)
    if settings.problem:
        return undecided("settings", settings.problem)
    try:
        data = read_trusted(places.snapshot, MAX_SNAPSHOT_BYTES)
    except FileNotFoundError:
        return undecided("no snapshot", f"there is no snapshot {places.snapshot}; rsup slurm healthcheck fetches it")
    except OSError as error:
        return undecided("no snapshot", f"cannot read {places.snapshot}: {error.strerror}")
    key = read_key(places, settings)
    snapshot = read_snapshot(data, key)
    limits = Limits(_age_s(places, snapshot.serial, boot), settings.max_age_s, settings.max_restarts)
    return decide(question, snapshot, boards, limits, datetime.now(UTC))


def blindness(environ: Mapping[str, str], settings: NodeSettings) -> str:
    """Why this node's gate would decide nothing now, whatever job comes; empty where it sees. Never raises."""
    if settings.problem:
        return settings.problem
    asked = ask(environ, {"gpus": ""}, settings)
    if asked.answer.verdict == UNDECIDED:
        return asked.answer.line.removeprefix("rsup:unknown ")
    return f"it tells no GPU from another: {asked.boards.problem}" if asked.boards.problem else ""


def read_key(places: NodePlaces, settings: NodeSettings) -> bytes:
    """The supervisor's public key, as this node has it. Raise `NodeProblem`."""
    path = places.under(settings.public_key_file)
    try:
        return public_key_of(read_trusted(path, 4096))
    except NotPublic as problem:
        raise NodeProblem(f"{path}: {problem}") from None
    except OSError as error:
        raise NodeProblem(f"no public key of the supervisor: {error.strerror}: copy its signing-key.pub to {path}") from None


def _age_s(places: NodePlaces, serial: int, boot: str) -> float | None:
    """How long ago a supervisor said that this snapshot is its newest: by the boot clock, since the wall clock may step and is
    not the supervisor's. None where nobody wrote that down in this boot."""
    with suppress(*UNUSABLE):
        confirmed = json.loads(read_trusted(places.confirmed, 4096))
        told_s = confirmed["boottime_s"] if confirmed["serial"] == serial else confirmed["before"][str(serial)]
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(told_s)
        if confirmed["boot_id"] == boot and age_s >= 0:  # else of another clock
            return age_s
    return None


def say(line: str) -> None:
    """One line on stdout, ASCII: SLURM's log takes no more."""
    with suppress(OSError):
        os.write(1, line.encode("ascii", "replace") + b"\n")


def _parse(words: Sequence[str]) -> tuple[dict[str, str], bool]:
    given: dict[str, str] = {}
    as_json, left = False, list(words)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word in ("-h", "--help"):
            raise _UsageProblem
        if word == "--json" and not equals:
            as_json = True
            continue
        if word not in ("--node", "--gpus", "--uuids"):
            raise _UsageProblem(f"unknown argument {word!r}")
        if not equals and not left:
            raise _UsageProblem(f"{word} needs a value")
        given[word[2:]] = value if equals else left.pop(0)
        if not given[word[2:]].strip(", "):
            raise _UsageProblem(f"{word} names none; leave it out, or name one")
    if set("[],") & set(given.get("node", "")):
        raise _UsageProblem(f"--node {given['node']!r} names several nodes; ask about one at a time")
    try:
        indexes_of(given.get("gpus", ""))
    except NodeProblem as problem:
        raise _UsageProblem(f"--gpus: {problem}") from None
    return given, as_json


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
