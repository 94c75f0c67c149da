"""Who an agent is, and for whom it may speak: asked of every `Hello`, before anything else of it is believed.

* ipc: the peer's uid, as the kernel says.
* TCP with a key, and a credential in the `Hello`: the user of the token or of the MUNGE credential.
* TCP with the secret key alone: the user whom an embedded supervisor runs for; at a shared one nobody in particular, and the
  job belongs to the user that the supervisor runs as.
* TCP with the public key alone: nobody, refused.
* TCP without a key, where MUNGE works here: the user of the MUNGE credential, who must be the job's owner.
* TCP without a key or MUNGE: whoever reaches the port; it can join that link's job only.

A job's owner is who its agents are, whatever their specs say; only the user whom the supervisor runs as, and root, may start
jobs for others. A known agent is continued only by who it was before. Nothing is refused to agents of older releases that they
could do before: those that said no name keep their jobs.

Where it cannot be told now who an agent is (`munged` or the directory of users is away) it gets no answer, and asks again.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from rsup.supervisor import munge, wire
from rsup.supervisor.identities import Identities, Vouched
from rsup.supervisor.munge import MungeAway, MungeError
from rsup.supervisor.peer_identity import is_nameless
from rsup.supervisor.principals import Principal, Role, owner_name
from rsup.supervisor.records import JobKey
from rsup.supervisor.wire import Hello, Refusal

BEARER, MUNGE = "bearer ", "munge "
"""How `Hello.credential` begins."""

AWAY_S = 20.0
"""How long agents that are new may wait for a `munged` that is away; then they are told. Its restart takes a second or two."""
KNOWN_S = 60.0
"""How long it holds who a uid is: each `Hello` of each agent would ask the directory of users."""
_MAX_UIDS = 10_000


@dataclass(frozen=True)
class Peer:
    """What the link knows of a connection. `uid`: over ipc; `has_secret`: it proved to know the link's secret; `keyed`: the
    link has a key; `ports`: where we listen."""

    uid: int | None = None
    keyed: bool = False
    has_secret: bool = False
    ports: Collection[int] = ()


@dataclass(frozen=True)
class Known:
    """An agent of a live job: the job's owner, and who the agent was when it came; empty where nobody asked then. `job`: its
    job, where that is known and has not ended."""

    owner: str
    principal: str
    job: JobKey | None = None


@dataclass(frozen=True)
class Admitted:
    """`vouched` None: nobody said who it is, and nobody had to."""

    vouched: Vouched | None


@dataclass(frozen=True)
class Unsure:
    """Nobody can say now who that is, for this reason: no answer, the agent asks again."""

    reason: str


class Admission:
    """The rules of the table. Thread-safe."""

    def __init__(self, identities: Identities, *, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._identities = identities
        self._shared = shared
        self._clock = clock
        self._lock = threading.Lock()
        self._away = (0.0, 0.0)
        """Since when no credential could be read, and when that was so last."""
        self._by_uid: dict[int, tuple[float, Vouched]] = {}

    def must_wait(self, peer: Peer, hello: Hello) -> bool:
        """Whether `who` asks `munged` or the directory of users, which may block: then call it on a thread of its own."""
        if peer.uid is not None:
            return self._shared and peer.uid not in (0, os.getuid()) and self._kept(peer.uid, KNOWN_S) is None
        return hello.credential.startswith(MUNGE) or (not peer.keyed and munge.is_here(self._identities.munge_socket))

    def who(self, peer: Peer, hello: Hello) -> Admitted | Refusal | Unsure:
        """Who that agent is, or why it is not let in."""
        if peer.uid is not None:
            found = self._of_uid(peer.uid)
            return Admitted(found) if found else self._no_user(f"uid {peer.uid}")
        try:
            if hello.credential.startswith(MUNGE):
                return self._by_munge(peer, hello)
        except MungeAway as error:
            return Refusal(1, str(error)) if self._away_s() >= AWAY_S else Unsure(str(error))
        except MungeError as error:
            return Refusal(1, str(error))
        if hello.credential.startswith(BEARER) and peer.keyed:
            return self._by_token(hello.credential.removeprefix(BEARER))
        return self._unnamed(peer)

    def _of_uid(self, uid: int) -> Vouched | None:
        found = self._kept(uid, KNOWN_S + 5.0)  # what `must_wait` has found is found here too
        if found is None and (found := self._identities.of_uid(uid)) is not None and not is_nameless(found.principal.name):
            with self._lock:
                if len(self._by_uid) >= _MAX_UIDS:
                    self._by_uid.clear()
                self._by_uid[uid] = (self._clock(), found)
        return found

    def _kept(self, uid: int, within_s: float) -> Vouched | None:
        with self._lock:
            asked_s, found = self._by_uid.get(uid, (0.0, None))
        return found if found is not None and self._clock() - asked_s <= within_s else None

    def _away_s(self) -> float:
        """For how long `munged` has been away, which it is now; after a longer silence of all agents it counts anew."""
        now_s = self._clock()
        with self._lock:
            since_s, last_s = self._away
            since_s = since_s if since_s and now_s - last_s < AWAY_S else now_s
            self._away = (since_s, now_s)
            return now_s - since_s

    def _by_munge(self, peer: Peer, hello: Hello) -> Admitted | Refusal:
        credential = hello.credential.removeprefix(MUNGE)
        found = self._identities.of_munge(credential, munge.RPC_PURPOSE, hello.agent.agent_id, peer.ports)
        with self._lock:
            self._away = (0.0, 0.0)
        return Admitted(found) if found else self._no_user("another user's MUNGE credential")

    def _by_token(self, token: str) -> Admitted | Refusal:
        found = self._identities.of_token(token)
        if found is None:
            return Refusal(1, "the token of RSUP_TOKEN_FILE is not known to this supervisor; ask its operators for one")
        if found.principal.role < Role.USER:
            return Refusal(1, f"{found.principal} may start no jobs: that takes the token of a user")
        return Admitted(found)

    def _unnamed(self, peer: Peer) -> Admitted | Refusal:
        if peer.has_secret:
            owner = Principal(owner_name(), Role.USER if self._shared else Role.OPERATOR)
            return Admitted(None if self._shared else Vouched(owner, is_master=True))
        if peer.keyed:
            return Refusal(1, "this supervisor asks who you are: set RSUP_TOKEN_FILE, or start munged on this node")
        if self._munge_works():
            text = (
                "the link has no key and no MUNGE credential came: start munged on this node, or set RSUP_KEY_FILE on all nodes"
            )
            return Refusal(wire.EXIT_USAGE, text)
        return Admitted(None)

    def _munge_works(self) -> bool:
        """A dead `munged` must not keep a job's other nodes out."""
        if not munge.is_here(self._identities.munge_socket):
            return False
        try:
            munge.encode("rsup", self._identities.munge_socket)
        except MungeError:
            return False
        return True

    def _no_user(self, who: str) -> Refusal:
        return Refusal(1, f"this supervisor runs for {owner_name()} only, not for {who}; use your own --state-dir")


