"""What the job routes say: shapes, order, pages, and the two requests."""

from collections.abc import Callable
from urllib.parse import quote

import httpx
import pytest

from rsup.supervisor.sql_store import SqlStore
from tests.rest.played import PlayedSupervisor, Reply, Served
from tests.rest.story import EVIL, RUNNING

EVIL_PATH = f"/api/v1/jobs/{quote(EVIL, safe='')}"


def problem_of(answer: httpx.Response, status: int) -> str:
    """The detail of an answer that must be a problem document of that status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    content = answer.json()
    assert content["status"] == status and content["title"] and "\n" not in content["detail"]
    return str(content["detail"])


def test_jobs_are_listed_newest_first_and_in_pages(served: Served) -> None:
    client = served.client()
    whole = client.get("/api/v1/jobs").json()
    names = [(job["owner"], job["name"]) for job in whole["items"]]
    assert names == [("bob", EVIL), ("bob", "shared"), ("ann", "shared"), ("ann", "t1.2"), ("ann", "t1")]
    assert whole["next_cursor"] is None
    paged, cursor = [], ""
    while cursor is not None:
        page = client.get("/api/v1/jobs", params={"limit": 2, "cursor": cursor}).json()
        assert len(page["items"]) <= 2
        paged += page["items"]
        cursor = page["next_cursor"]
    assert paged == whole["items"]


def test_jobs_are_filtered(served: Served) -> None:
    client = served.client()
    assert [job["id"] for job in client.get("/api/v1/jobs?state=live").json()["items"]] == [EVIL]
    assert {job["owner"] for job in client.get("/api/v1/jobs?owner=ann").json()["items"]} == {"ann"}
    assert client.get("/api/v1/jobs?state=forming").json() == {"items": [], "next_cursor": None}


def test_a_jobs_status_tells_its_whole_story(served: Served) -> None:
    status = served.client().get("/api/v1/jobs/t1").json()
    job = status["job"]
    assert (job["id"], job["run"], job["state"], job["outcome"], job["exit_code"]) == ("t1", 2, "ended", "succeeded", 0)
    assert job["created"] == "2025-11-29T21:00:00.000000Z" and job["ended"] == "2025-11-29T21:01:00.000000Z"
    assert status["supervisor"]["address"] == served.address and status["supervisor"]["pid"] > 0
    assert [(a["attempt"], a["outcome"]) for a in status["attempts"]] == [(1, "failed"), (2, "succeeded")]
    (incident,) = status["incidents"]
    assert (incident["kind"], incident["rank"], incident["signal_name"], incident["iteration"]) == ("signal", 1, "SIGKILL", 25)
    assert (incident["culprit"], incident["victims"], incident["lost_iterations"]) == (1, [0], 5)
    assert incident["recovery_s"] == 2.0 and incident["detection_s"] == pytest.approx(0.01)
    assert incident["stacks"][0]["ranks"] == [0, 1]
    assert [c["iteration"] for c in status["checkpoints"]] == [10, 20, 30, 40, 50, 60]
    assert [s["section"] for s in status["sections"]] == ["setup", "step"]
    assert [one["case_id"] for one in status["cases"]] == ["t1.2-a1-i25"] and status["suspects"] == []
    assert [(r["rank"], r["attempt"], r["device"]) for r in status["ranks"]] == [(0, 2, "GPU-a"), (1, 2, "GPU-b")]


def test_goodput_counts_what_was_kept(served: Served) -> None:
    goodput = served.client().get("/api/v1/jobs/t1").json()["goodput"]
    # attempt 1 steps from 2 to 27 (25 iterations until the fault at 26, then 1 s standing), attempt 2 from 28 to 60
    assert goodput["wall_s"] == 60 and goodput["stepping_s"] == pytest.approx(25 + 32)
    lost = 23 * 5 / 25  # a second of the first 24 was a rerun
    assert goodput["lost_s"] == pytest.approx(lost) and goodput["ratio"] == pytest.approx((23 - lost + 32) / 60)
    parts = {name: took_s for name, took_s in goodput["parts"].items() if took_s}
    expected = {"startup": 1, "rerun": 1, "restart": 1 + 0.8, "waiting": 1.2, "lost": lost, "productive": 55 - lost}
    assert parts == pytest.approx(expected) and goodput["parts"]["checkpoint"] is None


def test_a_job_that_never_stepped_has_no_goodput(served: Served) -> None:
    goodput = served.client().get("/api/v1/jobs/t1.1").json()["goodput"]
    assert goodput["wall_s"] == 60 and goodput["ratio"] is None and goodput["lost_s"] is None


def test_a_running_job_shows_the_beats_of_now(served: Served) -> None:
    status = served.client().get(EVIL_PATH).json()
    assert [r["iteration"] for r in status["ranks"]] == [7, 6]
    assert status["ranks"][1]["open_sections"] == [{"name": "step", "age_s": 2.5}]
    assert status["ranks"][1]["beat_age_s"] == 1.1
    assert status["job"]["iteration"] == 6
    (suspect,) = status["suspects"]
    assert (suspect["rank"], suspect["section"], suspect["age_s"]) == (1, "step", 2.5)


def test_without_live_beats_the_stored_ones_are_shown(served: Served, played: PlayedSupervisor) -> None:
    played.live_beats.clear()
    status = served.client().get(EVIL_PATH).json()
    assert [r["iteration"] for r in status["ranks"]] == [6, 5]
    assert status["beats_at"] == "2025-11-29T21:00:09.000000Z"


def test_beats_of_an_earlier_process_are_not_a_ranks(served: Served, played: PlayedSupervisor) -> None:
    played.live_beats[RUNNING].ranks[1]["pid"] = 9999  # type: ignore[index]
    ranks = served.client().get(EVIL_PATH).json()["ranks"]
    assert ranks[0]["iteration"] == 7 and ranks[1]["iteration"] is None and ranks[1]["beat_age_s"] is None


def test_a_suspect_that_moves_again_is_none(served: Served, played: PlayedSupervisor) -> None:
    played.live_beats[RUNNING].ranks[1]["iteration"] = 7  # type: ignore[index]
    assert served.client().get(EVIL_PATH).json()["suspects"] == []


def test_stacks_can_be_left_out_and_asked_for(served: Served) -> None:
    client = served.client()
    (incident,) = client.get("/api/v1/jobs/t1?stacks=false").json()["incidents"]
    assert incident["stacks"] == [] and incident["num_stacks"] == 1
    found = client.get("/api/v1/jobs/t1/stacks").json()
    assert found["incident"] == 1 and found["stacks"][0]["source"] == "py-spy"
    assert client.get("/api/v1/jobs/t1/stacks?rank=1").json()["stacks"]
    other = client.get("/api/v1/jobs/t1/stacks?rank=7").json()
    assert other["stacks"] == [] and "rank 7" in other["message"]
    assert client.get("/api/v1/jobs/t1.1/stacks").json()["incident"] is None


def test_events_come_in_order_and_by_cursor(served: Served) -> None:
    client = served.client()
    first = client.get("/api/v1/jobs/t1/events?limit=10").json()
    assert [event["number"] for event in first["items"]] == list(range(1, 11))
    assert first["items"][0]["data"] == {"n": 1} and first["next_cursor"] == "10"
    rest = client.get("/api/v1/jobs/t1/events", params={"cursor": first["next_cursor"]}).json()
    assert [event["number"] for event in rest["items"]] == list(range(11, 26)) and rest["next_cursor"] is None
    assert client.get("/api/v1/jobs/t1/events?cursor=25").json()["items"] == []
    assert [event["number"] for event in client.get("/api/v1/jobs/t1/events?last=3").json()["items"]] == [23, 24, 25]


def test_ranks_and_incidents_have_routes_of_their_own(served: Served) -> None:
    client = served.client()
    first = client.get(f"{EVIL_PATH}/ranks?limit=1").json()
    assert [rank["rank"] for rank in first["items"]] == [0] and first["next_cursor"] == "1"
    assert [rank["rank"] for rank in client.get(f"{EVIL_PATH}/ranks?cursor=1").json()["items"]] == [1]
    assert client.get("/api/v1/jobs/t1/incidents").json()["items"][0]["signal_name"] == "SIGKILL"


def test_a_job_is_named_by_run_and_by_owner(served: Served) -> None:
    client = served.client()
    assert client.get("/api/v1/jobs/t1.1").json()["job"]["run"] == 1
    assert client.get("/api/v1/jobs/t1").json()["job"]["run"] == 2
    detail = problem_of(client.get("/api/v1/jobs/shared"), 409)
    assert "local/ann/shared" in detail and "local/bob/shared" in detail
    assert client.get("/api/v1/jobs/shared?owner=bob").json()["job"]["owner"] == "bob"
    assert "rsup jobs" in problem_of(client.get("/api/v1/jobs/nothing"), 404)
    assert "rsup jobs" in problem_of(client.get("/api/v1/jobs/t1.7"), 404)


def test_an_empty_store_has_empty_lists(store: SqlStore, serve: Callable[[], Served]) -> None:
    client = serve().client()
    for resource in ("jobs", "nodes", "devices"):
        assert client.get(f"/api/v1/{resource}").json() == {"items": [], "next_cursor": None}
    assert 'rsup_jobs{state="running"} 0' in client.get("/metrics").text


def test_nodes_and_devices_say_what_ran_on_them(served: Served) -> None:
    client = served.client()
    assert [node["node"] for node in client.get("/api/v1/nodes").json()["items"]] == ["n1", "n2"]
    assert client.get("/api/v1/nodes?limit=1").json()["next_cursor"] == "n1"
    assert [node["node"] for node in client.get("/api/v1/nodes?cursor=n1").json()["items"]] == ["n2"]
    node = client.get("/api/v1/nodes/n1").json()
    assert node["devices"] == ["GPU-a", "GPU-b"] and node["jobs"][0]["job"]["name"] == "t1.2"
    assert [incident["kind"] for incident in node["incidents"]] == ["signal"]
    assert [device["uuid"] for device in client.get("/api/v1/devices").json()["items"]] == ["GPU-a", "GPU-b"]
    device = client.get("/api/v1/devices/GPU-b").json()
    assert device["model"] == "H200" and device["placements"][0]["rank"] == 1 and len(device["incidents"]) == 1
    problem_of(client.get("/api/v1/nodes/n9"), 404)
    problem_of(client.get("/api/v1/devices/GPU-z"), 404)


def test_a_request_reaches_the_loop_with_its_principal(served: Served, played: PlayedSupervisor) -> None:
    client = served.client()
    answer = client.post(f"{EVIL_PATH}/stop", json={"reason": "too\nslow\x1b[2J"})
    assert answer.status_code == 202 and answer.json()["message"] == "taken up"
    assert client.post(f"{EVIL_PATH}/checkpoint").status_code == 202
    stop, checkpoint = played.changes
    assert (stop.verb, stop.job, stop.principal.name, stop.reason) == ("stop", RUNNING, "root", "too slow [2J")
    assert (checkpoint.verb, checkpoint.reason) == ("checkpoint", "")


def test_a_dry_run_is_answered_by_the_one_who_would_do_it(served: Served, played: PlayedSupervisor) -> None:
    played.reply = Reply(True, "would stop job")
    answer = served.client().post(f"{EVIL_PATH}/stop", json={"dry_run": True}).json()
    assert answer["message"] == "would stop job" and answer["dry_run"]
    assert [change.dry_run for change in played.changes] == [True]


def test_only_operators_fence(served: Served, played: PlayedSupervisor) -> None:
    body = {"node": "node1", "reason": "it is off", "dry_run": True}
    assert "only operators" in problem_of(served.client("user").post("/api/v1/jobs/t1/fence", json=body), 403)
    assert served.client().post(f"{EVIL_PATH}/fence", json={"reason": "no node named"}).status_code == 422
    assert served.client().post(f"{EVIL_PATH}/fence", json=body).status_code == 202
    (change,) = played.changes
    assert (change.verb, change.node, change.reason, change.dry_run) == ("fence", "node1", "it is off", True)


def test_requests_that_cannot_be_met_say_why(served: Served, played: PlayedSupervisor) -> None:
    client = served.client()
    assert "has ended" in problem_of(client.post("/api/v1/jobs/t1/stop"), 409)
    played.reply = Reply(False, "job is already stopping")
    assert problem_of(client.post(f"{EVIL_PATH}/stop"), 409) == "job is already stopping"
    played.reply = None
    assert "did not answer" in problem_of(client.post(f"{EVIL_PATH}/stop"), 503)
