"""What every request passes first: its Host, its size, who it is from; and the headers that every answer gets."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rsup.supervisor import munge, node_tokens
from rsup.supervisor.identities import Identities, Vouched
from rsup.supervisor.munge import MungeError
from rsup.supervisor.principals import Principal, Role, owner_name
from rsup.supervisor.rest.context import PEER_UID, Context
from rsup.supervisor.rest.problems import problem, refused

MAX_BODY_BYTES = 64 * 1024
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

NO_TOKEN = (
    "no token: send `Authorization: Bearer TOKEN` with the one in the file `token` of the supervisor's state directory, "
    "or a MUNGE credential, or ask over the UNIX socket"
)
WRONG_TOKEN = (
    "this token is not known here: use the one in the file `token` of the supervisor's state directory, or one of `tokens.toml`"
)
NODE_TOKEN = (
    "{what}: put what `rsup slurm node-token NODE` prints on the supervisor's host into the node's /etc/rsup/token, mode 0600"
)
_OF_NODES = re.compile(r"/api/v1/(gate/snapshot|nodes/[^/]+/report)")
"""What nodes ask and tell: nobody there is to be sent for an operator's token."""


class Guard:
    """ASGI middleware: refuse a foreign Host (DNS rebinding) and bodies over `MAX_BODY_BYTES`, set `HEADERS`."""

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...]) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        is_local = (scope.get("client") or ("",))[0] == PEER_UID  # no page of another site reaches a UNIX socket
        if not (is_local or self._host_allowed(headers.get("host", ""))) and scope["path"] != "/healthz":
            detail = f"this supervisor does not answer to that host name; use http://{self._allowed_hosts[0]}:PORT"
            await problem(Request(scope), 421, detail)(scope, receive, send_with_headers)
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            detail = f"the body is longer than the {MAX_BODY_BYTES} bytes allowed"
            await problem(Request(scope), 413, detail, {"Connection": "close"})(scope, receive, send_with_headers)
        else:
            await self._app(scope, _bounded(receive), send_with_headers)

    def _host_allowed(self, host: str) -> bool:
        if not self._allowed_hosts:
            return True
        try:
            return urlsplit(f"//{host}").hostname in self._allowed_hosts
        except ValueError:
            return False


def _bounded(receive: Receive) -> Receive:
    """`receive` that refuses a body without length once it has grown too long."""
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than the {MAX_BODY_BYTES} bytes allowed")
        return message

    return receive_bounded


def cookie_name(request: Request) -> str:
    """Cookies do not know ports, supervisors on one host do: the name carries the port."""
    return f"rsup_token_{request.url.port or 0}"


_bearer = HTTPBearer(auto_error=False, description="the token in the file `token` of the supervisor's state directory")


async def _body_for_munge(request: Request) -> bytes:
    """What a MUNGE credential was made for too; empty for others, whose body nobody here needs."""
    is_munge = request.headers.get("authorization", "").partition(" ")[0].lower() == "munge"
    return await request.body() if is_munge else b""


def find_principal(
    request: Request,
    context: Context,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    body: Annotated[bytes, Depends(_body_for_munge)],
) -> Principal:
    """Who asks: by what the `Authorization` header says, else as the peer of the UNIX socket, else by the page's cookie. A
    cookie changes something only from the page itself: other pages of the same host, on other ports, are `same-site` and would
    send it too."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    if bearer is not None:
        token = bearer.credentials
    elif scheme.lower() == "munge" and context.identities is not None:
        return _by_munge(request, body, context.identities, credential.strip(), context.rest_ports)
    elif context.identities is not None and request.client is not None and request.client.host == PEER_UID:
        return _known(context.identities.of_uid(request.client.port), f"uid {request.client.port}")
    else:
        token = request.cookies.get(cookie_name(request), "")
        if not token:
            raise refused(401, NODE_TOKEN.format(what="no token") if _is_of_nodes(request) else NO_TOKEN)
        if request.method not in SAFE_METHODS and not _same_origin(request):
            raise refused(403, "a request with the page's cookie must come from the page itself; send a bearer token")
    principal = context.tokens.find(token)
    if principal is None:
        is_node = token.startswith(node_tokens.PREFIX) or _is_of_nodes(request)
        raise refused(401, NODE_TOKEN.format(what="this node's token is not known here") if is_node else WRONG_TOKEN)
    return principal


def _is_of_nodes(request: Request) -> bool:
    return _OF_NODES.fullmatch(request.url.path) is not None


def _by_munge(request: Request, body: bytes, identities: Identities, credential: str, ports: tuple[int, ...]) -> Principal:
    target = request.scope.get("raw_path") or request.url.path.encode()
    path = target.decode("ascii", "replace").partition("?")[0]
    subject = munge.rest_subject(request.method, path, request.scope.get("query_string", b""), body)
    try:
        found = identities.of_munge(credential, munge.REST_PURPOSE, subject, ports)
    except MungeError as error:
        raise refused(401, str(error)) from None
    return _known(found, "the maker of this MUNGE credential")


def _known(found: Vouched | None, who: str) -> Principal:
    if found is None:
        raise refused(403, f"this supervisor runs for {owner_name()} only, not for {who}")
    return found.principal


def _same_origin(request: Request) -> bool:
    return request.headers.get("origin") == f"{request.url.scheme}://{request.headers.get('host')}"


AnyPrincipal = Annotated[Principal, Depends(find_principal)]
"""Who asks, a node included: for the gate's snapshot only."""


def find_person(principal: AnyPrincipal) -> Principal:
    """Who asks, if no node."""
    if principal.role is Role.NODE:
        raise refused(403, f"{principal} may not do this: a node's token reads the snapshot and reports for its own node")
    return principal


Asker = Annotated[Principal, Depends(find_person)]


def find_operator(asker: Asker) -> Principal:
    """Who asks, if an operator."""
    if asker.role is not Role.OPERATOR:
        raise refused(403, f"{asker} may not do this: only operators may")
    return asker


Operator = Annotated[Principal, Depends(find_operator)]


def find_reporter(principal: AnyPrincipal, name: Annotated[str, Path(max_length=300)]) -> Principal:
    """Who asks, if they may report for the node of the path's `name`."""
    if not principal.may_report_for(name):
        raise refused(403, f"{principal} may not report for node {name}: only that node's own token and operators may")
    return principal


Reporter = Annotated[Principal, Depends(find_reporter)]
"""Who reports for the node that the path calls `name`."""
