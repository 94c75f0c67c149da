"""Who may do what: every route with every role, bad tokens, bad input, foreign pages."""

import json
from collections.abc import Callable
from typing import NoReturn

import pytest
from sqlalchemy.exc import OperationalError

from rsup.supervisor.rest.context import RestContext
from rsup.supervisor.rest.guards import MAX_BODY_BYTES
from tests.rest.played import TOKENS, PlayedSupervisor, Served
from tests.rest.test_rest_jobs import EVIL_PATH, problem_of

OPEN = 200
# (method, path) -> status for nobody, viewer, the user ann, operator. ann owns t1, bob owns the running job.
ROLES: dict[tuple[str, str], tuple[int, int, int, int]] = {
    ("GET", "/"): (OPEN, 200, 200, 200),
    ("GET", "/docs"): (OPEN, 200, 200, 200),
    ("GET", "/openapi.json"): (OPEN, 200, 200, 200),
    ("GET", "/static/page.js"): (OPEN, 200, 200, 200),
    ("GET", "/healthz"): (OPEN, 200, 200, 200),
    ("GET", "/readyz"): (OPEN, 200, 200, 200),
    ("GET", "/metrics"): (401, 200, 200, 200),
    ("GET", "/api/v1/supervisor"): (401, 200, 200, 200),
    ("GET", "/api/v1/jobs"): (401, 200, 200, 200),
    ("GET", "/api/v1/jobs/t1"): (401, 200, 200, 200),
    ("GET", "/api/v1/jobs/t1/ranks"): (401, 403, 200, 200),
    ("GET", "/api/v1/jobs/t1/events"): (401, 403, 200, 200),
    ("GET", "/api/v1/jobs/t1/incidents"): (401, 403, 200, 200),
    ("GET", "/api/v1/jobs/t1/stacks"): (401, 403, 200, 200),
    ("GET", "/api/v1/jobs/t1/metrics"): (401, 403, 200, 200),
    ("GET", "/api/v1/jobs/t1/stragglers"): (401, 403, 200, 200),
    ("POST", "/api/v1/jobs/t1/stragglers"): (401, 422, 422, 422),
    ("GET", EVIL_PATH): (401, 200, 200, 200),
    ("GET", f"{EVIL_PATH}/ranks"): (401, 403, 403, 200),
    ("GET", f"{EVIL_PATH}/events"): (401, 403, 403, 200),
    ("GET", f"{EVIL_PATH}/incidents"): (401, 403, 403, 200),
    ("GET", f"{EVIL_PATH}/stacks"): (401, 403, 403, 200),
    ("POST", f"{EVIL_PATH}/stop"): (401, 403, 403, 202),
    ("POST", f"{EVIL_PATH}/checkpoint"): (401, 403, 403, 202),
    ("POST", f"{EVIL_PATH}/fence"): (401, 403, 403, 422),
    ("POST", "/api/v1/jobs/t1/stop"): (401, 403, 409, 409),
    ("POST", "/api/v1/jobs/t1/checkpoint"): (401, 403, 409, 409),
    ("GET", "/api/v1/cases"): (401, 200, 200, 200),
    ("GET", "/api/v1/cases/t1.2-a1-i25"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes/n1"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices/GPU-a"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices/GPU-a/evidence"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes/n1/evidence"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices/GPU-a/why"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes/n1/why"): (401, 200, 200, 200),
    ("POST", "/api/v1/devices/GPU-a/quarantine"): (401, 422, 422, 422),
    ("POST", "/api/v1/nodes/n1/quarantine"): (401, 422, 422, 422),
    ("GET", "/api/v1/gate/snapshot"): (401, 404, 404, 404),
    ("GET", "/api/v1/slurm"): (401, 404, 404, 404),
    ("GET", "/api/v1/nodes/n1/verdict"): (401, 404, 404, 404),
    ("POST", "/api/v1/nodes/n1/report"): (401, 403, 403, 422),
    ("POST", "/api/v1/nodes/n1/drain"): (401, 403, 403, 422),
    ("POST", "/api/v1/nodes/n1/undrain"): (401, 403, 403, 422),
    ("GET", "/api/v1/devices/GPU-a/timeline"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices/GPU-a/touched"): (401, 200, 200, 200),
    ("GET", "/api/v1/devices/GPU-a/export"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes/n1/timeline"): (401, 200, 200, 200),
    ("GET", "/api/v1/nodes/n1/export"): (401, 200, 200, 200),
    ("GET", "/api/v1/history/common"): (401, 422, 422, 422),
    ("GET", "/api/v1/history/offenders"): (401, 200, 200, 200),
    ("GET", "/api/v1/history/clusters"): (401, 422, 422, 422),
    ("GET", "/api/v1/history/expiring"): (401, 200, 200, 200),
    ("GET", "/api/v1/history/stats"): (401, 200, 200, 200),
    ("POST", "/api/v1/history/replay"): (401, 403, 403, 422),
}


def test_each_route_answers_each_role_as_the_table_says(served: Served) -> None:
    for position, role in enumerate((None, "viewer", "user", "operator")):
        client = served.client(role)
        for (method, path), expected in ROLES.items():
            answer = client.request(method, path)
            assert answer.status_code == expected[position], (method, path, role, answer.text)
            if answer.status_code >= 400:
                problem_of(answer, expected[position])


def test_the_table_names_every_route(served: Served) -> None:
    api = served.client().get("/openapi.json").json()
    told = {(method.upper(), path) for path, methods in api["paths"].items() for method in methods}
    generic = {
        (method, path.replace(EVIL_PATH, "/api/v1/jobs/{job}").replace("/jobs/t1", "/jobs/{job}")) for method, path in ROLES
    }
    generic = {(m, p.replace("/cases/t1.2-a1-i25", "/cases/{case_id}")) for m, p in generic}
    generic = {(m, p.replace("/nodes/n1", "/nodes/{name}").replace("/devices/GPU-a", "/devices/{uuid}")) for m, p in generic}
    generic = {(m, p.replace("/quarantine", "/{verb}")) for m, p in generic}
    assert told == {(m, p) for m, p in generic if p not in ("/", "/docs", "/openapi.json", "/static/page.js")}


def test_a_viewer_sees_of_a_job_its_owner_and_state_only(served: Served) -> None:
    client = served.client("viewer")
    public = {"id", "run", "name", "cluster", "owner", "state"}
    assert all(set(job) == public for job in client.get("/api/v1/jobs").json()["items"])
    status = client.get("/api/v1/jobs/t1").json()
    assert set(status) == {"job"} and set(status["job"]) == public
    assert "rsup_job_iteration" not in client.get("/metrics").text
    assert "SIGKILL" not in client.get("/api/v1/nodes/n1").text + client.get("/api/v1/devices/GPU-b").text


def test_a_user_sees_all_of_ones_own_jobs_and_a_viewers_part_of_others(served: Served) -> None:
    items = served.client("user").get("/api/v1/jobs").json()["items"]
    assert {("reason" in job, job["owner"]) for job in items} == {(True, "ann"), (False, "bob")}
    assert served.client("user").get("/api/v1/jobs/shared").json()["job"]["owner"] == "ann"


def test_no_token_and_a_wrong_one_are_told_apart(served: Served) -> None:
    client = served.client(None)
    answer = client.get("/api/v1/jobs")
    assert "no token" in problem_of(answer, 401) and answer.headers["www-authenticate"].startswith("Bearer")
    for wrong in (f"Bearer {TOKENS['user']}x", f"Bearer {TOKENS['user'][:-1]}", "Bearer \u00e9\u00e8"):
        answer = client.get("/api/v1/jobs", headers={b"Authorization": wrong.encode("latin-1")})
        assert "not known" in problem_of(answer, 401) and "file `token`" in answer.text
    # Nobody at a node is to take the operator's.
    asked = [("GET", "/api/v1/gate/snapshot"), ("POST", "/api/v1/nodes/n1/report")]
    for headers in ({}, {"Authorization": "Bearer anything-that-lies-there"}, {"Authorization": "Bearer node.n1.0123abcd"}):
        for method, path in [*asked, *([("GET", "/api/v1/jobs")] if "node." in str(headers) else [])]:
            detail = problem_of(client.request(method, path, headers=headers), 401)
            assert "rsup slurm node-token NODE" in detail and "file `token`" not in detail, (path, headers)


def test_signing_in_sets_a_cookie_and_takes_the_token_out_of_the_address(served: Served) -> None:
    client = served.client(None)
    answer = client.get("/", params={"token": TOKENS["operator"]})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/api/v1/jobs").status_code == 200  # by the cookie
    problem_of(served.client(None).get("/", params={"token": "wrong"}), 401)


def test_a_cookie_changes_something_only_from_the_page_itself(served: Served, played: PlayedSupervisor) -> None:
    client = served.client(None)
    client.get("/", params={"token": TOKENS["operator"]})
    for origin in ({}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}):
        assert "page" in problem_of(client.post(f"{EVIL_PATH}/stop", headers=origin), 403)
    assert played.changes == []
    assert client.post(f"{EVIL_PATH}/stop", headers={"Origin": served.address}).status_code == 202


def test_a_foreign_host_name_is_refused(served: Served) -> None:
    client = served.client()
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "[::1"):
        assert client.get("/api/v1/jobs", headers={"Host": host}).status_code in (400, 421), host
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80"):
        assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200, host


