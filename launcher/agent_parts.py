"""What an agent is made of, opened in the order that saves time: the embedded supervisor starts first, since it is slowest."""

import os
import secrets
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from urllib.parse import urlsplit

from rsup.launcher.agent_places import AgentPlaces, make_places
from rsup.launcher.board_reader import BoardReader
from rsup.launcher.decider import Decider
from rsup.launcher.descriptor_limit import raise_limit
from rsup.launcher.inventory import Inventory, completed, read_inventory
from rsup.launcher.launch_options import LaunchOptions, job_spec, speaks_for_all, storable
from rsup.launcher.log_options import FileNames
from rsup.launcher.logs import LogOptions, LogPump
from rsup.launcher.process_state import Settings
from rsup.launcher.processes import become_subreaper
from rsup.launcher.rank_link import RankLink
from rsup.launcher.route import choose_route, reachable_host
from rsup.launcher.spool import Spool
from rsup.launcher.stop_signals import SignalInbox
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.supervisor import places, wire
from rsup.supervisor.heartbeat_board import pid_namespace, process_start_ticks

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ALL_ADDRESSES = ("0.0.0.0", "::")


@dataclass(frozen=True)
class AgentParts:
    """Each is closed by the stack that `open_parts` was given."""

    agent: wire.AgentInfo
    settings: Settings
    signals: SignalInbox
    decider: Decider
    places: AgentPlaces
    logs: LogPump
    board: BoardReader
    link: RankLink
    spool: Spool
    client: SupervisorClient
    inventory: Inventory


def open_parts(
    options: LaunchOptions, stack: ExitStack, succeeded: Callable[[], bool], keep_spool: Callable[[], bool]
) -> AgentParts:
    """Open everything. `succeeded` is asked at the end: after success a temporary log directory is removed.
    `keep_spool` too: whether somebody goes on delivering it.

    Main thread only. Raise `RsupError` for a directory, address or key that cannot be used.
    """
    signals = SignalInbox(options.signals_to_handle)
    stack.callback(signals.close)
    become_subreaper()
    raise_limit()
    agent_id = secrets.token_hex(8)
    decider = Decider(options, choose_route(options))
    stack.callback(decider.close)
    agent_places = make_places(agent_id)
    stack.callback(lambda: agent_places.remove(keep_spool=keep_spool()))
    logs = LogPump(_log_options(options), options.nproc_per_node, names=_file_names(options))
    stack.callback(lambda: logs.close(success=succeeded(), is_told=lambda: any(stops for _, stops in signals.read())))
    if logs.temporary_dir:
        agent_places.remember_logs(logs.temporary_dir)
    board = BoardReader(options.nproc_per_node, agent_places.runtime_dir)
    stack.callback(board.close)
    link = RankLink(agent_places.rank_socket)
    stack.callback(link.close)
    spool = Spool(agent_places.spool)
    stack.callback(spool.close)
    inventory = completed(read_inventory(), options.device_inventory)
    agent = _agent_info(agent_id, options, decider, inventory)
    client = decider.connect(agent, job_spec(options, _owner(), decider.route.listen), spool)
    stack.callback(client.close)
    return AgentParts(agent, _settings(options), signals, decider, agent_places, logs, board, link, spool, client, inventory)


def where_to_look(options: LaunchOptions, welcome: wire.Welcome, *, is_embedded: bool) -> str:
    """The line at the start of a job, with the command that shows it here. `is_embedded`: the supervisor is the one of our
    state directory."""
    num_ranks, most, least = options.nproc_per_node, options.max_nodes, options.min_nodes
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    nodes = f" on this node, of {f'{least} to ' if least < most else ''}{most} nodes" if most > 1 else ""
    where = "" if is_embedded else _where(options, welcome.supervisor)
    if not where and options.slurm is not None and options.state_dir != places.state_dir():
        where = f" --state-dir {shlex.quote(str(options.state_dir))}"
    page = " (--page: in a browser)" if welcome.supervisor.rest and not where.startswith(" on ") else ""
    return f"rsup: job {welcome.job_id}: {ranks}{nodes}; see rsup status {welcome.job_id}{where}{page}"


