"""A process of an ordinary user that does what a test tells it: asks over REST, calls the CLI, plays an agent.

Started by `user_process` with the user's uid; reads a JSON line a command, and answers each with one.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qsl
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import zmq

from rsup.launcher import cli
from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.supervisor import munge, places, wire
from rsup.supervisor.history_questions import Question
from rsup.supervisor.query_source import QueryError
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.unix_http import UnixHTTPHandler
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Report

Json = dict[str, Any]
WITHIN_S = 60.0


class UserProcess:
    """The test's end."""

    def __init__(self, python: str, uid: int, environment: dict[str, str]) -> None:
        self.uid = uid
        self._process = subprocess.Popen(
            [python, "-P", "-c", Path(__file__).read_text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=[],
            env=os.environ | environment,
        )

    def do(self, verb: str, **arguments: object) -> Json:
        """Have it done; what came of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()
        answer: Json = json.loads(self._process.stdout.readline())
        assert "failed" not in answer, answer["failed"]
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Doer:
    """What the process can do. Agents live from `agent` to the end."""

    def __init__(self) -> None:
        self._agents: dict[str, SupervisorClient] = {}

    def raw(self, url: str, authorization: str = "", socket: str = "") -> Json:
        """A GET with that header, over the UNIX socket where one is named."""
        opener = build_opener(ProxyHandler({}), *([UnixHTTPHandler(Path(socket))] if socket else []))
        try:
            with opener.open(
                Request(url, headers={"Authorization": authorization} if authorization else {}), timeout=WITHIN_S
            ) as answer:
                return {"status": answer.status, "type": answer.headers.get_content_type(), "body": answer.read().decode()}
        except HTTPError as error:
            with error:
                return {"status": error.code, "type": error.headers.get_content_type(), "body": error.read().decode()}

    def rest(self, path: str, body: Json | None = None, socket: str = "", url: str = "", token: str = "") -> Json:
        """Ask over the UNIX socket, or over TCP with a token or MUNGE: the answer, or the problem's sentence."""
        source = RestSource(url, token, Path(socket) if socket else None)
        query: list[tuple[str, object]] = [*parse_qsl(path.partition("?")[2])]
        question = Question(path.partition("?")[0], lambda connection: {}, query, body)
        try:
            return {"allowed": True, "answer": source.answer(question)}
        except QueryError as error:
            return {"allowed": False, "detail": str(error)}

    def cli(self, words: list[str], environment: dict[str, str] | None = None) -> Json:
        """Call `rsup` with these words."""
        out, err = io.StringIO(), io.StringIO()
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = cli.main(words)
                except SystemExit as ended:
                    code = int(str(ended.code))
        finally:
            os.environ.clear()
            os.environ.update(before)
        return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

    def agent(
        self, name: str, address: str, agent_id: str, spec: Json, key_file: str = "", attempt: int = 0, device: str = ""
    ) -> Json:
        """Be an agent, from now on; the first thing that the supervisor says to it, `{}` for nothing."""
        key = places.find_link_key(Path("/nonexistent"), key_file) if key_file else None
        devices = [wire.Device(device)] if device else []
        info = AgentInfo(agent_id, f"node-{name}", "127.0.0.1", os.getpid(), places.boot_id(), devices=devices)
        client = SupervisorClient(address, info, JobSpec(**spec), Spool(None), key)
        self._agents[name] = client
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            for message in client.poll():
                if isinstance(message, wire.Welcome):
                    return {"kind": "Welcome", "job": message.job_id, "run": message.run}
                if isinstance(message, wire.Refusal):
                    return {"kind": "Refusal", "message": message.message, "code": message.exit_code}
            time.sleep(0.01)
        return {}

    def tell(self, name: str, facts: list[Json]) -> Json:
        """Report these facts as that agent until the supervisor has them."""
        client = self._agents[name]
        for fact in facts:
            client.spool.append(msgspec.convert({"at_us": wire.now_us(), **fact}, wire.AnyFact))
        client.send_report(1, 99)
        deadline = time.monotonic() + WITHIN_S
        while len(client.spool) and time.monotonic() < deadline:
            client.poll()
            time.sleep(0.01)
        return {"left": len(client.spool)}

    def orders(self, name: str) -> Json:
        """Report as that agent until the supervisor answers with commands, which it repeats now and then: their kinds."""
        client = self._agents[name]
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            client.send_report(1, 0)
            for message in client.poll():
                if isinstance(message, wire.Order) and message.commands:
                    return {"commands": [type(command).__name__ for command in message.commands]}
            time.sleep(0.1)
        return {}

    def impersonate(self, address: str, identity: str, agent_id: str, own_id: str) -> Json:
        """Speak in an agent's name without being it, by a bare socket: `Report`, `Bye`, then `Hello`; then, as a sign that all
        of it was read, a `Hello` of one's own. All that came back, by kind."""
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
        stolen = AgentInfo(agent_id, "node-thief", "127.0.0.1", os.getpid(), places.boot_id())
        own = AgentInfo(own_id, "node-thief", "127.0.0.1", os.getpid(), places.boot_id())
        notes: list[wire.AnyFact] = [wire.Note(wire.now_us(), "error", "forged")]
        for message in (
            Report(agent_id, 1, 99, 1, notes),
            wire.Bye(agent_id),
            Hello(speaks, wire.RELEASE, stolen, JobSpec(owner="root", listen="127.0.0.1:0")),
            Hello(speaks, wire.RELEASE, stolen, JobSpec(), attempt=1),
            Report(agent_id, 1, 99, 1, notes),
            wire.Bye(agent_id),
            Hello(speaks, wire.RELEASE, own, JobSpec(job_id=f"sign-{own_id}")),
        ):
            socket.send(wire.encode(message))
        heard: list[Json] = []
        deadline = time.monotonic() + WITHIN_S
        while not any(one["kind"] == "Welcome" for one in heard) and time.monotonic() < deadline:
            if not socket.poll(2000):
                socket.send(wire.encode(message))  # who it is was being asked, and what came meanwhile went unread
                continue
            answer = wire.decode_to_agent(socket.recv())
            heard.append({"kind": type(answer).__name__, "text": getattr(answer, "message", getattr(answer, "job_id", ""))})
        context.destroy(0)
        return {"heard": heard}

    def credential(self, payload: str) -> Json:
        """A MUNGE credential of this user's."""
        return {"credential": munge.encode(payload, munge.default_socket())}


def main() -> None:
    """Until standard input ends."""
    doer = Doer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(doer, command.pop("verb"))(**command)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
