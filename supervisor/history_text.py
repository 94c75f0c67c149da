"""Answers about devices and nodes as text for people: tables that fit the terminal, times in UTC."""

from typing import Any

from rsup.supervisor.render import clean, moment, percent, pieces, plural, table

Json = dict[str, Any]


def timeline_text(answer: Json, width: int | None) -> str:
    """`history_views.timeline`."""
    return "\n".join([*_subject_lines(answer["subject"]), *_then_lines(answer["then"]), "", _entries(answer, width)])


def _subject_lines(subject: Json) -> list[str]:
    if subject["kind"] == "node":
        return [f"node {clean(subject['node'])}"]
    facts = (("serial", "serial"), ("model", ""), ("board", "board"), ("vbios", "VBIOS"), ("driver", "driver"))
    known = [f"{label} {clean(subject[name])}".strip() for name, label in facts if subject[name]]
    lines = [f"device {clean(subject['uuid'])}" + (f": {', '.join(known)}" if known else "")]
    others = subject["other_uuids"]
    return lines + ([f"also seen as {', '.join(map(clean, others))}"] if others else [])


def _then_lines(then: Json) -> list[str]:
    when = f"at {moment(then['at'])}" if then["at"] else "now"
    since = f" since {moment(then['since'])}" if then["since"] else ""
    reason = f": {clean(then['reason'])}" if then["reason"] else ""
    lines = [f"{when}: {then['state'].replace('_', ' ')}{since}{reason}"]
    if then["override"]:
        lines.append(f"  {then['override']['word']} by a person's word until {moment(then['override']['until'])}")
    seat = then["seat"]
    if seat:
        lines.append(f"  in {clean(seat['node'])}:{clean(seat['pci_bus_id'])} since {moment(seat['from'])}")
    for user in then["used_by"]:
        lines.append(f"  used by rank {user['rank']} of {_job(user['job'])}, attempt {user['attempt']}")
    told = then["evidence"]
    first = f", the first {moment(told['first_counted'])}" if told["first_counted"] else ""
    lines.append(f"  {pieces(told['known'])}, {told['counted']} count{'s' * (told['counted'] == 1)}{first}")
    return lines


def _entries(answer: Json, width: int | None) -> str:
    if not answer["items"]:
        return "nothing is known of it up to then"
    rows = [[moment(item["at"]), item["what"], _job(item["job"]), item["text"]] for item in answer["items"]]
    text = table(("WHEN", "WHAT", "JOB", "TEXT"), rows, width)
    more = answer["next_cursor"]
    return text + (f"\nolder: --cursor {more}" if more else "")


def _job(job: Json | None) -> str:
    return f"{job['owner']}/{job['name']}" if job else ""


def touched_text(answer: Json, width: int | None) -> str:
    """`contamination.touched`."""
    lines = _subject_lines(answer["device"])
    if answer["since"] is None:
        return "\n".join([*lines, clean(answer["why"])])
    lines.append(f"suspected since {moment(answer['since'])} ({clean(answer['why'])})")
    counts = answer["counts"]
    jobs, tries = plural(counts["jobs"], "job"), plural(counts["attempts"], "attempt")
    lines += [f"{jobs}, {tries}, {plural(counts['checkpoints'], 'checkpoint')} to verify again", ""]
    for entry in answer["jobs"]:
        lines += _touched_job(entry, width)
    return "\n".join([*lines, *(["... and more: the answer is cut"] if answer["truncated"] else [])]).rstrip()


