"""torchrun's options: the table (torch 2.13's flags, defaults and `PET_*` variables) and what their values mean.

A test holds the table equal to the parser of the installed torch. Where the meaning differs from torchrun's on purpose
(spec of public complaints: unknown `--rdzv-conf` keys, `10:3` in `--redirects`, `PET_STANDALONE=true`), it is more lenient or
refuses in one line what torchrun answers with a traceback. Nothing here imports torch.
"""

import re
import signal
from collections.abc import Mapping, Sequence

from rsup.launcher.device_count import DeviceCounters
from rsup.launcher.option_table import TORCHRUN, Option, did_you_mean
from rsup.launcher.option_values import OptionValues

_MAX_RANKS_PER_NODE = 4096


def _option(
    *flags: str,
    meaning: str,
    default: str | None = None,
    shown_default: str = "",
    env: bool = True,
    switch: bool = False,
    choices: tuple[str, ...] = (),
    joins: bool = False,
    no_effect: str = "",
) -> Option:
    return Option(
        flags,
        meaning,
        default="0" if switch else default,
        shown_default=shown_default,
        is_switch=switch,
        env="PET_" + flags[0].lstrip("-").replace("-", "_").upper() if env else "",
        choices=choices,
        joins=joins,
        no_effect=no_effect,
        group=TORCHRUN,
    )


TORCHRUN_OPTIONS: Sequence[Option] = (
    _option(
        "--nnodes",
        default="1:1",
        shown_default="1:1; in a SLURM step, all its nodes",
        meaning="Number of nodes, or `MIN:MAX` for an elastic job; nodes above MAX wait as spares.",
    ),
    _option(
        "--nproc-per-node",
        default="1",
        shown_default="1; in a SLURM job, as many as it has GPUs on the node",
        meaning="Ranks on this node: a number, `gpu`, `xpu` or `cpu` for one per device or core, `auto` for GPUs, else cores.",
    ),
    _option(
        "--rdzv-backend",
        default="static",
        meaning="Accepted for torchrun's sake (`static`, `c10d`, `etcd`, `etcd-v2`): the supervisor is the rendezvous.",
    ),
    _option(
        "--rdzv-endpoint",
        default="",
        meaning="`HOST[:PORT]` of the first node, where the nodes of a job meet (port 29400 if none is given).",
    ),
    _option("--rdzv-id", default="none", meaning="Groups the agents of one job while it lives; any text."),
    _option(
        "--rdzv-conf",
        default="",
        joins=True,
        meaning="`KEY=VALUE,...`; repeats add up. `join_timeout` and `last_call_timeout` count, torchrun's and NVRx's other"
        " keys are accepted, unknown ones refused.",
    ),
    _option("--standalone", switch=True, meaning="One node, no meeting point; wins over `--rdzv-*`."),
    _option("--max-restarts", default="0", meaning="Restarts after a failure, for the whole job: a hard bound."),
    _option(
        "--monitor-interval",
        default="0.1",
        no_effect="the death of a rank is seen at once",
        meaning="Accepted without effect: ranks are not polled, the death of one is seen at once.",
    ),
    _option(
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        no_effect="every rank is a fresh process",
        meaning="Accepted without effect: every rank is a fresh process, with `--run-path` too.",
    ),
    _option(
        "--event-log-handler",
        default="null",
        meaning="Where torch's own events go: `null`, `console`, or a handler registered with torch. `rsup events` shows"
        " the job's events in any case.",
    ),
    _option("--role", default="default", meaning="Name of the ranks' role (`ROLE_NAME`), in front of `--tee` lines."),
    _option("--module", "-m", switch=True, meaning="The script is a module, run as by `python -m`."),
    _option("--no-python", switch=True, meaning="Run the script itself, without Python in front."),
    _option("--run-path", switch=True, meaning="Run the script by `runpy.run_path`; wins over `--no-python`."),
    _option(
        "--log-dir",
        shown_default="a directory of the job's own",
        meaning="Directory for log files, with a folder for each run.",
    ),
    _option(
        "--redirects",
        "-r",
        default="0",
        meaning="Streams that go to a file instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank:"
        " `0:3,1:1`, `0-7:3`, `10:3`.",
    ),
    _option(
        "--tee", "-t", default="0", meaning="Streams that go to a file and, with a prefix, to the console; as `--redirects`."
    ),
    _option(
        "--local-ranks-filter",
        default="",
        meaning="Local ranks whose output reaches the console, `0,1,2` or `0-2`; empty: all.",
    ),
    _option(
        "--duplicate-stdout-filters",
        default="",
        meaning="Lines of stdout that contain one of these words also go to `filtered_stdout.log`; `,,` is a comma.",
    ),
    _option("--duplicate-stderr-filters", default="", meaning="As `--duplicate-stdout-filters`, for stderr."),
    _option(
        "--node-rank",
        default="0",
        shown_default="SLURM's node number, else the order of joining",
        meaning="Place of this node in the job; also with `c10d`, and kept over restarts.",
    ),
    _option("--master-addr", default="127.0.0.1", meaning="Address of the first node, where `--rdzv-endpoint` is not given."),
    _option(
        "--master-port",
        shown_default="any free port; 29500 to meet at `--master-addr`",
        meaning="Port of the attempt's TCPStore, exactly; without `--rdzv-endpoint`, of several nodes' meeting point.",
    ),
    _option("--local-addr", shown_default="found out", meaning="Address at which other nodes reach this one."),
    _option(
        "--logs-specs",
        env=False,
        meaning="Entry point of the group `torchrun.logs_specs`: a class like torch's `LogsSpecs` says where ranks log to.",
    ),
    _option(
        "--numa-binding",
        env=False,
        choices=("node", "socket", "exclusive", "core-complex"),
        meaning="Bind each rank to cores near its GPU: all of the GPU's NUMA node or socket, a share of the node's cores for"
        " each GPU, or a group of cores with a common cache.",
    ),
    _option(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        meaning="Signals to this launcher that are passed on to the ranks and end the job.",
    ),
    _option(
        "--shutdown-timeout",
        shown_default="`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else 30",
        meaning="Seconds from a signal until ranks that are still there are killed.",
    ),
    _option("--virtual-local-rank", switch=True, meaning="`LOCAL_RANK=0` for every rank, each seeing its own GPU only."),
)


