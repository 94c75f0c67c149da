"""What is refused: one line on stderr that names the option, exit code 2, and nothing started."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsup.launcher import cli, launch_checks
from rsup.launcher.launch_options import LaunchOptions

SCRIPT_TEXT = "print('ran')\n"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchOptions]:
    """Options that reached the agent; the working directory holds `s.py`, `dir`, and `program` without the x bit."""
    seen: list[LaunchOptions] = []

    def run(options: LaunchOptions) -> int:
        seen.append(options)
        return 7

    monkeypatch.setitem(sys.modules, "rsup.launcher.agent", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(SCRIPT_TEXT)
    Path("program").write_text("#!/bin/sh\n")
    Path("dir").mkdir()
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text("raise SystemExit('imported')\n")
    Path("pkg/mod.py").write_text("")
    Path("short.key").write_text("x")
    Path("open.key").write_text("x" * 32)
    os.chmod("short.key", 0o600)
    os.chmod("open.key", 0o644)
    return seen


REFUSED = [
    ("--nproc-per-noed 2 s.py", "unknown option --nproc-per-noed: did you mean --nproc-per-node?"),
    ("--lr 3 s.py", "unknown option --lr; options of the script go after the script"),
    ("-x s.py", "unknown option -x"),
    ("--log x s.py", "ambiguous option --log: --log-dir or --logs-specs?"),
    ("--role", "--role needs a value"),
    ("--role --tee 3 s.py", "--role needs a value"),
    ("--standalone=1 s.py", "--standalone takes no value"),
    ("", "no script given"),
    ("--nnodes 1", "no script given"),
    ("--", "no script given"),
    ("--nproc-per-node 0 s.py", "--nproc-per-node 0: must be at least 1"),
    ("--nproc-per-node -1 s.py", "--nproc-per-node -1: must be at least 1"),
    ("--nproc-per-node=-1 s.py", "--nproc-per-node -1: must be at least 1"),
    ("--nproc-per-node 100000 s.py", "must be at most 4096"),
    ("--nproc-per-node gpus s.py", "--nproc-per-node gpus: must be a number, or one of auto, cpu, gpu, xpu: did you mean gpu?"),
    ("--nproc-per-node 1.5 s.py", "--nproc-per-node 1.5: must be a number"),
    ("--nnodes 0 s.py", "--nnodes 0: must be at least 1"),
    ("--nnodes 1:2:3 s.py", "--nnodes 1:2:3: must be a number of nodes or MIN:MAX"),
    ("--nnodes 4:2 s.py", "--nnodes 4:2: the smallest number comes first; write 2:4"),
    ("--nnodes two s.py", "--nnodes two: must be a number of nodes"),
    ("--nnodes -1 s.py", "--nnodes -1: must be a number of nodes"),
    ("--nnodes 2 s.py", "--nnodes 2: where do they meet? Add --rdzv-endpoint"),
    ("--nnodes 1:2 --rdzv-backend c10d s.py", "--nnodes 2: where do they meet?"),
    ("--nnodes 2 --supervisor h:1 s.py", "which agents belong together? Add --rdzv-id"),
    ("--nnodes 2 --standalone s.py", "--nnodes 2: --standalone is for one node"),
    ("--nnodes 2 --rdzv-endpoint h:0 s.py", "cannot meet at port 0"),
    ("--nnodes 2 --rdzv-endpoint h:port s.py", "--rdzv-endpoint h:port: must be HOST:PORT"),
    ("--rdzv-endpoint h:99999 s.py", "--rdzv-endpoint h:99999: must be HOST:PORT"),
    ("--rdzv-backend c11d s.py", "--rdzv-backend c11d: must be one of static, c10d, etcd, etcd-v2: did you mean c10d?"),
    ("--rdzv-conf timout=3 s.py", "unknown key timout: did you mean timeout?"),
    ("--rdzv-conf timeout s.py", "'timeout' is not of the form KEY=VALUE"),
    ("--rdzv-conf timeout=soon s.py", "'soon' is not a number"),
    ("--rdzv-conf join_timeout=-1 s.py", "--rdzv-conf join_timeout=-1: must be at least 0"),
    ("--node-rank -1 s.py", "--node-rank -1: must be at least 0"),
    ("--node-rank 1 s.py", "--node-rank 1: the job has one node"),
    ("--master-port 70000 s.py", "--master-port 70000: must be at most 65535"),
    ("--max-restarts -1 s.py", "--max-restarts -1: must be at least 0"),
    ("--max-restarts many s.py", "--max-restarts many: must be a whole number"),
    ("--max-restarts 99999999999999999999 s.py", "must be at most"),
    ("--monitor-interval -0.1 s.py", "--monitor-interval -0.1: must be at least 0"),
    ("--monitor-interval nan s.py", "--monitor-interval nan: must be a number"),
    ("--shutdown-timeout -1 s.py", "--shutdown-timeout -1: must be at least 0"),
    ("--start-method forks s.py", "must be one of spawn, fork, forkserver: did you mean fork?"),
    ("--numa-binding nodes s.py", "must be one of node, socket, exclusive, core-complex: did you mean node?"),
    ("-r 4 s.py", "-r 4: must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
    ("-r4 s.py", "-r4: must be 0"),
    ("--tee 0:3;1:1 s.py", "--tee 0:3;1:1: must be 0"),
    ("--local-ranks-filter a s.py", "--local-ranks-filter a: must be local ranks separated by commas"),
    ("--signals-to-handle SIGTERM,SIGNOPE s.py", "no signal is called 'SIGNOPE'"),
    ("--signals-to-handle SIGKILL s.py", "SIGKILL cannot be handled; leave it out"),
    ("--signals-to-handle STOP s.py", "SIGSTOP cannot be handled"),
    ("-m --no-python pkg.mod", "-m cannot go with --no-python"),
    ("--job-id a/b s.py", "--job-id a/b: must be at most 100 letters"),
    ("--job-id .. s.py", "--job-id ..: must be"),
    ("--resume s.py", "--resume: which job? Add --job-id"),
    ("--require-supervisor s.py", "--require-supervisor: which one?"),
    ("--supervisor nowhere s.py", "--supervisor nowhere: must be HOST:PORT"),
    ("--supervisor http://h:1 s.py", "--supervisor http://h:1: must be HOST:PORT"),
    ("--log-prefix ${foo} s.py", "--log-prefix ${foo}: ${foo} is none of ${role_name}, ${rank}, ${local_rank}"),
    ("--log-prefix $$$Rank s.py", "$Rank is none of ${role_name}, ${rank}"),
    ("--log-prefix ${rank s.py", "--log-prefix ${rank"),
    ("--restart always s.py", "--restart always: must be one of count, auto"),
    ("--backoff 9:3 s.py", "the longest wait, 3 s, is shorter than the first one"),
    ("--backoff x s.py", "--backoff x: must be a number"),
    ("--fence-timeout 0 s.py", "--fence-timeout 0: must be more than 0"),
    ("--identical-failures 0 s.py", "--identical-failures 0: must be at least 1"),
    ("nope.py", "script nope.py not found in"),
    ("/nope.py", "script /nope.py not found"),
    ("json.tool", "; did you mean -m?"),
    ("dir", "script dir is a directory without __main__.py"),
    ("--nproc-per-node 2 -", "script -: 2 ranks cannot share one standard input"),
    ("--nproc-per-node 2 /dev/stdin", "script /dev/stdin: 2 ranks cannot share one standard input"),
    ("-m nope", "-m nope: no module of that name can be run"),
    ("-m pkg.nope", "-m pkg.nope: no module of that name can be run"),
    ("-m pkg", "-m pkg: no module of that name can be run"),
    ("-m dir/s.py", "-m dir/s.py: is no module name"),
    ("-m ./s.py", "leave out -m to run the file ./s.py"),
    ("--no-python nope", "program nope not found"),
    ("--no-python ./program", "./program is not executable; chmod +x it"),
    ("--log-dir /proc/nope s.py", "--log-dir /proc/nope: cannot write there"),
    ("--log-dir s.py s.py", "cannot write there (File exists)"),
    ("--state-dir /proc/nope s.py", "--state-dir /proc/nope: cannot write there"),
    ("--result-file dir s.py", "is a directory; give the name of a file"),
    ("--result-file /proc/nope/r.json s.py", "--result-file /proc/nope: cannot write there"),
    ("--key-file nope s.py", "cannot read the key file"),
    ("--key-file open.key s.py", "can be read by others; chmod 600"),
    ("--key-file short.key s.py", "holds fewer than 16 bytes"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words or "nothing" for words, _ in REFUSED])
def test_refused_in_one_line(
    words: str, message: str, launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words.split()]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("rsup launch: ") and output.err.count("\n") == 1
    assert message in output.err
    assert output.out == "" and not launched


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_STANDALONE", "maybe", "PET_STANDALONE=maybe: must be 1 or 0, true or false"),
        ("PET_NNODES", "x", "PET_NNODES=x: must be a number of nodes"),
        ("PET_START_METHOD", "x", "PET_START_METHOD=x: must be one of"),
        ("PET_NPROC_PER_NODE", "0", "PET_NPROC_PER_NODE=0: must be at least 1"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: must be a number of seconds"),
        ("RSUP_SUPERVISOR", "x", "RSUP_SUPERVISOR=x: must be HOST:PORT"),
        ("RSUP_STATE_DIR", "/proc/nope", "--state-dir /proc/nope: cannot write there"),
    ],
)
def test_refused_variables(
    name: str,
    value: str,
    message: str,
    launched: list[LaunchOptions],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["launch", "s.py"]) == 2
    assert message in capsys.readouterr().err and not launched


@pytest.mark.parametrize("words", ["s.py", "-m json.tool", "-m pkg.mod", "--no-python true", "-m unittest", "./s.py --lr"])
def test_what_can_run_reaches_the_agent_and_its_exit_code_counts(
    words: str, launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words.split()]) == 7
    assert len(launched) == 1
    assert capsys.readouterr().err == ""


def test_notes_are_printed_once_each(launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--ft-workload-check-interval", "5", "s.py"]) == 7
    assert capsys.readouterr().err == (
        "rsup launch: note: --ft-workload-check-interval has no effect: hangs are seen within 250 ms\n"
    )


def test_modules_to_preload_that_are_not_there_get_a_note(
    launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["launch", "--preload", "json.tool,pkg.mod,nosuch_zz.x", "s.py"]) == 7
    assert capsys.readouterr().err == (
        "rsup launch: note: --preload nosuch_zz: not found here, so standbys go without; check the name and PYTHONPATH\n"
    )
    assert "pkg" not in sys.modules
    monkeypatch.setenv("PYTHON_EXEC", "/bin/true")
    assert cli.main(["launch", "--preload", "nosuch_zz", "s.py"]) == 7
    assert capsys.readouterr().err == ""


def test_modules_are_found_without_importing_anything(launched: list[LaunchOptions]) -> None:
    before = set(sys.modules)
    assert launch_checks.module_exists("pkg.mod")
    assert launch_checks.module_exists("rsup.launcher.cli")
    assert not launch_checks.module_exists("pkg.mod.deeper")
    assert "pkg" not in set(sys.modules) - before


def test_a_package_that_sets_its_own_path_is_trusted(launched: list[LaunchOptions]) -> None:
    Path("pkg/__init__.py").write_text("__path__ = ['elsewhere']\n")
    assert launch_checks.module_exists("pkg.anything")


def test_another_interpreter_has_other_modules(launched: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/bin/true")
    assert cli.main(["launch", "-m", "only_there"]) == 7


@pytest.mark.parametrize("words", [["launch", "--nnodes", "0", "x"], ["lanch"], ["--nnodes", "1"], ["launch", "nope.py"]])
def test_real_processes_exit_with_2_and_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "rsup.launcher", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stdout == ""
