"""The commands that read a job's story, and `rsup stop`, `checkpoint` and `fence`, which ask the supervisor for something.

Times are UTC. Nothing heavy is imported before it is needed: `rsup jobs --help` must be quick.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rsup.supervisor.job_name import JobName
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.query_source import QueryError, name_of
from rsup.supervisor.render import fitting, paint_for, terminal_width
from rsup.supervisor.request_outcome import outcome
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.slurm_stories import story_sources
from rsup.supervisor.sources import Sources
from rsup.supervisor.wire import UsageError

WATCH_INTERVAL_S = 1.0
FOLLOW_INTERVAL_S = 0.3
PAGE = 500

Json = dict[str, Any]

DESCRIPTIONS = {
    "jobs": "List jobs, newest first.",
    "status": "Show a job: state, ranks, incidents, checkpoints, goodput.",
    "events": "Print a job's events: what happened, what was decided, and why.",
    "stacks": "Print the stacks that were taken when a job last hung.",
    "report": "Tell the story of a job: what happened, how it was found, how long recovery took, what was lost. It is printed,"
    " and drawn with the training's curves on a page that needs nothing else, rsup-report-JOB.html in the current directory.",
    "stop": "Ask a job to save and leave.",
    "checkpoint": "Ask a job for a checkpoint at its next iteration.",
    "fence": "Declare a node dead that does not answer, so that its job goes on without it. Only if you are sure that no"
    " process of the job lives there (it is off, or was rebooted): else two attempts could write the same checkpoints.",
}
VERBS = tuple(DESCRIPTIONS)
CHANGES = ("stop", "checkpoint", "fence")


def main(verb: str, argv: Sequence[str]) -> int:
    """Run `rsup VERB ARGV`; return the exit code. Raise `RsupError`; Ctrl-C and a reader that has gone are the caller's too."""
    return _RUN[verb](_parser(verb).parse_args(list(argv)))


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=f"rsup {verb}", description=DESCRIPTIONS[verb], allow_abbrev=False)
    if verb in CHANGES:
        parser.add_argument("job", metavar="JOB", help="ID, ID.RUN or OWNER/ID")
        if verb == "fence":
            parser.add_argument("node", metavar="NODE", help="the node's name, or its agent's id (see `rsup events JOB`)")
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the job's story")
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    elif verb != "jobs":
        parser.add_argument("job", metavar="JOB", nargs="?", help="ID, ID.RUN or OWNER/ID (default: the newest job)")
    if verb == "jobs":
        parser.add_argument("--limit", type=count, default=20, metavar="N", help="how many (default 20)")
        parser.add_argument("--state", default="", help="only jobs in this state, or `live` for all that have not ended")
        parser.add_argument("--owner", default="", help="only jobs of this user")
    if verb == "status":
        parser.add_argument("--watch", action="store_true", help="show it again every second until the job ends")
        parser.add_argument(
            "--page", action="store_true", help="print the address of the web page, signed in, and nothing else"
        )
    if verb == "events":
        parser.add_argument("--follow", action="store_true", help="go on with new events until the job ends")
        parser.add_argument("--last", type=count, default=None, metavar="N", help="begin with the newest N events")
    if verb == "report":
        parser.add_argument("--output", default="", metavar="FILE", help="write the page there (`-`: to standard output)")
        parser.add_argument("--text", action="store_true", help="only the text, no page")
    if verb == "stacks":
        parser.add_argument("--rank", type=int, default=None, metavar="R", help="of this rank only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the store is [RSUP_STATE_DIR]")
    parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def count(text: str) -> int:
    """A number of things to show. Raise `argparse.ArgumentTypeError`."""
    if not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000000")
    return int(text)


def sources_of(arguments: argparse.Namespace) -> Sources:
    """Where a query with `--state-dir` and `--supervisor` gets its answers."""
    job = getattr(arguments, "job", None) or getattr(arguments, "case", None) or ""
    return story_sources(arguments.state_dir, arguments.supervisor, _note, job)


