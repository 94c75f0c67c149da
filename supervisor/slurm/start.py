"""Puts the drain keeper together from the daemon's settings."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rsup.supervisor.config import Settings
from rsup.supervisor.database import Target, reader_engine
from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.places import PlaceError
from rsup.supervisor.records import Record
from rsup.supervisor.slurm.drain_keeper import DrainKeeper, KeeperSettings
from rsup.supervisor.slurm.drain_plan import PlanSettings
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.signing import load_key
from rsup.supervisor.slurm.snapshot import Publisher

EVERY_S = 10.0

_log = logging.getLogger(__name__)


def start_keeper(
    settings: Settings,
    target: Target,
    guard: Guard,
    keep: "Callable[[Sequence[Record]], Future[bool]]",
    doubt: Callable[[], str],
) -> DrainKeeper | None:
    """A keeper at work; None where its key cannot be used, which costs gates their snapshot, but no job anything.
    Raise `UsageError` for settings that cannot be used."""
    scontrol = Scontrol(settings.scontrol)
    try:
        key = load_key(settings.state_path, settings.signing_key_file)
    except PlaceError as error:
        _log.error("%s; gates get no snapshot, and no node is drained", error)
        return None
    plan = PlanSettings(settings.drains, settings.quarantine_by, settings.bad_gpu, settings.avoid_suspects)
    every_s = EVERY_S if settings.drain_interval is None else settings.drain_interval
    own = KeeperSettings(settings.cluster or os.environ.get("SLURM_CLUSTER_NAME", ""), plan, every_s)
    publisher = Publisher(key, settings.state_path)
    keeper = DrainKeeper(reader_engine(target), scontrol, publisher, keep, guard, own, doubt)
    keeper.start()
    return keeper
