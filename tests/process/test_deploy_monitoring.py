"""deploy/prometheus and deploy/grafana name metrics that a supervisor really shows; the rules fire when they should."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rsup.supervisor import metrics
from rsup.supervisor.records import JobKey
from rsup.supervisor.slurm.drain_status import Counters, metrics_of
from rsup.supervisor.states import JobState, Stragglers
from rsup.supervisor.value_metrics import value_metrics
from rsup.supervisor.wire import JobSpec
from tests.process.supervised_agent import MAIN, served

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "rsup.json"
ADDED_BY_PROMETHEUS = {"job", "instance"}
JOB = {"cluster": "c", "owner": "ann", "id": "7", "run": 1, "name": "7.1", "iteration": 3, "attempt": 1, "num_ranks": 2}

Known = dict[str, set[str]]


def a_training() -> dict[str, Any]:
    """What is known of a live job when everything is known."""
    work = {
        "at_risk": {"iterations": 2, "about_s": 4.0},
        "durable": {"iteration": 1},
        "local": {"iteration": 2},
        "saving": {"for_s": 1.0},
        "saves": {"failed": 1},
    }
    return {"goodput": {"parts": {"productive": 5.0}, "ratio": 0.9}, "work": work, "in_process_restarts": 0}


def a_state_with_stragglers() -> JobState:
    """Of a job whose ranks have reported."""
    return JobState(key=JobKey("c", "ann", "7", 1), spec=JobSpec(), created_us=1, stragglers=Stragglers(num_reports=1))


def some_values() -> list[Any]:
    """Rows of `metric_series`, as far as metrics go."""
    named = (("training", "lm loss"), ("training", "skipped-iterations"), ("training", "nan-iterations"))
    return [{"kind": kind, "name": name, "value": 2.5, "total": 3.0} for kind, name in named]


def a_slurm_status() -> dict[str, Any]:
    """`drain_status.status_of` after a round, as far as metrics go."""
    guard = {"open": True, "held": [], "num_refused": 1, "limit": 2}
    nothing: dict[str, Any] = {"drained": {"ours": [], "others": []}, "proposals": [], "differences": {"left_alone": []}}
    more = {"scheduler": {"answers": True, "is_expected": True}, "failing": [], "reserved": [], "no_snapshot": ""}
    return nothing | {"guard": guard} | more


def a_slurm_count() -> Counters:
    counted = Counters(fetched_us={"n1": 1_000_000}, failed=1)
    for counter, name in ((counted.notes, "drained"), (counted.decisions, "prolog-refused"), (counted.events, "xid")):
        counter[name] += 1
    return counted


@pytest.fixture
def known(own_directories: Path) -> Known:
    """Each metric with its labels: of a running supervisor, and of a live job."""
    state = own_directories / "state"
    with subprocess.Popen([*MAIN, "--listen", "127.0.0.1:0"], env=os.environ | {"RSUP_IDLE_EXIT": "0"}) as process:
        try:
            found = served(state)
            token = (state / "token").read_text().strip()
            request = urllib.request.Request(f"{found.rest}/metrics", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
        finally:
            process.terminate()
            process.wait(60)
    row: Any = {"cluster": "c", "owner": "ann", "job_id": "7", "run": 1}
    families = [*metrics.job_metrics([JOB], {"c/ann/7.1": [0.5]}), *metrics.training_metrics([(row, a_training())])]
    families += metrics_of(a_slurm_status(), a_slurm_count(), 2_000_000)
    families += value_metrics([(row | {"id": 1}, a_state_with_stragglers())], {1: some_values()}, {1: 2}, 2_000_000)
    return labels_by_name(text + metrics.render(families))


def labels_by_name(text: str) -> Known:
    found: Known = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found.setdefault(line.split()[2], set())
        elif not line.startswith("#"):
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', line))
    return found


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def check(expression: str, known: Known, where: str) -> set[str]:
    """The metrics that `expression` names; each exists, and so do the labels that are matched or grouped by."""
    used = set(re.findall(r"\b(?:rsup\w*|up)\b(?!:)", re.sub(r"rsup:[\w:]+", "", re.sub(r'"[^"]*"', "", expression))))
    recorded = set(re.findall(r"\brsup:[\w:]+", expression))
    assert used | recorded, f"{where}: names no metric of ours: {expression}"
    assert recorded <= {rule["record"] for rule in rules() if "record" in rule}, where
    for name in used - {"up"}:
        assert name in known, f"{where}: there is no metric {name}"
    for name, matchers in re.findall(r"\b(rsup_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in known[name] | ADDED_BY_PROMETHEUS, f"{where}: {name} has no label {label}"
    grouped = [part for text in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", expression) for part in text.split(",")]
    labels = set().union(ADDED_BY_PROMETHEUS, *(known[name] for name in used - {"up"}))
    for label in grouped:
        assert label.strip() in labels, f"{where}: nothing has the label {label}"
    return used - {"up"}


def test_rules_and_dashboard_name_what_a_supervisor_shows(known: Known) -> None:
    for rule in rules():
        name = rule.get("alert") or rule["record"]
        used = check(rule["expr"], known, name)
        texts = " ".join(rule.get("annotations", {}).values())
        shown = set(re.findall(r"\$labels\.(\w+)", texts))
        assert not used or shown <= set().union(ADDED_BY_PROMETHEUS, *(known[metric] for metric in used)), name
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "warn"), name
            assert set(rule["annotations"]) == {"summary", "description"}, name
    on_dashboard: set[str] = set()
    for panel in panels():
        for target in panel["targets"]:
            used = check(target["expr"], known, panel["title"])
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= set().union(ADDED_BY_PROMETHEUS, *(known[name] for name in used)), panel["title"]
            on_dashboard |= used
    not_shown = set(known) - on_dashboard - {"rsup_store_commit_seconds"}  # the last commit alone says little
    assert not not_shown, f"no panel shows {sorted(not_shown)}"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"] == "rsup" and board["title"] and isinstance(board["schemaVersion"], int)
    assert "id" not in board and "__inputs" not in board  # an import into any Grafana: no id, no question
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, f"{panel['title']} overlaps"
        taken |= cells
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat") and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs), panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        for name in re.findall(r"\$(\w+)", " ".join(target["expr"] for target in panel["targets"])):
            assert name in variables, panel["title"]


FIRES = {
    "RsupNotReady": ('rsup_ready{instance="s"}', "1 0 0 0"),
    "RsupLoopStuck": ('rsup_loop_age_seconds{instance="s"}', "0 30 60 90"),
    "RsupAgentsLost": ('rsup_incidents_total{instance="s",kind="agent-lost"}', "0 1 2 4"),
    "RsupJobWorkAtRisk": ('rsup_job_at_risk_seconds{id="7",owner="ann"}', "0 10000 20000 30000"),
    "RsupGuardTripped": ('rsup_guard_open{instance="s"}', "0 0 0 1"),
    "RsupCommitsSlow": ('rsup_store_commit_seconds_total{instance="s"}', "0+60x15"),
}
QUIET = {
    'up{job="rsup",instance="leads"}': "1x15",
    'up{job="rsup",instance="stands by"}': "0x15",
    'rsup_store_commits_total{instance="s"}': "0+60x15",
    'rsup_incidents_total{instance="s",kind="exit"}': "0 1 2 4",
}


def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True, timeout=30)
    series = [{"series": name, "values": values} for name, values in [*FIRES.values(), *QUIET.items()]]
    expected = [{"eval_time": "15m", "alertname": "RsupCommitsSlow", "exp_alerts": [alert("RsupCommitsSlow")]}]
    expected += [{"eval_time": "3m", "alertname": name, "exp_alerts": [alert(name)]} for name in FIRES if "Slow" not in name]
    expected += [{"eval_time": "1m", "alertname": name, "exp_alerts": []} for name in FIRES]
    expected += [{"eval_time": "9m", "alertname": name, "exp_alerts": []} for name in ("RsupSuspectedHang", "RsupDown")]
    # Annotations are compared too unless they are empty on both sides: the copy under test has none.
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(content))
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": expected}]
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def alert(name: str) -> dict[str, Any]:
    """What `promtool test rules` expects of one that fires."""
    rule = next(rule for rule in rules() if rule.get("alert") == name)
    found = dict(re.findall(r'(\w+)="([^"]*)"', FIRES[name][0]))
    return {"exp_labels": found | {"severity": rule["labels"]["severity"]}}
