"""On what kind of file system a state directory is, and where the live store is when that is a network file system.

SQLite in WAL mode needs shared memory between the processes of one host, so on NFS, Lustre and their like the live file
is on node-local disk and the state directory holds a copy (https://www.sqlite.org/wal.html, "does not work over a network
filesystem").
"""

import hashlib
import os
import re
import stat
from pathlib import Path

from rsup.supervisor.store import StoreError

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "glusterfs", "afs"}
_NETWORK |= {"9p", "virtiofs", "pvfs2", "panfs", "wekafs", "ocfs2", "gfs2", "vboxsf", "fuse", "acfs", "coda", "autofs"}


def is_network_file_system(directory: Path) -> bool:
    """Whether two hosts may share that directory. `RSUP_ASSUME_NETWORK_FS` set to 1 or 0 decides it by hand.

    What is below `local_dir` is this node's own by declaration.
    """
    if local_dir() in Path(os.path.abspath(directory)).parents:
        return False
    assumed = os.environ.get("RSUP_ASSUME_NETWORK_FS")
    if assumed in ("0", "1"):
        return assumed == "1"
    kind = file_system_type(directory)
    return kind in _NETWORK or kind.startswith("fuse.")


def file_system_type(directory: Path) -> str:
    """Type of the file system of an existing directory as /proc/self/mountinfo calls it, empty if unknown."""
    try:
        os.stat(directory)  # lets autofs mount first what is mounted on demand
        place = os.path.realpath(directory)
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two mounts at one point the later one is on top
            best, kind = len(point), right.split()[0]
    return kind


def live_database(shared: Path) -> Path:
    """Where this node keeps the live file of the store `shared` that lies on a network file system; not created.

    `RSUP_LOCAL_DIR`, else `/var/tmp/rsup-UID`, which unlike the runtime directory outlives a reboot.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(shared))).hexdigest()[:16]
    return local_dir() / digest / shared.name


def local_dir() -> Path:
    """Our directory on node-local disk; not created."""
    return Path(os.path.abspath(os.environ.get("RSUP_LOCAL_DIR") or f"/var/tmp/rsup-{os.getuid()}"))


def make_live_dir(live: Path) -> None:
    """Create the directory of a live file, 0700 and ours. Raise `StoreError` if somebody else made it."""
    for path in (live.parent.parent, live.parent):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = os.lstat(path)
        except OSError as error:
            raise StoreError(f"cannot make {path} for the live store: {error.strerror}; set RSUP_LOCAL_DIR") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StoreError(f"{path} is not a directory of our own with mode 0700; remove it, or set RSUP_LOCAL_DIR")
