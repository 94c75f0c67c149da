"""Every verb by role, on one's own and on another's job, over REST, CLI and RPC: real processes of three ordinary users, and a
supervisor that runs as a fourth. `docs/access.md` has the same table."""

import hashlib
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rsup.supervisor import munge, node_tokens
from rsup.supervisor.agent_admission import Admission
from rsup.supervisor.identities import Identities
from rsup.supervisor.peer_identity import Peers
from rsup.supervisor.principals import TokenBook
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.wire import Hello, SupervisorInfo, Welcome
from tests.rest import shared_host
from tests.rest.as_user import UserProcess
from tests.rest.shared_host import OPERATOR, OTHER, OWNER, SharedHost

pytestmark = pytest.mark.timeout(300)  # they share a start of everything

PAGE = Path(__file__).parents[2] / "docs" / "access.md"
VIEWER_TOKEN = "viewer-token-0123456789"
SECRET = "hunter2-of-rsup-test-1"
DENIAL = re.compile(r"only its owner and operators|only operators may|may not do this|may not report")
ROLES = ("node", "viewer", "other", "owner", "operator")
HEADINGS = ("a node", "viewer", "user, another's job", "user, own job", "operator")
Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A verb: what it is, how it is asked for, and by whom it may be. `owner` and `other` are one where no job is meant."""

    text: str
    path: str
    roles: str
    cli: str = ""
    body: Json | None = None


CHANGE: Json = {"dry_run": True, "reason": "table"}
EVERYBODY, READERS, OPERATORS = "viewer other owner operator", "owner operator", "operator"
JOB = "/jobs/j1"
ROWS = (
    Row("jobs: id, owner, state", "/jobs", EVERYBODY, "jobs"),
    Row("a job's ranks", f"{JOB}/ranks", READERS),
    Row("its events, with arguments, errors, log tails", f"{JOB}/events", READERS, "events {job}"),
    Row("its incidents", f"{JOB}/incidents", READERS),
    Row("its stacks", f"{JOB}/stacks", READERS, "stacks {job}"),
    Row("its curves and newest values", f"{JOB}/metrics", READERS),
    Row("its slow ranks", f"{JOB}/stragglers", READERS, "stragglers {job}"),
    Row("switch their detection", f"{JOB}/stragglers", READERS, "stragglers {job} on --dry-run", {**CHANGE, "on": True}),
    Row("stop it", f"{JOB}/stop", READERS, "stop {job} --dry-run", CHANGE),
    Row("ask it for a checkpoint", f"{JOB}/checkpoint", READERS, "checkpoint {job} --dry-run", CHANGE),
    Row("fence a node of it", f"{JOB}/fence", OPERATORS, "fence {job} node-a --dry-run", {**CHANGE, "node": "node-a"}),
    Row("cases", "/cases", EVERYBODY, "cases"),
    Row("devices and nodes", "/devices", EVERYBODY, "devices list"),
    Row("their history", "/devices/GPU-a/timeline", EVERYBODY, "devices timeline GPU-a"),
    Row("flag a device", "/devices/GPU-a/flag", EVERYBODY, "devices flag GPU-a --reason table --dry-run", CHANGE),
    Row("note something about it", "/devices/GPU-a/note", EVERYBODY, "devices note GPU-a --reason table --dry-run", CHANGE),
    *(
        Row(
            f"{verb} a device or node",
            f"/nodes/node-a/{verb}",
            OPERATORS,
            f"nodes {verb} node-a --reason table --dry-run",
            CHANGE,
        )
        for verb in ("quarantine", "allow", "repair", "release", "retire")
    ),
    Row("import what other tools saw", "/devices/GPU-a/import", OPERATORS, body=CHANGE),
    Row("drain a node, undrain it", "/nodes/node-a/drain", OPERATORS, "nodes drain node-a --reason table --dry-run", CHANGE),
    Row("play other rules over the history", "/history/replay", OPERATORS, body={}),
    Row("what a gate says of a node", "/nodes/node-a/verdict", f"node {EVERYBODY}"),
    Row(
        "report for one's own node",
        "/nodes/node-a/report",
        "node operator",
        body={"boot_id": "b", "inventory": [], "events": []},
    ),
    Row("report for another node", "/nodes/node-b/report", "operator", body={"boot_id": "b", "inventory": [], "events": []}),
)


def table_text() -> str:
    """The table as the page has it."""
    lines = [f"| | {' | '.join(HEADINGS)} |", f"|---|{'---|' * len(HEADINGS)}"]
    lines += [f"| {row.text} | {' | '.join('yes' if role in row.roles.split() else '-' for role in ROLES)} |" for row in ROWS]
    return "\n".join(lines)


@dataclass
class Cast:
    """Everybody on the stage: `owner` and `other` have a job `j1` each, with a live agent."""

    host: SharedHost
    owner: UserProcess
    other: UserProcess
    operator: UserProcess

    def ask(self, role: str, row: Row) -> Json:
        """Ask for that verb on the owner's job over REST."""
        asker = {"owner": self.owner, "operator": self.operator}.get(role, self.other)
        token = {"viewer": VIEWER_TOKEN, "node": self.node_token}.get(role, "")
        of_owner = f"?owner={OWNER}" if row.path.startswith(JOB) else ""
        return asker.do("rest", path=row.path + of_owner, body=row.body, socket=self.host.rest_socket, token=token)

    def call(self, role: str, words: str) -> Json:
        """The same by the CLI."""
        asker = {"owner": self.owner, "operator": self.operator}.get(role, self.other)
        token_file = {"viewer": "viewer.token", "node": "node.token"}.get(role)
        environment = {"RSUP_TOKEN_FILE": str(self.host.folder / OTHER / token_file)} if token_file else {}
        return asker.do("cli", words=words.format(job=f"{OWNER}/j1").split(), environment=environment)

    @property
    def node_token(self) -> str:
        return node_tokens.node_token(node_tokens.read_secret(self.host.state), "node-a")

    def jobs(self) -> set[tuple[str, str]]:
        """Owner and id of all jobs."""
        items = self.operator.do("rest", path="/jobs", socket=self.host.rest_socket)["answer"]["items"]
        return {(job["owner"], job["id"]) for job in items}

    def events(self, owner: str, job: str) -> list[Json]:
        """A job's story."""
        path = f"/jobs/{job}/events?owner={owner}&limit=1000"
        events: list[Json] = self.operator.do("rest", path=path, socket=self.host.rest_socket)["answer"]["items"]
        return events


