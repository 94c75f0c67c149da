"""What one `rsup launch` was asked to do, fully resolved, and the `JobSpec` that it hands to the supervisor.

`LaunchOptions` is what the parser makes and the agent reads: defaults filled in, counts resolved, mappings spelled out per
local rank. Names are torchrun's where torchrun has the option. Nothing here parses text or touches the machine.
"""

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rsup.launcher.phases_option import LaunchPhase
from rsup.launcher.redaction import redact_command
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.supervisor import places
from rsup.supervisor.wire import EXIT_NO_REQUEUE, InProcessPolicy, JobSpec, Limits, RestartPolicy

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

NO_STREAM, STDOUT, STDERR, BOTH_STREAMS = 0, 1, 2, 3
"""Values of `redirects` and `tee`, a bit a stream."""

_MAX_SHOWN_WORDS, _MAX_SHOWN_CHARS = 1000, 2000

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class LaunchOptions:
    """Every option of `rsup launch`. Times in seconds."""

    training_script: str
    training_script_args: tuple[str, ...] = ()

    # ---- torchrun's
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    """`host:port` where the job's nodes meet, of `--rdzv-endpoint`, else of `--master-addr` and `--master-port` across
    nodes; empty for a job of one node."""
    rdzv_id: str = "none"
    rdzv_conf: dict[str, str] = field(default_factory=dict)
    standalone: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    event_log_handler: str = "null"
    role: str = "default"
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    pass_local_rank: bool = False
    """Put `--local-rank=N` in front of the script's arguments."""
    log_dir: Path | None = None
    """None: the user named none."""
    redirects: tuple[int, ...] = (0,)
    """Per local rank: 0 none, 1 stdout, 2 stderr, 3 both."""
    tee: tuple[int, ...] = (0,)
    """Per local rank, as `redirects`."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks whose output reaches the console; None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    ranks_filter: frozenset[int] | None = None
    """Ranks of the job whose output reaches the console; None: all."""
    log_prefix: str | None = None
    """In front of every line on the console; None: as torchrun, teed lines alone have one."""
    log_format: str = "text"
    """`text` or `json`."""
    node_rank: int = -1
    """Of `--node-rank`, `PET_NODE_RANK` or SLURM; -1 if nobody gave one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port of the attempt's store, exactly; 0: any free one of the first node."""
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    """None, `node`, `socket`, `exclusive` or `core-complex`."""
    signals_to_handle: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    shutdown_timeout: float = 30.0
    """From a signal to the launcher until its ranks are killed."""
    virtual_local_rank: bool = False
    omp_num_threads: int | None = None
    """What `OMP_NUM_THREADS=auto` in the launcher's environment means; None: it says something else."""

    # ---- ours
    job_id: str = ""
    preferred_job_id: str = ""
    """SLURM's number of the job, where `job_id` is empty: its name unless a live job is called that."""
    cluster: str = "local"
    resume: bool = False
    restart: str = "count"
    """`count` (torchrun's `--max-restarts`) or `auto`."""
    on_hang: str = "auto"
    """`restart`, `report`, or `auto`: restart when a limit was configured or enforced, else report."""
    state_dir: Path = field(default_factory=places.state_dir)
    result_file: Path | None = None
    """None: under the state directory."""
    supervisor: str = ""
    """ZeroMQ address of a shared supervisor; empty: embedded, or the one behind `rdzv_endpoint`."""
    require_supervisor: bool = False
    require_key: bool = False
    key_file: Path | None = None
    stop_grace: float = 30.0
    """From SIGTERM to SIGKILL when ranks are stopped because another one failed."""
    signal_graces: dict[signal.Signals, float] = field(default_factory=dict)
    """As `shutdown_timeout`, by signal."""
    deadline: float | None = None
    """When the scheduler ends the job, in seconds since 1970."""
    deadline_margin: float = 5.0
    join_timeout: float = 600.0
    last_call: float = 30.0
    fence_timeout: float | None = None
    supervisor_grace: float = 300.0
    no_progress_limit: int = 3
    no_requeue_exit_code: int = EXIT_NO_REQUEUE
    min_progress_iterations: int = 1
    checkpoint_iteration_file: Path | None = None
    """Shows checkpoints of a script that does not report them; with it, `no_progress_limit` holds also without
    `--restart auto`."""
    identical_limit: int = 3
    backoff_first: float = 0.0
    backoff_max: float = 60.0
    in_process: InProcessPolicy = field(default_factory=InProcessPolicy)
    """When ranks restart in their processes, if their script can."""
    limits: Limits = field(default_factory=Limits)
    calc_ft_timeouts: bool = False
    device_inventory: Path | None = None
    """File with this node's devices; None: as NVML tells them."""
    device_policy: Path | None = None
    """File with a site's rules for evidence about devices, for a supervisor that this launch starts."""
    preload: tuple[str, ...] = ()
    """Modules that warm standbys import ahead."""
    no_standby: bool = False
    phases: tuple[LaunchPhase, ...] = ()
    """Stretches of the training; none: it has one, without a name."""
    slurm: SlurmPlace | None = None
    """Where in SLURM this launch is; None: outside of any job."""
    slurm_requeue: str = "auto"
    """`auto`: at its end the launch asks SLURM for what its exit code means. `off`."""
    meeting_ports: tuple[int, ...] = ()
    """Where the first node of a SLURM step may answer, the usual port first; empty: at `rdzv_endpoint`, as somebody chose
    it."""
    asks_for_end: bool = False
    """Nobody has said when the job ends, and SLURM may know."""
    gate_refusal: str = ""
    """Why no rank may be started here: the gate knows something against a node of ours. `refused_nodes`: against these."""
    refused_nodes: tuple[str, ...] = ()
    debug: bool = False
    report_fd: int | None = None
    """Where the Python API hears how the launch goes; None: it is a command."""

    notes: tuple[str, ...] = ()
    """Lines for the terminal about options that were accepted without effect, printed once by the command line."""


