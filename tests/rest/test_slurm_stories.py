"""Stories of SLURM's jobs, whose launches keep a state directory each, asked for without saying where."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.launcher import cli
from rsup.supervisor import places
from rsup.supervisor.database import DATABASE_NAME, reader_engine
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.records import CaseSaved, EventLogged, JobKey
from rsup.supervisor.rest.app import make_app
from rsup.supervisor.rest.context import RestContext
from rsup.supervisor.rest.server import RestServer
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.standby_page import StandbyPage
from tests.rest.played import TOKENS, PlayedSupervisor, book
from tests.rest.story import EVIL, at, saved, whole_story


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return output.out, output.err


def keep(state: Path, job: str, created_s: float, *, cluster: str = "gpu", run: int = 1) -> Path:
    """A store with one job in that state directory."""
    key = JobKey(cluster, "ann", job, run)
    store = SqlStore.open(
        places.make_state_dir(state) / DATABASE_NAME, holder=LeaseHolder.this_process("test"), alone_may_migrate=True
    )
    created = EventLogged(key, 1, at(created_s), at(created_s), "JobCreated", f"created {job}")
    case = CaseSaved(key, f"{job}-a1-i5", 1, 5, at(created_s), False, [])
    store.commit([saved(key, "ended", exit_code=0, created_us=at(created_s)), created, case])
    store.close()
    os.utime(state / DATABASE_NAME, (created_s, created_s))
    return state


@pytest.fixture
def home(own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user has state who has set nothing."""
    monkeypatch.setenv("HOME", str(own_directories))
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.delenv("RSUP_STATE_DIR")
    return places.usual_state_dir()


def test_jobs_of_slurm_are_found_without_a_flag(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = keep(home, "mine", 50)
    first = keep(home / "slurm/gpu-4711", "4711", 10)
    second = keep(home / "slurm/gpu-4712", "4712", 90)
    named = keep(home / "slurm/gpu-4713", "named", 30)
    (home / "slurm/gpu-4714").mkdir()
    found = json.loads(told(capsys, "jobs", "--json")[0])
    assert [(job["id"], job.get("state_dir")) for job in found] == [
        ("4712", str(second)), ("mine", None), ("named", str(named)), ("4711", str(first)),
    ]  # fmt: skip
    out, err = told(capsys, "jobs")
    assert "STATE DIRECTORY" in out and "slurm/gpu-4711" in out and "slurm/gpu-4713" in out and err.count("\n") == 1
    assert len(json.loads(told(capsys, "jobs", "--limit", "2", "--json")[0])) == 2
    for job, folder in (("4711", first), ("ann/4711", first), ("4711.1", first), ("named", named)):
        for words in (["status", job], ["events", job], ["report", job], ["cases", "list", job]):
            out, err = told(capsys, *words, "--json")
            assert folder.name in err and "of this SLURM job is in" in err and job.strip("an/").removesuffix(".1") in out, words
    out, err = told(capsys, "status", "mine", "--json")
    assert json.loads(out)["job"]["id"] == "mine" and "SLURM" not in err
    out, err = told(capsys, "status", "--json")
    assert json.loads(out)["job"]["id"] == "4712" and str(second) in err, "the newest of all"
    cases = json.loads(told(capsys, "cases", "list", "--json")[0])
    assert [one["case_id"] for one in cases] == ["4712-a1-i5", "mine-a1-i5", "named-a1-i5", "4711-a1-i5"]
    assert str(first) in told(capsys, "cases", "show", "4711-a1-i5")[1]
    assert "no stacks" in told(capsys, "stacks", "4711")[0] + told(capsys, "stacks", "4711")[1]
    assert "no job '99' in this store" in told(capsys, "status", "99", code=1)[1]
    assert "no job '4711' in this store" in told(capsys, "status", "4711", "--state-dir", str(ours), code=1)[1], "as asked"


def test_a_store_that_cannot_be_read_and_a_merged_one_are_no_trouble(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(home / "slurm/gpu-1", "1", 10)
    keep(home / "slurm/gpu-2", "2", 20)
    (home / "slurm/gpu-2" / DATABASE_NAME).write_bytes(b"no database" * 100)
    out, err = told(capsys, "jobs", "--json")
    assert [job["id"] for job in json.loads(out)] == ["1"] and "gpu-2" in err
    assert json.loads(told(capsys, "status", "1", "--json")[0])["job"]["id"] == "1"
    assert cli.main(["db", "merge", str(home / "slurm/gpu-1")]) == 0
    capsys.readouterr()
    (job,) = json.loads(told(capsys, "jobs", "--json")[0])
    assert "state_dir" not in job
    out, err = told(capsys, "devices", "show", "GPU-1", "--state-dir", str(home / "slurm"), code=1)
    assert "has no history yet" in err and "db merge" not in err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("RSUP_SUPERVISOR", "ipc:///nowhere/rpc.sock", "of RSUP_SUPERVISOR=ipc:///nowhere/rpc.sock does not answer"),
        ("RSUP_SUPERVISOR", "tcp://far:8651", "set RSUP_SUPERVISOR_URL=http://HOST:PORT"),
        ("RSUP_SOCKET_DIR", "/nowhere", "no supervisor answers in RSUP_SOCKET_DIR=/nowhere"),
    ],
)
def test_a_shared_supervisor_that_does_not_answer_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    for words in (["jobs"], ["events", "4711"], ["devices", "list"]):
        out, err = told(capsys, *words, code=1)
        assert said in err and f"{home} has no store" in err and not out, words
    keep(home / "slurm/gpu-4711", "4711", 90)
    out, err = told(capsys, "jobs", "--json")
    assert [job["id"] for job in json.loads(out)] == ["4711"] and said in err
    keep(home, "mine", 50)
    out, err = told(capsys, "jobs", "--json")
    assert "mine" in {job["id"] for job in json.loads(out)} and said in err and f"reading the store in {home}\n" in err


