"""Credentials of MUNGE: who a process is on any node of a cluster whose nodes share a MUNGE key, as `munged` vouches for it.

Needs only the standard library and `libmunge.so.2`, which comes with MUNGE; part of the contract between the packages, since
agents make credentials and the supervisor reads them. A credential says the uid of who made it, ends after a minute, and is
read once: a second reading on the same host is refused as a replay. Its payload names what it is for and whom it was made for,
so that nobody who receives one can pass it on to another supervisor (`audience`).

`RSUP_MUNGE_SOCKET` names the socket of a `munged` that is not at the usual place. Every call may block for as long as `munged`
does (libmunge gives up after some seconds): never make one on a thread that must not wait.
"""

import ctypes
import functools
import hashlib
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from rsup.supervisor.wire import RsupError

REST_PURPOSE = "rsup-rest"
RPC_PURPOSE = "rsup-rpc"
TTL_S = 60
MAX_CREDENTIAL_CHARS = 8192
_OPTION_SOCKET, _OPTION_TTL = 8, 4
_NO_MEMORY, _SOCKET, _TIMEOUT = 5, 6, 7
_EXPIRED, _REWOUND, _REPLAYED = 15, 16, 17
_WHY = {
    _EXPIRED: "it has expired; are the clocks of both hosts right?",
    _REWOUND: "it was made in the future; are the clocks of both hosts right?",
    _REPLAYED: "it was used before; each request needs one of its own",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MungeError(RsupError):
    """A credential that cannot be made or is not accepted; the text says why."""


class MungeAway(MungeError):
    """`munged` could not be asked now: nothing is wrong with the credential."""


@dataclass(frozen=True)
class Decoded:
    """Who made the credential, and for what."""

    uid: int
    gid: int
    payload: str


def default_socket() -> str:
    """Where `munged` answers, empty for its usual place."""
    return os.environ.get("RSUP_MUNGE_SOCKET", "")


def is_here(socket_path: str = "") -> bool:
    """Whether credentials can be made here: the library and a socket are there. Asks nobody."""
    return _library() is not None and os.path.exists(socket_path or "/run/munge/munge.socket.2")


def encode(payload: str, socket_path: str = "") -> str:
    """A new credential of this process. Raise `MungeError`."""
    library = _library()
    if library is None:
        raise MungeError("no MUNGE credential can be made here: libmunge.so.2 is not installed")
    data = payload.encode()
    credential = ctypes.c_void_p()
    with _Context(library, socket_path) as context:
        code = library.munge_encode(ctypes.byref(credential), context.handle, data, len(data))
        if code:
            raise MungeError(f"no MUNGE credential can be made here: {context.problem(code)}")
    try:
        return ctypes.string_at(credential.value or 0).decode("ascii") if credential.value else ""
    finally:
        _free(credential)


def decode(credential: str, socket_path: str = "") -> Decoded:
    """Who made that credential. Raise `MungeError` for one that is expired, used before, foreign or none, `MungeAway` where
    that cannot be told now."""
    library = _library()
    if library is None:
        raise MungeError("MUNGE credentials cannot be read here: libmunge.so.2 is not installed")
    if len(credential) > MAX_CREDENTIAL_CHARS or not credential.isascii() or "\0" in credential:
        raise MungeError("this is no MUNGE credential")
    payload, length = ctypes.c_void_p(), ctypes.c_int()
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    with _Context(library, socket_path) as context:
        out = (ctypes.byref(payload), ctypes.byref(length), ctypes.byref(uid), ctypes.byref(gid))
        code = library.munge_decode(credential.encode(), context.handle, *out)
        problem = _WHY.get(code) or context.problem(code) if code else ""
    try:
        text = ctypes.string_at(payload.value, length.value).decode("utf-8", "replace") if payload.value else ""
    finally:
        _free(payload)
    if code in (_NO_MEMORY, _SOCKET, _TIMEOUT):
        raise MungeAway(f"this MUNGE credential cannot be read now: {problem}; is munged running?")
    if code:
        raise MungeError(f"this MUNGE credential is not accepted: {problem}")
    return Decoded(uid.value, gid.value, text)


# ---------------------------------------------------------------------------------------------- whom it was made for


def rest_payload(address: str, method: str, path: str, query: str = "", body: bytes = b"") -> str:
    """What the credential of a REST request at `address` is for."""
    return f"{REST_PURPOSE} {audience(address)} {rest_subject(method, path, query.encode(), body)}"


def rest_subject(method: str, path: str, query: bytes, body: bytes) -> str:
    """The request itself: with a digest of `query`, as it stands in the URL, and `body`, so that nobody on the way can give the
    credential to another one."""
    return f"{method} {path} {hashlib.sha256(len(query).to_bytes(8, 'big') + query + body).hexdigest()}"


def rpc_payload(address: str, agent_id: str) -> str:
    """What the credential of an agent that dials `address` is for."""
    return f"{RPC_PURPOSE} {audience(address)} {agent_id}"


def audience(address: str) -> str:
    """`host:port` of an address that somebody dials (`http://host:port`, `tcp://host:port`), as payloads have it: on one's own
    host by the host's name, so that a credential made for a loopback address of one host is worth nothing on another."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    name = socket.gethostname() if host in _LOOPBACK else host
    return f"{name.lower()}:{parts.port or {'http': 80, 'https': 443}.get(parts.scheme, 0)}"


def is_own_audience(text: str, ports: Collection[int]) -> bool:
    """Whether `audience` text names this host and one of `ports`. Asks the resolver for names other than the host's own."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in ports:
        return False
    return host == socket.gethostname().lower() or _is_own_host(host)


_own_hosts: set[str] = set()
"""Those that were found to be this host's. A "no" is not kept: the resolver may have been away."""


def _is_own_host(host: str) -> bool:
    """Whether that name or address is one of this host's, loopback aside."""
    if host in _own_hosts:
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        if str(address[0]).startswith("127.") or address[0] == "::1":
            continue
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0, *address[2:]))
        except OSError:
            continue
        _own_hosts.add(host)
        return True
    return False


# ------------------------------------------------------------------------------------------------------------ libmunge


class _Context:
    """A `munge_ctx_t` for one call: they are not for several threads."""

    def __init__(self, library: ctypes.CDLL, socket_path: str) -> None:
        self._library = library
        self.handle = ctypes.c_void_p(library.munge_ctx_create())
        if socket_path:
            library.munge_ctx_set(self.handle, ctypes.c_int(_OPTION_SOCKET), ctypes.c_char_p(os.fsencode(socket_path)))
        library.munge_ctx_set(self.handle, ctypes.c_int(_OPTION_TTL), ctypes.c_int(TTL_S))

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *exception: object) -> None:
        self._library.munge_ctx_destroy(self.handle)

    def problem(self, code: int) -> str:
        """The library's own words, one line."""
        text = self._library.munge_ctx_strerror(self.handle) or self._library.munge_strerror(code)
        return " ".join((text or b"").decode(errors="replace").split())


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libmunge.so.2")
    except OSError:
        return None
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_strerror.restype = ctypes.c_char_p
    return library


def _free(pointer: ctypes.c_void_p) -> None:
    if pointer.value:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(pointer)
