"""Short ways to tell evidence in tests of the hardware's history."""

from rsup.supervisor.evidence import Evidence
from rsup.supervisor.hardware import policy
from rsup.supervisor.hardware.device_machine import Sighted, TimePassed, decide
from rsup.supervisor.hardware.states import Dossier, clear_dossier
from rsup.supervisor.hardware.verbs import VerbRequest, Verdict, ask
from rsup.supervisor.records import EvidenceSaved, JobKey, TransitionSaved

HOUR_US = policy.HOUR_US
START_US = 1_800_000_000_000_000
OPERATOR = "root"


def job(name: str) -> JobKey:
    return JobKey("local", "ann", name, 1)


def seen(source: str, code: str, episode: str = "job:local/ann/t1.1", at_h: float = 0.0, **fields: object) -> Evidence:
    """Evidence about GPU-b on node n1, `at_h` hours after the start."""
    values: dict[str, object] = {"kind": "device", "subject": "GPU-b", "text": f"{source} {code}", "node": "n1", **fields}
    at_us = START_US + int(at_h * HOUR_US)
    return Evidence(source=source, code=code, episode=episode, at_us=at_us, **values)  # type: ignore[arg-type]


class History:
    """One device's machine under a clock that the test moves."""

    def __init__(self, its_policy: policy.Policy | None = None, kind: str = "device", subject: str = "GPU-b") -> None:
        self.policy = its_policy or policy.built_in()
        self.dossier: Dossier = clear_dossier(kind, subject)
        self.now_us = START_US
        self.changes: list[TransitionSaved] = []
        self.num_rows = 0

    @property
    def state(self) -> str:
        return self.dossier.saved.state

    def see(self, evidence: Evidence, effect: str = "counted") -> str:
        """The state after it."""
        self.now_us = max(self.now_us, evidence.at_us)
        return self._feed(Sighted(evidence, effect))

    def wait(self, hours: float) -> str:
        self.now_us += int(hours * HOUR_US)
        return self._feed(TimePassed())

    def feed(self, event: object) -> str:
        return self._feed(event)

    def _feed(self, event: object) -> str:
        self.dossier, rows = decide(self.dossier, event, self.policy, self.now_us)  # type: ignore[arg-type]
        self.num_rows += len(rows)
        self.changes += [row for row in rows if isinstance(row, TransitionSaved)]
        return self.state

    def ask(self, verb: str, reason: str = "because", **fields: object) -> Verdict:
        values: dict[str, object] = {"principal": OPERATOR, "is_operator": True, **fields}
        saved = self.dossier.saved
        request = VerbRequest(kind=saved.kind, subject=saved.subject, verb=verb, reason=reason, **values)  # type: ignore[arg-type]
        verdict = ask(self.dossier, request, self.changes[-1] if self.changes else None, self.policy, self.now_us)
        if not request.dry_run:
            self.dossier = verdict.dossier
            self.changes += [row for row in verdict.rows if isinstance(row, TransitionSaved)]
        return verdict


def sighting_of(row: EvidenceSaved) -> Evidence:
    """The sighting that a stored row stands for."""
    return Evidence(
        kind=row.kind,
        subject=row.subject,
        source=row.source,
        code=row.code,
        episode=row.episode,
        at_us=row.last_us,
        text=row.text,
        count=row.count,
        is_total=True,
        serial=row.serial,
        node=row.node,
        job=row.job,
        attempt=row.attempt,
        rank=row.rank,
        iteration=row.iteration,
        case_id=row.case_id,
        principal=row.principal,
        injected=row.injected,
        share=row.share,
    )
