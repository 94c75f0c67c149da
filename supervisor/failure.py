"""What went wrong, from what the agents saw: the first mover of a crash, the culprit of a hang. Pure.

Crash: ranks that our side had signalled are never the first; a rank that died of a signal or an exception comes before those
that only report a lost peer; among equals the one that became known first (an agent's facts come in its order; clocks of hosts
are not compared).
Hang: ranks blocked in one collective all expire. A stopped process is the culprit before a running one, one whose beat thread
is silent too (it holds the GIL) before one that beats, a lower iteration before a higher, a training thread that does not wait
for its peers before one that does, an older beat of that thread before a newer.
"""

import re
import signal as signals
from collections.abc import Iterable

from msgspec import Struct

from rsup.supervisor.states import RankExit
from rsup.supervisor.wire import (
    DECLARED_EXIT_CODES,
    HARD_LIMIT,
    NOT_OURS,
    WAITED_IN_VAIN,
    RankOverdue,
    RankStack,
    clip,
)

MAX_STACKS_CHARS = 256 * 1024

_OF_A_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset)|broken pipe|connection refused|socket ?(timeout|closed)|"
    r"remote process exit|peer (is )?(gone|closed|failed)|recvvalue failed|failed to recv|sendbytes failed|store is closed|"
    r"process ?group .*(abort|time)|timed out waiting for.*(rank|peer)|ncclremoteerror|gloo.*(read|write|timeout)",
    re.IGNORECASE,
)
_OF_A_WATCHDOG = re.compile(
    r"watchdog.*(collective|timeout|time out)|collective operation timeout|heartbeat monitor", re.IGNORECASE
)
_WAITED = re.compile(r"timed[ -]?out|time-?out|watchdog|heartbeat monitor", re.IGNORECASE)
_TORCH_WAITS = re.compile(r"torch/(distributed|nn/parallel|autograd|cuda)/|distributed_c10d", re.IGNORECASE)
_WAITS_BY_NAME = re.compile(
    r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|synchronize)|nccl|gloo", re.IGNORECASE
)
_THREAD = re.compile(r"^(Current thread|Thread) .*$", re.MULTILINE)
INNERMOST_FRAMES = 6
NOBODY_KNOWN = "the first mover is not known, only victims were heard of"
"""Stands in front of what one of them tells: error lines of theirs are long, and lists cut texts."""
OF_A_PEER = 1
"""`weight` of what only follows from another rank's fault."""
_NAMED_LIMITS = ("out-of-section", "heartbeat", "initial-heartbeat", "startup", "warmup")


class Hung(Struct, frozen=True):
    """A rank during a hang."""

    agent_id: str
    rank: int
    node: str
    iteration: int
    main_beat_age_s: float
    process_state: str = ""
    stack: str = ""
    overdue: RankOverdue | None = None
    is_silent: bool = False
    """Its beat thread does not run either."""


def is_of_a_peer(error: str) -> bool:
    """Whether an error line only says that another rank is gone."""
    return bool(_OF_A_PEER.search(error))


def exit_kind(exit_: RankExit) -> str:
    """What kind of failure the end of a rank is, as in `IncidentSaved`."""
    if is_of_a_watchdog(exit_.error) or HARD_LIMIT in exit_.killer:
        return "hang"
    return "signal" if exit_.signal else "exit"


def is_of_a_watchdog(error: str) -> bool:
    """Whether an error line is that of a collective's watchdog: the abort of a hang, not a crash."""
    return bool(_OF_A_WATCHDOG.search(error))


def waited_in_vain(error: str) -> bool:
    """Whether an error line tells of a timeout: the one at fault may be alive, and its stack the only evidence."""
    return bool(_WAITED.search(error))


def first_mover(exits: Iterable[tuple[int, RankExit]]) -> tuple[int, RankExit] | None:
    """Rank and exit of the one that failed first, None if every failing rank had been signalled by us."""
    failing = [(rank, exit_) for rank, exit_ in exits if exit_.exit_code and not exit_.by_us]
    return min(failing, key=lambda item: (weight(item[1]), item[1].order), default=None)


def weight(exit_: RankExit) -> int:
    """0: an end of its own; 1: it tells of a lost peer; 2: of a watchdog, or it waited for others. The lightest came first.
    A line about a peer is no reason for a SIGKILL, which somebody sends."""
    if is_of_a_watchdog(exit_.error) or WAITED_IN_VAIN in exit_.killer:
        return 2
    return OF_A_PEER if is_of_a_peer(exit_.error) and exit_.signal != signals.SIGKILL else 0


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; empty for 0."""
    if not number:
        return ""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(rank: int, node: str, exit_: RankExit) -> str:
    """The sentence about a rank's end."""
    how = f"was killed by {signal_name(exit_.signal)}" if exit_.signal else f"exited with code {exit_.exit_code}"
    where = f" at iteration {exit_.iteration}" if exit_.iteration else ""
    section = f" in section {exit_.section}" if exit_.section else ""
    told = exit_.error or _own_reason(exit_)
    error = f": {told}" if told else ""
    error = f", {exit_.killer}{error}" if exit_.killer and exit_.killer != NOT_OURS else error
    if exit_.exit_code in DECLARED_EXIT_CODES and exit_.declared != exit_.exit_code and not exit_.by_us:
        how += " (counts as 1: the rank did not declare that code, see rsup.worker.declare_exit)"
    return f"rank {rank} on {node} {how}{where}{section}{error}"