@pytest.fixture(scope="module")
def cast() -> Iterator[Cast]:
    """Each of the two users claims to be the other: nobody believes them."""
    folder = Path(tempfile.mkdtemp(prefix="rsr-", dir="/tmp"))
    digest = hashlib.sha256(VIEWER_TOKEN.encode()).hexdigest()
    host = None
    users: list[UserProcess] = []
    try:
        host = shared_host.start(folder, f'[[token]]\nname = "guest"\nrole = "viewer"\nsha256 = "{digest}"\n')
        users += [host.user(name) for name in (OWNER, OTHER, OPERATOR)]
        cast = Cast(host, *users)
        for name, token in (("viewer", VIEWER_TOKEN), ("node", cast.node_token)):
            host.give(OTHER, f"{name}.token", token)
        for user, name, claim in ((cast.owner, "a", OTHER), (cast.other, "b", OWNER)):
            spec = {"job_id": "j1", "owner": claim, "command": ["train.py", f"--pass={SECRET}" if name == "a" else ""]}
            welcome = user.do("agent", name=name, address=host.rpc, agent_id=f"agent-{name}", spec=spec, device=f"GPU-{name}")
            assert welcome == {"kind": "Welcome", "job": "j1", "run": 1}
        yield cast
    finally:
        for user in users:
            user.close()
        if host is not None:
            host.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_each_verb_answers_each_role_as_the_table_says(cast: Cast) -> None:
    assert {(OWNER, "j1"), (OTHER, "j1")} <= cast.jobs(), "owners are who they are, not who they say"
    for row in ROWS:
        for role in ROLES:
            answer = cast.ask(role, row)
            said = answer.get("detail", "")
            assert bool(DENIAL.search(said)) == (role not in row.roles.split()), (row.text, role, answer)
            if not row.cli or role == "node":
                continue
            called = cast.call(role, row.cli)
            denied = bool(DENIAL.search(called["err"]))
            assert denied == (role not in row.roles.split()), (row.cli, role, called)
            if denied:
                assert called["code"] == 1 and not called["out"] and called["err"].count("\n") == 1, (row.cli, role, called)
                assert called["err"].startswith("rsup "), called


