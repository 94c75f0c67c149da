"""Slow ranks of a job: what becomes of the ranks' own reports. Pure; `job_machine.FACTS` names it.

A rank that is among the stragglers of `OPEN_AFTER` reports in a row begins an episode, which is told and kept; it is over once
as many reports in a row are without it, or with its attempt. One slow interval is nobody's fault: a page is read from disk, a
neighbour uses the network. A report counts once, whoever tells it again; one that goes back (an in-process restart) begins all
rows anew, for these iterations have been judged. Whether an episode speaks against the rank's device says `straggler_evidence`.
"""

from msgspec.structs import replace

from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.case_evidence import episode_of, held_devices
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.fault_evidence import is_injected
from rsup.supervisor.other_devices import ranks_of
from rsup.supervisor.records import StragglerSaved
from rsup.supervisor.straggler_evidence import TRUSTED_AFTER, Verdict, found_fine, judge, pace
from rsup.supervisor.straggler_states import OPEN_AFTER, Stragglers, Streak
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import DEVICE_CAUSES, MAX_STRAGGLER_RANKS, STRAGGLER_CAUSES, Straggler, StragglersReported

KEPT_EPISODES = 64
MAX_EPISODES_A_RANK = 32
MAX_EPISODES = 1000
"""Of a job. What a rank or a job has beyond is counted, and neither told nor kept."""
MAX_TEXT_CHARS = 500
MOST = 1e9
"""Of what is a ratio: anything beyond, NaN and infinities are no measurement."""


def stragglers_reported(turn: Turn, agent_id: str, fact: StragglersReported) -> None:
    """A report of the ranks: episodes begin, go on and end."""
    state = turn.state
    report = fact.report
    if not 0 <= report.first <= report.iteration:
        return
    known = state.stragglers
    if known.attempt != state.attempt:
        known = _next_attempt(known, state.attempt)
    if known.num_reports and report.first <= known.iteration:
        if (report.first, report.iteration) == (known.first, known.iteration):
            return
        known = replace(known, streaks=[replace(one, num_slow=0, num_fine=0) for one in known.streaks])
    known = replace(known, num_reports=known.num_reports + 1, first=report.first, iteration=report.iteration)
    slow: dict[int, Straggler] = {}
    for one in report.stragglers[:MAX_STRAGGLER_RANKS]:
        is_measured = 1 <= one.slowdown <= MOST and 0 <= one.individual <= MOST and 0 <= one.usual <= MOST
        if 0 <= one.rank < state.world_size and is_measured:
            slow.setdefault(one.rank, _own_words(turn, one))
    streaks = _counted(known.streaks, slow, fact.at_us, report.first)
    turn.change(stragglers=replace(known, streaks=[one for one in streaks if one.num_fine < OPEN_AFTER]))
    _go_on(turn, slow, {one.rank: one for one in streaks}, report.iteration, fact.at_us)
    for streak in streaks:
        if streak.num_slow < OPEN_AFTER or streak.rank not in slow or _episode_of(turn, streak.rank):
            continue
        if not _has_room(turn.state.stragglers, streak.rank):
            _count_only(turn, streak)
        else:
            _begin(turn, slow[streak.rank], streak, report.iteration, fact.at_us)
    if turn.state.stragglers.num_reports == TRUSTED_AFTER:
        _clear_moved_devices(turn)


def _own_words(turn: Turn, one: Straggler) -> Straggler:
    """What a rank says of another with the device and the node that the supervisor knows of, and nothing out of bounds."""
    device = node = ""
    for agent in turn.state.agents.values():
        if agent.group_rank >= 0 and one.rank in ranks_of(agent):
            device, node = agent.devices_used.get(one.rank, ""), agent.info.node
    one = replace(one, device=device, node=node)
    cause = one.cause if one.cause in STRAGGLER_CAUSES else ""
    return replace(one, cause=cause, usual=min(one.usual, 1.0), text=one.text[:MAX_TEXT_CHARS], section=one.section[:64])


def _next_attempt(known: Stragglers, attempt: int) -> Stragglers:
    past = [*known.past, *known.open][-KEPT_EPISODES:]
    return replace(known, attempt=attempt, num_reports=0, first=0, iteration=0, streaks=[], open=[], past=past, accused=[])


def _has_room(known: Stragglers, rank: int) -> bool:
    return known.num_episodes < MAX_EPISODES and known.num_by_rank.get(rank, 0) < MAX_EPISODES_A_RANK


def _count_only(turn: Turn, streak: Streak) -> None:
    known = turn.state.stragglers
    if streak.num_slow == OPEN_AFTER:
        turn.change(stragglers=replace(known, num_untold=known.num_untold + 1))


def _counted(streaks: list[Streak], slow: dict[int, Straggler], at_us: int, first: int) -> list[Streak]:
    """The streaks after a report. A rank on another device begins anew."""
    counted = []
    for one in streaks:
        now = slow.get(one.rank)
        if now is None:
            counted.append(replace(one, num_slow=0, num_fine=one.num_fine + 1))
        elif now.device == one.device:
            since_us, since = (at_us, first) if one.num_slow == 0 else (one.since_us, one.first)
            counted.append(replace(one, num_slow=one.num_slow + 1, num_fine=0, since_us=since_us, first=since))
    known = {one.rank for one in counted}
    counted += [Streak(rank, one.device, 1, 0, at_us, first) for rank, one in slow.items() if rank not in known]
    return counted


def _episode_of(turn: Turn, rank: int) -> StragglerSaved | None:
    return next((one for one in turn.state.stragglers.open if one.rank == rank), None)


