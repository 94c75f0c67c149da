"""rsup's own options: the table, and the few values that need more than a type."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rsup.launcher.log_lines import PREFIX_FIELDS
from rsup.launcher.option_table import BadValue, Option, did_you_mean
from rsup.launcher.option_values import OptionValues
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.supervisor import places
from rsup.supervisor.wire import UsageError

OWN_OPTIONS: Sequence[Option] = (
    Option(
        ("--job-id",),
        shown_default="`SLURM_JOB_ID` unless a live job has it, else generated",
        meaning="Name of the job: letters, digits, `.`, `_` and `-`. A live one is refused, an ended one starts its next run.",
    ),
    Option(
        ("--resume",),
        is_switch=True,
        default="0",
        meaning="Continue the last run of the job with this id instead of starting its next one.",
    ),
    Option(
        ("--pass-local-rank",),
        is_switch=True,
        default="0",
        meaning="Put `--local-rank=N` in front of the script's arguments, as `python -m torch.distributed.launch` does.",
    ),
    Option(
        ("--use-env",),
        is_switch=True,
        default="0",
        meaning="Overrules `--pass-local-rank`; accepted for the sake of `torch.distributed.launch --use-env`.",
    ),
    Option(
        ("--restart",),
        default="count",
        choices=("count", "auto"),
        meaning="`count`: up to `--max-restarts` restarts. `auto` (recommended): as long as there is progress, see"
        " `--no-progress-restarts`; `--max-restarts` then bounds it if it is not 0.",
    ),
    Option(
        ("--no-progress-restarts",),
        default="3",
        meaning="With `--restart auto`: restarts without a new durable checkpoint until the job ends with 93.",
    ),
    Option(("--identical-failures",), default="3", meaning="Equal failures before any progress that end the job."),
    Option(
        ("--backoff",),
        default="0:60",
        meaning="`FIRST[:MAX]`: seconds before the first restart, doubled each time without progress, up to MAX.",
    ),
    Option(
        ("--inprocess-restart-within",),
        default="60",
        meaning="Seconds from a fault until every rank has entered its training function again, where the script can; a rank"
        " that needs a new process has as long as its first start took in addition. Then all processes are restarted.",
    ),
    Option(
        ("--inprocess-identical-limit",),
        default="3",
        meaning="Equal faults, without the job getting further than before, after which all processes are restarted; 0: never.",
    ),
    Option(
        ("--inprocess-no-progress-limit",),
        default="10",
        meaning="The same for faults of any kind; 0: never.",
    ),
    Option(
        ("--inprocess-max-restarts",),
        default="none",
        meaning="In-process restarts of one attempt, then all processes are restarted; `none`: any number. They cost nothing of"
        " `--max-restarts`. 0: a dead rank is never replaced.",
    ),
    Option(
        ("--on-hang",),
        default="auto",
        choices=("auto", "restart", "report"),
        meaning="What an expired limit does. `auto`: restart where the limit was configured or asked for, else only report.",
    ),
    Option(
        ("--stop-grace",),
        shown_default="`--shutdown-timeout`",
        meaning="Seconds from SIGTERM to SIGKILL when ranks are stopped because another one failed.",
    ),
    Option(
        ("--join-timeout",),
        shown_default="600, or `join_timeout` of `--rdzv-conf`",
        meaning="Seconds that a job waits for its smallest number of nodes before it ends with 1.",
    ),
    Option(
        ("--last-call",),
        shown_default="30, or `last_call_timeout` of `--rdzv-conf`",
        meaning="Seconds that an elastic job waits for further nodes once it has enough.",
    ),
    Option(
        ("--fence-timeout",),
        default="none",
        meaning="Seconds after which an agent that is cut off kills its own ranks, and counts as dead; `none`: never.",
    ),
    Option(
        ("--supervisor-grace",),
        default="300",
        meaning="Seconds that an agent waits for an absent supervisor when a decision is due; then it exits with 88.",
    ),
    Option(
        ("--supervisor",),
        env="RSUP_SUPERVISOR",
        shown_default="one of the job's own",
        meaning="Address of a shared supervisor: `HOST:PORT`, `tcp://HOST:PORT` or `ipc://PATH`; several, of which one leads,"
        " are separated by commas.",
    ),
    Option(
        ("--require-supervisor",),
        is_switch=True,
        default="0",
        meaning="Exit with 75 if the shared supervisor cannot be reached, instead of starting one for this job.",
    ),
    Option(
        ("--key-file",),
        env="RSUP_KEY_FILE",
        shown_default="found out",
        meaning="File (mode 0600) with the secret of the link between agents and supervisor.",
    ),
    Option(("--require-key",), is_switch=True, default="0", meaning="Refuse a link between nodes that no key protects."),
    Option(
        ("--state-dir",),
        env="RSUP_STATE_DIR",
        shown_default="`~/.local/state/rsup`; in a SLURM job, `slurm/CLUSTER-JOB` below it",
        meaning="Directory of the store, tokens and results.",
    ),
    Option(
        ("--slurm-requeue",),
        default="auto",
        choices=("auto", "off"),
        meaning="In a SLURM batch job: `auto` requeues it after 16 (without the suspect's node) and 88, and calls off what"
        " would go on with it after 93. `off`: only the exit code says so.",
    ),
    Option(
        ("--result-file",),
        shown_default="in the state directory",
        meaning="File that receives the job's true exit code and whose it was, as JSON.",
    ),
    Option(
        ("--device-inventory",),
        env="RSUP_DEVICE_INVENTORY",
        shown_default="what NVML says",
        meaning='JSON file with the node\'s devices, `[{"uuid": ..., "serial": ..., "model": ..., ...}]`: stands for them where'
        " there is no NVML, and fills in what NVML does not tell. See devices.md.",
    ),
    Option(
        ("--device-policy",),
        env="RSUP_DEVICE_POLICY",
        shown_default="the built-in one",
        meaning="TOML file that is merged over the built-in rules for evidence about devices, where this launch starts a"
        " supervisor. See devices.md.",
    ),
    Option(
        ("--preload",),
        joins=True,
        shown_default="none",
        meaning="`MODULE,...`: further modules that warm standbys import ahead, after torch; list `torch` to fix the order.",
    ),
    Option(
        ("--no-standby",), is_switch=True, default="0", meaning="Keep no warm standbys: a restart imports everything again."
    ),
    Option(
        ("--log-prefix",),
        env="RSUP_LOG_PREFIX",
        shown_default="torchrun's, for `--tee` alone",
        meaning="Text in front of each line on the console, `'[${host}:${rank}] '` say; knows `${rank}`, `${local_rank}`,"
        " `${role_name}`, `${host}`, `${attempt}` and `${stream}`.",
    ),
    Option(
        ("--log-format",),
        env="RSUP_LOG_FORMAT",
        default="text",
        choices=("text", "json"),
        meaning="`json`: each line on the console is an object with `time`, `host`, `rank`, `local_rank`, `attempt`, `stream`"
        " and `text`. Log files stay as printed.",
    ),
    Option(
        ("--ranks-filter",),
        env="RSUP_RANKS_FILTER",
        default="",
        meaning="Ranks of the job whose output reaches the console, `0,8-15`; empty: all. `--local-ranks-filter` counts too.",
    ),
    Option(("--debug",), is_switch=True, default="0", env="RSUP_DEBUG", meaning="Show tracebacks and what the launcher does."),
)


_PREFIX_VARIABLE = re.compile(r"\$(?:\$|\{([^}]*)\}?|([A-Za-z_]\w*))", re.ASCII)


def read_log_prefix(values: OptionValues) -> str | None:
    """Text in front of each line, None: as torchrun. Refuses what `prefix_text` would leave as it is written."""
    text = values.maybe_text("log_prefix")
    for match in _PREFIX_VARIABLE.finditer(text or ""):
        name = match[1] if match[1] is not None else match[2]
        is_open = match[0].startswith("${") and not match[0].endswith("}")
        if name is not None and (name not in PREFIX_FIELDS or is_open):
            known = ", ".join(f"${{{field}}}" for field in PREFIX_FIELDS)
            meant = did_you_mean(name.lower(), PREFIX_FIELDS)
            raise BadValue(f"{values.settings['log_prefix'].source}: {match[0]} is none of {known}{meant}; $$ stands for $")
    return text


def read_ranks_filter(values: OptionValues, num_ranks: int | None) -> frozenset[int] | None:
    """Ranks of the job whose output reaches the console; None: all. `num_ranks`: of the job, where that is known."""
    ranks: set[int] = set()
    text = values.text("ranks_filter").strip()
    for part in text.split(",") if text else ():
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 7 or len(last) > 7:
            values.fail("ranks_filter", "must be ranks separated by commas, like 0,1 or 0-3")
        if dash and int(last) < int(first):
            values.fail("ranks_filter", f"{first}-{last}: the smaller rank comes first; write {last}-{first}")
        ranks.update(range(int(first), int(last or first) + 1))
    if num_ranks is not None and ranks and max(ranks) >= num_ranks:
        have = "there is only rank 0" if num_ranks == 1 else f"there are only 0 to {num_ranks - 1}"
        none = ": no rank's output is shown" if min(ranks) >= num_ranks else ""
        values.notes.append(f"--ranks-filter names rank {min(r for r in ranks if r >= num_ranks)}, but {have}{none}")
    return frozenset(ranks) if text else None


def read_backoff(values: OptionValues) -> tuple[float, float]:
    """Seconds before the first restart and at most."""
    first_text, colon, max_text = values.text("backoff").partition(":")
    first = values.number("backoff", first_text, at_least=0)
    longest = values.number("backoff", max_text, at_least=0) if colon else max(first, 60.0)
    if longest < first:
        values.fail("backoff", f"the longest wait, {longest:g} s, is shorter than the first one, {first:g} s")
    return first, longest


def read_job_id(values: OptionValues) -> str:
    """The job's name as given, checked; empty if none was given."""
    job_id = values.maybe_text("job_id") or ""
    allowed = job_id.replace("-", "").replace("_", "").replace(".", "")
    if job_id and not (allowed.isascii() and allowed.isalnum() and job_id[0].isalnum() and len(job_id) <= 100):
        values.fail("job_id", "must be at most 100 letters, digits, `.`, `_` or `-`, and begin with a letter or digit")
    return job_id


