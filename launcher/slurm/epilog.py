"""`rsup slurm epilog`: what happened to a job's GPUs while it ran, spooled for the supervisor. Always exits 0: SLURM would
drain the node. Takes 4 s at most.

Xids since the job began are those that stand after the place in the kernel's log which the prolog kept, in the same boot:
neither clocks nor other jobs' GPUs come into it. Memory errors and the like are what NVML says now and has not said before in
this boot.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from rsup.launcher.slurm.gate import indexes_of
from rsup.launcher.slurm.kernel_log import NOT_READ
from rsup.launcher.slurm.node_devices import read_devices
from rsup.launcher.slurm.node_events import read_start, reading_events, xid_events
from rsup.launcher.slurm.node_inventory import read_boards, read_content, sure_boards
from rsup.launcher.slurm.node_settings import NodePlaces, NodeProblem, boot_id, node_name, places_of, read_settings
from rsup.launcher.slurm.node_spool import NodeEvent, NodeSpool, now_us
from rsup.launcher.slurm.told import read_told

TIME_BOX_S = 4
NVML_WITHIN_S = 2.5
USAGE = """usage: rsup slurm epilog

For SLURM's Epilog, as root: spools how the job of SLURM_JOB_ID ended and what happened to its GPUs while it ran. Takes no
arguments. Exit code 0 whatever happens, since SLURM would drain the node; 2 for wrong usage."""


def main(words: Sequence[str]) -> int:
    """The verb. Never raises."""
    if words:
        wants_help = words[0] in ("-h", "--help")
        if wants_help:
            print(USAGE)
        else:
            print(f"rsup slurm epilog: takes no arguments, not {words[0]!r}", file=sys.stderr)
        return 0 if wants_help else 2
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, TIME_BOX_S)
    try:
        collect(os.environ)
    except Exception as error:  # the outermost frame of a hook: whatever is wrong with us must not drain the node
        print(f"rsup slurm epilog: {type(error).__name__}: {error}", file=sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def collect(environ: Mapping[str, str]) -> None:
    """Spool what is to be told of the job that ends. Raise OSError where the spool cannot be written."""
    job, places = environ.get("SLURM_JOB_ID", ""), places_of(environ)
    if not job.isdecimal():
        return
    node, boot = node_name(environ, read_settings(places.settings)), boot_id(places.root)
    start = read_start(places, job)
    gpus = start["gpus"] if start and start["boot_id"] == boot else list(_gpus_now(environ, places, boot))
    spool = NodeSpool(places.spool)
    spool.add(_job_end(environ, job, node, gpus, start["gate_s"] if start else None))
    since = start["sequence"] if start and start["boot_id"] == boot else None
    if gpus:
        for event in _hardware_events(places, node, boot, job, gpus, since):
            spool.add(event)
    (places.jobs / job).unlink(missing_ok=True)


def _hardware_events(
    places: NodePlaces, node: str, boot: str, job: str, gpus: Sequence[str], since: int | None
) -> Iterator[NodeEvent]:
    """Xids first: they are spooled before a driver that hangs is asked."""
    jobs, told = dict.fromkeys(gpus, job), read_told(places, boot)
    inventory = read_content(places.inventory)
    if since is not None and not isinstance(inventory, str):
        # Where the prolog could not read the log in time, what has been told before is no news of this job.
        after = told.sequence if since == NOT_READ else since
        xids = [event for _, event in xid_events(places, inventory, boot, after, jobs, only=gpus) if event is not None]
        yield from (event for event in xids if event.key not in told.keys)
    try:
        readings = [one for one in read_devices(places, node, NVML_WITHIN_S).readings if one.device in jobs]
    except NodeProblem:
        return  # the healthcheck looks again, and tells of a driver that hangs
    yield from (event for event in reading_events(readings, boot, jobs) if event.key not in told.keys)


def _gpus_now(environ: Mapping[str, str], places: NodePlaces, boot: str) -> tuple[str, ...]:
    try:
        return sure_boards(read_boards(places.inventory, boot), indexes_of(environ.get("SLURM_JOB_GPUS", "")))
    except NodeProblem:
        return ()


def _job_end(environ: Mapping[str, str], job: str, node: str, gpus: Sequence[str], gate_s: float | None) -> NodeEvent:
    """SLURM_JOB_EXIT_CODE is what wait() gives, SLURM_JOB_EXIT_CODE2 is `exit:signal`."""
    restarts = environ.get("SLURM_JOB_RESTART_COUNT", "0")
    exit_text = environ.get("SLURM_JOB_EXIT_CODE2", "")
    first = exit_text.partition(":")[0]
    detail = f"exit {exit_text or 'unknown'}, GPUs {' '.join(gpus) or 'none'}, restarts {restarts}"
    key = f"job-end:{environ.get('SLURM_CLUSTER_NAME', '')}:{job}:{restarts}:{node}"
    return NodeEvent(key, now_us(), "job-end", None, int(first) if first.isdecimal() else None, detail, job, gate_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
