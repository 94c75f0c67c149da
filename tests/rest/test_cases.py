"""Rerun cases for people and programs: over REST, by the command, from the store alone; who sees what."""

import json
from pathlib import Path

import pytest

from rsup.launcher import cli
from rsup.supervisor.records import CaseSaved
from rsup.supervisor.sql_store import SqlStore
from tests.rest.played import Served
from tests.rest.story import EVIL, RUNNING, T1, at
from tests.rest.test_rest_jobs import problem_of

CASE = "t1.2-a1-i25"
HIDDEN = ("findings", "reason", "tried", "checkpoint", "data_position", "placements")


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run a command in this process; return its stdout and stderr."""
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return output.out, output.err


def test_cases_come_newest_first_by_pages_and_by_job(served: Served, story: SqlStore) -> None:
    story.commit([CaseSaved(T1, f"many-{i}", 2, 40 + i, at(40 + i // 2), True, []) for i in range(7)])
    client, found, cursor = served.client(), [], ""
    while cursor is not None:
        answer = client.get("/api/v1/cases", params={"limit": 2, "cursor": cursor, "job": "t1"}).json()
        found += answer["items"]
        cursor = answer["next_cursor"]
    assert [one["case_id"] for one in found] == [*(f"many-{i}" for i in reversed(range(7))), CASE]
    assert [one["opened"] for one in found] == sorted((one["opened"] for one in found), reverse=True)
    assert len(client.get("/api/v1/cases").json()["items"]) == 9
    assert [o["case_id"] for o in client.get("/api/v1/cases", params={"verdict": "persistent"}).json()["items"]] == [CASE]
    assert len(client.get("/api/v1/cases", params={"verdict": "open"}).json()["items"]) == 8
    problem_of(client.get("/api/v1/cases", params={"cursor": "nonsense"}), 422)
    problem_of(client.get("/api/v1/cases", params={"job": "nobody"}), 404)


def test_one_case_tells_what_was_compared_and_what_followed(served: Served) -> None:
    (one,) = served.client().get(f"/api/v1/cases/{CASE}").json()["items"]
    assert (one["verdict"], one["state"], one["accused"], one["action"]) == ("persistent", "closed", ["GPU-b"], "elsewhere")
    assert one["findings"][0]["elsewhere"] == "2.5" and one["took_s"] == 4.0 and one["tried"] == {"1": ["GPU-b"]}
    assert one["placements"][0]["to"] == "GPU-a" and one["data_position"] == {"consumed_samples": 96}
    assert one["job"]["name"] == "t1.2" and not one["waits_for_resume"]
    problem_of(served.client().get("/api/v1/cases/none-a1-i1"), 404)
    status = served.client().get("/api/v1/jobs/t1").json()
    assert [case["case_id"] for case in status["cases"]] == [CASE] and status["counts"]["cases"] == 1


def test_others_see_only_what_a_case_says_of_hardware(served: Served) -> None:
    for role, owners in (("viewer", set()), ("user", {"ann"}), ("operator", {"ann", "bob"})):
        client = served.client(role)
        listed = client.get("/api/v1/cases").json()["items"]
        shown = [client.get(f"/api/v1/cases/{one['case_id']}").json()["items"][0] for one in listed]
        assert len(listed) == 2 and listed == shown
        for one in listed:
            assert one["accused"] and "verdict" in one
            assert all((name in one) == (one["job"]["owner"] in owners) for name in HIDDEN), (role, one)


def test_the_command_says_the_same_with_and_without_a_supervisor(
    announced: Served, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["list"], ["list", "t1"], ["list", "--verdict", "open"], ["show", CASE], ["show", "t1"]):
        live = json.loads(told(capsys, "cases", *words, "--json")[0])
        (state / "supervisor.json").rename(state / "aside")
        stored = json.loads(told(capsys, "cases", *words, "--json")[0])
        (state / "aside").rename(state / "supervisor.json")
        assert live == stored and live, words


def test_the_beginning_of_an_id_is_enough_where_it_names_one(
    announced: Served, story: SqlStore, capsys: pytest.CaptureFixture[str]
) -> None:
    story.commit([CaseSaved(T1, f"t1.2-a2-i{i}", 2, i, at(40), True, [], note="does not count") for i in (31, 32)])
    assert json.loads(told(capsys, "cases", "show", "t1.2-a1", "--json")[0])[0]["case_id"] == CASE
    assert announced.client().get("/api/v1/cases/t1.2-a1-i2").json()["items"][0]["case_id"] == CASE
    err = told(capsys, "cases", "show", "t1.2-a2", code=1)[1]
    assert "may be any of t1.2-a2-i31, t1.2-a2-i32; write more of it" in err
    problem_of(announced.client().get("/api/v1/cases/t1.2-a2-"), 409)
    assert len(json.loads(told(capsys, "cases", "show", "t1", "--json")[0])) == 3, "a job's name comes before a beginning"
    problem_of(announced.client().get("/api/v1/cases/t_.2-a1"), 404)
    assert "note: does not count" in told(capsys, "cases", "show", "t1.2-a2-i31")[0]


def test_people_see_tables_without_markup_or_escapes(announced: Served, capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "cases", "list")[0]
    assert CASE in listed and "persistent" in listed and "GPU-b" in listed and "open" in listed and "\x1b" not in listed
    shown = told(capsys, "cases", "show", CASE)[0]
    for word in ("persistent", "accused: GPU-b", "loss: NaN", "2.5", "GPU-a", "consumed_samples 96", "/ckpt/24", "RUN AGAIN"):
        assert word in shown, word
    assert "\x1b" not in shown and "\x07" not in shown
    assert CASE in told(capsys, "status", "t1")[0]
    assert f"Rerun case {CASE}: persistent" in told(capsys, "report", "t1", "--text")[0]
    opened = told(capsys, "cases", "show", "evil-a1-i5")[0]
    assert "open" in opened and "replaying the iteration" in opened


def test_an_open_case_of_an_ended_job_waits_for_resume(story: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    story.commit([CaseSaved(T1, "due", 2, 60, at(59), True, [], action="elsewhere")])
    text = told(capsys, "cases", "show", "due")[0]
    assert "open, for --resume" in text and "--resume on another node decides it" in text


def test_what_is_not_there_is_said_in_one_line(story: SqlStore, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "cases", "show", "nothing", code=1)
    assert out == "" and "no case 'nothing'" in err.splitlines()[-1] and "rsup cases list" in err
    assert "no job 'nobody'" in told(capsys, "cases", "list", "nobody", code=1)[1]
    assert "list|show" in told(capsys, "cases", code=2)[1]
    assert "invalid choice" in told(capsys, "cases", "list", "--verdict", "perhaps", code=2)[1]


def test_an_empty_state_directory_has_no_cases(own_directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "cases", "list")[0] == "no rerun cases\n"
    assert "has no jobs yet" in told(capsys, "cases", "show", "x", code=1)[1]


def test_names_that_are_markup_stay_names(served: Served) -> None:
    found = served.client().get("/api/v1/cases", params={"job": EVIL, "owner": RUNNING.owner}).json()["items"]
    assert [one["job"]["id"] for one in found] == [EVIL]
