"""What a failure looks like on the terminal. Pure text from facts: no clock, and no I/O but reading an error file."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rsup.supervisor.wire import RankExited

MAX_REPORT_LINES = 40
MAX_LINE_CHARS = 160
MAX_REASON_CHARS = 600
MAX_STOOD_IN = 4
MAX_ERROR_FILE_BYTES = 4 * 1024 * 1024

_WARNING = re.compile(r"^(\S+:\d+: \w*Warning: .*(\n[ \t]+\S.*)?|(rsup: )?warning: .*|\[?WARN(ING)?\b.*)$", re.MULTILINE)
"""Python's, with the source line that each shows, and those of programs, ours too: they name errors that ended nothing."""
_RESTARTED_AFTER = re.compile(
    r"^.*: entry \d+ into the training ends, in-process restart follows:\n(Traceback .*\n([ \t].*\n)*.*$)?", re.MULTILINE
)
"""An exception that the process has outlived, as `worker/inprocess/faults.py` prints it."""
_EXCEPTION_LINE = re.compile(
    r"^(?:\[\S+\]:\s*)?(?:(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Timeout)|(?:\w+\.)+[A-Z]\w*)(?::\s.*)?$"
)
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s*")
"""Which torch puts in front of each line of an exception."""
_COMPLAINT = re.compile(
    r"\b(error|fatal|failed|abort(ed)?|killed|terminate called|out of memory|segmentation fault|no such)\b", re.IGNORECASE
)
_AFTERMATH = re.compile(
    r"connection (was )?(likely )?(closed|reset)|broken pipe|connection refused|socket ?(timeout|closed)|"
    r"remote process exit|peer (is )?(gone|closed|failed)|recvvalue failed|failed to recv|sendbytes failed|store is closed|"
    r"process ?group .*(abort|time)|timed out waiting for.*(rank|peer)|ncclremoteerror|gloo.*(read|write|timeout)",
    re.IGNORECASE,
)
"""An error line that only says that another rank is gone. The supervisor knows the same (`supervisor/failure.py`)."""


@dataclass(frozen=True)
class RankError:
    """A rank's exception as torch's `@record` left it. `line`: type and text in one line. `at_us`: 0 if not given."""

    line: str
    traceback: str
    at_us: int = 0


def read_error_file(path: Path) -> RankError | None:
    """torch's error.json; None if there is none or it makes no sense. Never raises."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ERROR_FILE_BYTES)
        content: Any = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):  # older torch, and scripts that write it themselves
        return RankError(_one_line(message), message)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return RankError(_one_line(str(message.get("message", ""))), str(extra.get("py_callstack", "")), _seconds(extra))


def telling_line(log_tail: str, of_stderr: bool = True) -> str:
    """The last line of a stderr tail that says what went wrong: an exception's line, else the last line with text.

    Warnings are no answer, nor are exceptions that an in-process restart followed; nor is just any line, where not `of_stderr`
    alone.
    """
    lines = [line.strip() for line in _RESTARTED_AFTER.sub("", _WARNING.sub("", log_tail)).splitlines() if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION_LINE.match(line)]
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    for found in (exceptions, complaints, lines if of_stderr else []):
        if found:
            return _printable(_RANK_PREFIX.sub("", found[-1]))[:MAX_LINE_CHARS]
    return ""


def exit_text(exit_code: int, signal_number: int) -> str:
    """`exit code 3`, `SIGKILL (signal 9)`."""
    if not signal_number:
        return f"exit code {exit_code}"
    return f"{signal_name(signal_number)} (signal {signal_number})"


def signal_name(number: int) -> str:
    """`SIGKILL`; `SIGRTMIN+5` for real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def is_victim(exited: RankExited) -> bool:
    """Whether the rank was ended by us, or fell over because a peer had gone. Nobody falls over by SIGKILL."""
    return bool(exited.by_us) or (exited.signal != signal.SIGKILL and bool(_AFTERMATH.search(exited.error)))


def first_failure(exits: Sequence[RankExited]) -> RankExited | None:
    """The rank that failed first, victims apart; None if none failed."""
    failed = sorted((e for e in exits if e.exit_code), key=lambda e: (is_victim(e), e.at_us, e.rank))
    return failed[0] if failed else None


def failure_report(
    job_id: str,
    exits: Sequence[RankExited],
    *,
    reason: str = "",
    rank: int | None = None,
    num_tail_lines: int = 15,
    stood_in: Sequence[tuple[int, str]] = (),
    says_where: bool = True,
) -> str:
    """The report of a failed attempt: the first failing rank with its error and last log lines, the others in a line each
    kind, what to run next. Printable text, at most `MAX_REPORT_LINES` lines. Empty if no rank failed and there is no reason.

    `says_where`: with the commands that tell more. `rank`: who failed first in the decider's judgement. `stood_in`: ranks that
    were alive when stacks were taken, with the innermost frame of each.
    """
    first = next((e for e in exits if e.exit_code and e.rank == rank), None) or first_failure(exits)
    if first is None and not reason:
        return ""
    lines = _reason_lines(job_id, reason)
    if first is not None:
        others = [e for e in exits if e.exit_code and e is not first]
        below = [*_also_failed_lines(first, others), *_victim_lines(first, others), *_stack_lines(job_id, stood_in)]
        lines += _first_lines(first, min(num_tail_lines, MAX_REPORT_LINES - 12 - len(below))) + below
    body = [*lines[: MAX_REPORT_LINES - 3], *([f"more: rsup report {job_id}    rsup events {job_id}"] if says_where else [])]
    rule = "-" * 72
    return "\n".join([rule, *(_printable(line)[:MAX_LINE_CHARS] for line in body), rule])