def _note(text: str) -> None:
    print(f"rsup: {text}", file=sys.stderr)


def _say(text: str, end: str = "\n") -> None:
    """Print it, in the characters that the terminal has."""
    print(fitting(text, sys.stdout.encoding), end=end, flush=True)


def print_json(content: object, indent: int | None = 2) -> None:
    """Print it, as it is."""
    print(json.dumps(content, indent=indent, ensure_ascii=False), flush=True)


# ------------------------------------------------------------------------------------------------------------ reading


def _jobs(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.status_text import jobs_text

    found = sources_of(arguments).jobs(arguments.limit, arguments.state, arguments.owner)
    if arguments.json:
        print_json(found)
    elif not found and (arguments.state or arguments.owner):
        print("no such jobs")
    else:
        _say(jobs_text(found, terminal_width(sys.stdout), paint_for(sys.stdout)))
    return 0


def _pinned(sources: Sources, given: str | None) -> JobName:
    """The job with owner and run, so that a later run of the id does not take its place while we look."""
    asked = _asked(sources, given)
    return name_of(sources.read(lambda source: source.status(asked, stacks=False))["job"])


def _asked(sources: Sources, given: str | None) -> JobName:
    """The job as it was given, else the newest."""
    return JobName("", "", given) if given else sources.newest()


def _status(arguments: argparse.Namespace) -> int:
    sources = sources_of(arguments)
    if arguments.page:
        print(f"{sources.address()}/?token={sources.token()}")
        return 0
    if arguments.watch:
        return _watch(sources, _pinned(sources, arguments.job), arguments.json)
    job = _asked(sources, arguments.job)
    _show(sources.read(lambda source: source.status(job, stacks=True)), arguments.json)
    return 0


def _show(status: Json, as_json: bool) -> None:
    from rsup.supervisor.status_text import status_text

    if as_json:
        print_json(status)
    else:
        _say(status_text(status, terminal_width(sys.stdout), paint_for(sys.stdout)))


def _watch(sources: Sources, job: JobName, as_json: bool) -> int:
    from rsup.supervisor.status_text import status_text

    on_screen = sys.stdout.isatty() and not as_json
    while True:
        status = sources.read(lambda source: source.status(job, stacks=False))
        if as_json:
            print_json(status, indent=None)
        elif on_screen:
            _redraw(status_text(status, terminal_width(sys.stdout), paint_for(sys.stdout)))
        else:
            _say(status_text(status), end="\n\n")
        if status["job"]["state"] == "ended":
            return 0
        time.sleep(WATCH_INTERVAL_S)


def _redraw(text: str) -> None:
    """Over the last picture, cut to the screen: what is longer would scroll the top away."""
    lines = text.splitlines()
    height = max(2, shutil.get_terminal_size().lines - 1)
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    _say("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J", end="")


def _events(arguments: argparse.Namespace) -> int:
    sources = sources_of(arguments)
    job = _pinned(sources, arguments.job)
    if arguments.follow:
        return _follow(sources, job, arguments)
    found = _news(sources, job, 0)
    if arguments.last is not None:
        found = found[-arguments.last :]
    if arguments.json:
        print_json(found)
    else:
        _print_events(found, as_json=False)
        if not found:
            print("no events yet")
    return 0


def _follow(sources: Sources, job: JobName, arguments: argparse.Namespace) -> int:
    """One event a line (JSON too), until the job has ended and its last event is printed."""
    news = _news(sources, job, 0)
    seen = news[-1]["number"] if news else 0
    if arguments.last is not None:
        news = news[-arguments.last :]
    ended, asked_s = False, 0.0
    while True:
        _print_events(news, arguments.json)
        if ended and not news:
            return 0
        if not ended and time.monotonic() - asked_s >= WATCH_INTERVAL_S:
            asked_s = time.monotonic()
            ended = sources.read(lambda source: source.status(job, stacks=False))["job"]["state"] == "ended"
        if not ended:
            time.sleep(FOLLOW_INTERVAL_S)
        news = _news(sources, job, seen)
        seen = news[-1]["number"] if news else seen


def _news(sources: Sources, job: JobName, seen: int) -> list[Json]:
    found: list[Json] = []
    while True:
        page = _page_of_events(sources, job, found[-1]["number"] if found else seen)
        found += page
        if len(page) < PAGE:
            return found


def _page_of_events(sources: Sources, job: JobName, after: int) -> list[Json]:
    return sources.read(lambda source: source.events(job, after, PAGE))


def _print_events(events: Sequence[Json], as_json: bool) -> None:
    from rsup.supervisor.report_text import event_line

    for event in events:
        if as_json:
            print_json(event, indent=None)
        else:
            _say(event_line(event, paint_for(sys.stdout)))


def _stacks(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.report_text import stacks_text

    sources = sources_of(arguments)
    job = _asked(sources, arguments.job)
    found = sources.read(lambda source: source.stacks(job, arguments.rank))
    if arguments.json:
        print_json(found)
    else:
        _say(stacks_text(found, paint_for(sys.stdout)))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.report_text import report_text

    if arguments.output and (arguments.text or arguments.json):
        raise UsageError(
            f"--output is for the page, and --{'text' if arguments.text else 'json'} makes none; leave one of them out"
        )
    sources = sources_of(arguments)
    job = _asked(sources, arguments.job)
    status = sources.read(lambda source: source.status(job, stacks=arguments.json))
    if "incidents" not in status:
        raise QueryError(
            f"job {status['job']['name']} belongs to {status['job']['owner']}: only its owner and operators see its story"
        )
    if arguments.json:
        print_json({**status, "report": report_text(status)})
        return 0
    if arguments.output != "-":
        _say(report_text(status, paint_for(sys.stdout)))
    if not arguments.text:
        _write_page(arguments, sources, status)
    return 0


def _write_page(arguments: argparse.Namespace, sources: Sources, status: Json) -> None:
    """The page of a job, made from the status that was printed and what else it shows. Raise `QueryError`."""
    from rsup.supervisor.report_file import write_whole
    from rsup.supervisor.report_page import file_name, report_page
    from rsup.supervisor.report_sources import gather

    page = report_page(gather(sources, name_of(status["job"]), status), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    if arguments.output == "-":
        raw = getattr(sys.stdout, "buffer", None)  # none where a caller has put something else in its place
        sys.stdout.write(page) if raw is None else raw.write(page.encode())
        return
    path = Path(arguments.output or file_name(status["job"]["name"]))
    write_whole(path, page)
    sys.stdout.flush()
    _note(f"the page is in {path.absolute()}")


# ----------------------------------------------------------------------------------------------------------- changing


def _change(verb: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        job = JobName("", "", arguments.job)
        node = {"node": arguments.node} if verb == "fence" else {}
        source = supervisor_for(sources_of(arguments), "fence its nodes" if verb == "fence" else f"{verb} it")
        answer = source.change(verb, job, arguments.reason, arguments.dry_run, **node)
        if verb != "fence" and not arguments.dry_run:
            answer = {**answer, **outcome(source, name_of(answer["job"]), answer)}
        not_done = verb == "checkpoint" and answer.get("taken_up") is False
        if arguments.json:
            print_json(answer)
        elif not_done:
            raise QueryError(answer["message"])
        else:
            print(answer["message"])
        return int(not_done)

    return run


def supervisor_for(sources: Sources, what: str) -> RestSource:
    """The running supervisor. Raise `QueryError` where there is none that can do `what`."""
    try:
        return sources.supervisor()
    except QueryError as error:
        raise QueryError(f"{error}, and only the supervisor of a job can {what}; see `rsup jobs`") from None


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "jobs": _jobs,
    "status": _status,
    "events": _events,
    "stacks": _stacks,
    "report": _report,
    **{verb: _change(verb) for verb in CHANGES},
}
