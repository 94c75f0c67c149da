"""What people ask of a device or node, decided purely: `ask(dossier, request, policy, now_us) -> Verdict`.

| verb | from | to |
|---|---|---|
| flag | any | evidence of a person (anyone may); the state follows as from any evidence |
| note | any | kept with the history, moves nothing |
| quarantine | clear, watch, suspect, probation | quarantined |
| allow | any but retired | the state stays; placement uses it freely until the end of the word |
| repair | any but in_repair | in_repair |
| release | watch, suspect, probation | clear; ends an `allow` too |
| release | quarantined, in_repair | probation, after a passed test or `without_test` |
| retire | any | retired |
| tested | any | evidence of an active test: `passed`, `failed` or `skipped` |

Two people who change one device at once: a request that names the version it was made for (`if_version`) is refused once that
is over, and one that finds its work done by somebody else is told by whom.
"""

from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.evidence import Evidence
from rsup.supervisor.hardware.device_machine import NO_OVERRIDE, Rows, Sighted, decide, transition
from rsup.supervisor.hardware.policy import HOUR_US, Policy
from rsup.supervisor.hardware.states import Dossier, Standing, one_line
from rsup.supervisor.records import SubjectSaved, TransitionSaved

VERBS = ("flag", "note", "quarantine", "allow", "repair", "release", "retire", "tested", "sighted")
FOR_ANYONE = ("flag", "note")
"""Verbs that need no operator."""
MAX_REASON_CHARS = 500
RESULTS = ("passed", "failed", "skipped")


class VerbRequest(Struct, frozen=True, kw_only=True):
    """One change of one device or node."""

    kind: str
    subject: str
    """UUID or node's name, as the store knows it."""
    verb: str
    principal: str
    is_operator: bool
    reason: str
    if_version: int | None = None
    until_us: int | None = None
    """Of `allow`: its end; None: the policy's usual time."""
    without_test: bool = False
    ticket: str = ""
    result: str = ""
    """Of `tested`."""
    evidence: Evidence | None = None
    """Of `sighted` (import): what another tool saw."""
    dry_run: bool = False
    serial: str = ""
    node: str = ""


class Verdict(Struct, frozen=True):
    """The answer. `status`: `done`, `unchanged`, `refused`, `conflict`, `forbidden`."""

    status: str
    message: str
    dossier: Dossier
    rows: Rows = []

    @property
    def done(self) -> bool:
        return self.status in ("done", "unchanged")


def ask(dossier: Dossier, request: VerbRequest, last: TransitionSaved | None, policy: Policy, now_us: int) -> Verdict:
    """Decide. `last`: the newest change of the subject, to name who made it."""
    saved = dossier.saved
    refusal = _refusal(saved, request, last, policy, now_us)
    if refusal is not None:
        return Verdict(*refusal, dossier)
    if request.verb in ("flag", "note", "tested", "sighted"):
        return _told(dossier, request, policy, now_us)
    after = _CHANGES[request.verb](saved, request, policy, now_us)
    reason = one_line(request.reason, MAX_REASON_CHARS)
    rows = transition(saved, after, now_us, request.verb, principal=request.principal, reason=reason)
    return Verdict("done", _says(saved, after, request), replace(dossier, saved=after), rows)


def name_of(kind: str, subject: str) -> str:
    """`device GPU-1`, `node n1`."""
    return f"{kind} {subject}"


# ------------------------------------------------------------------------------------------------------------- refusals


def _refusal(
    saved: SubjectSaved, request: VerbRequest, last: TransitionSaved | None, policy: Policy, now_us: int
) -> tuple[str, str] | None:
    verb, what = request.verb, name_of(saved.kind, saved.subject)
    if verb not in VERBS:
        return "refused", f"unknown verb {verb[:40]!r}: {', '.join(VERBS)}"
    if verb not in FOR_ANYONE and not request.is_operator:
        return "forbidden", f"{request.principal} may not {verb} {what}: only operators may; anyone may flag it"
    if not request.reason.strip():
        return "refused", f"{verb} {what}: say why, with --reason"
    if request.if_version is not None and request.if_version != saved.version:
        return "conflict", f"{what} has changed since version {request.if_version}: {_by(saved, last)}; look again, then repeat"
    return _refused_by_state(saved, request, last) or _refused_by_values(request, policy, now_us)


def _refused_by_state(saved: SubjectSaved, request: VerbRequest, last: TransitionSaved | None) -> tuple[str, str] | None:
    verb, what, standing = request.verb, name_of(saved.kind, saved.subject), Standing(saved.state)
    said = standing.value.replace("_", " ")
    already = {"quarantine": (Standing.QUARANTINED, Standing.IN_REPAIR, Standing.RETIRED), "repair": (Standing.IN_REPAIR,)}
    if standing in already.get(verb, ()) or (verb == "retire" and standing is Standing.RETIRED):
        return "conflict", f"{what} is {said} already: {_by(saved, last)}"
    if standing is Standing.RETIRED and verb in ("allow", "release"):
        return "refused", f"{what} is retired ({_by(saved, last)}): only `repair` leads back"
    if verb != "release":
        return None
    if standing is Standing.CLEAR and not saved.override:
        return "conflict", f"{what} is clear already: {_by(saved, last)}"
    if standing in (Standing.QUARANTINED, Standing.IN_REPAIR) and saved.held_by_test and not request.without_test:
        how = f"`rsup devices test {saved.subject}`" if saved.kind == "device" else "`rsup nodes test` there"
        return "refused", f"{what} is {said} and has not passed a test since: run {how}, or release it with --without-test"
    return None


