"""How the ranks of a failed attempt ended, for people: part of `rsup report`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rsup.supervisor.failure import is_of_a_peer
from rsup.supervisor.render import clean, clean_block

Json = Mapping[str, Any]
MAX_OWN = 4
MAX_LINE_CHARS = 200


def exit_lines(incident: Json) -> list[str]:
    """First the one that failed first, with its last lines; then the others that failed by themselves; then those whom we had
    signalled."""
    exits: Sequence[Json] = incident["exits"]
    own = sorted(
        (e for e in exits if not e["by_us"]), key=lambda e: (e["rank"] != incident["culprit"], is_of_a_peer(e["error"]))
    )
    if not own:
        return []
    lines = [] if clean(incident["text"]).startswith(_how(own[0])) else [f"  {'first':<12} {_how(own[0])}"]
    lines += ["  last lines of its stderr:"] if own[0]["last_lines"] else []
    lines += [f"    | {clean_block(line)[:MAX_LINE_CHARS]}" for line in own[0]["last_lines"]]
    for other in own[1:MAX_OWN]:
        lines.append(
            f"  {'lost a peer' if is_of_a_peer(other['error']) else 'also':<12} {_how(other)}, {_later(other, own[0])}"
        )
    if own[MAX_OWN:]:
        lines.append(f"  {'also':<12} {_ranks(own[MAX_OWN:])}")
    return lines + _ended_by_us(exits, own[0])


def _ended_by_us(exits: Sequence[Json], first: Json) -> list[str]:
    lines = []
    for name in sorted({e["signal_name"] for e in exits if e["by_us"]}):
        ended = [e for e in exits if e["by_us"] and e["signal_name"] == name]
        why = clean(ended[0]["by_us"]).split(" has failed: ")[0]
        why += " has failed" if " has failed: " in ended[0]["by_us"] else ""
        what, how = ("ended by us", f"by {name}") if name else ("left", f"by {_left_text(ended)} to end")
        lines.append(f"  {what:<12} {_ranks(ended)} {how}, {_later(ended[0], first)}: {why}")
    return lines


def _left_text(exits: Sequence[Json]) -> str:
    codes = ", ".join(map(str, sorted({e["exit_code"] for e in exits})))
    themselves, them = ("itself", "it") if len(exits) == 1 else ("themselves", "them")
    return f"{themselves} (exit {codes}) after we asked {them}"


def _how(one: Json) -> str:
    how = f"was killed by {one['signal_name']}" if one["signal_name"] else f"exited with code {one['exit_code']}"
    who = f"rank {one['rank']} on {clean(one['node'])} {how}"
    killer = f"{who}, {clean(one['killer'])}" if one["killer"] else who
    return ": ".join(filter(None, (killer, clean(one["error"]))))[:MAX_LINE_CHARS]


def _later(one: Json, first: Json) -> str:
    """By the clocks of their hosts."""
    after_s = (datetime.fromisoformat(one["at"]) - datetime.fromisoformat(first["at"])).total_seconds()
    return f"{abs(after_s) * 1000:.0f} ms {'later' if after_s >= 0 else 'earlier'}"


def _ranks(exits: Sequence[Json]) -> str:
    ranks = sorted(e["rank"] for e in exits)
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"rank{'s'[: len(ranks) > 1]} {shown}"
