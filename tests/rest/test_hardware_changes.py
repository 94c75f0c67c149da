"""Devices and nodes over REST and the command line: states, evidence page by page, verbs, roles, conflicts."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rsup.launcher import cli
from rsup.supervisor.database import DATABASE_NAME
from rsup.supervisor.hardware.client import ChangeRefused, Hardware
from rsup.supervisor.hardware.hostlist import expand, fold
from rsup.supervisor.hardware.verbs import FOR_ANYONE
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.principals import owner_name
from rsup.supervisor.records import DeviceSeen, EvidenceSaved, NodeSeen, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.wire import UsageError
from tests.rest.played import PlayedSupervisor, Served
from tests.rest.story import T1, at
from tests.rest.test_rest_jobs import problem_of

NOW_US = at(10**7)


@pytest.fixture
def fleet(story: SqlStore, played: PlayedSupervisor) -> SqlStore:
    """The story, with five more boards on n1 and n3, one of them quarantined by a verdict that is told in full."""
    played.store = story
    boards = [
        DeviceSeen(f"GPU-{i}", at(60), "n1" if i < 3 else "n3", "H200", f"S-{i}", pci_bus_id=f"0:{i}b:0") for i in range(5)
    ]
    seats = [SeatSaved(one.uuid, at(1), one.node, f"00000000:{one.pci_bus_id[2]}b:00.0", one.serial) for one in boards]
    rows = [
        EvidenceSaved(
            *("device", "GPU-1", f"f{n}", "verdict", "persistent" if n == 0 else "transient", f"job:{n}"),
            *(at(n), at(n), at(n), 2, 2.0 if n == 0 else 0.6),
            job=T1,
            rank=1,
            iteration=25,
            case_id="t1.2-a1-i25",
            text=f"rank 1: nan here, 2.5 elsewhere ({n})\nraw line {n}",
            rule="rsup-1/persistent",
        )
        for n in range(7)
    ]
    bad = SubjectSaved("device", "GPU-1", "quarantined", at(0), "wrong results", 1, 2.0, serial="S-1", held_by_test=True)
    change = TransitionSaved("device", "GPU-1", 1, at(0), "clear", "quarantined", "wrong results", verb="evidence")
    story.commit([*boards, *seats, *rows, bad, change, NodeSeen("n3", at(60), T1, "active", [])])
    return story


@pytest.fixture
def live(fleet: SqlStore, announced: Served) -> Served:
    return announced


@pytest.fixture
def alone(fleet: SqlStore, state: Path) -> Iterator[Path]:
    """The same without a supervisor: nobody holds the store."""
    fleet.close()
    yield state


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(list(words)) == code, capsys.readouterr()
    output = capsys.readouterr()
    return output.out, output.err


# ------------------------------------------------------------------------------------------------------------------- REST


def test_lists_tell_states_and_can_be_filtered(live: Served) -> None:
    client = live.client("viewer")
    items = client.get("/api/v1/devices").json()["items"]
    states = {item["uuid"]: item["state"] for item in items}
    assert states["GPU-1"] == "quarantined" and set(states.values()) == {"clear", "quarantined"}
    (bad,) = client.get("/api/v1/devices?state=quarantined").json()["items"]
    assert (bad["uuid"], bad["version"], bad["evidence"]["counted"], bad["score"]) == ("GPU-1", 1, 7, 2.0)
    assert len(client.get("/api/v1/devices?state=clear&node=n3").json()["items"]) == 2
    assert client.get("/api/v1/nodes?state=suspect").json()["items"] == []
    assert problem_of(client.get("/api/v1/devices?state=broken"), 422).startswith("there is no state 'broken'")


def test_evidence_comes_page_by_page_without_the_raw_lines_of_others(live: Served) -> None:
    for role, raw in (("viewer", ""), ("user", "raw line 6")):
        client, cursor, found = live.client(role), "", []
        while cursor is not None:
            page = client.get(f"/api/v1/devices/GPU-1/evidence?limit=3&cursor={cursor}").json()
            found += page["items"]
            cursor = page["next_cursor"]
        assert [one["fingerprint"] for one in found] == [f"f{n}" for n in reversed(range(7))]
        assert found[0]["raw"] == raw and found[0]["text"].startswith("rank 1: nan here")
    assert problem_of(live.client().get("/api/v1/devices/GPU-1/evidence?cursor=x"), 422)


def test_a_device_is_found_by_any_of_its_names(live: Served) -> None:
    client = live.client()
    for selector in ("GPU-1", "S-1", "n1:1b:00", "n1:1", "n1:00000000:1B:00.0"):
        found = client.get(f"/api/v1/devices/{selector}").json()
        assert found["uuid"] == "GPU-1", selector
    assert found["changes"][0]["after"] == "quarantined" and len(found["newest_evidence"]) == 7


def test_who_may_do_what(live: Served) -> None:
    """DESIGN section 12: anyone may flag a device; quarantine, release and override are the operators'."""
    body = {"reason": "noise", "result": "passed", "without_test": True}
    for verb in ("release", "flag", "note", "quarantine", "tested", "allow", "repair", "retire"):
        path = f"/api/v1/devices/GPU-{'1' if verb == 'release' else '0'}/{verb}"
        for role in ("viewer", "user"):
            expected = 200 if verb in FOR_ANYONE else 403
            assert live.client(role).post(path, json=body).status_code == expected, (role, verb)
        assert live.client("operator").post(path, json=body).status_code == 200, verb
    found = live.client().get("/api/v1/devices/GPU-0").json()
    assert {one["principal"] for one in found["newest_evidence"]} == {"guest", "ann", "root"}
    assert [one["verb"] for one in found["changes"]] == ["retire", "repair", "allow", "quarantine", "evidence", "evidence"]
    assert {one["principal"] for one in found["changes"]} == {"root", ""}


