"""Slow ranks for people: text from the dicts of `straggler_views`."""

from collections.abc import Mapping
from typing import Any

from rsup.supervisor.render import PLAIN, Paint, clean, moment, plural, table

Json = Mapping[str, Any]


def stragglers_text(found: Json, width: int | None = None, paint: Paint = PLAIN) -> str:
    """The switch, and a table of episodes."""
    lines = [_switch_line(found)]
    episodes = found["episodes"]
    if not episodes:
        return "\n".join([*lines, "no rank has held the others up"])
    headings = (
        "EPISODE",
        "FROM",
        "ATTEMPT",
        "RANK",
        "DEVICE",
        "ITERATIONS",
        "SLOWER",
        "SECTION",
        "CAUSE",
        "SO FAR",
        "FOR THE DEVICE",
    )
    rows = [
        (
            one["episode"],
            moment(one["from"]),
            one["attempt"],
            one["rank"],
            "CPU" if one["device"].startswith("CPU-") else one["device"],
            f"{one['first_iteration']}-{one['last_iteration']}",
            f"{one['slowdown']:.1f}x",
            one["section"],
            one["cause"],
            "goes on" if one["goes_on"] else "over",
            one["verdict"],
        )
        for one in episodes
    ]
    lines += ["", table(headings, rows, width, right=(0, 2, 3, 6), paint=paint)]
    if found["num_episodes"] > len(episodes):
        lines.append(f"the newest {len(episodes)} of {plural(found['num_episodes'], 'episode')}")
    return "\n".join(lines)


def straggler_lines(found: Json | None, paint: Paint = PLAIN) -> list[str]:
    """What a status says: a line for each rank that is slow now. None: an older supervisor's."""
    return [
        paint(f"straggler: {clean(one['text'])} (since iteration {one['first_iteration']})", "yellow")
        for one in (found["episodes"] if found else ())
        if one["goes_on"]
    ]


def _switch_line(found: Json) -> str:
    switched = {None: "as the script has it", True: "switched on", False: "switched off"}[found["switched"]]
    reports = f", {plural(found['num_reports'], 'report')} in this attempt" if found["num_reports"] else ", no report yet"
    return f"straggler detection: {switched}{reports}"
