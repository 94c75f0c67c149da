"""`rsup slurm SUBCOMMAND`: names them by module, and loads one when it is called."""

import importlib
import sys
from collections.abc import Callable, Sequence

EXIT_USAGE = 2
"""`wire.EXIT_USAGE`, which would load what the prolog does not need."""

SUBCOMMANDS = {
    "status": ("drains: proposals, the guard, the difference to sinfo", "rsup.supervisor.slurm.slurm_cli"),
    "prolog": ("may this job start here? for SLURM's Prolog", "rsup.launcher.slurm.prolog"),
    "epilog": ("what happened to the GPUs while the job ran; for SLURM's Epilog", "rsup.launcher.slurm.epilog"),
    "healthcheck": ("fetch the snapshot, renew the inventory, deliver the spool", "rsup.launcher.slurm.healthcheck"),
    "finish": ("tell SLURM what follows from how a launch ended; last in a batch script", "rsup.launcher.slurm.finish"),
    "install": ("write hooks and settings of a node, and check slurm.conf", "rsup.launcher.slurm.install"),
    "node-token": ("print the tokens of nodes, on the supervisor's host", "rsup.supervisor.node_tokens"),
}


def main(words: Sequence[str]) -> int:
    """Run a subcommand with the words after it; returns its exit code."""
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, SUBCOMMANDS))
        lines = [f"  {name:{width}}  {meaning}" for name, (meaning, _) in SUBCOMMANDS.items()]
        print("\n".join(["usage: rsup slurm COMMAND [OPTIONS]", "", *lines]))
        return 0 if words else EXIT_USAGE
    if words[0] not in SUBCOMMANDS:
        print(f"rsup slurm: unknown command {words[0]!r}; there are {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    function: Callable[[Sequence[str]], int] = importlib.import_module(SUBCOMMANDS[words[0]][1]).main
    return function(words[1:])
