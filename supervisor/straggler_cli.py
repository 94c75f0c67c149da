"""`rsup stragglers JOB [on|off]`: ranks that hold the others up, and the switch of their detection."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rsup.supervisor.job_name import JobName
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.query_cli import print_json, sources_of, supervisor_for
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.render import paint_for, terminal_width

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run `rsup stragglers` with these arguments. Raise `RsupError`, in one line, for what keeps it from answering."""
    arguments = _parser().parse_args(list(argv))
    if arguments.switch:
        _switch(arguments)
        return 0
    sources = sources_of(arguments)
    job = JobName("", "", arguments.job)
    status = sources.read(lambda source: source.status(job, stacks=False))
    if "ranks" in status and "stragglers" not in status:
        raise QueryError("the supervisor is of an older release, which keeps no slow ranks; restart it with this release")
    if "stragglers" not in status:
        owner = status["job"]["owner"]
        raise QueryError(f"job {status['job']['name']} belongs to {owner}: only its owner and operators see its stragglers")
    if arguments.json:
        print_json(status["stragglers"])
    else:
        from rsup.supervisor.straggler_text import stragglers_text

        print(stragglers_text(status["stragglers"], terminal_width(sys.stdout), paint_for(sys.stdout)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rsup stragglers",
        description="Show the ranks that held a job's others up, or switch their detection on or off while it runs.",
        allow_abbrev=False,
    )
    parser.add_argument("job", metavar="JOB", help="ID, ID.RUN or OWNER/ID")
    parser.add_argument("switch", metavar="on|off", nargs="?", choices=("on", "off"), help="switch the detection")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the job's story")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the store is [RSUP_STATE_DIR]")
    parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _switch(arguments: argparse.Namespace) -> None:
    source = supervisor_for(sources_of(arguments), "switch anything in it")
    job = JobName("", "", arguments.job)
    answer = source.change("stragglers", job, arguments.reason, arguments.dry_run, on=arguments.switch == "on")
    if arguments.json:
        print_json(answer)
    else:
        print(answer["message"])
