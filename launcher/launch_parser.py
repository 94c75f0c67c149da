"""From the words after `rsup launch` and the environment to `LaunchOptions`. Refuses in one line what cannot work.

Nothing here starts, writes or connects; whether script and directories can be used is for `launch_checks`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rsup.launcher.command_line import CommandLine, read_command_line, read_environment
from rsup.launcher.device_count import DeviceCounters, of_this_machine
from rsup.launcher.ft_config_file import read_config_file
from rsup.launcher.ft_options import FT_OPTIONS, asks_itself, check_accepted, read_limits, read_no_progress_limit, without_nulls
from rsup.launcher.grace_options import GRACE_OPTIONS, read_deadline, read_signal_graces
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.nodes_options import (
    JOIN_KEY,
    LAST_CALL_KEY,
    nodes_of_step,
    read_meeting_point,
    read_nnodes,
    read_node_rank,
    read_rdzv_backend,
    read_rdzv_conf,
    read_rdzv_id,
)
from rsup.launcher.option_table import BadValue, CommandLineError, Option, OptionIndex
from rsup.launcher.option_values import UNLIMITED_WORDS, OptionValues
from rsup.launcher.own_options import (
    OWN_OPTIONS,
    read_backoff,
    read_job_id,
    read_log_prefix,
    read_modules,
    read_ranks_filter,
    read_slurm_job_id,
    read_state_dir,
    read_supervisor,
)
from rsup.launcher.phases_option import PHASES_OPTIONS, read_phases
from rsup.launcher.scheduler_deadline import VARIABLE
from rsup.launcher.slurm.environment import check_tasks, read_place
from rsup.launcher.torchrun_options import (
    TORCHRUN_OPTIONS,
    read_filters,
    read_local_ranks_filter,
    read_nproc_per_node,
    read_signals,
    read_streams,
)
from rsup.supervisor.wire import InProcessPolicy, UsageError

ALL_OPTIONS: Sequence[Option] = (*TORCHRUN_OPTIONS, *OWN_OPTIONS, *GRACE_OPTIONS, *PHASES_OPTIONS, *FT_OPTIONS)

DEFAULT_GRACE_S = 30.0


class HelpWanted(Exception):
    """`--help` stands left of the script."""


def parse_launch(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, count: DeviceCounters | None = None
) -> LaunchOptions:
    """Options of one launch; devices are counted without torch unless `count` does it.

    Raise `UsageError` in one line for what is wrong (`CommandLineError`, `BadNodeRange` or `BadValue`), `HelpWanted` for
    `--help`.
    """
    index = OptionIndex(ALL_OPTIONS)
    line = read_command_line(argv, index)
    if line.wants_help:
        raise HelpWanted
    values = OptionValues(index, {**read_environment(environ, ALL_OPTIONS), **line.settings})
    values = without_nulls(_with_config_file(values))
    return read_options(values, line, environ, count or of_this_machine(environ, values.switch("virtual_local_rank")))


def asks_for_debug(argv: Sequence[str]) -> bool:
    """Whether `--debug` stands left of the script; a guess if the command line is wrong before it."""
    try:
        return "debug" in read_command_line(argv, OptionIndex(ALL_OPTIONS)).settings
    except UsageError:
        return "--debug" in argv


def read_options(values: OptionValues, line: CommandLine, environ: Mapping[str, str], count: DeviceCounters) -> LaunchOptions:
    """Interpret every option, in four steps, so that a bad value is refused also where it would not matter."""
    if not line.command or not line.command[0]:
        raise CommandLineError("no script given; write rsup launch [OPTIONS] SCRIPT [ARGUMENTS], or see rsup launch --help")
    options = _with_script(values, line)
    options = _with_nodes(options, values, environ, count)
    options = _with_output(options, values)
    options = _with_times(options, values, environ)
    options = _with_own(options, values, environ)
    _check_together(options)
    check_accepted(values)
    return replace(options, notes=(*values.notes, *notes_of_no_effect(values)))


def _with_config_file(values: OptionValues) -> OptionValues:
    path = values.maybe_text("ft_cfg_path")
    if not path:
        return values
    settings, notes = read_config_file(path, values.index, values.switch("ft_ignore_missing_cfg") or asks_itself(values))
    return OptionValues(values.index, {**settings, **values.settings}, notes)


def _with_script(values: OptionValues, line: CommandLine) -> LaunchOptions:
    module, no_python, run_path = values.switch("module"), values.switch("no_python"), values.switch("run_path")
    if module and (no_python or run_path):
        raise BadValue(f"-m cannot go with --{'run-path' if run_path else 'no-python'}; leave one of them out")
    pass_local_rank = values.switch("pass_local_rank") and not values.switch("use_env")
    if pass_local_rank and no_python and not run_path:
        raise BadValue("--no-python: a program that is no Python script gets no --local-rank; add --use-env")
    return LaunchOptions(
        training_script=line.command[0],
        training_script_args=line.command[1:],
        module=module,
        no_python=no_python,
        run_path=run_path,
        pass_local_rank=pass_local_rank,
        start_method=values.text("start_method"),
        event_log_handler=values.text("event_log_handler"),
        role=values.text("role"),
        virtual_local_rank=values.switch("virtual_local_rank"),
        numa_binding=values.maybe_text("numa_binding"),
    )


def _with_nodes(
    options: LaunchOptions, values: OptionValues, environ: Mapping[str, str], count: DeviceCounters
) -> LaunchOptions:
    place = read_place(environ)
    if place is not None:
        check_tasks(place)
    min_nodes, max_nodes = read_nnodes(values) if place is None else nodes_of_step(values, place)
    standalone = values.switch("standalone")
    if standalone and max_nodes > 1:
        values.fail("nnodes", "--standalone is for one node; give --rdzv-endpoint HOST:PORT of the first node instead")
    slurm_gpus = place.num_gpus if place is not None and not values.given("nproc_per_node") else 0
    num_ranks = slurm_gpus or read_nproc_per_node(values, count)
    rdzv_conf = read_rdzv_conf(values)
    endpoint, master_port = read_meeting_point(values, max_nodes)
    threads = _read_threads(values, environ, num_ranks, count)
    return replace(
        options,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=num_ranks,
        omp_num_threads=threads,
        standalone=standalone,
        rdzv_backend=read_rdzv_backend(values),
        rdzv_id="none" if standalone else read_rdzv_id(values, max_nodes, place),
        slurm=place,
        rdzv_conf=rdzv_conf,
        rdzv_endpoint=endpoint,
        master_addr=values.text("master_addr").strip("[]"),
        master_port=master_port,
        local_addr=values.maybe_text("local_addr") or None,
        node_rank=read_node_rank(values, max_nodes, environ),
        join_timeout=_seconds(values, "join_timeout", rdzv_conf.get(JOIN_KEY), 600.0),
        last_call=_seconds(values, "last_call", rdzv_conf.get(LAST_CALL_KEY), 30.0),
    )


def _with_output(options: LaunchOptions, values: OptionValues) -> LaunchOptions:
    num_ranks = options.nproc_per_node
    return replace(
        options,
        log_dir=_path(values, "log_dir"),
        redirects=read_streams(values, "redirects", num_ranks),
        tee=read_streams(values, "tee", num_ranks),
        local_ranks_filter=read_local_ranks_filter(values, num_ranks),
        ranks_filter=read_ranks_filter(values, num_ranks if options.max_nodes == 1 else None),
        log_prefix=read_log_prefix(values),
        log_format=values.text("log_format"),
        duplicate_stdout_filters=read_filters(values, "duplicate_stdout_filters"),
        duplicate_stderr_filters=read_filters(values, "duplicate_stderr_filters"),
        logs_specs=values.maybe_text("logs_specs"),
    )


def _with_times(options: LaunchOptions, values: OptionValues, environ: Mapping[str, str]) -> LaunchOptions:
    shutdown_timeout = _read_shutdown_timeout(values, environ)
    grace = "stop_grace" if values.given("stop_grace") else "workers_stop_timeout"
    backoff_first, backoff_max = read_backoff(values)
    limits = read_limits(values)
    return replace(
        options,
        max_restarts=values.integer("max_restarts"),
        monitor_interval=values.seconds("monitor_interval"),
        signals_to_handle=read_signals(values),
        shutdown_timeout=shutdown_timeout,
        stop_grace=_seconds(values, grace, None, shutdown_timeout),
        signal_graces=read_signal_graces(values),
        deadline=read_deadline(values, environ),
        asks_for_end=not values.given("deadline") and VARIABLE not in environ,
        deadline_margin=values.seconds("deadline_margin"),
        fence_timeout=values.maybe_seconds("fence_timeout", above=0),
        supervisor_grace=values.seconds("supervisor_grace"),
        no_progress_limit=read_no_progress_limit(values),
        no_requeue_exit_code=values.integer("ft_no_restart_exit_code", at_least=1, at_most=255),
        min_progress_iterations=values.integer("ft_min_progress_iterations"),
        checkpoint_iteration_file=_path(values, "ft_checkpoint_iteration_file"),
        identical_limit=values.integer("identical_failures", at_least=1),
        backoff_first=backoff_first,
        backoff_max=backoff_max,
        in_process=_read_in_process(values),
        limits=limits,
        calc_ft_timeouts=limits.enforce_calculated,
    )


def _read_in_process(values: OptionValues) -> InProcessPolicy:
    """When ranks restart in their processes, and when all processes are restarted instead."""
    unlimited = (values.maybe_text("inprocess_max_restarts") or "").strip().lower() in UNLIMITED_WORDS
    return InProcessPolicy(
        restart_within_s=values.seconds("inprocess_restart_within", above=0),
        max_restarts=None if unlimited else values.integer("inprocess_max_restarts", hint="; or none: any number"),
        identical_limit=values.integer("inprocess_identical_limit"),
        no_progress_limit=values.integer("inprocess_no_progress_limit"),
    )


def _with_own(options: LaunchOptions, values: OptionValues, environ: Mapping[str, str]) -> LaunchOptions:
    job_id, slurm_job_id = read_job_id(values), read_slurm_job_id(environ)
    requeued = environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    return replace(
        options,
        job_id=job_id,
        preferred_job_id="" if job_id else slurm_job_id,
        cluster=(environ.get("SLURM_CLUSTER_NAME") if slurm_job_id else None) or "local",
        resume=values.switch("resume") or (requeued and bool(job_id or slurm_job_id)),
        restart=values.text("restart"),
        on_hang=values.text("on_hang"),
        state_dir=read_state_dir(values, options.slurm, environ),
        slurm_requeue=values.text("slurm_requeue"),
        result_file=_path(values, "result_file"),
        supervisor=read_supervisor(values),
        require_supervisor=values.switch("require_supervisor"),
        require_key=values.switch("require_key"),
        key_file=_path(values, "key_file"),
        device_inventory=_path(values, "device_inventory"),
        device_policy=_path(values, "device_policy"),
        preload=read_modules(values, "preload"),
        no_standby=values.switch("no_standby"),
        phases=read_phases(values),
        debug=values.switch("debug"),
    )


def _check_together(options: LaunchOptions) -> None:
    if options.resume and not options.job_id and not options.preferred_job_id:
        raise BadValue("--resume: which job? Add --job-id")
    if options.require_supervisor and not options.supervisor:
        raise BadValue("--require-supervisor: which one? Add --supervisor HOST:PORT, or set RSUP_SUPERVISOR")
    if options.max_nodes == 1 or options.rdzv_endpoint or (options.slurm is not None and options.slurm.in_step):
        return
    if not options.supervisor:
        raise BadValue(f"--nnodes {options.max_nodes}: where do they meet? Add --rdzv-endpoint HOST:PORT of the first node")
    if options.rdzv_id == "none" and not options.job_id:
        raise BadValue(f"--nnodes {options.max_nodes}: which agents belong together? Add --rdzv-id, alike on all nodes")


def _read_threads(values: OptionValues, environ: Mapping[str, str], num_ranks: int, count: DeviceCounters) -> int | None:
    """What `OMP_NUM_THREADS=auto` means: an equal share of the cores for each rank; None if it does not say `auto`."""
    if environ.get("OMP_NUM_THREADS", "").strip().lower() != "auto":
        return None
    num_cpus = count.cpus()
    threads = max(1, num_cpus // num_ranks)
    values.notes.append(f"OMP_NUM_THREADS=auto is {threads}, of {num_cpus} cores for {num_ranks} rank{'s'[: num_ranks > 1]}")
    return threads


def _seconds(values: OptionValues, dest: str, otherwise: str | None, default: float) -> float:
    """The option's, else what another option said, else the default."""
    if values.given(dest):
        return values.seconds(dest)
    return float(otherwise) if otherwise is not None else default


def _read_shutdown_timeout(values: OptionValues, environ: Mapping[str, str]) -> float:
    if values.given("shutdown_timeout") or values.given("term_timeout"):
        return values.seconds("shutdown_timeout" if values.given("shutdown_timeout") else "term_timeout")
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "").strip()
    if text and not text.isdecimal():
        raise BadValue(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: must be a number of seconds; correct or unset it")
    return float(text) if text else DEFAULT_GRACE_S


def _path(values: OptionValues, dest: str) -> Path | None:
    text = values.maybe_text(dest)
    return Path(os.path.abspath(os.path.expanduser(text))) if text else None


def notes_of_no_effect(values: OptionValues) -> list[str]:
    """A line for each reason why given options have no effect."""
    reasons: dict[str, list[str]] = {}
    for option in values.index.options:
        if option.no_effect and values.given(option.dest) and values.maybe_text(option.dest) != option.default:
            reasons.setdefault(option.no_effect, []).append(option.flag)
    return [f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect: {why}" for why, flags in reasons.items()]
