"""A node's requests to the supervisor: the snapshot, and the report. Each has a time limit of its own; looking up a name has
none, so that `healthcheck` bounds all of it from outside. Environment proxies are not used, redirections not followed."""

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from rsup.launcher.slurm.node_settings import NodeProblem
from rsup.launcher.slurm.snapshot_file import MAX_SNAPSHOT_BYTES

REQUEST_S = 3.0
MAX_ANSWER_BYTES = 1 << 20
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Reply:
    """`status`: HTTP's."""

    status: int
    etag: str
    data: bytes

    @property
    def text(self) -> str:
        """What an error says of itself, one line."""
        try:
            content = json.loads(self.data)
            said = content.get("detail") or content.get("title")
        except (ValueError, AttributeError):
            said = self.data.decode("utf-8", "replace")
        return " ".join(str(said).split())[:200]


class NodeLink:
    """One supervisor's REST address, `http://host:port` or `https://...`."""

    def __init__(self, address: str, token: str, ca_file: str = "") -> None:
        """Raise `NodeProblem` for what is no address."""
        self.address = address.rstrip("/")
        try:
            parts = urlsplit(self.address)
            port = parts.port or DEFAULT_PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise NodeProblem(f"{address!r} is no address of a supervisor; write http://HOST:PORT") from None
        if not parts.hostname:
            raise NodeProblem(f"{address!r} names no host; write http://HOST:PORT")
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._is_tls = parts.scheme == "https"
        self._token, self._ca_file = token, ca_file

    def snapshot(self, etag: str = "") -> Reply:
        """The newest snapshot; status 304 if it is the one with that ETag. Raise `NodeProblem`."""
        return self._ask("GET", "/api/v1/gate/snapshot", {"If-None-Match": etag} if etag else {}, None, MAX_SNAPSHOT_BYTES)

    def report(
        self,
        node: str,
        boot: str,
        inventory: Sequence[Mapping[str, Any]] | None,
        events: Sequence[Mapping[str, object]],
        gate: Mapping[str, str] | None = None,
    ) -> Reply:
        """Tell what this node has, what happened on it, and with `gate` its mode and why it would decide nothing. Raise
        `NodeProblem`."""
        content = {"boot_id": boot, "inventory": inventory, "events": list(events)}
        body = json.dumps(content if gate is None else content | {"gate": gate}).encode()
        path = f"/api/v1/nodes/{quote(node, safe='')}/report"
        return self._ask("POST", path, {"Content-Type": "application/json"}, body, MAX_ANSWER_BYTES)

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None, max_bytes: int) -> Reply:
        if self._token:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        try:
            with closing(self._connection()) as connection:
                connection.request(method, self._path + path, body, headers)
                answer = connection.getresponse()
                data = answer.read(max_bytes + 1)
                length = answer.getheader("Content-Length")
                if len(data) > max_bytes:
                    raise NodeProblem(f"{self.address} answers with more than {max_bytes >> 20} MiB")
                if length is not None and length.isdigit() and len(data) < int(length):
                    raise NodeProblem(f"{self.address} broke off its answer after {len(data)} of {length} bytes")
                return Reply(answer.status, answer.getheader("ETag") or "", data)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NodeProblem(f"{self.address}: {why}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_S)
        context = ssl.create_default_context(cafile=self._ca_file or None)
        return http.client.HTTPSConnection(self._host, self._port, timeout=REQUEST_S, context=context)
