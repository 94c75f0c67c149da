"""`rsup.launcher.main` as programs call it: torchrun's `main`, whose contract PyTorch's own launcher tests describe."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rsup.launcher
from rsup.launcher import python_api, torch_devices, torch_launch
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.python_api_errors import LaunchError, job_error
from tests.jobs.conftest import free_port, keepers_end
from tests.jobs.test_plain_jobs import is_alive

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch imports pynvml, whose old package only forwards to nvidia-ml-py
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TOUCH = 'import os, sys\nopen(os.path.join(sys.argv[1], os.environ["RANK"]), "x").close()\n'
FAIL = "import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(600)\nprint('rank 1 is lost', file=sys.stderr)\n{}\n"


def until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture(autouse=True)
def keepers_are_gone(own_directories: Path) -> Iterator[None]:
    yield
    keepers_end(own_directories)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    (tmp_path / "ran").mkdir()
    return tmp_path / "ran"


def numbers(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_it_returns_on_success_and_may_be_called_again_and_from_any_thread(script: Callable[[str], str], ran: Path) -> None:
    touch = script(TOUCH)
    before = len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT), threading.active_count()
    for call in (1, 2):
        (ran / f"{call}").mkdir()
        rsup.launcher.main(["--nproc-per-node=2", "--monitor-interval=1", touch, str(ran / f"{call}")])
        assert numbers(ran / f"{call}") == {"0", "1"}
    (ran / "thread").mkdir()
    errors: list[BaseException] = []

    def call_it() -> None:
        try:
            rsup.launcher.main([touch, str(ran / "thread")])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call_it)
    thread.start()
    thread.join(60)
    assert not errors and numbers(ran / "thread") == {"0"}
    assert (len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT), threading.active_count()) == before


PAIR = """\
import multiprocessing, sys
import rsup.launcher
other = multiprocessing.Process(target=rsup.launcher.main, args=[sys.argv[1:]], daemon=True)
other.start()
rsup.launcher.main(sys.argv[1:])
other.join(60)
sys.exit(other.exitcode)
"""


def test_two_at_once_in_a_daemonic_process_and_here(script: Callable[[str], str], ran: Path) -> None:
    nodes = ["--nnodes=2", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=pair"]
    words = [sys.executable, "-c", PAIR, *nodes, script(TOUCH), str(ran)]
    subprocess.run(words, check=True, timeout=100, stdout=subprocess.DEVNULL)
    assert numbers(ran) == {"0", "1"}


def test_a_failed_rank_is_torchs_error(script: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as caught:
        rsup.launcher.main(["--nproc-per-node=2", "--stop-grace=5", script(FAIL.format("sys.exit(5)"))])
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode, failure.message) == (1, 1, 5, "rank 1 is lost")
    assert failure.pid > 0 and abs(failure.timestamp - time.time()) < 120
    assert set(caught.value.failures) == {0, 1} and caught.value.failures[0].exitcode == -signal.SIGTERM
    assert "Root Cause (first observed failure):\n[0]:" in str(caught.value) and "script.py FAILED" in str(caught.value)


def test_what_a_rank_recorded_is_in_the_error_and_in_the_callers_error_file(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = (
        "import json, os, time\n"
        "extra = {'py_callstack': 'Traceback of it', 'timestamp': str(int(time.time()))}\n"
        "message = {'message': 'ValueError: it', 'extraInfo': extra}\n"
        "json.dump({'message': message}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "outer.json"))
    with pytest.raises(ChildFailedError, match="Traceback of it") as caught:
        rsup.launcher.main([f"--log-dir={tmp_path}", script(record)])
    failure = caught.value.get_first_failure()[1]
    assert failure.exitcode == -9 and failure.signal_name() == "SIGKILL"
    outer = json.loads((tmp_path / "outer.json").read_text())
    assert outer["message"]["message"] == "ValueError: it" and outer["message"]["errorCode"] == 137


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("--nproc-per-node unknown s.py", ValueError),
        ("--nproc-per-node gpu s.py", ValueError),
        ("--no-python --module s.py", ValueError),
        ("--nnodes 2:20:30 s.py", RuntimeError),
        ("--nnodes 0 s.py", ValueError),
        ("--max-restarts -1 s.py", ValueError),
        ("--logs_specs NONE s.py", ValueError),
        ("--redirects 7 s.py", ValueError),
        ("nowhere.py", ValueError),
        ("--nnodes 2 s.py", ValueError),
        ("--unknown s.py", SystemExit),
        ("--max-restarts x s.py", SystemExit),
        ("--start-method x s.py", SystemExit),
        ("", SystemExit),
    ],
)
def test_what_makes_no_sense_is_refused_here(
    words: str, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(kind) as caught:
        rsup.launcher.main(words.split())
    if kind is SystemExit:
        assert caught.value.code == 2  # type: ignore[attr-defined]
        assert capsys.readouterr().err.startswith("rsup launch: ")


def test_help_ends_like_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        rsup.launcher.main(["--help"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("usage: rsup launch")


def test_a_refusal_is_left_for_a_launcher_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError):
        rsup.launcher.main(["--nnodes=0", "s.py"])
    assert "--nnodes 0: must be at least 1" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_what_the_launchers_process_refuses_is_an_error_with_its_exit_code(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", "/proc/nope")
    with pytest.raises(LaunchError, match="TORCHELASTIC_TIMER_FILE /proc/nope: cannot be used") as caught:
        rsup.launcher.main([script("")])
    assert caught.value.exit_code == 2


def test_arguments_default_to_the_programs(script: Callable[[str], str], ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", script(TOUCH), str(ran)])
    rsup.launcher.main()
    assert numbers(ran) == {"0"}


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("2:20", (2, 20))])
def test_parse_min_max_nnodes(text: str, expected: tuple[int, int]) -> None:
    assert rsup.launcher.parse_min_max_nnodes(text) == expected
    with pytest.raises(RuntimeError):
        rsup.launcher.parse_min_max_nnodes("2:20:30")


def test_the_callers_torch_counts_devices(monkeypatch: pytest.MonkeyPatch, script: Callable[[str], str]) -> None:
    empty = script("")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert python_api.read_options(["--nproc-per-node=auto", empty]).nproc_per_node == len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert python_api.read_options(["--nproc-per-node=auto", empty]).nproc_per_node == 3
    for name, count in (("cuda", 4), ("xpu", 5)):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: True)
        monkeypatch.setattr(getattr(torch, name), "device_count", lambda count=count: count)
    assert python_api.read_options(["--nproc-per-node=gpu", empty]).nproc_per_node == 4
    assert python_api.read_options(["--nproc-per-node=xpu", empty]).nproc_per_node == 5
    monkeypatch.setattr(torch_devices, "_added_name", lambda torch: "xpu")
    assert python_api.read_options(["--nproc-per-node=XPU", empty]).nproc_per_node == 5
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_devices.counters_of_the_caller() is None


def test_output_goes_through_what_stands_for_the_console(script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    words = ["--nproc-per-node=2", "--redirect=3", "--tee=3", script("print('created é')")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rsup.launcher.main(words)
    assert sorted(out.getvalue().splitlines()) == ["[rank0]: created é", "[rank1]: created é"]
    assert "rsup: job " in err.getvalue()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        out.close()  # nobody can take it: the job must not feel it
        rsup.launcher.main(words)


def test_a_console_that_is_a_file_is_the_launchers_own(script: Callable[[str], str], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, contextlib.redirect_stdout(out):
        print("before")
        rsup.launcher.main([script("print('rank')")])
        print("after")
    assert (tmp_path / "out").read_text() == "before\nrank\nafter\n"


def test_local_rank_as_torch_distributed_launch_passes_it(script: Callable[[str], str], tmp_path: Path) -> None:
    show = script("import os, sys\nprint(os.environ['LOCAL_RANK'], *sys.argv[1:])")
    shown = []
    for launch, words in (
        (torch_launch.main, []),
        (torch_launch.main, ["--use-env"]),
        (rsup.launcher.main, ["--pass-local-rank"]),
        (rsup.launcher.main, ["--use-env"]),
    ):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            launch([*words, "--nproc-per-node=2", show, "x"])
        shown.append(sorted(out.getvalue().splitlines()))
    passed, plain = ["0 --local-rank=0 x", "1 --local-rank=1 x"], ["0 x", "1 x"]
    assert shown == [passed, plain, passed, plain]
    with pytest.raises(ValueError, match="--use-env"):
        torch_launch.main(["--no-python", "true"])


CALLER = """\
import signal, sys
import rsup.launcher
assert "torch" not in sys.modules
try:
    rsup.launcher.main(sys.argv[1:])
