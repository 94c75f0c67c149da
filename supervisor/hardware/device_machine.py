"""The machine of one device or node: `decide(dossier, event, policy, now_us) -> (dossier, records)`. Pure.

      evidence                evidence that is certain            repair            release
    clear <-> watch <-> suspect ------> quarantined -------------> in_repair ----> probation ----> clear
      expiry, a passed test             `- - - - - release - - - - - - - - - - - - ^   |  clean run time
                                             ^- - - any hit but a person's word - - - -'
    retired: from anywhere by a person; only a person's `repair` leads back

`clear`, `watch` and `suspect` are whatever the evidence since the last settlement adds up to (`scoring`), so they do not
depend on the order in which it came. From `quarantined` on a state is left only by a person's verb (`verbs`), by worse evidence
or, from `probation`, by clean run time; and back to suspicion if the verdict that alone led there is taken back. Evidence that
was refused, or is inert, is kept and moves nothing.

Every change of state is a `TransitionSaved` with the next version; a new sighting alone rewrites rows. Counts are absolute, so
a commit that is made twice changes nothing. The supervisor's `book` feeds it; `replay` feeds it stored evidence.
"""

import hashlib
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.evidence import FOLLOWED_RANK, Evidence
from rsup.supervisor.hardware.growing_evidence import GrowingEvidence
from rsup.supervisor.hardware.policy import HOUR_US, Policy, Rule
from rsup.supervisor.hardware.scoring import Assessment, Weighed
from rsup.supervisor.hardware.states import SOFT, Dossier, Standing, clear_dossier, one_line, rank
from rsup.supervisor.records import EvidenceSaved, JobKey, SubjectSaved, TransitionSaved

MAX_TEXT_CHARS = 4096
COUNTED = "counted"

Rows = list[EvidenceSaved | SubjectSaved | TransitionSaved]


class Sighted(Struct, frozen=True):
    """Evidence came in. `effect`: `counted`, or why it moves nothing. `generation`: of the GPU, empty: unknown."""

    evidence: Evidence
    effect: str = COUNTED
    generation: str = ""


class TimePassed(Struct, frozen=True):
    """Something may have expired."""

    generation: str = ""


class RanClean(Struct, frozen=True):
    """Ranks have run on it for so long without evidence."""

    us: int


Event = Sighted | TimePassed | RanClean


def decide(dossier: Dossier, event: Event, policy: Policy, now_us: int) -> tuple[Dossier, Rows]:
    """The dossier after `event`, and the rows to keep. The same dossier and no rows where nothing changes."""
    if isinstance(event, Sighted):
        return _sighted(dossier, event, policy, now_us)
    if isinstance(event, TimePassed):
        return _time_passed(dossier, event, policy, now_us)
    return _ran_clean(dossier, event, policy, now_us)


def fingerprint(evidence: Evidence, subject: str, effect: str) -> str:
    """What makes two sightings the same. Refused and inert ones have their own, so that they cannot touch what counts."""
    kept_apart = "" if effect == COUNTED else effect.partition(":")[0]
    parts = (evidence.kind, subject, evidence.source, evidence.code, evidence.episode, kept_apart)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------------- evidence


def _sighted(dossier: Dossier, event: Sighted, policy: Policy, now_us: int) -> tuple[Dossier, Rows]:
    row = _merged(dossier, event, policy, now_us)
    if row is None:
        return dossier, []
    dossier = replace(dossier, rows={**dossier.rows, row.fingerprint: row})
    if row.effect != COUNTED:
        return dossier, [row]
    saved = dossier.saved
    weighed = Weighed(policy, saved.kind, dossier.rows.values(), event.generation)
    assessed = weighed.assess(saved.settled_us, now_us)
    after, rows = _after_evidence(saved, row, weighed, assessed, now_us)
    return replace(dossier, saved=after), [row, *rows]


def _merged(dossier: Dossier, event: Sighted, policy: Policy, now_us: int) -> EvidenceSaved | None:
    """The row of this sighting; None for a total that has not grown."""
    evidence, subject = event.evidence, dossier.saved.subject
    key = fingerprint(evidence, subject, event.effect)
    rule = policy.rule(evidence.kind, evidence.source, evidence.code, event.generation)
    weight = rule.weight * evidence.share if event.effect == COUNTED else 0.0
    known = dossier.rows.get(key)
    if known is None:
        return EvidenceSaved(
            kind=evidence.kind,
            subject=subject,
            fingerprint=key,
            source=evidence.source,
            code=evidence.code,
            episode=evidence.episode,
            first_us=evidence.at_us,
            last_us=evidence.at_us,
            recorded_us=now_us,
            count=max(1, evidence.count),
            weight=weight,
            serial=evidence.serial or dossier.saved.serial,
            node=evidence.node,
            job=evidence.job,
            attempt=evidence.attempt,
            rank=evidence.rank,
            iteration=evidence.iteration,
            case_id=evidence.case_id,
            text=evidence.text[:MAX_TEXT_CHARS],
            principal=evidence.principal,
            injected=evidence.injected,
            effect=event.effect,
            rule=policy.label(rule),
            share=evidence.share,
        )
    if evidence.is_total and evidence.count <= known.count:
        return None
    count = evidence.count if evidence.is_total else known.count + max(1, evidence.count)
    last_us = max(known.last_us, evidence.at_us)
    return replace(known, count=count, last_us=last_us, weight=weight, effect=event.effect, rule=policy.label(rule))


