"""The part of the process machine that talks with ranks: what they declare and commit, what they are asked to do.

A request is answered once: done when every rank that was asked has taken it up (or, asked to leave, has left); not done when
a rank could not do it, the script does not poll for requests or its attempt ended first.
"""

from msgspec.structs import replace

from rsup.launcher.process_events import AskRanks, PushLimits, RankMessage
from rsup.launcher.process_state import Phase, Request
from rsup.launcher.process_turn import Turn
from rsup.supervisor import wire

NUMBERS_WINDOW_S = 60.0
MAX_NUMBERS = 150
"""Messages of one rank and kind in a window. Its session sends at most one a second, and what is left at the end."""


def ask_to_save(turn: Turn, command: wire.SaveCheckpoint) -> None:
    """Pass a checkpoint request on, or answer why that is impossible. All ranks must take part: a save is collective."""
    alive = turn.state.alive
    takers = _takers(turn)
    if turn.state.phase is not Phase.RUNNING or not alive:
        _answer(turn, command.request_id, False, "no ranks are running")
    elif len(takers) < len(alive):
        _answer(turn, command.request_id, False, "the script takes no requests: its loop does not ask rsup.worker for them")
    else:
        _ask(turn, takers, command.request_id, False, command.reason)


def ask_to_leave(turn: Turn, command: wire.StopTraining) -> tuple[int, ...]:
    """Ask those ranks that take requests to save and leave; return them. The caller signals the others."""
    takers = _takers(turn)
    if takers:
        _ask(turn, takers, command.request_id, True, command.reason)
    else:
        _answer(turn, command.request_id, True, "the script takes no requests: its ranks got SIGTERM")
    return takers


def hear(turn: Turn, event: RankMessage) -> None:
    """A rank's packet."""
    message, at_us = event.message, turn.now.wall_us
    rank = turn.state.ranks[event.local_rank]
    if isinstance(message, wire.RankHello):
        turn.set_rank(event.local_rank, takes_requests=message.takes_requests)
        if message.takes_requests and not rank.takes_requests:
            _ask_again(turn, event.local_rank)
        if message.device_uuid:
            turn.fact(wire.DeviceUsed(at_us, event.attempt, rank.rank, message.device_uuid))
    elif isinstance(message, wire.RankCheckpoint):
        turn.set_rank(event.local_rank, saved=rank.saved or bool(rank.signalled))
        turn.fact(wire.CheckpointCommitted(at_us, event.attempt, message.iteration, message.path, message.duration_s))
    elif isinstance(message, wire.RankResumed):
        turn.fact(wire.ResumedFrom(at_us, event.attempt, message.iteration, message.path, message.durable))
        if message.limits is not None:
            turn.fact(wire.LimitsLoaded(at_us, event.attempt, message.limits))
    elif isinstance(message, wire.RankCase):
        turn.fact(wire.CaseReported(at_us, event.attempt, rank.rank, message.report))
    elif isinstance(message, (wire.RankMetrics, wire.RankStragglers)):
        if turn.state.takes_metrics and _has_room(turn, event.local_rank, message):
            turn.fact(_numbers(message, event.attempt, rank.rank, at_us))
    elif isinstance(message, wire.RankEntered):
        turn.set_rank(event.local_rank, entered=True)
        entered = (message.entry, message.joined, message.took_s, message.reserves)
        turn.fact(wire.EntryBegun(at_us, event.attempt, rank.rank, *entered))
    elif isinstance(message, wire.RankFault) and message.kind == "hard-timeout":
        turn.set_rank(event.local_rank, doomed=message.text)  # told with its end, which follows
    elif isinstance(message, wire.RankFault):
        turn.fact(_fault(message, event.attempt, rank.rank, at_us))
    elif isinstance(message, wire.RankSave):
        save = (message.iteration, message.stage, message.path, message.stall_s, message.text)
        turn.fact(wire.SaveSeen(at_us, event.attempt, *save))
    elif isinstance(message, wire.RankLeaving):
        turn.set_rank(event.local_rank, saved=rank.saved or (message.durable and bool(rank.signalled)))
        leaving = (message.iteration, message.kind, message.reason, message.durable, message.consumed_samples, message.phase)
        turn.fact(wire.RankLeaves(at_us, event.attempt, *leaving))
    elif isinstance(message, wire.RankDeclares):
        turn.set_rank(event.local_rank, declared=message.exit_code, declared_reason=message.reason)
    elif isinstance(message, wire.RankSetsLimits):
        _set_limits(turn, event.attempt, rank.rank, message.change)
    elif isinstance(message, wire.RankControls):
        turn.fact(wire.WorkloadControl(at_us, event.attempt, rank.rank, message.action, message.description))
    elif isinstance(message, wire.RankRequestDone):
        _taken_up(turn, event.local_rank, message.request_id, "" if message.done else message.message or "the script could not")
    else:
        turn.note(message.level, message.text, rank.rank)


