"""Slow ranks of a job: what becomes of the ranks' own reports. Pure; `job_machine.FACTS` names it.

A rank that is among the stragglers of `OPEN_AFTER` reports in a row begins an episode, which is told and kept; it is over once
as many reports in a row are without it, or with its attempt. One slow interval is nobody's fault: a page is read from disk, a
neighbour uses the network. Whether an episode speaks against the rank's device says `straggler_evidence`.
"""

from msgspec.structs import replace

from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.case_evidence import episode_of, held_devices
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.fault_evidence import is_injected
from rsup.supervisor.records import StragglerSaved
from rsup.supervisor.straggler_evidence import TRUSTED_AFTER, Verdict, found_fine, judge
from rsup.supervisor.straggler_states import Stragglers, Streak
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import MAX_STRAGGLER_RANKS, STRAGGLER_CAUSES, Straggler, StragglersReported

OPEN_AFTER = 3
"""Reports in a row that make an episode, and that end one."""
KEPT_EPISODES = 64
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
    known = replace(known, num_reports=known.num_reports + 1)
    slow: dict[int, Straggler] = {}
    for one in report.stragglers[:MAX_STRAGGLER_RANKS]:
        if 0 <= one.rank < state.world_size and 1 <= one.slowdown <= MOST and 0 <= one.individual <= MOST:
            slow.setdefault(one.rank, _own_words(turn, one))
    streaks = _counted(known.streaks, slow, fact.at_us, report.first)
    turn.change(stragglers=replace(known, streaks=[one for one in streaks if one.num_fine < OPEN_AFTER]))
    _go_on(turn, slow, {one.rank: one for one in streaks}, report.iteration, fact.at_us)
    for streak in streaks:
        if streak.num_slow >= OPEN_AFTER and streak.rank in slow and not _episode_of(turn, streak.rank):
            _begin(turn, slow[streak.rank], streak, report.iteration, fact.at_us)
    if turn.state.stragglers.num_reports == TRUSTED_AFTER:
        _clear_moved_devices(turn)


def _own_words(turn: Turn, one: Straggler) -> Straggler:
    """What a rank says of another with the device that the supervisor knows of, if it knows one, and nothing out of bounds."""
    for agent in turn.state.agents.values():
        if device := agent.devices_used.get(one.rank) if agent.group_rank >= 0 else "":
            one = replace(one, device=device, node=agent.info.node)
    cause = one.cause if one.cause in STRAGGLER_CAUSES else ""
    return replace(one, cause=cause, text=one.text[:MAX_TEXT_CHARS], section=one.section[:64])


def _next_attempt(known: Stragglers, attempt: int) -> Stragglers:
    past = [*known.past, *known.open][-KEPT_EPISODES:]
    return replace(known, attempt=attempt, num_reports=0, streaks=[], open=[], past=past)


def _counted(streaks: list[Streak], slow: dict[int, Straggler], at_us: int, first: int) -> list[Streak]:
    """The streaks after a report. A rank on another device begins anew."""
    counted = []
    for one in streaks:
        now = slow.get(one.rank)
        if now is None:
            counted.append(replace(one, num_slow=0, num_fine=one.num_fine + 1))
        elif now.device == one.device:
            is_new = one.num_slow == 0 and one.num_fine > 0
            since_us, since = (at_us, first) if is_new else (one.since_us, one.first)
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
    turn.change(stragglers=replace(known, open=still, past=[*known.past, *over][-KEPT_EPISODES:]))


def _grown(episode: StragglerSaved, now: Straggler, iteration: int, at_us: int) -> StragglerSaved:
    is_worse = now.slowdown > episode.slowdown
    return replace(
        episode,
        seen_us=at_us,
        iteration=max(iteration, episode.iteration),
        num_reports=episode.num_reports + 1,
        slowdown=max(now.slowdown, episode.slowdown),
        individual=min(now.individual, episode.individual),
        section=now.section if is_worse else episode.section,
        cause=now.cause or episode.cause,
        text=now.text or episode.text,
    )


def _length(episode: StragglerSaved) -> str:
    worst = f"at worst {episode.slowdown:.1f}x the fastest's time in {episode.section or 'an iteration'}"
    return f"iterations {episode.first} to {episode.iteration}, {worst}"


def _begin(turn: Turn, now: Straggler, streak: Streak, iteration: int, at_us: int) -> None:
    state = turn.state
    number = state.stragglers.num_episodes + 1
    where = f" ({now.device}, {now.node})" if now.device else ""
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
    )
    episode = _judged(turn, episode)
    turn.change(stragglers=replace(state.stragglers, num_episodes=number, open=[*state.stragglers.open, episode]))
    turn.record(episode)
    data: dict[str, object] = {"episode": number, "device": now.device, "cause": now.cause, "verdict": episode.verdict}
    text = f"straggler: {said} (since iteration {episode.first})"
    turn.log("StragglerSeen", text, "warning", at_us=at_us, rank=now.rank, node=now.node, data=data)


def _judged(turn: Turn, episode: StragglerSaved) -> StragglerSaved:
    """The episode with what it means for its device; which is evidence about that, where it is enough."""
    known = turn.state.stragglers
    before = [one for one in (*known.past, *known.open) if one.episode != episode.episode]
    verdict = judge(episode, before, known.cleared)
    if verdict.accuses:
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
