"""The node's side without SLURM: the hooks' environment, the cap, clocks, and `rsup slurm healthcheck` against a supervisor's
address."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher import cli
from rsup.launcher.slurm import epilog, gate, healthcheck, node_devices, node_link, node_round, prolog, slurm_verb
from rsup.launcher.slurm.hook_text import HOOKS, hook_text
from rsup.launcher.slurm.install import main as install
from rsup.launcher.slurm.node_devices import DriverHangs, Found, read_devices
from rsup.launcher.slurm.node_settings import NodeProblem, NodeSettings, boot_id, read_settings, read_trusted
from rsup.launcher.slurm.node_spool import NodeEvent, NodeSpool
from rsup.supervisor.slurm.signing import load_key
from rsup.supervisor.wire import EXIT_USAGE, UsageError
from tests.slurm.node_side import NodeSide, Signer, refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def node(tmp_path: Path) -> NodeSide:
    node = NodeSide(tmp_path / "n1", "n1", Signer())
    node.boards({str(index): [f"n1-{index}"] for index in range(4)})
    return node


# ------------------------------------------------------------------------------------------------------------ the hooks


def period() -> int:
    """In which what cannot be answered is told once."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME)) // prolog.UNKNOWN_EVERY_S


def test_the_prolog_in_an_empty_environment(node: NodeSide) -> None:
    """No PATH, no HOME, no language; the exit code and one line; the cap on one job; `on_unknown`."""
    node.tell(devices={"n1-3": refusal(node="n1")})
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_GPUS": "2-3"}
    line = "rsup:Q-17 GPU 3 SDC vote 3/3 jobs; rsup nodes why n1\n"
    done = node.run("prolog", **job)
    assert (done.returncode, done.stdout, done.stderr) == (1, line, "")
    assert [one["key"] for one in node.refusals()] == ["prolog-refused:n1:9:0"] and node.refusals()[0]["device"] == "n1-3"
    assert not (node.places.jobs / "9").exists(), "it has not begun"
    done = node.run("prolog", **job, SLURM_JOB_RESTART_COUNT="3")
    assert (done.returncode, done.stdout) == (0, "") and node.refusals()[-1]["kind"] == "gate-cap", "sent away enough"
    assert json.loads((node.places.jobs / "9").read_text())["gpus"] == ["n1-2", "n1-3"]

    node.places.snapshot.unlink()
    begun = period()
    for _ in range(3):
        assert node.run("prolog", **job).returncode == 0
    num_told = [one["kind"] for one in node.refusals()].count("gate-unknown")
    assert 1 <= num_told <= 1 + period() - begun, "told once, not once a job"
    node.settings(mode="enforce", on_unknown="refuse")
    assert node.run("prolog", **job).returncode == 1
    assert node.run("prolog", **job, SLURM_JOB_RESTART_COUNT="3").returncode == 0, "within the cap"
    node.settings(mode="observe", on_unknown="refuse")
    assert node.run("prolog", **job).returncode == 0, "observing refuses nobody"


def test_what_observing_would_refuse_and_the_cap_are_in_the_log(node: NodeSide) -> None:
    node.tell(devices={"n1-3": refusal(node="n1")})
    node.settings(mode="observe")
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_GPUS": "2-3"}
    done = node.run("prolog", **job)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (line,) = node.log().splitlines()
    told = "job=9: let in: rsup:observe would refuse: Q-17 GPU 3 SDC vote 3/3 jobs; rsup nodes why n1"
    assert line.endswith(f" prolog node=n1 {told}")
    assert node.run("prolog", **job | {"SLURM_JOB_GPUS": "2"}).returncode == 0 and len(node.log().splitlines()) == 1
    node.settings(mode="enforce")
    assert node.run("prolog", **job, SLURM_JOB_RESTART_COUNT="3").returncode == 0
    assert "job=9: let in: rsup:cap let in after 3 restarts, against: Q-17 GPU 3" in node.log().splitlines()[-1]