def _after_evidence(
    saved: SubjectSaved, row: EvidenceSaved, weighed: Weighed, assessed: Assessment, now_us: int
) -> tuple[SubjectSaved, Rows]:
    standing = Standing(saved.state)
    saved = replace(saved, score=assessed.score, serial=saved.serial or row.serial)
    if (row.source, row.code) == ("test", "passed"):
        saved = replace(saved, held_by_test=False)
    if row.last_us <= saved.settled_us:
        return _kept(saved)
    if standing in SOFT:
        return _to_assessed(saved, assessed, now_us, "evidence")
    if standing is Standing.QUARANTINED and row.code == FOLLOWED_RANK and saved.rule and assessed.standing in SOFT:
        taken_back = replace(assessed, reason=one_line(row.text), row=row)
        return _to(replace(saved, held_by_test=False), taken_back, now_us, "evidence")
    if standing is Standing.PROBATION and row.source != "person" and rank(weighed.reaction(row)) >= rank("watch"):
        reason = one_line(f"a hit on probation: {row.text}")
        hit = replace(assessed, standing=_worse(Standing.QUARANTINED, assessed), reason=reason, row=row, rule=row.rule)
        return _to(saved, hit, now_us, "evidence")
    if standing is Standing.QUARANTINED and assessed.standing is Standing.IN_REPAIR:
        return _to(saved, assessed, now_us, "evidence")
    if standing in (Standing.QUARANTINED, Standing.IN_REPAIR) and rank(weighed.rule(row).first) >= rank("quarantined"):
        saved = replace(saved, held_by_test=True)
    if standing is Standing.QUARANTINED and assessed.may_drain and not saved.may_drain:
        firmer = replace(assessed, standing=standing, reason=one_line(f"{assessed.may_drain}: {row.text}"), row=row)
        return _to(saved, firmer, now_us, "evidence")
    return _kept(saved)


def _worse(standing: Standing, assessed: Assessment) -> Standing:
    return Standing.IN_REPAIR if assessed.standing is Standing.IN_REPAIR else standing


def _kept(saved: SubjectSaved) -> tuple[SubjectSaved, Rows]:
    """No transition. What was never more than clear has no row either, until something happens to it."""
    return saved, [saved] if saved.version else []


def _to_assessed(saved: SubjectSaved, assessed: Assessment, now_us: int, verb: str) -> tuple[SubjectSaved, Rows]:
    """A soft state follows the evidence, up and down."""
    if assessed.standing == saved.state:
        if assessed.standing is not Standing.CLEAR:
            saved = replace(saved, expires_us=assessed.until_us, reason=assessed.reason or saved.reason, rule=assessed.rule)
        return _kept(saved)
    return _to(saved, assessed, now_us, verb)


def _to(saved: SubjectSaved, assessed: Assessment, now_us: int, verb: str) -> tuple[SubjectSaved, Rows]:
    hard = assessed.standing not in SOFT
    after = replace(
        saved,
        state=assessed.standing.value,
        since_us=saved.since_us if saved.state == assessed.standing.value else now_us,
        reason=assessed.reason or "nothing is known against it any more",
        version=saved.version + 1,
        expires_us=None if hard else assessed.until_us,
        rule=assessed.rule,
        held_by_test=hard or saved.held_by_test,
        may_drain=assessed.may_drain or (saved.may_drain if hard else ""),
    )
    tipped = assessed.row
    fingerprint_, job = ("", None) if tipped is None else (tipped.fingerprint, tipped.job)
    return after, transition(saved, after, now_us, verb, fingerprint=fingerprint_, job=job)


def transition(
    before: SubjectSaved,
    after: SubjectSaved,
    now_us: int,
    verb: str,
    *,
    principal: str = "",
    reason: str = "",
    fingerprint: str = "",
    job: JobKey | None = None,
) -> Rows:
    """The rows of a change, `after.version` being its number."""
    change = TransitionSaved(
        kind=after.kind,
        subject=after.subject,
        version=after.version,
        at_us=now_us,
        before=before.state,
        after=after.state,
        reason=reason or after.reason,
        principal=principal,
        verb=verb,
        rule=after.rule,
        fingerprint=fingerprint,
        job=job,
    )
    return [after, change]


