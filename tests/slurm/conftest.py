"""The test cluster: one for each pytest process, started at the first test that wants it, restored after each."""

import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PROGRAMS, Cluster
from tests.slurm.user_python import find_user_python

USERS = {"rsup-test-1": 20001, "rsup-test-2": 20002, "rsup-test-3": 20003, "rsup": 20000}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A job is requeued no sooner than after 5 s, some several times, and all nodes are one machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """Four idle nodes with four GPUs each, and users 20001 to 20003 and ``rsup``."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]:
        pytest.skip(f"no SLURM here: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root: its daemons start jobs of several users")
    _make_users()
    cluster = _started()
    if (found := find_user_python(cluster.folder)) is None:
        cluster.stop()
        pytest.skip(f"ordinary users can run no Python {sys.version_info.major}.{sys.version_info.minor} with rsup here")
    cluster.python, cluster.python_environ = found.path, dict(found.environ)
    yield cluster
    cluster.stop()
    shutil.rmtree(cluster.folder, ignore_errors=True)


@pytest.fixture
def slurm(slurm_cluster: Cluster, own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster with idle nodes; SLURM_CONF is set for the test itself. Afterwards nothing of the test is left in it."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.restore()


def _started() -> Cluster:
    for attempt in range(3):
        folder = Path(tempfile.mkdtemp(prefix="rsl-", dir="/tmp"))
        cluster = Cluster(folder, _free_ports())
        try:
            cluster.start()
            return cluster
        except (RuntimeError, TimeoutError):  # somebody else has taken one of the ports in between
            cluster.stop()
            if attempt == 2:
                raise
            shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError


def _make_users() -> None:
    for name, uid in USERS.items():
        try:
            if pwd.getpwnam(name).pw_uid != uid:
                pytest.skip(f"user {name} exists here with another uid than {uid}")
        except KeyError:
            made = subprocess.run(
                ["useradd", "--no-create-home", "--shell", "/bin/sh", "--uid", str(uid), "--user-group", name],
                capture_output=True,
                text=True,
            )
            if made.returncode and not _exists(name):  # another pytest process may have been faster
                pytest.skip(f"user {name} cannot be made: {made.stderr.strip()}")


def _exists(name: str) -> bool:
    try:
        return bool(pwd.getpwnam(name))
    except KeyError:
        return False


def _free_ports(num_ports: int = 5) -> int:
    """The first of some neighbouring ports that nobody listens at now, below the range that the kernel gives out."""
    while True:
        first = random.randrange(10000, 30000, num_ports)
        try:
            for port in range(first, first + num_ports):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
