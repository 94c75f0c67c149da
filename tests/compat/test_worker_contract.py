"""What a rank finds (variables, arguments, files), side by side with the installed torchrun; and torch's plug-ins: log specs,
event handlers, file timers."""

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rsup.launcher
from rsup.launcher.error_file import write_error_file
from rsup.launcher.file_timers import Expired, FileTimers, kill_in_sessions
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.launch_parser import parse_launch
from rsup.launcher.log_options import LogOptions
from rsup.launcher.logs_specs import LogsSpecs, LogsSpecsError
from rsup.launcher.option_table import BadValue
from rsup.supervisor.events import Now
from rsup.supervisor.job_routing import Routing
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.states import JobState
from rsup.supervisor.wire import AgentInfo, Hello, JobResult, JobSpec
from tests.jobs.conftest import free_port, keepers_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch imports pynvml, whose old package only forwards to nvidia-ml-py
    import torch.distributed as dist
    from torch.distributed.elastic.events import handlers
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient

SHOW = """\
import json, os, sys
name = os.path.join(sys.argv[1], os.environ["RANK"])
json.dump({"argv": sys.argv, "env": dict(os.environ), "name": __name__}, open(name, "w"))
print("kept apple"); print("other", file=sys.stderr); print("pear")
"""
DIFFER = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR"}
"""Variables whose values are each launcher's own."""


def launch(*words: str) -> tuple[str, str]:
    """Run a launch to its success; what came on its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rsup.launcher.main(words)
    return out.getvalue(), err.getvalue()


def shown(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def keepers_are_gone(own_directories: Path) -> Iterator[None]:
    yield
    keepers_end(own_directories)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with `show.py`, and `ours` and `theirs` for what ranks leave."""
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def log_files(log_dir: Path) -> dict[str, str]:
    """Names and contents below the one run in that directory."""
    (run,) = log_dir.iterdir()
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()}


def test_variables_and_log_files_are_torchruns(place: Path) -> None:
    words = ["--nproc-per-node=2", "--rdzv-id=r/1", "--role=trainer", "-r", "1:3", "-t", "0:3", "--max-restarts=2"]
    words += ["--duplicate-stdout-filters=apple"]
    theirs = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    theirs += [word.replace("r/1", "r1") for word in words]  # torchrun cannot make a directory of a name with a slash
    subprocess.run([*theirs, "--log-dir=logs-theirs", "show.py", "theirs"], check=True, capture_output=True, timeout=100)
    launch(*words, "--log-dir=logs-ours", "show.py", "ours")

    ours, expected = shown(place / "ours"), shown(place / "theirs")
    assert set(ours) == set(expected) == {"0", "1"}
    for rank, found in ours.items():
        env, torchruns = found["env"], expected[rank]["env"]
        added = {name for name in torchruns if name not in os.environ}
        assert {name for name in added if name not in env} == set()
        assert {n: env[n] for n in added - DIFFER} == {n: torchruns[n] for n in added - DIFFER}
        assert env["TORCHELASTIC_RUN_ID"] == "r/1"
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
        assert "logs-ours/r_1_" in env["TORCHELASTIC_ERROR_FILE"]
    assert log_files(place / "logs-ours") == log_files(place / "logs-theirs")


