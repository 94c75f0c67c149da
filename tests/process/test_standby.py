"""Warm standbys with real processes: a rank that came from one sees what a cold start shows it.

Most tests give the interpreter a small package called torch, since what is tested is the start of the script, not torch; one
compares both starts with the real one.
"""

import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rsup.launcher.launch_options import LaunchOptions, rank_command
from rsup.launcher.processes import RankProcess, become_subreaper, spawn_rank
from rsup.launcher.stacks import process_state
from rsup.launcher.standby import StandbyPool
from rsup.launcher.standby_rules import Seat, Situation, why_none

WITHIN_S = 200.0
"""A standby comes after everything else on its machine, and some import the real torch."""

pytestmark = pytest.mark.timeout(420)

LOOK = """
import json, os, resource, signal, sys, threading
{first}
import {module} as torch
def state():
    fds = sorted(f for f in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{f}}"))
    return {{
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
        "main": sorted(k for k in vars(sys.modules["__main__"])), "file": __file__, "name": __name__,
        "spec": str(__spec__).split(" object at ")[0],
        "package": __package__, "loader": type(__loader__).__name__, "doc": __doc__, "cached": __cached__,
        "cwd": os.getcwd(), "environ": dict(sorted(os.environ.items())),
        "c_environ": os.popen("env | grep ^WORD").read(),
        "handlers": {{s: str(signal.getsignal(s)) for s in signal.valid_signals()}},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "descriptors": fds, "tty": [sys.stdin.isatty(), sys.stdout.isatty()],
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": [t.name for t in threading.enumerate()], "session": os.getsid(0) == os.getpid(),
        "policy": os.sched_getscheduler(0), "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(),
        "limits": [resource.getrlimit(r) for r in range(16)], "umask": os.umask(0o22), "recursion": sys.getrecursionlimit(),
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path if type(f).__name__ != "Guard"],
        "hook": sys.excepthook is sys.__excepthook__,
        "warnings": sys.warnoptions, "group": os.getpgid(0) == os.getpid(),
    }}
"""


@dataclass
class Run:
    """How one rank ended."""

    code: int
    out: str
    err: str
    notes: list[str]


