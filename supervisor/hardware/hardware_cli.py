"""`rsup devices` and `rsup nodes`: what is known of hardware, and what people decide about it.

Questions about the history are `history_cli`'s, the active test `device_test_verbs`'s. Nothing heavy is imported before it is
needed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rsup.supervisor import history_cli
from rsup.supervisor.hardware.client import Hardware
from rsup.supervisor.history_questions import now_us
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.render import paint_for, terminal_width
from rsup.supervisor.wire import RsupError, UsageError

MAX_IMPORT_BYTES = 64 << 20
EXIT_NOT_DONE = 1

Json = dict[str, Any]

_VERBS = {
    "flag": "point to it: evidence, which anyone may give",
    "note": "keep a sentence with its history",
    "quarantine": "leave it out of placement where others suffice, until it is released",
    "allow": "use it as if it were clear for a time (24 h), whatever the evidence says",
    "repair": "it is being repaired or replaced",
    "release": "let it back in: on probation if it was quarantined or in repair, which needs a passed test",
    "retire": "it is gone for good; only `repair` leads back",
}


def main(name: str, argv: Sequence[str]) -> int:
    """Run `rsup devices|nodes ARGV`; return the exit code. Raise `RsupError`."""
    words = list(argv)
    if words[:1] == ["test"]:
        from rsup.supervisor.hardware import device_test_verbs

        return (device_test_verbs.test_devices if name == "devices" else device_test_verbs.test_node)(words[1:])
    if name == "nodes" and words[:1] in (["drain"], ["undrain"]):
        from rsup.supervisor.slurm import slurm_cli

        return slurm_cli.drain_nodes(words)
    if words[:1] == ["history"]:
        words[0] = "timeline"
    arguments = _parser(name).parse_args(words)
    if hasattr(arguments, "history"):
        return history_cli.run(arguments)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _parser(name: str) -> argparse.ArgumentParser:
    kind = name.removesuffix("s")
    about = {"device": "Physical GPUs (and the CPU stand-ins of ranks without one)", "node": "Nodes"}[kind]
    parser = OneLineParser(
        prog=f"rsup {name}", description=f"{about}: state, history, and what people decide.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=OneLineParser)
    listing = _sub(verbs, "list", f"list {name} with their states", kind, _list)
    listing.add_argument("--state", default="", metavar="STATE", help="only those in this state")
    if kind == "device":
        listing.add_argument("--node", default="", metavar="NODE", help="only those last seen there")
    listing.add_argument("--limit", type=_number, default=1000, metavar="N", help="how many (default 1000)")
    for verb, text, run in (
        ("show", "show one: state, what led to it, who used it", _show),
        ("why", "tell on one screen why it is in its state, what follows, and how that ends", _why),
    ):
        _add_id(_sub(verbs, verb, text, kind, run), kind)
    verbs.add_parser("history", help="the same as timeline", allow_abbrev=False)
    history_cli.add_parsers(verbs, kind)
    of = "" if kind == "device" else " of all devices of this node"
    verbs.add_parser("test", help=f"run an active test{of} (an SDC screen), see `rsup {name} test --help`", allow_abbrev=False)
    if kind == "node":
        for verb, text in (("drain", "drain them in SLURM"), ("undrain", "end drains of ours in SLURM")):
            verbs.add_parser(verb, help=f"{text}, see `rsup nodes {verb} --help`", allow_abbrev=False)
    for verb, text in _VERBS.items():
        _add_change(verbs, verb, text, kind)
    _add_import(verbs, kind)
    return parser


def _sub(verbs: Any, verb: str, text: str, kind: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(verb, help=text, description=f"{text[:1].upper()}{text[1:]}.")
    parser.allow_abbrev = False
    parser.set_defaults(run=run, kind=kind, verb=verb)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", default=None, metavar="DIR", help="where the store is [RSUP_STATE_DIR]")
    parser.add_argument("--supervisor", default="", metavar="URL", help="ask this supervisor [RSUP_SUPERVISOR_URL]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_id(parser: argparse.ArgumentParser, kind: str, nargs: str | None = None) -> None:
    of = {"device": "a UUID or its beginning, a serial, NODE:PCI or NODE:INDEX", "node": "a node, or several as n[1-4,7]"}[kind]
    parser.add_argument("id", metavar="ID" if kind == "device" else "NODE", nargs=nargs, help=of)


def _add_change(verbs: Any, verb: str, text: str, kind: str) -> None:
    parser = _sub(verbs, verb, text, kind, _change)
    _add_id(parser, kind, "+")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, for the history")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--if-version", type=_number, metavar="N", help="only if nobody has changed it since this version")
    if verb == "allow":
        end = parser.add_mutually_exclusive_group()
        end.add_argument("--for", dest="lasts", metavar="TIME", help="how long, as 8h or 3d (default 24h)")
        end.add_argument("--until", metavar="TIME", help="until then, as 2026-11-30T18:00Z")
    if verb == "release":
        parser.add_argument("--without-test", action="store_true", help="though no test was passed since")
    if verb in ("repair", "retire"):
        parser.add_argument("--ticket", default="", metavar="TEXT", help="where its repair is followed")


def _add_import(verbs: Any, kind: str) -> None:
    text = f"take over what other tools saw of {kind}s: a JSON list, or lines, of {{id, source, code, at, text, count}}"
    parser = _sub(verbs, "import", text, kind, _import)
    parser.add_argument("file", metavar="FILE", help="the file; - for standard input")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="where it comes from, for the history")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text)


# ------------------------------------------------------------------------------------------------------------ questions


def _hardware(arguments: argparse.Namespace) -> Hardware:
    return Hardware(arguments.state_dir, arguments.supervisor, note=_note)


def _note(text: str) -> None:
    print(f"rsup: {text}", file=sys.stderr)


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False), flush=True)


def _list(arguments: argparse.Namespace) -> int:
    hardware = _hardware(arguments)
    if arguments.kind == "device":
        found = hardware.devices(arguments.state, arguments.node, arguments.limit)
    else:
        found = hardware.nodes(arguments.state, arguments.limit)
    if arguments.json:
        _print_json(found)
    else:
        from rsup.supervisor.hardware.hardware_text import list_text

        print(list_text(arguments.kind, found, terminal_width(sys.stdout), paint_for(sys.stdout)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = _hardware(arguments).show(arguments.kind, arguments.id)
    if arguments.json:
        _print_json(found)
    else:
        from rsup.supervisor.hardware.hardware_text import show_text

        print(show_text(arguments.kind, found, terminal_width(sys.stdout), paint_for(sys.stdout)))
    return 0


def _why(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.hardware.why_text import WhyStory, why_text

    found = _hardware(arguments).why(arguments.kind, arguments.id)
    if arguments.json:
        _print_json(found)
    else:
        cases = {case["case_id"]: case for case in found["cases"]}
        print(why_text(WhyStory(arguments.kind, found, found["newest_evidence"], cases), paint_for(sys.stdout)))
    return 0


# -------------------------------------------------------------------------------------------------------------- changes


def _change(arguments: argparse.Namespace) -> int:
    hardware = _hardware(arguments)
    more: Json = {"dry_run": arguments.dry_run, "if_version": arguments.if_version}
    if arguments.verb == "allow":
        more["until_us"] = _end(arguments)
    if arguments.verb == "release":
        more["without_test"] = arguments.without_test
    if arguments.verb in ("repair", "retire"):
        more["ticket"] = arguments.ticket
    names = _names(arguments.kind, arguments.id)
    if arguments.if_version is not None and len(names) > 1:
        raise UsageError("--if-version is of one device or node: name one")
    return _each(arguments, [(name, lambda name=name: _ask(hardware, arguments, name, more)) for name in names])  # type: ignore[misc]


def _ask(hardware: Hardware, arguments: argparse.Namespace, name: str, more: Json) -> Json:
    return hardware.change(arguments.kind, name, arguments.verb, arguments.reason, **more)


def _names(kind: str, words: Sequence[str]) -> list[str]:
    if kind == "device":
        return list(dict.fromkeys(words))
    from rsup.supervisor.hardware.hostlist import expand

    return list(dict.fromkeys(name for word in words for name in expand(word)))


def _end(arguments: argparse.Namespace) -> int | None:
    from rsup.supervisor.moments import parse_moment, parse_span

    now = now_us()
    if arguments.until:
        if parse_span(arguments.until) is not None:
            raise UsageError(f"--until: {arguments.until[:40]!r} is a duration: give it as --for {arguments.until.strip()}")
        return parse_moment(arguments.until, now, "--until")
    if arguments.lasts:
        span_us = parse_span(arguments.lasts)
        if not span_us:
            raise UsageError(f"--for: {arguments.lasts[:40]!r} is no time span; write 8h or 3d")
        return now + span_us
    return None


def _each(arguments: argparse.Namespace, asked: Sequence[tuple[str, Callable[[], Json]]]) -> int:
    """Do all, say what became of each; 1 if one was not done. One alone that fails is the command's error."""
    answers: list[Json] = []
    for name, ask in asked:
        try:
            answers.append({"ok": True, **ask()})
        except RsupError as error:
            if len(asked) == 1:
                raise
            answers.append({"ok": False, "kind": arguments.kind, "name": name, "message": str(error)})
    if arguments.json:
        _print_json(answers[0] if len(answers) == 1 else answers)
    else:
        would = "would be: " if arguments.dry_run else ""
        for answer in answers:
            print(f"{would}{answer['message']}", file=sys.stdout if answer["ok"] else sys.stderr)
    return 0 if all(answer["ok"] for answer in answers) else EXIT_NOT_DONE


def _import(arguments: argparse.Namespace) -> int:
    from rsup.supervisor.hardware.sightings_file import read_sightings

    text = _content(arguments.file)
    hardware = _hardware(arguments)
    asked = []
    for name, sighting in read_sightings(text, arguments.file, arguments.kind, now_us()):

        def ask(name: str = name, sighting: Json = sighting) -> Json:
            return hardware.change(
                arguments.kind, name, "import", arguments.reason, sighting=sighting, dry_run=arguments.dry_run
            )

        asked.append((name, ask))
    if not asked:
        raise QueryError(f"there is nothing in {arguments.file}")
    return _each(arguments, asked)


def _content(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read(MAX_IMPORT_BYTES)
        path = Path(name)
        if path.stat().st_size > MAX_IMPORT_BYTES:
            raise UsageError(f"{name} is longer than {MAX_IMPORT_BYTES >> 20} MiB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
