"""What a suspicious device may have spoiled: jobs, attempts, iterations and checkpoints made with it since its first suspected
moment, and all that was made from those checkpoints. The list to verify again before anybody builds on it.

One rank's wrong numbers reach all ranks in the next gradient exchange, so a checkpoint counts whoever wrote it. In an attempt
that was under way at that moment the iterations after its last checkpoint before it count, or from the rejected iteration of
the case on. Later attempts count if they resumed from a checkpoint that counts (`resumes`, by path, as it was at that time,
since paths are written over), or if their job does not say what it resumed from. A case's own iteration never reached the
parameters; what was written before it is not on the list.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, func, or_, select

from rsup.supervisor.history_jobs import MayRead, chunks, everything, named_jobs
from rsup.supervisor.history_views import subject_of
from rsup.supervisor.tables import attempts, cases, checkpoints, evidence, placements, resumes, transitions
from rsup.supervisor.view_times import iso

MAX_ATTEMPTS = 2000
"""Attempts that an answer holds; `truncated` says that there are more."""

Json = dict[str, Any]
_Key = tuple[int, int]
"""Job (`jobs.id`) and attempt."""


@dataclass
class _Attempt:
    """An attempt that may be spoiled from iteration `first` on."""

    first: int
    how: str
    ranks: list[Json] = field(default_factory=list)


@dataclass(frozen=True)
class Suspicion:
    """Since when a device is suspected, and what says so. `iterations`: if that is a rejected result, its iteration, by job and
    attempt."""

    since_us: int
    why: str
    iterations: dict[_Key, int] = field(default_factory=dict)


def touched(
    connection: Connection,
    selector: str,
    since_us: int | None = None,
    *,
    may_read: MayRead = everything,
) -> Json:
    """What the device `selector` (as `history_views.timeline`) may have spoiled since `since_us`, or since the first evidence
    that counts after its last repair.

    `since` and `why`; `jobs`: each with its attempts (ranks on the device, first and last suspicious iteration, how it got on
    the list), `last_clean` (the newest checkpoint from before the suspicion) and, in `reverify`, the checkpoints to
    verify again. Of a job that `may_read` denies only the public fields and counts are told. Raise `UnknownHardware` or
    `UsageError`.
    """
    names, identity = subject_of(connection, selector, "device")
    found = first_suspicion(connection, names) if since_us is None else None
    if since_us is not None:
        found = Suspicion(since_us, "as asked")
    if found is None:
        message = "no evidence counts against it since its last repair: nothing is to be verified again"
        return {"device": identity, "since": None, "why": message, "jobs": [], "counts": _counts([]), "truncated": False}
    spoiled = _used_with(connection, names, found)
    truncated = _spread(connection, spoiled)
    entries = _entries(connection, spoiled, found.since_us, may_read)
    answer = {"device": identity, "since": iso(found.since_us), "why": found.why, "jobs": entries}
    return {**answer, "counts": _counts(entries), "truncated": truncated}


# ---------------------------------------------------------------------------------------------------- since when, and why


def first_suspicion(connection: Connection, names: Sequence[str]) -> Suspicion | None:
    """The first moment that speaks against a device: evidence that counts, a case about it, or a state worse than `watch`;
    after its last repair if it had one. None if there is none."""
    back_us = _last_repair_us(connection, names)
    query = select(evidence).where(evidence.c.kind == "device", evidence.c.subject.in_(names), evidence.c.first_us > back_us)
    query = query.where(evidence.c.effect == "counted", evidence.c.weight > 0).order_by(evidence.c.first_us)
    told = connection.execute(query).mappings().all()
    moments = [Suspicion(row["first_us"], f"{row['source']} {row['code']}: {_first_line(row['text'])}") for row in told[:1]]
    moments += _cases_of(connection, told)
    worse = _first_worse(connection, names, back_us)
    moments += [Suspicion(worse["at_us"], f"{worse['after']}: {worse['reason']}")] if worse else []
    return min(moments, key=lambda moment: moment.since_us, default=None)


def _cases_of(connection: Connection, rows: Sequence[RowMapping]) -> list[Suspicion]:
    """What the cases say that evidence names. A result that was rejected at once: from its iteration on. Found by an audit, or
    in the state: nobody knows since when, so from the attempt's start on."""
    named = {(row["job"], row["case_id"]) for row in rows if row["case_id"] and row["job"] is not None}
    found = []
    for job in sorted({job for job, _ in named}):
        query = select(cases, attempts.c.started_us)
        query = query.join(attempts, and_(attempts.c.job == cases.c.job, attempts.c.attempt == cases.c.attempt), isouter=True)
        query = query.where(cases.c.job == job, cases.c.case_id.in_([case for owner, case in named if owner == job]))
        for row in connection.execute(query).mappings():
            why = f"case of iteration {row['iteration']}: {row['verdict'] or 'open'}"
            if row["found_by"] == "audit" or row["verdict"] == "corrupted state":
                since_us = min(row["opened_us"], row["started_us"] or row["opened_us"])
                found.append(Suspicion(since_us, f"{why}, which may have begun with attempt {row['attempt']}"))
            else:
                found.append(Suspicion(row["opened_us"], why, {(job, row["attempt"]): row["iteration"]}))
    return found


