"""The reading commands, with a supervisor and without: what people see, what JSON holds, how they end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rsup.launcher import cli
from rsup.supervisor import places, query_cli, request_outcome
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.records import EventLogged
from rsup.supervisor.sources import Sources
from rsup.supervisor.sql_store import SqlStore
from tests.rest.played import TOKENS, PlayedSupervisor, Reply, Served
from tests.rest.story import EVIL, RUNNING, at, saved

RSUP = [sys.executable, "-m", "rsup.launcher"]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run a command in this process; return its stdout and stderr."""
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return output.out, output.err


def test_the_store_is_read_when_no_supervisor_runs(story: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "status", "t1", "--json")
    status = json.loads(out)
    assert status["supervisor"] is None
    assert [attempt["outcome"] for attempt in status["attempts"]] == ["failed", "succeeded"]
    assert status["incidents"][0]["signal_name"] == "SIGKILL" and status["incidents"][0]["stacks"]
    assert err == "rsup: no supervisor runs; reading the store\n"


def test_one_that_was_named_and_is_silent_is_not_taken_for_an_empty_store(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSUP_SUPERVISOR_URL", "http://127.0.0.1:1")
    for words in (["jobs"], ["status", "t1"], ["devices", "list"]):
        out, err = told(capsys, *words, code=1)
        assert not out and f"{state} has no store that could be read in its place" in err
    monkeypatch.delenv("RSUP_SUPERVISOR_URL")
    assert "no jobs yet" in told(capsys, "jobs")[0], "nobody was named"


def test_a_state_directory_that_others_may_not_look_into(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's shared supervisor is asked all the same; without one a line says what is wrong."""
    sockets = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    monkeypatch.setenv("RSUP_SOCKET_DIR", str(sockets))
    state.chmod(0)
    was = os.geteuid()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(sockets / "rest.sock"))
            listener.listen()
            (sockets / "rest.sock").chmod(0o777)
            sockets.chmod(0o755)
            if was == 0:
                os.seteuid(65534)
            source = Sources(state, "", note=lambda text: None)
            assert source.supervisor() is not None
        with pytest.raises(QueryError, match=r"cannot look into .*: Permission denied; ask a supervisor"):
            source.read(lambda one: one.jobs(1, "", ""))
    finally:
        os.seteuid(was)
        state.chmod(0o700)
        shutil.rmtree(sockets)


def test_a_running_supervisor_answers_with_live_beats(announced: Served, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "status", EVIL, "--json")
    status = json.loads(out)
    assert status["supervisor"]["address"] == announced.address
    assert [rank["iteration"] for rank in status["ranks"]] == [7, 6] and err == ""


def test_both_sources_tell_the_same_story(announced: Served, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["jobs"], ["events", "t1"], ["stacks", "t1"], ["status", "t1"]):
        live = json.loads(told(capsys, *words, "--json")[0])
        (state / "supervisor.json").rename(state / "aside")
        stored = json.loads(told(capsys, *words, "--json")[0])
        (state / "aside").rename(state / "supervisor.json")
        if words[0] == "status":
            live["supervisor"] = None
        assert live == stored, words


def test_a_supervisor_that_died_or_does_not_answer_is_passed_over(
    announced: Served, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = places.read_supervisor_file(state)
    assert file is not None
    places.SupervisorFile(**{**file.__dict__, "start_ticks": 1}).write(state)
    assert "no supervisor runs" in told(capsys, "jobs")[1]
    places.SupervisorFile(**{**file.__dict__, "rest": "http://127.0.0.1:9"}).write(state)
    out, err = told(capsys, "jobs")
    assert "t1.2" in out and "no answer from the supervisor at http://127.0.0.1:9" in err


def test_a_supervisor_that_was_named_must_answer(story: SqlStore, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "token").write_text(TOKENS["operator"])
    (state / "token").chmod(0o600)
    out, err = told(capsys, "jobs", "--supervisor", "http://127.0.0.1:9", code=1)
    assert out == "" and err.count("\n") == 1 and "no answer" in err
    assert "http://host:port" in told(capsys, "jobs", "--supervisor", "tcp://x", code=2)[1]


def test_people_see_tables(announced: Served, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "jobs")
    assert out.splitlines()[0].split() == [
        "JOB",
        "OWNER",
        "STATE",
        "EXIT",
        "ITERATION",
        "ATTEMPTS",
        "INCIDENTS",
        "CREATED",
        "REASON",
    ]
    assert "succeeded" in out and EVIL in out and "\x1b" not in out
    out, _ = told(capsys, "status")
    assert f"job {EVIL}  running  iteration 6" in out and "looks stuck: rank 1" in out
    assert "step 2.5 s" in out and "no checkpoint reported" in out
    out, _ = told(capsys, "status", "t1")
    assert "goodput 84.0 %" in out and "work done again" in out and "last checkpoint: iteration 60" in out and "SIGKILL" in out


def test_a_report_tells_how_it_was_found_and_what_was_lost(story: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "report", "t1", "--text")
    for part in (
        "Job t1.2 of ann: succeeded, exit code 0",
        "found by     exit of the process, after 10 ms",
        "recovery     2.0 s until every rank had stepped again",
        "lost         5 iterations",
        "only waited  rank 0",
        "6 checkpoints, the last of iteration 60",
    ):
        assert part in out
    assert "Nothing went wrong" in told(capsys, "report", "t1.1", "--text")[0]
    assert "Incident 1" in json.loads(told(capsys, "report", "t1", "--json")[0])["report"]


def test_control_characters_of_a_job_do_not_reach_the_terminal(story: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["events", "t1"], ["stacks", "t1"], ["report", "t1", "--text"], ["status", "t1"], ["jobs"]):
        out = told(capsys, *words)[0]
        assert out and "\x1b" not in out and "\x07" not in out, words


def test_an_unreadable_store_is_replaced_by_the_newest_that_was_used_in_its_place(
    story: SqlStore, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story.close()
    for stamp in ("20260101-000000", "20260102-000000"):
        shutil.copyfile(state / "rsup.db", state / f"rsup-fallback-{stamp}.db")
    (state / "rsup.db").write_bytes(b"this is no database" * 100)
    out, err = told(capsys, "status", "t1", "--json")
    assert json.loads(out)["job"]["name"] == "t1.2"
    (line,) = [line for line in err.splitlines() if "fallback" in line]
    assert "rsup.db" in line and line.endswith(f"reading {state}/rsup-fallback-20260102-000000.db in its place")
    (state / "rsup.db").unlink()
    assert "t1.2" in told(capsys, "jobs")[0]


def test_an_unreadable_store_without_another_is_one_line(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "rsup.db").write_bytes(b"this is no database" * 100)
    assert "rsup.db cannot be read" in told(capsys, "jobs", code=1)[1]


def test_an_empty_place_is_friendly(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "jobs")[0] == "no jobs yet: start one with `rsup launch`\n"
    assert json.loads(told(capsys, "jobs", "--json")[0]) == []
    for words in (["status"], ["report"], ["events"]):
        out, err = told(capsys, *words, code=1)
        assert out == "" and err.splitlines()[-1].startswith(f"rsup {words[0]}: no jobs yet")
    assert "rsup jobs" in told(capsys, "status", "t1", code=1)[1]


def test_an_unknown_job_and_an_ambiguous_one_are_one_line(story: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rsup status: no job 'nope' in this store; `rsup jobs` lists them\n" in told(capsys, "status", "nope", code=1)[1]
    assert "write OWNER/ID" in told(capsys, "status", "shared", code=1)[1]
    assert json.loads(told(capsys, "status", "bob/shared", "--json")[0])["job"]["owner"] == "bob"
    assert json.loads(told(capsys, "status", "local/ann/t1.1", "--json")[0])["job"]["run"] == 1


@pytest.mark.parametrize("verb", ["stop", "checkpoint"])
def test_only_a_running_supervisor_can_change_something(story: SqlStore, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, verb, EVIL, code=1)
    assert out == "" and err.count("\n") == 1 and "no supervisor runs" in err and "rsup jobs" in err


def asked(kind: str, nodes: list[str], *answers: tuple[bool, str]) -> list[EventLogged]:
    """The events of request `q1` of bob's job: that these nodes were asked, and their answers."""
    data: dict[str, object] = {"request_id": "q1", "nodes": nodes}
    events = [EventLogged(RUNNING, 2, at(11), at(11), kind, "asked", data=data)]
    for number, (done, message) in enumerate(answers, 3):
        data = {"request_id": "q1", "done": done, "message": message}
        events.append(EventLogged(RUNNING, number, at(12), at(12), "RequestDone", "", node=f"n{number}", data=data))
    return events


@pytest.mark.parametrize(
    ("verb", "answers", "code", "says"),
    [
        ("checkpoint", [(False, "the script takes no requests")], 1, "not taken up: n3: the script takes no requests"),
        ("checkpoint", [(True, "")], 0, "asked, not answered yet"),
        ("checkpoint", [(True, ""), (True, "")], 0, "all ranks have taken it up"),
        ("stop", [(True, ""), (True, "its ranks got SIGTERM")], 0, "taken up; its ranks got SIGTERM"),
        ("stop", [(False, "the attempt ended before")], 0, "not taken up: n3: the attempt ended before"),
    ],
)
def test_a_request_is_answered_by_the_ranks(
    announced: Served,
    story: SqlStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    answers: list[tuple[bool, str]],
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr(request_outcome, "WITHIN_S", 0.2)
    story.commit(asked(verb, ["n3", "n4"], *answers))
    out, err = told(capsys, verb, EVIL, code=code)
    assert says in (err if code else out) and (out + err).count("\n") == 1
    answer = json.loads(told(capsys, verb, EVIL, "--json", code=code)[0])
    assert answer["taken_up"] is (None if "not answered" in says else "not taken up" not in says)


def test_stop_and_checkpoint_ask_the_supervisor(
    announced: Served, played: PlayedSupervisor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_outcome, "WITHIN_S", 0.0)
    assert told(capsys, "checkpoint", EVIL)[0].startswith("taken up; asked, not answered yet")
    assert json.loads(told(capsys, "stop", f"bob/{EVIL}", "--reason", "enough", "--json")[0])["verb"] == "stop"
    assert [(change.verb, change.job, change.reason) for change in played.changes] == [
        ("checkpoint", RUNNING, ""),
        ("stop", RUNNING, "enough"),
    ]
    told(capsys, "stop", EVIL, "--dry-run")
    told(capsys, "fence", EVIL, "node1", "--reason", "off")
    asked = [(change.verb, change.node, change.dry_run) for change in played.changes[2:]]
    assert asked == [("stop", "", True), ("fence", "node1", False)]
    played.reply = Reply(False, "job is stopping already")
    assert told(capsys, "stop", EVIL, code=1)[1] == "rsup stop: job is stopping already\n"


def test_a_viewer_sees_what_viewers_see(
    announced: Served, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "test-token").write_text(TOKENS["viewer"])
    assert "only its owner and operators" in told(capsys, "status", "t1")[0]
    assert "t1.2" in told(capsys, "jobs")[0]
    assert "only its owner and operators" in told(capsys, "report", "t1", code=1)[1]
    assert "only its owner and operators" in told(capsys, "events", "t1", code=1)[1]
    (state / "test-token").write_text("a-wrong-token-0123456789")
    assert "not known here" in told(capsys, "jobs", code=1)[1]
    monkeypatch.setenv("RSUP_TOKEN_FILE", str(state / "missing"))
    assert "no token file" in told(capsys, "jobs", code=1)[1]
    (state / "test-token").chmod(0o644)
    monkeypatch.setenv("RSUP_TOKEN_FILE", str(state / "test-token"))
    assert "chmod 600" in told(capsys, "jobs", code=1)[1]


def test_the_page_address_is_signed_in(announced: Served, capsys: pytest.CaptureFixture[str]) -> None:
    address = told(capsys, "status", "--page")[0].strip()
    assert announced.client(None).get(address).status_code == 303


@pytest.mark.parametrize(
    "words",
    [
        ["jobs", "--limit", "0"],
        ["jobs", "--limit", "x"],
        ["status", "a", "b"],
        ["stop"],
        ["stacks", "t1", "--rank", "x"],
        ["jobs", "--nope"],
    ],
)
def test_wrong_usage_is_one_line_and_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, *words, code=2)
    assert out == "" and err.count("\n") == 1 and "--help" in err


def test_many_events_are_all_printed(store: SqlStore, capsys: pytest.CaptureFixture[str]) -> None:
    count = query_cli.PAGE + 7
    store.commit([saved(RUNNING, "ended"), *(EventLogged(RUNNING, n, at(n), at(n), "Note", "x") for n in range(1, count + 1))])
    assert [event["number"] for event in json.loads(told(capsys, "events", "--json")[0])] == list(range(1, count + 1))
    assert len(told(capsys, "events", "--last", "3")[0].splitlines()) == 3


def lines_of(process: "subprocess.Popen[str]", lines: list[str]) -> threading.Thread:
    """Read a process's stdout into `lines` on a thread."""
    thread = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")) if process.stdout else None)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def test_follow_prints_news_until_the_job_ends(story: SqlStore) -> None:
    with subprocess.Popen(
        [*RSUP, "events", EVIL, "--follow", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        lines: list[str] = []
        reader = lines_of(process, lines)
        wait_for(lambda: len(lines) == 1, "the first event")
        story.commit([EventLogged(RUNNING, 2, at(20), at(20), "Note", "news")])
        wait_for(lambda: len(lines) == 2, "the news")
        story.commit([EventLogged(RUNNING, 3, at(21), at(21), "JobEnded", "over"), saved(RUNNING, "ended")])
        assert process.wait(timeout=60) == 0
        reader.join(timeout=60)
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3]


def test_watch_goes_on_until_the_job_ends_or_ctrl_c(story: SqlStore) -> None:
    command = [*RSUP, "status", EVIL, "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["job"]["state"] == "running"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()
    story.commit([saved(RUNNING, "ended")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["job"]["state"] == "ended"


def test_a_reader_that_goes_away_is_no_error(store: SqlStore) -> None:
    store.commit([saved(RUNNING, "ended"), *(EventLogged(RUNNING, n, at(n), at(n), "Note", "x" * 500) for n in range(1, 2001))])
    with subprocess.Popen([*RSUP, "events"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=60)
        said = process.stderr.read()
        assert "Traceback" not in said and "Exception" not in said


def test_a_watch_on_a_terminal_redraws_and_fits(story: SqlStore) -> None:
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "LINES": "12", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*RSUP, "status", EVIL, "--watch"], stdout=terminal, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(terminal)
        text = b""
        while text.count(b"\x1b[H") < 2:
            text += os.read(controller, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    os.close(controller)
    screen = text.decode().split("\x1b[H")[1]
    assert "\x1b[1m" in screen and "more lines" in screen and len(screen.splitlines()) <= 12


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys, rsup.supervisor.query_cli as c\ntry:\n    c.main('jobs', ['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'sqlalchemy', 'fastapi', 'torch', 'uvicorn'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
