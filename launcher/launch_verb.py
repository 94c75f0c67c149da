"""`rsup launch`: parse, check, say what had no effect, run the agent."""

import importlib
import sys
from collections.abc import Callable

from rsup.launcher import launch_checks
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.launch_parser import HelpWanted, parse_launch


def main(argv: list[str]) -> int:
    """Run one launch; its exit code is the job's. Raise `RsupError` for what was refused."""
    try:
        options = parse_launch(argv)
    except HelpWanted:
        from rsup.launcher.options_page import help_text

        print(help_text(), end="")
        return 0
    launch_checks.check(options)
    for note in options.notes:
        print(f"rsup launch: note: {note}", file=sys.stderr)
    run: Callable[[LaunchOptions], int] = importlib.import_module("rsup.launcher.agent").run
    return run(options)
