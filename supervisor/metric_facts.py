"""Numbers of the training that ranks tell: kept, and no decision follows from them. Pure; `job_machine.FACTS` names it."""

from rsup.supervisor.records import MetricsSaved
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    MAX_BIN_COUNT,
    MAX_METRIC_NAME_BYTES,
    MAX_METRICS_A_KIND,
    METRIC_KINDS,
    MetricBin,
    MetricsReported,
)

MAX_BINS = 1024
"""Of all series in one fact: a rank sends less."""
LAST_US = 253_402_300_799_000_000
"""The end of the year 9999: no later time can be shown."""


def metrics_reported(turn: Turn, agent_id: str, fact: MetricsReported) -> None:
    """Keep what is well formed."""
    if fact.kind not in METRIC_KINDS:
        return
    good = [(name, bins) for name, bins in fact.series.items() if bins and _is_good(name) and all(map(_is_sound, bins))]
    good = good[:MAX_METRICS_A_KIND]
    if good:
        most = MAX_BINS // len(good)
        series = {name: bins[-most:] for name, bins in good}
        turn.record(MetricsSaved(turn.state.key, fact.attempt, fact.rank, fact.kind, series, max(0, fact.entry)))


def _is_good(name: str) -> bool:
    return 0 < len(name.encode("utf-8", "replace")) <= MAX_METRIC_NAME_BYTES and name.isprintable()


def _is_sound(one: MetricBin) -> bool:
    is_counted = 0 < one.count <= min(MAX_BIN_COUNT, one.iteration - one.first + 1) and 0 <= one.num_non_finite <= one.count
    return is_counted and 0 <= one.first <= one.iteration and 0 <= one.at_us <= LAST_US and one.consumed_samples >= 0
