"""`rsup slurm status` and `rsup nodes drain|undrain`: asked of the running supervisor, which alone speaks to SLURM."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import quote

from rsup.supervisor import places
from rsup.supervisor.hardware.hostlist import expand, fold
from rsup.supervisor.history_questions import Question
from rsup.supervisor.query_source import NoAnswer, QueryError, RestSource, Sources
from rsup.supervisor.render import clean, clean_line
from rsup.supervisor.wire import UsageError

Json = dict[str, Any]


class NoDrains(QueryError):
    """No supervisor answers that could drain."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def main(words: Sequence[str]) -> int:
    """Run `rsup slurm status`; return the exit code. Raise `RsupError`."""
    parser = _Parser(prog="rsup slurm status", allow_abbrev=False, description=(
        "What is proposed or done about nodes in SLURM, the guard, and what SLURM shows otherwise."
    ))  # fmt: skip
    _add_usual(parser)
    arguments = parser.parse_args(list(words))
    found = _supervisor(arguments).answer(Question("/slurm", lambda connection: {}))
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else status_text(found))
    return 0


def drain_nodes(words: Sequence[str]) -> int:
    """Run `rsup nodes drain|undrain`; return the exit code. Raise `RsupError`."""
    verb = words[0]
    what = {
        "drain": "Drain nodes in SLURM: jobs there go on to their end, none starts. Until `undrain`.",
        "undrain": "End drains of ours. Nothing is drained again until new evidence speaks against it, or somebody says so.",
    }[verb]
    parser = _Parser(prog=f"rsup nodes {verb}", description=what, allow_abbrev=False)
    parser.add_argument("nodes", metavar="NODE", nargs="+", help="a node, or several as n[1-4,7]; all of them or none")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; SLURM shows it")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    if verb == "drain":
        parser.add_argument("--beyond-guard", action="store_true", help="though the guard would hold it back")
    _add_usual(parser)
    arguments = parser.parse_args(list(words[1:]))
    names = fold(dict.fromkeys(name for word in arguments.nodes for name in expand(word)))
    body: Json = {"reason": clean(arguments.reason), "dry_run": arguments.dry_run}
    if verb == "drain":
        body["beyond_guard"] = arguments.beyond_guard
    answer = _supervisor(arguments).answer(Question(f"/nodes/{quote(names, safe='')}/{verb}", lambda connection: {}, body=body))
    would = "would be: " if arguments.dry_run else ""
    print(json.dumps(answer, indent=2, ensure_ascii=False) if arguments.json else f"{would}{answer['message']}")
    return 0


def _add_usual(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the supervisor is [RSUP_STATE_DIR]")
    parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _supervisor(arguments: argparse.Namespace) -> RestSource:
    sources = Sources(places.state_dir(arguments.state_dir), arguments.supervisor, note=lambda text: None)
    try:
        return sources.supervisor()
    except NoAnswer as error:
        raise NoDrains(f"{error}: drains are the work of `rsup serve`; start it, or use scontrol") from None


def status_text(status: Json) -> str:
    """For people."""
    scheduler, guard, drained, other = (status[name] for name in ("scheduler", "guard", "drained", "differences"))
    answers = (
        f"{scheduler['num_nodes']} nodes" if scheduler["answers"] else f"no answer ({scheduler['trouble'] or 'not asked'})"
    )
    lines = [f"drains: mode {status['mode']}; SLURM {status['cluster'] or '(unnamed)'}: {answers}"]
    state = "TRIPPED" if guard["open"] else "holds nothing back"
    lines.append(
        f"guard: {state}; {guard['num_refused']} nodes refused, limit {guard['limit']} of {guard['num_eligible']},"
        f" {guard['in_last_hour']} within the hour"
    )
    lines += [f"  held back {one['node']}: {one['why']}" for one in guard["held"]]
    for one in status["proposals"]:
        lines.append(f"  would {one['step']} {fold(one['nodes'])}: {one['reason'] or one['why']}")
    for one in status["refused"]:
        lines.append(f"  refused {one['node']} {one['id']} since {one['since']}{', drained' if one['drained'] else ''}")
    lines += [f"  drained by us {one['node']}: {one['reason']}" for one in drained["ours"]]
    lines += [f"  drained by {one['by'] or 'others'} {one['node']}: {one['reason'] or '-'}" for one in drained["others"]]
    lines += [f"  left alone {one['node']}: {one['by']} let it run" for one in other["left_alone"]]
    lines += [f"  not touched {one['node']}: {one['for']}" for one in other["waiting"]]
    if other["unknown_to_slurm"]:
        lines.append(f"  unknown to SLURM: {fold(other['unknown_to_slurm'])}")
    if other["drained_without_ground"]:
        lines.append(
            f"  drained with a reason of ours, for which there is no ground here: {fold(other['drained_without_ground'])}"
        )
    if scheduler["unknown_words"]:
        lines.append(f"  states or flags unknown to this rsup: {', '.join(scheduler['unknown_words'])}")
    if status["snapshot"]:
        lines.append(f"snapshot: serial {status['snapshot']['serial']}, made {status['snapshot']['made']}")
    return "\n".join(clean_line(line) for line in lines)  # reasons are other people's text
