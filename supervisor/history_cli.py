"""The subcommands of `rsup devices` (and some of `rsup nodes`) that ask questions of the history; the verbs are elsewhere.

`add_parsers` puts them into a parser's subparsers, `run` answers one. Everything works with and without a running supervisor.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rsup.supervisor import history_questions, places
from rsup.supervisor.history_questions import Question
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.render import pieces, terminal_width
from rsup.supervisor.sources import Sources
from rsup.supervisor.store_source import StoreSource
from rsup.supervisor.wire import UsageError

MAX_POLICY_BYTES = 48 * 1024
MAX_DAYS = 3650.0

Json = dict[str, Any]

BY = ("vbios", "driver", "model", "node", "rack")


def add_parsers(subparsers: "argparse._SubParsersAction[Any]", kind: str = "device") -> None:
    """Add the questions about devices, or those about nodes. Their arguments carry `history`, which `run` calls."""
    for name, (meaning, options, answer) in _QUESTIONS.items():
        if kind == "device" or name in FOR_NODES:
            parser = subparsers.add_parser(
                name, help=meaning, description=meaning[:1].upper() + meaning[1:] + ".", allow_abbrev=False
            )
            options(parser, kind)
            parser.add_argument("--json", action="store_true", help="print JSON")
            parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the store is [RSUP_STATE_DIR]")
            parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
            parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
            parser.set_defaults(history=answer, kind=kind)


def run(arguments: argparse.Namespace) -> int:
    """Answer the question that was parsed; return the exit code. Raise `RsupError`, whose text is the one line to print."""
    answer: Callable[[argparse.Namespace], int] = arguments.history
    return answer(arguments)


FOR_NODES = ("timeline", "offenders", "stats", "export")
"""Questions that `rsup nodes` has too."""


# -------------------------------------------------------------------------------------------------------------- options


def _timeline_options(parser: argparse.ArgumentParser, kind: str) -> None:
    _add_subject(parser, kind)
    parser.add_argument("--at", default="", metavar="TIME", help="as of then: state, seat and users, and what came before")
    parser.add_argument("--limit", type=_count, default=50, metavar="N", help="entries (default 50)")
    parser.add_argument("--cursor", default="", help="go on where `next_cursor` of an answer says")


def _touched_options(parser: argparse.ArgumentParser, kind: str) -> None:
    _add_subject(parser, kind)
    since = parser.add_mutually_exclusive_group()
    since.add_argument("--since", default="", metavar="TIME", help="suspect it since then")
    since.add_argument(
        "--since-first-evidence", action="store_true", help="since the first evidence after its last repair (the default)"
    )


def _common_options(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="jobs that failed: ID, ID.RUN or OWNER/ID")
    parser.add_argument("--failed-since", default="", metavar="TIME", help="all that failed since then")
    parser.add_argument("--limit", type=_count, default=10, metavar="N", help="devices and nodes to show (default 10)")


def _days_option(days: float, meaning: str) -> Callable[[argparse.ArgumentParser, str], None]:
    def add(parser: argparse.ArgumentParser, kind: str) -> None:
        parser.add_argument("--days", type=_days, default=days, metavar="N", help=f"{meaning} (default {days:g})")

    return add


def _cluster_options(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--by", choices=BY, required=True, help="what devices of a group have in common")
    _days_option(30, "count trouble of the last N days")(parser, kind)
    parser.add_argument(
        "--rack-pattern", default="", metavar="REGEX", help="its first group is the rack in a node's name (reads the store)"
    )


def _replay_options(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--policy", required=True, metavar="FILE", help="the policy to try, as for `--device-policy`")
    _days_option(30, "the last N days")(parser, kind)


def _export_options(parser: argparse.ArgumentParser, kind: str) -> None:
    _add_subject(parser, kind)
    parser.add_argument("--output", default="", metavar="FILE", help="write it there (default: print it)")
    parser.add_argument("--text", action="store_true", help="a short text for people in place of JSON")
    parser.add_argument("--with-jobs", action="store_true", help="with names of jobs, their owners and paths")


def _add_subject(parser: argparse.ArgumentParser, kind: str) -> None:
    help_of = {"device": "a UUID or its beginning, a serial, or NODE:PCI", "node": "the node's name"}
    parser.add_argument("id", metavar="NODE" if kind == "node" else "ID", help=help_of[kind])


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days from 0 to {MAX_DAYS:g}")
    return days


# -------------------------------------------------------------------------------------------------------------- answers


def _timeline(arguments: argparse.Namespace) -> int:
    at_us = _moment(arguments.at, "--at")
    same = {"kind": arguments.kind, "cursor": arguments.cursor, "limit": arguments.limit}
    return _show(arguments, history_questions.timeline(arguments.id, at_us=at_us, **same), "timeline_text")


def _touched(arguments: argparse.Namespace) -> int:
    since_us = _moment(arguments.since, "--since")
    return _show(arguments, history_questions.touched(arguments.id, since_us), "touched_text")


def _common(arguments: argparse.Namespace) -> int:
    if not arguments.jobs and not arguments.failed_since:
        raise UsageError("which jobs? name some that failed, or give --failed-since TIME for all that failed since then")
    if arguments.jobs and arguments.failed_since:
        raise UsageError("name failed jobs, or give --failed-since TIME, not both")
    since_us = _moment(arguments.failed_since, "--failed-since")
    return _show(arguments, history_questions.common(arguments.jobs, since_us, arguments.limit), "common_text")


def _offenders(arguments: argparse.Namespace) -> int:
    return _show(arguments, history_questions.offenders(arguments.days, arguments.kind), "offenders_text")


def _clusters(arguments: argparse.Namespace) -> int:
    question = history_questions.clusters(arguments.by, arguments.days, arguments.rack_pattern)
    return _show(arguments, question, "clusters_text", from_store=bool(arguments.rack_pattern))


def _expiring(arguments: argparse.Namespace) -> int:
    return _show(arguments, history_questions.expiring(arguments.days), "expiring_text")


def _stats(arguments: argparse.Namespace) -> int:
    return _show(arguments, history_questions.stats(arguments.days, arguments.kind), "stats_text")


def _replay(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.hardware import policy

    policy.load(arguments.policy)  # its errors name the file
    text = Path(arguments.policy).read_text()
    if len(text.encode()) > MAX_POLICY_BYTES:
        raise UsageError(f"the device policy {arguments.policy} is longer than {MAX_POLICY_BYTES} bytes")
    question = history_questions.replay(text, arguments.policy, arguments.days)
    return _show(arguments, question, "replay_text", from_store=not arguments.supervisor)


def _export(arguments: argparse.Namespace) -> int:
    if arguments.output and os.path.lexists(arguments.output):
        raise UsageError(f"{arguments.output} exists; name a file that does not")
    record = _answer(arguments, history_questions.export(arguments.id, arguments.with_jobs, arguments.kind), from_store=False)
    if arguments.text:
        from rsup.supervisor.vendor_export import record_text

        text = record_text(record)
    else:
        text = json.dumps(record, indent=1, ensure_ascii=False)
    if not arguments.output:
        print(text)
        return 0
    try:
        descriptor = os.open(arguments.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {arguments.output}: {error.strerror}") from None
    told = {"output": arguments.output, "evidence": record["num_evidence"], "tests": len(record["tests"])}
    print(json.dumps(told) if arguments.json else f"written: {arguments.output} ({pieces(told['evidence'])})")
    return 0


def _moment(text: str, option: str) -> int | None:
    from rsup.supervisor.moments import parse_moment

    return parse_moment(text, history_questions.now_us(), option) if text else None


def _show(arguments: argparse.Namespace, question: Question, text_of: str, *, from_store: bool = False) -> int:
    answer = _answer(arguments, question, from_store=from_store)
    if arguments.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        from rsup.supervisor import history_text

        as_text: Callable[[Json, int | None], str] = getattr(history_text, text_of)
        print(as_text(answer, terminal_width(sys.stdout)))
    return 0


def _answer(arguments: argparse.Namespace, question: Question, *, from_store: bool) -> Json:
    """From the running supervisor, else from the store. `from_store`: the other way round, since it costs seconds, which are
    then ours; or only the store, where the question cannot be posted."""
    state = places.state_dir_to_read(arguments.state_dir)
    host_first = places.names_no_state_dir(arguments.state_dir)
    sources = Sources(state, arguments.supervisor, note=_note, host_first=host_first)
    if from_store and (question.body is None or not sources.asks_the_host()):
        try:
            return StoreSource(state, _note).answer(question)
        except QueryError as error:
            if question.body is None:
                raise
            _note(f"{error}; asking the supervisor")
    return sources.read(lambda source: source.answer(question))


def _note(text: str) -> None:
    print(f"rsup: {text}", file=sys.stderr)


_QUESTIONS: dict[str, tuple[str, Callable[[argparse.ArgumentParser, str], None], Callable[[argparse.Namespace], int]]] = {
    "timeline": ("everything about it: seats, users, evidence, decisions, cases, incidents", _timeline_options, _timeline),
    "touched": ("jobs, iterations and checkpoints that it may have spoiled, to verify again", _touched_options, _touched),
    "common": ("what failed jobs have in common, weighed by how much each device was used", _common_options, _common),
    "offenders": (
        "what fails again and again, and what failed again after a repair",
        _days_option(30, "in the last N days"),
        _offenders,
    ),
    "clusters": ("whether trouble clusters by firmware, driver, model, node or rack", _cluster_options, _clusters),
    "replay": ("what another policy would have done", _replay_options, _replay),
    "expiring": ("suspicion and overrides that end soon", _days_option(7, "within N days"), _expiring),
    "stats": ("states, repair times, and how often quarantine was right", _days_option(90, "of the last N days"), _stats),
    "export": ("its record for the vendor's ticket, without users' data", _export_options, _export),
}
