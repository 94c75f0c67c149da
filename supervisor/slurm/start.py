"""Puts the drain keeper together from the daemon's settings."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from rsup.supervisor.config import Settings
from rsup.supervisor.database import Target, reader_engine
from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.records import Record
from rsup.supervisor.slurm.drain_keeper import DrainKeeper, KeeperSettings
from rsup.supervisor.slurm.drain_terms import PlanSettings
from rsup.supervisor.slurm.lookout import ClusterFile
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.scheduler_text import read_setting
from rsup.supervisor.slurm.signing import load_key
from rsup.supervisor.slurm.snapshot import Publisher

EVERY_S = 10.0
CLUSTER_FILE = "slurm-cluster"
SLURM_CONF = Path("/etc/slurm/slurm.conf")


def start_keeper(
    settings: Settings,
    target: Target,
    guard: Guard,
    keep: "Callable[[Sequence[Record]], Future[bool]]",
    doubt: Callable[[], str],
) -> DrainKeeper:
    """A keeper at work. A key that cannot be used costs gates their snapshot until it can, and nothing else.
    Raise `UsageError` for settings that cannot be used."""
    scontrol = Scontrol(settings.scontrol)
    plan = PlanSettings(settings.drains, settings.quarantine_by, settings.bad_gpu, settings.avoid_suspects)
    every_s = EVERY_S if settings.drain_interval is None else settings.drain_interval
    cluster = settings.cluster or os.environ.get("SLURM_CLUSTER_NAME", "")
    if not cluster and settings.drains == "off":  # SLURM is not asked then, and gates believe no snapshot without a name
        cluster = name_in_conf(Path(os.environ.get("SLURM_CONF") or SLURM_CONF))
    own = KeeperSettings(cluster, plan, every_s, expects_slurm(settings, os.environ))
    state = settings.state_path
    publisher = lambda: Publisher(load_key(state, settings.signing_key_file), state)  # noqa: E731
    remembered = ClusterFile(state / CLUSTER_FILE)
    keeper = DrainKeeper(reader_engine(target), scontrol, publisher, keep, guard, own, doubt, remembered)
    keeper.start()
    return keeper


def name_in_conf(conf: Path) -> str:
    """The cluster's name in a slurm.conf, as SLURM tells it; empty where there is none to read."""
    try:
        return read_setting(conf.read_text(errors="replace"), "ClusterName").lower()
    except OSError:
        return ""


def expects_slurm(settings: Settings, environ: Mapping[str, str], conf: Path = SLURM_CONF) -> bool:
    """Whether a SLURM that does not answer is worth a line: somebody has set it up here, or wants something of it. By default
    drains are proposed wherever SLURM happens to answer."""
    return bool(settings.drains == "act" or settings.scontrol or environ.get("SLURM_CONF")) or conf.exists()
