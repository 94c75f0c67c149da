"""A job's curves and slow ranks over REST, on `/metrics`, in `rsup status`, `rsup stragglers` and on the page."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rsup.launcher import cli
from rsup.supervisor import metric_views
from rsup.supervisor.curve_points import points_of
from rsup.supervisor.curve_text import curve_lines, sparkline, time_bar
from rsup.supervisor.job_name import JobName
from rsup.supervisor.records import JobKey, MetricsSaved, StragglerSaved
from rsup.supervisor.render import width_of
from rsup.supervisor.rest.context import Change
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import JobState, Phase, Stragglers, encode
from rsup.supervisor.status_text import status_text
from rsup.supervisor.straggler_views import open_now
from rsup.supervisor.value_metrics import value_metrics
from rsup.supervisor.wire import JobSpec, MetricBin, now_us
from tests.rest.played import PlayedSupervisor, Served
from tests.rest.story import T1, at, saved
from tests.rest.test_page import CHROMIUM, dom_of, part, signed_in

LIVE = JobKey("local", "bob", "trains", 1)
NAME = "lm loss"
EVIL_NAME = "<b>x</b>"


def bins(values: dict[int, float]) -> list[MetricBin]:
    return [MetricBin.of(i, at(i), 8 * i, value) for i, value in values.items()]


def metrics_of(job: JobKey) -> list[MetricsSaved]:
    """A loss that falls, with a NaN; a step time; what counts up; an evaluation; memory."""
    loss = {i: 5 / math.sqrt(i) if i != 40 else math.nan for i in range(1, 101)}
    training = {
        NAME: bins(loss),
        "iteration-time": bins({i: 0.1 + (i % 10) / 100 for i in range(1, 101)}),
        "skipped-iterations": bins({20: 1.0, 40: 0.0, 60: 2.0}),
        "grad-norm": bins({100: math.inf}),
        EVIL_NAME: bins({1: 2.0}),
    }
    return [
        MetricsSaved(job, 1, 0, "training", training),
        MetricsSaved(job, 1, 0, "validation", {f"{NAME} validation": bins({50: 2.0, 100: 1.0})}),
        MetricsSaved(job, 1, 0, "memory", {"mem-allocated-bytes": bins({100: 1e9})}),
    ]


@pytest.fixture
def training(story: SqlStore) -> SqlStore:
    """The story, and a live job of bob's with numbers and a rank that is slow."""
    slow = StragglerSaved(
        *(LIVE, 1, 1, 3, "GPU-d", "n2", "forward-compute", at(5), at(9), 50, 90, 4, 1.83, 0.6),
        cause="thermal", text="rank 3 (GPU-d, n2) 1.8x slower", verdict="independent episode 1 of 2",
    )  # fmt: skip
    over = StragglerSaved(*(LIVE, 2, 1, 2, "GPU-c", "n2", "data", at(5), at(6), 50, 60, 3, 1.5, 0.9), to_us=at(8), cause="data")
    state = JobState(
        key=LIVE, spec=JobSpec(), created_us=at(0), phase=Phase.RUNNING, attempt=1, switches={"stragglers": True},
        stragglers=Stragglers(attempt=1, num_reports=9, open=[replace(slow, seen_us=now_us())], num_episodes=2),
    )  # fmt: skip
    row = replace(saved(LIVE, "running"), state=encode(state))
    story.commit([row, *metrics_of(LIVE), slow, over, *metrics_of(T1)])
    return story


@pytest.fixture
def serving(training: SqlStore, serve: Callable[[], Served]) -> Served:
    return serve()