def _touched_job(entry: Json, width: int | None) -> list[str]:
    if "attempts" not in entry:
        return [f"{_job(entry['job'])}: {plural(entry['num_checkpoints'], 'checkpoint')} (ask its owner)", ""]
    lines = [f"{_job(entry['job'])}  {entry['job']['state']}"]
    for one in entry["attempts"]:
        last = "?" if one["last_iteration"] is None else one["last_iteration"]
        ranks = f", ranks {', '.join(str(rank['rank']) for rank in one['ranks'])}" if one["ranks"] else ""
        lines.append(f"  attempt {one['attempt']}: iterations {one['first_iteration']} to {last}, {clean(one['how'])}{ranks}")
    clean_one = entry["last_clean"]
    told = f"iteration {clean_one['iteration']}: {clean(clean_one['path'])}" if clean_one else "none is known"
    lines.append(f"  newest checkpoint from before the suspicion: {told}")
    rows = [[row["iteration"], row["attempt"], moment(row["at"]), row["path"]] for row in entry["reverify"]]
    if rows:
        shown = table(("ITERATION", "ATTEMPT", "AT", "VERIFY AGAIN"), rows, None if width is None else width - 2, right=(0, 1))
        lines += [f"  {line}" for line in shown.splitlines()]
    return [*lines, ""]


def common_text(answer: Json, width: int | None) -> str:
    """`common_devices.common_devices`."""
    lines = [f"{plural(len(answer['failures']), 'failure')}, those of one job on the same devices counted once"]
    if answer["window"]:
        window = answer["window"]
        lines.append(f"use from {moment(window['from'])} to {moment(window['to'])}: {window['device_hours']:g} device-hours")
    headings = ("FAILURES", "HOURS", "EXPECTED", "RATIO", "CAUSE")
    for kind in ("device", "node"):
        rows = [
            [
                row[kind],
                row["failures"],
                f"{row['exposure_hours']:.1f}",
                f"{row['expected']:.3g}",
                f"{row['ratio']:.3g}",
                percent(row["probability"]),
            ]
            for row in answer[f"{kind}s"]
        ]
        if rows:
            lines += ["", table((kind.upper(), *headings), rows, width, right=(1, 2, 3, 4, 5))]
    lines += ["", f"no single one of them: {percent(answer['none'])}", f"next: {clean(answer['experiment']['text'])}"]
    step = answer["experiment"]
    return "\n".join(lines + [f"  {clean(name)}" for name in (*step["devices"], *step["nodes"]) if step["do"] == "split"])


def offenders_text(answer: Json, width: int | None) -> str:
    """`offenders.offenders`."""
    parts = [f"since {moment(answer['since'])}"]
    if answer["repeat"]:
        rows = [
            [_name(row), row["state"], row["episodes"], f"{row['weight']:g}", moment(row["last"]), row["reason"]]
            for row in answer["repeat"]
        ]
        headings = ("AGAIN AND AGAIN", "STATE", "EPISODES", "WEIGHT", "LAST", "REASON")
        parts += ["", table(headings, rows, width, right=(2, 3))]
    else:
        parts.append("nothing failed in more than one independent episode")
    if answer["lemons"]:
        again = [
            [
                _name(row),
                row["state"],
                row["repairs"],
                moment(row["returned"]),
                moment(row["failed"]),
                row["lasted_days"],
                row["why"],
            ]
            for row in answer["lemons"]
        ]
        of_lemons = ("AFTER REPAIR", "STATE", "REPAIRS", "RETURNED", "FAILED", "DAYS", "WHY")
        parts += ["", table(of_lemons, again, width, right=(2, 5))]
    else:
        parts.append("nothing failed again after a repair")
    return "\n".join(parts)


def _name(row: Json) -> str:
    return str(row.get("device") or row.get("node"))


def clusters_text(answer: Json, width: int | None) -> str:
    """`hardware_clusters.clusters`."""
    by = answer["by"]
    total = f"{answer['in_trouble']} of {plural(answer['devices'], 'device')} in trouble since {moment(answer['since'])}"
    rows = [
        [
            row[by],
            row["devices"],
            row["in_trouble"],
            f"{row['expected']:.3g}",
            f"{row['ratio']:.3g}",
            percent(row["above_one"]),
            percent(row["probability"]) if row["probability"] is not None else "-",
        ]
        for row in answer["groups_shown"]
    ]
    headings = (by.upper(), "DEVICES", "TROUBLE", "EXPECTED", "RATIO", "RATIO > 1", "CAUSE")
    lines = [total, table(headings, rows, width, right=(1, 2, 3, 4, 5, 6)) if rows else "no devices yet"]
    return "\n".join([*lines, f"no single {by}: {percent(answer['none'])}"])


