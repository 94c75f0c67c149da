"""Where things are: state and runtime directories, socket paths, the supervisor's address and the key of a link.

Part of the contract between the packages, like `wire`: both ends must agree on it. Needs only the standard library, and
pyzmq where a key is made.

State directory (`RSUP_STATE_DIR`, else `~/.local/state/rsup`): the store, `token`, `supervisor.json`, results. It may be on
a network file system. Runtime directory (`$XDG_RUNTIME_DIR/rsup`, else `/tmp/rsup-UID`): sockets, spools, boards; always
local, 0700, and owned by us (`/tmp/rsup-UID-RANDOM` where that name is somebody else's).
"""

import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rsup.supervisor.wire import RsupError, UsageError

MAX_SOCKET_PATH_BYTES = 107
SYSTEM_SOCKET_DIR = Path("/run/rsup-supervisor")
"""Where the users of a host find its shared supervisor's sockets, unless `RSUP_SOCKET_DIR` says otherwise."""
REST_SOCKET, RPC_SOCKET = "rest.sock", "rpc.sock"
SYSTEM_PUBLIC_KEY = Path("/etc/rsup/key.pub")
_PUBLIC_KEY_MARK = b"rsup-public-key "


class PlaceError(RsupError):
    """A directory that we need is missing, foreign or not writable."""


def state_dir(given: str | None = None) -> Path:
    """The state directory: `given`, else `RSUP_STATE_DIR`, else the user's default; `state` in the runtime directory where the
    home directory cannot be written and nobody named another. Absolute; not created."""
    text = given or os.environ.get("RSUP_STATE_DIR")
    if text:
        return Path(os.path.abspath(os.path.expanduser(text)))
    usual = usual_state_dir()
    if _can_be_made(usual):
        return usual
    try:
        return runtime_dir() / "state"
    except PlaceError:
        return usual


def state_dir_to_read(given: str | None) -> Path:
    """As `state_dir`. Raise `PlaceError` for one that was named on the command line and that we may not look into: what
    another supervisor answers must not be taken for its own."""
    path = state_dir(given)
    if given and path.is_dir() and not os.access(path, os.X_OK):
        raise PlaceError(f"cannot look into {path}: Permission denied; ask its supervisor, or name another --state-dir")
    return path


def names_no_state_dir(given: str | None) -> bool:
    """Whether somebody with that `--state-dir` has said nothing about it: then a supervisor of this host is meant first."""
    return not (given or os.environ.get("RSUP_STATE_DIR"))


def usual_state_dir() -> Path:
    """Where the state of a user is who says nothing about it."""
    return Path(os.path.abspath(os.path.expanduser("~/.local/state/rsup")))


def _can_be_made(path: Path) -> bool:
    there = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    return os.access(there, os.W_OK | os.X_OK)