except BaseException as error:
    print(type(error).__name__, int(error.sigval), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""
WAITS = (
    "import os, signal, sys, time\n"
    "def leave(number, frame): open(os.path.join(sys.argv[1], f'got-{number}'), 'w').close(); number == 15 and sys.exit(0)\n"
    "for number in (10, 15): signal.signal(number, leave)\n"
    "open(os.path.join(sys.argv[1], f'pid-{os.getpid()}'), 'w').close()\n"
    "while True: time.sleep(0.1)\n"
)


def start_caller(script: str, ran: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", CALLER, "--shutdown-timeout=60", script, str(ran)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def rank_pid(ran: Path) -> int:
    (name,) = until(lambda: [name for name in numbers(ran) if name.startswith("pid-")])
    return int(name.removeprefix("pid-"))


def test_signals_to_the_caller_reach_the_ranks(script: Callable[[str], str], ran: Path) -> None:
    caller = start_caller(script(WAITS), ran)
    rank_pid(ran)
    caller.send_signal(signal.SIGUSR1)
    until(lambda: "got-10" in numbers(ran))
    assert caller.poll() is None
    caller.send_signal(signal.SIGTERM)
    out = caller.communicate(timeout=60)[0]
    assert "got-15" in numbers(ran)
    assert out == "SignalException 15 True\n"


def test_the_ranks_die_with_the_caller(script: Callable[[str], str], ran: Path) -> None:
    caller = start_caller(script(WAITS), ran)
    pid = rank_pid(ran)
    caller.kill()
    caller.communicate(timeout=60)
    until(lambda: not is_alive(pid))
    until(lambda: not keepers())  # it tells the supervisor, in directories that go with this test


def keepers() -> list[str]:
    """Keepers of launches in this test's directories."""
    place = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"rsup.launcher.keeper_process" in (path / "cmdline").read_bytes() and place in (path / "environ").read_bytes():
                found.append(path.name)
    return found


def test_an_exception_in_the_caller_ends_the_job_in_order(script: Callable[[str], str], ran: Path) -> None:
    class Enough(Exception):
        pass

    def enough(number: int, frame: object) -> None:
        raise Enough

    def alarm() -> None:
        rank_pid(ran)
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, enough)
    try:
        watch = threading.Thread(target=alarm)
        watch.start()
        with pytest.raises(Enough):
            rsup.launcher.main([script(WAITS), str(ran)])
        watch.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "got-15" in numbers(ran)
    assert not Path(f"/proc/{rank_pid(ran)}").exists()


def test_paths_and_numbers_are_as_good_as_words(script: Callable[[str], str], ran: Path) -> None:
    rsup.launcher.main(["--nproc-per-node", 2, Path(script(TOUCH)), ran])
    assert numbers(ran) == {"0", "1"}
    with pytest.raises(ValueError, match="argument None is of type NoneType"):
        rsup.launcher.main(["x.py", None])  # type: ignore[list-item]


def result(**changes: Any) -> dict[str, Any]:
    ended = {"exit_code": 7, "reason": "why", "rank": None, "node": "n2", "job_id": "j", "signum": 0, "failures": []}
    return {**ended, **changes}


def failure(rank: int, at_s: int, **changes: Any) -> dict[str, Any]:
    known = {"rank": rank, "local_rank": rank, "pid": 9, "exit_code": 1, "signal": 0, "at_us": at_s * 1_000_000}
    return {**known, "by_rsup": "", "error": "", "error_file": "", **changes}


def test_ends_and_their_errors(tmp_path: Path) -> None:
    options = LaunchOptions("train.py")
    plain = job_error(options, result())
    assert isinstance(plain, LaunchError) and (str(plain), plain.exit_code) == ("why", 7)
    told = job_error(options, result(signum=15, exit_code=143))
    assert isinstance(told, SignalException) and told.sigval == signal.SIGTERM
    elsewhere = job_error(options, result(rank=12))
    assert isinstance(elsewhere, ChildFailedError)
    assert elsewhere.failures[12].exitcode == 7 and "on node n2: why" in str(elsewhere)
    (tmp_path / "bad.json").write_text('{"message": {}}')
    (tmp_path / "old.json").write_text('{"message": "text", "timestamp": 5}')
    mover = failure(3, 100, error_file=str(tmp_path / "bad.json"), error="it")
    victim = failure(1, 90, error_file=str(tmp_path / "old.json"), by_rsup="told to")
    both = job_error(options, result(rank=3, failures=[mover, victim]))
    assert isinstance(both, ChildFailedError)
    assert both.get_first_failure()[0] == 3 and both.failures[3].message == "it" and both.failures[1].message == "text"


def test_without_torch_the_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("errors", "api"):
        monkeypatch.setitem(sys.modules, f"torch.distributed.elastic.multiprocessing.{name}", None)
    failed = job_error(LaunchOptions("train.py"), result(failures=[failure(0, 1)]))
    assert isinstance(failed, LaunchError) and failed.exit_code == 7
    told = job_error(LaunchOptions("train.py"), result(signum=2))
    assert isinstance(told, LaunchError) and told.exit_code == 130