def _where(options: LaunchOptions, supervisor: wire.SupervisorInfo) -> str:
    """What a reading command needs to ask that supervisor: nothing if it is that of our state directory; another directory
    that we can read; its address, if that can be reached from here. Else, where the command has to be typed."""
    theirs = Path(supervisor.store).parent if supervisor.store.startswith("/") else None
    here = supervisor.host == places.this_host()
    if theirs and here and theirs != options.state_dir and os.access(theirs / "token", os.R_OK):
        return f" --state-dir {shlex.quote(str(theirs))}"
    if _serves(options.state_dir, supervisor) or (here and theirs == options.state_dir):
        return ""
    rest = urlsplit(supervisor.rest)
    if not rest.hostname or (rest.hostname in _LOOPBACK and not here):
        return f" on {supervisor.host}"
    address = supervisor.rest if rest.hostname not in _ALL_ADDRESSES else f"http://{supervisor.host}:{rest.port}"
    return f" --supervisor {address}"


def _serves(state_dir: Path, supervisor: wire.SupervisorInfo) -> bool:
    found = places.read_supervisor_file(state_dir)
    return found is not None and found.instance == supervisor.instance


def _agent_info(agent_id: str, options: LaunchOptions, decider: Decider, inventory: Inventory) -> wire.AgentInfo:
    return wire.AgentInfo(
        agent_id=agent_id,
        node=places.this_node(),
        host=reachable_host(options, decider.route),
        pid=os.getpid(),
        boot_id=places.boot_id(),
        node_rank=options.node_rank,
        num_ranks=options.nproc_per_node,
        devices=inventory.with_spares(options.nproc_per_node),
        role=storable(options.role),
        start_ticks=process_start_ticks(os.getpid()),
        versions=_versions(options),
        pid_namespace=pid_namespace(),
        gate_refusal=options.gate_refusal,
    )


def _versions(options: LaunchOptions) -> dict[str, str]:
    """What this node runs and its ranks import, where other nodes could have something else. Reading it takes 40 ms. What ranks
    of another interpreter import is not known here."""
    if options.max_nodes == 1:
        return {}
    from rsup.launcher.versions import installed_versions, rsup_version

    if options.no_python or os.environ.get("PYTHON_EXEC"):
        return {"rsup": rsup_version()}
    return installed_versions()


def _settings(options: LaunchOptions) -> Settings:
    return Settings(
        stop_grace_s=options.shutdown_timeout,
        signal_graces_s={int(signum): grace_s for signum, grace_s in options.signal_graces.items()},
        end_s=options.deadline,
        deadline_margin_s=options.deadline_margin,
        supervisor_grace_s=options.supervisor_grace,
        fence_timeout_s=options.fence_timeout,
        join_timeout_s=options.join_timeout,
        last_call_s=options.last_call,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        meeting=options.supervisor or options.rdzv_endpoint,
        node=places.this_node(),
        speaks_for_all=speaks_for_all(options),
        gate_refusal=options.gate_refusal,
    )


def _log_options(options: LaunchOptions) -> LogOptions:
    return LogOptions(
        log_dir=os.devnull if options.logs_specs else str(options.log_dir) if options.log_dir else None,
        run_id=options.rdzv_id if options.rdzv_id != "none" else options.job_id or "none",
        redirects=_per_rank(options.redirects),
        tee=_per_rank(options.tee),
        local_ranks_filter=options.local_ranks_filter or frozenset(),
        ranks_filter=options.ranks_filter,
        line_prefix_template=options.log_prefix,
        as_json=options.log_format == "json",
        role=options.role,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
    )


def _file_names(options: LaunchOptions) -> FileNames | None:
    if options.logs_specs is None:
        return None
    from rsup.launcher.logs_specs import LogsSpecs  # imports torch

    return LogsSpecs(options)


def _per_rank(streams: tuple[int, ...]) -> dict[int, int] | int:
    return dict(enumerate(streams)) if len(streams) > 1 else next(iter(streams), 0)


def _owner() -> str:
    try:
        return getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())
