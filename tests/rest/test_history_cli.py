"""The questions on the command line and over REST: both sources tell the same, bad input is one line with its exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher import cli
from rsup.supervisor.principals import Role
from rsup.supervisor.sql_store import SqlStore
from tests.rest.history_story import SERIALS, A, B, C, at, attempt, case, checkpoint, device, evidence, job, key, moves, resume
from tests.rest.played import Served
from tests.rest.test_rest_jobs import problem_of

J1, J2 = key("train"), key("tune", "bob")


def ask(capsys: pytest.CaptureFixture[str], *words: str, kind: str = "device") -> tuple[int, str, str]:
    """Run one question in this process: exit code, stdout, stderr."""
    code = cli.main([f"{kind}s", *words])
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture
def history(story: SqlStore) -> SqlStore:
    """The usual story, and that of three boards of which B is bad."""
    verdict = {"job": J1, "attempt": 1, "rank": 1, "iteration": 25, "case_id": f"{J1}-a1-i25", "weight": 2.0}
    story.commit(
        [
            *(record for uuid, pci in ((A, "1b"), (B, "3d")) for record in device(uuid, 0, pci=pci)),
            *device(C, 0, node="n2"),
            job(J1, 1, 100),
            *attempt(J1, 1, 1, 50, [A, B], "failed", last_iteration=29),
            checkpoint(J1, 1, 20, 20),
            checkpoint(J1, 1, 30, 49),
            case(J1, 1, 25, 45, B),
            evidence(B, 46, "verdict", "persistent", **verdict),
            evidence(B, 47, "xid", "94"),
            *moves(B, (46, "quarantined", "evidence")),
            job(J2, 100, None),
            *attempt(J2, 1, 100, None, [f"{C}@n2"], start_iteration=30, last_iteration=35),
            resume(J2, 1, 30, 101, "/ann/train/30"),
            checkpoint(J2, 1, 35, 120, "/bob/tune/35"),
        ]
    )
    return story


@pytest.fixture
def policy_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text('[rules.xid-contained]\nfirst = "quarantined"\n')
    return str(path)


QUESTIONS: list[tuple[str, ...]] = [
    ("timeline", B),
    ("timeline", "n1:3d:00", "--limit", "2"),
    ("touched", SERIALS[B]),
    ("touched", B, "--since-first-evidence"),
    ("common", "train"),
    ("common", "--failed-since", "2020-01-01"),
    ("offenders", "--days", "3000"),
    ("clusters", "--by", "vbios", "--days", "3000"),
    ("expiring",),
    ("stats", "--days", "3000"),
    ("export", B),
]


def test_supervisor_and_store_tell_the_same(
    history: SqlStore, announced: Served, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_json = {words: (*words, *(() if words[0] == "export" else ("--json",))) for words in QUESTIONS}
    live = {}
    for words in QUESTIONS:
        code, live[words], noted = ask(capsys, *as_json[words])
        assert code == 0 and noted == "", words
    (state / "supervisor.json").unlink()
    for words in QUESTIONS:
        code, stored, noted = ask(capsys, *as_json[words])
        assert code == 0 and noted == "rsup: no supervisor runs; reading the store\n"
        assert without_now(json.loads(live[words])) == without_now(json.loads(stored)), words
        assert ask(capsys, *words)[1].strip()


def without_now(answer: Any) -> Any:
    """Without times of asking, and what is counted up to them."""
    if isinstance(answer, dict):
        left_out = ("since", "until", "exported", "window", "hours", "exposure_hours", "expected", "ratio", "above_one")
        return {k: without_now(v) for k, v in answer.items() if k not in (*left_out, "probability", "none", "experiment")}
    return [without_now(one) for one in answer] if isinstance(answer, list) else answer


def test_what_people_read(history: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = ask(capsys, "timeline", B)[1]
    for part in (f"device {B}: serial {SERIALS[B]}", "now: quarantined since", "in n1:00000000:3d:00.0", "persistent"):
        assert part in timeline
    touched = ask(capsys, "touched", B)[1]
    for part in (
        "2 jobs, 2 attempts, 2 checkpoints to verify again",
        "newest checkpoint from before the suspicion: iteration 20",
        "/bob/tune/35",
    ):
        assert part in touched
    common = ask(capsys, "common", "train")[1]
    assert "1 failure, " in common and "EXPECTED" in common and "next: " in common
    assert "in trouble" in ask(capsys, "clusters", "--by", "rack", "--days", "3000", "--rack-pattern", "^(n)")[1]
    assert "1 quarantined" in ask(capsys, "stats")[1]
    assert "at 2025-11-29T21:00:30Z: clear" in ask(capsys, "timeline", B, "--at", "2025-11-29T21:00:30Z")[1]


def test_questions_about_nodes(history: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "timeline", "n1", "--json", kind="node")
    assert code == 0 and json.loads(out)["subject"] == {"kind": "node", "node": "n1"}
    assert ask(capsys, "touched", "n1", kind="node")[0] == 2
    record = json.loads(ask(capsys, "export", "n1", kind="node")[1])
    assert record["identity"] == {"kind": "node", "node": "n1"} and record["stays"] and record["use"]["hours"] > 0
    assert {row["node"] for row in record["use"]["placements"]} == {"n1"}
    text = ask(capsys, "export", "n1", "--text", kind="node")[1]
    assert text.startswith("node n1\nwith GPU-") and "state clear" in text
    assert ask(capsys, "export", "n9", kind="node")[0] == 1
    assert ask(capsys, "stats", kind="node")[0] == 0


def test_a_replay_from_the_command_line(history: SqlStore, policy_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "replay", "--policy", policy_file, "--days", "3650", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["policy"] == "rsup-1+mine" and answer["counts"]["quarantined"] == 1
    assert "1 quarantined" in ask(capsys, "replay", "--policy", policy_file, "--days", "3650")[1]


def test_a_replay_over_rest_is_for_operators(
    history: SqlStore, announced: Served, policy_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("replay", "--policy", policy_file, "--days", "90", "--supervisor", announced.address, "--json")
    code, out, _ = ask(capsys, *words)
    assert code == 0 and json.loads(out)["counts"]["quarantined"] == 0
    body = {"policy": Path(policy_file).read_text(), "days": 90}
    assert problem_of(announced.client("user").post("/api/v1/history/replay", json=body), 403)
    wrong = announced.client().post("/api/v1/history/replay", json={**body, "policy": "= 1"})
    assert "the device policy the policy is no TOML" in problem_of(wrong, 422)


def test_an_export_is_one_file(history: SqlStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "ticket.json"
    assert ask(capsys, "export", B, "--output", str(target))[0] == 0
    assert json.loads(target.read_text())["identity"]["serial"] == SERIALS[B]
    code, _, err = ask(capsys, "export", B, "--output", str(target))
    assert code == 2 and "exists" in err
    assert ask(capsys, "export", B, "--output", str(tmp_path / "no" / "where"))[0] == 2
    assert f"serial {SERIALS[B]}" in ask(capsys, "export", B, "--text")[1]


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    (("timeline", "GPU-nothing"), 1, "no device 'GPU-nothing'"),
    (("touched", "GPU-nothing"), 1, "no device 'GPU-nothing'"),
    (("export", "n1:7f:00"), 1, "no device 'n1:7f:00'"),
    (("timeline", "GPU-aaaa"), 2, "may be any of"),
    (("common", "nothing"), 1, "no job 'nothing'"),
    (("common", "tune"), 2, "job tune has no failed attempt"),
    (("common",), 2, "which jobs? name some that failed, or give --failed-since TIME"),
    (("common", "train", "--failed-since", "3d"), 2, "not both"),
    (("timeline", B, "--at", "yesterday"), 2, "--at: 'yesterday' is no time"),
    (("touched", B, "--since", "9999-99-99"), 2, "--since: '9999-99-99' is no time"),
    (("timeline", B, "--cursor", "x"), 2, "is no cursor"),
    (("timeline", B, "--limit", "0"), 2, "is no number"),
    (("offenders", "--days", "-1"), 2, "is no number of days"),
    (("offenders", "--days", "nan"), 2, "is no number of days"),
    (("clusters", "--by", "colour"), 2, "invalid choice"),
    (("replay", "--policy", "/nowhere/p.toml"), 2, "cannot be read"),
]


@pytest.mark.parametrize("live", [False, True], ids=["store", "supervisor"])
def test_bad_input_is_one_line(
    history: SqlStore, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], live: bool
) -> None:
    """An unknown name is 1, wrong usage 2, whoever finds it."""
    history.commit([*device(A.replace("1111", "2222"), 0, pci="5c")])
    if live:
        request.getfixturevalue("announced")
    for words, code, message in WRONG:
        got, out, err = ask(capsys, *words)
        lines = [line for line in err.splitlines() if not line.endswith("reading the store")]
        assert (got, out) == (code, "") and len(lines) == 1 and message in lines[0], (words, got, err)


def test_an_empty_state_directory(own_directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, "offenders")
    assert (code, out) == (1, "") and "has no history yet" in err


def test_others_see_of_a_job_its_public_part(history: SqlStore, announced: Served) -> None:
    for role, expected in ((Role.VIEWER, False), (Role.OPERATOR, True)):
        client = announced.client(role.name.lower())
        touched = client.get(f"/api/v1/devices/{B}/touched").json()
        assert all(("reverify" in entry) is expected for entry in touched["jobs"]) and len(touched["jobs"]) == 2
        assert ("/secret/place" in client.get(f"/api/v1/devices/{B}/timeline").text) is expected
        status = client.get(f"/api/v1/devices/{B}/export", params={"with_jobs": "true"}).status_code
        assert status == (200 if expected else 403)
    assert "/secret/place" in announced.client("user").get(f"/api/v1/devices/{B}/timeline").text, "ann's own job"


def test_moments_and_pages_over_rest(history: SqlStore, announced: Served) -> None:
    client = announced.client()
    first = client.get(f"/api/v1/devices/{B}/timeline", params={"limit": 2}).json()
    second = client.get(f"/api/v1/devices/{B}/timeline", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert len(first["items"]) == len(second["items"]) == 2 and first["items"] != second["items"]
    then = client.get(f"/api/v1/devices/{B}/timeline", params={"at": "2025-11-29T21:00:30Z"}).json()["then"]
    assert then["state"] == "clear" and at(30) > 0
    assert "is no time" in problem_of(client.get(f"/api/v1/devices/{B}/timeline", params={"at": "noon"}), 422)
