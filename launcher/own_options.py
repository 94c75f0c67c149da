"""rsup's own options: the table, and the few values that need more than a type."""

from collections.abc import Sequence

from rsup.launcher.option_table import Option
from rsup.launcher.option_values import OptionValues
from rsup.supervisor import places
from rsup.supervisor.wire import UsageError

OWN_OPTIONS: Sequence[Option] = (
    Option(
        ("--job-id",),
        shown_default="generated",
        meaning="Name of the job: letters, digits, `.`, `_` and `-`. A live one is refused, an ended one starts its next run.",
    ),
    Option(
        ("--resume",),
        is_switch=True,
        default="0",
        meaning="Continue the last run of `--job-id` instead of starting its next one.",
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
        meaning="Address of a shared supervisor: `HOST:PORT`, `tcp://HOST:PORT` or `ipc://PATH`.",
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
        shown_default="`~/.local/state/rsup`",
        meaning="Directory of the store, tokens and results.",
    ),
    Option(
        ("--result-file",),
        shown_default="in the state directory",
        meaning="File that receives the job's true exit code and whose it was, as JSON.",
    ),
    Option(("--debug",), is_switch=True, default="0", env="RSUP_DEBUG", meaning="Show tracebacks and what the launcher does."),
)


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


def read_supervisor(values: OptionValues) -> str:
    """ZeroMQ address of the shared supervisor; empty: none was named."""
    text = (values.maybe_text("supervisor") or "").strip()
    if not text or (text.startswith("ipc://") and len(text) > len("ipc://")):
        return text
    try:
        host, port = places.split_endpoint(text.removeprefix("tcp://"))
        if "/" in host or port == 0:
            raise UsageError("")
    except UsageError:
        values.fail("supervisor", "must be HOST:PORT, tcp://HOST:PORT or ipc://PATH")
    return places.tcp_address(host, port)
