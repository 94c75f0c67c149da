"""`rsup cases list` and `rsup cases show`: rerun cases, with or without a running supervisor."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rsup.supervisor.job_name import JobName
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.query_cli import count, print_json, sources_of
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.render import paint_for, terminal_width
from rsup.supervisor.sources import Sources
from rsup.supervisor.wire import VERDICTS, RsupError

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run `rsup cases` with these arguments. Raise `RsupError`, in one line, for what keeps it from answering."""
    arguments = _parser().parse_args(list(argv))
    found = _list(arguments) if arguments.verb == "list" else _show(arguments)
    if arguments.json:
        print_json(found)
    else:
        print(_text(arguments.verb, found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rsup cases",
        description="Rerun cases: iterations with a rejected result, what replays made of them, and the verdict.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|show", parser_class=OneLineParser)
    listing = verbs.add_parser("list", help="list cases, newest first", allow_abbrev=False)
    listing.add_argument("job", metavar="JOB", nargs="?", help="ID, ID.RUN or OWNER/ID (default: cases of all jobs)")
    listing.add_argument("--limit", type=count, default=20, metavar="N", help="how many (default 20)")
    listing.add_argument("--verdict", choices=("open", *VERDICTS), default="", help="only those with this verdict")
    showing = verbs.add_parser("show", help="show what was compared, where, the verdict, and what followed", allow_abbrev=False)
    showing.add_argument("case", metavar="CASE|JOB", help="a case's id or its beginning, or a job of which all cases are shown")
    for sub in (listing, showing):
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument("--state-dir", default=None, metavar="DIR", help="where the store is [RSUP_STATE_DIR]")
        sub.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _list(arguments: argparse.Namespace) -> list[Json]:
    sources = sources_of(arguments)
    if not arguments.job:
        return sources.cases(arguments.limit, arguments.verdict)
    job = JobName("", "", arguments.job)
    return sources.read(lambda source: source.cases(job, arguments.limit, arguments.verdict))


def _show(arguments: argparse.Namespace) -> list[Json]:
    sources = sources_of(arguments)
    try:
        found = sources.read(lambda source: source.case(arguments.case))
        if found and found[0]["case_id"] == arguments.case:
            return found
        no_case = None
    except QueryError as error:
        found, no_case = [], error
    of_job = _of_job(sources, arguments.case)
    if of_job is None and no_case is not None:
        raise no_case from None
    return found if of_job is None else of_job


def _of_job(sources: Sources, name: str) -> list[Json] | None:
    """The cases of a job of that name, oldest first; None where there is no such job."""
    try:
        found = sources.read(lambda source: source.cases(JobName("", "", name), 1000, ""))
    except RsupError:
        return None
    return found[::-1]


def _text(verb: str, found: Sequence[Json]) -> str:
    from rsup.supervisor.case_text import case_text, cases_text

    width, paint = terminal_width(sys.stdout), paint_for(sys.stdout)
    if verb == "list" or not found:
        return cases_text(found, width, paint)
    return "\n\n".join(case_text(one, width, paint) for one in found)
