"""A shared supervisor that stands by: another one leads on the same database. It decides nothing and watches the lease.

Agents hear `StandsBy` and try their other addresses; REST says not ready. `wait` ends when the lease is free: the caller then
opens the store, which takes the lease, or finds that a third was quicker and stands by again.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from rsup.supervisor import daemon_files, local_sockets
from rsup.supervisor.config import Settings
from rsup.supervisor.lease import LeaseRecord
from rsup.supervisor.lease_watch import LeaseWatch
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.standby_page import StandbyPage
from rsup.supervisor.wire import RsupError, StandsBy

RECEIVE_S = 0.5

_log = logging.getLogger(__name__)


class Standby:
    """One stretch of standing by. `target` is the database that another supervisor leads on."""

    def __init__(self, settings: Settings, target: str, server: RpcServer, secrets: dict[str, str]) -> None:
        self._server = server
        self._server.known_agent = lambda agent_id: None  # it may have led before
        self._secrets = secrets
        self._free = threading.Event()
        self._compared = ""
        self._watch = LeaseWatch(target, self._on_free)
        self._page = self._serve_page(settings)

    def wait(self, told_to_stop: Callable[[], bool], held: RsupError, *, said: bool = False) -> bool:
        """Stand by until the lease is free (True), or this process is told to stop (False). `said`: the log knows why."""
        page = self._page.address if self._page else "-"
        _log.log(
            logging.DEBUG if said else logging.INFO,
            "standing by at %s, REST at %s: %s",
            ", ".join(self._server.addresses()),
            page,
            held,
        )
        daemon_files.tell_systemd("READY=1\nSTATUS=standing by: another supervisor leads")
        self._watch.start()
        try:
            while not told_to_stop():
                for received in self._server.receive(0.0 if self._free.is_set() else RECEIVE_S):
                    self._server.send(received.agent_id, self._answer())
                if self._free.is_set():
                    return True
                self._compare_secrets()
            return False
        finally:
            self._watch.stop()
            if self._page is not None:
                self._page.stop()

    def _serve_page(self, settings: Settings) -> StandbyPage | None:
        local = None
        try:
            local = local_sockets.listen_for_rest(settings)
        except (RsupError, OSError) as error:
            _log.error("%s", error)
        try:
            return StandbyPage(settings.rest_endpoint, self._told_to_everybody, local)
        except RsupError as error:
            _log.error("%s", error)
            if local is not None:
                local.close()
            return None

    def _on_free(self) -> None:
        self._free.set()
        self._server.wake()

    def _answer(self) -> StandsBy:
        leader = self._watch.sight.leader
        if leader is None:
            return StandsBy(message=self._told()[0])
        return StandsBy(leader.rpc if leader.rpc.startswith("tcp:") else "", leader.instance, self._told()[0])

    def _told(self) -> tuple[str, str]:
        sight = self._watch.sight
        if sight.problem:
            return f"this supervisor stands by: {sight.problem}", ""
        if sight.leader is None:
            return "this supervisor stands by, and no other leads yet; ask again in a moment", ""
        leader = sight.leader
        where = f" and answers at {leader.rest}" if leader.rest else ""
        return f"this supervisor stands by: pid {leader.pid} on {leader.host} leads{where}", leader.rest

    def _told_to_everybody(self) -> tuple[str, str]:
        """What whoever reaches the port may know: where to ask, not of what database or process."""
        sight = self._watch.sight
        if sight.problem:
            return "this supervisor stands by, and cannot ask its database now; its log says why", ""
        if sight.leader is None:
            return self._told()
        where = f"the one that leads answers at {sight.leader.rest}" if sight.leader.rest else "another one leads"
        return f"this supervisor stands by: {where}", sight.leader.rest

    def _compare_secrets(self) -> None:
        sight = self._watch.sight
        if not sight.secrets or sight.leader is None or self._compared == sight.secrets:
            return
        self._compared = sight.secrets
        try:
            theirs = {str(name): str(digest) for name, digest in json.loads(sight.secrets).items()}
        except (ValueError, AttributeError):
            theirs = {}  # written by who knows what: nothing to compare
        for line in differences(theirs, self._secrets, sight.leader):
            _log.error("%s", line)


def secrets_of(settings: Settings, server_public: bytes) -> dict[str, str]:
    """What must be equal at both supervisors, as digests by name; what this one does not have is left out."""
    found = {"link key (--key-file)": _digest(server_public)} if server_public else {}
    for name in ("token", "tokens.toml", "node-secret", "signing-key"):
        content = _read(settings.state_path / name)
        if content:
            found[f"STATE_DIR/{name}"] = _digest(content)
    return found


def differences(leader: dict[str, str], ours: dict[str, str], who: LeaseRecord) -> list[str]:
    """A line for each secret that the leader has and we have not, or have another of."""
    lines = []
    for name, digest in leader.items():
        if ours.get(name) != digest:
            what = "is another than" if name in ours else "is missing here, unlike"
            lines.append(
                f"the {name} {what} that of the leader (pid {who.pid} on {who.host}): whoever knows that one is refused here "
                "after a takeover; copy the file from there and start this supervisor again"
            )
    return lines


def _digest(content: bytes) -> str:
    return hashlib.sha256(b"rsup compares \0" + content).hexdigest()[:16]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError:
        return b""
