"""What a failure looks like on the terminal. Pure text from facts: no clock, and no I/O but reading an error file."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsup.supervisor.wire import RankExited

MAX_REPORT_LINES = 40
MAX_LINE_CHARS = 160
MAX_ERROR_FILE_BYTES = 4 * 1024 * 1024

_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*(\n[ \t]+\S.*)?$", re.MULTILINE)
_EXCEPTION_LINE = re.compile(
    r"^(?:\[\S+\]:\s*)?(?:(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Timeout)|(?:\w+\.)+[A-Z]\w*)(?::\s.*)?$"
)
_COMPLAINT = re.compile(
    r"\b(error|fatal|failed|abort(ed)?|killed|terminate called|out of memory|segmentation fault|no such)\b", re.IGNORECASE
)
_AFTERMATH = re.compile(
    r"connection (closed|reset) by peer|broken pipe|socket closed|remote process exited|connection refused by peer",
    re.IGNORECASE,
)


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


def telling_line(log_tail: str) -> str:
    """The last line of a stderr tail that says what went wrong: an exception's line, else the last line with text.

    Python's warnings, with the source line that each shows, are no answer.
    """
    lines = [line.strip() for line in _WARNING.sub("", log_tail).splitlines() if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION_LINE.match(line)]
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    for found in (exceptions, complaints, lines):
        if found:
            return _printable(found[-1])[:MAX_LINE_CHARS]
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
    """Whether the rank was ended by us, or fell over because a peer had gone."""
    return bool(exited.by_us) or bool(_AFTERMATH.search(exited.error))


def first_failure(exits: Sequence[RankExited]) -> RankExited | None:
    """The rank that failed first, victims apart; None if none failed."""
    failed = sorted((e for e in exits if e.exit_code), key=lambda e: (is_victim(e), e.at_us, e.rank))
    return failed[0] if failed else None


def failure_report(job_id: str, exits: Sequence[RankExited], *, reason: str = "", num_tail_lines: int = 15) -> str:
    """The report of a failed attempt: the first failing rank with its error and last log lines, the others in a line each
    kind, what to run next. Printable text, at most `MAX_REPORT_LINES` lines. Empty if no rank failed and there is no reason.
    """
    first = first_failure(exits)
    if first is None and not reason:
        return ""
    lines = [f"job {job_id} failed" + (f": {_one_line(reason)}" if reason else "")]
    if first is not None:
        lines += _first_lines(first, num_tail_lines)
        lines += _other_lines([e for e in exits if e.exit_code and e is not first])
    body = [*lines[: MAX_REPORT_LINES - 3], f"more: rsup report {job_id}    rsup events {job_id}"]
    rule = "-" * 72
    return "\n".join([rule, *(_printable(line)[:MAX_LINE_CHARS] for line in body), rule])


def _first_lines(first: RankExited, num_tail_lines: int) -> list[str]:
    where = f" at iteration {first.iteration}" if first.iteration else ""
    where += f", in section {first.section}" if first.section else ""
    lines = [f"  first: rank {first.rank}, {exit_text(first.exit_code, first.signal)}{where} (attempt {first.attempt})"]
    if first.by_us:
        lines.append(f"  ended by rsup: {_one_line(first.by_us)}")
    if first.error:
        lines.append(f"  error: {_one_line(first.error)}")
    if first.declared_reason:
        lines.append(f"  declared: {first.declared} ({_one_line(first.declared_reason)})")
    tail = (first.log_tail or first.traceback).rstrip().splitlines()[-num_tail_lines:]
    return lines + (["  last lines of its stderr:"] if tail else []) + [f"    | {line}" for line in tail]


def _other_lines(others: Sequence[RankExited]) -> list[str]:
    lines = []
    failed = [e for e in others if not is_victim(e)]
    for other in failed[:4]:
        error = f": {_one_line(other.error)}" if _one_line(other.error) else ""
        lines.append(f"  also failed: rank {other.rank}, {exit_text(other.exit_code, other.signal)}{error}")
    if failed[4:]:
        lines.append(f"  also failed: ranks {_ranks(failed[4:])}")
    victims = [e for e in others if is_victim(e)]
    if victims:
        lines.append(f"  victims, ended by rsup or by the loss of a peer: rank{'s'[: len(victims) > 1]} {_ranks(victims)}")
    return lines


def _ranks(exits: Sequence[RankExited]) -> str:
    """`0-3,7`"""
    spans: list[list[int]] = []
    for rank in sorted({e.rank for e in exits}):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _seconds(extra: dict[str, Any]) -> int:
    try:
        return int(float(extra.get("timestamp", 0)) * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        return 0


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return _printable(lines[0].strip())[:MAX_LINE_CHARS] if lines else ""


def _printable(text: str) -> str:
    """Without what moves a terminal's cursor; other characters that do not print (or would reorder the line) are escaped."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f]", "", text.replace("\t", "    "))
    return plain if plain.isprintable() else "".join(_visible(character) for character in plain)


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
