"""`rsup doctor`: whether this machine has what rsup needs; a line for each thing, and what to do where it is not well.

`ok`: fine. `warn`: rsup works, but less of it. `fail`: rsup cannot work here; the exit code then is 1.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.wire import RELEASE, RsupError, UsageError

OK, WARN, FAIL = "ok", "warn", "fail"

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "wekafs", "panfs", "pvfs2"),
    *("glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.juicefs", "virtiofs"),
)
OLDEST_TORCH = (2, 11)
BOARD_BYTES = 8 * 2**20
TRACE_TIMEOUT_S = 20

_SLEEPER = "import time; print(flush=True); time.sleep(60)"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, what was found, and what to do (empty if nothing)."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def main(argv: list[str]) -> int:
    """Print a line for each check; `--json` prints them as a list."""
    if argv in (["-h"], ["--help"]):
        print(
            "usage: rsup doctor [--json]\n\nSee whether this machine has what rsup needs; exit code 1 if it cannot work here."
        )
        return 0
    if argv not in ([], ["--json"]):
        raise UsageError(f"unknown argument {argv[0]}; write rsup doctor or rsup doctor --json")
    findings = [check() for check in CHECKS]
    if argv:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{finding.state:4}  {finding.subject}: {finding.found}{remedy}")
    return 1 if any(finding.state == FAIL for finding in findings) else 0


def check_python() -> Finding:
    return Finding("python", OK, f"Python {platform.python_version()} at {sys.executable}, rsup {RELEASE}")


def check_kernel() -> Finding:
    """pidfds tell of a death at once; they need Linux 5.3, and a container whose filter knows them."""
    found = f"{platform.system()} {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return Finding("kernel", FAIL, f"{found} without pidfd_open", "needs Linux 5.3 and a seccomp filter that allows it")
    return Finding("kernel", OK, found)


def check_libc() -> Finding:
    name, version = platform.libc_ver()
    if name != "glibc":
        return Finding("libc", WARN, f"{name or 'unknown'} {version}".strip(), "torch's wheels need glibc")
    return Finding("libc", OK, f"{name} {version}")


def check_torch() -> Finding:
    """Looks the release up without importing torch, which takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", WARN, "not installed", "pip install 'rsup[train]', unless ranks use another interpreter")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_TORCH:
        return Finding("torch", WARN, version, f"rsup.worker is tried with {'.'.join(map(str, OLDEST_TORCH))} and newer")
    return Finding("torch", OK, version)


def check_gpus() -> Finding:
    from rsup.launcher.device_count import count_gpus

    count = count_gpus()
    return Finding("gpus", OK, f"{count} visible" if count else "none visible; ranks run on the CPU")


def check_stacks() -> Finding:
    """Takes the stack of a child, as the launcher does of a rank that hangs."""
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    fallback = "stacks of hung ranks then come from faulthandler alone"
    if py_spy is None:
        return Finding("stacks", WARN, f"py-spy not found; {fallback}", "pip install py-spy")
    with subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            command = [py_spy, "dump", "--nonblocking", "--pid", str(child.pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRACE_TIMEOUT_S)
            complaint = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            complaint = str(error)
        finally:
            child.kill()
    if not complaint:
        return Finding("stacks", OK, f"{py_spy} can read a child's stack (ptrace_scope {_ptrace_scope()})")
    remedy = "sysctl kernel.yama.ptrace_scope=1, or give the container CAP_SYS_PTRACE"
    return Finding("stacks", WARN, f"py-spy was refused (ptrace_scope {_ptrace_scope()}): {complaint}; {fallback}", remedy)


def _ptrace_scope() -> str:
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "none"


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    remedy = "mount a tmpfs there (docker run --shm-size 1g); heartbeats use the runtime directory meanwhile, and NCCL may fail"
    try:
        status = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("shared memory", WARN, f"{folder}: {error.strerror}", remedy)
    free_bytes = status.f_bavail * status.f_frsize
    found = f"{folder}, {free_bytes // 2**20} MiB free"
    return Finding("shared memory", OK, found) if free_bytes >= BOARD_BYTES else Finding("shared memory", WARN, found, remedy)


def check_runtime_dir() -> Finding:
    try:
        path = places.runtime_dir()
        places.embedded_address(places.state_dir())
    except RsupError as error:
        return Finding("runtime directory", FAIL, str(error))
    kind = file_system_type(path)
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("runtime directory", FAIL, f"{path} on {kind}", "sockets need a local disk; set XDG_RUNTIME_DIR")
    return Finding("runtime directory", OK, f"{path} on {kind}")


def check_state_dir() -> Finding:
    path = places.state_dir()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    kind = file_system_type(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError:
        return Finding("state directory", FAIL, f"{path} cannot be written", "set RSUP_STATE_DIR, or use --state-dir")
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("state directory", WARN, f"{path} on {kind}", "the live store is kept on local disk, with a copy there")
    return Finding("state directory", OK, f"{path} on {kind}")


def file_system_type(path: Path, mountinfo: str | None = None) -> str:
    """Type of the file system that holds `path`, from `/proc/self/mountinfo` (or its text); `unknown` if it does not say."""
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text()
    resolved = Path(os.path.realpath(path))
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split()
        if not dash or len(fields) < 5:
            continue
        mount = Path(fields[4].replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_kernel,
    check_libc,
    check_torch,
    check_gpus,
    check_stacks,
    check_shared_memory,
    check_runtime_dir,
    check_state_dir,
)
