"""Where a node keeps what the gate needs, and `/etc/rsup/node.toml`. Standard library only: the prolog imports this.

What the prolog loads has no dataclasses and no socket: their imports, and what a dataclass makes of itself, cost it a fifth of
its time.

| path | what | written by |
|---|---|---|
| `/etc/rsup/node.toml` | settings, below | `rsup slurm install`, then the operator |
| `/etc/rsup/supervisor.pub` | the supervisor's public key, one line of base64 | the operator |
| `/etc/rsup/token` | this node's token (0600) | the operator |
| `/run/rsup/snapshot` | what the supervisor says of the cluster's hardware, signed | healthcheck |
| `/run/rsup/confirmed.json` | when the supervisor last said that the snapshot is its newest | healthcheck |
| `/run/rsup/inventory.json` | which GPU has which index in this boot | healthcheck |
| `/run/rsup/jobs/ID` | where the kernel's log stood when the job began, and its GPUs | prolog |
| `/var/spool/rsup/` | what happened here and the supervisor has not heard yet | prolog, epilog, healthcheck |

`RSUP_NODE_ROOT` is put before all of them, for tests: several nodes on one host.
"""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT_VARIABLE = "RSUP_NODE_ROOT"
MODES = ("observe", "enforce")
ON_UNKNOWN = ("accept", "refuse")
MAX_SETTINGS_BYTES = 1 << 20


class NodeProblem(Exception):
    """Why something on this node cannot be used: one line. Never a reason to refuse a job."""


UNUSABLE = (NodeProblem, OSError, ValueError, KeyError, TypeError)
"""What reading one of our own files of state raises where it is missing, foreign or damaged: it then counts as not there."""


class NodePlaces(NamedTuple):
    """The paths of a node below `root`."""

    root: Path = Path("/")

    @property
    def settings(self) -> Path:
        return self.root / "etc/rsup/node.toml"

    @property
    def devices(self) -> Path:
        """The operator's list of this node's devices, for hosts without NVML; usually absent."""
        return self.root / "etc/rsup/devices.json"

    @property
    def run(self) -> Path:
        return self.root / "run/rsup"

    @property
    def snapshot(self) -> Path:
        return self.run / "snapshot"

    @property
    def confirmed(self) -> Path:
        return self.run / "confirmed.json"

    @property
    def inventory(self) -> Path:
        return self.run / "inventory.json"

    @property
    def jobs(self) -> Path:
        return self.run / "jobs"

    @property
    def spool(self) -> Path:
        return self.root / "var/spool/rsup"

    @property
    def log(self) -> Path:
        return self.root / "var/log/rsup/hooks.log"

    @property
    def kernel_log(self) -> Path:
        """A regular file stands for it in tests."""
        return self.root / "dev/kmsg"

    def under(self, path: str) -> Path:
        """A path of the settings, below `root`."""
        return self.root / path.lstrip("/")


class NodeSettings(NamedTuple):
    """`node.toml`. Each has a default: a node without the file observes."""

    supervisor: tuple[str, ...] = ()
    """Addresses of the supervisor's REST API, asked one after the other."""
    mode: str = "observe"
    """`observe`: say what would be refused, accept all. `enforce`: refuse."""
    on_unknown: str = "accept"
    """What the prolog makes of a question that cannot be answered."""
    max_age_s: float = 3600.0
    """A snapshot that no supervisor has confirmed for so long counts as none."""
    max_restarts: int = 3
    """A job that was restarted so often is let in, with an alarm: it has been sent away enough."""
    time_box_s: float = 1.0
    """What the gate may take: then it ends undecided."""
    public_key_file: str = "/etc/rsup/supervisor.pub"
    token_file: str = "/etc/rsup/token"
    ca_file: str = ""
    """Certificates that vouch for an https address; empty: the system's."""
    node: str = ""
    """This node's name where SLURM does not tell it (systemd timer); empty: the host's short name."""
    cluster: str = ""
    """This cluster's name where SLURM does not tell it."""
    whole_node: bool = False
    """A job without SLURM_JOB_GPUS has all GPUs of its node: for clusters whose GPUs are no gres."""
    jitter_s: float = 5.0
    """The healthcheck waits a random part of it, since SLURM starts it on all nodes at once."""
    problem: str = ""
    """No key of the file: why the file could not be used; the defaults stand then."""