def admit(hello: Hello, admitted: Admitted, known: Known | None, link_owner: str | None) -> Hello | Refusal | Unsure:
    """`hello` with the owner that it may have, and who said it. `link_owner`: of the only job of a link without a key."""
    vouched = admitted.vouched
    name = vouched.principal.name if vouched else ""
    owner = known.owner if known else link_owner
    if vouched is None:
        if known is not None and known.principal:
            return _foreign(hello, known, "an agent that does not say who it is")
        return _as(hello, owner if owner is not None else owner_name(), known.principal if known else "")
    if vouched.is_master:
        return _as(hello, hello.spec.owner if owner is None else owner, known.principal if known and known.principal else name)
    if known is not None and name != (known.principal or known.owner):
        if is_nameless(name) or is_nameless(known.principal):
            return Unsure(
                f"agent {hello.agent.agent_id} belongs to {known.owner}, and this host does not know now who {name} is"
            )
        return _foreign(hello, known, str(vouched.principal))
    if known is None and owner is not None and owner != name:
        return Refusal(1, f"{vouched.principal} may not join a job of {owner}")
    unlistened = msgspec.structs.replace(hello, spec=msgspec.structs.replace(hello.spec, listen=""))  # ports are the master's
    return _as(unlistened, name if owner is None else owner, name)


def _foreign(hello: Hello, known: Known, who: str) -> Refusal:
    return Refusal(1, f"agent {hello.agent.agent_id} belongs to {known.owner}: {who} may not speak for it")


def _as(hello: Hello, owner: str, principal: str) -> Hello:
    spec = hello.spec if hello.spec.owner == owner else msgspec.structs.replace(hello.spec, owner=owner)
    agent = msgspec.structs.replace(hello.agent, principal=principal)
    return msgspec.structs.replace(hello, spec=spec, agent=agent, credential="")
