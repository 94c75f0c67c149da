"""What ranks tell of their saves: begun, complete on a node only, failed, durable. Pure.

A save decides nothing but what `progress.checkpoint_committed` says of a durable one. This module keeps what people ask for:
the newest of each kind, which save is under way and since when, and how long training stood still. Local checkpoints may come
every few seconds: of each stage but a durable one the story gets a line a minute at most, which says how many had none.
"""

import math

from msgspec.structs import replace

from rsup.supervisor.render import duration
from rsup.supervisor.save_states import MAX_STALLS, MAX_UNDER_WAY, SaveNoted, Saves
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import CheckpointCommitted, SaveSeen

LINE_EVERY_US = 60_000_000
MAX_TEXT_CHARS = 500
MAX_PATH_CHARS = 1000
MAX_STALL_S = 1e7
"""More than that no attempt has stood still: the number is broken."""

_KINDS = {"begun": "SaveBegun", "local": "SaveLocal", "failed": "SaveFailed"}


def save_seen(turn: Turn, agent_id: str, fact: SaveSeen) -> None:
    """A save has begun, is complete on its node, or has failed."""
    saves = _with_stall(_of_attempt(turn.state.saves, fact.attempt), fact)
    noted = SaveNoted(fact.attempt, fact.iteration, fact.at_us, fact.path[:MAX_PATH_CHARS], _line(fact.text))
    ended = {iteration: at_us for iteration, at_us in saves.under_way.items() if iteration != fact.iteration}
    if fact.stage == "begun":
        under_way = dict([*ended.items(), (fact.iteration, fact.at_us)][-MAX_UNDER_WAY:])
        saves = replace(saves, under_way=under_way, num_begun=saves.num_begun + 1)
    elif fact.stage == "local":
        saves = replace(saves, under_way=ended, local=noted, num_local=saves.num_local + 1)
    elif fact.stage == "failed":
        known = saves.failed  # each rank on which a save fails may say so
        is_new = known is None or (known.attempt, known.iteration) != (fact.attempt, fact.iteration)
        saves = replace(saves, under_way=ended, failed=noted, num_failed=saves.num_failed + is_new)
    turn.change(saves=saves)
    if fact.stage in _KINDS:
        _say(turn, fact, turn.state.agents[agent_id].info.node)


def durable_seen(saves: Saves, fact: CheckpointCommitted) -> Saves:
    """The same after a durable checkpoint: saves of iterations up to it are under way no longer, or do not matter any more."""
    saves = _of_attempt(saves, fact.attempt)
    return replace(
        saves,
        under_way={iteration: at_us for iteration, at_us in saves.under_way.items() if iteration > fact.iteration},
        durable=SaveNoted(fact.attempt, fact.iteration, fact.at_us, fact.path[:MAX_PATH_CHARS]),
        num_durable=saves.num_durable + 1,
    )


def _of_attempt(saves: Saves, attempt: int) -> Saves:
    """What was under way in an attempt before died with it."""
    if saves.attempt == attempt:
        return saves
    return replace(saves, attempt=attempt, under_way={}, logged_us={}, num_unlogged={})


def _with_stall(saves: Saves, fact: SaveSeen) -> Saves:
    if not math.isfinite(fact.stall_s) or fact.stall_s <= 0:
        return saves
    stood_us = saves.stall_us.get(fact.attempt, 0) + round(min(fact.stall_s, MAX_STALL_S) * 1e6)
    stalls = [(attempt, us) for attempt, us in saves.stall_us.items() if attempt != fact.attempt]
    return replace(saves, stall_us=dict([*stalls, (fact.attempt, stood_us)][-MAX_STALLS:]))


def _say(turn: Turn, fact: SaveSeen, node: str) -> None:
    """A line in the story, unless one of that stage was written a moment ago."""
    saves, stage = turn.state.saves, fact.stage
    last_us = saves.logged_us.get(stage)
    if last_us is not None and 0 <= turn.now.us - last_us < LINE_EVERY_US:
        turn.change(saves=replace(saves, num_unlogged={**saves.num_unlogged, stage: saves.num_unlogged.get(stage, 0) + 1}))
        return
    left_out = saves.num_unlogged.get(stage, 0)
    more = f" ({left_out} more of these since the last such line)" if left_out else ""
    data: dict[str, object] = {"iteration": fact.iteration, "path": fact.path, "stall_s": fact.stall_s, "left_out": left_out}
    level = "warning" if stage == "failed" else "info"
    turn.log(_KINDS[stage], _sentence(turn, fact) + more, level, at_us=fact.at_us, node=node, data=data)
    turn.change(
        saves=replace(saves, logged_us={**saves.logged_us, stage: turn.now.us}, num_unlogged={**saves.num_unlogged, stage: 0})
    )


def _sentence(turn: Turn, fact: SaveSeen) -> str:
    stood = f"; training stood still for {duration(fact.stall_s)}" if fact.stall_s > 0 else ""
    where = f": {fact.path}" if fact.path else ""
    if fact.stage == "begun":
        return f"a save of iteration {fact.iteration} has begun{where}{stood}"
    if fact.stage == "local":
        lacks = f"; {_line(fact.text)}" if fact.text else ""
        return f"the local checkpoint of iteration {fact.iteration} is complete{where} (it can go with its node){stood}{lacks}"
    newest = turn.state.checkpoint
    stays = f"the newest durable one stays that of iteration {newest}" if newest >= 0 else "there is no durable one yet"
    return f"the save of iteration {fact.iteration} has failed: {_line(fact.text) or 'no reason given'}; {stays}"


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT_CHARS]