def test_two_people_at_once_and_stale_versions(live: Served) -> None:
    client = live.client()
    version = client.get("/api/v1/devices/GPU-0").json()["version"]
    body = {"reason": "hot", "if_version": version}
    done = client.post("/api/v1/devices/GPU-0/quarantine", json=body).json()
    assert done["standing"]["version"] == 1 and done["message"] == "device GPU-0: clear -> quarantined"
    late = problem_of(client.post("/api/v1/devices/GPU-0/repair", json=body), 409)
    assert "has changed since version 0" in late and "quarantine by root" in late
    again = problem_of(client.post("/api/v1/devices/GPU-0/quarantine", json={"reason": "hot too"}), 409)
    assert "already" in again and "hot" in again


def test_bad_changes_are_refused_in_one_sentence(live: Served) -> None:
    client = live.client()
    assert problem_of(client.post("/api/v1/devices/GPU-none/flag", json={"reason": "x"}), 404)
    assert problem_of(client.post("/api/v1/nodes/none/flag", json={"reason": "x"}), 404)
    for body in ({"reason": " "}, {}):
        said = problem_of(client.post("/api/v1/devices/GPU-0/flag", json=body), 422)
        assert said.startswith("reason: say why") and "--reason" not in said
    assert problem_of(client.post("/api/v1/devices/GPU-0/drain", json={"reason": "x"}), 422)
    assert problem_of(client.post("/api/v1/devices/GPU-0/flag", json={"reason": "x", "more": 1}), 422)
    held = problem_of(client.post("/api/v1/devices/GPU-1/release", json={"reason": "x"}), 409)
    assert "has not passed a test" in held


def test_a_loop_that_does_not_answer_is_a_503(live: Served, played: PlayedSupervisor) -> None:
    played.store = None
    assert problem_of(live.client().post("/api/v1/nodes/n1/flag", json={"reason": "x"}), 503)


# ---------------------------------------------------------------------------------------------------------- command line


def test_a_dry_run_changes_nothing_and_a_change_does(live: Served, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "devices", "quarantine", "GPU-0", "n1:2", "--reason", "noise", "--dry-run")
    assert out.splitlines() == [f"would be: device GPU-{n}: clear -> quarantined" for n in (0, 2)]
    told(capsys, "devices", "quarantine", "GPU-0", "n1:2", "--reason", "noise")
    listed = json.loads(told(capsys, "devices", "list", "--state", "quarantined", "--json")[0])
    assert [one["uuid"] for one in listed] == ["GPU-0", "GPU-1", "GPU-2"]
    _, err = told(capsys, "devices", "quarantine", "S-0", "--reason", "again", code=1)
    assert "already" in err and "noise" in err and len(err.splitlines()) == 1
    out, _ = told(capsys, "devices", "release", "GPU-0", "--without-test", "--reason", "mine", "--if-version", "1", "--json")
    assert json.loads(out)["standing"]["state"] == "probation"
    assert "version 2" in told(capsys, "devices", "release", "GPU-0", "--reason", "x", "--if-version", "1", code=1)[1]