def test_the_page_has_the_table() -> None:
    assert table_text() in PAGE.read_text(), f"the table of {PAGE.name} must be:\n{table_text()}"


def test_who_may_not_read_a_job_finds_nothing_of_its_secrets_anywhere(cast: Cast) -> None:
    """Arguments, an error, a traceback, a log tail, stacks: swept through every reading route that there is."""
    spec = {"job_id": "secrets", "command": ["train.py", SECRET]}
    cast.owner.do("agent", name="s", address=cast.host.rpc, agent_id="agent-s", spec=spec, device="GPU-s")
    facts: list[Json] = [
        {"type": "StoreBound", "attempt": 1, "host": "127.0.0.1", "port": 1},
        {"type": "AttemptStarted", "attempt": 1, "pids": [1], "devices": ["GPU-s"]},
        {"type": "Note", "level": "warning", "text": f"note {SECRET}"},
        {
            "type": "RankExited", "attempt": 1, "rank": 0, "exit_code": 1, "error": f"error {SECRET}", "iteration": 3,
            "traceback": f"traceback {SECRET}", "log_tail": f"tail {SECRET}",
        },
        {"type": "StacksTaken", "attempt": 1, "stacks": [
            {"rank": 0, "pid": 1, "source": "py-spy", "text": f"stack {SECRET}", "process_state": "", "iteration": 0}]},
    ]  # fmt: skip
    assert cast.owner.do("tell", name="s", facts=facts)["left"] == 0
    where = {"{job}": "secrets", "{uuid}": "GPU-s", "{name}": "node-s", "{case_id}": "secrets"}
    local = {"socket": cast.host.rest_socket}
    api = json.loads(cast.owner.do("raw", url="http://localhost/openapi.json", **local)["body"])["paths"]
    paths = [path for path, methods in api.items() if "get" in methods]
    for variable, value in where.items():
        paths = [path.replace(variable, value) for path in paths]
    seen = 0
    for path in [*paths, "/api/v1/cases?job=secrets"]:
        url = f"http://localhost{path}" + (f"?owner={OWNER}" if "/jobs/" in path else "")
        for token in ("", VIEWER_TOKEN):
            answer = cast.other.do("raw", url=url, authorization=token and f"Bearer {token}", **local)
            assert SECRET not in answer["body"], path
        seen += SECRET in cast.owner.do("raw", url=url, **local)["body"]
    assert seen >= 3, "its owner finds them"
    named = cast.owner.do("raw", url="http://the-host.example/api/v1/jobs", **local)
    assert named["status"] == 200, "over its own socket the host may be called anything"


def test_changes_are_stored_with_who_made_them(cast: Cast) -> None:
    cast.other.do("agent", name="c", address=cast.host.rpc, agent_id="agent-c", spec={"job_id": "mine"}, device="GPU-c")
    assert cast.call("other", f"stop {OTHER}/mine --reason enough")["code"] == 0
    stopped = next(event for event in cast.events(OTHER, "mine") if event["kind"] == "StopRequested")
    assert stopped["principal"] == OTHER and "enough" in json.dumps(stopped)
    assert cast.call("owner", "devices flag GPU-c --reason odd")["code"] == 0
    assert cast.call("operator", "nodes quarantine node-c --reason smoke")["code"] == 0
    told = [
        cast.operator.do("rest", path=path, socket=cast.host.rest_socket)["answer"]
        for path in ("/devices/GPU-c/evidence", "/nodes/node-c/timeline")
    ]
    assert OWNER in json.dumps(told[0]) and OPERATOR in json.dumps(told[1])