def test_a_state_directory_of_somebody_else_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(path: Path, **_: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    theirs = keep(home, "mine", 50)
    monkeypatch.setattr(Path, "exists", closed)
    said = told(capsys, "jobs", "--state-dir", str(theirs), code=1)[1]
    assert f"the store {theirs / DATABASE_NAME} cannot be read: Permission denied" in said
    assert cli._fault_text(PermissionError(13, "Permission denied", "/x")) == "/x: Permission denied; whose is it?"


def test_devices_say_where_the_history_of_slurm_jobs_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(home / "slurm/gpu-1", "1", 10)
    assert "slurm/CLUSTER-JOB, see `rsup db merge`" in told(capsys, "devices", "timeline", "GPU-1", code=1)[1]


@pytest.fixture
def sockets(home: Path, own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`RSUP_SOCKET_DIR`; who asks there is ann, who is no operator."""
    folder, token = own_directories / "sockets", own_directories / "ann"
    folder.mkdir()
    token.write_text(TOKENS["user"])
    token.chmod(0o600)
    monkeypatch.setenv("RSUP_SOCKET_DIR", str(folder))
    monkeypatch.setenv("RSUP_TOKEN_FILE", str(token))
    return folder


def listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    bound.listen()
    return bound


@pytest.fixture
def shared(sockets: Path, own_directories: Path) -> "Iterator[tuple[PlayedSupervisor, RestServer]]":
    """A supervisor of this host that has ann's and bob's jobs, at a socket and over TCP."""
    path = places.make_state_dir(own_directories / "shared") / DATABASE_NAME
    store = SqlStore.open(path, holder=LeaseHolder.this_process("test"), alone_may_migrate=True)
    store.commit(whole_story())
    played = PlayedSupervisor(store=store)
    local = listening(sockets / "rest.sock")
    server = RestServer("127.0.0.1", 0, local=local)
    context = RestContext(reader_engine(path), played.submit, book(), played, server.allowed_hosts, 0.2, played.change_hardware)
    played.rest = server.address
    server.start(make_app(context))
    yield played, server
    server.stop()
    local.close()
    context.engine.dispose()
    store.close()


def test_the_hosts_supervisor_is_asked_also_by_who_has_a_store_of_ones_own(
    home: Path, shared: tuple[PlayedSupervisor, RestServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any launch without it leaves such a store, and any SLURM job a directory. Of bob's jobs ann sees no times."""
    keep(home, "mine", 50)
    keep(home / "slurm/gpu-4711", "4711", 90)
    found = json.loads(told(capsys, "jobs", "--json")[0])
    by_id = {job["id"]: job for job in found}
    assert {EVIL, "t1", "mine", "4711"} <= set(by_id) and "created" not in by_id[EVIL]
    assert by_id["mine"]["state_dir"] == str(home) and "state_dir" not in by_id["t1"]
    assert [job["id"] for job in found].index("4711") < [job["id"] for job in found].index("mine")
    for job, text in (("mine", f"launched without this host's supervisor, is in {home}"), ("4711", "of this SLURM job is in")):
        out, err = told(capsys, "status", job, "--json")
        assert json.loads(out)["job"]["id"] == job and text in err
    out, err = told(capsys, "status", "t1", "--json")
    assert json.loads(out)["job"]["owner"] == "ann" and err == ""
    assert "ann may not quarantine node n1" in told(capsys, "nodes", "quarantine", "n1", "--reason", "x", code=1)[1]
    assert "has ended" in told(capsys, "stop", "t1", code=1)[1], "which that supervisor says"
    assert "no supervisor runs" in told(capsys, "stop", "mine", code=1)[1]
    for words in (["devices", "list"], ["nodes", "list"]):
        assert told(capsys, *words)[1] == "", "and no private store is read"
    monkeypatch.setenv("RSUP_STATE_DIR", str(home))
    out, err = told(capsys, "jobs", "--json")
    assert [job["id"] for job in json.loads(out)] == ["mine"], "as asked"
    assert err == f"rsup: no supervisor runs on {home}; reading the store\n"


def test_on_the_host_of_one_that_stands_by_the_leader_answers(
    home: Path,
    sockets: Path,
    shared: tuple[PlayedSupervisor, RestServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    leads = shared[1]
    stands_by = StandbyPage(
        "127.0.0.1:0",
        lambda: (f"this supervisor stands by: the one at {leads.address}", leads.address),
        listening(sockets / "rest.sock"),
    )
    try:
        assert EVIL in {job["id"] for job in json.loads(told(capsys, "jobs", "--json")[0])}
        assert "has ended" in told(capsys, "stop", "t1", code=1)[1]
        monkeypatch.delenv("RSUP_TOKEN_FILE")
        monkeypatch.setenv("RSUP_MUNGE_SOCKET", "/nowhere")
        said = told(capsys, "jobs", code=1)[1]
        assert f"rest.sock stands by, and the one at {leads.address} leads: " in said and "RSUP_TOKEN_FILE" in said
    finally:
        stands_by.stop()