def test_the_same_without_a_supervisor(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "devices", "quarantine", "GPU-0", "--reason", "noise")
    assert out == "device GPU-0: clear -> quarantined\n"
    out, _ = told(capsys, "nodes", "quarantine", "n[1,3]", "--reason", "smoke")
    assert out.splitlines() == ["node n1: clear -> quarantined", "node n3: clear -> quarantined"]
    out, _ = told(capsys, "nodes", "list", "--state", "quarantined")
    assert "n1" in out and f"{owner_name()}: smoke" in out
    out, err = told(capsys, "nodes", "repair", "n1", "n9", "--reason", "x", code=1)
    assert "node n1: quarantined -> in repair" in out and "no node 'n9'" in err
    other = SqlStore.open(alone / DATABASE_NAME, holder=LeaseHolder.this_process("other"), alone_may_migrate=False)
    try:
        _, err = told(capsys, "devices", "flag", "GPU-0", "--reason", "noise", code=1)
        assert "another rsup command changes the store" in err and len(err.splitlines()) == 1
        other.announce("127.0.0.1:1", "")
        _, err = told(capsys, "devices", "flag", "GPU-0", "--reason", "noise", code=1)
        assert "cannot be changed beside it" in err and "127.0.0.1:1" in err and len(err.splitlines()) == 1
    finally:
        other.close()


