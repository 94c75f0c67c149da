"""Who may speak for which agent: every case of `admit`, without a link."""

import grp
import os
import pwd
import socket

import pytest

from rsup.supervisor import munge
from rsup.supervisor.agent_admission import Admission, Admitted, Known, Peer, Unsure, admit
from rsup.supervisor.identities import Identities, Vouched
from rsup.supervisor.munge import MungeAway, MungeError
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
    assert isinstance(shared.who(Peer(keyed=True), hello(credential="bearer unknown-token-0123")), Refusal)


def test_a_munged_that_is_away_for_a_moment_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [5.0]
    identities = Identities(TokenBook(()), Peers(shared=True), "/nonexistent")
    shared = Admission(identities, shared=True, clock=lambda: now_s[0])
    problems: list[MungeError] = [MungeAway("away")] * 4 + [MungeError("used before")]
    monkeypatch.setattr(munge, "decode", lambda credential, socket: (_ for _ in ()).throw(problems.pop(0)))
    said = []
    for _ in range(5):
        said.append(type(shared.who(Peer(keyed=True), hello(credential="munge x"))))
        now_s[0] += 7.0
    assert said == [Unsure, Unsure, Unsure, Refusal, Refusal]
    problems += [MungeAway("away")]
    now_s[0] += 100.0
    assert shared.who(Peer(keyed=True), hello(credential="munge x")) == Unsure("away")


def test_an_agent_whose_users_directory_is_away_asks_again() -> None:
    """`who` then finds a number in place of its name."""
    nameless = Admitted(Vouched(Principal("uid-1000", Role.USER)))
    assert isinstance(admit(hello(), nameless, Known("ann", "ann"), None), Unsure)
    assert isinstance(admit(hello(), ANN, Known("uid-1000", "uid-1000"), None), Unsure)
    assert isinstance(admit(hello(), nameless, Known("uid-1000", "uid-1000"), None), Hello)


def test_who_a_uid_is_is_asked_on_another_thread_and_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked = [5.0], []

    def look_up(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        if uid == 4_000_001:
            raise KeyError(uid)
        return pwd.struct_passwd(("ann", "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", look_up)
    shared = Admission(Identities(TokenBook(()), Peers(shared=True)), shared=True, clock=lambda: now_s[0])
    ann, nobody = Peer(uid=4_000_000), Peer(uid=4_000_001)
    assert shared.must_wait(ann, hello()) and not shared.must_wait(Peer(uid=os.getuid()), hello())
    for _ in range(3):
        assert shared.who(ann, hello()) == Admitted(Vouched(Principal("ann", Role.USER)))
        assert not shared.must_wait(ann, hello())
    assert len(asked) == 1
    now_s[0] += 61.0
    assert shared.must_wait(ann, hello())
    assert isinstance(shared.who(nobody, hello()), Admitted) and shared.must_wait(nobody, hello()), "it may have a name soon"
    embedded = Admission(Identities(TokenBook(()), Peers(shared=False)), shared=False)
    assert not embedded.must_wait(ann, hello())


def test_one_failure_of_the_resolver_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    name, answers = "ours.example.org", [OSError("away"), [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("0.0.0.0", 0))]]

    def resolve(host: str, port: int, **kwargs: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(munge, "_own_hosts", set())
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert not munge.is_own_audience(f"{name}:7", [7])
    assert munge.is_own_audience(f"{name}:7", [7])
    assert munge.is_own_audience(f"{name}:7", [7]), "asked no third time"


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
