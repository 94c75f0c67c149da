"""torchrun's command line: the table against the parser of the installed torch, and both on the same words."""

import argparse
import signal
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from rsup.launcher import device_count
from rsup.launcher.command_line import read_command_line
from rsup.launcher.launch_options import LaunchOptions, job_spec, rank_command
from rsup.launcher.launch_parser import ALL_OPTIONS, parse_launch
from rsup.launcher.option_table import TORCHRUN, Option, OptionIndex
from rsup.launcher.option_values import OptionValues
from rsup.launcher.torchrun_options import TORCHRUN_OPTIONS
from rsup.supervisor.wire import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch imports pynvml, whose old package only forwards to nvidia-ml-py
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

INDEX = OptionIndex(ALL_OPTIONS)
ACTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


def parse(words: str, **environ: str) -> LaunchOptions:
    return parse_launch(words.split(), environ)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_each_flag_of_the_installed_torchrun_is_ours_with_its_default(action: argparse.Action) -> None:
    for flag in action.option_strings:
        option = INDEX.exact(flag)
        assert option is not None and option.group == TORCHRUN, flag
        assert option.dest == action.dest
        assert option.is_switch == (action.nargs == 0)
        assert option.choices == tuple(action.choices or ())
        assert option.env == ("PET_" + action.dest.upper() if isinstance(action, env | check_env) else "")
        default = {False: "0", None: None}.get(action.default, action.default) if action.default != [] else ""
        assert option.default == (default if default is None else str(default))


def test_we_invent_no_flag_of_torchrun() -> None:
    assert {option.dest for option in TORCHRUN_OPTIONS} == {action.dest for action in ACTIONS}


@pytest.mark.parametrize(
    "words",
    [
        "s.py",
        "s.py --foo 1",
        "--nnodes 2 --nproc_per_node=4 s.py",
        "--nnodes=1:4 --rdzv_endpoint host:1 --rdzv-backend c10d s.py a b",
        "--redirect=3 s.py",
        "--tee 3 -r 0:1,1:2 s.py",
        "-t3 -r=1 s.py",
        "-m pkg.mod -q -m",
        "--max-r 3 --monitor-i 5 --role trainer s.py",
        "--rdzv_id a/b --standal s.py",
        "--rdzv-conf timeout=3 --log-dir /tmp/x s.py",
        "--no_python ./prog -x --no-python",
        "--run-path /abs/s.py",
        "--node_rank 1 --master_addr 10.0.0.1 --master-port 1234 --local-addr h s.py",
        "--duplicate-stdout-filters a,b --local-ranks-filter 0,1 s.py",
        "--numa-binding node --virtual-local-rank --shutdown-timeout 5 s.py",
        "--signals-to-handle SIGTERM --start-method fork --event-log-handler console --logs-specs x s.py",
        "-- s.py --foo",
        "--nproc-per-node -1 s.py",
        "-mr3 pkg.mod",
    ],
)
def test_both_parsers_understand_the_same(words: str) -> None:
    theirs = vars(get_args_parser().parse_args(words.split()))
    line = read_command_line(words.split(), INDEX)
    values = OptionValues(INDEX, line.settings)
    assert line.command == (theirs["training_script"], *theirs["training_script_args"])
    for action in ACTIONS:
        ours, expected = values.maybe_text(action.dest), theirs[action.dest]
        if isinstance(expected, bool):
            assert values.switch(action.dest) == expected
        elif isinstance(expected, list):
            assert ours == ",".join(expected)
        elif isinstance(expected, float):
            assert ours is not None and float(ours) == expected
        else:
            assert ours == (None if expected is None else str(expected)), action.dest


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("s.py --r=16", ["s.py", "--r=16"]),
        ("s.py --log x", ["s.py", "--log", "x"]),
        ("--nproc 1 s.py --nproc 9 --debug --ft-cfg-path nope", ["s.py", "--nproc", "9", "--debug", "--ft-cfg-path", "nope"]),
        ("s.py -- --foo", ["s.py", "--", "--foo"]),
        ("-- s.py -- --foo", ["s.py", "--", "--foo"]),
        ("s.py a$$b ${local_rank} $HOME", ["s.py", "a$$b", "${local_rank}", "$HOME"]),
        ("s.py --help", ["s.py", "--help"]),
        ("-m mod -q", ["mod", "-q"]),
    ],
)
def test_what_stands_right_of_the_script_is_the_scripts(words: str, command: list[str]) -> None:
    options = parse(words)
    assert [options.training_script, *options.training_script_args] == command


