"""Who a uid is to this supervisor: the peers of its UNIX sockets, as the kernel names them, and those that MUNGE vouches for.

An embedded supervisor has one operator, the owner of its state directory, and knows nobody else. To a shared one everybody
with an account is a user; operators are the user it runs as, root, and those that the settings name (`operators`: user names,
and `@group`s). Where a uid has no name, as in containers, it is called `uid-N`.
"""

import contextlib
import grp
import os
import pwd
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rsup.supervisor.principals import Principal, Role, owner_name
from rsup.supervisor.wire import UsageError

_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


def peer_uid(connected: socket.socket) -> int | None:
    """The uid of the process at the other end of a UNIX socket when it connected; None for a socket of another kind."""
    if connected.family != socket.AF_UNIX:
        return None
    _, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def uid_of_zmq_peer(address: str) -> int | None:
    """The uid in ZeroMQ's `Peer-Address` of an ipc connection (`localhost:UID:GID:PID`, from SO_PEERCRED); None over TCP."""
    parts = address.split(":")
    return int(parts[1]) if len(parts) == 4 and all(part.isdecimal() for part in parts[1:]) else None


def user_name(uid: int) -> str:
    """The name of that uid on this host; for our own, as jobs carry it."""
    if uid == os.getuid():
        return owner_name()
    with contextlib.suppress(KeyError, OSError):
        return pwd.getpwuid(uid).pw_name
    return f"uid-{uid}"


def is_nameless(name: str) -> bool:
    """Whether that is what a uid is called that has no name here, or had none when it was looked up."""
    number = name.removeprefix("uid-")
    return number != name and number.isdecimal()


@dataclass(frozen=True)
class Peers:
    """Turns uids into principals. `operators`: as in the settings, of a shared supervisor."""

    shared: bool
    operators: Sequence[str] = ()

    def principal(self, uid: int) -> Principal | None:
        """Who that is; None for somebody else's uid at an embedded supervisor."""
        if self.is_master(uid):
            return Principal(user_name(uid), Role.OPERATOR)
        if not self.shared:
            return None
        name = user_name(uid)
        return Principal(name, Role.OPERATOR if self._is_operator(uid, name) else Role.USER)

    def is_master(self, uid: int) -> bool:
        """Whether that uid could do as us whatever we refused it: our own, and root."""
        return uid in (0, os.getuid())

    def _is_operator(self, uid: int, name: str) -> bool:
        if name in self.operators:
            return True
        groups = [operator[1:] for operator in self.operators if operator.startswith("@")]
        return bool(groups) and not _group_ids(uid, name).isdisjoint(_gid(group) for group in groups)


def check_operators(operators: Sequence[str]) -> list[str]:
    """Lines about names that nobody has here: a slip of the pen would lock operators out in silence. They are looked up again
    whenever somebody comes: a directory of users may be away for a while. Raise `UsageError` for an empty name."""
    notes = []
    for operator in operators:
        name = operator.removeprefix("@")
        if not name:
            raise UsageError("operators: an empty name; write user names and @groups")
        if operator.startswith("@") and _gid(name) is None:
            notes.append(f"operators: this host knows no group {name!r} (now), so it makes nobody an operator")
        elif not operator.startswith("@") and not _is_user(name):
            notes.append(f"operators: this host knows no user {name!r} (now); a group is written @{name}")
    return notes


def _is_user(name: str) -> bool:
    if is_nameless(name):
        return True
    with contextlib.suppress(KeyError, OSError):
        return bool(pwd.getpwnam(name))
    return False


def _gid(group: str) -> int | None:
    with contextlib.suppress(KeyError, OSError):
        return grp.getgrnam(group).gr_gid
    return None


def _group_ids(uid: int, name: str) -> set[int | None]:
    with contextlib.suppress(KeyError, OSError):
        return set(os.getgrouplist(name, pwd.getpwuid(uid).pw_gid))
    return set()
