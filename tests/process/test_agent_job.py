"""Whole jobs: `rsup launch` with the embedded supervisor that it starts itself, real ranks, real faults."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.jobs.conftest import free_port

WAITS = """
import os, time
out = os.environ["OUT"] + "/"
attempt = os.environ["RSUP_ATTEMPT"]
with open(f"{out}started-{attempt}-{os.environ['RANK']}.tmp", "w") as file:
    file.write(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['GROUP_RANK']}")
os.rename(file.name, file.name.removesuffix(".tmp"))
while not os.path.exists(out + "end"):
    time.sleep(0.05)
"""


class Job:
    """Launches of one test. `at` names a node: each has a state and a runtime directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, at: str) -> dict[str, str]:
        run = self.folder / f"run-{at}"
        run.mkdir(mode=0o700, exist_ok=True)
        places = {"RSUP_STATE_DIR": str(self.folder / f"state-{at}"), "XDG_RUNTIME_DIR": str(run)}
        return os.environ | places | {"OUT": str(self.folder), "HOME": str(self.folder / f"home-{at}")}

    def launch(
        self, script: str, *options: str, at: str = "a", launcher: Sequence[str] = ("-m", "rsup.launcher")
    ) -> subprocess.Popen[bytes]:
        path = self.folder / "script.py"
        path.write_text(script)
        with open(self.err_path(at), "wb") as err:
            process = subprocess.Popen(
                [sys.executable, *launcher, "launch", *options, str(path)],
                env=self.environment(at),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        self.processes[at] = process
        return process

    def err_path(self, at: str = "a") -> Path:
        return self.folder / f"err-{at}"

    def err(self, at: str = "a") -> str:
        return self.err_path(at).read_text()

    def result(self, job_id: str, at: str = "a", run: int = 1) -> dict[str, object]:
        path = self.folder / f"state-{at}/jobs/{job_id}.{run}/result.json"
        content: dict[str, object] = json.loads(path.read_text())
        return content

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            said = "".join(f"{at}: {self.err(at)}" for at in self.processes)
            assert time.monotonic() < deadline, f"not within {within_s} s\n{said}"
            time.sleep(0.02)

    def started(self, attempt: int, world_size: int = 2) -> list[int]:
        """Pids of the attempt's ranks by rank, once all have started."""
        paths = [self.folder / f"started-{attempt}-{rank}" for rank in range(world_size)]
        self.until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text().split()[0]) for path in paths]

    def supervisor_pid(self, at: str = "a") -> int:
        return int(json.loads((self.folder / f"state-{at}/supervisor.json").read_text())["pid"])

    def end(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def job(own_directories: Path):  # type: ignore[no-untyped-def]
    job = Job(own_directories)
    yield job
    for process in job.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("raise SystemExit(17)", 1),
        ("import rsup.worker as w; w.declare_exit(17, 'validation failed'); w.shutdown(); raise SystemExit(17)", 17),
    ],
)
def test_the_exit_code_is_the_first_failing_ranks(job: Job, ending: str, code: int) -> None:
    script = f"import os, signal, time\nif os.environ['RANK'] == '1':\n    {ending}\nif {code}: time.sleep(600)"
    assert job.launch(script, "--nproc-per-node", "2", "--job-id", "t1").wait(60) == code
    result = job.result("t1")
    assert result["exit_code"] == code
    if code:
        assert result["rank"] == 1 and "rank 1" in job.err()