def test_is_torchelastic_launched_and_the_run_id_is_the_runs_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("--job-id=mine", "show.py", "ours")
    launch("--job-id=mine", "show.py", "theirs")
    ids = [shown(place / folder)["0"]["env"]["TORCHELASTIC_RUN_ID"] for folder in ("ours", "theirs")]
    assert ids == ["mine.1", "mine.2"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", ids[0])
    assert dist.is_torchelastic_launched()


def test_ranks_are_counted_within_the_role_of_their_node(place: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    words = ["--nnodes=2", "--rdzv-id=roles", f"--rdzv-endpoint={endpoint}"]
    words = [sys.executable, "-m", "rsup.launcher", "launch", *words]
    first = subprocess.Popen([*words, "--node-rank=0", "--role=reader", "show.py", "ours"], stderr=subprocess.DEVNULL)
    second = [*words, "--node-rank=1", "--role=trainer", "--nproc-per-node=2", "show.py", "ours"]
    subprocess.run(second, timeout=100, check=True, capture_output=True)
    assert first.wait(60) == 0
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK")
    found_by_rank = {rank: tuple(one["env"][name] for name in names) for rank, one in shown(place / "ours").items()}
    assert found_by_rank == {
        "0": ("reader", "0", "1", "3", "0"),
        "1": ("trainer", "0", "2", "3", "1"),
        "2": ("trainer", "1", "2", "3", "1"),
    }


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["show.py"], ["show.py", "ours", "a$$b", "--", "-x"]),
        (["--run-path", "show.py"], ["show.py", "ours", "a$$b", "--", "-x"]),
        (["-m", "show"], ["{}/show.py", "ours", "a$$b", "--", "-x"]),
        (["--no-python", "{}/program"], ["{}/program", "ours", "a$$b", "--", "-x"]),
        (["--pass-local-rank", "show.py"], ["show.py", "--local-rank=0", "ours", "a$$b", "--", "-x"]),
    ],
)
def test_how_a_script_is_started(place: Path, words: list[str], argv: list[str]) -> None:
    (place / "program").write_text(f"#!{sys.executable}\n{SHOW}")
    (place / "program").chmod(0o755)
    if "--pass-local-rank" in words:
        (place / "show.py").write_text(SHOW.replace("sys.argv[1]", "sys.argv[2]"))
    launch(*(word.format(place) for word in words), "ours", "a$$b", "--", "-x")
    found = shown(place / "ours")["0"]
    assert (found["name"], found["argv"]) == ("__main__", [word.format(place) for word in argv])


