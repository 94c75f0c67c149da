"""The numbers of trainings in the store: one curve over restarts, of bounded length, the same in both databases."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from store_story import holder, job_key, saved

from rsup.supervisor import metric_rows, store_merge, tables
from rsup.supervisor.database import reader_engine
from rsup.supervisor.metric_rows import MAX_POINTS, MAX_THINNED_AT_ONCE
from rsup.supervisor.metric_views import latest_of, series_of
from rsup.supervisor.records import MetricsSaved, Record, StragglerSaved
from rsup.supervisor.retention import DAY_US, Limits
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreError
from rsup.supervisor.wire import MAX_BIN_COUNT, MAX_METRICS_A_KIND, MetricBin, thinned

KEY = job_key()


def told(
    first: int, last: int, *, attempt: int = 1, rank: int = 0, kind: str = "training", entry: int = 0, **values: Any
) -> MetricsSaved:
    """A value of each iteration from `first` to `last`: a function of it, or its square root where none is given."""
    functions = values or {"lm_loss": math.sqrt}
    series = {
        name: [MetricBin.of(i, 1000 * attempt + i, 8 * i, function(i)) for i in range(first, last + 1)]
        for name, function in functions.items()
    }
    return MetricsSaved(KEY, attempt, rank, kind, series, entry)


@pytest.fixture
def store(open_store: Any, sql_target: Path | str) -> SqlStore:
    opened: SqlStore = open_store(sql_target)
    opened.commit([saved(KEY)])
    return opened


def curve(target: Path | str, name: str = "lm_loss", points: int = MAX_POINTS, **of: Any) -> list[list[Any]]:
    """The points of a series; none where there is no such series."""
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = series_of(connection, _job(connection), [name], max_points=points, **of)
    engine.dispose()
    return found[name]["points"] if found else []


def newest(target: Path | str) -> dict[str, Any]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = latest_of(connection, _job(connection))
    engine.dispose()
    return found


def rows(target: Path | str, table: Any) -> list[Any]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = list(connection.execute(select(table).order_by(*table.primary_key)).mappings())
    engine.dispose()
    return found


def _job(connection: Any) -> int:
    return int(connection.execute(select(tables.jobs.c.id).where(tables.jobs.c.job_id == KEY.job_id)).scalar())


def iterations(points: list[list[Any]]) -> list[int]:
    return [point[0] for point in points]


def test_a_run_that_was_interrupted_has_the_curve_of_one_that_was_not(store: SqlStore, sql_target: Path | str) -> None:
    store.commit([told(1, 40), told(1, 40, lr=float)])
    store.commit([told(41, 57, lm_loss=lambda i: 0.0)])  # what the resume from 40 does again
    store.commit([told(41, 60, attempt=2)])
    store.commit([told(61, 80, attempt=2)])
    found = curve(sql_target)
    assert iterations(found) == list(range(1, 81))
    assert [point[2] for point in found] == [math.sqrt(i) for i in range(1, 81)]
    assert iterations(curve(sql_target, "lr")) == list(range(1, 41)), "only the series that is told again"
    value = newest(sql_target)["training"]
    assert (value["lm_loss"]["iteration"], value["lm_loss"]["value"]) == (80, math.sqrt(80))
    assert value["lr"]["value"] == 40.0
    store.commit([told(31, 33, attempt=2)])  # an in-process restart goes back within the attempt
    assert iterations(curve(sql_target)) == list(range(1, 34)) and newest(sql_target)["training"]["lm_loss"]["iteration"] == 33


def test_a_new_supervisor_goes_on_where_the_series_ends(store: SqlStore, sql_target: Path | str, open_store: Any) -> None:
    store.commit([told(1, 30)])
    store.close()
    again = open_store(sql_target)
    again.commit([told(21, 25, attempt=2)])
    assert iterations(curve(sql_target)) == list(range(1, 26))
    (row,) = rows(sql_target, tables.metric_series)
    assert row["num_points"] == 25 and row["total"] == pytest.approx(sum(map(math.sqrt, [*range(1, 31), *range(21, 26)])))


def test_what_fails_leaves_no_trace_in_memory(store: SqlStore, sql_target: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit([told(1, 10)])
    broken = StragglerSaved(*(KEY, 1, 1, 0, "d", "n", "s", 1, 1, 1, 1, 1, 1.0, 1.0), verdict=object())  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        store.commit([told(11, 20), broken])
    assert iterations(curve(sql_target)) == list(range(1, 11))
    store.commit([told(11, 20)])
    store.commit([told(11, 20)])  # a transaction that is done twice
    (row,) = rows(sql_target, tables.metric_series)
    assert iterations(curve(sql_target)) == list(range(1, 21)) and row["num_points"] == 20


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """The bound of a series, made small."""
    monkeypatch.setattr(metric_rows, "MAX_POINTS", 400)
    return 400


def test_a_long_series_is_thinned_evenly_and_keeps_its_extremes(store: SqlStore, sql_target: Path | str, short: int) -> None:
    dice = random.Random(5)
    spike = dice.randrange(400, 1200)

    def value(iteration: int) -> float:
        return 1000.0 if iteration == spike else -50.0 if iteration == 177 else float(iteration % 7)

    for first in range(1, 2001, 50):
        store.commit([told(first, first + 49, lm_loss=value)])
    (row,) = rows(sql_target, tables.metric_series)
    points = rows(sql_target, tables.metric_points)
    assert short // 4 < len(points) <= short and row["num_points"] == len(points)
    assert sum(point["count"] for point in points) == 2000 and points[-1]["iteration"] == 2000
    assert all(one["iteration"] < two["first"] for one, two in itertools.pairwise(points))
    found = curve(sql_target, points=100)
    assert 25 <= len(found) <= 100 and max(p[4] for p in found) == 1000.0 and min(p[3] for p in found) == -50.0
    widths = [two - one for one, two in itertools.pairwise(iterations(found))]
    assert len(set(widths[:-1])) == 1, "equally fine all along"
    assert newest(sql_target)["training"]["lm_loss"]["value"] == value(2000)


def test_many_series_are_thinned_a_few_at_a_time(store: SqlStore, sql_target: Path | str, short: int) -> None:
    names: dict[str, Any] = {f"s{n}": float for n in range(MAX_THINNED_AT_ONCE + 2)}
    store.commit([told(1, 401, **names)])
    longer = [row for row in rows(sql_target, tables.metric_series) if row["num_points"] > short]
    assert len(longer) == 2
    store.commit([told(1, 1, another=float)])
    assert all(row["num_points"] <= short for row in rows(sql_target, tables.metric_series)), "also if they are not told again"


def test_the_longest_come_first_and_none_grows_without_end(
    store: SqlStore, sql_target: Path | str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {f"s{n}": float for n in range(5)}
    monkeypatch.setattr(metric_rows, "MAX_THINNED_AT_ONCE", 0)  # as if a flood left no time
    store.commit([told(1, 450, **names)])
    store.commit([told(451, 500, s4=float)])
    for first in range(501, 1001, 100):
        store.commit([told(first, first + 99, s3=float, s4=lambda i: -5.0 if i == 950 else float(i))])
    lengths = {row["name"]: row["num_points"] for row in rows(sql_target, tables.metric_series)}
    assert lengths == {"s0": 450, "s1": 450, "s2": 450, "s3": 750, "s4": 800}
    assert len(rows(sql_target, tables.metric_points)) == sum(lengths.values()), "they are counted right"
    of_s4 = [row for row in rows(sql_target, tables.metric_points) if row["name"] == "s4"]
    last = of_s4[-1]
    assert (last["iteration"], last["low"], last["last"]) == (1000, -5.0, 1000.0), "nothing is lost but resolution"
    assert sum(row["count"] for row in of_s4) == 1000
    monkeypatch.setattr(metric_rows, "MAX_THINNED_AT_ONCE", 2)
    store.commit([told(1, 1, another=float)])
    assert {row["name"] for row in rows(sql_target, tables.metric_series) if row["num_points"] > short} == {"s0", "s1", "s2"}


def test_who_resumes_within_a_thinned_point_keeps_what_lies_before(store: SqlStore, sql_target: Path | str, short: int) -> None:
    store.commit([told(1, 401)])
    wide = rows(sql_target, tables.metric_points)[50]
    assert wide["count"] == wide["iteration"] - wide["first"] + 1 > 1
    middle = wide["first"] + 1
    store.commit([told(middle, middle + 1, attempt=2)])
    points = rows(sql_target, tables.metric_points)
    assert sum(point["count"] for point in points) == middle + 1
    assert [(one["first"], one["iteration"], one["count"]) for one in points[-3:]] == [
        (wide["first"], middle - 1, 1), (middle, middle, 1), (middle + 1, middle + 1, 1),
    ]  # fmt: skip
    assert rows(sql_target, tables.metric_series)[0]["num_points"] == len(points)


def test_numbers_at_the_edges_are_kept_and_read(store: SqlStore, sql_target: Path | str, short: int) -> None:
    many = [MetricBin(4 * i, 4 * i + 1, 1, 2**62 - 1, 1.0, 1.0, 1.0, 1.0, MAX_BIN_COUNT) for i in range(401)]
    store.commit([MetricsSaved(KEY, 1, 0, "training", {"x": many, "tiny": [MetricBin.of(1, 1, 1, 5e-324)]})])
    assert len(rows(sql_target, tables.metric_points)) < 401 and curve(sql_target, "x", points=1)[0][2] == 1.0
    assert max(row["count"] for row in rows(sql_target, tables.metric_points)) == MAX_BIN_COUNT
    assert curve(sql_target, "tiny")[0][2:5] == [0.0, 0.0, 0.0]


def test_what_is_not_finite_is_counted_and_leaves_a_gap(store: SqlStore, sql_target: Path | str) -> None:
    odd = {2: math.nan, 3: math.inf, 4: -math.inf}
    store.commit([told(1, 6, lm_loss=lambda i: odd.get(i, float(i)))])
    store.commit([told(7, 7, lm_loss=lambda i: math.nan)])
    assert [point[2:5] for point in curve(sql_target)] == [
        [1.0, 1.0, 1.0], [None, None, None], [None, None, None], [None, None, None], [5.0, 5.0, 5.0], [6.0, 6.0, 6.0],
        [None, None, None],
    ]  # fmt: skip
    assert newest(sql_target)["training"]["lm_loss"]["value"] is None
    (whole,) = curve(sql_target, points=1)
    assert whole == [7, 1007, 4.0, 1.0, 6.0, 1, 4]


def test_names_of_two_kinds_and_of_two_ranks(store: SqlStore, sql_target: Path | str) -> None:
    store.commit([told(1, 3, x=float), told(1, 3, kind="energy", x=lambda i: 100.0)])
    assert [p[2] for p in curve(sql_target, "x")] == [1.0, 2.0, 3.0] and curve(sql_target, "x", kind="energy")[0][2] == 100.0
    store.commit([told(2, 2, rank=1, x=lambda i: 9.0)])
    assert iterations(curve(sql_target, "x")) == [1, 2, 3], "a second teller goes nobody back"
    store.commit([told(4, 6, rank=1, x=lambda i: 9.0)])
    assert iterations(curve(sql_target, "x")) == [1, 2, 3] and newest(sql_target)["training"]["x"]["value"] == 3.0
    assert [row["total"] for row in rows(sql_target, tables.metric_series)] == [300.0, 6.0], "nor does it count twice"
    store.commit([told(2, 3, rank=1, entry=2, x=lambda i: 7.0)])  # a reserve has the place from this entry on
    store.commit([told(4, 4, rank=0, entry=1, x=lambda i: 9.0)])  # what the other still had to tell
    assert [p[:1] + p[2:3] for p in curve(sql_target, "x")] == [[1, 1.0], [2, 7.0], [3, 7.0]]
    many: dict[str, Any] = {f"n{i}": float for i in range(MAX_METRICS_A_KIND + 10)}
    store.commit([told(4, 4, rank=1, **many)])
    assert len(newest(sql_target)["training"]) == MAX_METRICS_A_KIND


def test_thinning_what_was_thinned_is_thinning_at_once() -> None:
    bins = [MetricBin.of(i, i, i, float(i)) for i in range(1, 1001)]
    twice, once = thinned(thinned(bins, 500), 100), thinned(bins, 100)
    assert [(b.first, b.iteration, b.count, b.low, b.high) for b in twice] == [
        (b.first, b.iteration, b.count, b.low, b.high) for b in once
    ]
    assert [b.value for b in twice] == pytest.approx([b.value for b in once])
    assert thinned(bins[:1], 1) == bins[:1] and thinned([], 5) == []


def test_merge_takes_the_newer_curve_as_a_whole_and_slow_ranks_along(tmp_path: Path, open_store: Any) -> None:
    episode = StragglerSaved(KEY, 1, 1, 2, "GPU-2", "n", "step", 1, 2, 1, 30, 3, 1.8, 0.5, text="slow")

    def ended(updated_us: int, *records: Record) -> list[Record]:
        return [saved(KEY, "ended", ended_us=5000, updated_us=updated_us), *records]

    store = open_store(tmp_path / "here.db")
    store.commit(ended(10, told(1, 50)))
    other = open_store(tmp_path / "there.db", holder=holder())
    other.commit(ended(20, told(1, 20, lm_loss=float), told(21, 30, attempt=2, lm_loss=float), episode))
    engine = reader_engine(tmp_path / "there.db")
    for _ in range(2):
        store_merge.merge(engine, store.change)
        found = curve(tmp_path / "here.db")
        assert [(p[0], p[2]) for p in found] == [(i, float(i)) for i in range(1, 31)]
        assert [row["text"] for row in rows(tmp_path / "here.db", tables.stragglers)] == ["slow"]
    engine.dispose()
    back = reader_engine(tmp_path / "here.db")
    other.commit(ended(30, told(1, 5, attempt=3)))
    store_merge.merge(back, other.change)
    back.dispose()
    assert iterations(curve(tmp_path / "there.db")) == [1, 2, 3, 4, 5], "older curves do not come into newer ones"


@pytest.mark.parametrize("newer_is_later", [True, False])
def test_a_store_that_holds_only_a_later_attempt_adds_to_the_curve(
    tmp_path: Path, open_store: Any, newer_is_later: bool
) -> None:
    early = [told(1, 100, lm_loss=float), told(1, 9, only_early=float)]
    late = [told(96, 150, attempt=2), told(96, 99, attempt=2, only_late=float)]
    here, there = (early, late) if newer_is_later else (late, early)
    store, other = open_store(tmp_path / "here.db"), open_store(tmp_path / "there.db", holder=holder())
    store.commit([saved(KEY, "ended", ended_us=5000, updated_us=10 if newer_is_later else 20), *here])
    other.commit([saved(KEY, "ended", ended_us=5000, updated_us=20 if newer_is_later else 10), *there])
    engine = reader_engine(tmp_path / "there.db")
    for _ in range(2):
        store_merge.merge(engine, store.change)
        found = curve(tmp_path / "here.db")
        assert [(p[0], p[2]) for p in found] == [(i, float(i) if i < 96 else math.sqrt(i)) for i in range(1, 151)]
        assert len(curve(tmp_path / "here.db", "only_early")) == 9 and len(curve(tmp_path / "here.db", "only_late")) == 4
        assert {row["name"]: row["num_points"] for row in rows(tmp_path / "here.db", tables.metric_series)} == {
            "lm_loss": 150, "only_early": 9, "only_late": 4,
        }  # fmt: skip
        assert newest(tmp_path / "here.db")["training"]["lm_loss"]["iteration"] == 150
    engine.dispose()


def test_old_curves_are_forgotten_and_their_last_values_stay(store: SqlStore, sql_target: Path | str) -> None:
    live = job_key("live")
    nine: dict[str, Any] = {f"s{n}": float for n in range(9)}
    store.commit([told(1, 50, **nine), saved(KEY, "ended", ended_us=DAY_US)])
    store.commit([saved(live), MetricsSaved(live, 1, 0, "training", {"x": [MetricBin.of(1, 1, 1, 1.0)]})])
    calls = 0
    while store.prune(100 * DAY_US, Limits(age_us=30 * DAY_US, batch_series=4)):
        calls += 1
        assert calls < 20
    assert calls >= 3 and len(rows(sql_target, tables.metric_points)) == 1
    assert newest(sql_target)["training"]["s3"]["value"] == 50.0
    engine = reader_engine(sql_target)
    with engine.connect() as connection:
        assert connection.execute(select(func.sum(tables.metric_series.c.num_points))).scalar() == 1
    engine.dispose()
