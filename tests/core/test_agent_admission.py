"""Who may speak for which agent: every case of `admit`, without a link."""

import grp
import pwd

import pytest

from rsup.supervisor.agent_admission import Admission, Admitted, Known, Peer, admit
from rsup.supervisor.identities import Identities, Vouched
from rsup.supervisor.peer_identity import Peers, check_operators, uid_of_zmq_peer, user_name
from rsup.supervisor.principals import Principal, Role, TokenBook, owner_name
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Refusal, UsageError

ANN = Admitted(Vouched(Principal("ann", Role.USER)))
OPERATOR = Admitted(Vouched(Principal("oda", Role.OPERATOR)))
MASTER = Admitted(Vouched(Principal("rsup", Role.OPERATOR), is_master=True))
NAMELESS = Admitted(None)
REFUSED = None


def hello(owner: str = "bob", credential: str = "", listen: str = "") -> Hello:
    agent = AgentInfo("a1", "n1", "127.0.0.1", 1, principal="forged")
    return Hello((3, 4), "0", agent, JobSpec(owner=owner, listen=listen), credential=credential)


@pytest.mark.parametrize(
    ("who", "known", "link_owner", "expected"),
    [
        (ANN, None, None, ("ann", "ann")),
        (OPERATOR, None, None, ("oda", "oda")),
        (MASTER, None, None, ("bob", "rsup")),
        (NAMELESS, None, None, (owner_name(), "")),
        (ANN, Known("ann", "ann"), None, ("ann", "ann")),
        (ANN, Known("ann", ""), None, ("ann", "ann")),
        (ANN, Known("carl", "carl"), None, REFUSED),
        (ANN, Known("carl", ""), None, REFUSED),
        (OPERATOR, Known("ann", "ann"), None, REFUSED),
        (MASTER, Known("ann", "ann"), None, ("ann", "ann")),
        (NAMELESS, Known("ann", "ann"), None, REFUSED),
        (NAMELESS, Known("ann", ""), None, ("ann", "")),
        (ANN, None, "ann", ("ann", "ann")),
        (ANN, None, "carl", REFUSED),
        (NAMELESS, None, "carl", ("carl", "")),
        (NAMELESS, Known("carl", "carl"), "carl", REFUSED),
    ],
)
def test_the_owner_is_who_the_agent_is(
    who: Admitted, known: Known | None, link_owner: str | None, expected: tuple[str, str] | None
) -> None:
    decided = admit(hello(credential="bearer x"), who, known, link_owner)
    if expected is None:
        assert isinstance(decided, Refusal) and "\n" not in decided.message
    else:
        assert isinstance(decided, Hello)
        assert (decided.spec.owner, decided.agent.principal, decided.credential) == (*expected, "")


def test_users_cannot_make_a_shared_supervisor_listen() -> None:
    decided = admit(hello(listen="0.0.0.0:1"), ANN, None, None)
    assert isinstance(decided, Hello) and decided.spec.listen == ""
    decided = admit(hello(listen="0.0.0.0:1"), MASTER, None, None)
    assert isinstance(decided, Hello) and decided.spec.listen == "0.0.0.0:1"


def test_an_embedded_supervisor_serves_its_owner_only() -> None:
    embedded = Admission(Identities(TokenBook(()), Peers(shared=False), "/nonexistent"), shared=False)
    refused = embedded.who(Peer(uid=4_000_000), hello())
    assert isinstance(refused, Refusal) and "only" in refused.message
    assert isinstance(embedded.who(Peer(keyed=True, has_secret=True), hello()), Admitted)
    shared = Admission(Identities(TokenBook(()), Peers(shared=True), "/nonexistent"), shared=True)
    found = shared.who(Peer(uid=4_000_000), hello())
    assert isinstance(found, Admitted) and found.vouched == Vouched(Principal("uid-4000000", Role.USER))
    assert shared.who(Peer(keyed=True, has_secret=True), hello()) == NAMELESS
    assert isinstance(shared.who(Peer(keyed=True), hello()), Refusal)
    assert shared.who(Peer(), hello()) == NAMELESS, "no key and no MUNGE: as with torchrun"
    for credential in ("bearer unknown-token-0123", "munge x"):
        assert isinstance(shared.who(Peer(keyed=True), hello(credential=credential)), Refusal)


def test_operators_are_named_users_and_groups() -> None:
    peers = Peers(shared=True, operators=("uid-4000000",))
    assert peers.principal(4_000_000) == Principal("uid-4000000", Role.OPERATOR)
    assert peers.principal(4_000_001) == Principal("uid-4000001", Role.USER)
    assert peers.principal(0) == Principal(user_name(0), Role.OPERATOR)
    by_group = Peers(shared=True, operators=("@daemon",)).principal(1)  # daemon's own group has its name on every Linux
    assert by_group is not None and by_group.role is Role.OPERATOR
    for wrong in ("@", ""):
        with pytest.raises(UsageError, match="operators"):
            check_operators([wrong])


def test_operators_that_are_not_known_are_named_and_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_operators(["root", "@daemon", "uid-4000000"]) == []
    group, user = check_operators(["@no-such-group-here", "nosuchuserhere"])
    assert "no group 'no-such-group-here'" in group and "no user 'nosuchuserhere'" in user
    peers = Peers(shared=True, operators=("@admins",))  # the users' directory is away when the daemon starts
    monkeypatch.setattr(grp, "getgrnam", lambda name: (_ for _ in ()).throw(OSError("directory away")))
    assert len(check_operators(peers.operators)) == 1 and peers.principal(1) == Principal(user_name(1), Role.USER)
    monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group((name, "x", pwd.getpwuid(1).pw_gid, [])))
    assert peers.principal(1) == Principal(user_name(1), Role.OPERATOR)


def test_a_zmq_peers_uid_comes_from_ipc_only() -> None:
    assert uid_of_zmq_peer("localhost:1000:100:4711") == 1000
    for other in ("127.0.0.1", "::1", "fe80::1:2:3", ""):
        assert uid_of_zmq_peer(other) is None
