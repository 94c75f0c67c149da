"""What `/metrics` says of a live job's training: the newest value of each of its series, as the ranks told them.

Gauges, but for what counts up over the job. An iteration is never a label: a series of Prometheus is one of the job's.
"""

import math
from collections.abc import Mapping, Sequence

from sqlalchemy import RowMapping

from rsup.supervisor.metrics import Labels, Metric
from rsup.supervisor.training_views import machine_state

COUNTED = {"skipped-iterations": "skipped_iterations", "nan-iterations": "nan_iterations"}
"""Series of which each value counts what was new since the one before: shown as totals, which never fall within a job."""


def value_metrics(rows: Sequence[RowMapping], values: Mapping[int, Sequence[RowMapping]]) -> list[Metric]:
    """Families for live jobs: `rows` of `jobs`, and by their id the rows of `metric_series` (`metric_views.live_values`)."""
    gauges: list[tuple[Labels, float]] = []
    totals: dict[str, list[tuple[Labels, float]]] = {name: [] for name in COUNTED}
    slow: list[tuple[Labels, float]] = []
    for row in rows:
        label = {"cluster": row["cluster"], "owner": row["owner"], "id": row["job_id"], "run": str(row["run"])}
        for one in values.get(row["id"], ()):
            if one["name"] in COUNTED:
                totals[one["name"]].append((label, one["total"]))
            else:
                value = math.nan if one["value"] is None else one["value"]
                gauges.append(({**label, "kind": one["kind"], "name": one["name"]}, value))
        state = machine_state(row["state"])
        if state is not None and state.stragglers.num_reports:
            slow.append((label, len(state.stragglers.open)))
    return [
        Metric("rsup_job_metric", "gauge", "Newest value that a live job's ranks told of a series, NaN if not finite.", gauges),
        Metric("rsup_job_skipped_iterations_total", "counter", "Iterations without an update.", totals["skipped-iterations"]),
        Metric("rsup_job_nan_iterations_total", "counter", "Iterations with a non-finite loss.", totals["nan-iterations"]),
        Metric("rsup_job_stragglers", "gauge", "Ranks that hold a live job's others up now.", slow),
    ]