def _last_repair_us(connection: Connection, names: Sequence[str]) -> int:
    ended = and_(transitions.c.before == "in_repair", transitions.c.after.in_(("probation", "clear")))
    query = select(func.max(transitions.c.at_us)).where(transitions.c.kind == "device", transitions.c.subject.in_(names), ended)
    return int(connection.execute(query).scalar() or 0)


def _first_worse(connection: Connection, names: Sequence[str], back_us: int) -> RowMapping | None:
    query = select(transitions).where(transitions.c.kind == "device", transitions.c.subject.in_(names))
    query = query.where(transitions.c.at_us > back_us, transitions.c.after.in_(("suspect", "quarantined")))
    return connection.execute(query.order_by(transitions.c.at_us).limit(1)).mappings().first()


def _first_line(words: str) -> str:
    return words.split("\n", 1)[0]


# ------------------------------------------------------------------------------------------------- what was made with it


def _used_with(connection: Connection, names: Sequence[str], found: Suspicion) -> dict[_Key, _Attempt]:
    query = select(placements).where(placements.c.device.in_(names))
    query = query.where(or_(placements.c.to_us.is_(None), placements.c.to_us >= found.since_us))
    rows = connection.execute(query.order_by(placements.c.from_us).limit(MAX_ATTEMPTS)).mappings().all()
    starts = _starts(connection, {row["job"] for row in rows})
    spoiled: dict[_Key, _Attempt] = {}
    for row in rows:
        key = (row["job"], row["attempt"])
        if key not in spoiled:
            first = starts.get(key, 0) + 1
            if key in found.iterations:
                first = found.iterations[key]
            elif row["from_us"] < found.since_us:
                first = max(first, 1 + _saved_before(connection, key, found.since_us))
            spoiled[key] = _Attempt(first, "computed on it")
        rank = {"rank": row["rank"], "device": row["device"], "node": row["node"]}
        spoiled[key].ranks.append({**rank, "from": iso(row["from_us"]), "to": iso(row["to_us"])})
    return spoiled


def _starts(connection: Connection, numbers: Iterable[int]) -> dict[_Key, int]:
    """The iteration after which each attempt of these jobs began."""
    found: dict[_Key, int] = {}
    for chunk in chunks(sorted(numbers)):
        query = select(attempts.c.job, attempts.c.attempt, attempts.c.start_iteration).where(attempts.c.job.in_(chunk))
        found |= {(job, attempt): start for job, attempt, start in connection.execute(query)}
    return found


def _saved_before(connection: Connection, key: _Key, at_us: int) -> int:
    query = select(func.max(checkpoints.c.iteration)).where(checkpoints.c.job == key[0], checkpoints.c.attempt == key[1])
    return int(connection.execute(query.where(checkpoints.c.at_us < at_us)).scalar() or 0)


# ------------------------------------------------------------------------------------------------ what was made from that


def _spread(connection: Connection, spoiled: dict[_Key, _Attempt]) -> bool:
    """Add attempts that went on from what is spoiled, level by level; return whether there were too many to add all."""
    new = deque([list(spoiled)])
    while new:
        found: dict[_Key, _Attempt] = {}
        for chunk in chunks(new.popleft()):
            found |= _resumed(connection, chunk, spoiled)
            found |= _assumed(connection, chunk, spoiled)
        fresh = {key: attempt for key, attempt in found.items() if key not in spoiled or attempt.first < spoiled[key].first}
        for key, attempt in fresh.items():
            attempt.ranks = spoiled[key].ranks if key in spoiled else []
            attempt.how = spoiled[key].how if key in spoiled else attempt.how
        spoiled |= fresh
        if len(spoiled) >= MAX_ATTEMPTS:
            return True
        if fresh:
            new.append(list(fresh))
    return False


def _resumed(connection: Connection, keys: Sequence[_Key], spoiled: dict[_Key, _Attempt]) -> dict[_Key, _Attempt]:
    """Attempts that resumed from a checkpoint of these attempts."""
    bad = [row for row in _checkpoints_of(connection, {job for job, _ in keys}) if _is_bad(row, spoiled)]
    found: dict[_Key, _Attempt] = {}
    for paths in chunks(sorted({row["path"] for row in bad if row["path"]})):
        written: dict[str, list[RowMapping]] = {}
        query = select(checkpoints).where(checkpoints.c.path.in_(paths)).order_by(checkpoints.c.at_us)
        for row in connection.execute(query).mappings():
            written.setdefault(row["path"], []).append(row)
        for row in connection.execute(select(resumes).where(resumes.c.path.in_(paths))).mappings():
            before = [saved for saved in written[row["path"]] if saved["at_us"] <= row["at_us"]]
            if before and _is_bad(before[-1], spoiled):
                key = (row["job"], row["attempt"])
                first = min(row["iteration"] + 1, found[key].first) if key in found else row["iteration"] + 1
                found[key] = _Attempt(first, f"resumed from {row['path']}")
    return found


