"""`rsup slurm status` and `rsup nodes drain|undrain`: asked of the running supervisor, which alone speaks to SLURM."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from rsup.supervisor import places
from rsup.supervisor.hardware.hostlist import expand, fold
from rsup.supervisor.history_questions import Question
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.query_source import NoAnswer, QueryError
from rsup.supervisor.render import clean, clean_line, plural
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.slurm.gate_watch import gate_lines, refusal_words
from rsup.supervisor.sources import Sources

Json = dict[str, Any]
EXIT_NOT_DONE = 1


class NoDrains(QueryError):
    """No supervisor answers that could drain."""


def main(words: Sequence[str]) -> int:
    """Run `rsup slurm status`; return the exit code. Raise `RsupError`."""
    parser = OneLineParser(prog="rsup slurm status", allow_abbrev=False, description=(
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
    parser = OneLineParser(prog=f"rsup nodes {verb}", description=what, allow_abbrev=False)
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
    undone = bool(answer.get("undone"))
    text = json.dumps(answer, indent=2, ensure_ascii=False) if arguments.json else f"{would}{answer['message']}"
    print(text, file=sys.stderr if undone and not arguments.json else sys.stdout)
    return EXIT_NOT_DONE if undone else 0


def _add_usual(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the supervisor is [RSUP_STATE_DIR]")
    parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _supervisor(arguments: argparse.Namespace) -> RestSource:
    state, host_first = places.state_dir_to_read(arguments.state_dir), places.names_no_state_dir(arguments.state_dir)
    sources = Sources(state, arguments.supervisor, note=lambda text: None, host_first=host_first)
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
    lines += _failing(status["failing"])
    state = "TRIPPED" if guard["open"] else "holds nothing back"
    lines.append(
        f"guard: {state}; {plural(guard['num_refused'], 'node')} refused, limit {guard['limit']} of {guard['num_eligible']},"
        f" {guard['in_last_hour']} within the hour"
        + (f"; not counted, out of service anyway: {fold(guard['out_of_service'])}" if guard["out_of_service"] else "")
    )
    lines += [f"  held back {one['node']}: {one['why']}" for one in guard["held"]]
    for one in status["proposals"]:
        lines.append(f"  would {one['step']} {fold(one['nodes'])}: {one['reason'] or one['why']}")
    failing = {one["node"] for one in status["failing"]}
    for one in status["refused"]:
        how = "" if one["node"] not in failing else ", SLURM does not do what is due (above)"
        how += "" if one.get("gates_refuse", True) or not status["snapshot"] else f", but not by gates: {_not_told(one, guard)}"
        done = f"{', drained' if one['drained'] else ''}{', reserved' if one.get('reserved') else ''}"
        lines.append(f"  refused {one['node']} {one['id']} since {one['since']}{done}{how}")
    lines += [f"  drained by us {one['node']}: {one['reason']}" for one in drained["ours"]]
    unrefused = sorted({*status.get("reserved", ())} - {one["node"] for one in status["refused"]})
    if unrefused:
        lines.append(f"  reserved by us, refused no more: {fold(unrefused)}")
    for one in other.get("for_gates", ()):
        lines.append(
            f"  kept off still {one['node']}: until its gate, which refuses it, knows better; at {one['until']} at the latest"
        )
    gates: Json = status.get("gates") or {}
    for one in drained["others"]:
        why = f"{one['reason'] or '-'}{refusal_words(gates, one['node'], one['reason'])}"
        lines.append(f"  drained by {one['by'] or 'others'} {one['node']}: {why}")
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
    lines += gate_lines(gates)
    if status["no_snapshot"]:
        lines.append(f"snapshot: NONE for gates: {status['no_snapshot']}")
    elif status["snapshot"] and not status["cluster"]:
        lines.append("snapshot: names no cluster, so gates believe none of it: start rsup serve with --cluster NAME")
    elif status["snapshot"]:
        lines.append(f"snapshot: serial {status['snapshot']['serial']}, made {status['snapshot']['made']}")
    return "\n".join(clean_line(line) for line in lines)  # reasons are other people's text


def _not_told(one: Json, guard: Json) -> str:
    where = "it is out of service, and " if one["node"] in guard["out_of_service"] else ""
    return f"{where}they would not believe that more than half of the nodes is bad, and are told avoid"


def _failing(failing: Sequence[Json]) -> list[str]:
    """What SLURM does not do; steps for several nodes for the same reason are one line."""
    nodes: dict[tuple[str, str], list[str]] = {}
    since: dict[tuple[str, str], str] = {}
    for one in failing:
        key = (one["step"], one["error"])
        nodes.setdefault(key, []).append(one["node"])
        since[key] = min(since.get(key, one["since"]), one["since"])
    return [f"  NOT DONE since {since[key]}: {key[0]} {fold(nodes[key])}: {key[1]}" for key in nodes]
