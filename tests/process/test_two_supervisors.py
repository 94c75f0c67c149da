"""Two supervisors on one PostgreSQL database: one leads, the other takes over; and the database itself goes away."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from rsup.supervisor import rest_source, store_opening, tables
from rsup.supervisor.config import Settings
from rsup.supervisor.daemon_turns import Turns
from rsup.supervisor.database import reader_engine
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.loop import AgentMessage
from rsup.supervisor.places import split_endpoint
from rsup.supervisor.query_source import NoAnswer
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.sources import Sources
from rsup.supervisor.standby import Standby
from rsup.supervisor.store import StoreHeld
from tests.core.job_driver import hello, spec
from tests.process.two_supervisors import Serving, Wire, wait_for
from tests.store.postgres_server import PostgresServer, postgres_server

__all__ = ["postgres_server"]

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import os, time
from pathlib import Path
import rsup.worker
folder, rank, attempt = Path(os.environ["OUT"]), os.environ["RANK"], os.environ["RSUP_ATTEMPT"]
(folder / f"pid-{rank}-{attempt}").write_text(str(os.getpid()))
iteration = 0
while not (folder / "finish").exists():
    iteration += 1
    rsup.worker.set_iteration(iteration)
    time.sleep(0.02)
"""


class Pair:
    """Two supervisors, a job under them, and what the database says of it."""

    def __init__(self, folder: Path, server: PostgresServer) -> None:
        self.folder = folder
        self.server = server
        self.url = server.new_database()
        self.key = folder / "key"
        self.key.write_text("a secret that both supervisors and all nodes know")
        self.key.chmod(0o600)
        self.ended: list[Serving | Wire] = []
        self.jobs: list[subprocess.Popen[bytes]] = []

    def serve(self, name: str, url: str = "", key: Path | None = None) -> Serving:
        one = Serving(self.folder / name, url or self.url, key or self.key)
        self.ended.append(one)
        return one

    def launch(
        self, *addresses: str, num_ranks: int = 2, more: tuple[str, ...] = (), job_id: str = "t1"
    ) -> "subprocess.Popen[bytes]":
        (self.folder / job_id).mkdir(exist_ok=True)
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        options = ["--nproc-per-node", str(num_ranks), "--job-id", job_id, "--max-restarts", "5", *more]
        environment = os.environ | {
            "RSUP_SUPERVISOR": ",".join(addresses),
            "RSUP_KEY_FILE": str(self.key),
            "RSUP_DATABASE_URL": "",
            "OUT": str(self.folder / job_id),
        }
        with self.launch_log.open("ab") as log:
            command = [sys.executable, "-m", "rsup.launcher", "launch", *options, str(script)]
            job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.jobs.append(job)
        return job

    @property
    def launch_log(self) -> Path:
        return self.folder / "launch.log"

    def pid_of(self, rank: int, attempt: int, within_s: float = 90.0, job_id: str = "t1") -> int:
        path = self.folder / job_id / f"pid-{rank}-{attempt}"
        try:
            wait_for(lambda: path.exists() and path.read_text(), path.name, within_s)
        except AssertionError:
            logs = "\n".join(one.log[-3000:] for one in self.ended if isinstance(one, Serving))
            raise AssertionError(f"no {path.name}\n{self.said}\n{logs}\n{self.events()}") from None
        return int(path.read_text())

    @property
    def said(self) -> str:
        return self.launch_log.read_text(errors="replace") if self.launch_log.exists() else ""

    def events(self) -> list[tuple[int, str, int | None]]:
        """Number, kind and rank of every event of the job t1."""
        engine = reader_engine(self.url)
        columns = (tables.events.c.number, tables.events.c.kind, tables.events.c.rank)
        t1 = select(tables.jobs.c.id).where(tables.jobs.c.job_id == "t1").scalar_subquery()
        with engine.connect() as connection:
            rows = [
                (row[0], row[1], row[2])
                for row in connection.execute(select(*columns).where(tables.events.c.job == t1).order_by(columns[0]))
            ]
        engine.dispose()
        return rows

    def end_of(self, job: str) -> tuple[int, list[tuple[str, str]]] | None:
        """The exit code and the events (kind, text) that the store has of a job, None: it goes on."""
        engine = reader_engine(self.url)
        ids = select(tables.jobs.c.id, tables.jobs.c.exit_code).where(
            tables.jobs.c.job_id == job, tables.jobs.c.phase == "ended"
        )
        with engine.connect() as connection:
            found = connection.execute(ids).first()
            told = select(tables.events.c.kind, tables.events.c.text).where(tables.events.c.job == (found[0] if found else -1))
            texts = [(row[0], row[1]) for row in connection.execute(told.order_by(tables.events.c.number))]
        engine.dispose()
        return None if found is None else (found[1], texts)

    def finishes(self, job: "subprocess.Popen[bytes]") -> None:
        (self.folder / "t1" / "finish").touch()
        assert job.wait(90) == 0, self.said

    def story_is_whole(self, num_deaths: int, num_ranks: int = 2) -> None:
        """Every rank of every attempt ended exactly once in the story, numbers have no gaps, and deaths are as many as were."""
        events = self.events()
        assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
        exits = Counter(rank for _, kind, rank in events if kind == "RankExited")
        assert exits == dict.fromkeys(range(num_ranks), num_deaths + 1), events
        assert sum(kind == "AttemptStarted" for _, kind, _ in events) == num_deaths + 1, Counter(kind for _, kind, _ in events)
        assert not [kind for _, kind, _ in events if kind in ("AgentLost", "AgentGone")]

    def close(self) -> None:
        for job in self.jobs:
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(40)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
        for one in self.ended:
            one.end() if isinstance(one, Serving) else one.close()