class Stage:
    """A script and the two ways to start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.environment: dict[str, str] = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RSUP_", "PYTHON"))},
            "RSUP_ATTEMPT": "2",
            "WORD": "first",
        }
        self.pools: list[StandbyPool] = []

    def use_small_torch(self) -> None:
        """A package called torch, that knows when it was imported."""
        package = self.folder / "small" / "torch"
        for name in ("", "nn", "distributed"):
            (package / name).mkdir(parents=True, exist_ok=True)
            (package / name / "__init__.py").write_text(
                "import os\nWORD = os.environ.get('WORD')\nFROM = os.environ.get('FROM')\nRANK = os.environ.get('RANK')\n"
            )
        for name in ("nn/parallel", "distributed/checkpoint", "_dynamo"):
            (package / f"{name}.py").write_text("")
        self.environment["PYTHONPATH"] = str(package.parent)

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def options(self, script: str, *words: str, **more: object) -> LaunchOptions:
        return LaunchOptions(training_script=script, training_script_args=words, **more)  # type: ignore[arg-type]

    def seat(self, options: LaunchOptions, environment: Mapping[str, str]) -> Seat:
        return Seat(rank_command(options), environment)

    def warm_pool(self, options: LaunchOptions, environment: Mapping[str, str] | None = None) -> StandbyPool:
        """A pool with one standby that is ready."""
        pool = StandbyPool(options, self.reports)
        self.pools.append(pool)
        self.make_ready(pool, environment or {**self.environment, "FROM": "standby"})
        return pool

    def make_ready(self, pool: StandbyPool, environment: Mapping[str, str]) -> None:
        pool.start(0, self.seat(pool.options, environment))
        deadline = time.monotonic() + WITHIN_S
        while not pool.num_ready and time.monotonic() < deadline:
            self.tick(pool)
            time.sleep(0.01)
        assert pool.num_ready == 1, pool.take_notes()

    def all_gone(self, pool: StandbyPool) -> None:
        """Wait for the end of those that were killed: on a busy machine it takes longer than the pool waits."""
        deadline = time.monotonic() + WITHIN_S
        while pool.pids:
            assert time.monotonic() < deadline, pool.pids
            self.tick(pool)
            time.sleep(0.01)

    def tick(self, pool: StandbyPool) -> None:
        pool.tick(time.monotonic(), [], {0: Seat([], {})}, can_restart=False, is_running=True, has_stepped=True)

    def warm(self, options: LaunchOptions, environment: Mapping[str, str] | None = None) -> Run:
        """Run the script in a standby that was made before, for another attempt."""
        made = {**self.environment, "RSUP_ATTEMPT": "1"}
        pool = self.warm_pool(options, made)
        run = self._run(pool, environment or self.environment)
        self.tick(pool)
        run.notes = [text for _, text in pool.take_notes() if "ready" not in text]
        return run

    def cold(self, options: LaunchOptions) -> Run:
        return self._run(None, self.environment, options)

    def _run(self, pool: StandbyPool | None, environment: Mapping[str, str], options: LaunchOptions | None = None) -> Run:
        out, err = self.folder / "out", self.folder / "err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            fds = (out_file.fileno(), err_file.fileno())
            process: RankProcess | None
            if pool is not None:
                process = pool.take(0, self.seat(pool.options, environment), stdin=None, stdout_fd=fds[0], stderr_fd=fds[1])
                assert process is not None, pool.take_notes()
            else:
                assert options is not None
                process = spawn_rank(
                    rank_command(options), environment, local_rank=0, stdin=None, stdout_fd=fds[0], stderr_fd=fds[1]
                )
        code = wait_for(process)
        return Run(code, out.read_text(), err.read_text(), [])


def notes_of(pool: StandbyPool) -> list[tuple[str, str]]:
    """Its notes, but for the one that a busy machine takes its time to end a process."""
    return [note for note in pool.take_notes() if "does not end on SIGKILL" not in note[1]]


def wait_for(process: RankProcess) -> int:
    deadline = time.monotonic() + WITHIN_S
    while (status := process.exit_status()) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if status is None:
        process.signal_session(signal.SIGKILL)
        select.select([process], [], [], WITHIN_S)
    process.close()
    assert status is not None, f"it has not ended within {WITHIN_S:g} s"
    return status[0]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    become_subreaper()
    monkeypatch.chdir(tmp_path)
    found = Stage(tmp_path)
    yield found
    for pool in found.pools:
        pool.close()


def differences(stage: Stage, options: LaunchOptions) -> dict[str, tuple[object, object]]:
    cold, warm = stage.cold(options), stage.warm(options)
    assert (cold.code, warm.code) == (0, 0), cold.err + warm.err + str(warm.notes)
    assert warm.notes == []
    one, two = json.loads(cold.out), json.loads(warm.out)
    return {name: (one[name], two[name]) for name in one if one[name] != two[name]}


def test_sees_what_a_cold_start_shows_with_the_real_torch(stage: Stage) -> None:
    script = stage.script(
        LOOK.format(first="", module="torch")
        + "found = state()\n"
        + "found['seeded'] = torch.manual_seed(1).initial_seed(), torch.rand(3).tolist()\n"
        + "found['cuda'] = torch.cuda.is_initialized(), torch.get_num_threads(), torch.get_default_dtype().is_floating_point\n"
        + "import torch.nn.functional as F, torch._dynamo, torch.distributed.checkpoint\n"
        + "names = [n for n in sys.modules if n.startswith('torch.') and n.count('.') == 1]\n"
        + "found['late'] = [n for n in sorted(names) if not hasattr(torch, n[6:])]\n"
        + "found['policies'] = sorted({os.sched_getscheduler(int(t)) for t in os.listdir('/proc/self/task')})\n"
        + "found['works'] = F.relu(torch.ones(2)).tolist(), torch.__spec__.loader.__class__.__name__\n"
        + "print(json.dumps(found))"
    )
    stage.environment.pop("OMP_NUM_THREADS", None)  # libraries that are loaded start their threads
    assert differences(stage, stage.options(script, "--lr", "0.1")) == {}


@pytest.mark.parametrize("is_early", [False, True])
def test_a_variable_that_a_late_part_of_torch_reads_is_never_missed(stage: Stage, is_early: bool) -> None:
    sets, late = 'os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"', "import torch._inductor.config as config"
    first, second = (sets, late) if is_early else (late, sets)
    script = stage.script(
        f"import os, torch\n{first}\nos.environ['HARMLESS'] = '1'\n{second}\n"
        "print(config.max_autotune, sorted(k for k in os.environ if k in ('HARMLESS', 'TORCHINDUCTOR_MAX_AUTOTUNE')))"
    )
    options = stage.options(script)
    cold, warm = stage.cold(options), stage.warm(options)
    assert (warm.out, warm.code) == (cold.out, cold.code), warm.err
    assert cold.out.startswith(str(is_early))
    assert [note for note in warm.notes if "TORCHINDUCTOR_MAX_AUTOTUNE" in note] == warm.notes[: int(is_early)]


@pytest.mark.parametrize("kind", ["script", "script in a folder", "link", "module", "package"])
def test_sees_what_a_cold_start_shows(stage: Stage, kind: str) -> None:
    stage.use_small_torch()
    text = LOOK.format(first="", module="torch.nn") + "print(json.dumps(state() | {'torch': torch.WORD}))"
    (stage.folder / "pkg").mkdir()
    (stage.folder / "pkg" / "__init__.py").write_text("")
    stage.script(text, "pkg/__main__.py")
    name = stage.script(text, "pkg/train.py")
    if kind == "link":
        os.symlink(name, stage.folder / "link.py")
    path = {
        "script": stage.script(text),
        "script in a folder": name,
        "link": "link.py",
        "module": "pkg.train",
        "package": "pkg",
    }
    options = stage.options(path[kind], "a b", "$$", "--x=ü", module=kind in ("module", "package"))
    assert differences(stage, options) == {}


def test_is_the_process_that_imported_torch(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(
        stage.options(stage.script("import torch; print(torch.FROM)")), {**stage.environment, "FROM": "ahead"}
    )
    run = stage._run(pool, {**stage.environment, "FROM": "ahead", "RANK": "1"})
    assert run.out == "ahead\n"
    (stage.folder / "reports").rmdir()  # nothing was reported


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = '7'", "OMP_NUM_THREADS"),
        ("import os; del os.environ['WORD']", "WORD"),
        ("import os; os.environ['WORD'] = 'second'; os.chdir('/')", "WORD"),
        ("import sys; sys.path.pop(0)", "sys.path"),
        ("import sys; sys.path.insert(0, 'other')", "other"),
        ("import zmq", "imports zmq."),
    ],
)
def test_starts_cold_after_all_when_the_script_prepares_the_import(stage: Stage, first: str, says: str) -> None:
    stage.use_small_torch()
    (stage.folder / "other" / "torch").mkdir(parents=True)
    (stage.folder / "other" / "torch" / "__init__.py").write_text("WORD = 'the other one'")
    script = stage.script(f"{first}\nimport os, sys, torch\nprint(torch.WORD, os.getcwd(), sys.argv, os.getpid())")
    options = stage.options(script, "--a")
    cold, warm = stage.cold(options), stage.warm(options)
    assert warm.out.split()[:-1] == cold.out.split()[:-1]
    assert warm.code == cold.code == 0
    assert len(warm.notes) == 2 and says in warm.notes[0], warm.notes
    assert ("import zmq before torch" if "zmq" in first else "no more warm standbys") in warm.notes[1]


def test_what_the_script_imports_first_is_imported_first_by_the_next_standby(stage: Stage) -> None:
    stage.use_small_torch()
    made, now = ({**stage.environment, "RANK": rank} for rank in ("as made", "as run"))
    pool = stage.warm_pool(stage.options(stage.script("import zmq, torch\nprint(torch.RANK)")), made)
    assert stage._run(pool, now).out == "as run\n"  # cold after all
    stage.tick(pool)
    stage.make_ready(pool, made)
    assert stage._run(pool, now).out == "as made\n"
    stage.tick(pool)
    assert sum("cold after all" in text for _, text in pool.take_notes()) == 1


@pytest.mark.parametrize(
    "first",
    [
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'; os.environ['WANDB_MODE'] = 'offline'; os.chdir('/')",
        "import sys; sys.path.insert(0, 'empty')",
        "import importlib.util; assert importlib.util.find_spec('torch').origin.endswith('__init__.py')",
        "import numpy; import sys; assert 'torch' not in sys.modules",
        "import threading; t = threading.Thread(target=lambda: __import__('torch.nn')); t.start(); t.join()",
    ],
)
def test_stays_warm_where_it_cannot_matter(stage: Stage, first: str) -> None:
    stage.use_small_torch()
    made = {**stage.environment, "FROM": "ahead"}
    pool = stage.warm_pool(stage.options(stage.script(f"{first}\nimport torch\nprint(torch.FROM)")), made)
    run = stage._run(pool, made)
    assert run.out == "ahead\n", run.err


def test_torch_replaced_on_disk(stage: Stage) -> None:
    stage.use_small_torch()
    options = stage.options(stage.script("import torch; print(torch.WORD)"))
    pool = stage.warm_pool(options)
    (stage.folder / "small/torch/__init__.py").write_text("WORD = 'upgraded'")
    run = stage._run(pool, {**stage.environment, "FROM": "standby"})
    assert run.out == "upgraded\n"


def test_script_edited_since(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch; print('old')")))
    stage.script("import torch; print('new')")
    assert stage._run(pool, {**stage.environment, "FROM": "standby"}).out == "new\n"


ENDS = {
    "exception": "import torch\ndef f():\n    raise ValueError('no good')\nf()",
    "exit code": "import sys, torch\nsys.exit(7)",
    "exit text": "import sys, torch\nsys.exit('because')",
    "syntax": "import torch\ndef (:\n",
    "missing module": "import torch, nowhere",
    "atexit": "import atexit, torch\natexit.register(print, 'bye')\nprint('hello')",
    "hook": "import sys, torch\nsys.excepthook = lambda t, e, b: print('hook', t.__name__, e)\n1/0",
    "signal": "import os, signal, torch\nos.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "import os, signal, torch\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(30)",
    "pickle": "import pickle, torch\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "spawned child": (
        "import multiprocessing, torch\ndef work(q): q.put(__name__)\n"
        "if __name__ == '__main__':\n    c = multiprocessing.get_context('spawn'); q = c.Queue()\n"
        "    p = c.Process(target=work, args=(q,)); p.start(); print(q.get()); p.join()"
    ),
    "unknown file": None,
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_as_a_cold_start_ends(stage: Stage, name: str) -> None:
    stage.use_small_torch()
    text = ENDS[name]
    options = stage.options(stage.script(text or "", "ends.py"))
    cold_first = stage.cold(options) if text is not None else None
    pool = stage.warm_pool(options)
    if text is None:
        (stage.folder / "ends.py").unlink()
        assert stage._run(pool, {**stage.environment, "FROM": "standby"}).code != 0
        return
    warm = stage._run(pool, {**stage.environment, "FROM": "standby"})
    assert cold_first is not None
    assert warm.code == cold_first.code
    assert warm.out == cold_first.out
    if name != "interrupt":  # its traceback shows where the script was started from
        assert warm.err == cold_first.err


def test_environment_that_changed_since_is_no_use(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    changed = {**stage.environment, "FROM": "standby", "OMP_NUM_THREADS": "3"}
    assert pool.take(0, stage.seat(pool.options, changed), stdin=None, stdout_fd=1, stderr_fd=2) is None
    assert notes_of(pool)[-1:] == [("info", "local rank 0 starts cold: OMP_NUM_THREADS changed since its standby was made")]
    stage.all_gone(pool)


def test_one_that_dies_is_noticed_and_replaced_at_most_twice(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    notes: list[str] = []
    for _ in range(3):
        os.kill(pool.pids[0], 9)
        deadline = time.monotonic() + WITHIN_S
        while pool.pids and time.monotonic() < deadline:
            stage.tick(pool)
        notes += [text for level, text in pool.take_notes() if level == "warning"]
        if len(notes) < 3:
            pool.start(0, stage.seat(pool.options, stage.environment))
    assert notes[0] == "the warm standby of local rank 0 was killed by SIGKILL"
    assert notes[2].endswith("; no more are started")
    assert not pool.is_due(time.monotonic() + 1000)


def test_preload_that_fails_is_said(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch; print('ok')"), preload=("json", "nowhere")))
    assert [note for note in pool.take_notes() if note[0] == "warning"] == [
        ("warning", "a warm standby could not import nowhere: ModuleNotFoundError: No module named 'nowhere'")
    ]
    assert stage._run(pool, {**stage.environment, "FROM": "standby"}).out == "ok\n"


def test_first_to_go_when_memory_runs_out(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    assert Path(f"/proc/{pool.pids[0]}/oom_score_adj").read_text() == "1000\n"


def test_close_leaves_nothing(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    pid = pool.pids[0]
    pool.close()
    stage.all_gone(pool)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "options",
    [{"no_standby": True}, {"no_python": True}, {"run_path": True}, {"training_script": "a-folder"}],
    ids=lambda options: next(iter(options)),
)
def test_no_standby_for(options: dict[str, object], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    pool = StandbyPool(LaunchOptions(**{"training_script": str(script)} | options), tmp_path)  # type: ignore[arg-type]
    assert not pool.is_due(1e9)


MB = 1 << 20
GOOD = Situation(True, True, 10.0, True, 300 * MB, 2, 2000 * MB, 0.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"can_restart": False}, "no restart is left"),
        ({"is_running": False}, "the attempt is not running"),
        ({"torch_loaded_s": None}, "not every rank has loaded torch"),
        ({"has_stepped": False}, "the first step is not done"),
        ({"has_stepped": False, "torch_loaded_s": 1.0}, ""),
        ({"pause_until_s": 12.0}, "paused"),
        ({"free_bytes": 1199 * MB}, "too little memory is free"),
    ],
)
def test_when_to_start_one(change: dict[str, object], why: str) -> None:
    values = {name: getattr(GOOD, name) for name in Situation.__dataclass_fields__} | change
    assert why_none(Situation(**values), 11.0) == why


def test_memory_is_given_back_when_it_is_short(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    pool.take_notes()
    monkeypatch.setattr("rsup.launcher.standby.free_bytes", lambda: 1000)
    stage.tick(pool)
    assert pool.num_ready == 0
    [(level, text)] = notes_of(pool)
    assert level == "warning" and text.startswith("memory is short: 1 warm standby is ended, which frees ")
    stage.all_gone(pool)


def test_a_stopped_one_is_not_waited_for(stage: Stage) -> None:
    stage.use_small_torch()
    pool = stage.warm_pool(stage.options(stage.script("import torch")))
    os.kill(pool.pids[0], signal.SIGSTOP)
    deadline = time.monotonic() + WITHIN_S
    while process_state(pool.pids[0]) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    seat = stage.seat(pool.options, {**stage.environment, "FROM": "standby"})
    assert pool.take(0, seat, stdin=None, stdout_fd=1, stderr_fd=2) is None
    stage.all_gone(pool)