def _assumed(connection: Connection, keys: Sequence[_Key], spoiled: dict[_Key, _Attempt]) -> dict[_Key, _Attempt]:
    """Later attempts of these jobs that do not say what they resumed from: after what is spoiled by their iterations, or in a
    job that reports no checkpoints at all."""
    numbers = sorted({job for job, _ in keys})
    named = select(resumes.c.job, resumes.c.attempt).where(resumes.c.job.in_(numbers))
    told = {(row.job, row.attempt) for row in connection.execute(named)}
    saving = set(connection.execute(select(checkpoints.c.job).where(checkpoints.c.job.in_(numbers)).distinct()).scalars())
    found: dict[_Key, _Attempt] = {}
    for key, start in sorted(_starts(connection, numbers).items()):
        job, attempt = key
        before = [spoiled[job, number].first for number in range(1, attempt) if (job, number) in spoiled]
        if key in told or not before:
            continue
        if start >= min(before) or (job not in saving and start == 0):
            how = "follows such an attempt, and does not say what it resumed from"
            found[key] = _Attempt(start + 1, how)
    return found


def _checkpoints_of(connection: Connection, numbers: Iterable[int]) -> list[RowMapping]:
    found: list[RowMapping] = []
    for chunk in chunks(sorted(numbers)):
        found += connection.execute(select(checkpoints).where(checkpoints.c.job.in_(chunk))).mappings()
    return found


def _is_bad(row: RowMapping, spoiled: dict[_Key, _Attempt]) -> bool:
    attempt = spoiled.get((row["job"], row["attempt"]))
    return attempt is not None and row["iteration"] >= attempt.first


def _is_before(row: RowMapping, spoiled: dict[_Key, _Attempt], since_us: int) -> bool:
    """It was made before the suspicion, or holds only iterations from before it, of the attempt that was under way."""
    attempt = spoiled.get((row["job"], row["attempt"]))
    return bool(row["at_us"] < since_us if attempt is None else row["iteration"] < attempt.first)


# ------------------------------------------------------------------------------------------------------------- as fields


def _entries(connection: Connection, spoiled: dict[_Key, _Attempt], since_us: int, may_read: MayRead) -> list[Json]:
    numbers = sorted({job for job, _ in spoiled})
    named = named_jobs(connection, numbers)
    saved: dict[int, list[RowMapping]] = {job: [] for job in numbers}
    for row in sorted(_checkpoints_of(connection, numbers), key=lambda row: (row["at_us"], row["iteration"])):
        saved[row["job"]].append(row)
    last = _lasts(connection, numbers)
    entries = []
    for job in numbers:
        ours = {attempt: spoiled[job, attempt] for number, attempt in sorted(spoiled) if number == job}
        bad = [row for row in saved[job] if _is_bad(row, spoiled)]
        if not may_read(named[job]["owner"]):
            entries.append({"job": named[job], "num_attempts": len(ours), "num_checkpoints": len(bad)})
            continue
        clean = [row for row in saved[job] if _is_before(row, spoiled, since_us)]
        entries.append(
            {
                "job": named[job],
                "num_attempts": len(ours),
                "num_checkpoints": len(bad),
                "attempts": [_attempt_fields(number, attempt, last.get((job, number))) for number, attempt in ours.items()],
                "reverify": [_checkpoint_fields(row) for row in bad],
                "last_clean": _checkpoint_fields(clean[-1]) if clean else None,
            }
        )
    return entries


def _lasts(connection: Connection, numbers: Sequence[int]) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for chunk in chunks(numbers):
        query = select(attempts.c.job, attempts.c.attempt, attempts.c.last_iteration).where(attempts.c.job.in_(chunk))
        found |= {(job, attempt): last for job, attempt, last in connection.execute(query)}
    return found


def _attempt_fields(number: int, attempt: _Attempt, last: int | None) -> Json:
    """`last_iteration` is null where none of the suspicious iterations is known to have been done."""
    done = last if last is not None and last >= attempt.first else None
    named = {"attempt": number, "how": attempt.how, "first_iteration": attempt.first, "last_iteration": done}
    return {**named, "ranks": attempt.ranks}


def _checkpoint_fields(row: RowMapping) -> Json:
    return {"attempt": row["attempt"], "iteration": row["iteration"], "path": row["path"], "at": iso(row["at_us"])}


def _counts(entries: Sequence[Json]) -> Json:
    return {
        "jobs": len(entries),
        "attempts": sum(entry["num_attempts"] for entry in entries),
        "checkpoints": sum(entry["num_checkpoints"] for entry in entries),
    }