def read_nproc_per_node(values: OptionValues, count: DeviceCounters) -> int:
    """Ranks on this node."""
    word = values.text("nproc_per_node").strip().lower()
    if re.fullmatch(r"[+-]?\d+", word):
        return values.integer("nproc_per_node", 1, _MAX_RANKS_PER_NODE, hint="; give the number of ranks of this node, or auto")
    if word == "cpu":
        return count.cpus()
    if word == "auto":
        return count.accelerators() or count.cpus()
    found = count.gpus() if word == "gpu" else count.xpus() if word == "xpu" else count.named(word)
    if found is None:
        words = ("auto", "cpu", "gpu", "xpu")
        values.fail("nproc_per_node", f"must be a number, or one of {', '.join(words)}{did_you_mean(word, words)}")
    if not found:
        values.fail("nproc_per_node", f"no {word.upper()} is visible on this node; give a number, `cpu` or `auto`")
    return found


def read_streams(values: OptionValues, dest: str, num_ranks: int) -> tuple[int, ...]:
    """`redirects` or `tee` spelled out: 0 to 3 for each local rank. Ranks that it does not name have 0."""
    text = values.text(dest).strip()
    if re.fullmatch(r"[0-3]", text):
        return (int(text),) * num_ranks
    streams = [0] * num_ranks
    beyond = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*:\s*([0-3])\s*", part)
        if match is None:
            values.fail(dest, "must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank, like 0:3,1:1 or 0-7:3")
        for rank in _span(values, dest, match):
            if rank < num_ranks:
                streams[rank] = int(match[3])
            else:
                beyond.append(rank)
    _note_ranks_beyond(values, dest, beyond, num_ranks)
    return tuple(streams)


def read_local_ranks_filter(values: OptionValues, num_ranks: int) -> frozenset[int] | None:
    """Local ranks whose output reaches the console; None: all."""
    text = values.text("local_ranks_filter").strip()
    if not text:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            values.fail("local_ranks_filter", "must be local ranks separated by commas, like 0,1 or 0-3")
        ranks.update(_span(values, "local_ranks_filter", match))
    _note_ranks_beyond(values, "local_ranks_filter", [rank for rank in ranks if rank >= num_ranks], num_ranks)
    return frozenset(ranks)


def _span(values: OptionValues, dest: str, match: re.Match[str]) -> range:
    """The ranks of one part, `3` or `0-7`."""
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        values.fail(dest, f"{first}-{last}: the smaller rank comes first; write {last}-{first}")
    return range(first, last + 1)


def _note_ranks_beyond(values: OptionValues, dest: str, beyond: list[int], num_ranks: int) -> None:
    if beyond:
        have = "there is only rank 0" if num_ranks == 1 else f"there are only 0 to {num_ranks - 1}"
        values.notes.append(f"{values.option(dest).flag} names local rank {min(beyond)}, but {have}")


def read_filters(values: OptionValues, dest: str) -> tuple[str, ...]:
    """Words separated by commas; two commas stand for one in a word."""
    text = values.text(dest)
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(",") if word) if text else ()


_NOT_TO_HANDLE = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


def read_signals(values: OptionValues) -> tuple[signal.Signals, ...]:
    """The signals to handle, each once, in the order given. `TERM` is as good as `SIGTERM`."""
    known: Mapping[str, signal.Signals] = signal.Signals.__members__
    found: list[signal.Signals] = []
    for word in values.text("signals_to_handle").split(","):
        name = word.strip().upper()
        name = name if name.startswith("SIG") else "SIG" + name
        if name not in known:
            values.fail("signals_to_handle", f"no signal is called {word.strip()!r}{did_you_mean(name, tuple(known))}")
        if name in _NOT_TO_HANDLE:
            values.fail("signals_to_handle", f"{name} cannot be handled; leave it out")
        if known[name] not in found:
            found.append(known[name])
    return tuple(found)