def test_a_refusal_stands_whatever_becomes_of_the_notes(node: NodeSide) -> None:
    """The time is over while a sick disk takes the prolog's notes; or not even a kill ends it, and the hook gives up."""
    node.tell(devices={"n1-3": refusal(node="n1")})
    for note, gpus, code, marks in (
        ("os.kill(os.getpid(), signal.SIGALRM); time.sleep(60)", "3", 1, ["rsup-refused"]),
        ("os.kill(os.getpid(), signal.SIGALRM); time.sleep(60)", "2", 0, []),
        ("raise NodeProblem", "2", 0, []),
    ):
        script = (
            "import os, signal, sys, time; from rsup.launcher.slurm.node_settings import NodeProblem\n"
            f"from rsup.launcher.slurm import prolog\ndef note(asked): {note}\nprolog._spool = note; sys.exit(prolog.main([]))"
        )
        environ = {**node.environ, "SLURM_JOB_ID": "9", "SLURM_JOB_GPUS": gpus}
        done = subprocess.run([sys.executable, "-I", "-c", script], env=environ, capture_output=True, text=True, timeout=90)
        assert (done.returncode, done.stdout.splitlines()[1:], done.stderr) == (code, marks, ""), note
    for mark, code in (("echo rsup-refused", 1), ("", 0)):
        node.python(f"echo rsup:Q-17 bad; {mark}\nexit 137")
        assert node.run("prolog").returncode == code


