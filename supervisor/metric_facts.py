"""Numbers of the training that ranks tell: kept, and no decision follows from them. Pure; `job_machine.FACTS` names it."""

from rsup.supervisor.records import MetricsSaved
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import MAX_METRIC_NAME_BYTES, MAX_METRICS_A_KIND, METRIC_KINDS, MetricBin, MetricsReported

MAX_BINS = 1024
"""Of one series in one fact: a rank sends less."""


def metrics_reported(turn: Turn, agent_id: str, fact: MetricsReported) -> None:
    """Keep what is well formed."""
    if fact.kind not in METRIC_KINDS:
        return
    series = {name: bins[-MAX_BINS:] for name, bins in fact.series.items() if _is_good(name) and all(map(_is_sound, bins))}
    if series:
        series = dict(list(series.items())[:MAX_METRICS_A_KIND])
        turn.record(MetricsSaved(turn.state.key, fact.attempt, fact.rank, fact.kind, series))


def _is_good(name: str) -> bool:
    return 0 < len(name.encode()) <= MAX_METRIC_NAME_BYTES and name.isprintable()


def _is_sound(one: MetricBin) -> bool:
    return 0 <= one.first <= one.iteration and one.count > 0 and 0 <= one.num_non_finite <= one.count and one.at_us >= 0