def test_a_pipe_or_file_at_standard_input_reaches_the_only_rank(job: Job) -> None:
    script = "import os, sys\nopen(os.environ['OUT'] + '/got-' + os.environ['RANK'], 'w').write(sys.stdin.read())"
    path = job.folder / "script.py"
    path.write_text(script)
    for ranks, got in (("1", "some text"), ("2", "")):
        subprocess.run(
            [sys.executable, "-m", "rsup.launcher", "launch", "--nproc-per-node", ranks, str(path)],
            env=job.environment("a"),
            input=b"some text",
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert (job.folder / "got-0").read_text() == got


def test_the_first_failing_ranks_error_file_is_left_where_the_launcher_was_told_to(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job.folder / "of-launcher" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert job.launch("pass").wait(60) == 0
    assert not path.exists()
    assert job.launch("raise SystemExit(3)").wait(60) == 3
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("rank 0: exit code 3", 3)
    recorded = {"message": "ValueError: no", "extraInfo": {"py_callstack": "...", "timestamp": "7"}}
    text = json.dumps({"message": recorded})
    script = f"import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({text!r})\nraise SystemExit(4)"
    assert job.launch(script).wait(60) == 4
    assert json.loads(path.read_text()) == {"message": recorded | {"errorCode": 4}}, "as torchrun's agent adds it"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(job.folder))
    assert job.launch("raise SystemExit(3)").wait(60) == 3
    assert f"rsup: cannot write TORCHELASTIC_ERROR_FILE {job.folder}: Is a directory" in job.err()


def test_a_killed_rank_costs_one_restart(job: Job) -> None:
    process = job.launch(WAITS, "--nproc-per-node", "2", "--max-restarts", "3", "--job-id", "t1")
    os.kill(job.started(1)[1], signal.SIGKILL)
    job.started(2)
    job.end()
    assert process.wait(60) == 0
    assert job.result("t1")["attempts"] == 2
    (line,) = [line for line in job.err().splitlines() if "attempt 2 starts" in line]
    assert "rank 1" in line and "SIGKILL" in line and "(restart 1 of 3)" in line


def test_sigterm_to_the_launcher_ends_the_job(job: Job) -> None:
    process = job.launch(WAITS, "--nproc-per-node", "2", "--max-restarts", "3")
    job.started(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def test_the_supervisors_death_costs_nothing(job: Job) -> None:
    process = job.launch(WAITS, "--nproc-per-node", "2", "--job-id", "t1")
    pids = job.started(1)
    first = job.supervisor_pid()
    os.kill(first, signal.SIGKILL)
    job.until(lambda: job.supervisor_pid() != first)
    assert [alive(pid) for pid in pids] == [True, True]
    job.end()
    assert process.wait(60) == 0
    assert job.result("t1")["attempts"] == 1


def test_the_supervisors_death_in_the_middle_of_a_restart(job: Job) -> None:
    process = job.launch(WAITS, "--nproc-per-node", "2", "--max-restarts", "3", "--job-id", "t1")
    pids = job.started(1)
    os.kill(job.supervisor_pid(), signal.SIGKILL)
    os.kill(pids[0], signal.SIGKILL)
    job.started(2)
    job.end()
    assert process.wait(60) == 0
    assert job.result("t1")["attempts"] == 2


def test_a_stopped_supervisor_is_replaced_and_a_dead_rank_too(job: Job) -> None:
    impatient = "from rsup.launcher import cli, supervisor_process as process; process.SILENT_S = 6.0; "
    launcher = ["-c", impatient + "import sys; sys.exit(cli.main())"]
    process = job.launch(WAITS, "--nproc-per-node", "2", "--max-restarts", "1", "--job-id", "t1", launcher=launcher)
    pids = job.started(1)
    first = job.supervisor_pid()
    os.kill(first, signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    job.started(2)
    assert not alive(first) and job.supervisor_pid() != first
    job.end()
    assert process.wait(60) == 0
    assert job.result("t1")["attempts"] == 2
    assert re.search(r"a rank has failed, and nothing has been heard of the supervisor for \d+ s; ", job.err())
    assert f"the supervisor (pid {first}) has said nothing for 6 s: it was killed" in job.err()


def test_a_stopped_rank_with_a_step_limit_is_replaced(job: Job) -> None:
    script = "import rsup.worker\nrsup.worker.section('step').enter()\n" + WAITS.replace(
        "time.sleep(0.05)", "rsup.worker.section('step').exit(); rsup.worker.section('step').enter(); time.sleep(0.05)"
    )
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--ft-rank-section-timeouts", "step:6", "--job-id", "t1")
    process = job.launch(script, *options)
    os.kill(job.started(1)[1], signal.SIGSTOP)
    job.started(2)
    job.end()
    assert process.wait(60) == 0
    assert "step" in job.err()


def test_a_live_job_id_is_refused(job: Job) -> None:
    process = job.launch(WAITS, "--nproc-per-node", "2", "--job-id", "t1")
    job.started(1)
    done = subprocess.run(
        [sys.executable, "-m", "rsup.launcher", "launch", "--job-id", "t1", str(job.folder / "script.py")],
        env=job.environment("a"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "t1 is already running" in done.stderr and done.stderr.count("\n") == 1
    job.end()
    assert process.wait(60) == 0


def test_two_nodes_with_directories_of_their_own(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, "--max-restarts", "2", "--job-id", "t1")
    second = job.launch(WAITS, *options, "--node-rank", "1", at="b")
    first = job.launch(WAITS, *options, "--node-rank", "0", at="a")
    pids = job.started(1, world_size=4)
    ranks_of_second = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    assert {str(pids[2]), str(pids[3])} <= set(ranks_of_second)
    os.kill(pids[3], signal.SIGKILL)
    job.started(2, world_size=4)
    job.end()
    assert (first.wait(60), second.wait(60)) == (0, 0)


def test_a_failure_on_one_node_ends_all_with_its_code(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    script = "import os, time\nif os.environ['RANK'] == '1': time.sleep(1); raise SystemExit(11)\ntime.sleep(600)"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint)
    first = job.launch(script, *options, "--node-rank", "0", at="a")
    second = job.launch(script, *options, "--node-rank", "1", at="b")
    assert (first.wait(60), second.wait(60)) == (11, 11)


def test_the_death_of_an_agent_is_survived_by_the_other(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--max-restarts", "3", "--last-call", "10", "--job-id", "t1")
    first = job.launch(WAITS, *options, "--node-rank", "0", at="a")
    second = job.launch(WAITS, *options, "--node-rank", "1", at="b")
    pids = job.started(1)
    second.kill()
    job.until(lambda: (job.folder / "started-2-0").exists())
    assert not alive(pids[1])
    assert (job.folder / "started-2-0").read_text().split()[1:] == ["1", "0"]
    job.end()
    assert first.wait(60) == 0
    assert job.result("t1")["attempts"] == 2


def stored(job: Job, job_id: str, at: str = "a") -> dict[str, object]:
    """What `rsup status` says of the job; nothing if it cannot say anything just now."""
    done = subprocess.run(
        [sys.executable, "-m", "rsup.launcher", "status", job_id, "--json"],
        env=job.environment(at),
        capture_output=True,
        text=True,
        timeout=60,
    )
    found: dict[str, object] = json.loads(done.stdout)["job"] if done.stdout.startswith("{") else {}
    return found


def stored_code(job: Job, job_id: str, at: str = "a") -> object:
    """The exit code of the job, once the store has its end."""
    seen: list[dict[str, object]] = [{}]

    def has_ended() -> bool:
        seen[0] = stored(job, job_id, at)
        return seen[0].get("state") == "ended"

    job.until(has_ended)
    return seen[0]["exit_code"]


@pytest.mark.parametrize(("ending", "launcher_code", "code"), [(0, 0, 0), (3, 88, 3), ("TERM", 143, 143)])
def test_an_end_while_the_supervisor_is_stopped_is_told_by_the_keeper(
    job: Job, ending: int | str, launcher_code: int, code: int
) -> None:
    options = ("--nproc-per-node", "2", "--job-id", "t1", "--supervisor-grace", "6")
    process = job.launch(WAITS + f"raise SystemExit({ending if isinstance(ending, int) else 0})", *options)
    job.started(1)
    supervisor = job.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    try:
        if ending == "TERM":
            process.send_signal(signal.SIGTERM)
        else:
            job.end()
        assert process.wait(60) == launcher_code
        assert "goes on telling it" in job.err()
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert stored_code(job, "t1") == code
    job.until(lambda: not list((job.folder / "run-a/rsup").glob("a-*")))


def test_an_end_while_the_shared_supervisor_is_absent_is_told_to_the_next(job: Job) -> None:
    address = f"ipc://{job.folder}/shared"
    command = [sys.executable, "-P", "-m", "rsup.supervisor.main", "--state-dir", str(job.folder / "state-s"), "--rpc", address]
    job.processes["s"] = subprocess.Popen(command, env=job.environment("s"))
    job.err_path("s").touch()
    job.until((job.folder / "state-s/supervisor.json").exists)  # a launch waits 10 s for it, not longer
    options = ("--supervisor", address, "--nproc-per-node", "2", "--job-id", "t1", "--supervisor-grace", "6")
    process = job.launch(WAITS, *options)
    job.started(1)
    job.processes["s"].kill()
    job.processes["s"].wait()
    job.end()
    assert process.wait(60) == 0
    job.processes["s"] = subprocess.Popen(command, env=job.environment("s"))
    assert stored_code(job, "t1", at="s") == 0


TRAINS = """
import os, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
out, first = os.environ["OUT"] + "/", os.environ["RSUP_ATTEMPT"] == "1"
def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
steps(5)
open(out + "stepped-" + os.environ["RANK"], "w")
while True:
    steps(1)
    stop = torch.tensor(float(os.path.exists(out + "end")))
    dist.all_reduce(stop)
    if stop.item():
        break
steps(5)
if first and NEEDS_STORE:
    dist.new_group([0, 1], timeout=__import__("datetime").timedelta(seconds=10))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch 2.13, having lost its store, sometimes aborts in its own clean-up at the interpreter's end
"""


def keepers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The launcher's children that are keepers."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has just ended
            if b"keeper_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


@pytest.mark.timeout(420)
@pytest.mark.parametrize("needs_store", [False, True], ids=["training", "a new group"])
def test_training_outlives_its_keeper(job: Job, needs_store: bool) -> None:
    options = ("--nproc-per-node", "2", "--job-id", "t1", "--max-restarts", "1")
    process = job.launch(TRAINS.replace("NEEDS_STORE", str(needs_store)), *options)
    job.until(lambda: len(list(job.folder.glob("stepped-*"))) == 2, within_s=120.0)
    (keeper,) = keepers_of(process)
    os.kill(keeper, signal.SIGKILL)
    job.until(lambda: "the TCPStore of attempt 1 is lost with it" in job.err())
    job.end()
    assert process.wait(240) == 0, job.err()
    assert job.result("t1")["attempts"] == (2 if needs_store else 1), job.err()
