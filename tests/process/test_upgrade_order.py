"""Supervisor and agents are upgraded in any order under a running job, and back.

The other release is what `RSUP_PREVIOUS_WHEEL` names. Without it, it is this tree with another release number and the wire
versions of a release before: that shows that releases negotiate, that no process mixes two of them, and that a job outlives the
change of its supervisor both ways. It cannot show that code of an earlier day still understands today's; a real wheel does.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rsup.supervisor import places
from rsup.supervisor.wire import OLDEST_WIRE_VERSION, RELEASE, WIRE_VERSION
from tests.jobs.conftest import free_port, wait_until
from tests.process.supervised_agent import running

ROOT = Path(__file__).parents[2]
PREVIOUS_WHEEL = os.environ.get("RSUP_PREVIOUS_WHEEL", "")

COUNTS = """
import os, pathlib, sys, time
import rsup.worker
out = pathlib.Path(sys.argv[1])
(out / f"pid-{os.environ['RANK']}-{os.environ['RSUP_ATTEMPT']}").write_text(str(os.getpid()))
iteration = 0
tell = getattr(rsup.worker, "report_metrics", lambda *_: None)  # an older release has none
while not (out / "finish").exists():
    iteration += 1
    rsup.worker.set_iteration(iteration)
    if os.environ["RANK"] == "0":
        tell(iteration, {"x": float(iteration)})
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a virtual environment with the other release, which takes what else it needs from this one."""
    folder = tmp_path_factory.mktemp("previous")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}, scheme="venv"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if PREVIOUS_WHEEL:
        with zipfile.ZipFile(PREVIOUS_WHEEL) as wheel:
            wheel.extractall(site)
        return str(folder / "bin" / "python")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    for source, target in wanted.items():
        shutil.copytree(ROOT / source, site / target, ignore=shutil.ignore_patterns("__pycache__"))
    wire = site / "rsup" / "supervisor" / "wire.py"
    text = wire.read_text().replace(f'RELEASE = "{RELEASE}"', 'RELEASE = "0.0.9"')
    wire.write_text(text.replace(f"\nWIRE_VERSION = {WIRE_VERSION}\n", f"\nWIRE_VERSION = {WIRE_VERSION - 1}\n"))
    described = site / "rsup-0.0.9.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: rsup\nVersion: 0.0.9\n")
    return str(folder / "bin" / "python")


@dataclass
class Site:
    """A host with a shared supervisor's state directory and port; what runs there ends with the test."""

    folder: Path
    port: int
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, python: str, *words: str, **environ: str) -> "subprocess.Popen[str]":
        given = os.environ | {"RSUP_IDLE_EXIT": "0"} | environ
        with (self.folder / f"err-{len(self.processes)}").open("w") as errors:
            process = subprocess.Popen(
                [python, "-P", "-m", "rsup.launcher", *words], env=given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=errors, text=True, start_new_session=True, cwd=self.folder,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def serve(self, python: str) -> "subprocess.Popen[str]":
        """A supervisor of that interpreter's release, once it holds the store."""
        process = self.start(python, "serve", "--rpc-listen", f"127.0.0.1:{self.port}", "--listen", "127.0.0.1:0")
        wait_until(lambda: self._holder() == process.pid or process.poll() is not None, "the supervisor")
        assert process.poll() is None, self.errors(process)
        return process

    def refuses_newer_store(self, python: str) -> None:
        """The older release does not touch a store that was upgraded: one line, and it ends."""
        process = self.start(python, "serve", "--listen", "127.0.0.1:0")
        assert process.wait(60) == 1 and "newer than this release's" in self.errors(process)

    def launch(self, python: str, node: int, *words: str) -> "subprocess.Popen[str]":
        """An agent of that interpreter's release, in directories of its own, as on another host."""
        home = self.folder / f"node-{node}"
        (home / "run").mkdir(parents=True)
        own = {"RSUP_STATE_DIR": str(home / "state"), "XDG_RUNTIME_DIR": str(home / "run"), "HOME": str(home)}
        shared = {
            "RSUP_SUPERVISOR": f"tcp://127.0.0.1:{self.port}",
            "RSUP_KEY_FILE": str(places.state_dir() / "key"),
            "OMP_NUM_THREADS": "1",
        }
        job = ("--job-id", "up", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--max-restarts", "1")
        return self.start(python, "launch", *job, *words, **own, **shared)

    def ask(self, *words: str) -> str:
        """What a command of this release answers."""
        command = [sys.executable, "-P", "-m", "rsup.launcher", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=90).stdout

    def errors(self, process: "subprocess.Popen[str]") -> str:
        return (self.folder / f"err-{self.processes.index(process)}").read_text()

    def iterations(self) -> dict[int, int]:
        """Of each rank, as the supervisor has heard it; empty where that does not answer yet."""
        state = places.state_dir()
        found, token = places.read_supervisor_file(state), (state / "token").read_text().strip()
        assert found is not None
        request = urllib.request.Request(f"{found.rest}/api/v1/jobs/up/ranks", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                ranks = json.load(answer)["items"]
        except OSError:
            return {}
        return {rank["rank"]: rank["iteration"] or 0 for rank in ranks}

    def rank_pids(self, attempt: int) -> list[int]:
        paths = [self.folder / f"pid-{rank}-{attempt}" for rank in (0, 1)]
        return [int(path.read_text()) for path in paths if path.exists() and path.read_text()]

    def heard_of_both(self) -> None:
        """Wait until the supervisor has heard both ranks get further."""
        before = wait_until(self.iterations, "the job's state")
        wait_until(lambda: all(self.iterations().get(rank, 0) > before.get(rank, 0) + 2 for rank in (0, 1)), "both ranks")

    def _holder(self) -> int:
        found = places.read_supervisor_file(places.state_dir())
        return found.pid if found and found.rpc_tcp else 0


@pytest.fixture
def site(own_directories: Path) -> Iterator[Site]:
    made = Site(own_directories, free_port())
    (own_directories / "script.py").write_text(COUNTS)
    yield made
    (own_directories / "finish").touch()
    for process in reversed(made.processes):
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def head(python: str) -> str:
    """The schema of that interpreter's release."""
    ask = "from rsup.supervisor import tables; print(tables.HEAD)"
    return subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, check=True, timeout=90).stdout.strip()


@pytest.mark.timeout(300)
def test_a_job_of_two_releases_outlives_its_supervisors_of_two_releases(previous: str, site: Site) -> None:
    """An old and a new agent; the supervisor: old, new, old, new; then a restart of the ranks, and the end. Where the other
    release has an older schema, there is an upgrade of the store in between, and no way back but its backup."""
    assert OLDEST_WIRE_VERSION < WIRE_VERSION
    has_same_schema = head(previous) == head(sys.executable)
    serving = site.serve(previous)
    words = (str(site.folder / "script.py"), str(site.folder))
    agents = [site.launch(sys.executable, 0, *words), site.launch(previous, 1, *words)]
    wait_until(lambda: len(site.rank_pids(1)) == 2, "both ranks")
    pids = site.rank_pids(1)
    back = previous if has_same_schema else sys.executable
    for python, how in ((sys.executable, signal.SIGTERM), (back, signal.SIGKILL), (sys.executable, signal.SIGTERM)):
        site.heard_of_both()
        serving.send_signal(how)
        serving.wait(60)
        assert all(running(pid) for pid in pids)
        if not has_same_schema:
            site.ask("db", "upgrade")
            site.refuses_newer_store(previous)
        serving = site.serve(python)
    site.heard_of_both()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: len(site.rank_pids(2)) == 2, "the second attempt")
    site.heard_of_both()
    (site.folder / "finish").touch()
    for agent in agents:
        assert agent.wait(90) == 0, site.errors(agent)
    events = json.loads(site.ask("events", "up", "--json"))
    numbers = [event["number"] for event in events]
    assert numbers == list(range(1, len(numbers) + 1))
    said = " ".join(site.errors(agent) for agent in agents)
    assert not [event["text"] for event in events if "unknown here" in event["text"]], "no side tells what the other has not"
    assert json.loads(site.ask("status", "up", "--json"))["metrics"]["training"]["x"]["value"] > 0
    assert PREVIOUS_WHEEL or re.search(r"has rsup 0\.0\.9", said), said