@pytest.fixture
def pair(own_directories: Path, postgres_server: PostgresServer) -> Iterator[Pair]:
    made = Pair(own_directories, postgres_server)
    yield made
    made.close()


def test_killed_and_stopped_leaders_are_followed_and_a_running_job_loses_nothing(pair: Pair) -> None:
    a = pair.serve("a").leads()
    b = pair.serve("b").stands_by()
    job = pair.launch(b.rpc, a.rpc)
    first = pair.pid_of(1, 1)
    assert b.ask("/healthz") == (200, {"status": "ok"})
    status, said = wait_for(lambda: b.ask("/readyz") if b.ask("/readyz")[1]["leader"] else None, "b sees who leads")
    assert status == 503 and said["standby"] is True and said["leader"] == a.rest
    assert said["detail"] == f"this supervisor stands by: the one that leads answers at {a.rest}", "no more, to strangers"
    assert b.ask("/api/v1/jobs")[0] == 503
    listed = subprocess.run(
        [sys.executable, "-m", "rsup.launcher", "jobs", "--json", "--supervisor", f"{b.rest},{a.rest}"],
        env=os.environ | {"RSUP_TOKEN_FILE": str(a.state / "token")},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert [item["id"] for item in json.loads(listed.stdout)] == ["t1"], listed

    a.send(signal.SIGKILL)
    os.kill(first, signal.SIGKILL)  # nobody leads when this rank dies
    second = pair.pid_of(0, 2)
    b.leads()
    token = (b.state / "token").read_text().strip()
    wait_for(lambda: [item["state"] for item in b.ask("/api/v1/jobs", token)[1]["items"]] == ["running"], "b has heard of it")
    a.restart()
    a.stands_by()

    b.send(signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    third = pair.pid_of(1, 3)
    assert a.times_led == 2 and "its session was ended" in a.log
    b.send(signal.SIGCONT)  # wakes with the facts of the second death in its queue
    b.stands_by(2)
    assert b.times_led == 1

    os.kill(third, signal.SIGKILL)
    pair.pid_of(0, 4)
    pair.finishes(job)
    pair.story_is_whole(num_deaths=3)
    assert "goes on in place of the one at" in pair.said


def test_a_leader_cut_off_from_the_database_lets_its_agents_go_before_another_leads(pair: Pair) -> None:
    wire = Wire(pair.folder / "wire", pair.server.folder)
    pair.ended.append(wire)
    a = pair.serve("a", pair.url.replace(str(pair.server.folder), str(wire.folder))).leads()
    b = pair.serve("b").stands_by()
    job = pair.launch(a.rpc, b.rpc)
    rank = pair.pid_of(0, 1)
    wire.cut()
    os.kill(rank, signal.SIGKILL)
    pair.pid_of(0, 2)
    b.leads()
    assert a.times_led == 1
    wire.mend()
    a.stands_by(1)
    status, said = wait_for(lambda: a.ask("/readyz") if a.ask("/readyz")[1].get("leader") else None, "a sees who leads")
    assert status == 503 and said["leader"] == b.rest
    pair.finishes(job)
    pair.story_is_whole(num_deaths=1)


def test_a_database_that_is_away_costs_nothing(pair: Pair) -> None:
    a = pair.serve("a").leads()
    b = pair.serve("b").stands_by()
    job, stopped = pair.launch(a.rpc, b.rpc), pair.launch(a.rpc, b.rpc, num_ranks=1, job_id="t2")
    rank, _ = pair.pid_of(0, 1), pair.pid_of(0, 1, job_id="t2")
    pair.server.stop_at_once()
    try:
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: "cannot reach the database" in b.log and "may have taken over" in a.log, "both notice")
        wait_for(lambda: a.ask("/readyz")[0] == 503, "a says that it is not ready")
        stopped.terminate()
        assert a.ask("/healthz")[0] == 200 and a.ask("/api/v1/jobs", (a.state / "token").read_text().strip())[0] == 503
        late = pair.launch(a.rpc, b.rpc, more=("--require-supervisor",))
        lonely = subprocess.run(
            [sys.executable, "-m", "rsup.launcher", "launch", "--no-python", "true"],
            env=os.environ | {"RSUP_SUPERVISOR": f"{a.rpc},{b.rpc}", "RSUP_KEY_FILE": str(pair.key)},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert lonely.returncode == 0 and "an embedded one takes its place" in lonely.stderr + lonely.stdout, lonely
        assert late.wait(90) == 75 and "leads (" in pair.said, pair.said
        assert stopped.wait(90) == 143, pair.said
        assert job.poll() is None and a.process.poll() is None and b.process.poll() is None
    finally:
        pair.server.start_again()
    pair.pid_of(0, 2)
    code, texts = wait_for(lambda: pair.end_of("t2"), "the launch that was stopped meanwhile has ended in the store")
    assert code == 143 and not {"AgentLost", "Restart"} & {kind for kind, _ in texts}, texts
    assert not [text for _, text in texts if "nobody has spoken" in text], texts
    pair.finishes(job)
    pair.story_is_whole(num_deaths=1)


def test_supervisors_with_different_keys_say_so(pair: Pair) -> None:
    other = pair.folder / "other-key"
    other.write_text("quite another secret, of the second supervisor")
    other.chmod(0o600)
    a = pair.serve("a").leads()
    b = pair.serve("b", key=other).stands_by()
    wait_for(lambda: "the link key (--key-file) is another than that of the leader" in b.log, "b says so")
    job = pair.launch(b.rpc, a.rpc)
    pair.pid_of(1, 1)
    pair.finishes(job)
    assert "does not take our key, so it cannot take over: give all supervisors the same --key-file" in pair.said
    pair.story_is_whole(num_deaths=0)
    assert (
        json.loads(
            subprocess.check_output(
                [sys.executable, "-m", "rsup.launcher", "db", "check", "--json", "--state-dir", str(b.state)], text=True
            )
        )["holder"]["pid"]
        == a.process.pid
    )


def test_who_has_lost_the_lease_gives_the_endpoints_of_jobs_back(own_directories: Path) -> None:
    settings = Settings(state_dir=str(own_directories / "state"), embedded=True)
    settings.state_path.mkdir(mode=0o700, exist_ok=True)
    server = RpcServer()
    holder = LeaseHolder.this_process("one")
    opened = store_opening.open_usual(settings.state_path / "rsup.db", holder, embedded=True)
    try:
        turns = Turns(settings, server, opened, "one")
        turns.loop.handle([AgentMessage("a", hello("a", spec(listen="127.0.0.1:0")))])
        (address,) = server.addresses()
        host, port = split_endpoint(address.removeprefix("tcp://"))
        assert not _refuses(host, port)
        turns.close()
        assert server.addresses() == []
        wait_for(lambda: _refuses(host, port), "the port is free")
    finally:
        server.close()
        opened.store.close()


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_one_that_stands_by_answers_this_hosts_users_with_the_leader(
    own_directories: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stale socket of the time when it led is replaced; the log says once why it stands by."""
    url = postgres_server.new_database()
    opened = store_opening.open_usual(url, LeaseHolder.this_process("leads"), embedded=False)
    opened.announce("tcp://far:1", "http://192.0.2.7:8650")
    folder, state = own_directories / "sockets", own_directories / "state"
    for one in (folder, state):
        one.mkdir(exist_ok=True)
    (state / "token").write_text("0123456789abcdef")
    (state / "token").chmod(0o600)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "rest.sock"))
    stale.close()
    settings = Settings(state_dir=str(state), database_url=url, listen="127.0.0.1:0", socket_dir=str(folder))
    monkeypatch.setenv("RSUP_SOCKET_DIR", str(folder))
    monkeypatch.setenv("RSUP_MUNGE_SOCKET", "/nowhere")
    server = RpcServer()
    caplog.set_level("INFO")
    asked: list[str] = []
    standby = Standby(settings, url, server, {})
    source = Sources(state, "", note=lambda text: None)
    local = source.supervisor()

    def told() -> bool:
        leader = standby._watch.sight.leader
        if leader is not None:
            with pytest.raises(NoAnswer, match=r"http://192\.0\.2\.7:8650"):
                local.jobs(1)
            asked.append(leader.rest)
        return bool(asked)

    monkeypatch.setattr(rest_source, "REQUEST_TIMEOUT_S", 5.0)
    assert standby.wait(told, StoreHeld("held by another"), said=True) is False and asked
    assert "standing by" not in caplog.text
    server.close()
    opened.store.close()