@pytest.mark.parametrize(
    ("flag", "value", "default"),
    [
        ("--monitor-interval", "5", "0.1"),
        ("--start-method", "fork", "spawn"),
    ],
)
def test_what_has_no_effect_says_so_in_a_line(flag: str, value: str, default: str | None) -> None:
    (note,) = parse(f"{flag} {value} s.py").notes
    assert note.startswith(f"{flag} has no effect: ")
    assert default is None or parse(f"{flag} {default} s.py").notes == ()


def test_arguments_keep_spaces_newlines_and_emptiness() -> None:
    words = ["--nproc-per-node", "1", "s.py", "", "a b", "x\ny", "--", "\udcff"]
    assert parse_launch(words, {}).training_script_args == ("", "a b", "x\ny", "--", "\udcff")


@pytest.mark.parametrize(
    ("words", "tail"),
    [
        ("s.py a", ["-u", "s.py", "a"]),
        ("-m pkg.mod a", ["-u", "-m", "pkg.mod", "a"]),
        ("--no-python prog a", ["prog", "a"]),
    ],
)
def test_rank_command(words: str, tail: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    expected = tail if "--no-python" in words else ["/opt/python", *tail]
    assert rank_command(parse(words)) == expected


def test_run_path_runs_the_script_and_wins_over_no_python(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    command = rank_command(parse_launch(["--run-path", "--no-python", str(script), "a", "--b"], {}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "__main__ ['a', '--b']"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("1:1", (1, 1))],
)
def test_nnodes(text: str, expected: tuple[int, int]) -> None:
    options = parse(f"--nnodes {text} --rdzv-endpoint h:1 s.py")
    assert (options.min_nodes, options.max_nodes) == expected


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        ("0", 2, (0, 0)),
        ("3", 2, (3, 3)),
        ("0:3,1:1", 2, (3, 1)),
        ("0-7:3", 8, (3,) * 8),
        ("10:3", 12, (0,) * 10 + (3, 0)),
        ("1:2", 3, (0, 2, 0)),
        ("0-2:1,1:3", 3, (1, 3, 1)),
    ],
)
def test_streams(text: str, num_ranks: int, expected: tuple[int, ...]) -> None:
    assert parse(f"--nproc-per-node {num_ranks} -r {text} s.py").redirects == expected
    assert parse(f"--nproc-per-node {num_ranks} --tee {text} s.py").tee == expected


def test_streams_of_ranks_that_are_not_there_get_a_note() -> None:
    assert parse("--nproc-per-node 2 -r 10:3 s.py").notes == ("--redirects names local rank 10, but there are only 0 to 1",)


def test_a_filter_of_ranks_that_are_not_there_gets_a_note() -> None:
    (note,) = parse("--ranks-filter 5 s.py").notes
    assert note == "--ranks-filter names rank 5, but there is only rank 0: no rank's output is shown"
    assert parse("--nproc-per-node 2 --ranks-filter 1,7-8 s.py").notes == (
        "--ranks-filter names rank 7, but there are only 0 to 1",
    )
    assert parse("--nnodes 2 --rdzv-endpoint h:5 --ranks-filter 5 s.py").notes == ()
    assert parse("--log-prefix $$[${host}:$rank]$ s.py").log_prefix == "$$[${host}:$rank]$"


def test_rdzv_conf_adds_up_and_quotes_do_not_matter() -> None:
    options = parse_launch(["--rdzv-conf", "'timeout=3", "--rdzv-conf", "join_timeout=7,last_call_timeout=2'", "s.py"], {})
    assert options.rdzv_conf == {"timeout": "3", "join_timeout": "7", "last_call_timeout": "2"}
    assert (options.join_timeout, options.last_call) == (7, 2)
    assert parse("--rdzv-conf join_timeout=7 --join-timeout 9 s.py").join_timeout == 9
    assert parse("--rdzv-conf timeout=1,timeout=2 s.py").rdzv_conf == {"timeout": "2"}