# ----------------------------------------------------------------------------------------------------- time and clean runs


def _time_passed(dossier: Dossier, event: TimePassed, policy: Policy, now_us: int) -> tuple[Dossier, Rows]:
    def weighed() -> Weighed:
        return Weighed(policy, dossier.saved.kind, dossier.rows.values(), event.generation)

    saved, rows = _expired(dossier.saved, weighed, now_us)
    return (replace(dossier, saved=saved), rows) if rows else (dossier, [])


def _expired(saved: SubjectSaved, weighed: Callable[[], Weighed], now_us: int) -> tuple[SubjectSaved, Rows]:
    """After what ends by then. No rows: nothing does."""
    rows = Rows()
    if saved.override and saved.override_until_us is not None and now_us >= saved.override_until_us:
        what = f"the {saved.override} of {saved.override_actor} has ended"
        ended = replace(saved, version=saved.version + 1, **NO_OVERRIDE)
        rows += transition(saved, ended, now_us, "expiry", reason=one_line(what))
        saved = ended
    if Standing(saved.state) in SOFT and saved.expires_us is not None and now_us >= saved.expires_us:
        assessed = weighed().assess(saved.settled_us, now_us)
        saved, more = _to_assessed(replace(saved, score=assessed.score), assessed, now_us, "expiry")
        rows += more
    return saved, rows


NO_OVERRIDE = {"override": "", "override_actor": "", "override_reason": "", "override_until_us": None}


def _ran_clean(dossier: Dossier, event: RanClean, policy: Policy, now_us: int) -> tuple[Dossier, Rows]:
    saved = dossier.saved
    if saved.state != Standing.PROBATION or event.us <= 0:
        return dossier, []
    clean_us = saved.clean_us + event.us
    if clean_us < policy.probation_clean_h * HOUR_US:
        after = replace(saved, clean_us=clean_us)
        return replace(dossier, saved=after), [after]
    reason = f"{policy.probation_clean_h:g} h of clean run time on probation"
    after = replace(
        saved,
        state=Standing.CLEAR.value,
        since_us=now_us,
        reason=reason,
        version=saved.version + 1,
        clean_us=0,
        settled_us=now_us,
        score=0.0,
        expires_us=None,
        may_drain="",
        rule="",
    )
    return replace(dossier, saved=after), transition(saved, after, now_us, "clean")


# --------------------------------------------------------------------------------------------------------------- replay


def replay(
    kind: str,
    subject: str,
    rows: Iterable[EvidenceSaved],
    policy: Policy,
    until_us: int,
    *,
    generation: str = "",
    rule_of: Callable[[str, str], Rule] | None = None,
) -> tuple[Dossier, list[TransitionSaved]]:
    """What `policy` would have made of stored evidence up to `until_us`: each piece at its last sighting, in order of time, and
    every expiry when it was due. People's verbs are not played. Refused and inert evidence stays so. `rule_of`: as in
    `scoring.Weighed`."""
    saved, found = clear_dossier(kind, subject).saved, list[TransitionSaved]()
    seen, grown = dict[str, EvidenceSaved](), GrowingEvidence(policy, kind, generation, rule_of)
    for row in sorted(rows, key=lambda row: (row.last_us, row.fingerprint)):
        if row.last_us > until_us:
            break
        saved = _let_pass(saved, grown, policy, row.last_us, found)
        seen[row.fingerprint] = row
        if row.effect == COUNTED:
            grown.add(row)
            assessed = grown.assess(saved.settled_us, row.last_us)
            saved, new = _after_evidence(saved, row, grown, assessed, row.last_us)
            found += [one for one in new if isinstance(one, TransitionSaved)]
    saved = _let_pass(saved, grown, policy, until_us, found)
    return Dossier(saved, seen), found


def _let_pass(
    saved: SubjectSaved, weighed: Weighed, policy: Policy, until_us: int, found: list[TransitionSaved]
) -> SubjectSaved:
    while (due_us := next_due_us(saved)) is not None and due_us <= until_us:
        saved, new = _expired(saved, lambda: weighed, due_us)
        if not new:
            break
        found += [one for one in new if isinstance(one, TransitionSaved)]
    return saved


def next_due_us(saved: SubjectSaved) -> int | None:
    """When time changes it next, None: never."""
    due = [us for us in (saved.expires_us, saved.override_until_us if saved.override else None) if us is not None]
    return min(due, default=None)