def rank_command(options: LaunchOptions, local_rank: int = 0, phase: int = 0) -> list[str]:
    """The command of one rank, in that phase. Script arguments verbatim: no `$$` or `${local_rank}` is rewritten.

    `PYTHON_EXEC` names another interpreter, as with torchrun. `--run-path` wins over `--no-python`.
    """
    first = [f"--local-rank={local_rank}"] if options.pass_local_rank else []
    of_phase = options.phases[phase].arguments if phase < len(options.phases) else ()
    script = [options.training_script, *first, *options.training_script_args, *of_phase]
    if options.no_python and not options.run_path:
        return script
    python = [os.environ.get("PYTHON_EXEC") or sys.executable, "-u"]
    if options.run_path:
        return [*python, "-c", _RUN_PATH, *script]
    return [*python, "-m", *script] if options.module else [*python, *script]


def shown_command(options: LaunchOptions) -> list[str]:
    """Script and arguments for people to read, secrets redacted; `-m` in front of a module. Very long ones are cut."""
    words = [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]
    redacted = redact_command([word[: 4 * _MAX_SHOWN_CHARS] for word in words[:_MAX_SHOWN_WORDS]])
    shown = [word if len(word) <= _MAX_SHOWN_CHARS else word[:_MAX_SHOWN_CHARS] + "..." for word in redacted]
    more = len(words) - len(shown)
    return [storable(word) for word in shown] + ([f"... and {more} more"] if more else [])


def storable(text: str) -> str:
    """`text` as UTF-8 can hold it: a byte of an argument that is none becomes `\\udcff`, say."""
    return text.encode("utf-8", "backslashreplace").decode()


def restart_policy(options: LaunchOptions) -> RestartPolicy:
    """When a failed attempt is followed by another."""
    return RestartPolicy(
        mode=options.restart,
        max_restarts=options.max_restarts,
        no_progress_limit=options.no_progress_limit,
        no_requeue_exit_code=options.no_requeue_exit_code,
        min_progress_iterations=options.min_progress_iterations,
        bounds_progress=options.checkpoint_iteration_file is not None,
        identical_limit=options.identical_limit,
        backoff_first_s=options.backoff_first,
        backoff_max_s=options.backoff_max,
        on_hang=options.on_hang,
    )


def job_spec(options: LaunchOptions, owner: str, listen: str = "") -> JobSpec:
    """What this launch asks of the supervisor.

    `owner` is the user's name. `listen` is `rdzv_endpoint` for the one agent that runs the supervisor there, else empty.
    """
    return JobSpec(
        job_id=options.job_id,
        preferred_id=options.preferred_job_id,
        cluster=storable(options.cluster),
        owner=owner,
        rdzv_id=storable(options.rdzv_id),
        resume=options.resume,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        ranks_per_node=options.nproc_per_node,
        role=storable(options.role),
        command=shown_command(options),
        limits=options.limits,
        policy=restart_policy(options),
        in_process=options.in_process,
        stop_grace_s=options.stop_grace,
        join_timeout_s=options.join_timeout,
        last_call_s=options.last_call,
        fence_timeout_s=options.fence_timeout,
        supervisor_grace_s=options.supervisor_grace,
        master_port=options.master_port,
        listen=listen,
        endpoint=options.rdzv_endpoint,
        phases=[phase.spec() for phase in options.phases],
        scheduler_job=options.slurm.whole_job if options.slurm else "",
        scheduler_start=options.slurm.num_restarts if options.slurm else 0,
    )


def speaks_for_all(options: LaunchOptions) -> bool:
    """Whether this agent says what all of its job would say. The output of a SLURM step's tasks comes to one place: there the
    first node's does."""
    place = options.slurm
    return place is None or not place.in_step or options.max_nodes == 1 or place.node_index == 0