BAD_INPUT = [
    ("GET", "/api/v1/jobs?limit=0", None, "limit"),
    ("GET", "/api/v1/jobs?limit=1001", None, "limit"),
    ("GET", "/api/v1/jobs?limit=x", None, "limit"),
    ("GET", "/api/v1/jobs?cursor=abc", None, "cursor"),
    ("GET", f"/api/v1/jobs?cursor={'9' * 30}", None, "cursor"),
    ("GET", "/api/v1/jobs/%00", None, "job"),
    ("GET", f"/api/v1/jobs/{'x' * 301}", None, "job"),
    ("GET", "/api/v1/jobs/t1/stacks?rank=-1", None, "rank"),
    ("POST", f"{EVIL_PATH}/stop", {"reason": "x" * 501}, "reason"),
    ("POST", f"{EVIL_PATH}/stop", {"reason": 7}, "reason"),
    ("POST", f"{EVIL_PATH}/stop", {"resaon": "typo"}, "resaon"),
    ("POST", f"{EVIL_PATH}/stop", ["x"], "body"),
]


def test_input_out_of_bounds_is_named(served: Served) -> None:
    client = served.client()
    for method, path, body, where in BAD_INPUT:
        assert where in problem_of(client.request(method, path, json=body), 422), path


def test_what_is_not_there_is_a_problem_too(served: Served) -> None:
    client = served.client()
    assert "/docs" in problem_of(client.get("/api/v2/jobs"), 404)
    assert "DELETE" in problem_of(client.delete("/api/v1/jobs"), 405)
    for path in ("/api/v1/jobs/t1/numbers", "/api/v1/jobs/shared/nothing"):
        assert problem_of(client.get(path), 404) == f"there is nothing at {path}; /docs lists what there is"
    assert "no job 'nobody/t9'" in problem_of(client.get("/api/v1/jobs/nobody/t9"), 404)
    problem_of(client.get("/static/..%2fapp.py"), 404)
    problem_of(client.get("/static/index.html"), 404)
    assert problem_of(client.post(f"{EVIL_PATH}/stop", content=b"{", headers={"Content-Type": "application/json"}), 422)


