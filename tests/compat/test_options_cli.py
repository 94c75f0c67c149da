"""The command `rsup` itself: verbs, help, errors, and that it starts fast."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsup.launcher import cli, doctor
from rsup.launcher.option_table import Option, OptionIndex
from rsup.launcher.options_page import ALL_OPTIONS, help_text, page
from rsup.supervisor.wire import RELEASE, RsupError

ROOT = Path(__file__).parents[2]


class _Failed(RsupError):
    exit_code = 75


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb `probe` whose function the test sets as `.main`."""
    module = SimpleNamespace(main=None)
    monkeypatch.setitem(sys.modules, "rsup.probe", module)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.VERBS, "probe", cli.Verb("", "rsup.probe"))
    return module


def raising(error: BaseException) -> object:
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_the_page_is_what_the_tables_say() -> None:
    assert (ROOT / "docs/options.md").read_text() == page(), "run: make docs"


def test_help_names_every_option() -> None:
    text = help_text()
    for option in ALL_OPTIONS:
        assert option.flag in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("option", ALL_OPTIONS, ids=lambda option: option.dest)
def test_tables_are_sound(option: Option) -> None:
    assert option.meaning.endswith(".") and "|" not in option.meaning
    assert option.flag.startswith("--") and option.flag == option.flag.replace("_", "-")
    assert not option.is_switch or option.default == "0"
    assert option.default is None or not option.choices or option.default in option.choices
    assert OptionIndex(ALL_OPTIONS).exact("--" + option.dest) is option


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rsup {RELEASE}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.VERBS)
    assert cli.main(["launch", "--nnodes", "1", "--help"]) == 0
    assert "usage: rsup launch [OPTIONS] SCRIPT [ARGUMENTS]" in capsys.readouterr().out
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lanch"], "rsup: unknown command lanch: did you mean launch?; see rsup --help\n"),
        (["zzz\n"], "rsup: unknown command zzz ; see rsup --help\n"),
        (
            ["--nnodes", "2"],
            "rsup: unknown option --nnodes: options come after the command, as in rsup launch --nnodes 1; see rsup --help\n",
        ),
    ],
)
def test_unknown_words(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == line


def test_an_operating_error_is_one_line_and_its_exit_code(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main = raising(_Failed("no\nanswer"))
    assert cli.main(["probe"]) == 75
    assert capsys.readouterr().err == "rsup probe: no answer\n"


def test_debug_shows_the_traceback_and_keeps_the_code(
    verb: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb.main = raising(_Failed("no answer"))
    assert cli.main(["probe", "--debug"]) == 75
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("RSUP_DEBUG", "1")
    assert cli.main(["probe"]) == 75
    error = capsys.readouterr().err
    assert "Traceback" in error and error.endswith("rsup probe: no answer\n")


def test_debug_right_of_the_script_is_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "nope.py", "--debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(["launch", "--nnodes", "1", "--debug", "nope.py"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_and_1(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main = raising(KeyError("x"))
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_interrupted_is_130(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main = raising(KeyboardInterrupt())
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "rsup.launcher", "doctor"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


def test_verbs_are_given_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    module = SimpleNamespace(main=lambda name, argv: seen.append((name, argv)))
    monkeypatch.setitem(sys.modules, "rsup.supervisor.query_cli", module)  # type: ignore[arg-type]
    for name in ("jobs", "status", "events", "stacks", "stop", "checkpoint", "report"):
        assert cli.main([name, "t1", "--json"]) == 0
        assert seen.pop() == (name, ["t1", "--json"])


def test_help_starts_fast_and_light() -> None:
    script = "import sys; from rsup.launcher.cli import main; main(['launch', '--help']); print(*sys.modules)"
    times = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        after = os.times()  # of the processor: what else the machine does is no fault of ours
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "sqlalchemy", "fastapi", "yaml", "zmq", "psutil"} & set(loaded)
    assert min(times) < 1.0, f"{times}"


def test_doctor_has_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.CHECKS)
    assert all(line.split()[0] in ("ok", "warn") for line in lines)
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["subject"] for finding in findings] == [line[6:].partition(":")[0] for line in lines]
    assert cli.main(["doctor", "--jsno"]) == 2


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("RSUP_STATE_DIR", "/proc/nope")
    assert cli.main(["doctor"]) == 1
    assert "fail  state directory: /proc/nope cannot be written; set RSUP_STATE_DIR" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    assert doctor.check_stacks().remedy == "pip install py-spy"
    missing = doctor.check_shared_memory(tmp_path / "none")
    assert missing.state == "warn" and "--shm-size" in missing.remedy
    (tmp_path / "run").mkdir()
    os.chmod(tmp_path / "run", 0o755)
    (tmp_path / "run" / "rsup").mkdir(mode=0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert doctor.check_runtime_dir().state == "fail"


def test_doctor_reads_file_system_types() -> None:
    mounts = (
        "22 1 0:20 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:44 / /data rw,relatime shared:9 - nfs4 server:/data rw\n"
        "31 30 0:45 / /data/my\\040dir rw - tmpfs tmpfs rw\n"
    )
    assert doctor.file_system_type(Path("/usr"), mounts) == "ext4"
    assert doctor.file_system_type(Path("/data/me/state"), mounts) == "nfs4"
    assert doctor.file_system_type(Path("/data/my dir/x"), mounts) == "tmpfs"
    assert doctor.file_system_type(Path("/datas"), mounts) == "ext4"
    assert doctor.file_system_type(Path("/x"), "") == "unknown"