def replay_text(answer: Json, width: int | None) -> str:
    """`rule_replay.replay_policy`."""
    counts = answer["counts"]
    span = f"{moment(answer['since'])} to {moment(answer['until'])}"
    lines = [f"policy {clean(answer['policy'])} on {plural(answer['num_evidence'], 'piece')} of evidence, {span}:"]
    lines.append(
        f"  {counts['suspect']} would have been suspect, {counts['quarantined']} quarantined, {counts['drained']} drained"
    )
    judged = f"{counts['confirmed']} later confirmed, {counts['refuted']} not, {counts['open']} open"
    lines += [f"  of the quarantined {judged}", f"  against what was done: {_changes(counts['changes'])}", ""]
    rows = [
        [row["change"], row["kind"], row["subject"], _reached(row["would"]), _reached(row["did"]), row["outcome"], row["drain"]]
        for row in answer["subjects"]
        if row["change"] != "same"
    ]
    headings = ("CHANGE", "KIND", "SUBJECT", "WOULD", "DID", "OUTCOME", "DRAIN")
    lines.append(table(headings, rows, width) if rows else "nothing would have been otherwise")
    return "\n".join([*lines, *(["... and more"] if answer["truncated"] else [])])


def _changes(changes: Json) -> str:
    words = {"new": "put away or suspected in addition", "gone": "left alone", "other": "otherwise", "same": "the same"}
    return ", ".join(f"{changes[name]} {word}" for name, word in words.items())


def _reached(states: Json) -> str:
    return ", ".join(f"{state.replace('_', ' ')} {moment(at)}" for state, at in states.items())


def expiring_text(answer: Json, width: int | None) -> str:
    """`repair_times.expiring`."""
    if not answer["items"]:
        return f"nothing ends by itself until {moment(answer['until'])}"
    rows = [
        [moment(row["ends"]), row["kind"], row["subject"], row["what"], row["actor"], row["reason"]] for row in answer["items"]
    ]
    more = answer["count"] - len(rows)
    text = table(("ENDS", "KIND", "SUBJECT", "WHAT", "BY", "REASON"), rows, width)
    return text + (f"\n... and {more} more" if more else "")


def stats_text(answer: Json, width: int | None) -> str:
    """`repair_times.history_stats`."""
    states = ", ".join(f"{number} {state.replace('_', ' ')}" for state, number in sorted(answer["states"].items()) if number)
    lines = [f"{plural(answer['known'], answer['kind'])}: {states or 'none'}", f"since {moment(answer['since'])}:"]
    repairs, outcomes = answer["repairs"], answer["outcomes"]
    if repairs["count"]:
        spread = (
            f"mean {repairs['mean_hours']:g} h, median {repairs['median_hours']:g} h, longest {repairs['longest_hours']:g} h"
        )
        lines.append(f"  {plural(repairs['count'], 'repair')}: {spread} from out of use to back")
    else:
        lines.append("  no repair ended")
    ended = f"{outcomes['confirmed']} confirmed, {outcomes['refuted']} refuted, {outcomes['unknown']} unknown"
    right = f" ({percent(outcomes['precision'])} right)" if outcomes["precision"] is not None else ""
    lines.append(f"  quarantines that ended: {ended}{right}; refuted ones stood idle for {outcomes['refuted_hours']:g} h")
    rows = [[row["rule"], row["confirmed"], row["refuted"], row["unknown"]] for row in answer["by_rule"]]
    if rows:
        lines += ["", table(("RULE", "CONFIRMED", "REFUTED", "UNKNOWN"), rows, width, right=(1, 2, 3))]
    return "\n".join(lines)
