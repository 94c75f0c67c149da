"""Whether a job can go on without some nodes, as far as SLURM's answers tell: SLURM holds a job for ever that can run nowhere.

Free memory and GPUs are not looked at: nodes that others use now are free one day. What cannot be told is no obstacle."""

import re
from collections.abc import Mapping, Sequence

from rsup.launcher.slurm import scontrol
from rsup.launcher.slurm.hostnames import node_names
from rsup.launcher.slurm.scontrol import SlurmUnavailable

_UNUSABLE = {"down", "drain", "drained", "draining", "error", "fail", "failing", "future", "inval", "unknown"}
"""Base states of `sinfo` that end by a person's hand only. A node that sleeps, is reserved or under maintenance comes back."""
_MARKS = "*~#!%$@^-+"
_ALTERNATIVES = re.compile(r"[\[\]()|*]")


def obstacle(nodes: Sequence[str], shown: Mapping[str, str]) -> str:
    """Why the job that SLURM shows so cannot go on without these nodes, empty if it can."""
    required = sorted({*listed(shown, "ReqNodeList")} & {*nodes})
    if required:
        return f"its --nodelist names {', '.join(required)}"
    needed = shown.get("NumNodes", "1").partition("-")[0]
    try:
        usable = _usable(shown)
    except SlurmUnavailable:
        return ""
    if usable is None or not needed.isdecimal():
        return ""
    left = usable - {*listed(shown, "ExcNodeList")} - {*nodes}
    if len(left) >= int(needed):
        return ""
    return f"it needs {needed}, and {len(left) or 'none'} of the others can be used"


def listed(shown: Mapping[str, str], key: str) -> list[str]:
    """A list of nodes in what SLURM shows of a job."""
    text = shown.get(key, "")
    return [] if text == "(null)" else node_names(text)


def _usable(shown: Mapping[str, str]) -> set[str] | None:
    """Nodes that the job may run on some day, by partition, state, features and reservation; None where SLURM shows no node."""
    partitions = shown.get("Partition", "")
    where = ["-p", partitions] if partitions not in ("", "(null)") else ["-a"]  # it takes not both
    rows = [line.split("|") for line in scontrol.ask("sinfo", "-h", "-N", *where, "-o", "%N|%T|%b").splitlines()]
    nodes = {row[0].strip(): (row[1], row[2]) for row in rows if len(row) == 3}
    if not nodes:
        return None
    constraint = shown.get("Features", "")
    found = {name for name, (state, features) in nodes.items() if _is_usable(state) and has_features(constraint, features)}
    reservation = shown.get("Reservation", "")
    reserved = listed(scontrol.show("reservation", reservation), "Nodes") if reservation not in ("", "(null)") else []
    return found & {*reserved} if reserved else found


def _is_usable(state: str) -> bool:
    """`*`: it does not respond."""
    state = state.strip()
    return "*" not in state and state.rstrip(_MARKS) not in _UNUSABLE


def has_features(constraint: str, features: str) -> bool:
    """Whether a node with these features may be one of a job with that `--constraint`. Of alternatives and of counts (`a|b`,
    `[a*2&b*1]`) any feature will do."""
    if constraint in ("", "(null)"):
        return True
    here = {*features.strip().split(",")}
    wanted = [word for word in re.split(r"[\[\]()|&,]+", re.sub(r"\*\d+", "", constraint)) if word]
    meets = any if _ALTERNATIVES.search(constraint) else all
    return meets(word in here for word in wanted)
