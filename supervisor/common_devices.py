"""What failed jobs have in common: the devices and nodes that took part in them, weighed by how much each was used at all.

A failure is a failed, hung or lost attempt; those of one job on the same devices count once, since a program that crashes a
hundred times says nothing new about its devices. Exposure is all the time that a device was placed in any job, failed or not,
from 30 days before the first of these failures until now. `rate_ratio` says how they become a probability. The answer also
proposes the smallest next experiment.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, and_, case, func, or_, select

from rsup.supervisor.history_jobs import chunks, named_jobs
from rsup.supervisor.job_selector import FoundJob
from rsup.supervisor.moments import DAY_US, HOUR_US
from rsup.supervisor.rate_ratio import log_bayes_factor, probabilities, rate_ratio
from rsup.supervisor.render import duration, plural
from rsup.supervisor.tables import attempts, cases, devices, nodes, placements
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError

FAILED = ("failed", "hung", "lost")
BEFORE_US = 30 * DAY_US
MAX_FAILURES = 200
MAX_CANDIDATES = 1000
SURE = 0.9
RUNS_TO_FAILURE = 3.0
"""How many usual times to failure a run without a failure must last to clear its devices, about (1 - exp(-3) = 95 %)."""

Json = dict[str, Any]
_Key = tuple[int, int]


@dataclass(frozen=True)
class _Failure:
    """One failure: an attempt, and what took part in it."""

    job: int
    attempt: int
    hours: float
    devices: frozenset[str]
    nodes: frozenset[str]


@dataclass(frozen=True)
class _Window:
    from_us: int
    to_us: int
    device_hours: float
    """Exposure of all devices together."""
    num_failures: int


def common_devices(
    connection: Connection,
    jobs: Sequence[FoundJob] = (),
    *,
    failed_since_us: int | None = None,
    now_us: int,
    limit: int = 20,
) -> Json:
    """Devices and nodes that these jobs (or all that failed since then) have in common, the likeliest culprits first.

    `devices` and `nodes`: at most `limit` each with `failures` of them it took part in, `exposure_hours`, `expected` failures
    of its exposure, `ratio`, `above_one` and `probability` that it is the cause; `none`: the probability that no single one
    is; `experiment`: what to do next. Where failures are chosen by time, those that a rerun case found to be the application's
    are left out. Raise `UsageError` for a job that did not fail.
    """
    found = _failures(connection, [job.id for job in jobs], failed_since_us)
    sound = {failure.job for failure in found}
    for job in jobs:
        if job.id not in sound:
            raise UsageError(f"job {job.key} has no failed attempt with known devices; see `rsup report {job.key}`")
    if not found:
        return _nothing(failed_since_us)
    window = _window(connection, found, now_us)
    lists = {
        "device": _weighed(connection, placements.c.device, [failure.devices for failure in found], window),
        "node": _weighed(connection, placements.c.node, [failure.nodes for failure in found], window),
    }
    none = _judge(connection, lists)
    shown = {kind: sorted(rows, key=lambda row: -row["probability"]) for kind, rows in lists.items()}
    models = _device_facts(connection, [row["device"] for row in shown["device"][:limit]])
    return {
        "failures": [_failure_fields(failure, named_jobs(connection, {failure.job})) for failure in found],
        "window": {"from": iso(window.from_us), "to": iso(window.to_us), "device_hours": round(window.device_hours, 3)},
        "devices": [{**row, **models.get(row["device"], {})} for row in shown["device"][:limit]],
        "nodes": shown["node"][:limit],
        "none": none,
        "experiment": _experiment(shown["device"], shown["node"], none, found),
    }


def _nothing(failed_since_us: int | None) -> Json:
    text = f"no attempt has failed since {iso(failed_since_us)}"
    experiment: Json = {"do": "nothing", "devices": [], "nodes": [], "hours": None, "text": text}
    return {"failures": [], "window": None, "devices": [], "nodes": [], "none": 1.0, "experiment": experiment}


# ------------------------------------------------------------------------------------------------------------- failures


def _failures(connection: Connection, jobs: Sequence[int], since_us: int | None) -> list[_Failure]:
    """The failed attempts with their devices, each set of devices of a job once, newest first."""
    query = select(attempts.c.job, attempts.c.attempt, attempts.c.started_us, attempts.c.stopped_us)
    query = query.where(attempts.c.outcome.in_(FAILED)).order_by(attempts.c.stopped_us.desc()).limit(4 * MAX_FAILURES)
    if jobs:
        query = query.where(attempts.c.job.in_(jobs))
    if since_us is not None:
        query = query.where(attempts.c.stopped_us >= since_us)
    rows = connection.execute(query).all()
    if not jobs:
        of_application = _found_to_be_applications(connection, {row.job for row in rows})
        rows = [row for row in rows if (row.job, row.attempt) not in of_application]
    return _once_a_set(connection, rows)


def _once_a_set(connection: Connection, rows: Sequence[Any]) -> list[_Failure]:
    used = _used_in(connection, rows)
    found: dict[tuple[int, frozenset[str]], _Failure] = {}
    for row in rows:
        parts = used.get((row.job, row.attempt), [])
        boards = frozenset(device for device, _ in parts)
        if boards:
            hours = max(0, (row.stopped_us or row.started_us) - row.started_us) / HOUR_US
            failure = _Failure(row.job, row.attempt, hours, boards, frozenset(node for _, node in parts))
            found.setdefault((row.job, boards), failure)
    return list(found.values())[:MAX_FAILURES]


def _used_in(connection: Connection, rows: Sequence[Any]) -> dict[_Key, list[tuple[str, str]]]:
    wanted: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        wanted[row.job].append(row.attempt)
    used: dict[_Key, list[tuple[str, str]]] = defaultdict(list)
    for job, numbers in wanted.items():
        query = select(placements.c.attempt, placements.c.device, placements.c.node)
        for attempt, device, node in connection.execute(
            query.where(placements.c.job == job, placements.c.attempt.in_(numbers))
        ):
            used[job, attempt].append((device, node))
    return used


def _found_to_be_applications(connection: Connection, jobs: set[int]) -> set[_Key]:
    found: set[_Key] = set()
    for chunk in chunks(sorted(jobs)):
        query = select(cases.c.job, cases.c.attempt).where(cases.c.job.in_(chunk), cases.c.verdict == "application")
        found |= {(row.job, row.attempt) for row in connection.execute(query)}
    return found


def _failure_fields(failure: _Failure, jobs: Mapping[int, Json]) -> Json:
    sizes = {"num_devices": len(failure.devices), "num_nodes": len(failure.nodes), "hours": round(failure.hours, 3)}
    return {"job": jobs.get(failure.job), "attempt": failure.attempt, **sizes}


# ------------------------------------------------------------------------------------------------------------- exposure


def _window(connection: Connection, found: Sequence[_Failure], now_us: int) -> _Window:
    started = []
    for job, attempt in {(failure.job, failure.attempt) for failure in found}:
        of_one = select(attempts.c.started_us).where(attempts.c.job == job, attempts.c.attempt == attempt)
        started.append(connection.execute(of_one).scalar_one())
    from_us = min(started) - BEFORE_US
    ended = attempts.c.stopped_us
    length = _overlap(attempts.c.started_us, ended, from_us, now_us) * attempts.c.world_size
    total = sum(
        float(connection.execute(select(func.sum(length)).where(condition)).scalar() or 0)
        for condition in (ended > from_us, ended.is_(None))  # each by the index
    )
    return _Window(from_us, now_us, total / HOUR_US, len(found))


def _overlap(begin: Any, end: Any, from_us: int, to_us: int) -> Any:
    """Microseconds of a span that lie between `from_us` and `to_us`."""
    first = case((begin > from_us, begin), else_=from_us)
    last = case((and_(end.is_not(None), end < to_us), end), else_=to_us)
    return case((last > first, last - first), else_=0)


def _weighed(connection: Connection, column: Column[str], sets: Sequence[frozenset[str]], window: _Window) -> list[Json]:
    """Every candidate with its failures, exposure and Bayes factor."""
    told = Counter[str]()
    for members in sets:
        told.update({name: 1.0 / len(members) for name in members})
    names = [name for name, _ in told.most_common(MAX_CANDIDATES)]
    hours = _exposure_hours(connection, column, names, window)
    total = max(window.device_hours, max(hours.values(), default=0.0), 1e-9)
    sizes_of: dict[str, list[int]] = {name: [] for name in names}
    for members in sets:
        for name in members & sizes_of.keys():
            sizes_of[name].append(len(members))
    rows = []
    every = list(Counter(len(members) for members in sets).items())
    for name in names:
        used, took_part = hours.get(name, 0.0), sizes_of[name]
        expected = sum([number * min(1.0, size * used / total) for size, number in every])
        found = rate_ratio(len(took_part), expected)
        factor = log_bayes_factor(took_part, len(sets), used / total)
        counted = {"failures": len(took_part), "exposure_hours": round(used, 3), "expected": expected}
        rows.append({column.name: name, **counted, "ratio": found.ratio, "above_one": found.above_one, "log_factor": factor})
    return rows


def _exposure_hours(connection: Connection, column: Column[str], names: Sequence[str], window: _Window) -> dict[str, float]:
    used_us = func.sum(_overlap(placements.c.from_us, placements.c.to_us, window.from_us, window.to_us))
    found: dict[str, float] = {}
    for chunk in chunks(names):
        query = select(column, used_us).where(column.in_(chunk), placements.c.from_us < window.to_us)
        query = query.where(or_(placements.c.to_us.is_(None), placements.c.to_us > window.from_us)).group_by(column)
        found |= {name: float(total) / HOUR_US for name, total in connection.execute(query)}
    return found


def _judge(connection: Connection, lists: Mapping[str, list[Json]]) -> float:
    """Give each row its probability; return that of no single culprit."""
    sizes = [connection.execute(select(func.count()).select_from(table)).scalar() or 0 for table in (devices, nodes)]
    rows = [row for kind in lists.values() for row in kind]
    found, none = probabilities([row.pop("log_factor") for row in rows], max(sum(sizes), len(rows)))
    for row, probability in zip(rows, found, strict=True):
        row["probability"] = probability
    return none


def _device_facts(connection: Connection, uuids: Sequence[str]) -> dict[str, Json]:
    columns = (devices.c.uuid, devices.c.node, devices.c.model, devices.c.serial)
    rows = connection.execute(select(*columns).where(devices.c.uuid.in_(uuids))).mappings()
    return {row["uuid"]: {name: row[name] for name in ("node", "model", "serial")} for row in rows}


# ------------------------------------------------------------------------------------------------------- what to do next


def _experiment(boards: Sequence[Json], places: Sequence[Json], none: float, found: Sequence[_Failure]) -> Json:
    """The smallest next step: test the one that is nearly sure, or split the doubt in halves; nothing where there is none."""
    hours = round(RUNS_TO_FAILURE * statistics.median(failure.hours for failure in found), 2)
    best = max([*boards[:1], *places[:1]], key=lambda row: row["probability"])
    if best["probability"] >= SURE:
        kind = "device" if "device" in best else "node"
        text = f"test {kind} {best[kind]} (`rsup {kind}s test {best[kind]}`) and leave it out until then"
        return _step(
            "test", [best["device"]] if "device" in best else [], [best["node"]] if "device" not in best else [], hours, text
        )
    if none >= SURE:
        return _step("nothing", [], [], None, "nothing stands out: what they have in common is no more than their use explains")
    half, picked = (1.0 - none) / 2, _likeliest(boards, places)
    chosen: list[Json] = []
    while picked and sum(row["probability"] for row in chosen) < half:
        chosen.append(picked.pop(0))
    on_boards = [row["device"] for row in chosen if "device" in row]
    on_nodes = [row["node"] for row in chosen if "device" not in row]
    odds = sum(row["probability"] for row in chosen)
    what = " and ".join(plural(len(names), kind) for kind, names in (("device", on_boards), ("node", on_nodes)) if names)
    text = (
        f"run such a job on {what} below only, or test them: if it fails within {duration(hours * 3600)} the culprit is among "
        f"them, else they are cleared (it is among them with {odds:.0%}); until then use them last"
    )
    return _step("split", on_boards, on_nodes, hours, text)


def _likeliest(boards: Sequence[Json], places: Sequence[Json]) -> list[Json]:
    return sorted([*boards, *places], key=lambda row: -row["probability"])


def _step(do: str, boards: list[str], places: list[str], hours: float | None, text: str) -> Json:
    return {"do": do, "devices": boards, "nodes": places, "hours": hours, "text": text}