@pytest.mark.parametrize(
    ("words", "endpoint", "master_port"),
    [
        ("--nnodes 1 s.py", "", 0),
        ("--master-port 1234 s.py", "", 1234),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 s.py", "", 0),
        ("--nnodes 2 --rdzv-endpoint h:5 s.py", "h:5", 0),
        ("--nnodes 2 --rdzv-endpoint h s.py", "h:29400", 0),
        ("--nnodes 2 --rdzv-endpoint [::1]:5 s.py", "[::1]:5", 0),
        ("--nnodes 2 --rdzv-endpoint h:5 --master-port 7 s.py", "h:5", 7),
        ("--nnodes 2 --rdzv-endpoint h:5 --master-port 5 s.py", "h:5", 0),
        ("--nnodes 2 --master-addr h s.py", "h:29500", 0),
        ("--nnodes 2 --master-addr h --master-port 7 s.py", "h:7", 0),
        ("--nnodes 2 --master-addr [::1] --master-port 7 s.py", "[::1]:7", 0),
        ("--nnodes 2 --master-port 7 s.py", "127.0.0.1:7", 0),
        ("--nnodes 2 --supervisor h:9 --rdzv-id a s.py", "", 0),
        ("--nnodes 2 --supervisor h:9 --job-id a s.py", "", 0),
        ("--standalone --rdzv-endpoint h:5 s.py", "", 0),
    ],
)
def test_where_the_nodes_meet(words: str, endpoint: str, master_port: int) -> None:
    options = parse(words)
    assert (options.rdzv_endpoint, options.master_port) == (endpoint, master_port)
    assert job_spec(options, "me").master_port == master_port


@pytest.mark.parametrize(
    ("words", "environ", "node_rank"),
    [
        ("--nnodes 2 --rdzv-endpoint h:5 s.py", {}, -1),
        ("--nnodes 2 --rdzv-endpoint h:5 --node-rank 0 s.py", {}, 0),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:5 --node-rank 1 s.py", {}, 1),
        ("--nnodes 2 --rdzv-endpoint h:5 s.py", {"PET_NODE_RANK": "1"}, 1),
        ("--nnodes 2 --rdzv-endpoint h:5 s.py", {"SLURM_NODEID": "1"}, -1),
        (
            "--nnodes 2 --rdzv-endpoint h:5 s.py",
            {"SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
            1,
        ),
        (
            "--nnodes 2 --rdzv-endpoint h:5 s.py",
            {"SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"},
            -1,
        ),
        ("s.py", {"SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, -1),
    ],
)
def test_node_rank_is_the_users_or_slurms(words: str, environ: dict[str, str], node_rank: int) -> None:
    assert parse_launch(words.split(), environ).node_rank == node_rank


def test_pet_variables_are_below_the_command_line() -> None:
    environ = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "3",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_MAX_RESTARTS": "4",
        "PET_RDZV_ID": "",
        "PET_DUPLICATE_STDOUT_FILTERS": "a,b,,c",
    }
    options = parse_launch(["--max-restarts", "5", "s.py"], environ)
    assert (options.max_nodes, options.nproc_per_node, options.node_rank, options.max_restarts) == (2, 3, 1, 5)
    assert (options.rdzv_endpoint, options.rdzv_id) == ("job-master-0:23456", "none")
    assert options.duplicate_stdout_filters == ("a", "b,c")


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False), ("", False)]
)
def test_pet_switches(value: str, expected: bool) -> None:
    assert parse("s.py", PET_STANDALONE=value).standalone is expected
    assert parse("m", PET_MODULE=value).module is expected
    assert parse("--standalone s.py", PET_STANDALONE="0").standalone


SAMPLES = {
    "nnodes": "2:4",
    "nproc_per_node": "3",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "h:5",
    "rdzv_id": "a/b",
    "rdzv_conf": "timeout=3",
    "max_restarts": "4",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "/tmp/logs",
    "redirects": "0:3",
    "tee": "3",
    "local_ranks_filter": "0",
    "duplicate_stdout_filters": "a,b",
    "duplicate_stderr_filters": "c",
    "node_rank": "1",
    "master_addr": "h",
    "master_port": "1234",
    "local_addr": "h",
    "signals_to_handle": "SIGTERM",
    "shutdown_timeout": "5",
}


BESIDE = {
    "nnodes": "--rdzv-endpoint=h:5",
    "node_rank": "--nnodes=2 --rdzv-endpoint=h:5",
    "rdzv_endpoint": "--nnodes=2 --supervisor=h:9 --rdzv-id=a",
}
"""What else must be said for a sample to make sense, or a difference."""