def test_threads_for_each_rank(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    err = launch("--nproc-per-node=2", "show.py", "ours")[1]
    assert [found["env"]["OMP_NUM_THREADS"] for found in shown(place / "ours").values()] == ["4", "4"]
    assert "OMP_NUM_THREADS=auto is 4, of 9 cores for 2 ranks" in err
    assert parse_launch(["--nproc-per-node=20", "s.py"], {"OMP_NUM_THREADS": "Auto"}).omp_num_threads == 1
    assert parse_launch(["s.py"], {"OMP_NUM_THREADS": "7"}).omp_num_threads is None


# --------------------------------------------------------------------------------------------------------- the job's name


def test_a_slurm_job_names_its_launches_but_for_those_beside_one_another() -> None:
    options = parse_launch(["s.py"], {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"})
    assert (options.job_id, options.preferred_job_id, options.resume) == ("", "4711", True)
    assert parse_launch(["--job-id=mine", "s.py"], {"SLURM_JOB_ID": "4711"}).preferred_job_id == ""
    assert parse_launch(["--resume", "s.py"], {"SLURM_JOB_ID": "4711"}).resume
    with pytest.raises(BadValue, match="--resume: which job"):
        parse_launch(["--resume", "s.py"], {})

    routing, now = Routing(MemoryStore(), lambda: "generated"), Now(1, 1.0)

    def route(live: list[JobState], **spec: Any) -> str:
        hello = Hello((3, 3), "0", AgentInfo("a", "n", "h", 1), JobSpec(**spec))
        job = routing.job_for(hello, live, now)
        assert isinstance(job, JobState)
        live.append(job)
        return f"{job.key.job_id}.{job.key.run}"

    live: list[JobState] = []
    assert route(live, preferred_id="4711") == "4711.1"
    assert route(live, preferred_id="4711") == "generated.1"
    assert route([], preferred_id="4711", job_id="mine") == "mine.1"
    assert route([]) == "generated.1"


def test_a_launch_in_a_slurm_job_is_called_like_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    launch("show.py", "ours")
    assert shown(place / "ours")["0"]["env"]["RSUP_JOB_ID"] == "4711"


# ------------------------------------------------------------------------------------------------------------- log specs

SPECS = """\
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
class Mine(DefaultLogsSpecs):
    def reify(self, envs):
        for env in envs.values(): env["FROM_SPECS"] = env["RANK"]
        dest = super().reify(envs)
        if os.environ.get("BREAK_SPECS"): raise OSError("no room")
        return dest
"""


@pytest.fixture
def plugin(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with the entry points `mine` and `torn`."""
    package = place / "packages"
    (package / "specs-1.dist-info").mkdir(parents=True)
    (package / "specs-1.dist-info" / "METADATA").write_text("Name: specs\nVersion: 1\n")
    points = "[torchrun.logs_specs]\nmine = mine_of_this_test:Mine\ntorn = mine_of_this_test:Torn\n"
    (package / "specs-1.dist-info" / "entry_points.txt").write_text(points)
    (package / "mine_of_this_test.py").write_text(SPECS)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PYTHONPATH", str(package))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("mine_of_this_test", None)


@pytest.mark.usefixtures("plugin")
def test_an_installed_class_says_where_ranks_log_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--logs-specs=mine", "--nproc-per-node=2", "--log-dir=logs", "--rdzv-id=r", "-r=0:3", "-t=1:1"]
    out = launch(*words, "--duplicate-stdout-filters=pear", "show.py", "ours")[0]
    assert out == "[default1]:kept apple\n[default1]:pear\n"
    files = log_files(place / "logs")
    assert files["attempt_0/0/stdout.log"] == "kept apple\npear\n" == files["attempt_0/1/stdout.log"]
    assert files["attempt_0/0/stderr.log"] == "other\n" and "attempt_0/1/stderr.log" not in files
    assert files["attempt_0/filtered_stdout.log"] == "[default1]:pear\n"
    for rank, found in shown(place / "ours").items():
        assert found["env"]["FROM_SPECS"] == rank
        assert found["env"]["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")


@pytest.mark.usefixtures("plugin")
def test_a_class_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogsSpecsError, match="--logs-specs torn cannot be loaded: AttributeError"):
        LogsSpecs(LaunchOptions("s.py", logs_specs="torn"))
    specs = LogsSpecs(LaunchOptions("s.py", logs_specs="mine"))
    monkeypatch.setenv("BREAK_SPECS", "1")
    with pytest.raises(LogsSpecsError, match="--logs-specs mine cannot say where ranks log to: OSError: no room"):
        specs.files_of({0: {"RANK": "0"}}, LogOptions())
    with pytest.raises(BadValue, match=r"no installed package has an entry point torchrun.logs_specs .*: did you mean mine\?"):
        LogsSpecs(LaunchOptions("s.py", logs_specs="mines"))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("log_dir", ["logs", os.devnull])
def test_torchs_default_class_means_what_the_options_mean(log_dir: str) -> None:
    redirects, tee, shown_ranks = (1, 0, 3, 0), (0, 2, 0, 0), frozenset({0, 1, 2})
    options = LaunchOptions(
        "s.py", logs_specs="mine", log_dir=Path(log_dir), local_ranks_filter=shown_ranks, redirects=redirects, tee=tee
    )
    told = LogOptions(log_dir, "r", dict(enumerate(redirects)), dict(enumerate(tee)), shown_ranks)
    envs = {rank: {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "r"} for rank in range(4)}
    files = LogsSpecs(options).files_of(envs, told)
    for rank in range(4):
        for stream in ("stdout", "stderr"):
            assert files[rank].places[stream].to_console == told.place(rank, rank, stream).to_console or log_dir == os.devnull
            if log_dir != os.devnull and rank < 3:
                assert files[rank].places[stream] == told.place(rank, rank, stream)


# ---------------------------------------------------------------------------------------------------------------- events


class Keeps(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))
        if len(self.events) == 2:
            raise RuntimeError("a handler's own fault")


def test_events_reach_a_handler_that_is_registered_with_torch(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Keeps()
    monkeypatch.setitem(handlers._log_handlers, "kept", kept)
    (place / "fail.py").write_text("import os, time\nif os.environ['RANK'] == '1': os._exit(3)\ntime.sleep(600)\n")
    with pytest.raises(Exception, match="exitcode  : 3"):
        launch("--event-log-handler=kept", "--nproc-per-node=2", "--role=r", "fail.py")  # heard of, handler's fault or not
    seen = [(e["source"], e["metadata"]["state"], e["metadata"]["global_rank"]) for e in kept.events]
    assert seen == [
        ("AGENT", "RENDEZVOUS", None),
        ("WORKER", "START", 0),
        ("WORKER", "START", 1),
        ("WORKER", "TERMINATED", 0),
        ("WORKER", "FAILED", 1),
        ("AGENT", "SUCCEEDED", None),
    ]
    failed = kept.events[-2]
    assert failed["name"] == "torchelastic.worker.status.FAILED" and failed["metadata"]["role"] == "r"
    assert json.loads(failed["metadata"]["metadata"])["exit_code"] == [3]
    assert abs(failed["timestamp"] / 1000 - time.time()) < 120
    with pytest.raises(ValueError, match="torch has no handler of that name"):
        launch("--event-log-handler=lost", "fail.py")


def test_events_of_the_command_go_to_the_console() -> None:
    words = [sys.executable, "-m", "rsup.launcher", "launch", "--event-log-handler=console", "--no-python", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    states = [json.loads(line)["metadata"]["state"] for line in done.stderr.splitlines() if line.startswith('{"name"')]
    assert states == ["RENDEZVOUS", "START", "SUCCEEDED", "SUCCEEDED"]


# ---------------------------------------------------------------------------------------------------------------- timers

TIMED = """\
import json, os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": sys.exit(0)
ask = {"version": 1, "pid": os.getpid(), "scope_id": "step", "expiration_time": time.time() + 0.2, "signal": 9}
with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe: pipe.write(json.dumps(ask) + chr(10))
time.sleep(600)
"""


def test_a_rank_whose_timer_is_over_is_killed_and_restarted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "timed.py").write_text(TIMED)
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    err = launch("--max-restarts=1", "timed.py")[1]
    assert "rsup: rank 0: its timer 'step' is over; sent SIGKILL (signal 9) to process " in err
    monkeypatch.delenv("TORCHELASTIC_ENABLE_FILE_TIMER")
    launch("show.py", "ours")
    assert "TORCHELASTIC_TIMER_FILE" not in shown(place / "ours")["0"]["env"]


def test_timers_speak_torchs_protocol(tmp_path: Path) -> None:
    timers = FileTimers(tmp_path / "timers")
    client, now_s = FileTimerClient(str(tmp_path / "timers"), signal=signal.SIGTERM), time.time()
    client.acquire("a", now_s + 10)
    client.acquire("b", now_s + 20)
    assert timers.expired(now_s + 9) == []
    client.release("a")
    assert timers.expired(now_s + 15) == []
    client.acquire("b", now_s + 30)
    assert timers.expired(now_s + 25) == []
    FileTimerClient(str(tmp_path / "timers"), signal=0).acquire("only told", now_s + 1)  # pyright: ignore[reportArgumentType]
    assert timers.expired(now_s + 40) == [Expired(os.getpid(), "b", signal.SIGTERM)]
    assert timers.expired(now_s + 50) == []
    with (tmp_path / "timers").open("wb") as pipe:
        pipe.write(b'{"pid": 1}\nno json\n[]\n' + b"x" * 5000)
    client.acquire("c", now_s)
    assert timers.expired(now_s + 1) == [] == timers.expired(now_s + 1)  # it came in the middle of that long line
    client.acquire("d", now_s)
    assert [expired.scope for expired in timers.expired(now_s + 1)] == ["d"]
    timers.close()
    assert not (tmp_path / "timers").exists()


def test_only_processes_of_ranks_are_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        expired = Expired(process.pid, "a", signal.SIGKILL)
        assert kill_in_sessions(expired, [os.getsid(0)]) is None
        assert kill_in_sessions(Expired(process.pid, "a", 0), [process.pid]) is None
        assert process.poll() is None
        assert kill_in_sessions(expired, [process.pid]) == process.pid
        assert process.wait(30) == -signal.SIGKILL
        assert kill_in_sessions(expired, [process.pid]) is None
    (tmp_path / "file").write_text("of somebody")
    with pytest.raises(Exception, match="it is there, and no named pipe"):
        FileTimers(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "of somebody"


# ----------------------------------------------------------------------------------------------------------- error files


@pytest.mark.parametrize("recorded", ["[]", "no json", '{"message": "text"}'])
def test_an_error_file_of_another_form_is_passed_on_as_it_is(recorded: str, tmp_path: Path) -> None:
    (tmp_path / "rank.json").write_text(recorded)
    environment = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "sub" / "outer.json")}
    assert write_error_file(JobResult(3, "why"), "", tmp_path / "rank.json", environment) == ""
    assert (tmp_path / "sub" / "outer.json").read_text() == recorded
