"""The UNIX sockets at which this host's processes reach their supervisor: the kernel says who they are.

An embedded supervisor's lie in its private runtime directory. A shared one's are for everybody who may enter the directory
(`socket_dir`): mode 0666, since who connects is identified, and told what they may not do.
"""

import os
import socket
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.config import Settings
from rsup.supervisor.wire import RsupError

FOR_EVERYBODY = 0o666


class LocalSocketError(RsupError):
    """A UNIX socket cannot be made; the text says why and what to do."""


def socket_dir(settings: Settings) -> Path | None:
    """Where a shared supervisor's sockets for all users are, None where nobody wants any: as set, else systemd's
    `RuntimeDirectory`."""
    if settings.embedded:
        return None
    given = settings.socket_dir or os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(os.path.abspath(given)) if given else None


def rpc_addresses(settings: Settings) -> list[str]:
    """Where agents of this host are answered, the address to announce first."""
    if settings.rpc:
        return list(settings.rpc)
    folder = socket_dir(settings)
    if folder is None:
        return [places.embedded_address(settings.state_path)]
    if not folder.is_dir():
        raise LocalSocketError(
            f"there is no directory {folder} for the sockets of this host's users; make it, or set --socket-dir"
        )
    return [f"ipc://{places.check_socket_path(folder / places.RPC_SOCKET)}"]


def open_to_everybody(settings: Settings, address: str) -> None:
    """Let all users of this host connect to an ipc address of a shared supervisor that was bound."""
    if not settings.embedded and address.startswith("ipc://"):
        os.chmod(address.removeprefix("ipc://"), FOR_EVERYBODY)


def listen_for_rest(settings: Settings) -> socket.socket | None:
    """A listening socket beside that of RPC, None where RPC has none. A stale file is replaced, a live socket is not: raise
    `LocalSocketError`."""
    path = next((path for address in rpc_addresses(settings) if (path := places.rest_socket_beside(address))), None)
    if path is None:
        return None
    places.check_socket_path(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_live(path):
            raise LocalSocketError(f"another supervisor answers at {path} already; choose another --socket-dir")
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        os.chmod(path, 0o600 if settings.embedded else FOR_EVERYBODY)
        bound.listen(128)
    except RsupError:
        bound.close()
        raise
    except OSError as error:
        bound.close()
        raise LocalSocketError(f"cannot serve REST at {path}: {error.strerror}; choose another --socket-dir") from None
    return bound


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