def test_why_is_the_same_over_rest_and_from_the_store(live: Served, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in (("devices", "GPU-1"), ("nodes", "n3")):
        answer = live.client().get(f"/api/v1/{kind}/{name}/why").json()
        assert json.loads(told(capsys, kind, "why", name, "--json")[0]) == answer
        (state / "supervisor.json").rename(state / "aside")
        assert json.loads(told(capsys, kind, "why", name, "--json")[0]) == answer
        (state / "aside").rename(state / "supervisor.json")
    case = live.client().get("/api/v1/devices/GPU-1/why").json()["cases"][0]
    assert case["case_id"] == "t1.2-a1-i25" and case["findings"]
    foreign = live.client("viewer").get("/api/v1/devices/GPU-1/why").json()
    assert "findings" not in foreign["cases"][0] and {one["raw"] for one in foreign["newest_evidence"]} == {""}
    problem_of(live.client().get("/api/v1/devices/GPU-none/why"), 404)


def test_a_node_names_each_device_once(live: Served, fleet: SqlStore) -> None:
    fleet.commit([NodeSeen("n7", at(60), T1, "active", ["GPU-7", "GPU-7", "GPU-8"])])
    assert live.client().get("/api/v1/nodes/n7").json()["devices"] == ["GPU-7", "GPU-8"]


def test_why_tells_the_story_on_one_screen(live: Served, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "devices", "why", "GPU-1")
    for words in ("quarantined", "since", "wrong results", "iteration 25", "rank 1", "in job t1.2", "nan here, 2.5 elsewhere"):
        assert words in out, words
    assert "left out wherever others suffice" in out and "`rsup devices test GPU-1`" in out and "never by time" in out
    assert len(out.splitlines()) <= 48
    out, _ = told(capsys, "devices", "why", "GPU-0")
    assert "nothing that counts has been seen" in out and "there is nothing to end" in out
    told(capsys, "devices", "allow", "GPU-1", "--for", "8h", "--reason", "tonight")
    assert "somebody's word stands above the evidence" in told(capsys, "devices", "why", "GPU-1")[0]


ERRORS: list[tuple[list[str], int, str]] = [
    (["devices", "show", "GPU-none"], 1, "no device 'GPU-none'"),
    (["devices", "quarantine", "GPU-0"], 2, "--reason"),
    (["devices", "drain", "GPU-0"], 2, "invalid choice"),
    (["devices", "list", "--state", "bad"], 2, "there is no state 'bad'"),
    (["devices", "allow", "GPU-0", "--for", "soon", "--reason", "x"], 2, "--for"),
    (["devices", "allow", "GPU-0", "--for", "900d", "--reason", "x"], 1, "at most 720 h"),
    (["devices", "allow", "GPU-0", "--until", "2020-01-01", "--reason", "x"], 1, "must lie ahead"),
    (["nodes", "flag", "n[1-", "--reason", "x"], 2, "is no list of nodes"),
    (["nodes", "test", "n1"], 2, "a node is tested on the node itself"),
    (["devices", "show", "GPU-"], 1, "needs at least 4 characters"),
    (["devices", "flag", "GPU", "--reason", "x"], 1, "no device 'GPU' in this store; the beginning of a UUID needs at least 4"),
    (["devices", "allow", "GPU-0", "--until", "2h", "--reason", "x"], 2, "--until: '2h' is a duration: give it as --for 2h"),
]


def test_errors_are_one_line(live: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, says in ERRORS:
        _, err = told(capsys, *words, code=code)
        assert says in err and len(err.splitlines()) == 1, words


def test_import_takes_what_other_tools_saw(
    live: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list, lines, or an export; known records change nothing; a bad one names itself."""
    path = tmp_path / "seen.json"
    path.write_text(json.dumps([{"serial": "S-3", "source": "xid", "code": 64, "at": "2027-01-01T00:00:00Z", "text": "kmsg"}]))
    assert "it is now in repair" in told(capsys, "devices", "import", str(path), "--reason", "from kmsg")[0]
    assert "known already" in told(capsys, "devices", "import", str(path), "--reason", "from kmsg")[0]
    path.write_text('{"id": "n3", "source": "person", "code": "flag", "text": "NHC"}\n')
    assert "node n3" in told(capsys, "nodes", "import", str(path), "--reason", "NHC")[0]
    path.write_text('[{"id": "GPU-0", "code": "1"}]')
    assert "record 1" in told(capsys, "devices", "import", str(path), "--reason", "x", code=2)[1]
    path.write_text("nonsense")
    assert "neither JSON" in told(capsys, "devices", "import", str(path), "--reason", "x", code=2)[1]


def test_the_python_api_asks_and_changes(live: Served) -> None:
    hardware = Hardware()
    assert [one["uuid"] for one in hardware.devices(state="quarantined")] == ["GPU-1"]
    assert hardware.change("device", "GPU-0", "flag", "slow")["standing"]["state"] == "watch"
    assert hardware.evidence("device", "GPU-0")[0]["principal"] == "root"
    with pytest.raises(ChangeRefused, match="has not passed a test"):
        hardware.change("device", "GPU-1", "release", "please")
    assert hardware.change("device", "GPU-1", "tested", "12 min of matmul", result="passed")["message"].endswith("quarantined")
    assert hardware.change("device", "GPU-1", "release", "please")["standing"]["state"] == "probation"


def test_changes_from_many_people_are_made_one_after_another(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them wins; each of the others hears who did."""
    monkeypatch.setattr("rsup.supervisor.hardware.client.BUSY_FOR_S", 60.0)

    def quarantine(number: int) -> str:
        try:
            return str(Hardware(alone).change("node", "n1", "quarantine", f"reason {number}")["message"])
        except ChangeRefused as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(quarantine, range(4)))
    assert sum(text == "node n1: clear -> quarantined" for text in said) == 1
    assert all("already" in text or "->" in text for text in said), said


def test_a_change_waits_for_another_command_that_holds_the_store(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.supervisor.hardware.client.BUSY_FOR_S", 60.0)
    other = SqlStore.open(alone / DATABASE_NAME, holder=LeaseHolder.this_process("verb-1"), alone_may_migrate=False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Hardware(alone).change, "node", "n1", "note", "two people at once")
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        other.close()
        assert asked.result(60)["message"] == "node n1: the note is kept; it stays clear"


def test_hostlists() -> None:
    assert expand("n[1-3,07],login,a[1-2]b[0]") == ["n1", "n2", "n3", "n07", "login", "a1b0", "a2b0"]
    assert expand("n[08-11]") == ["n08", "n09", "n10", "n11"]
    for text in ("n[0-3]", "n[00-03]", "n[8-11],login", "n0", "n0a,n0b"):
        assert fold(expand(text)) == text
    with pytest.raises(UsageError, match="names more than 65536 nodes"):
        expand("n[1-99999999]")
    for bad in ("", "n[1-", "n[]", "n[3-1]", "n[a]", "n]1[", "n1,,n2", "n[1-99999999]"):
        with pytest.raises(UsageError):
            expand(bad)
