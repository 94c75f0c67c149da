"""ft_launcher's options (NVRx 0.4.1 to 0.7), their YAML file, and the `Limits` that come of them.

Every spelling is taken: `--ft-rank-heartbeat-timeout`, `--ft-rank_heartbeat_timeout`, and `--ft-param-...` of 0.4.1. What is
on the command line wins over the file; unknown keys of the file get a note. No limit is on unless it was asked for: that is
the default of NVRx 0.6 and newer, not the 3600 and 2700 s of 0.4.1.
"""

import signal
from collections.abc import Sequence

from rsup.launcher.option_table import HANG_LIMITS, NO_EFFECT, Option
from rsup.launcher.option_values import UNLIMITED_WORDS, OptionValues
from rsup.supervisor.wire import Limits


def _works(*flags: str, meaning: str, default: str | None = None, shown: str = "none", env: str = "") -> Option:
    return Option(flags, meaning, default=default, shown_default=shown, env=env, group=HANG_LIMITS)


def _ignored(why: str, *names: str) -> list[Option]:
    return [Option(("--ft-" + name,), f"No effect: {why}.", no_effect=why, group=NO_EFFECT) for name in names]


FT_OPTIONS: Sequence[Option] = (
    _works(
        "--ft-cfg-path",
        "--fault-tol-cfg-path",
        env="PET_FT_CFG_PATH",
        meaning="YAML file with a section `fault_tolerance`, at any depth; the command line wins over it.",
    ),
    Option(
        ("--ft-ignore-missing-cfg", "--ignore-missing-fault-tol-cfg"),
        "Do not refuse a `--ft-cfg-path` without such a section.",
        default="0",
        is_switch=True,
        group=HANG_LIMITS,
    ),
    _works(
        "--ft-rank-section-timeouts",
        meaning="`NAME:SECONDS,...`: longest time a section may be open, like `setup:600,step:180,checkpointing:420`;"
        " `none`: no limit. `warmup` is the limit of `step` during the first iterations. A job that opens none is told.",
    ),
    _works("--ft-rank-out-of-section-timeout", meaning="Longest time in seconds that no section is open."),
    _works("--ft-initial-rank-heartbeat-timeout", meaning="Longest time in seconds until a rank's first heartbeat."),
    _works("--ft-rank-heartbeat-timeout", meaning="Longest time in seconds between two heartbeats of a rank."),
    _works("--ft-startup-timeout", meaning="Longest time in seconds from a rank's start to its first call of rsup.worker."),
    _works(
        "--ft-num-warmup-iters",
        "--ft-num-warmup-iterations",
        default="5",
        shown="",
        meaning="First iterations of a process, which the limit of `warmup` holds for, where it is set.",
    ),
    _works("--ft-safety-factor", default="5", shown="", meaning="Calculated limits are the longest observed time, times this."),
    Option(
        ("--calc-ft-timeouts", "--ft-calc-timeouts"),
        "Calculate limits from what is observed, and act on them as on configured ones.",
        default="0",
        is_switch=True,
        group=HANG_LIMITS,
    ),
    _works(
        "--ft-max-no-progress-cycles",
        shown="`--no-progress-restarts` + 1",
        meaning="Attempts without progress that end a job with `--restart auto` or `--ft-checkpoint-iteration-file`; 0 or -1:"
        " no bound.",
    ),
    _works(
        "--ft-checkpoint-iteration-file",
        meaning="File in which the training writes the iteration of its newest checkpoint, as Megatron-LM's"
        " `latest_checkpointed_iteration.txt`: its growth is progress. With it, `--ft-max-no-progress-cycles` (then 3) holds"
        " also within `--max-restarts`.",
    ),
    _works(
        "--ft-min-progress-iterations",
        default="1",
        shown="",
        meaning="Iterations from one failure's newest checkpoint to the next one's that count as progress.",
    ),
    _works(
        "--ft-no-restart-exit-code",
        default="93",
        shown="",
        meaning="Exit code of a job that ends for want of progress: please do not requeue it.",
    ),
    _works("--term-timeout", env="PET_TERM_TIMEOUT", shown="", meaning="ft_launcher's name of `--shutdown-timeout`."),
    _works("--workers-stop-timeout", env="PET_WORKERS_STOP_TIMEOUT", shown="", meaning="ft_launcher's name of `--stop-grace`."),
    Option(
        ("--ft-restart-policy", "--restart-policy"),
        "`min-healthy` is taken as `any-failed`: a failed rank restarts all ranks.",
        default="any-failed",
        choices=("any-failed", "min-healthy"),
        group=HANG_LIMITS,
    ),
    *_ignored("hangs are seen within 250 ms", "workload-check-interval"),
    *_ignored("a hung rank is ended with SIGKILL, after its stacks were taken", "rank-termination-signal"),
    *_ignored("a restart is announced to every node at once", "restart-check-interval", "rdzv-impl"),
    *_ignored("section calls never wait for an answer", "skip-section-response"),
    *_ignored("use --debug", "log-level"),
    *_ignored("the failure report has a rank's last lines in any case", "install-exception-hook"),
    *_ignored(
        "a new attempt starts when every process of the old one is gone",
        *("gpu-memory-reclaim-timeout", "gpu-memory-tolerance-mb", "gpu-memory-poll-interval", "check-remaining-processes"),
    ),
    *_ignored(
        "rsup has no such health check of its own",
        *("node-health-check-interval", "node-health-check-endpoint", "enable-nic-monitor", "enable-nic-healthcheck"),
        *("pci-topo-file", "link-down-path-template", "link-state-path-template"),
        *("enable-dist-storage-healthcheck", "storage-health-check-path", "storage-healthcheck-path"),
    ),
    *_ignored("nodes keep the order of --node-rank", "segment"),
    *_ignored("bind the launch itself with numactl or taskset", "numa-bind-strict"),
    *_ignored(
        "use --log-dir with --redirects or --tee; each node writes its own files",
        *("per-cycle-applog-prefix", "nvrx-logfile", "enable-log-server", "log-server-port", "log-aggregator-count"),
        *("log-leaf-max-queue-chunks", "log-server-log-prefix", "log-server-graceful-shutdown-timeout"),
    ),
    *_ignored(
        "rsup report says what failed; no outside service is asked",
        *("attribution-endpoint", "attribution-startup-timeout", "attribution-llm-api-key-file", "attribution-llm-base-url"),
        *("attribution-llm-model", "attribution-analysis-backend", "attribution-stop-action", "attribution-log-level"),
        *("attribution-export-url", "attribution-compute-timeout"),
    ),
    *_ignored("rsup events and the result file have it", "cycle-info-dir", "cycle-info-job-id"),
)