def test_a_long_body_is_refused_with_and_without_a_length(served: Served, played: PlayedSupervisor) -> None:
    client = served.client()
    body = json.dumps({"reason": "x" * MAX_BODY_BYTES}).encode()
    headers = {"Content-Type": "application/json"}
    problem_of(client.post(f"{EVIL_PATH}/stop", content=body, headers=headers), 413)
    chunks = iter([body[:1000], body[1000:]])
    problem_of(client.post(f"{EVIL_PATH}/stop", content=chunks, headers=headers), 413)
    assert played.changes == []


def test_every_answer_carries_the_protecting_headers(served: Served) -> None:
    client = served.client()
    for path in ("/", "/static/page.js", "/api/v1/jobs", "/nothing"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_readiness_follows_loop_and_store(served: Served, played: PlayedSupervisor) -> None:
    client = served.client(None)
    assert client.get("/readyz").json() == {"status": "ready"}
    played.store_problem = "no space left"
    assert "store" in problem_of(client.get("/readyz"), 503)
    played.store_problem, played.loop_age = "", 60.0
    assert "60 s" in problem_of(client.get("/readyz"), 503)
    assert client.get("/healthz").status_code == 200


def test_metrics_say_what_readiness_says_also_where_the_store_is_away(
    served: Served, played: PlayedSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client()
    for problem, age_s, value in (("", 0.1, 1), ("may only be read now", 0.1, 0), ("", 60.0, 0)):
        played.store_problem, played.loop_age = problem, age_s
        assert f"\nrsup_ready {value}\n" in client.get("/metrics").text
    monkeypatch.setattr(RestContext, "reading", _no_answer)
    assert client.get("/metrics").status_code == 503
    played.store_problem = "does not answer"
    text = client.get("/metrics").text
    assert "\nrsup_ready 0\n" in text and "rsup_messages_dropped_total 3" in text and "rsup_jobs" not in text


def _no_answer(context: RestContext) -> NoReturn:
    raise OperationalError("SELECT 1", {}, Exception("the server is away"))


def test_metrics_are_prometheus_text(served: Served) -> None:
    answer = served.client().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert samples['rsup_jobs{state="ended"}'] == "4" and samples['rsup_jobs{state="running"}'] == "1"
    assert samples["rsup_attempts_total"] == "3" and samples["rsup_restarts_total"] == "1"
    assert samples['rsup_incidents_total{kind="signal"}'] == "1" and samples["rsup_events_total"] == "26"
    assert samples["rsup_messages_dropped_total"] == "3" and samples["rsup_commit_seconds"] == "0.004"
    assert samples["rsup_beat_age_seconds_max"] == "1.1"
    assert any(name.startswith("rsup_job_iteration{") and "<script>" in name for name in samples)


def test_a_store_that_cannot_be_read_is_a_problem(played: PlayedSupervisor, serve: Callable[[], Served], story: object) -> None:
    served = serve()
    story.close()  # type: ignore[attr-defined]
    from sqlalchemy import create_engine, text

    from rsup.supervisor import places

    engine = create_engine(f"sqlite:///{places.state_dir()}/rsup.db")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE sections"))
    engine.dispose()
    assert "rsup db check" in problem_of(served.client().get("/api/v1/jobs/t1"), 503)


def test_a_defect_is_told_without_its_inside(served: Served, played: PlayedSupervisor) -> None:
    def broken(job: object) -> None:
        raise ZeroDivisionError("secret")

    played.beats = broken  # type: ignore[method-assign]
    detail = problem_of(served.client().get(EVIL_PATH), 500)
    assert "ZeroDivisionError" in detail and "secret" not in detail