def make_state_dir(path: Path) -> Path:
    """Create the state directory (0700) where it is missing; raise `PlaceError` if it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PlaceError(f"cannot make the state directory {path}: {error.strerror}; choose one with --state-dir") from None
    return path


def runtime_dir() -> Path:
    """The runtime directory, created 0700. Where the usual one is somebody else's, as in containers with a /tmp in common whose
    users all are root inside: one of ours beside it. Raise `PlaceError` if there can be none, or others may write to it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base, "rsup") if base and _is_usable(base) else Path(f"/tmp/rsup-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if status.st_uid != os.getuid():
            path = _own_dir_beside(Path(f"/tmp/rsup-{os.getuid()}"))
            status = os.lstat(path)
    except FileExistsError:
        raise PlaceError(f"the runtime directory {path} is no directory; remove it, or set XDG_RUNTIME_DIR") from None
    except OSError as error:
        raise PlaceError(f"cannot make the runtime directory {path}: {error.strerror}; set XDG_RUNTIME_DIR") from None
    if not _is_ours(status):
        raise PlaceError(
            f"the runtime directory {path} is not a directory of our own with mode 0700; remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def _own_dir_beside(path: Path) -> Path:
    """`path` with a random ending, always the same one: processes of ours find it by whose it is. Raise OSError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + 1.0  # whoever else holds this lock: two that begin at once are rare
        while not _lock(folder) and time.monotonic() < until_s:
            time.sleep(0.01)
        ours = sorted(found for found in path.parent.glob(f"{path.name}-*") if _is_ours(os.lstat(found)))
        return ours[0] if ours else Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    finally:
        os.close(folder)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _is_usable(base: str) -> bool:
    """`su` and containers pass on an XDG_RUNTIME_DIR that is somebody else's, or not there."""
    return os.path.isdir(base) and (os.path.isdir(f"{base}/rsup") or os.access(base, os.W_OK | os.X_OK))


def check_socket_path(path: Path) -> Path:
    """`path`, or `PlaceError` where it is too long for a UNIX socket."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise PlaceError(f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; set a shorter XDG_RUNTIME_DIR")
    return path


def supervisor_runtime_dir(state: Path) -> Path:
    """Runtime folder of the embedded supervisor of that state directory (`rpc` in it is its socket), created 0700."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(state))).hexdigest()[:10]
    path = runtime_dir() / f"s-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def embedded_address(state: Path) -> str:
    """ZeroMQ address at which the embedded supervisor of that state directory answers its own host."""
    return f"ipc://{check_socket_path(supervisor_runtime_dir(state) / 'rpc')}"


def fallback_stores(state: Path) -> list[Path]:
    """The stores that were used in place of that state directory's usual one, newest first."""
    found = [path for folder in _fallback_folders(state) for path in folder.glob("rsup-fallback-*.db")]
    return sorted(found, key=lambda path: path.name, reverse=True)


def new_fallback_stores(state: Path) -> list[Path]:
    """Where to make another one, the better place first."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return [folder / f"rsup-fallback-{stamp}.db" for folder in _fallback_folders(state)]


def _fallback_folders(state: Path) -> list[Path]:
    return [state, supervisor_runtime_dir(state)]


@dataclass(frozen=True)
class SupervisorFile:
    """Contents of `supervisor.json` in the state directory: the supervisor that holds this store."""

    pid: int
    start_ticks: int
    host: str
    boot_id: str
    instance: str
    rpc: str
    rest: str
    embedded: bool
    rpc_tcp: str = ""
    """Where it answers other hosts that know the key; empty if it does not."""

    def write(self, state: Path) -> None:
        """Replace the file atomically."""
        temporary = state / f".supervisor.json.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        temporary.replace(state / "supervisor.json")


def read_supervisor_file(state: Path) -> SupervisorFile | None:
    """Who says it holds the store of that state directory; None if nobody does. It may be dead: check before trusting."""
    try:
        return SupervisorFile(**json.loads((state / "supervisor.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def boot_id() -> str:
    """This boot of this kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def this_node() -> str:
    """This node's name in the records of jobs and hardware: SLURM's, where SLURM has started us, else the host's. They differ
    where a host has several names, or several nodes."""
    return os.environ.get("SLURMD_NODENAME") or this_host()


def this_host() -> str:
    """This host's name, as the lease and the node records call it."""
    return socket.gethostname()


def split_endpoint(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[v6]:port`. Raise `UsageError` for anything else."""
    host, _, port_text = text.strip().rpartition(":")
    if text.strip().endswith("]") or not host:
        host, port_text = text.strip(), ""
    if not port_text and default_port is not None:
        port_text = str(default_port)
    if not _is_host(host) or not port_text.isdecimal() or not 0 <= int(port_text) <= 65535:
        raise UsageError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port_text)


def _is_host(text: str) -> bool:
    """Brackets belong around a whole host, and to an IPv6 address."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return bool(inner) and not any(one in "[]" or one.isspace() for one in inner) and (inner == text or ":" in inner)


def tcp_address(host: str, port: int) -> str:
    """ZeroMQ address of a TCP endpoint."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True)
class LinkKey:
    """CURVE keys (Z85 text) of a link, derived from a shared secret: who knows the secret can talk, nobody else."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def link_key(secret: bytes) -> LinkKey:
    """Keys of both ends from the shared secret."""
    import zmq
    from zmq.utils import z85

    def pair(role: bytes) -> tuple[bytes, bytes]:
        private = z85.encode(hashlib.sha256(b"rsup link " + role + b"\0" + secret).digest())
        return zmq.curve_public(private), private

    server, client = pair(b"server"), pair(b"client")
    return LinkKey(server[0], server[1], client[0], client[1])


def rest_socket_beside(rpc: str) -> Path | None:
    """Where the supervisor with that RPC address answers REST to this host's processes; None where it has no ipc address."""
    path = Path(rpc.removeprefix("ipc://"))
    return path.parent / REST_SOCKET if rpc.startswith("ipc://") and path.is_absolute() else None


def host_rest_socket() -> Path:
    """Where this host's users reach its shared supervisor."""
    return Path(os.environ.get("RSUP_SOCKET_DIR") or SYSTEM_SOCKET_DIR) / REST_SOCKET


def public_key_line(key: LinkKey) -> str:
    """The file `key.pub`: with it everybody can reach the supervisor and be sure that it is it, but must say who they are."""
    return f"{_PUBLIC_KEY_MARK.decode()}{key.server_public.decode()}\n"


def find_link_key(state: Path, key_file: str | None = None) -> LinkKey | None:
    """The key of a job's TCP link: of the file that `find_secret` finds, which may be a supervisor's public key, else of
    `/etc/rsup/key.pub`; None if there is none. Raise `PlaceError` for one that cannot be used."""
    given = key_file or os.environ.get("RSUP_KEY_FILE")
    for path in [Path(given)] if given else [state / "key", SYSTEM_PUBLIC_KEY]:
        public = _read_public_key(path)
        if public is not None:
            return public
        if given or path.exists():
            return link_key(read_key_file(path))
    return None


def check_key_file(path: Path) -> None:
    """Raise `PlaceError` for a file that holds neither a secret nor a public key that can be used."""
    if _read_public_key(path) is None:
        read_key_file(path)


def _read_public_key(path: Path) -> LinkKey | None:
    """The key in a file of `public_key_line`, with a client key that nobody knows; None for any other file."""
    try:
        content = path.read_bytes()[:200]
    except OSError:
        return None
    if not content.startswith(_PUBLIC_KEY_MARK):
        return None
    import zmq

    public = content.removeprefix(_PUBLIC_KEY_MARK).strip()
    if len(public) != 40:
        raise PlaceError(f"the key file {path} holds no whole public key; copy the supervisor's key.pub again")
    client_public, client_secret = zmq.curve_keypair()
    return LinkKey(public, b"", client_public, client_secret)


def find_secret(state: Path, key_file: str | None = None) -> bytes | None:
    """The secret of a job's TCP link: in `key_file`, else `RSUP_KEY_FILE`, else `key` in the state directory; None if there
    is none, as where a shared supervisor's public key is named. Raise `PlaceError` for one that cannot be used."""
    given = key_file or os.environ.get("RSUP_KEY_FILE")
    if given and _read_public_key(Path(given)) is None:
        return read_key_file(given)
    return read_key_file(state / "key") if not given and (state / "key").exists() else None


def _no_secret(content: bytes) -> str:
    """What stands in a file where a secret should, empty where it may be one: what is copied to every node is none."""
    if content.startswith(_PUBLIC_KEY_MARK):
        return "a supervisor's public key, no secret; name it with --key-file or RSUP_KEY_FILE of a launch"
    if content.startswith(b"rsup-signing-key "):
        return "the private key that signs snapshots; a launch takes the supervisor's key.pub"
    return ""


def _is_like_signing_pub(content: bytes) -> bool:
    """One line of base64 of 32 bytes, as `signing-key.pub`; a secret may look so too."""
    return len(content) == 44 and content.endswith(b"=")


def read_key_file(path: str | Path, what: str = "key file") -> bytes:
    """The secret in a key file. Raise `PlaceError` if others can read it or it is too short."""
    try:
        status = os.stat(path)
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise PlaceError(f"cannot read the {what} {path}: {error.strerror}") from None
    if wrong := _no_secret(secret):
        raise PlaceError(f"the {what} {path} holds {wrong}")
    if status.st_mode & 0o077:
        if Path(path).suffix == ".pub" or _is_like_signing_pub(secret):
            raise PlaceError(
                f"the {what} {path} looks like a key that signs snapshots (signing-key.pub, supervisor.pub), no secret: "
                f"name the supervisor's key.pub; if it is the secret after all, nobody else may read it: chmod 600 {path}"
            )
        raise PlaceError(f"the {what} {path} can be read by others; chmod 600 {path}")
    if len(secret) < 16:
        raise PlaceError(f"the {what} {path} holds fewer than 16 bytes; write 32 random ones")
    return secret
