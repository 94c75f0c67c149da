"""Limits as NVRx's clients are told of them, and as they set them."""

import signal
from collections.abc import Mapping

from rsup.launcher import nvrx_pickle as nvrx
from rsup.launcher.nvrx_pickle import Refused, as_seconds
from rsup.supervisor import wire

MAX_NAME_CHARS = 200
MAX_SECTIONS = 256
BAD_NAME = f"a section's name must be a text of 1 to {MAX_NAME_CHARS} characters"
USUAL_SECTIONS: Mapping[str, float | None] = {"setup": None, "step": None, "checkpointing": None}
"""Without a section limit a client would show nothing (since 0.5) or refuse every section (0.4.1): it is told Megatron-LM's
three, without limits."""


def is_name(name: object) -> bool:
    """Whether a section can be called that."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def sections_told(limits: wire.Limits) -> dict[str, float | None]:
    """Section limits as clients know them. What is calculated without having been asked for is not among them: ranks must agree
    on the names, and those come as they are found."""
    if limits.enforce_calculated:
        return limits.sections
    return {name: limit_s for name, limit_s in limits.sections.items() if name not in limits.calculated}


def config_for(limits: wire.Limits, is_answered: bool) -> dict[str, object]:
    """The fields of NVRx's `FaultToleranceConfig` that its clients read, and those that some version prints."""
    is_found = "out-of-section" in limits.calculated and not limits.enforce_calculated
    return {
        "workload_check_interval": 0.1,
        "initial_rank_heartbeat_timeout": limits.initial_heartbeat_s,
        "rank_heartbeat_timeout": limits.heartbeat_s,
        "rank_section_timeouts": sections_told(limits) or USUAL_SECTIONS,
        "rank_out_of_section_timeout": None if is_found else limits.out_of_section_s,
        "node_health_check_interval": 5.0,
        "safety_factor": limits.safety_factor,
        "rank_termination_signal": signal.SIGKILL,
        "log_level": 20,
        "restart_check_interval": 60.0,
        "enable_nic_monitor": False,
        "pci_topo_file": None,
        "link_down_path_template": None,
        "skip_section_response": not is_answered,
        "install_exception_hook": False,
        "num_warmup_iterations": limits.num_warmup_iters,
    }


def limits_change(message: nvrx.UpdateConfigMsg) -> wire.LimitsChange:
    """What an `UpdateConfigMsg` changes. Raise `Refused` for what are no limits."""
    heartbeats, timeouts = message.get("hb_timeouts"), message.get("section_timeouts")
    sections: dict[str, float | None] | None = None
    out_of_section_s = initial_s = subsequent_s = None
    if isinstance(timeouts, nvrx.SectionTimeouts):
        given = timeouts.get("section")
        if not isinstance(given, dict) or len(given) > MAX_SECTIONS:
            raise Refused("section timeouts must be a mapping of names to seconds")
        if not all(map(is_name, given)):
            raise Refused(BAD_NAME)
        sections = {name: as_seconds(limit) for name, limit in given.items()}
        out_of_section_s = as_seconds(timeouts.get("out_of_section"))
    if isinstance(heartbeats, nvrx.HeartbeatTimeouts):
        initial_s, subsequent_s = as_seconds(heartbeats.get("initial")), as_seconds(heartbeats.get("subsequent"))
    sets_heartbeats = isinstance(heartbeats, nvrx.HeartbeatTimeouts)
    return wire.LimitsChange(sections, out_of_section_s, sets_heartbeats, initial_s, subsequent_s)