def _go_on(turn: Turn, slow: dict[int, Straggler], streaks: dict[int, Streak], iteration: int, at_us: int) -> None:
    """Episodes that were under way: worse, the same, or over."""
    known = turn.state.stragglers
    still, over = [], []
    for episode in known.open:
        now, streak = slow.get(episode.rank), streaks.get(episode.rank)
        if now is not None and now.device == episode.device:
            before, episode = episode.cause, _grown(episode, now, iteration, at_us)
            if episode.cause != before:  # the sensors have said something since
                episode = _judged(turn, episode)
            still.append(episode)
        elif now is None and streak is not None and streak.num_fine < OPEN_AFTER:
            still.append(episode)
            continue
        else:
            episode = replace(episode, to_us=at_us)
            over.append(episode)
            turn.log("StragglerGone", f"rank {episode.rank} keeps up again ({_length(episode)})", rank=episode.rank)
        turn.record(episode)
    known = turn.state.stragglers
    open_now = {one.episode for one in still}
    accused = [number for number in known.accused if number in open_now]
    turn.change(stragglers=replace(known, open=still, past=[*known.past, *over][-KEPT_EPISODES:], accused=accused))


def _grown(episode: StragglerSaved, now: Straggler, iteration: int, at_us: int) -> StragglerSaved:
    is_worse = now.slowdown > episode.slowdown
    lowest: StragglerSaved | Straggler = now if pace(now) < pace(episode) else episode
    return replace(
        episode,
        seen_us=at_us,
        iteration=max(iteration, episode.iteration),
        num_reports=episode.num_reports + 1,
        slowdown=max(now.slowdown, episode.slowdown),
        individual=lowest.individual,
        usual=lowest.usual,
        section=now.section if is_worse else episode.section,
        cause=episode.cause if episode.cause in DEVICE_CAUSES else now.cause or episode.cause,
        text=now.text or episode.text,
    )


def _length(episode: StragglerSaved) -> str:
    worst = f"at worst {episode.slowdown:.1f}x the fastest's time in {episode.section or 'an iteration'}"
    return f"iterations {episode.first} to {episode.iteration}, {worst}"


def _begin(turn: Turn, now: Straggler, streak: Streak, iteration: int, at_us: int) -> None:
    state = turn.state
    number = state.stragglers.num_episodes + 1
    device = "CPU" if now.device.startswith("CPU-") else now.device
    where = f" ({device}, {now.node})" if device else ""
    said = now.text or f"rank {now.rank}{where} takes {now.slowdown:.1f}x the fastest rank's time in {now.section}"
    episode = StragglerSaved(
        job=state.key,
        episode=number,
        attempt=state.attempt,
        rank=now.rank,
        device=now.device,
        node=now.node,
        section=now.section,
        from_us=streak.since_us,
        seen_us=at_us,
        first=min(streak.first, iteration),
        iteration=iteration,
        num_reports=OPEN_AFTER,
        slowdown=now.slowdown,
        individual=now.individual,
        cause=now.cause,
        text=said,
        usual=now.usual,
    )
    episode = _judged(turn, episode)
    known = turn.state.stragglers
    by_rank = {**known.num_by_rank, now.rank: known.num_by_rank.get(now.rank, 0) + 1}
    known = replace(known, num_episodes=number, num_by_rank=by_rank, open=[*known.open, episode])
    turn.change(stragglers=known)
    turn.record(episode)
    data: dict[str, object] = {"episode": number, "device": now.device, "cause": now.cause, "verdict": episode.verdict}
    last = "" if _has_room(known, now.rank) else "; further episodes of this rank are only counted"
    text = f"straggler: {said} (since iteration {episode.first}){last}"
    turn.log("StragglerSeen", text, "warning", at_us=at_us, rank=now.rank, node=now.node, data=data)


def _judged(turn: Turn, episode: StragglerSaved) -> StragglerSaved:
    """The episode with what it means for its device; which is evidence about that, where it is enough, once."""
    known = turn.state.stragglers
    before = [one for one in (*known.past, *known.open) if one.episode != episode.episode]
    verdict = judge(episode, before, known.cleared)
    if verdict.accuses and episode.episode not in known.accused:
        turn.change(stragglers=replace(known, accused=[*known.accused, episode.episode]))
        _accuse(turn, episode, verdict)
    return replace(episode, verdict=verdict.text)


def _accuse(turn: Turn, episode: StragglerSaved, verdict: Verdict) -> None:
    state = turn.state
    turn.act(
        FoundEvidence(
            Evidence(
                kind="device",
                subject=episode.device,
                source="straggler",
                code=episode.cause or "unexplained",
                episode=episode_of(state.key),
                at_us=turn.now.us,
                text=f"{_own_text(episode)}; {verdict.text}",
                node=episode.node,
                job=state.key,
                attempt=state.attempt,
                rank=episode.rank,
                iteration=episode.iteration,
                injected=is_injected(state),
                is_held=episode.device in held_devices(state),
            )
        )
    )


def _own_text(episode: StragglerSaved) -> str:
    """Everybody may read it: no words of the job's own."""
    return f"rank {episode.rank} on {episode.node} took {episode.slowdown:.1f}x the time of the fastest rank"


def _clear_moved_devices(turn: Turn) -> None:
    """This attempt has run long enough to know: a device that is as fast as others under another rank was not to blame."""
    known = turn.state.stragglers
    users = {
        device: rank
        for agent in turn.state.agents.values()
        if agent.group_rank >= 0
        for rank, device in agent.devices_used.items()
    }
    fine = found_fine(known.past, known.open, users)
    if fine:
        turn.change(stragglers=replace(known, cleared={**known.cleared, **dict.fromkeys(fine, known.num_episodes)}))