def test_an_agents_id_is_worth_nothing_to_others(cast: Cast) -> None:
    """Neither by the client, nor by a bare socket whose ZeroMQ identity is that id; nor the id of a job."""
    j1 = {"job_id": "j1", "owner": OWNER}
    for thief, name in ((cast.other, "t"), (cast.operator, "u")):  # from now on their uids are known, and answered at once
        joined = thief.do("agent", name=name, address=cast.host.rpc, agent_id="agent-a", spec=j1)
        assert joined["kind"] == "Refusal" and "may not speak for it" in joined["message"]
    for thief, name in ((cast.other, "x"), (cast.operator, "y")):
        heard = thief.do("impersonate", address=cast.host.rpc, identity="agent-a", agent_id="agent-a", own_id=name)["heard"]
        *refused, welcome = heard
        assert {one["kind"] for one in refused} == {"Refusal"}, heard
        assert welcome == {"kind": "Welcome", "text": f"sign-{name}"}
    assert cast.owner.do("orders", name="a")["commands"] == ["HostStore"], "its link is its own"
    story = cast.events(OWNER, "j1")
    assert "forged" not in json.dumps(story) and "node-thief" not in json.dumps(story) and "node-t" not in json.dumps(story)
    assert not any(event["kind"] in ("AgentLeft", "AgentGone") for event in story)
    owners = {owner for owner, job in cast.jobs() if job.startswith("sign-")}
    assert owners == {OTHER, OPERATOR}


def test_ordinary_users_launch_on_it_and_only_they_stop_their_jobs(cast: Cast) -> None:
    """Real launches: over ipc, and over TCP with the public key and MUNGE."""
    script = cast.host.folder / "train.py"
    script.write_text("import time\ntime.sleep(100)\n")
    script.chmod(0o644)
    ways = {"local": {"RSUP_SUPERVISOR": cast.host.rpc}}
    if cast.host.munged is not None:
        ways["far"] = {"RSUP_SUPERVISOR": cast.host.told()["rpc_tcp"], "RSUP_KEY_FILE": cast.host.public_key()}
    for job, way in ways.items():
        with cast.host.launch(OWNER, job, script, **way) as process:
            words = ["status", job, "--json"]
            shared_host.until(lambda words=words: '"running"' in cast.owner.do("cli", words=words)["out"], f"{job} runs")
            denied = cast.call("other", f"stop {OWNER}/{job}")
            assert (denied["code"], denied["err"].count("\n")) == (1, 1) and DENIAL.search(denied["err"])
            assert process.poll() is None
            assert cast.call("owner", f"stop {job} --reason enough")["code"] == 0
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 143 and f"stopped by {OWNER} (enough)" in said


def test_another_users_state_directory_is_one_line(cast: Cast) -> None:
    for words in ("jobs", "devices list", "status x", "devices flag GPU-a --reason x"):
        said = cast.call("other", f"{words} --state-dir {cast.host.folder / 'rsup' / 'state'}")
        assert said["code"] != 0 and said["err"].count("\n") == 1 and "ermi" in said["err"], (words, said)


def test_over_tcp_munge_says_who_an_agent_is(cast: Cast) -> None:
    """With the supervisor's public key only: encrypted, and one must say who one is. The secret key is the operators'."""
    if cast.host.munged is None:
        pytest.skip("munged is not installed")
    address = cast.host.told()["rpc_tcp"]
    tcp = {"address": address, "key_file": cast.host.public_key()}
    assert cast.other.do("agent", name="m", agent_id="m", spec={"job_id": "tcp", "owner": OWNER}, **tcp)["kind"] == "Welcome"
    assert (OTHER, "tcp") in cast.jobs() and (OWNER, "tcp") not in cast.jobs()
    stolen = cast.other.do("agent", name="m2", agent_id="agent-a", spec={"job_id": "j1", "owner": OWNER}, **tcp)
    assert stolen["kind"] == "Refusal" and f"belongs to {OWNER}" in stolen["message"]
    nameless = cast.host.user(OTHER, RSUP_MUNGE_SOCKET="/nonexistent")
    said = nameless.do("agent", name="n", agent_id="n", spec={"job_id": "n"}, **tcp)
    nameless.close()
    assert said["kind"] == "Refusal" and "who you are" in said["message"] and "\n" not in said["message"]


