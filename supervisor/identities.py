"""All ways to say who one is, in one place for REST and RPC: a peer's uid, a MUNGE credential, a token.

What a credential is for stands in its payload (`munge.rest_payload`, `munge.rpc_payload`). `munged` reads each once, so that
whoever overhears one, or gets one as somebody's supervisor, can do nothing with it here.
"""

from collections.abc import Collection
from dataclasses import dataclass

from rsup.supervisor import munge
from rsup.supervisor.munge import MungeError
from rsup.supervisor.peer_identity import Peers
from rsup.supervisor.principals import Principal, Role, Tokens, owner_name


@dataclass(frozen=True)
class Vouched:
    """A principal, and whether its uid is `Peers.is_master`: may speak for any owner, as it could become any."""

    principal: Principal
    is_master: bool = False


@dataclass(frozen=True)
class Identities:
    """Thread-safe. `munge_socket`: of the `munged` to ask, empty for the usual place."""

    tokens: Tokens
    peers: Peers
    munge_socket: str = ""

    def of_uid(self, uid: int) -> Vouched | None:
        """The peer of a UNIX socket."""
        found = self.peers.principal(uid)
        return None if found is None else Vouched(found, self.peers.is_master(uid))

    def of_token(self, token: str) -> Vouched | None:
        """Whose token that is. The one in the state directory is that of the user whom we run as."""
        found = self.tokens.find(token)
        return None if found is None else Vouched(found, found == Principal(owner_name(), Role.OPERATOR))

    def of_munge(self, credential: str, purpose: str, subject: str, ports: Collection[int]) -> Vouched | None:
        """Who made a credential for `purpose` and `subject` at this host and one of `ports`; None for one whom we do not know.
        Raise `MungeError`. Blocks."""
        decoded = munge.decode(credential, self.munge_socket)
        words = decoded.payload.split(" ", 2)
        if len(words) != 3 or words[0] != purpose or words[2] != subject:
            raise MungeError(f"this MUNGE credential was made for something else than {purpose} {subject[:200]}")
        if not munge.is_own_audience(words[1], ports):
            raise MungeError(f"this MUNGE credential was made for the supervisor at {words[1][:200]}, which is another one")
        return self.of_uid(decoded.uid)