def _refused_by_values(request: VerbRequest, policy: Policy, now_us: int) -> tuple[str, str] | None:
    if request.verb == "allow" and request.until_us is not None:
        if request.until_us <= now_us:
            return "refused", "the end of an allow must lie ahead"
        if request.until_us > now_us + policy.allow_max_h * HOUR_US:
            return "refused", f"an allow lasts at most {policy.allow_max_h:g} h; say it again when it ends"
    if request.verb == "tested" and request.result not in RESULTS:
        return "refused", f"a test's result is one of {', '.join(RESULTS)}"
    if request.verb == "sighted" and request.evidence is None:
        return "refused", "there is nothing to import"
    return None


def _by(saved: SubjectSaved, last: TransitionSaved | None) -> str:
    """Who changed it last, and what."""
    if last is None:
        return f"version {saved.version}, {saved.reason}"
    who = f"{last.verb} by {last.principal}" if last.principal else f"by {last.verb}"
    when = datetime.fromtimestamp(last.at_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"version {last.version}, {who} at {when}: {last.reason}"


# -------------------------------------------------------------------------------------------------------------- changes


def _moved(saved: SubjectSaved, standing: Standing, reason: str, now_us: int, **fields: object) -> SubjectSaved:
    return replace(
        saved,
        state=standing.value,
        since_us=saved.since_us if saved.state == standing.value else now_us,
        reason=one_line(reason),
        version=saved.version + 1,
        expires_us=None,
        rule="",
        **fields,
    )


def _quarantine(saved: SubjectSaved, request: VerbRequest, policy: Policy, now_us: int) -> SubjectSaved:
    word = f"{request.principal}: {request.reason}"
    held = {"held_by_test": True, "may_drain": one_line(f"the word of {word}"), **NO_OVERRIDE}
    return _moved(saved, Standing.QUARANTINED, word, now_us, **held)


def _allow(saved: SubjectSaved, request: VerbRequest, policy: Policy, now_us: int) -> SubjectSaved:
    until_us = request.until_us or now_us + int(policy.allow_default_h * HOUR_US)
    return replace(
        saved,
        version=saved.version + 1,
        override="allow",
        override_actor=request.principal,
        override_reason=one_line(request.reason, MAX_REASON_CHARS),
        override_until_us=until_us,
    )


def _repair(saved: SubjectSaved, request: VerbRequest, policy: Policy, now_us: int) -> SubjectSaved:
    word = f"{request.principal}: {request.reason}"
    fields = {"held_by_test": True, "ticket": request.ticket or saved.ticket, "may_drain": one_line(f"the word of {word}")}
    return _moved(saved, Standing.IN_REPAIR, word, now_us, **fields, **NO_OVERRIDE)


def _release(saved: SubjectSaved, request: VerbRequest, policy: Policy, now_us: int) -> SubjectSaved:
    """Back into use: what was hard to probation, the rest to clear. The evidence before is dealt with."""
    hard = saved.state in (Standing.QUARANTINED, Standing.IN_REPAIR)
    word = f"released by {request.principal}: {request.reason}"
    fields = {"settled_us": now_us, "score": 0.0, "clean_us": 0, "held_by_test": False, "may_drain": "", **NO_OVERRIDE}
    return _moved(saved, Standing.PROBATION if hard else Standing.CLEAR, word, now_us, **fields)


def _retire(saved: SubjectSaved, request: VerbRequest, policy: Policy, now_us: int) -> SubjectSaved:
    word = f"{request.principal}: {request.reason}"
    fields = {"ticket": request.ticket or saved.ticket, "may_drain": one_line(f"the word of {word}")}
    return _moved(saved, Standing.RETIRED, word, now_us, **fields, **NO_OVERRIDE)


_CHANGES = {"quarantine": _quarantine, "allow": _allow, "repair": _repair, "release": _release, "retire": _retire}


def _says(before: SubjectSaved, after: SubjectSaved, request: VerbRequest) -> str:
    what = name_of(after.kind, after.subject)
    if request.verb == "allow":
        return f"{what} is used as if it were clear, though it is {after.state.replace('_', ' ')}"
    if before.state == after.state:
        return f"{what} stays {after.state.replace('_', ' ')}"
    return f"{what}: {before.state.replace('_', ' ')} -> {after.state.replace('_', ' ')}"


# ------------------------------------------------------------------------------------------------------------- evidence


def _told(dossier: Dossier, request: VerbRequest, policy: Policy, now_us: int) -> Verdict:
    """Words, results and sightings are evidence; what follows is the machine's."""
    evidence = request.evidence if request.verb == "sighted" and request.evidence is not None else _said(request, now_us)
    after, rows = decide(dossier, Sighted(evidence), policy, now_us)
    what, before, now = name_of(evidence.kind, dossier.saved.subject), dossier.saved.state, after.saved.state
    said = {"flag": "the flag is kept", "note": "the note is kept", "tested": f"the test is kept ({request.result})"}
    text = said.get(request.verb, f"{evidence.source} {evidence.code} is kept")
    moved = f"it is now {now.replace('_', ' ')}" if now != before else f"it stays {now.replace('_', ' ')}"
    if not rows:
        return Verdict("unchanged", f"{what}: known already; {moved}", dossier)
    return Verdict("done", f"{what}: {text}; {moved}", after, rows)


def _said(request: VerbRequest, now_us: int) -> Evidence:
    source, code = ("test", request.result) if request.verb == "tested" else ("person", request.verb)
    return Evidence(
        kind=request.kind,
        subject=request.subject,
        source=source,
        code=code,
        episode=f"{source}:{request.principal}:{now_us}",
        at_us=now_us,
        text=request.reason,
        serial=request.serial,
        node=request.node,
        principal=request.principal,
    )