def places_of(environ: Mapping[str, str]) -> NodePlaces:
    """The node's paths, below `RSUP_NODE_ROOT` where that is set."""
    return NodePlaces(Path(environ.get(ROOT_VARIABLE) or "/"))


def node_name(environ: Mapping[str, str], settings: NodeSettings) -> str:
    """This node as SLURM calls it."""
    return environ.get("SLURMD_NODENAME") or settings.node or os.uname().nodename.partition(".")[0]


def cluster_name(environ: Mapping[str, str], settings: NodeSettings) -> str:
    """The cluster, empty where nobody told."""
    return environ.get("SLURM_CLUSTER_NAME") or settings.cluster


def read_settings(path: Path) -> NodeSettings:
    """Never raises: a missing file is the defaults, one that cannot be used is the defaults with `problem` set, so that a slip
    of the pen lets jobs in."""
    import tomllib

    try:
        text = read_trusted(path, MAX_SETTINGS_BYTES).decode()
    except FileNotFoundError:
        return NodeSettings()
    except (NodeProblem, OSError, UnicodeDecodeError) as error:
        return NodeSettings(problem=_one_line(f"{path}: {error}"))
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return NodeSettings(problem=_one_line(f"{path}: {error}"))
    try:
        return settings_of(content)
    except NodeProblem as error:
        return _way_to_the_supervisor(content)._replace(problem=_one_line(f"{path}: {error}"))


def settings_of(content: Mapping[str, object]) -> NodeSettings:
    """The settings of a decoded file. Raise `NodeProblem` for a key or a value that is none."""
    known = {name: default for name, default in NodeSettings._field_defaults.items() if name != "problem"}
    given: dict[str, object] = {}
    for name, value in content.items():
        if name not in known:
            raise NodeProblem(f"unknown key {name!r}; there are {', '.join(known)}")
        given[name] = _converted(name, value, known[name])
    made = NodeSettings(**given)  # type: ignore[arg-type]
    if made.mode not in MODES or made.on_unknown not in ON_UNKNOWN:
        raise NodeProblem(f"mode is one of {', '.join(MODES)}, on_unknown one of {', '.join(ON_UNKNOWN)}")
    if made.max_age_s <= 0 or made.max_restarts < 0 or not 0 <= made.jitter_s <= 15 or not 0 < made.time_box_s <= 4:
        raise NodeProblem(
            "max_age_s is above 0, max_restarts at least 0, jitter_s within 0 and 15, time_box_s above 0 and at most 4"
        )
    return made


def _way_to_the_supervisor(content: Mapping[str, object]) -> NodeSettings:
    """What is sound of it, so that a node whose settings cannot be used can say so; all else stands as by default."""
    given: dict[str, object] = {}
    for name in ("supervisor", "token_file", "ca_file", "node", "cluster"):
        with suppress(NodeProblem):
            if name in content:
                given[name] = _converted(name, content[name], getattr(NodeSettings(), name))
    return NodeSettings(**given)  # type: ignore[arg-type]


def _converted(name: str, value: object, default: object) -> object:
    if name == "supervisor":
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise NodeProblem("supervisor must be an address or a list of them")
        return tuple(part.strip() for word in words for part in word.split(",") if part.strip())
    if isinstance(default, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise NodeProblem(f"{name} must be a {type(default).__name__}, not {value!r}")
    return value


def read_trusted(path: Path, max_bytes: int) -> bytes:
    """The content of a file that only root or we can have written. Raise `NodeProblem` for any other, OSError where it cannot
    be read. Never waits: a pipe in its place is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NodeProblem(f"{path} is no regular file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise NodeProblem(f"{path} can be written by others than root; chown root and chmod go-w it")
        if status.st_size > max_bytes:
            raise NodeProblem(f"{path} is longer than {max_bytes} bytes")
        return file.read(max_bytes)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the file in one piece; what reads it sees the old or the new content, after a crash of the host too."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def boot_id(root: Path = Path("/")) -> str:
    """This boot of the kernel; a file below `root` stands for another boot in tests. Empty where nobody tells."""
    for start in dict.fromkeys((root, Path("/"))):
        try:
            return (start / "proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            continue
    return ""


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:300]