def _has_room(turn: Turn, local_rank: int, message: wire.RankMetrics | wire.RankStragglers) -> bool:
    """Whether that message is passed on: a rank's session sends one a second and kind, another client may not."""
    kind = ""
    if isinstance(message, wire.RankMetrics):
        kind = message.kind
        if kind not in wire.METRIC_KINDS:
            return False
    rank, now_s = turn.state.ranks[local_rank], turn.now.mono_s
    since_s, count = rank.numbers.get(kind, (now_s, 0))
    if now_s - since_s >= NUMBERS_WINDOW_S:
        since_s, count = now_s, 0
    turn.set_rank(local_rank, numbers={**rank.numbers, kind: (since_s, count + 1)})
    if count == MAX_NUMBERS:
        what = f"{kind} metrics" if kind else "reports on stragglers"
        turn.note("warning", f"more than {MAX_NUMBERS} messages with {what} in {NUMBERS_WINDOW_S:.0f} s: left out", rank.rank)
    return count < MAX_NUMBERS


def _numbers(message: wire.RankMetrics | wire.RankStragglers, attempt: int, rank: int, at_us: int) -> wire.AnyFact:
    if isinstance(message, wire.RankMetrics):
        return wire.MetricsReported(at_us, attempt, rank, message.kind, message.series, message.entry)
    return wire.StragglersReported(at_us, attempt, rank, message.report)


def _fault(message: wire.RankFault, attempt: int, rank: int, at_us: int) -> wire.RankFaulted:
    return wire.RankFaulted(
        at_us=at_us,
        attempt=attempt,
        rank=rank,
        entry=message.entry,
        kind=message.kind,
        text=message.text,
        traceback=message.traceback,
        signature=message.signature,
        iteration=message.iteration,
        victim=message.victim,
    )


def _set_limits(turn: Turn, attempt: int, rank: int, change: wire.LimitsChange) -> None:
    """They hold here at once: the step that they are for may have begun. All ranks set the same, the first one is told."""
    limits = change.apply(turn.state.limits)
    if limits is not turn.state.limits:
        turn.set(limits=limits)
        turn.fact(wire.LimitsSet(turn.now.wall_us, attempt, rank, change))
        turn.do(PushLimits(limits, f"rank {rank} has set limits", turn.state.switches))


def rank_left(turn: Turn, local_rank: int) -> None:
    """A rank ended: it counts as having taken up a request to leave, and never will take up another."""
    for request in turn.state.requests:
        if local_rank in request.waiting and request.leave:
            _taken_up(turn, local_rank, request.request_id)


def rank_retired(turn: Turn, local_rank: int) -> None:
    """A rank ended and gets no new process: nothing more is asked of it."""
    for request in turn.state.requests:
        if local_rank in request.waiting:
            _taken_up(turn, local_rank, request.request_id)


def _ask_again(turn: Turn, local_rank: int) -> None:
    """What was asked of the process before, which died of something else."""
    for request in turn.state.requests:
        if local_rank in request.waiting:
            turn.do(AskRanks((local_rank,), request.request_id, request.leave, "asked before the rank had this process"))


def attempt_over(turn: Turn) -> None:
    """Answer what is still open: the attempt has ended."""
    for request in turn.state.requests:
        _answer(turn, request.request_id, False, "the attempt ended before all ranks had taken it up")
    turn.set(requests=())


def _takers(turn: Turn) -> tuple[int, ...]:
    return tuple(i for i in turn.state.alive if turn.state.ranks[i].takes_requests)


def _ask(turn: Turn, local_ranks: tuple[int, ...], request_id: str, leave: bool, reason: str) -> None:
    turn.set(requests=(*turn.state.requests, Request(request_id, leave, frozenset(local_ranks))))
    turn.do(AskRanks(local_ranks, request_id, leave, reason))


def _taken_up(turn: Turn, local_rank: int, request_id: str, failure: str = "") -> None:
    still_open = []
    for request in turn.state.requests:
        if request.request_id == request_id:
            failure = request.failure or failure
            request = replace(request, waiting=request.waiting - {local_rank}, failure=failure)
            if not request.waiting:
                _answer(turn, request_id, not failure, failure)
                continue
        still_open.append(request)
    turn.set(requests=tuple(still_open))


def _answer(turn: Turn, request_id: str, done: bool, message: str) -> None:
    turn.fact(wire.RequestDone(turn.now.wall_us, request_id, done, message))
