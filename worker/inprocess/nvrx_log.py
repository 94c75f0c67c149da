"""NVRx's own log: every rank writes several lines about each fault, which the rank and `rsup events` tell in one."""

import logging
import os
import warnings


def quiet_nvrx() -> None:
    """Let NVRx write nothing unless the user has set a level for it, or `NVRX_LOG_DEBUG`."""
    if os.environ.get("NVRX_LOG_DEBUG"):
        return
    warnings.filterwarnings("ignore", "logging not initialized")
    old = logging.getLogger("nvidia_resiliency_ext")
    if old.level == logging.NOTSET:
        old.setLevel(logging.CRITICAL + 1)
    new = logging.getLogger("nvrx")  # from 0.5 on; the wrapper sets its level and handlers, but leaves filters
    if new.level == logging.NOTSET and _drop not in new.filters:
        new.addFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
