"""How many nodes, which one this is, and where they meet: torchrun's `--nnodes`, `--rdzv-*`, `--node-rank`, `--master-*`."""

import re
from collections.abc import Mapping

from rsup.launcher.option_table import BadNodeRange, BadValue, did_you_mean
from rsup.launcher.option_values import OptionValues
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.supervisor import places
from rsup.supervisor.wire import UsageError

_MAX_NODES = 65536

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")

JOIN_KEY, LAST_CALL_KEY = "join_timeout", "last_call_timeout"
RDZV_CONF_NUMBERS = (
    *(JOIN_KEY, LAST_CALL_KEY, "timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval"),
    *("keep_alive_max_attempt", "read_timeout", "rank", "store_connect_wait_seconds", "segment", "replacement_group_size"),
)
RDZV_CONF_WORDS = (
    *("is_host", "store_type", "use_libuv", "upscaling_enabled"),
    *("etcd_prefix", "protocol", "cert", "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert"),
)

STATIC_PORT, RENDEZVOUS_PORT = 29500, 29400
"""torchrun's ports: of `--master-port` across nodes, and of an `--rdzv-endpoint` that names none."""


def read_nnodes(values: OptionValues) -> tuple[int, int]:
    """Smallest and largest number of nodes."""
    parts = values.text("nnodes").split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"\s*\d+\s*", part) for part in parts):
        kind = BadNodeRange if len(parts) > 2 else BadValue
        values.fail("nnodes", "must be a number of nodes or MIN:MAX, like 2 or 2:4", kind)
    smallest, largest = int(parts[0]), int(parts[-1])
    if smallest < 1:
        values.fail("nnodes", "must be at least 1")
    if smallest > largest:
        values.fail("nnodes", f"the smallest number comes first; write {largest}:{smallest}")
    if largest > _MAX_NODES:
        values.fail("nnodes", f"must be at most {_MAX_NODES}")
    return smallest, largest


def nodes_of_step(values: OptionValues, place: SlurmPlace) -> tuple[int, int]:
    """As `read_nnodes`; where nobody has said it, all nodes of the SLURM step."""
    if not values.given("nnodes") and not values.switch("standalone"):
        if not place.in_step and place.num_job_nodes > 1:
            values.notes.append(
                f"job {place.job} has {place.num_job_nodes} nodes, and this launch is on one: write srun rsup launch for all of"
                " them"
            )
        return place.num_nodes, place.num_nodes
    return read_nnodes(values)


def read_rdzv_id(values: OptionValues, max_nodes: int, place: SlurmPlace | None) -> str:
    """What the agents of a job have in common; the SLURM step, where nobody has said it."""
    named = values.text("rdzv_id") or "none"
    return place.group if named == "none" and place is not None and place.in_step and max_nodes > 1 else named


def read_rdzv_backend(values: OptionValues) -> str:
    """The backend's name; one that an installed package registers for torchrun gets a note."""
    name = values.text("rdzv_backend")
    if name in _BACKENDS:
        return name
    from importlib import metadata

    if name not in metadata.entry_points(group="torchrun.handlers").names:
        values.fail("rdzv_backend", f"must be one of {', '.join(_BACKENDS)}{did_you_mean(name, _BACKENDS)}")
    values.notes.append(f"--rdzv-backend {name} has no effect: the supervisor is the rendezvous")
    return name


def read_rdzv_conf(values: OptionValues) -> dict[str, str]:
    """Keys and values of all `--rdzv-conf` together, the last one of a key counting. Quotes left in by a shell are dropped."""
    settings: dict[str, str] = {}
    known = RDZV_CONF_NUMBERS + RDZV_CONF_WORDS
    for pair in values.text("rdzv_conf").split(","):
        if not pair.strip(" '\""):
            continue
        key, equals, value = (part.strip(" '\"") for part in pair.partition("="))
        if not equals or not key or not value:
            values.fail("rdzv_conf", f"{pair.strip()!r} is not of the form KEY=VALUE")
        if key not in known:
            values.fail("rdzv_conf", f"unknown key {key}{did_you_mean(key, known) or '; known are ' + ', '.join(known)}")
        if key in RDZV_CONF_NUMBERS:
            values.number("rdzv_conf", value, at_least=0)
        settings[key] = value
    return settings


def read_meeting_point(values: OptionValues, max_nodes: int) -> tuple[str, int]:
    """`host:port` where the nodes meet (empty for one node, or if nobody named it) and the port of the attempt's store.

    With `--master-addr` and `--master-port` alone, torchrun has one store for both; here the nodes meet at that port, and
    the store takes a free one. Ranks learn it from MASTER_PORT, as ever.
    """
    port = values.integer("master_port", at_most=65535) if values.given("master_port") else 0
    text = values.text("rdzv_endpoint").strip()
    if max_nodes == 1 or values.switch("standalone"):
        if text:
            _split(values, text)
        return "", port
    if text:
        host, meeting_port = _split(values, text)
        if meeting_port == 0:
            values.fail("rdzv_endpoint", "the nodes of a job cannot meet at port 0; choose a fixed one")
        return _join(host, meeting_port), 0 if port == meeting_port else port
    if not values.given("master_addr") and not values.given("master_port"):
        return "", 0
    return _join(values.text("master_addr").strip("[]"), port or STATIC_PORT), 0


def _split(values: OptionValues, text: str) -> tuple[str, int]:
    try:
        return places.split_endpoint(text, default_port=RENDEZVOUS_PORT)
    except UsageError:
        values.fail("rdzv_endpoint", "must be HOST:PORT, or [ADDRESS]:PORT for IPv6")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_node_rank(values: OptionValues, max_nodes: int, environ: Mapping[str, str]) -> int:
    """This node's place if the user or SLURM gave one, else -1.

    SLURM's node number counts in a step with one task a node: then there is one agent on each.
    """
    if values.given("node_rank"):
        rank = values.integer("node_rank")
        if max_nodes == 1 and rank > 0:
            values.fail("node_rank", "the job has one node; give --nnodes the number of nodes")
        return rank
    node = environ.get("SLURM_NODEID", "")
    tasks, nodes = environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_STEP_NUM_NODES")
    return int(node) if max_nodes > 1 and node.isdecimal() and tasks is not None and tasks == nodes else -1
