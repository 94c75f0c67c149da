"""The end of a launch in a SLURM job: one of its agents has SLURM do what follows."""

import sys

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.result_file import write_results
from rsup.launcher.slurm.requeue import Outcome, settle
from rsup.supervisor import wire
from rsup.supervisor.wire import RsupError


def say(line: str) -> None:
    """For people, where nothing else writes to the terminal any more, or yet."""
    print(line, file=sys.stderr, flush=True)


def nodes_to_avoid(options: LaunchOptions, result: wire.JobResult) -> tuple[str, ...]:
    """Where the job must not run again: the suspect's node, or those that the gate refuses."""
    if result.exit_code == wire.EXIT_RERUN_ELSEWHERE:
        return (result.node,) if result.node else ()
    if result.exit_code != wire.EXIT_REQUEUE:
        return ()
    if wire.GATE_REFUSES in result.reason and result.node:
        return tuple(dict.fromkeys((*options.refused_nodes, *(() if options.refused_nodes else (result.node,)))))
    return ()


def refused(options: LaunchOptions, refusal: RsupError) -> None:
    """The gate has refused the only node of a launch: nothing was started."""
    place = options.slurm
    assert place is not None
    result = wire.JobResult(refusal.exit_code, str(refusal), attempts=0, node=place.node)
    job_id, paths = options.job_id or options.preferred_job_id, (options.state_dir, options.result_file)
    nodes = nodes_to_avoid(options, result)
    for problem in write_results(result, job_id, 0, *paths, avoid_nodes=nodes):
        say(problem)
    settle_launch(options, result)


def settle_launch(options: LaunchOptions, result: wire.JobResult | None, *, leaves_others: bool = False) -> None:
    """`result`: None on nodes that leave it to the job's first one. `leaves_others`: agents of other nodes may go on."""
    if result is not None and options.slurm is not None and options.slurm_requeue == "auto":
        settle(Outcome(result.exit_code, nodes_to_avoid(options, result), leaves_others), options.slurm, say)