def test_the_epilog_spools_xids_before_it_asks_a_driver_that_may_hang(node: NodeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    node.tell()
    node.places.kernel_log.write_text("4,4,1,-;before\n")
    assert node.run("prolog", SLURM_JOB_ID="9", SLURM_JOB_GPUS="1").returncode == 0
    node.places.kernel_log.write_text("4,4,1,-;before\n4,5,1,-;NVRM: Xid (PCI:0000:11:00): 79, GPU has fallen off the bus\n")
    spooled: list[list[str]] = []

    def hang(*_: object) -> Found:
        spooled.append([event["kind"] for event in node.events()])
        raise DriverHangs("NVML has not answered for 2.5 s")

    monkeypatch.setattr(epilog, "read_devices", hang)
    epilog.collect({**node.environ, "SLURM_JOB_ID": "9", "SLURM_JOB_GPUS": "1"})
    assert spooled == [["job-end", "xid"]]


def test_the_gate_loads_nothing_heavy_and_is_closed_to_the_users_python(node: NodeSide, tmp_path: Path) -> None:
    node.tell()
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    environ = {**node.environ, "PYTHONPATH": str(tmp_path)}
    for main in (
        "from rsup.launcher.slurm import prolog; code = prolog.main([])",
        "from rsup.launcher import cli; code = cli.main(['gate'])",
        "from rsup.launcher import cli; code = cli.main(['slurm', 'prolog'])",
    ):
        script = f"import sys; {main}; print(code, *sorted(sys.modules))"
        done = subprocess.run([sys.executable, "-I", "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True)
        words = done.stdout.splitlines()[-1].split()
        assert words[0] == "0" and "cryptography" in words
        heavy = {"msgspec", "zmq", "sqlalchemy", "fastapi", "torch", "ssl", "http.client", "asyncio", "subprocess"}
        slow = {"dataclasses", "socket", "argparse", "traceback"}  # a fifth of the time together
        assert not (heavy | slow) & set(words), main


def test_the_exit_code_of_wrong_usage_is_one() -> None:
    """The command has it without loading `wire`, which takes the gate's time."""
    assert cli.EXIT_USAGE == slurm_verb.EXIT_USAGE == gate.EXIT_USAGE == EXIT_USAGE


def test_rsup_gate_says_it_by_exit_code(
    node: NodeSide, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    node.tell(devices={"n1-3": refusal(node="n1")}, nodes={"n5": refusal()})
    rsup = [sys.executable, "-m", "rsup.launcher", "gate"]

    def ask(*words: str) -> tuple[int, str]:
        done = subprocess.run([*rsup, *words], capture_output=True, text=True)
        return done.returncode, done.stdout

    assert ask()[0] == 0
    assert ask("--node=n5") == (1, "rsup:Q-17 node n5 SDC vote 3/3 jobs; rsup nodes why n5\n")
    assert ask("--uuids", "n1-3")[0] == 1
    code, text = ask("--gpus", "0,2-3", "--json")
    assert code == 1 and json.loads(text)["device"] == "n1-3"
    node.tell(devices={"n1-3": refusal(node="n1"), "n5-3": refusal(node="n5")})
    assert ask("--node=n5", "--gpus=3")[0] == 75, "another node's index 3 is not the board that has it here"
    assert ask("--node=n5", "--gpus=3", "--uuids=n5-3")[0] == 1
    told = "refused to jobs that get it: n1-3, Q-17 SDC vote 3/3 jobs"
    assert ask() == (0, f"rsup:ok nothing against n1 itself; {told}\n"), "who asks by hand hears of it"
    assert ask("--node=nope") == (0, "rsup:ok nothing known against nope, if there is such a node\n")
    node.settings(mode="enforce", whole_node=True)
    assert ask()[0] == 1 and ask("--gpus=0")[0] == 0, "without gres a job has all GPUs of its node"
    node.settings(mode="observe")
    assert ask("--gpus", "3") == (0, "rsup:observe would refuse: Q-17 GPU 3 SDC vote 3/3 jobs; rsup nodes why n1\n")
    node.places.snapshot.unlink()
    assert ask()[0] == 75
    for words in (
        ["--gpus", "x"],
        ["--nodes", "n1"],
        ["--node"],
        ["--gpus", "0-99999999"],
        ["--gpus="],
        ["--gpus", ","],
        ["--gpus", "3-1"],
        ["--node", "n[0-3]"],
    ):
        assert gate.main(words) == 2
    err = capfd.readouterr().err
    assert "see rsup gate --help" in err and "--gpus names none" in err and "several nodes; ask about one at a time" in err
    for verb in (prolog, epilog):
        assert verb.main(["--help"]) == 0 and capfd.readouterr().out.startswith("usage: rsup slurm ")
    gate.end_time_box()


def test_a_line_has_no_word_that_lost_its_apostrophe(node: NodeSide) -> None:
    """SLURM's log takes none, so no text of ours has one."""
    node.tell()
    node.places.snapshot.write_bytes(node.places.snapshot.read_bytes()[:-1])
    assert gate.ask(node.environ).answer.line.startswith("rsup:unknown the snapshot signature is wrong: it is cut off")


def test_the_age_is_the_boot_clocks_and_not_the_walls(node: NodeSide) -> None:
    """Node and supervisor five minutes apart, either way; a clock that steps back or forth by a day changes nothing."""
    now_us = time.time_ns() // 1000
    for made_us in (now_us - 300_000_000, now_us + 300_000_000, 0, now_us + 86_400_000_000):
        node.tell(nodes={"n1": refusal()}, made_us=made_us)
        for wall_s in (time.time() - 86_400, time.time(), time.time() + 86_400):  # when it was written, by the wall clock
            os.utime(node.places.snapshot, (wall_s, wall_s))
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 60
            confirmed = {"boot_id": boot_id(), "boottime_s": age_s, "serial": 7, "etag": '"7"'}
            node.places.confirmed.write_text(json.dumps(confirmed))
            assert gate.ask(node.environ).exit_code == 1
            node.places.confirmed.write_text(json.dumps(confirmed | {"boottime_s": age_s - 3600}))
            assert gate.ask(node.environ).answer.why == "old"
    for changes in ({"boot_id": "another"}, {"serial": 6}, {"boottime_s": age_s + 3600}):  # nobody has confirmed this one
        node.places.confirmed.write_text(json.dumps(confirmed | changes))
        assert gate.ask(node.environ).answer.line.startswith("rsup:unknown no supervisor has confirmed this snapshot in this")
    node.places.confirmed.unlink()
    assert gate.ask(node.environ).answer.why == "old", "the file's own time is no word of a supervisor"


def test_in_the_reservation_of_a_quarantine_tests_are_let_in(node: NodeSide) -> None:
    node.settings(mode="enforce", on_unknown="refuse")
    node.tell(nodes={"n1": refusal()}, devices={"n1-3": refusal(node="n1")})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0-3"}
    assert (
        node.run("prolog", **job).returncode == 1 and node.run("prolog", **job, SLURM_JOB_RESERVATION="maint").returncode == 1
    )
    node.places.snapshot.unlink()
    done = node.run("prolog", **job, SLURM_JOB_RESERVATION="rsup_q_n1")
    assert done.returncode == 0 and gate.ask(node.environ | {"SLURM_JOB_RESERVATION": "rsup_q_n2"}).exit_code == 75
    assert gate.ask(node.environ | {"SLURM_JOB_RESERVATION": "rsup_q_n1"}).answer.why == "test"


def test_files_that_others_may_write_are_not_believed(node: NodeSide) -> None:
    node.tell(nodes={"n1": refusal()})
    for path in (node.places.root / "etc/rsup/supervisor.pub", node.places.settings, node.places.snapshot):
        path.chmod(0o666)
        assert gate.ask(node.environ).exit_code == 75
        path.chmod(0o644)
    assert gate.ask(node.environ).exit_code == 1
    node.places.inventory.unlink()
    os.mkfifo(node.places.inventory)  # would block whoever opens it
    with pytest.raises(NodeProblem, match="no regular file"):
        read_trusted(node.places.inventory, 10)


def test_a_gate_that_is_slow_ends_undecided(node: NodeSide) -> None:
    script = "import time; from rsup.launcher.slurm.gate import start_time_box; start_time_box(0.05); time.sleep(60)"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=90)
    assert done.returncode == 75 and done.stdout == "rsup:unknown the gate took longer than 0.05 s\n"


@pytest.mark.parametrize("name", HOOKS)
def test_a_child_that_stays_behind_does_not_hold_up_slurm(node: NodeSide, name: str) -> None:
    """Rule 9: it keeps the interpreter's pipe open, not SLURM's; `run` would give up after half a minute."""
    left = node.places.root / "left"
    node.python(f"sleep 90 & echo $! >{left}; exit 0")
    try:
        assert node.run(name).returncode == 0
    finally:
        os.kill(int(left.read_text()), 9)


@pytest.mark.parametrize("name", HOOKS)
def test_the_shipped_hooks_are_those_that_install_writes(name: str) -> None:
    assert (ROOT / "deploy/slurm" / name).read_text() == hook_text(name)
    assert os.access(ROOT / "deploy/slurm" / name, os.X_OK)


# ------------------------------------------------------------------------------------------------- settings and install


def test_a_slip_in_the_settings_observes(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    assert read_settings(path) == NodeSettings()
    path.write_text('supervisor = "http://a:1, http://b:2"\nmode = "enforce"\nmax_age_s = 60\n')
    assert read_settings(path) == NodeSettings(supervisor=("http://a:1", "http://b:2"), mode="enforce", max_age_s=60.0)
    for text in (
        "mode = 'on'",
        "max_age = 3",
        "max_age_s = 'x'",
        "max_restarts = true",
        "supervisor = 3",
        "jitter_s = 90",
        "x",
        "a\0",
    ):
        path.write_text(text)
        found = read_settings(path)
        assert found.problem and found.mode == "observe", text
    path.write_text('supervisor = "http://a:1"\nmode = "on"\n')
    assert read_settings(path).supervisor == ("http://a:1",), "there it can say what is wrong"


def test_install_writes_once_and_says_what_is_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSUP_NODE_ROOT", str(tmp_path))
    conf, key = tmp_path / "slurm.conf", tmp_path / "key"
    conf.write_text("ReturnToService=2\n")
    key.write_bytes(Signer().public)
    pythons = [script(tmp_path / name, f'exec {sys.executable} "$@"') for name in ("python", "new-python")]
    words = ["--supervisor", "http://ctl:29600", "--slurm-conf", str(conf), "--public-key", str(key), "--python", pythons[0]]
    assert install([*words, "--dry-run"]) == 0 and not (tmp_path / "etc").exists()
    text = capsys.readouterr().out
    assert f"to write {tmp_path}/etc/rsup/supervisor.pub" in text and f"missing  {tmp_path}/etc/rsup/supervisor.pub" not in text
    assert install(words) == 0, "what slurm.conf lacks is said, and is no fault of this"
    text = capsys.readouterr().out
    assert (
        "unsafe: PrologFlags lacks" in text
        and "PrologFlags=Alloc,DeferBatch" in text
        and f"missing  {tmp_path}/etc/rsup/token" in text
    )
    settings = read_settings(tmp_path / "etc/rsup/node.toml")
    assert (settings.supervisor, settings.mode, settings.problem) == (("http://ctl:29600",), "observe", "")
    assert f"PYTHON={pythons[0]}\n" in (tmp_path / "usr/libexec/rsup/prolog").read_text()
    assert (tmp_path / "var/spool/rsup").stat().st_mode & 0o777 == 0o700
    (tmp_path / "etc/rsup/node.toml").write_text('mode = "enforce"\n')
    (tmp_path / "etc/rsup/supervisor.pub").write_text("junk\n")
    assert install([*words[:4], "--mode", "observe", "--python", pythons[1]]) == 1, "not all is as asked"
    text = capsys.readouterr().out
    assert "supervisor is not set, not http://ctl:29600; edit it" in text and "mode is enforce, not observe; edit it" in text
    assert f"unusable {tmp_path}/etc/rsup/supervisor.pub: this is not the public key of the supervisor" in text
    assert "kept     " in text and f"changed  {tmp_path}/usr/libexec/rsup/prolog" in text
    assert read_settings(tmp_path / "etc/rsup/node.toml").mode == "enforce"
    assert install(["--check", "--slurm-conf", str(conf)]) == 1
    for junk in (b"", b"\x7fELF\0\1\nA=b\n"):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(UsageError, match=r"is no slurm\.conf"):
            install(["--check", "--slurm-conf", str(tmp_path / "junk")])
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nope"))
    with pytest.raises(UsageError, match=r"cannot read .*nope"):
        install(["--check"])
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setattr("rsup.launcher.slurm.install.CONF_PLACES", ())
    assert install(["--check"]) == 1, "nothing was looked at"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_install_writes_nothing_where_the_gate_would_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSUP_NODE_ROOT", str(tmp_path / "root"))
    load_key(tmp_path)
    (tmp_path / "junk").write_text("hello\n")
    old = tmp_path / "old"
    old.write_text((tmp_path / "signing-key").read_text().removeprefix("rsup-signing-key "))
    (tmp_path / "old.pub").write_bytes(Signer().public)
    broken = script(tmp_path / "python", "echo 'ModuleNotFoundError: No module named rsup' >&2; exit 1")
    for option, value, said in (
        ("--python", "/nope/python", "No such file"),
        ("--python", broken, "cannot load rsup: ModuleNotFoundError"),
        ("--supervisor", "notaurl", "is no address"),
        ("--supervisor", "http://[::1", "is no address"),
        ("--public-key", "/nope", "cannot read --public-key /nope: No such file"),
        ("--public-key", str(tmp_path / "junk"), "not the public key of the supervisor"),
        ("--public-key", str(tmp_path / "signing-key"), "private signing key, which no node may have"),
        ("--public-key", str(old), "its public part is beside it"),
        ("--hooks", "rel/dir", "an absolute path is wanted"),
        ("--mode", "act", "invalid choice: 'act'"),
    ):
        with pytest.raises(UsageError, match=said):
            install([option, value])
    assert not (tmp_path / "root").exists()


# -------------------------------------------------------------------------------------------------------- the healthcheck


class StandIn:
    """A supervisor's two addresses. `answer` replaces what it says to a request."""

    def __init__(self, data: bytes) -> None:
        self.data, self.etag = data, '"7"'
        self.requests: list[tuple[str, str]] = []
        self.reports: list[dict[str, Any]] = []
        self.gates: list[dict[str, Any]] = []
        """What was told of the gate alone."""
        self.statuses: list[int] = []
        """Of the next answers, before the usual ones begin again."""
        self.poison = ""
        """The key of an event that it does not understand."""
        self.oversized = ""
        """The key of an event that a proxy before it finds too large."""
        self.max_devices = 1 << 20
        self.url = ""
        self.token = "node.n1.00"

    def handle(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        self.requests.append((request.command, request.headers.get("If-None-Match", "")))
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return status, json.dumps({"title": "no", "detail": "standby"}).encode()
        if request.command == "GET":
            return (304, b"") if request.headers.get("If-None-Match") == self.etag else (200, self.data)
        assert request.path == "/api/v1/nodes/n1/report"
        report = json.loads(body)
        if any(event["key"] == self.poison for event in report["events"]):
            return 422, b'{"detail": "what is that?"}'
        if any(event["key"] == self.oversized for event in report["events"]):
            return 413, b""
        if len(report["inventory"] or []) > self.max_devices:
            return 422, b'{"detail": "body.inventory: too many items"}'
        if "gate" in report:
            assert report["events"] == [] and report["inventory"] is None
            self.gates.append(report["gate"])
        else:
            self.reports.append(report)
        return 200, b"{}"


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, data = stand_in.handle(self)
            self.send_response(status)
            self.send_header("ETag", stand_in.etag)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def supervisor(node: NodeSide, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    token = node.places.root / "etc/rsup/token"
    token.write_text("node.n1.00\n")
    token.chmod(0o600)
    node.places.devices.write_text(
        json.dumps([{"uuid": f"n1-{index}", "pci_bus_id": f"0{index + 1}:00.0"} for index in range(4)])
    )
    with serving(StandIn(node.signer.snapshot(nodes={"n1": refusal()}))) as stand_in:
        node.settings(mode="enforce", supervisor=stand_in.url)
        yield stand_in


def go() -> tuple[list[str], list[str]]:
    return healthcheck.run_round(with_jitter=False)


def test_a_round_fetches_verifies_and_delivers(node: NodeSide, supervisor: StandIn) -> None:
    node.places.inventory.unlink()
    node.places.kernel_log.write_text("4,5,1,-;NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus\n6,6,1,-;else\n")
    NodeSpool(node.places.spool).add(NodeEvent("job-end:x", 1, "job-end", job="4"))
    problems, said = go()
    assert problems == [] and "snapshot 7: 1 node refused" in said
    assert gate.ask(node.environ).exit_code == 1
    (report,) = supervisor.reports
    assert [one["uuid"] for one in report["inventory"]] == [f"n1-{index}" for index in range(4)] and report[
        "boot_id"
    ] == boot_id()
    assert [(one["kind"], one["device"], one["code"]) for one in report["events"]] == [
        ("job-end", None, None),
        ("xid", "n1-1", 79),
    ]
    assert node.events() == []

    assert go()[0] == [] and supervisor.requests[-1] == ("GET", '"7"'), "asked conditionally, nothing new to tell"
    before = node.places.snapshot.read_bytes()
    supervisor.etag, supervisor.data = '"8"', node.signer.snapshot(serial=8)
    assert go()[0] == [] and gate.ask(node.environ).exit_code == 0, "released"
    node.places.snapshot.write_bytes(before)  # as between the two writes
    assert gate.ask(node.environ).exit_code == 1, "either of them is confirmed while one takes the place of the other"
    assert go()[0] == [] and gate.ask(node.environ).exit_code == 0

    # A board that was there in this boot and is gone is told, once; it stays in the inventory.
    node.places.devices.write_text(json.dumps([{"uuid": f"n1-{index}"} for index in (0, 2, 3)]))
    assert go()[0] == [] and go()[0] == []
    last = supervisor.reports[-1]
    assert [(one["kind"], one["device"]) for one in last["events"]] == [("missing", "n1-1")]
    assert [one["uuid"] for one in last["inventory"] if one.get("missing")] == ["n1-1"]


def test_what_a_round_does_not_believe_and_does_not_lose(node: NodeSide, supervisor: StandIn) -> None:
    assert go()[0] == []
    good = node.places.snapshot.read_bytes()
    supervisor.etag = '"9"'
    for data, said in (
        (Signer().snapshot(serial=9), "signed by key"),
        (node.signer.snapshot(serial=9)[:-30], "signature is wrong"),
        (node.signer.snapshot(serial=3, made_us=5), "older than 7"),
        (node.signer.signed(b'{"schema": 2}'), "schema 2"),
        (node.signer.signed(b"[]"), "cannot be read"),
        (b"<html>a proxy's page</html>", "is no snapshot"),
    ):
        supervisor.data = data
        NodeSpool(node.places.spool).add(NodeEvent("job-end:x", 1, "job-end"))
        problems, _ = go()
        assert len(problems) == 1 and said in problems[0], problems
        assert node.places.snapshot.read_bytes() == good and gate.ask(node.environ).exit_code == 1
    assert len(node.events()) == 6, "events wait for a supervisor that is ours"
    supervisor.data = node.signer.snapshot(serial=9)
    supervisor.poison = "bad"
    NodeSpool(node.places.spool).add(NodeEvent("bad", 1, "of the future"))
    (node.places.spool / "0-0-0.json").write_text('{"key": "cut o')
    problems, _ = go()
    assert problems == ["event bad dropped: what is that?"] and node.events() == []
    assert sum(len(report["events"]) for report in supervisor.reports) == 6


def test_an_event_that_is_too_large_for_a_proxy_stays_and_is_in_nobodys_way(node: NodeSide, supervisor: StandIn) -> None:
    for number in range(5):
        NodeSpool(node.places.spool).add(NodeEvent(f"job-end:{number}", 1, "job-end"))
    supervisor.oversized = "job-end:0"
    told = f"{supervisor.url} refuses the event job-end:0: 413"
    for number in (4, 1):
        problems, said = go()
        assert problems == [told]
        assert f"{number} events delivered" in said
        assert [event["key"] for event in node.events()] == ["job-end:0"]
        NodeSpool(node.places.spool).add(NodeEvent("job-end:later", 1, "job-end"))
    supervisor.oversized = ""
    assert go()[0] == [] and node.events() == []


def test_an_inventory_that_is_not_taken_costs_no_event(node: NodeSide, supervisor: StandIn) -> None:
    supervisor.max_devices = 3
    for number in range(5):
        NodeSpool(node.places.spool).add(NodeEvent(f"job-end:{number}", 1, "job-end"))
    supervisor.poison = "job-end:2"
    problems, said = go()
    told = f"{supervisor.url} refuses the inventory of 4 devices: 422 body.inventory: too many items; events go without it"
    assert problems == [told, "event job-end:2 dropped: what is that?"]
    assert "4 events delivered" in said and node.events() == []
    assert sorted(event["key"] for report in supervisor.reports for event in report["events"]) == [
        f"job-end:{number}" for number in (0, 1, 3, 4)
    ]
    assert go()[0] == [told], "with an empty spool too, as long as nothing changes"
    supervisor.max_devices = 4
    assert go()[0] == [] and len(supervisor.reports[-1]["inventory"]) == 4
    num_reports = len(supervisor.reports)
    assert go()[0] == [] and len(supervisor.reports) == num_reports


def test_a_delivery_that_does_not_end_in_time_is_not_called_a_silent_supervisor(
    node: NodeSide, supervisor: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go()[0] == []
    monkeypatch.setattr(healthcheck, "SPEAK_WITHIN_S", 2.0)
    hanging = threading.Event()
    monkeypatch.setattr(node_round.Round, "_deliver", lambda self, link: hanging.wait(60))
    try:
        assert go()[0] == ["not all was delivered within 2 s; the rest follows in the next round"]
    finally:
        hanging.set()


def test_however_much_is_wrong_the_line_is_bounded() -> None:
    found = healthcheck.short([f"{number}: {'x' * 5000}" for number in range(300)])
    assert len(found) == healthcheck.MAX_PROBLEMS + 1 and len("; ".join(found)) < 5000
    assert found[-1] == f"and {300 - healthcheck.MAX_PROBLEMS} more problems"
    assert healthcheck.short(["a", "b"]) == ["a", "b"]


def test_a_list_that_no_supervisor_takes_is_refused_here(node: NodeSide, supervisor: StandIn) -> None:
    """Once in the inventory, its devices would count as missing until the node boots again."""
    assert go()[0] == []
    sound, inventory = node.places.devices.read_text(), node.places.inventory.read_bytes()
    for listed, said in (
        ([{"uuid": f"x-{number}"} for number in range(300)], "lists 300 devices, a node has at most 256"),
        ([{"uuid": "x", "serial": "s" * 121}], "record 0: serial is longer than 120 characters"),
    ):
        node.places.devices.write_text(json.dumps(listed))
        assert go()[0] == [f"{node.places.devices}: {said}"] and node.places.inventory.read_bytes() == inventory
    node.places.devices.write_text(sound)
    assert go()[0] == [] and node.events() == []
    assert not any(event["kind"] == "missing" for report in supervisor.reports for event in report["events"])


def test_a_list_of_devices_that_cannot_be_used_is_named_as_what_it_is(node: NodeSide, supervisor: StandIn) -> None:
    node.places.devices.write_text('[{"uuid": "n1-0", "index": 0}]')
    problems, _ = go()
    assert problems[0].startswith(f"{node.places.devices}: record 0: unknown key 'index'; the place in the list is the index")


def test_a_gate_that_is_blind_says_so(node: NodeSide, supervisor: StandIn) -> None:
    """It lets all in, so that nobody would notice: key, age, settings, inventory. Its events wait."""
    assert go()[0] == [] and supervisor.gates == [{"mode": "enforce", "trouble": ""}]
    assert go()[0] == [] and len(supervisor.gates) == 1, "once, while nothing changes"
    node.settings(mode="enforce", supervisor=supervisor.url, max_age_s=1e-9)
    problems, _ = go()
    assert len(problems) == 1 and problems[0].startswith("the gate decides nothing: no supervisor has confirmed")
    node.places.settings.write_text(f'supervisor = "{supervisor.url}"\nmode = "enforced"\n')
    assert go()[0] and go()[0]
    node.settings(mode="enforce", supervisor=supervisor.url)
    supervisor.data, supervisor.etag = Signer().snapshot(serial=9), '"9"'
    NodeSpool(node.places.spool).add(NodeEvent("job-end:x", 1, "job-end"))
    assert "signed by key" in go()[0][0] and gate.ask(node.environ).exit_code == 1
    key = node.places.root / "etc/rsup/supervisor.pub"
    key.write_bytes(Signer().public)
    assert "signed by key" in go()[0][0] and "b'" not in go()[0][0] and len(node.events()) == 1
    told = [one["trouble"] for one in supervisor.gates[1:]]
    assert [one["mode"] for one in supervisor.gates[1:4]] == ["enforce", "observe", "observe"], "each round while it is blind"
    assert "no supervisor has confirmed" in told[0] and "mode is one of observe, enforce" in told[1]
    assert told[3].startswith("it goes by an older snapshot, since: the snapshot was signed by key")
    assert told[4].startswith("the snapshot was signed by key") and len(told) == 6
    key.write_bytes(node.signer.public)
    supervisor.data = node.signer.snapshot(serial=9)
    assert go()[0] == [] and node.events() == [] and supervisor.gates[-1]["trouble"] == ""


def test_a_token_that_no_node_should_have(node: NodeSide, supervisor: StandIn) -> None:
    """It is used, and complained of."""
    path = node.places.root / "etc/rsup/token"
    for token, mode, said in (
        ("an-operators-token-0123456789", 0o600, "holds no node's token"),
        ("node.n2.00", 0o600, "holds the token of node n2, this is n1"),
        ("node.n1.00", 0o644, "can be read by others; chmod 600"),
    ):
        path.write_text(token + "\n")
        path.chmod(mode)
        supervisor.token = token
        problems, words = go()
        assert len(problems) == 1 and problems[0].startswith(f"{path} {said}") and "snapshot 7" in words[1], problems
    path.chmod(0o600)
    assert go()[0] == []


def test_a_supervisor_that_is_away_costs_a_line(node: NodeSide, supervisor: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down, standing by, without a name, silent, or a lookup that hangs: the gate goes on with what it has."""
    assert go()[0] == []
    NodeSpool(node.places.spool).add(NodeEvent("job-end:x", 1, "job-end"))
    supervisor.statuses = [503]
    assert "503 standby" in go()[0][0]
    with serving(StandIn(b"")) as other:
        other.statuses = [503]
        node.settings(mode="enforce", supervisor=[other.url, supervisor.url])
        assert go()[0] == [] and node.events() == [], "the second of two leads"
    NodeSpool(node.places.spool).add(NodeEvent("job-end:y", 1, "job-end"))
    for address, said in (("http://127.0.0.1:9", "refused"), ("http://ctl.invalid:1", "ctl.invalid"), ("ctl:1", "no address")):
        node.settings(mode="enforce", supervisor=address)
        assert said in go()[0][0]
    monkeypatch.setattr(healthcheck, "SPEAK_WITHIN_S", 0.05)
    hanging = threading.Event()
    monkeypatch.setattr(node_link.NodeLink, "snapshot", lambda self, etag="": hanging.wait(20))
    node.settings(mode="enforce", supervisor=supervisor.url)
    assert "within 0.05 s" in go()[0][0]
    assert gate.ask(node.environ).exit_code == 1 and len(node.events()) == 1
    hanging.set()


def test_a_driver_that_hangs_is_evidence(node: NodeSide, supervisor: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> None:
        raise DriverHangs("NVML has not answered for 10 s")

    monkeypatch.setattr(node_round, "read_devices", hang)
    before = node.places.inventory.read_bytes()
    problems, _ = go()
    assert problems == ["NVML has not answered for 10 s"] and node.places.inventory.read_bytes() == before
    go()
    assert [one["kind"] for report in supervisor.reports for one in report["events"]] == ["unreadable"], "once in a boot"


def test_a_process_that_no_kill_ends_is_left_behind(node: NodeSide, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one in a call of a driver that hangs. While it lives no other is started."""
    stuck = node.places.run / "stuck"
    monkeypatch.setattr(sys, "executable", script(tmp_path / "asks", "exec sleep 90"))
    monkeypatch.setattr(node_devices, "END_WITHIN_S", 20)
    with pytest.raises(DriverHangs, match=r"for 0\.05 s"):
        read_devices(node.places, "n1", 0.05)
    assert not stuck.exists(), "a kill has ended it"
    monkeypatch.setattr(node_devices, "END_WITHIN_S", 0.05)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    with pytest.raises(DriverHangs, match=r"for 0\.05 s"):
        read_devices(node.places, "n1", 0.05)
    pid = int(stuck.read_text().split()[0])
    try:
        monkeypatch.setattr(sys, "executable", script(tmp_path / "answers", """echo '{"devices": [], "readings": []}'"""))
        with pytest.raises(DriverHangs, match=f"process {pid}, which no kill ends"):
            read_devices(node.places, "n1", 30)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert read_devices(node.places, "n1", 30) == Found([], [])


def test_a_round_speaks_although_looking_hangs(node: NodeSide, supervisor: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(healthcheck, "LOOK_WITHIN_S", 0.05)
    monkeypatch.setattr(node_round.Round, "look", lambda self: hanging.wait(20))
    problems, said = go()
    hanging.set()
    assert len(problems) == 1 and "has not ended within 0.05 s" in problems[0] and "snapshot 7: 1 node refused" in said


def test_a_full_spool_counts_what_it_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.launcher.slurm.node_spool.MAX_FILES", 3)
    spool = NodeSpool(tmp_path / "spool")
    assert [spool.add(NodeEvent(f"k{number}", 1, "xid")) for number in range(5)] == [True] * 3 + [False] * 2
    assert [event["key"] for _, event in spool.pending(10)] == ["k0", "k1", "k2"]
    assert (spool.take_lost(), spool.take_lost()) == (2, 0)