def test_curves_and_newest_values(serving: Served) -> None:
    client = serving.client()
    found = client.get("/api/v1/jobs/trains/metrics", params={"points": 25}).json()
    loss = found["series"][NAME]
    assert loss["kind"] == "training" and loss["num_non_finite"] == 1 and len(loss["points"]) <= 25
    iteration, at_us, value, low, high, first, bad = loss["points"][-1]
    assert (first, bad) == (96, 0) and sum(point[6] for point in loss["points"]) == 1 and loss["holes"] == []
    assert loss["newest"] == {"value": 0.5, "iteration": 100} and value > 0.5, "the last point is a mean"
    assert (iteration, at_us, low) == (100, at(100), pytest.approx(0.5)) and low <= value <= high
    assert found["latest"]["training"][NAME] == {"value": 0.5, "iteration": 100, "at": "2025-11-29T21:01:40.000000Z"}
    assert found["latest"]["training"]["grad-norm"]["value"] is None
    whole = client.get("/api/v1/jobs/trains/metrics", params={"name": [NAME, "grad-norm"], "points": 2000}).json()["series"]
    assert set(whole) == {NAME, "grad-norm"} and len(whole[NAME]["points"]) == 100 and whole[NAME]["points"][39][2] is None
    of_kind = client.get("/api/v1/jobs/trains/metrics?kind=validation").json()["series"]
    assert [point[2] for point in of_kind[f"{NAME} validation"]["points"]] == [2.0, 1.0] and len(of_kind) == 1
    for bad in ("points=0", "points=2001", "points=x", f"name={'x' * 65}", "kind=bogus"):
        assert client.get(f"/api/v1/jobs/trains/metrics?{bad}").status_code == 422, bad


def test_slow_ranks_and_the_switch(serving: Served, played: PlayedSupervisor) -> None:
    client = serving.client()
    found = client.get("/api/v1/jobs/trains/stragglers").json()
    assert (found["switched"], found["num_reports"], found["num_episodes"]) == (True, 9, 2)
    assert [(one["rank"], one["goes_on"], one["cause"]) for one in found["episodes"]] == [
        (3, True, "thermal"), (2, False, "data"),
    ]  # fmt: skip
    for on, kind in ((True, "stragglers-on"), (False, "stragglers-off")):
        answer = client.post("/api/v1/jobs/trains/stragglers", json={"on": on, "reason": "why"})
        assert answer.status_code == 202 and answer.json()["verb"] == "stragglers"
        asked: Change = played.changes[-1]
        assert (asked.verb, asked.job, asked.reason) == (kind, LIVE, "why")
    assert client.post("/api/v1/jobs/trains/stragglers", json={}).status_code == 422
    ended = client.post("/api/v1/jobs/t1/stragglers", json={"on": True})
    assert ended.status_code == 409 and "nothing to switch" in ended.json()["detail"]
    other = serving.client("user")
    for path in ("metrics", "stragglers"):
        refused = other.get(f"/api/v1/jobs/trains/{path}?owner=bob")
        assert refused.status_code == 403 and "only its owner and operators" in refused.json()["detail"]


