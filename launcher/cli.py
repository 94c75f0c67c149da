"""The command `rsup`: finds the verb, loads what it needs, and turns errors into one line and an exit code.

Wiring: verbs are named here by module and function, and loaded when they are called, so that `rsup --help` stays fast and the
launcher's process never loads what only the supervisor needs. What `rsup gate` does not need is loaded where it is used: the
messages of `wire` alone would cost it a fifth of its time.
"""

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

EXIT_USAGE = 2
"""`wire.EXIT_USAGE`."""
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141

_SCARCE = {
    errno.EMFILE: "raise ulimit -n",
    errno.ENFILE: "the machine has no more of them",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.ENOMEM: "the machine or its memory limit is full",
}
"""What to do where the system has no more of something; no fault of ours."""


class Verb(NamedTuple):
    """A subcommand: `function(argv)` of `module`, or `function(name, argv)` if it serves several verbs."""

    meaning: str
    module: str
    function: str = "main"
    wants_name: bool = False


_QUERY = "rsup.supervisor.query_cli"
_HARDWARE = "rsup.supervisor.hardware.hardware_cli"

VERBS = {
    "launch": Verb("run a training script, one process a rank, and keep it alive", "rsup.launcher.launch_verb"),
    "serve": Verb("run a shared, long-lived supervisor", "rsup.supervisor.main"),
    "jobs": Verb("list jobs", _QUERY, wants_name=True),
    "status": Verb("show a job: ranks, attempts, incidents, checkpoints", _QUERY, wants_name=True),
    "events": Verb("show what happened in a job, in order", _QUERY, wants_name=True),
    "report": Verb("tell how a job went, for people", _QUERY, wants_name=True),
    "stacks": Verb("show the stacks that were taken of a job's ranks", _QUERY, wants_name=True),
    "cases": Verb("show rerun cases: wrong results, what replays made of them, verdicts", "rsup.supervisor.case_cli"),
    "devices": Verb("show devices and their history, and decide about them", _HARDWARE, wants_name=True),
    "nodes": Verb("the same of nodes", _HARDWARE, wants_name=True),
    "checkpoint": Verb("ask a job for a checkpoint", _QUERY, wants_name=True),
    "stop": Verb("ask a job to save and end", _QUERY, wants_name=True),
    "stragglers": Verb("show ranks that hold a job up, and switch their detection", "rsup.supervisor.straggler_cli"),
    "fence": Verb("declare a node dead that does not answer", _QUERY, wants_name=True),
    "gate": Verb("say whether a job may start on this node", "rsup.launcher.slurm.gate"),
    "slurm": Verb("SLURM's prolog, epilog and healthcheck, and their installation", "rsup.launcher.slurm.slurm_verb"),
    "db": Verb("back up, check or upgrade the store", "rsup.supervisor.db_cli"),
    "memory-estimate": Verb(
        "say what a model needs of a GPU's memory, and what fits on how many", "rsup.worker.observe.memory_estimate_cli"
    ),
    "doctor": Verb("see whether this machine has what rsup needs", "rsup.launcher.doctor"),
    "demo": Verb("a training that loses a rank, hangs, and ends all the same", "rsup.launcher.demo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rsup` with these arguments (default: the process's) and return its exit code."""
    _fill_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        _print_help()
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from rsup.supervisor.wire import RELEASE

        print(f"rsup {RELEASE}")
        return 0
    if words[0] not in VERBS:
        return _refuse_verb(words[0])
    return _run(words[0], words[1:])


def _run(name: str, words: list[str]) -> int:
    verb = VERBS[name]
    try:
        function: Callable[..., int | None] = getattr(importlib.import_module(verb.module), verb.function)
        code = (function(name, words) if verb.wants_name else function(words)) or 0
        if sys.stdout is not None:  # None: closed by whoever started us
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_READER_GONE
    except Exception as error:  # the outermost frame: a person sees one line
        text, code = _told(error)
        _report(name, words, text)
        return code


def _told(error: Exception) -> tuple[str, int]:
    """The line and the exit code: what is no operating error is a fault of ours."""
    if "rsup.supervisor.wire" in sys.modules:  # else it is none; loading anything now may fail for want of the same
        from rsup.supervisor.wire import RsupError

        if isinstance(error, RsupError):
            return str(error), error.exit_code
    return _fault_text(error), 1


def _fault_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _SCARCE:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}; {_SCARCE[error.errno]}"
    if isinstance(error, PermissionError) and error.filename:
        return f"{error.filename}: {error.strerror}; whose is it?"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"internal error, please report it with the traceback that RSUP_DEBUG=1 shows: {what}"


def _fill_closed_streams() -> None:
    """Where standard input, output or error was closed: `/dev/null`, so that no file or socket of ours gets its number, which
    others would then read from or print into."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stderr is None:  # print would take stdout
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _report(name: str, words: list[str], text: str) -> None:
    """The error being handled, as one line; with its traceback before it if that is wanted."""
    if _wants_traceback(name, words):
        import traceback

        traceback.print_exc()
    print(f"rsup {name}: {one_line(text)}", file=sys.stderr)


def one_line(text: str) -> str:
    """`text` without line breaks and other control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _wants_traceback(name: str, words: list[str]) -> bool:
    if os.environ.get("RSUP_DEBUG", "").lower() in ("1", "true", "yes", "on"):
        return True
    if name != "launch":
        return "--debug" in words
    from rsup.launcher.launch_parser import asks_for_debug

    return asks_for_debug(words)


def _discard_stdout() -> None:
    """The reader of our output has gone: nothing more may be written, not even by the interpreter at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_verb(word: str) -> int:
    from rsup.launcher.option_table import did_you_mean

    if word.startswith("-"):
        what = f"unknown option {one_line(word)}: options come after the command, as in rsup launch --nnodes 1"
    else:
        what = f"unknown command {one_line(word)}{did_you_mean(word, list(VERBS))}"
    print(f"rsup: {what}; see rsup --help", file=sys.stderr)
    return EXIT_USAGE


def _print_help() -> None:
    width = max(map(len, VERBS))
    lines = ["usage: rsup COMMAND [OPTIONS]", "", *(f"  {name:{width}}  {verb.meaning}" for name, verb in VERBS.items())]
    print("\n".join([*lines, "", "rsup COMMAND --help says more. rsup --version prints the release."]))


if __name__ == "__main__":
    sys.exit(main())