@pytest.mark.parametrize("option", [option for option in TORCHRUN_OPTIONS if option.env], ids=lambda option: option.dest)
def test_a_variable_says_what_its_option_says(option: Option) -> None:
    words = f"{BESIDE.get(option.dest, '')} m"
    value = SAMPLES.get(option.dest, "")
    by_flag = parse(f"{option.flag}={value} {words}" if value else f"{option.flag} {words}")
    for spelling in [value] if value else ["1", "true"]:
        found = parse(words, **{option.env: spelling})
        assert replace(found, notes=()) == replace(by_flag, notes=()) and len(found.notes) == len(by_flag.notes)
    plain = parse(words, **{option.env: "" if value else "0"})
    assert plain == parse(words) and plain != by_flag


def test_signals() -> None:
    assert parse("s.py").signals_to_handle == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert parse("--signals-to-handle usr1,SIGTERM,SIGUSR1 s.py").signals_to_handle == (signal.SIGUSR1, signal.SIGTERM)


def test_graces() -> None:
    assert (parse("s.py").shutdown_timeout, parse("s.py").stop_grace) == (30, 30)
    from_variable = parse("s.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7")
    assert (from_variable.shutdown_timeout, from_variable.stop_grace) == (7, 7)
    both = parse("--shutdown-timeout 2 --stop-grace 3 s.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7")
    assert (both.shutdown_timeout, both.stop_grace) == (2, 3)
    theirs = parse("--term-timeout 5 --workers_stop_timeout 6 s.py")
    assert (theirs.shutdown_timeout, theirs.stop_grace) == (5, 6)


def test_devices_are_counted_for_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "_count_nvidia", lambda: 4)
    monkeypatch.setattr(device_count, "count_cpus", lambda: 64)
    assert parse("--nproc-per-node gpu s.py").nproc_per_node == 4
    assert parse("--nproc-per-node auto s.py", CUDA_VISIBLE_DEVICES="0,2").nproc_per_node == 2
    assert parse("--nproc-per-node cpu s.py").nproc_per_node == 64
    monkeypatch.setattr(device_count, "_count_nvidia", lambda: 0)
    monkeypatch.setattr(device_count, "_count_amd", lambda: 0)
    monkeypatch.setattr(device_count, "count_xpus", lambda: 0)
    assert parse("--nproc-per-node AUTO s.py").nproc_per_node == 64
    with pytest.raises(UsageError, match="no GPU is visible"):
        parse("--nproc-per-node gpu s.py")


def test_devices_that_a_package_adds_to_torch_are_counted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(script: str) -> list[str]:
        asked.append(script)
        return ["npu", "5"]

    for name in ("_count_nvidia", "_count_amd", "count_xpus"):
        monkeypatch.setattr(device_count, name, lambda: 0)
    monkeypatch.setattr(device_count, "_ask_torch", ask)
    with pytest.raises(UsageError, match="must be a number, or one of"):
        parse("--nproc-per-node npu s.py")
    assert parse("--nproc-per-node auto s.py").nproc_per_node == device_count.count_cpus()
    assert not asked
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ("npu",) if group == "torch.backends" else ())
    assert parse("--nproc-per-node npu s.py").nproc_per_node == 5
    assert parse("--nproc-per-node auto s.py").nproc_per_node == 5
    with pytest.raises(UsageError, match="must be a number, or one of"):
        parse("--nproc-per-node hpu s.py")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        ("3", 1),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("1,1", 0),
        ("-1", 0),
        ("GPU-aa,GPU-bb", 2),
        ("MIG-aa", 1),
    ],
)
def test_visible_devices(shown: str | None, expected: int) -> None:
    assert device_count.visible_devices(shown, 4) == expected


def test_run_id_may_hold_anything() -> None:
    assert parse("--rdzv-id a/b s.py").rdzv_id == "a/b"


def test_our_options_can_be_abbreviated_too() -> None:
    assert INDEX.find("--job").dest == "job_id"
    assert INDEX.find("--max").dest == "max_restarts"
    with pytest.raises(UsageError, match="ambiguous option --res: --resume or --restart"):
        INDEX.find("--res")


def _unique(prefix: str) -> bool:
    return len({action.dest for action in ACTIONS for flag in action.option_strings if flag.startswith(prefix)}) == 1


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_abbreviation_that_torchrun_takes_means_the_same_here(action: argparse.Action) -> None:
    flag = max(action.option_strings, key=len)
    for length in range(3, len(flag) + 1):
        prefix = flag[:length].replace("_", "-")
        if _unique(prefix) or prefix == action.dest:
            assert INDEX.find(prefix).dest == action.dest, prefix