def read_slurm_job_id(environ: Mapping[str, str]) -> str:
    """The number of the SLURM job that this launch is in; empty outside of one."""
    number = environ.get("SLURM_JOB_ID", "")
    return number if number.isascii() and number.isdecimal() else ""


def read_state_dir(values: OptionValues, place: SlurmPlace | None, environ: Mapping[str, str]) -> Path:
    """The state directory; in a SLURM job where nobody has named one, a folder for this job in the user's: an embedded
    supervisor lives and dies with its job, so jobs do not share one."""
    given = values.maybe_text("state_dir")
    found = places.state_dir(given)
    if given or environ.get("RSUP_STATE_DIR") or place is None:
        return found
    return found / "slurm" / f"{place.cluster}-{place.job}"


def read_modules(values: OptionValues, dest: str) -> tuple[str, ...]:
    """Names of modules separated by commas."""
    names = tuple(name.strip() for name in (values.maybe_text(dest) or "").split(",") if name.strip())
    if wrong := next((name for name in names if not all(part.isidentifier() for part in name.split("."))), None):
        values.fail(dest, f"{wrong!r} is no name of a module")
    return names


def read_supervisor(values: OptionValues) -> str:
    """ZeroMQ address of the shared supervisor, or of several, separated by commas; empty: none was named."""
    parts = [part.strip() for part in (values.maybe_text("supervisor") or "").split(",")]
    return ",".join(dict.fromkeys(_read_address(values, part) for part in parts if part))


def _read_address(values: OptionValues, text: str) -> str:
    if not text or (text.startswith("ipc://") and len(text) > len("ipc://")):
        return text
    try:
        host, port = places.split_endpoint(text.removeprefix("tcp://"))
        if "/" in host or port == 0:
            raise UsageError("")
    except UsageError:
        values.fail("supervisor", "must be HOST:PORT, tcp://HOST:PORT or ipc://PATH")
    return places.tcp_address(host, port)