NVRX_NO_PROGRESS_CYCLES = 3
NO_PROGRESS_BOUND_OFF = 2**31 - 1


def asks_itself(values: OptionValues) -> bool:
    """Whether the command line has options of ft_launcher's beside those about its file: the file then may hold none."""
    others = {option.dest for option in FT_OPTIONS if option.flag.startswith("--ft-")} - {
        "ft_cfg_path",
        "ft_ignore_missing_cfg",
    }
    return any(dest in others for dest in values.settings)


def without_nulls(values: OptionValues) -> OptionValues:
    """`none`, `null` and nothing at all leave an option unset where they are no value of its own (no limit)."""
    unset = {
        option.dest
        for option in FT_OPTIONS
        if values.given(option.dest)
        and not (option.dest.endswith(("_timeout", "_timeouts")) and option.default is None and not option.no_effect)
        and values.settings[option.dest].text.strip().lower() in UNLIMITED_WORDS
    }
    settings = {dest: setting for dest, setting in values.settings.items() if dest not in unset}
    return OptionValues(values.index, settings, values.notes) if unset else values


def read_limits(values: OptionValues) -> Limits:
    """Limits as configured. Those that `--calc-ft-timeouts` will find come later, from the supervisor."""
    sections = read_section_timeouts(values)
    safety_factor = values.number("ft_safety_factor", values.text("ft_safety_factor"), at_least=1.0)
    return Limits(
        sections=sections,
        out_of_section_s=values.maybe_seconds("ft_rank_out_of_section_timeout", above=0),
        initial_heartbeat_s=values.maybe_seconds("ft_initial_rank_heartbeat_timeout", above=0),
        heartbeat_s=values.maybe_seconds("ft_rank_heartbeat_timeout", above=0),
        startup_s=values.maybe_seconds("ft_startup_timeout", above=0),
        warmup_s=sections.get("warmup"),
        num_warmup_iters=values.integer("ft_num_warmup_iters"),
        safety_factor=safety_factor,
        enforce_calculated=values.switch("calc_ft_timeouts"),
    )


def read_section_timeouts(values: OptionValues) -> dict[str, float | None]:
    """Seconds by section name; None: no limit."""
    dest = "ft_rank_section_timeouts"
    text = (values.maybe_text(dest) or "").strip()
    limits: dict[str, float | None] = {}
    if text.lower() in UNLIMITED_WORDS:
        return limits
    for pair in text.split(","):
        name, colon, value = (part.strip() for part in pair.partition(":"))
        if not colon or not name:
            values.fail(dest, "must be NAME:SECONDS,..., like setup:600,step:180,checkpointing:none")
        if name in limits:
            values.fail(dest, f"section {name} is there twice")
        unlimited = value.lower() in UNLIMITED_WORDS
        limits[name] = None if unlimited else values.number(dest, value, at_least=0.0, above=0.0)
    return limits


def read_no_progress_limit(values: OptionValues) -> int:
    """Restarts without progress: ours, else NVRx's number of attempts less the first one."""
    if values.given("no_progress_restarts"):
        return values.integer("no_progress_restarts")
    if not values.given("ft_max_no_progress_cycles"):
        tracked = values.given("ft_checkpoint_iteration_file") and values.text("restart") == "count"
        return NVRX_NO_PROGRESS_CYCLES - 1 if tracked else values.integer("no_progress_restarts")
    cycles = values.integer("ft_max_no_progress_cycles", at_least=-1)
    return cycles - 1 if cycles > 0 else NO_PROGRESS_BOUND_OFF


def check_accepted(values: OptionValues) -> None:
    """Refuse impossible values of options without effect where we know what is possible."""
    if values.given("ft_rank_termination_signal"):
        word = values.text("ft_rank_termination_signal").upper()
        names = signal.Signals.__members__
        numbers = {str(number.value) for number in names.values()}
        if word not in names and word not in numbers:
            values.fail("ft_rank_termination_signal", "there is no such signal")
    if values.text("ft_restart_policy") == "min-healthy":
        values.notes.append("--ft-restart-policy min-healthy is taken as any-failed: a failed rank restarts all ranks")
    tracked = values.text("restart") == "auto" or values.given("ft_checkpoint_iteration_file")
    if values.given("ft_max_no_progress_cycles") and not tracked:
        values.notes.append(
            "--ft-max-no-progress-cycles has an effect with --restart auto or --ft-checkpoint-iteration-file only"
        )
