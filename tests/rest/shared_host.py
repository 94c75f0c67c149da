"""A shared supervisor as user `rsup`, a `munged`, and three ordinary users, as on a cluster's head node."""

import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import pytest

from tests.rest.as_user import UserProcess
from tests.slurm.user_python import find_user_python

USERS = {"rsup": 20000, "rsup-test-1": 20001, "rsup-test-2": 20002, "rsup-test-3": 20003}
OWNER, OTHER, OPERATOR = "rsup-test-1", "rsup-test-2", "rsup-test-3"


def make_users() -> None:
    """The users, made where they are missing; skip where that cannot be."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    for name, uid in USERS.items():
        if not _exists(name, uid):
            words = ["useradd", "--no-create-home", "--shell", "/bin/sh", "--uid", str(uid), "--user-group", name]
            made = subprocess.run(words, capture_output=True, text=True)
            if not _exists(name, uid):
                pytest.skip(f"user {name} cannot be made: {made.stderr.strip()}")


def _exists(name: str, uid: int) -> bool:
    try:
        return pwd.getpwnam(name).pw_uid == uid
    except KeyError:
        return False


def until(condition: Callable[[], object], what: str, within_s: float = 100.0) -> None:
    """Wait for it."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


@dataclass
class SharedHost:
    """`folder` holds everything. `environment`: of the users, who find the supervisor by it."""

    folder: Path
    python: str
    environment: dict[str, str]
    supervisor: subprocess.Popen[bytes]
    munged: subprocess.Popen[bytes] | None

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def rpc(self) -> str:
        return f"ipc://{self.folder}/sockets/rpc.sock"

    @property
    def rest_socket(self) -> str:
        return str(self.folder / "sockets" / "rest.sock")

    def told(self) -> dict[str, str]:
        """`supervisor.json`."""
        told: dict[str, str] = json.loads((self.state / "supervisor.json").read_text())
        return told

    def user(self, name: str, **environment: str) -> UserProcess:
        """A process of that user."""
        return UserProcess(self.python, USERS[name], {**self.environment, **_home(self.folder / name), **environment})

    def launch(self, name: str, job: str, script: Path, **environment: str) -> "subprocess.Popen[str]":
        """`rsup launch` of that user."""
        words = [self.python, "-m", "rsup.launcher", "launch", "--job-id", job, "--require-supervisor", str(script)]
        wanted = {**os.environ, **self.environment, **_home(self.folder / name), **environment}
        return subprocess.Popen(
            words,
            user=USERS[name],
            group=USERS[name],
            extra_groups=[],
            cwd="/",
            env={key: value for key, value in wanted.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def public_key(self) -> str:
        """Path of the supervisor's public key, where everybody can read it."""
        path = self.folder / "key.pub"
        if not path.exists():
            path.write_text((self.state / "key.pub").read_text())
            path.chmod(0o644)
        return str(path)

    def give(self, name: str, file: str, text: str) -> None:
        """Leave a private file in a user's home."""
        _give(self.folder / name / file, USERS[name], text)

    def stop(self) -> None:
        """End supervisor and munged."""
        for process in (self.supervisor, self.munged):
            if process is not None:
                process.terminate()
                process.wait(60)


def _give(path: Path, uid: int, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    os.chown(path, uid, uid)


def _home(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}


def start_supervisor(folder: Path, python: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The supervisor, serving."""
    words = [python, "-m", "rsup.supervisor.main", "--listen", "127.0.0.1:0", "--rpc-listen", "127.0.0.1:0"]
    rsup = USERS["rsup"]
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            words, user=rsup, group=rsup, extra_groups=[], cwd="/", stderr=log, env=os.environ | environment
        )
    told = folder / "state" / "supervisor.json"
    try:
        until(lambda: _has_pid(told, process.pid) or process.poll() is not None, "the supervisor serves")
        assert process.poll() is None, (folder / "log").read_text()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _has_pid(path: Path, pid: int) -> bool:
    try:
        return bool(json.loads(path.read_text())["pid"] == pid)
    except (OSError, ValueError, KeyError):
        return False


def host_name() -> str:
    """This host's, as credentials have it."""
    return socket.gethostname().lower()


def start(folder: Path, tokens: str) -> SharedHost:
    """All of it, in `folder`, which others may enter."""
    make_users()
    folder.chmod(0o755)
    python = find_user_python(folder)
    if python is None:
        pytest.skip("ordinary users can run no Python with rsup here")
    for name in ("sockets", "state", "run", *USERS):
        (folder / name).mkdir(mode=0o755 if name == "sockets" else 0o700)
        os.chown(folder / name, USERS.get(name, USERS["rsup"]), USERS.get(name, USERS["rsup"]))
    munged = _start_munged(folder)
    common = {**python.environ, "RSUP_SOCKET_DIR": str(folder / "sockets"), "RSUP_MUNGE_SOCKET": str(folder / "munge.socket")}
    daemon = {**common, "RSUP_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
    daemon |= {"HOME": str(folder / "rsup"), "LOGNAME": "rsup", "USER": "rsup"}
    _give(folder / "state" / "tokens.toml", USERS["rsup"], tokens)
    daemon["RSUP_OPERATORS"] = OPERATOR
    users = {**common, "RSUP_STATE_DIR": "", "LOGNAME": "", "USER": ""}
    try:
        supervisor = start_supervisor(folder, python.path, daemon)
    except BaseException:
        if munged is not None:
            munged.kill()
            munged.wait()
        raise
    return SharedHost(folder, python.path, users, supervisor, munged)


def _start_munged(folder: Path) -> subprocess.Popen[bytes] | None:
    """A munged with a key of its own; None where it is not installed."""
    if which("munged") is None:
        return None
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    places = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    words = ["munged", "--force", "--foreground", f"--key-file={folder / 'munge.key'}"]
    words += [f"--{name if name == 'socket' else name + '-file'}={path}" for name, path in places.items()]
    munged = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: _takes_connections(places["socket"]) or munged.poll() is not None, "munged listens")
    assert munged.poll() is None
    return munged


def _takes_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(path)) == 0