def test_a_link_without_a_key_asks_for_munge_where_it_works(cast: Cast) -> None:
    """The nodes of an embedded supervisor's job meet there: other users of the cluster may not join it."""
    if cast.host.munged is None:
        pytest.skip("munged is not installed")
    admission = Admission(Identities(TokenBook(()), Peers(shared=True), str(cast.host.folder / "munge.socket")), shared=False)
    server = RpcServer(None, admission)
    address = server.listen("127.0.0.1:0")
    server.set_jobs("127.0.0.1:0", [JobKey("local", OWNER, "open", 1)])
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            for one in server.receive(0.1):
                if isinstance(one.message, Hello):
                    info = SupervisorInfo("i", 1, "h", True, "", "")
                    server.send(one.agent_id, Welcome((3, 4), "0", info, f"open of {one.message.spec.owner}", 1, 0, 0, True))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        said = [
            user.do("agent", name=f"o{i}", address=address, agent_id=f"open-{i}", spec={"job_id": "open", "owner": OWNER})
            for i, user in enumerate((cast.owner, cast.other, cast.operator))
        ]
        nameless = cast.host.user(OWNER, RSUP_MUNGE_SOCKET="/nonexistent")
        said.append(nameless.do("agent", name="n", address=address, agent_id="open-n", spec={"job_id": "open", "owner": OWNER}))
        nameless.close()
    finally:
        over.set()
        thread.join()
        server.close()
    assert said[0]["job"] == f"open of {OWNER}"
    assert [one["kind"] for one in said[1:]] == ["Refusal"] * 3
    assert f"may not join a job of {OWNER}" in said[1]["message"] and "no MUNGE credential" in said[3]["message"]


def test_a_munge_credential_is_good_once_for_one_request_to_one_supervisor(cast: Cast) -> None:
    if cast.host.munged is None:
        pytest.skip("munged is not installed")
    rest = cast.host.told()["rest"]
    port = rest.rpartition(":")[2]
    me = cast.other.do("rest", path="/supervisor", url=rest)["answer"]["principal"]
    assert me == {"name": OTHER, "role": "user"}
    assert cast.call("other", f"status {OWNER}/j1 --json --supervisor {rest}")["code"] == 0
    assert cast.operator.do("rest", path="/supervisor", url=rest)["answer"]["principal"]["role"] == "operator"
    posted = cast.other.do("rest", path="/nodes/n1/quarantine?x=%C3%A9+1", body={"reason": "ö"}, url=rest)
    assert "no node 'n1'" in posted["detail"], "query and body are those that the credential was made for"

    def ask(payload: str, path: str = "/api/v1/supervisor", times: int = 1) -> list[Json]:
        credential = cast.other.do("credential", payload=payload)["credential"]
        return [cast.other.do("raw", url=f"{rest}{path}", authorization=f"Munge {credential}") for _ in range(times)]

    host = shared_host.host_name()
    here = f"http://{host}:{port}"
    good = munge.rest_payload(here, "GET", "/api/v1/supervisor")
    assert [answer["status"] for answer in ask(good, times=2)] == [200, 401]
    assert "used before" in ask(good, times=2)[1]["body"]
    for bad in (
        munge.rest_payload(f"http://{host}:{int(port) + 1}", "GET", "/api/v1/supervisor"),
        munge.rest_payload(f"http://192.0.2.7:{port}", "GET", "/api/v1/supervisor"),
        munge.rest_payload(here, "POST", "/api/v1/supervisor"),
        munge.rest_payload(here, "GET", "/api/v1/jobs"),
        munge.rest_payload(here, "GET", "/api/v1/supervisor", "limit=1"),
        munge.rest_payload(here, "GET", "/api/v1/supervisor", "", b"{}"),
        good.rpartition(" ")[0],
        f"rsup-rpc {host}:{port} agent-a",
        "",
    ):
        (answer,) = ask(bad)
        assert answer["status"] == 401 and answer["type"] == "application/problem+json", (bad, answer)
        assert "made for" in json.loads(answer["body"])["detail"]
    forged = cast.other.do("raw", url=f"{rest}/api/v1/supervisor", authorization="Munge MUNGE:AwQDAAB=:")
    assert forged["status"] == 401
