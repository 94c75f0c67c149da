"""What `/metrics` says, in Prometheus' text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/).

`store_metrics` counts rows, `live_metrics` adds what only the running supervisor knows, `job_metrics` and `training_metrics`
say for each live job what its owner may see; `render` makes the text. Series of single jobs exist only while these live.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from rsup.supervisor.states import Phase
from rsup.supervisor.tables import attempts, events, evidence, incidents, jobs, subjects

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = tuple(phase.value for phase in Phase)
SEVERITIES = {"watch": "info", "probation": "info", "suspect": "warning", "retired": "info"} | dict.fromkeys(
    ("quarantined", "in_repair"), "critical"
)
INCIDENT_KINDS = ("exit", "signal", "hang", "suspected-hang", "agent-lost", "start-failed", "in-process")

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """One metric family. `kind` is `counter` or `gauge`; a sample is (labels, value)."""

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[Labels, float]]


def render(metrics: Iterable[Metric]) -> str:
    """The text that Prometheus reads. Families without samples are left out."""
    lines = []
    for metric in metrics:
        if not metric.samples:
            continue
        lines += [f"# HELP {metric.name} {_escape(metric.text)}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{_labels(labels)} {_number(value)}" for labels, value in metric.samples]
    return "\n".join(lines) + "\n"


def store_metrics(connection: Connection) -> list[Metric]:
    """Counts over the whole store: jobs by state, attempts, restarts, incidents by kind, events, ranks of live jobs."""
    by_phase = dict.fromkeys(PHASES, 0) | _pairs(connection, select(jobs.c.phase, func.count()).group_by(jobs.c.phase))
    by_kind = dict.fromkeys(INCIDENT_KINDS, 0)
    by_kind |= _pairs(connection, select(incidents.c.kind, func.count()).group_by(incidents.c.kind))
    num_attempts = _one(connection, select(func.count()).select_from(attempts))
    num_restarts = _one(connection, select(func.count()).select_from(attempts).where(attempts.c.attempt > 1))
    newest = select(func.max(events.c.number).label("number")).group_by(events.c.job).subquery()
    num_events = _one(connection, select(func.sum(newest.c.number)))
    num_ranks = _one(connection, select(func.sum(jobs.c.num_ranks)).where(jobs.c.phase != "ended"))
    return [
        Metric("rsup_jobs", "gauge", "Jobs in the store by state.", _by("state", by_phase)),
        Metric("rsup_ranks", "gauge", "Ranks of all jobs that have not ended.", [({}, num_ranks)]),
        Metric("rsup_attempts_total", "counter", "Attempts of all jobs in the store.", [({}, num_attempts)]),
        Metric("rsup_restarts_total", "counter", "Attempts after the first of their job.", [({}, num_restarts)]),
        Metric("rsup_incidents_total", "counter", "Incidents of all jobs in the store by kind.", _by("kind", by_kind)),
        Metric("rsup_events_total", "counter", "Events recorded of all jobs in the store.", [({}, num_events)]),
    ]


def hardware_metrics(connection: Connection) -> list[Metric]:
    """Devices and nodes by state and rule, and evidence by source; computed from the store, so that nothing can drift."""
    of = subjects.c
    open_ones = select(of.kind, of.state, of.rule, func.count()).where(of.state != "clear").group_by(of.kind, of.state, of.rule)
    cases = [
        ({"kind": kind, "state": state, "severity": SEVERITIES.get(state, "info"), "rule": rule.rpartition("/")[2]}, count)
        for kind, state, rule, count in connection.execute(open_ones)
    ]
    by_source = _pairs(connection, select(evidence.c.source, func.sum(evidence.c["count"])).group_by(evidence.c.source))
    return [
        Metric("rsup_device_cases", "gauge", "Devices and nodes that are not clear, by state and rule.", cases),
        Metric("rsup_evidence_total", "counter", "Sightings about devices and nodes by source.", _by("source", by_source)),
    ]


def live_metrics(
    release: str, beat_ages_s: Sequence[float], loop_age_s: float, counters: Mapping[str, float], is_ready: bool
) -> list[Metric]:
    """What the running supervisor knows. `counters` maps names without `rsup_` to values (dropped and bad messages, commit
    latency, ...); those that end in `_total` are counters, the others gauges."""
    oldest = max(beat_ages_s, default=0.0)
    metrics = [
        Metric("rsup_up", "gauge", "1 while the supervisor runs, with its release.", [({"release": release}, 1)]),
        Metric("rsup_ready", "gauge", "1 while the supervisor decides, as /readyz says; else 0.", [({}, int(is_ready))]),
        Metric("rsup_beat_age_seconds_max", "gauge", "Age of the oldest beat of all running ranks.", [({}, oldest)]),
        Metric("rsup_loop_age_seconds", "gauge", "Time since the supervisor's loop last turned.", [({}, loop_age_s)]),
    ]
    for name, value in sorted(counters.items()):
        full = "rsup_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        kind = "counter" if full.endswith("_total") else "gauge"
        metrics.append(Metric(full, kind, f"{name.replace('_', ' ')} of this supervisor process.", [({}, value)]))
    return metrics


def job_metrics(live_jobs: Sequence[Mapping[str, Any]], beat_ages_s: Mapping[str, Sequence[float]]) -> list[Metric]:
    """One series for each of `live_jobs` (`views.job_fields`); `beat_ages_s` by `cluster/owner/name`."""
    labels = [{name: str(job[name]) for name in ("cluster", "owner", "id", "run")} for job in live_jobs]
    named = list(zip(labels, live_jobs, strict=True))
    ages = [(label, max(beat_ages_s.get(job_label(job), ()), default=None)) for label, job in named]
    return [
        Metric("rsup_job_iteration", "gauge", "Iteration of a live job.", [(label, job["iteration"]) for label, job in named]),
        Metric("rsup_job_attempt", "gauge", "Attempt of a live job.", [(label, job["attempt"]) for label, job in named]),
        Metric("rsup_job_ranks", "gauge", "Ranks of a live job.", [(label, job["num_ranks"]) for label, job in named]),
        Metric(
            "rsup_job_beat_age_seconds_max",
            "gauge",
            "Age of the oldest beat of a live job's ranks.",
            [(label, age) for label, age in ages if age is not None],
        ),
    ]


def training_metrics(found: Sequence[tuple[RowMapping, Mapping[str, Any]]]) -> list[Metric]:
    """Where the time of each live job went, and what it stands to lose; `found` is from `training_views.live_training`. What
    is unknown has no sample."""
    labels = [
        {"cluster": row["cluster"], "owner": row["owner"], "id": row["job_id"], "run": str(row["run"])} for row, _ in found
    ]
    named = list(zip(labels, (training for _, training in found), strict=True))
    parts = [
        ({**label, "part": part}, took_s)
        for label, training in named
        for part, took_s in training["goodput"]["parts"].items()
        if took_s is not None
    ]

    def one(name: str, text: str, value: Callable[[Mapping[str, Any]], float | None]) -> Metric:
        samples = [(label, value(training)) for label, training in named]
        return Metric(name, "gauge", text, [(label, number) for label, number in samples if number is not None])

    return [
        Metric("rsup_job_goodput_seconds", "gauge", "Wall time of a live job by what it went into; all parts add up.", parts),
        one("rsup_job_goodput_ratio", "Productive time of a live job over its wall time.", lambda t: t["goodput"]["ratio"]),
        one("rsup_job_at_risk_iterations", "Iterations since the newest durable checkpoint.", _field("at_risk", "iterations")),
        one("rsup_job_at_risk_seconds", "About how long these iterations took.", _field("at_risk", "about_s")),
        one("rsup_job_checkpoint_iteration", "Iteration of the newest durable checkpoint.", _field("durable", "iteration")),
        one("rsup_job_local_checkpoint_iteration", "Iteration of the newest local one.", _field("local", "iteration")),
        one("rsup_job_save_seconds", "How long a save has been under way.", _field("saving", "for_s")),
        one("rsup_job_saves_failed", "Saves of a live job that have failed.", _field("saves", "failed")),
        one("rsup_job_in_process_restarts", "In-process restarts of the attempt.", lambda t: t["in_process_restarts"]),
    ]


def _field(name: str, field: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads a field of `work`, None where there is none."""

    def read(training: Mapping[str, Any]) -> float | None:
        found = training["work"][name]
        return None if found is None else found[field]

    return read


def job_label(job: Mapping[str, Any]) -> str:
    """`cluster/owner/name` of `views.job_fields`: one text for one run of a job."""
    return f"{job['cluster']}/{job['owner']}/{job['name']}"


def _by(label: str, counts: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({label: name}, count) for name, count in counts.items()]


def _pairs(connection: Connection, query: Any) -> dict[str, int]:
    rows: Iterable[Any] = connection.execute(query)
    return {row[0]: row[1] for row in rows}


def _one(connection: Connection, query: Any) -> float:
    return float(connection.execute(query).scalar() or 0)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value, quote=True)}"' for name, value in labels.items()) + "}"


def _escape(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