def _reason_lines(job_id: str, reason: str) -> list[str]:
    """What happened, and below it what follows from that."""
    what, semicolon, follows = _one_line(reason, MAX_REASON_CHARS).rpartition("; no restart: ")
    text = what or follows
    lines = [f"job {job_id} failed" + (f": {text}" if text else "")]
    return lines + ([f"  no restart: {follows}"] if semicolon else [])


def _first_lines(first: RankExited, num_tail_lines: int) -> list[str]:
    where = f" at iteration {first.iteration}" if first.iteration else ""
    where += f", in section {first.section}" if first.section else ""
    how = exit_text(first.exit_code, first.signal)
    lines = [f"  first: rank {first.rank}, {how}{where} (attempt {first.attempt}, {_time_of_day(first.at_us)})"]
    if first.by_us:
        lines.append(f"  ended by rsup: {_one_line(first.by_us)}")
    elif first.killer:
        lines.append(f"  {_one_line(first.killer)}")
    if first.error:
        lines.append(f"  error: {_one_line(first.error)}")
    if first.declared_reason:
        lines.append(f"  declared: {first.declared} ({_one_line(first.declared_reason)})")
    tail = (first.log_tail or first.traceback).rstrip().splitlines()[-num_tail_lines:]
    return lines + (["  last lines of its stderr:"] if tail else []) + [f"    | {line}" for line in tail]


def _also_failed_lines(first: RankExited, others: Sequence[RankExited]) -> list[str]:
    lines = []
    failed = [e for e in others if not is_victim(e)]
    for other in failed[:4]:
        error = f": {_one_line(other.error)}" if _one_line(other.error) else ""
        how = exit_text(other.exit_code, other.signal)
        lines.append(f"  also failed: rank {other.rank}, {how}, {_later([other], first)}{error}")
    if failed[4:]:
        lines.append(f"  also failed: {_ranks(failed[4:])}, {_later(failed[4:], first)}")
    return lines


def _victim_lines(first: RankExited, others: Sequence[RankExited]) -> list[str]:
    """Who was ended by us, with which signal; who left by himself when asked to; who fell over because a peer had gone. A line
    each kind."""
    lines = []
    for signum in sorted({e.signal for e in others if e.by_us}):
        ended = [e for e in others if e.by_us and e.signal == signum]
        how = f"ended by rsup with {signal_name(signum)}" if signum else f"left by {_left_text(ended)} to end"
        lines.append(f"  {how}: {_ranks(ended)}, {_later(ended, first)}")
    fallen = [e for e in others if is_victim(e) and not e.by_us]
    if fallen:
        lines.append(f"  victims, of a lost peer: {_ranks(fallen)}, {_later(fallen, first)}: {_one_line(fallen[0].error)}")
    return lines


def _left_text(exits: Sequence[RankExited]) -> str:
    codes = ", ".join(map(str, sorted({e.exit_code for e in exits})))
    themselves, them = ("itself", "it") if len(exits) == 1 else ("themselves", "them")
    return f"{themselves} (exit {codes}) after rsup asked {them}"


def _stack_lines(job_id: str, stood_in: Sequence[tuple[int, str]]) -> list[str]:
    if not stood_in:
        return []
    lines = [f"  rank {rank} stood in {frame}" for rank, frame in stood_in[:MAX_STOOD_IN]]
    return [*lines, f"  stacks of {_count(len(stood_in), 'rank')}: rsup stacks {job_id}"]


def _later(exits: Sequence[RankExited], first: RankExited) -> str:
    """`3 ms later`, `2-31 ms later`: by this node's clock, which stamped them all."""
    after_ms = sorted(max(0, e.at_us - first.at_us) // 1000 for e in exits)
    return f"{after_ms[0]} ms later" if after_ms[0] == after_ms[-1] else f"{after_ms[0]}-{after_ms[-1]} ms later"


def _time_of_day(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%H:%M:%S}.{at_us // 1000 % 1000:03d} UTC"


def _ranks(exits: Sequence[RankExited]) -> str:
    """`rank 4`, `ranks 0-3,7`"""
    spans: list[list[int]] = []
    ranks = sorted({e.rank for e in exits})
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s'[: len(ranks) > 1]} {text}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s'[: number != 1]}"


def _seconds(extra: dict[str, Any]) -> int:
    try:
        return int(float(extra.get("timestamp", 0)) * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        return 0


def _one_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    lines = text.strip().splitlines()
    return _printable(lines[0].strip())[:max_chars] if lines else ""


def _printable(text: str) -> str:
    """Without what moves a terminal's cursor; other characters that do not print (or would reorder the line) are escaped."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f]", "", text.replace("\t", "    "))
    return plain if plain.isprintable() else "".join(_visible(character) for character in plain)


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
