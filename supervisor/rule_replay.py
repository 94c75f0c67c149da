"""What another policy would have done: the stored evidence of the last days through the same pure machine (`hardware`), and
what became of the devices and nodes that it would have put away.

Evidence from before those days is played too, as far back as the policy's windows reach, so that they begin with the states
they would have had. People's verbs are not played: a replay answers for the rules alone. Sightings of one fingerprint are one
row, so each is played once, when it was last seen.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, tuple_

from rsup.supervisor.hardware.device_machine import replay
from rsup.supervisor.hardware.policy import HOUR_US, Policy
from rsup.supervisor.hardware.suspicion_bound import RulesTried, Told, may_reach_suspicion
from rsup.supervisor.history_jobs import chunks
from rsup.supervisor.moments import DAY_US
from rsup.supervisor.records import EvidenceSaved, JobKey, TransitionSaved
from rsup.supervisor.tables import devices, evidence, jobs, transitions
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError

MAX_EVIDENCE = 1_000_000
MAX_SHOWN = 1000
LEVELS = ("suspect", "quarantined", "in_repair")
OUT = frozenset({"quarantined", "in_repair"})
_ORDER = {"new": 0, "gone": 1, "other": 2, "same": 3}
KINDS = ("device", "node")
SETTLED_US = 30 * DAY_US

Json = dict[str, Any]
_Subject = tuple[str, str]


class ReplayTooLarge(UsageError):
    """There is more evidence in that time than a replay takes."""


def replay_policy(
    connection: Connection,
    policy: Policy,
    *,
    now_us: int,
    days: float = 30,
    limit: int = MAX_SHOWN,
    max_evidence: int = MAX_EVIDENCE,
) -> Json:
    """What `policy` would have made of the evidence of the last `days`.

    `subjects`: those that would have become suspect or worse, or really did by evidence, with `would` and `did` (when each
    state was first reached in that time), `change` (`new`, `gone`, `other`, `same`) and `outcome` of the quarantine, as it
    really went: `confirmed` (later repaired, retired, or failed a test), `refuted` (released, or passed a test, without a
    repair, and nothing counted against it for 30 days), `open`. `counts`: suspects, quarantined, drained, and of the
    quarantined how many were confirmed, refuted, open. Raise `ReplayTooLarge`.
    """
    since_us = now_us - round(days * DAY_US)
    from_us = since_us - _reach_us(policy)
    when = evidence.c.last_us.between(from_us, now_us)  # what was refused is in it: only times are in an index
    num_evidence = connection.execute(select(func.count()).where(when)).scalar_one()
    if num_evidence > max_evidence:
        raise ReplayTooLarge(f"there are more than {max_evidence} pieces of evidence in that time; take fewer --days")
    rules = RulesTried(policy)
    telling = _telling(connection, rules, from_us, now_us)
    suspicious = {
        subject
        for subject, told in telling.items()
        if may_reach_suspicion(told, rules, policy.suspect_score_of(subject[0]), since_us)
    }
    rows = _evidence(connection, rules, suspicious, from_us, now_us)
    generations = _generations(connection, policy, [name for kind, name in suspicious if kind == "device"])
    would: dict[_Subject, dict[str, int]] = {}
    drained: dict[_Subject, str] = {}
    for kind, name in sorted(suspicious):
        told, generation = rows[kind, name], generations.get(name, "")
        rule_of = rules.of_generation(kind, generation)
        dossier, found = replay(kind, name, told, policy, now_us, generation=generation, rule_of=rule_of)
        if reached := _first_times(found, since_us):
            would[kind, name] = reached
            if dossier.saved.may_drain and not OUT.isdisjoint(reached):
                drained[kind, name] = dossier.saved.may_drain
    real = _real(connection, since_us, now_us, would)
    did = {subject: reached for subject, told in real.items() if (reached := _first_times(_by_evidence(told), since_us))}
    entries = [
        _entry(subject, would.get(subject, {}), did.get(subject, {}), real.get(subject, []), rows.get(subject, []), drained)
        for subject in sorted(would.keys() | did.keys())
    ]
    entries.sort(key=lambda entry: (_ORDER[entry["change"]], entry["kind"], entry["subject"]))
    answer = {"policy": policy.name, "since": iso(since_us), "until": iso(now_us), "num_evidence": num_evidence}
    return {**answer, "counts": _counts(entries), "subjects": entries[:limit], "truncated": len(entries) > limit}


# -------------------------------------------------------------------------------------------------------------- reading


def _reach_us(policy: Policy) -> int:
    """How far back evidence matters for a state."""
    hours = max([policy.watch_ttl_h, policy.suspect_ttl_h, *(rule.window_h for rule in policy.rules)])
    return round(hours * HOUR_US)


def _in_time(from_us: int, to_us: int) -> Any:
    return and_(evidence.c.last_us >= from_us, evidence.c.last_us <= to_us, evidence.c.effect == "counted")


def _named_by(rules: RulesTried) -> Any:
    """What a rule that may move something names, by source and code: there is no index for these, so that the one of times is
    used. A little more than that may be found."""
    moving = [rule for rule in rules.policy.rules if rule.may_move]
    sources = sorted({rule.source for rule in moving if not rule.codes})
    named = {(rule.source, code) for rule in rules.policy.rules for code in rule.codes}
    inert = {(source, code) for source, code in named if not any(rules.may_move(kind, source, code) for kind in KINDS)}
    codes = sorted(named - inert)
    whole = and_(evidence.c.source.in_(sources), _CODE.not_in(sorted(inert)))
    return or_(whole, _CODE.in_(codes))


_CODE = tuple_(evidence.c.source, evidence.c.code)


def _telling(connection: Connection, rules: RulesTried, from_us: int, to_us: int) -> dict[_Subject, list[Told]]:
    """By subject, what could move it, in order of time."""
    columns = (evidence.c.kind, evidence.c.subject, evidence.c.source, evidence.c.code, evidence.c.last_us, evidence.c.share)
    found: dict[_Subject, list[Told]] = defaultdict(list)
    for kind, name, source, code, *more in connection.execute(
        select(*columns).where(_in_time(from_us, to_us), _named_by(rules))
    ):
        if rules.may_move(kind, source, code):
            found[kind, name].append(Told(kind, source, code, *more))
    for told_of_one in found.values():
        told_of_one.sort(key=lambda one: one.last_us)
    return found


def _evidence(
    connection: Connection, rules: RulesTried, wanted: Iterable[_Subject], from_us: int, to_us: int
) -> dict[_Subject, list[EvidenceSaved]]:
    """Evidence by subject, with the keys of its jobs; without what moves nothing by itself, and ties no episodes together."""
    matters = or_(evidence.c.job.is_not(None), evidence.c.source == "test", _named_by(rules))
    columns = select(*(evidence.c[name] for name in _PLAYED), evidence.c.job).where(_in_time(from_us, to_us), matters)
    rows: list[Any] = []
    for kind in KINDS:
        for chunk in chunks(sorted(name for one, name in wanted if one == kind)):
            rows += connection.execute(columns.where(evidence.c.kind == kind, evidence.c.subject.in_(chunk))).all()
    keys = _job_keys(connection, {row[-1] for row in rows if row[-1] is not None})
    found: dict[_Subject, list[EvidenceSaved]] = defaultdict(list)
    for *values, job in rows:
        one = EvidenceSaved(**dict(zip(_PLAYED, values, strict=True)), first_us=0, recorded_us=0, job=keys.get(job))
        if job is not None or one.source == "test" or rules.may_move(one.kind, one.source, one.code):
            found[one.kind, one.subject].append(one)
    return found


_PLAYED = (
    *("kind", "subject", "fingerprint", "source", "code", "episode", "last_us"),
    *("count", "weight", "case_id", "principal", "effect", "share"),
)
"""What the machine looks at; texts would only be reasons, which nobody asks for here."""


def _job_keys(connection: Connection, numbers: Collection[int]) -> dict[int | None, JobKey]:
    """By `jobs.id`."""
    found: dict[int | None, JobKey] = {}
    for chunk in chunks(sorted(numbers)):
        query = select(jobs.c.id, jobs.c.cluster, jobs.c.owner, jobs.c.job_id, jobs.c.run).where(jobs.c.id.in_(chunk))
        found |= {number: JobKey(*key) for number, *key in connection.execute(query)}
    return found


def _generations(connection: Connection, policy: Policy, uuids: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for chunk in chunks(sorted(uuids)):
        query = select(devices.c.uuid, devices.c.model).where(devices.c.uuid.in_(chunk))
        found |= {uuid: policy.generation(model) for uuid, model in connection.execute(query)}
    return found


def _real(
    connection: Connection, since_us: int, now_us: int, wanted: Iterable[_Subject]
) -> dict[_Subject, list[Mapping[Any, Any]]]:
    """The whole real story of the subjects wanted, and of all that became suspect or worse in that time."""
    query = select(transitions.c.kind, transitions.c.subject).where(
        transitions.c.at_us >= since_us, transitions.c.at_us <= now_us
    )
    moved = connection.execute(query.where(transitions.c.after.in_(LEVELS)).distinct())
    found = {(row.kind, row.subject) for row in moved} | set(wanted)
    stories: dict[_Subject, list[Mapping[Any, Any]]] = defaultdict(list)
    for kind in ("device", "node"):
        for chunk in chunks(sorted(name for one, name in found if one == kind)):
            told = select(transitions).where(transitions.c.kind == kind, transitions.c.subject.in_(chunk))
            for row in connection.execute(told.order_by(transitions.c.subject, transitions.c.version)).mappings():
                stories[kind, row["subject"]].append(row)
    return stories


# ------------------------------------------------------------------------------------------------------------ comparing


def _first_times(found: Iterable[Any], since_us: int) -> dict[str, int]:
    """When each state of `LEVELS` was first entered since then."""
    reached: dict[str, int] = {}
    for change in found:
        after, before, at_us = (change.after, change.before, change.at_us)
        if at_us >= since_us and after in LEVELS and after != before:
            reached.setdefault(after, at_us)
    return reached


def _by_evidence(told: Iterable[Mapping[Any, Any]]) -> list[TransitionSaved]:
    """What rules did, not people."""
    names = ("kind", "subject", "version", "at_us", "before", "after", "reason")
    return [TransitionSaved(**{name: row[name] for name in names}) for row in told if not row["principal"]]


def _entry(
    subject: _Subject,
    would: Mapping[str, int],
    did: Mapping[str, int],
    real: Sequence[Mapping[Any, Any]],
    told: Sequence[EvidenceSaved],
    drained: Mapping[_Subject, str],
) -> Json:
    out_us = min((at_us for state, at_us in would.items() if state in OUT), default=None)
    return {
        "kind": subject[0],
        "subject": subject[1],
        "change": _change(would, did),
        "would": {state: iso(at_us) for state, at_us in would.items()},
        "did": {state: iso(at_us) for state, at_us in did.items()},
        "drain": drained.get(subject, ""),
        "outcome": None if out_us is None else _outcome(out_us, real, told),
    }


def _change(would: Mapping[str, int], did: Mapping[str, int]) -> str:
    if not did:
        return "new"
    if not would:
        return "gone"
    return "same" if would.keys() == did.keys() else "other"


def _outcome(out_us: int, real: Sequence[Mapping[Any, Any]], told: Sequence[EvidenceSaved]) -> str:
    """How it really went with a subject that would have been put away at `out_us`."""
    later = [row for row in real if row["at_us"] >= out_us]
    tests = [row for row in told if row.source == "test" and row.last_us >= out_us]
    if any(row["after"] in ("in_repair", "retired") for row in later) or any(row.code == "failed" for row in tests):
        return "confirmed"
    back = [row["at_us"] for row in later if row["verb"] == "release"] + [row.last_us for row in tests if row.code == "passed"]
    if not back:
        return "open"
    against = [row for row in told if row.weight > 0 and row.last_us > min(back) and row.last_us < min(back) + SETTLED_US]
    return "open" if against else "refuted"


def _counts(entries: Sequence[Json]) -> Json:
    put_away = [entry for entry in entries if not OUT.isdisjoint(entry["would"])]
    outcomes = {name: sum(entry["outcome"] == name for entry in put_away) for name in ("confirmed", "refuted", "open")}
    changes = {name: sum(entry["change"] == name for entry in entries) for name in _ORDER}
    suspects = sum("suspect" in entry["would"] for entry in entries)
    drained = sum(bool(entry["drain"]) for entry in entries)
    return {"suspect": suspects, "quarantined": len(put_away), "drained": drained, **outcomes, "changes": changes}