def test_many_series_share_what_an_answer_holds(serving: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serving.client()
    monkeypatch.setattr(metric_views, "MAX_POINTS_IN_ALL", 100)
    found = client.get("/api/v1/jobs/trains/metrics", params={"points": 2000}).json()["series"]
    assert len(found) == 7 and all(len(one["points"]) <= 100 // 7 for one in found.values())
    assert [point[2] for point in found["skipped-iterations"]["points"]] == [1.0, 0.0, 2.0], "each at its own width"
    assert found[NAME]["points"][-1][:2] == [100, at(100)] and found[NAME]["num_non_finite"] == 1
    one = client.get("/api/v1/jobs/trains/metrics", params={"name": NAME, "points": 2000}).json()["series"][NAME]
    assert len(one["points"]) == 100
    monkeypatch.setattr(metric_views, "MAX_VALUES", 3)
    text = client.get("/metrics").text
    shown = [line for line in text.splitlines() if line.startswith("rsup_job_metric{")]
    num_live = len(sample(text, "rsup_job_attempt"))
    assert len(shown) + 1 == max(1, 3 // num_live), "what counts up comes first"
    assert sample(text, "rsup_job_metrics_left_out", 'id="trains"') == [str(7 - len(shown) - 1)]


def test_a_slow_rank_of_whom_nobody_tells_is_not_slow_now(training: SqlStore) -> None:
    def state(**more: Any) -> JobState:
        slow = StragglerSaved(*(LIVE, 1, 1, 3, "GPU-d", "n2", "step", at(0), at(912), 50, 90, 4, 1.83, 0.6))
        known = Stragglers(attempt=1, num_reports=9, open=[slow], num_episodes=1)
        values = {"phase": Phase.RUNNING, "attempt": 1, "stragglers": known, **more}
        return JobState(key=LIVE, spec=JobSpec(), created_us=at(0), **values)

    def seen(one: JobState, now: int) -> tuple[list[int], list[float]]:
        family = value_metrics([(ROW, one)], {}, {}, at(now))[-1]
        return [episode.rank for episode in open_now(one, at(now))], [value for _, value in family.samples]

    assert seen(state(), 913) == ([3], [1.0])
    assert seen(state(), 912 + 1820) == ([3], [1.0]), "a report came every 304 s"
    assert seen(state(), 912 + 1830) == ([], [0.0])
    assert seen(state(attempt=2), 901) == ([], [0.0])
    assert seen(state(switches={"stragglers": False}), 901) == ([], [0.0])
    assert seen(state(phase=Phase.ENDED), 901)[0] == []


ROW: Any = {"id": 1, "cluster": "local", "owner": "bob", "job_id": "trains", "run": 1}


def sample(text: str, name: str, *labels: str) -> list[str]:
    """The values of the samples of that metric with these labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return [line.rpartition(" ")[2] for line in lines if all(label in line for label in labels)]


def test_prometheus_reads_gauges_and_counters(serving: Served) -> None:
    text = serving.client().get("/metrics").text
    assert sample(text, "rsup_job_metric", 'id="trains"', f'name="{NAME}"', 'kind="training"') == ["0.5"]
    assert sample(text, "rsup_job_metric", 'name="grad-norm"') == ["nan"]
    assert sample(text, "rsup_job_skipped_iterations_total", 'id="trains"') == ["3"]
    assert "# TYPE rsup_job_skipped_iterations_total counter" in text and "# TYPE rsup_job_metric gauge" in text
    assert sample(text, "rsup_job_stragglers", 'id="trains"') == ["1"]
    assert 'name="skipped-iterations"' not in text and 'id="t1"' not in text and 'iteration="' not in text
    assert not sample(serving.client("user").get("/metrics").text, "rsup_job_metric")


def test_status_draws_curves_and_where_the_time_went(serving: Served) -> None:
    status = serving.client().get("/api/v1/jobs/trains").json()
    assert [one["name"] for one in status["curves"]] == [NAME, "iteration-time", "grad-norm"]
    text = status_text(status)
    (line,) = [line for line in text.splitlines() if line.startswith(NAME)]
    assert re.search(r"█▅.*▁  0\.5, 0\.5 to 5 in iterations 1 to 100, 1 not finite$", line), line
    assert "straggler: rank 3 (GPU-d, n2) 1.8x slower (since iteration 50)" in text
    assert "not finite" in next(line for line in text.splitlines() if line.startswith("grad-norm"))
    ended = status_text(serving.client().get("/api/v1/jobs/t1").json())
    bar = next(line for line in ended.splitlines() if line.startswith("░█") or line.startswith("█"))
    assert set(bar) <= set("█▓▒░-") and width_of(bar) <= 60
    assert re.search(r"^█ training that was kept +", ended, re.MULTILINE), ended
    older = {name: value for name, value in status.items() if name not in ("curves", "stragglers", "metrics")}
    assert "lm loss" not in status_text(older), "an older supervisor's status"


def test_stragglers_verb(
    training: SqlStore, announced: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["stragglers", "trains"]) == 0
    out = capsys.readouterr().out
    assert "switched on, 9 reports" in out and re.search(r"GPU-d +50-90 +1.8x +forward-compute +thermal +goes on", out)
    assert cli.main(["stragglers", "trains", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_episodes"] == 2
    assert cli.main(["stragglers", "t1"]) == 0
    assert "no rank has held the others up" in capsys.readouterr().out
    assert cli.main(["stragglers", "trains", "off", "--reason", "x"]) == 0
    assert capsys.readouterr().out.strip()
    assert cli.main(["stragglers", "trains", "maybe"]) == 2
    capsys.readouterr()

    def status_of_older(source: RestSource, job: JobName, stacks: bool) -> dict[str, Any]:
        return {name: value for name, value in whole(source, job, stacks).items() if name != "stragglers"}

    whole = RestSource.status
    monkeypatch.setattr(RestSource, "status", status_of_older)
    assert cli.main(["stragglers", "trains"]) == 1
    assert "older release" in (err := capsys.readouterr().err) and err.count("\n") == 1
    ask = RestSource._ask  # of a supervisor without that place: what follows the job's name is a part of it
    monkeypatch.setattr(RestSource, "_ask", lambda source, path, query, body=None: ask(source, f"{path}/none", query, body))
    assert cli.main(["stragglers", "trains", "on"]) == 1
    assert "is of an older release, which cannot do that" in (err := capsys.readouterr().err), err
    assert cli.main(["stragglers", "trains", "maybe"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_drawing_by_hand() -> None:
    def drawn(*values: float | None, columns: int = 40, holes: Any = ()) -> str:
        return sparkline(points_of([[i, i, v, v, v] for i, v in enumerate(values, 1)]), holes, min(columns, len(values)))

    assert drawn(1.0, 2.0, 3.0) == "▁▅█" and drawn(2.0, 2.0) == "▄▄" and drawn() == ""
    assert drawn(None, 1.0, None) == "·▄·" and len(drawn(*map(float, range(1000)))) == 40
    assert drawn(1e-4, 9.999999999999957e-05, 1e-4) == "▄▄▄", "means of equal values differ in their last digits"
    flat = {"name": "lr", "points": [[1, 1, 1e-4, 1e-4, 1e-4], [2, 1, *[9.999999999999957e-05] * 3]]}
    assert curve_lines([flat]) == ["lr  ▄▄  0.0001 in iterations 1 to 2"]
    fine = [[i, i, i, i, i, i, 0] for i in range(1, 501)]
    coarse = [[i + 949, i, i + 474.5, i, i + 949, i, 0] for i in range(501, 10001, 950)]
    assert sparkline(points_of(fine + coarse), columns=8) == "▁▂▃▄▅▆▇█", "a straight line, told finely at first"
    lost = points_of([*fine, [2000, 1, 500.0, 500.0, 500.0, 1001, 0], [3000, 1, 1.0, 1.0, 1.0, 2001, 600]])
    assert sparkline(lost, [[501, 1000]], 6) == "▁ █▄··", "empty where nobody told anything; a gap where most was finite, too"
    late = {"name": "late", "points": [[5001, 1, 1.0, 1.0, 1.0], [10000, 1, 2.0, 2.0, 2.0]], "num_non_finite": 0}
    whole = {"name": "whole", "points": fine + coarse, "newest": {"value": 10000.0, "iteration": 10000}}
    first, second = curve_lines([whole, late])
    assert first.endswith("  1e+04, 1 to 1e+04 in iterations 1 to 10000"), "not the mean of the last point, 9,525.5"
    assert re.match(r"late {23}▁", second), "below one another"
    nothing: dict[str, Any] = {"name": "x", "points": [[1, 1, None, None, None]], "num_non_finite": 1}
    assert curve_lines([nothing]) == ["x  ·  not finite in iteration 1"]
    assert curve_lines([]) == [] and curve_lines([{**nothing, "points": []}]) == []
    parts: dict[str, Any] = dict.fromkeys(("productive", "lost", "restart"), 0.001) | {"waiting": 100.0, "startup": None}
    assert time_bar({"wall_s": 100.003, "parts": {**dict.fromkeys(_PARTS, 0.0), **parts}}, columns=10) == "█▓▒" + "░" * 7
    assert time_bar({"wall_s": 0.0, "parts": dict.fromkeys(_PARTS, 0.0)}) == ""


_PARTS = (
    "productive", "lost", "checkpoint", "rerun", "hang", "in_process_restart", "restart", "startup", "waiting", "ending",
    "uncounted",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_page_draws_them(serving: Served, own_directories: Path) -> None:
    dom = dom_of(signed_in(serving, job="trains", owner="bob"), own_directories, "--virtual-time-budget=4000")
    curves = part(dom, "curves")
    assert curves.count("<figure") == 3 and curves.count("<polyline") >= 3 and 'class="gap"' in curves
    assert "up to iteration 100" in part(dom, "curves-note") and "rank 3 (GPU-d, n2)" in part(dom, "stragglers")
    assert "NaN" not in curves and "undefined" not in curves
