"""Where the agents of a step meet: the address of its first node, and ports that are this step's.

Every node works out the same on its own, and nothing is published anywhere. Names of nodes need not resolve, so in this order:
the resolver, if it answers at once; `scontrol show node`, whose NodeAddr is how SLURM itself reaches the node; the address that
`srun` was typed at, which is the first node's where that was the batch script.
"""

import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from rsup.launcher.slurm import scontrol
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.supervisor.wire import UsageError

FIRST_PORT, LAST_PORT = 10000, 29999
"""Below the range that kernels give out by default."""
PORTS_A_STEP = 2
STEPS_A_JOB = 8
RESOLVE_WITHIN_S = 2.0
RANGE_VARIABLE = "RSUP_PORT_RANGE"


def meeting_ports(place: SlurmPlace, environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Ports at which the first node may answer, the usual one first. Jobs and steps that live at the same time on one node have
    others, as long as their numbers are less than some thousand apart; whose a port is, is checked besides. Raise `UsageError`
    for a range that cannot be used: every node does, so none waits for another."""
    first, last = _range(environ)
    slots = max(1, (last - first + 1) // PORTS_A_STEP)
    slot = (int(place.job) * STEPS_A_JOB + int(place.step or 0) % STEPS_A_JOB) % slots
    return tuple(min(last, first + slot * PORTS_A_STEP + i) for i in range(PORTS_A_STEP))


def _range(environ: Mapping[str, str]) -> tuple[int, int]:
    text = environ.get(RANGE_VARIABLE, "").strip()
    if not text:
        return FIRST_PORT, LAST_PORT
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
        raise UsageError(f"{RANGE_VARIABLE}={text[:64]} is no range of ports; write it as {FIRST_PORT}-{LAST_PORT}")
    lowest = 1 if os.geteuid() == 0 else _first_port_for_all()
    if int(first) < lowest:
        raise UsageError(f"{RANGE_VARIABLE}={text}: ports below {lowest} are root's; write it as {FIRST_PORT}-{LAST_PORT}")
    return int(first), int(last)


def _first_port_for_all() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


def first_address(place: SlurmPlace) -> tuple[str, str]:
    """Address of the step's first node, and a note about a doubt; both may be empty."""
    first = place.nodes[0] if place.nodes else ""
    if address := _resolved(first):
        return address, ""
    why = "the list of nodes is missing"
    if first:
        try:
            found = scontrol.show("node", first).get("NodeAddr", "")
            if found and (found != first or _is_address(found)):
                return found, ""
            why = f"{first} does not resolve, and SLURM knows no other address of it"
        except scontrol.SlurmUnavailable as error:
            why = f"{first} does not resolve, and {error}"
    if place.launch_address:
        return place.launch_address, f"{why}: the nodes meet at {place.launch_address}, where srun was typed"
    return "", why


def _resolved(name: str) -> str:
    """The name's address as all nodes know it; empty where the resolver does not know it or is slow. A loopback address, as
    Debian's hosts file has it for the host's own name, is not how others reach it."""
    if not name:
        return ""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            answers.put("")

    threading.Thread(target=look_up, name="rsup-resolver", daemon=True).start()
    try:
        found = answers.get(timeout=RESOLVE_WITHIN_S)
    except queue.Empty:
        return ""
    return "" if not found or ipaddress.ip_address(found.partition("%")[0]).is_loopback else found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