def _own_reason(exit_: RankExit) -> str:
    """What a rank declared as the reason of its end. Those of codes with a meaning of ours stand in the verdict."""
    is_it = exit_.declared and exit_.declared not in DECLARED_EXIT_CODES and exit_.exit_code in (exit_.declared, 1)
    return exit_.declared_reason if is_it else ""


def reason_of_another(first: RankExit, exits: Iterable[tuple[int, RankExit]]) -> str:
    """Where the first to fail says nothing: what the next one says that ended with the same code. Empty if none does."""
    if first.signal or first.error or _own_reason(first):
        return ""
    same = sorted(
        (e.order, rank, e.error or _own_reason(e)) for rank, e in exits if e.exit_code == first.exit_code and not e.by_us
    )
    return next((f" (rank {rank}: {told})" for _, rank, told in same if told), "")


def culprit(ranks: Iterable[Hung]) -> Hung | None:
    """The rank that most likely holds the others up."""

    def key(hung: Hung) -> tuple[bool, bool, int, bool, bool, float, int]:
        return (
            hung.process_state != "T",
            not hung.is_silent,
            hung.iteration,
            waits_for_peers(hung.stack),
            hung.overdue is None,
            -hung.main_beat_age_s,
            hung.rank,
        )

    return min(ranks, key=key, default=None)


def waits_for_peers(stack: str) -> bool:
    """Whether the training thread of these stacks (py-spy's or faulthandler's) waits where ranks wait for each other: inside
    torch's communication, or in a backward pass, whose reductions show no frame of their own. Not if it holds the GIL."""
    header, frames = _training_thread(stack)
    in_torch = _TORCH_WAITS.search("\n".join(frames[:INNERMOST_FRAMES]))
    return "+gil" not in header and bool(in_torch or _WAITS_BY_NAME.search("".join(frames[:1])))


def innermost_frame(stack: str) -> str:
    """Where the training thread of these stacks stood; empty if they do not tell."""
    header, frames = _training_thread(stack)
    return frames[0].strip() if header and frames else ""


def _training_thread(stack: str) -> tuple[str, list[str]]:
    """Header and frames, innermost first, of the main thread; of the whole text where no thread is named."""
    headers = list(_THREAD.finditer(stack))
    if not headers:
        return "", stack.splitlines()
    ends = [header.start() for header in headers[1:]] + [len(stack)]
    blocks = [
        (header.group(), stack[header.end() : end].strip().splitlines()) for header, end in zip(headers, ends, strict=True)
    ]
    named = [block for block in blocks if "MainThread" in block[0] or block[0].startswith("Current")]
    return (named or blocks)[-1]


def limit_name(limit: str) -> str:
    """How a limit is called in a sentence: a section's name, or one of the named limits."""
    return f"the {limit} limit" if limit in _NAMED_LIMITS else f"the limit of section {limit}"


def overdue_text(overdue: RankOverdue) -> str:
    """What had lasted for how long when the limit was found expired, which is a little later than it says."""
    if overdue.limit in _NAMED_LIMITS:
        return f"{limit_name(overdue.limit)} has expired: {overdue.age_s:.2f} s, limit {overdue.limit_s:g} s"
    return f"section {overdue.limit} is open for {overdue.age_s:.2f} s, limit {overdue.limit_s:g} s"


def hang_text(hung: Hung, overdue: RankOverdue) -> str:
    """The sentence about a hang."""
    stopped = "; its process is stopped (state T)" if hung.process_state == "T" else ""
    where = f" at iteration {hung.iteration}" if hung.iteration else ""
    return f"rank {hung.rank} on {hung.node} hangs{where}: {overdue_text(overdue)}{stopped}"


def group_stacks(stacks: Iterable[RankStack]) -> list[dict[str, object]]:
    """Equal stacks once, with the ranks that showed them; the whole is cut where it gets too long."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for stack in stacks:
        groups.setdefault((stack.source, stack.text, stack.process_state), []).append(stack.rank)
    left_chars = MAX_STACKS_CHARS
    result: list[dict[str, object]] = []
    for (source, text, state), ranks in sorted(groups.items(), key=lambda item: len(item[1])):
        kept = clip(text, max(left_chars, 200))
        left_chars -= len(kept)
        result.append({"ranks": sorted(ranks), "source": source, "text": kept, "process_state": state})
    return result
