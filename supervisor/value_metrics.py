"""What `/metrics` says of a live job's training: the newest value of each of its series, as the ranks told them.

Gauges, but for what counts up over the job. An iteration is never a label: a series of Prometheus is one of the job's.
"""

import math
from collections.abc import Mapping, Sequence

from sqlalchemy import RowMapping

from rsup.supervisor.metric_views import COUNTED
from rsup.supervisor.metrics import Labels, Metric
from rsup.supervisor.states import JobState
from rsup.supervisor.straggler_views import open_now


def value_metrics(
    jobs: Sequence[tuple[RowMapping, JobState | None]],
    values: Mapping[int, Sequence[RowMapping]],
    left_out: Mapping[int, int],
    now_us: int,
) -> list[Metric]:
    """Families for live jobs: `jobs` with their rows, and by their id what `metric_views.live_values` gives. What counts up is
    shown as totals, which never fall within a job."""
    gauges: list[tuple[Labels, float]] = []
    totals: dict[str, list[tuple[Labels, float]]] = {name: [] for name in COUNTED}
    slow: list[tuple[Labels, float]] = []
    without: list[tuple[Labels, float]] = []
    for row, state in jobs:
        label = {"cluster": row["cluster"], "owner": row["owner"], "id": row["job_id"], "run": str(row["run"])}
        for one in values.get(row["id"], ()):
            if one["name"] in COUNTED:
                totals[one["name"]].append((label, one["total"]))
            else:
                value = math.nan if one["value"] is None else one["value"]
                gauges.append(({**label, "kind": one["kind"], "name": one["name"]}, value))
        if num := left_out.get(row["id"]):
            without.append((label, num))
        if state is not None and state.stragglers.num_reports:
            slow.append((label, len(open_now(state, now_us))))
    return [
        Metric("rsup_job_metric", "gauge", "Newest value that a live job's ranks told of a series, NaN if not finite.", gauges),
        Metric("rsup_job_metrics_left_out", "gauge", "Series of a live job that had no room in rsup_job_metric.", without),
        Metric("rsup_job_skipped_iterations_total", "counter", "Iterations without an update.", totals["skipped-iterations"]),
        Metric("rsup_job_nan_iterations_total", "counter", "Iterations with a non-finite loss.", totals["nan-iterations"]),
        Metric("rsup_job_stragglers", "gauge", "Ranks that hold a live job's others up now.", slow),
    ]
