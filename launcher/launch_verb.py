"""`rsup launch`: parse, check, say what had no effect, run the agent."""

import importlib
import os
import sys
from collections.abc import Callable

from rsup.launcher import launch_checks
from rsup.launcher.error_file import write_refusal
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.launch_parser import HelpWanted, parse_launch
from rsup.launcher.slurm.environment import SeveralAgents
from rsup.supervisor.wire import RsupError


def main(argv: list[str]) -> int:
    """Run one launch; its exit code is the job's. Raise `RsupError` for what was refused."""
    try:
        options = parse_launch(argv)
        launch_checks.check(options)
        for note in (*options.notes, *launch_checks.notes_of_places(options), *launch_checks.notes_of_preload(options)):
            print(f"rsup launch: note: {note}", file=sys.stderr)
        if options.slurm is not None:
            options = _prepared(options)
        run: Callable[[LaunchOptions], int] = importlib.import_module("rsup.launcher.agent").run
        return run(options)
    except HelpWanted:
        from rsup.launcher.options_page import help_text

        print(help_text(), end="")
        return 0
    except RsupError as error:
        write_refusal(error, os.environ)
        if isinstance(error, SeveralAgents) and os.environ.get("SLURM_PROCID", "0") != "0":
            return error.exit_code  # the first task of the step says it, once
        raise


def _prepared(options: LaunchOptions) -> LaunchOptions:
    """With what the options leave to SLURM."""
    from rsup.launcher.slurm import ending, launch

    try:
        return launch.prepare(options, ending.say)
    except launch.Refused as refusal:
        ending.refused(options, refusal)
        raise
