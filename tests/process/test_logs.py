"""What ranks print arrives, and nothing that takes it ever holds up a rank."""

import contextlib
import io
import os
import pty
import re
import resource
import select
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.launcher.logs import LogDirError, LogOptions, LogPump, RankPipes, parse_streams
from rsup.supervisor.wire import UsageError

IS_ROOT = os.getuid() == 0


class Consoles:
    """Two consoles that are files, to read back."""

    def __init__(self, folder: Path) -> None:
        self._files = [(folder / name).open("w+") for name in ("console-out", "console-err")]
        self.out, self.err = self._files

    def text(self) -> tuple[str, str]:
        return Path(self.out.name).read_text(errors="replace"), Path(self.err.name).read_text(errors="replace")

    def close(self) -> None:
        for file in self._files:
            file.close()


@pytest.fixture
def consoles(tmp_path: Path) -> Iterator[Consoles]:
    consoles = Consoles(tmp_path)
    yield consoles
    consoles.close()


@contextlib.contextmanager
def pump(options: LogOptions, consoles: Consoles, num_local_ranks: int = 2) -> Iterator[LogPump]:
    logs = LogPump(options, num_local_ranks, stdout=consoles.out, stderr=consoles.err)
    try:
        yield logs
    finally:
        logs.close()


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "condition not met in time"
        time.sleep(0.01)


def notes_of(logs: LogPump) -> list[str]:
    """Its notes, once there are some. (What failed is counted before it is said.)"""
    notes: list[str] = []

    def look() -> bool:
        notes.extend(logs.take_notes())
        return bool(notes)

    wait_for(look)
    return notes


def run_rank(logs: LogPump, local_rank: int, script: str, attempt: int = 1) -> subprocess.Popen[bytes]:
    pipes = logs.open_rank(attempt, local_rank, local_rank)
    rank = start(pipes, script)
    pipes.close_writer_ends()
    return rank


def start(pipes: RankPipes, script: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import os, sys, time, subprocess\n" + script]
    return subprocess.Popen(command, stdout=pipes.stdout_fd, stderr=pipes.stderr_fd)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("3", 3), ("0:3,1:1", {0: 3, 1: 1}), ("10:3", {10: 3}), ("0-2:3,1:0", {0: 3, 1: 0, 2: 3})],
)
def test_streams_are_chosen_as_in_torchrun_and_beyond(text: str, expected: object) -> None:
    assert parse_streams(text) == expected


@pytest.mark.parametrize("text", ["4", "", "x", "0:4", "0:", "3-1:1", "0:1;1:1", "0-999999999:1"])
def test_a_bad_choice_of_streams_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_streams(text)


def test_by_default_all_is_shown_without_prefix(tmp_path: Path, consoles: Consoles) -> None:
    with pump(LogOptions(str(tmp_path / "logs")), consoles) as logs:
        ranks = [run_rank(logs, i, f"print('out {i}'); print('err {i}', file=sys.stderr)") for i in range(2)]
        assert [rank.wait(60) for rank in ranks] == [0, 0]
        assert logs.drain(1, 60)
        assert logs.tail(1) == "err 1" and logs.tail(1, "stdout") == "out 1"
        out, err = consoles.text()
        assert sorted(out.splitlines()) == ["out 0", "out 1"] and sorted(err.splitlines()) == ["err 0", "err 1"]
        assert logs.run_dir is not None
        assert not list(logs.run_dir.rglob("*.log"))


def test_redirect_tee_filter_and_tree(tmp_path: Path, consoles: Consoles) -> None:
    options = LogOptions(
        str(tmp_path / "logs"), run_id="a/b", redirects={0: 3}, tee={1: 1, 2: 3}, local_ranks_filter=frozenset({0, 1}),
        role="trainer", duplicate_stdout_filters=("loss",),
    )  # fmt: skip
    with pump(options, consoles, 3) as logs:
        script = "print('loss 1'); print('other'); print('err', file=sys.stderr)"
        ranks = [run_rank(logs, i, script, attempt=2) for i in range(3)]
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
        assert logs.drain(2, 60)
        out, err = consoles.text()
        assert out == "[trainer1]:loss 1\n[trainer1]:other\n"
        assert err == "err\n"
        assert logs.run_dir is not None
        assert re.fullmatch(r"a_b_.{8}", logs.run_dir.name)
        found = {str(path.relative_to(logs.run_dir)): path.read_text() for path in logs.run_dir.rglob("*.log")}
        printed = "loss 1\nother\n"
        assert found == {
            "attempt_1/0/stdout.log": printed,
            "attempt_1/0/stderr.log": "err\n",
            "attempt_1/1/stdout.log": printed,
            "attempt_1/2/stdout.log": printed,
            "attempt_1/2/stderr.log": "err\n",
            "attempt_1/filtered_stdout.log": "[trainer1]:loss 1\n",
        }


def test_prefix_template(tmp_path: Path, consoles: Consoles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}-${rank}-${local_rank}-${other}] ")
    with pump(LogOptions(str(tmp_path / "logs"), tee=3), consoles) as logs:
        pipes = logs.open_rank(1, 1, 9)
        os.write(pipes.stdout_fd, b"a\r50%\r\nb\n")
        pipes.close_writer_ends()
        assert logs.drain(1, 60)
        assert consoles.text()[0] == "[default-9-1-${other}] a\n50%\n[default-9-1-${other}] b\n"  # \r as read in text mode


def test_lines_are_whole_and_an_open_line_is_nobody_elses(
    tmp_path: Path, consoles: Consoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pump(LogOptions(str(tmp_path / "logs")), consoles) as logs:
        first, second = logs.open_rank(1, 0, 0), logs.open_rank(1, 1, 1)
        with monkeypatch.context() as patient:
            patient.setattr("rsup.launcher.logs.PARTIAL_AFTER_S", 60.0)
            os.write(first.stdout_fd, b"half a ")
            os.write(second.stdout_fd, b"whole\n")
            wait_for(lambda: "whole" in consoles.text()[0])
        os.write(first.stdout_fd, b"line\nprogress 10%")
        wait_for(lambda: "10%" in consoles.text()[0])  # shown after a moment without a newline
        os.write(first.stdout_fd, b" 20%")
        wait_for(lambda: "20%" in consoles.text()[0])
        os.write(second.stdout_fd, b"between\n")
        wait_for(lambda: "between" in consoles.text()[0])
        first.close_writer_ends()
        second.close_writer_ends()
        assert logs.drain(1, 60)
        assert consoles.text()[0] == "whole\nhalf a line\nprogress 10% 20% [...]\nbetween\n"


def test_binary_passes_through(tmp_path: Path, consoles: Consoles) -> None:
    data = bytes(range(256)) * 10
    with pump(LogOptions(str(tmp_path / "logs"), tee=1), consoles) as logs:
        rank = run_rank(logs, 0, "sys.stdout.buffer.write(bytes(range(256)) * 10)")
        assert rank.wait(60) == 0 and logs.drain(1, 60)
        assert logs.run_dir is not None
        assert (logs.run_dir / "attempt_0/0/stdout.log").read_bytes() == data
        assert isinstance(logs.tail(0, "stdout"), str)


def test_twenty_megabytes_without_a_newline(tmp_path: Path, consoles: Consoles) -> None:
    with pump(LogOptions(str(tmp_path / "logs"), tee=1), consoles) as logs:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ranks = [run_rank(logs, i, "sys.stdout.write('x' * 20_000_000)") for i in range(2)]
        assert [rank.wait(60) for rank in ranks] == [0, 0] and logs.drain(1, 60)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024
        assert logs.run_dir is not None and logs.lost_bytes == 0
        for rank in range(2):
            assert (logs.run_dir / f"attempt_0/{rank}/stdout.log").stat().st_size == 20_000_000
        assert consoles.text()[0].count("x") == 40_000_000
        assert len(logs.tail(0, "stdout")) == 16 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if not IS_ROOT or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder]).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_log_disk_costs_bytes_and_no_training(small_disk: Path, consoles: Consoles) -> None:
    with pump(LogOptions(str(small_disk), redirects=1), consoles) as logs:
        rank = run_rank(logs, 0, "for i in range(20000): print('x' * 99)\nprint('done', file=sys.stderr)")
        assert rank.wait(60) == 0
        assert logs.drain(1, 60)
        kept = sum(path.stat().st_size for path in small_disk.rglob("stdout.log"))
        assert kept + logs.lost_bytes == 2_000_000 and logs.lost_bytes > 1_000_000
        (note,) = notes_of(logs)
        assert "No space left on device" in note and str(small_disk) in note
        assert logs.take_notes() == []
        wait_for(lambda: note in consoles.text()[1])
        assert consoles.text()[1].count("No space left") == 1
        pipes = logs.open_rank(2, 0, 0)  # the next attempt starts all the same
        pipes.close_writer_ends()


def test_a_closed_console_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs"), tee=1), 1, stdout=closed, stderr=err)
        rank = run_rank(logs, 0, "for i in range(10000): print('x' * 99)")
        assert rank.wait(60) == 0 and logs.drain(1, 60)
        assert logs.run_dir is not None
        assert (logs.run_dir / "attempt_0/0/stdout.log").stat().st_size == 1_000_000
        assert logs.lost_bytes >= 1_000_000
        (note,) = notes_of(logs)
        assert "stdout" in note and "Broken pipe" in note
        logs.close()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.launcher.logs.CONSOLE_PATIENCE_S", 0.3)


def lines(num_lines: int, first: int = 0) -> str:
    return f"for i in range({first}, {first + num_lines}): print(f'{{i:099}}')"


@pytest.mark.usefixtures("short_patience")
def test_a_console_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stuck, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs"), tee=1), 1, stdout=stuck, stderr=err)
        rank = run_rank(logs, 0, lines(200_000))
        assert rank.wait(60) == 0
        assert not logs.drain(1, 0.5)
        assert logs.run_dir is not None
        file = logs.run_dir / "attempt_0/0/stdout.log"
        wait_for(lambda: file.stat().st_size == 20_000_000)
        assert logs.lost_bytes > 5_000_000
        assert len(logs.take_notes()) == 1
        started = time.monotonic()
        logs.close(patience_s=0.5)
        assert time.monotonic() - started < 20, "less than the patience that it has by itself"
        os.set_blocking(reader, False)
        size_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reader, 1 << 20):
                size_bytes += len(data)
        prefixes = 200_000 * len("[default0]:")
        assert size_bytes + logs.lost_bytes == 20_000_000 + prefixes
        assert f"rsup: {logs.lost_bytes} bytes of output to stdout were lost" in (tmp_path / "err").read_text().splitlines()
        os.close(reader)


def test_a_full_buffer_slows_ranks_down_until_the_reader_comes(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as late, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs")), 2, stdout=late, stderr=err)
        rank = run_rank(logs, 0, lines(120_000))
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(2)
        started = time.monotonic()
        logs.say("our own lines do not wait")
        assert time.monotonic() - started < 20, "less than a full console is waited for"
        wait_for(lambda: "do not wait" in (tmp_path / "err").read_text())
        counter = subprocess.Popen(["wc", "-lc"], stdin=reader, stdout=subprocess.PIPE)
        os.close(reader)
        assert rank.wait(60) == 0
        logs.close()
        assert logs.lost_bytes == 0
    assert counter.communicate(timeout=60)[0].split() == [b"120000", b"12000000"]


def test_at_the_end_a_late_reader_gets_everything(tmp_path: Path) -> None:
    script = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n{SLOW_READER}"
    reader = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    with open(os.dup(reader.stdin.fileno()), "w") as slow, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs")), 2, stdout=slow, stderr=err)
        rank = run_rank(logs, 0, lines(10_000))
        assert rank.wait(60) == 0 and not logs.drain(1, 0.1)
        threading.Timer(2.0, (tmp_path / "go").touch).start()
        logs.close()
        assert logs.lost_bytes == 0 and logs.take_notes() == []
    assert reader.communicate(timeout=60)[0].strip() == b"1000000"


@pytest.mark.parametrize("why", ["the reader goes", "told to stop"])
def test_the_end_is_not_waited_for_without_reason(tmp_path: Path, why: str) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stuck, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs")), 2, stdout=stuck, stderr=err)
        assert run_rank(logs, 0, lines(10_000)).wait(60) == 0
        assert not logs.drain(1, 0.1)
        started = time.monotonic()
        if why == "the reader goes":
            threading.Timer(0.3, os.close, (reader,)).start()
            logs.close()
        else:
            logs.close(is_told=lambda: True)
            os.close(reader)
        assert time.monotonic() - started < 20
        said = (tmp_path / "err").read_text()
        assert logs.lost_bytes > 500_000
        assert f"rsup: {logs.lost_bytes} bytes of output to stdout were lost\n" in said
        assert ("Broken pipe" in said) is (why == "the reader goes")


def test_told_to_stop_while_a_full_console_slows_the_ranks_down(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stuck, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs"), tee=1), 2, stdout=stuck, stderr=err)
        rank = run_rank(logs, 0, lines(100_000))
        wait_for(lambda: sum(path.stat().st_size for path in tmp_path.rglob("stdout.log")) > 7_000_000)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.5)
        rank.kill()
        rank.wait(60)
        started = time.monotonic()
        logs.close(is_told=lambda: True)
        assert time.monotonic() - started < 20
        os.close(reader)
    assert f"rsup: {logs.lost_bytes} bytes of output to stdout were lost\n" in (tmp_path / "err").read_text()
    assert logs.lost_bytes > 5_000_000


def test_a_stopped_terminal_loses_nothing(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    tty.setraw(side)
    with open(side, "w") as screen:
        logs = LogPump(LogOptions(str(tmp_path / "logs")), 2, stdout=screen, stderr=screen)
        assert run_rank(logs, 0, lines(2000)).wait(60) == 0
        assert not logs.drain(1, 0.1)
        closing = threading.Thread(target=logs.close)
        closing.start()
        text = read_terminal(terminal, lambda text: text.count("\n") == 2000)
        closing.join(60)
        assert not closing.is_alive() and logs.lost_bytes == 0
        assert text.splitlines() == [f"{i:099}" for i in range(2000)]
    os.close(terminal)


def read_terminal(fd: int, until: Callable[[str], bool]) -> str:
    data, give_up = b"", time.monotonic() + 60
    while not until(data.decode(errors="replace")):
        assert select.select([fd], [], [], max(0.0, give_up - time.monotonic()))[0], data[-2000:]
        data += os.read(fd, 65536)
    return data.decode()


def test_progress_bars_of_two_ranks_share_a_line_of_the_terminal(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    tty.setraw(side)
    with open(side, "w") as screen:
        logs = LogPump(LogOptions(str(tmp_path / "logs"), redirects=2, tee=2), 2, stdout=screen, stderr=screen)
        first, second = logs.open_rank(1, 0, 0), logs.open_rank(1, 1, 1)
        seen = ""
        for i in range(3):
            for pipes, name in ((first, "a"), (second, "b")):
                os.write(pipes.stderr_fd, f"\r{name} {i}%".encode())
                seen += read_terminal(terminal, lambda text, end=f"{name} {i}%": text.endswith(end))  # type: ignore[misc]
        assert "\n" not in seen and "[...]" not in seen and seen.count("\r") >= 6
        os.write(first.stdout_fd, b"epoch 1\n")
        assert read_terminal(terminal, lambda text: text.endswith("1\n")) == "\nepoch 1\n"
        first.close_writer_ends()
        second.close_writer_ends()
        assert logs.drain(1, 60)
        assert logs.run_dir is not None
        assert (logs.run_dir / "attempt_0/1/stderr.log").read_bytes() == b"\rb 0%\rb 1%\rb 2%"
        logs.close()
    os.close(terminal)


def test_a_bar_of_one_rank_stays_on_its_line(tmp_path: Path, consoles: Consoles) -> None:
    with pump(LogOptions(str(tmp_path / "logs")), consoles) as logs:
        pipes = logs.open_rank(1, 0, 0)
        for text in ("10%\r", "20%\r", "30%\r"):  # the other way to draw one
            os.write(pipes.stdout_fd, text.encode())
            wait_for(lambda text=text: text.encode() in Path(consoles.out.name).read_bytes())  # type: ignore[misc]
        os.write(pipes.stdout_fd, b"done\n")
        pipes.close_writer_ends()
        assert logs.drain(1, 60)
        assert Path(consoles.out.name).read_bytes() == b"10%\r20%\r30%\rdone\n"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "é日"), ("latin-1", "é\\u65e5"), ("ascii", "\\xe9\\u65e5")])
def test_our_lines_are_escaped_only_where_the_console_cannot_hold_them(tmp_path: Path, encoding: str, shown: str) -> None:
    with open(tmp_path / "err", "w", encoding=encoding) as err:
        logs = LogPump(LogOptions("/dev/null"), 1, stdout=err, stderr=err)
        logs.say("é日")
        logs.close()
    assert (tmp_path / "err").read_text(encoding=encoding) == shown + "\n"


SLOW_READER = """
import sys, time
size = 0
while data := sys.stdin.buffer.raw.read(65536):
    size += len(data)
    time.sleep(0.001)
print(size)
"""


def test_a_slow_console_that_is_read_loses_nothing(tmp_path: Path) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", SLOW_READER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert reader.stdin is not None
    with open(os.dup(reader.stdin.fileno()), "w") as slow, open(tmp_path / "err", "w+") as err:
        logs = LogPump(LogOptions(str(tmp_path / "logs")), 2, stdout=slow, stderr=err)
        rank = run_rank(logs, 0, "for i in range(300000): print('x' * 99)")
        assert rank.wait(60) == 0 and logs.drain(1, 60)
        assert logs.lost_bytes == 0
        logs.close()
    assert reader.communicate(timeout=60)[0].strip() == b"30000000"


def test_a_stray_process_that_holds_the_pipe_does_not_hold_up_the_drain(tmp_path: Path, consoles: Consoles) -> None:
    with pump(LogOptions(str(tmp_path / "logs")), consoles) as logs:
        rank = run_rank(logs, 0, "print('last words'); p = subprocess.Popen(['sleep', '600']); print(p.pid)")
        assert rank.wait(60) == 0
        started = time.monotonic()
        assert not logs.drain(1, 0.3)
        assert time.monotonic() - started < 20
        wait_for(lambda: consoles.text()[0].count("\n") == 2)  # by then it has been taken, not shown
        text = consoles.text()[0]
        assert text.startswith("last words\n")
        os.kill(int(text.split()[-1]), 9)


def test_the_tail_has_what_a_rank_said_last(tmp_path: Path, consoles: Consoles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.launcher.logs.READ_WITHIN_S", 60.0)
    with pump(LogOptions(str(tmp_path / "logs")), consoles) as logs:
        for attempt in range(1, 6):
            script = "for i in range(5000): print('line', i, file=sys.stderr)\nsys.stderr.write('the end'); os._exit(1)"
            assert run_rank(logs, 0, script, attempt).wait(60) == 1
            lines = logs.tail(0).splitlines()
            assert lines[-2:] == ["line 4999", "the end"] and len(lines) == 40
            assert logs.drain(attempt, 60)


def test_a_log_directory_that_cannot_be_written(tmp_path: Path, consoles: Consoles) -> None:
    (tmp_path / "file").touch()
    for path in ("/proc/nope", str(tmp_path / "file")):
        with pytest.raises(LogDirError) as error:
            LogPump(LogOptions(path), 1, stdout=consoles.out, stderr=consoles.err)
        assert path in str(error.value) and error.value.exit_code == 2 and "\n" not in str(error.value)


def test_no_files_with_dev_null(consoles: Consoles) -> None:
    with pump(LogOptions("/dev/null", redirects=3, tee={1: 1}), consoles) as logs:
        pipes = logs.open_rank(1, 0, 0)
        assert logs.run_dir is None and pipes.error_file is None
        os.write(pipes.stdout_fd, b"shown\n")
        pipes.close_writer_ends()
        assert logs.drain(1, 60) and consoles.text()[0] == "shown\n"


@pytest.mark.parametrize(("success", "tee", "kept"), [(True, 0, False), (False, 0, True), (True, 1, True)])
def test_a_temporary_directory_of_ours_goes_after_success(
    tmp_path: Path, consoles: Consoles, monkeypatch: pytest.MonkeyPatch, success: bool, tee: int, kept: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = LogPump(LogOptions(tee=tee), 1, stdout=consoles.out, stderr=consoles.err)
    pipes = logs.open_rank(1, 0, 0)
    pipes.close_writer_ends()
    assert logs.run_dir is not None and logs.run_dir.parent == tmp_path
    assert (logs.temporary_dir is None) is bool(tee)
    assert pipes.error_file is not None
    pipes.error_file.write_text("{}")
    logs.close(success=success)
    assert logs.run_dir.exists() is kept


def test_a_temporary_directory_without_an_error_file_goes_also_after_failure(
    tmp_path: Path, consoles: Consoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = LogPump(LogOptions(), 1, stdout=consoles.out, stderr=consoles.err)
    logs.open_rank(1, 0, 0).close_writer_ends()
    logs.close(success=False)
    assert not list(tmp_path.glob("rsup-*"))


def test_a_single_rank_keeps_the_terminal(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    with open(side, "w") as screen, open(tmp_path / "err", "w+") as err:
        for options, ranks, kept in ((LogOptions(), 1, True), (LogOptions(), 2, False), (LogOptions(tee=1), 1, False)):
            logs = LogPump(options, ranks, stdout=screen, stderr=err)
            pipes = logs.open_rank(1, 0, 0)
            assert (os.isatty(pipes.stdout_fd), os.isatty(pipes.stderr_fd), pipes.passthrough) == (kept, False, False)
            assert logs.resize() == kept
            pipes.close_writer_ends()
            logs.close(success=True)
    os.close(terminal)


def test_a_replaced_stdout_gets_text(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as captured:
        logs = LogPump(LogOptions(str(tmp_path / "logs"), redirects=3, tee=3), 1)
        rank = run_rank(logs, 0, "print('creating something')")
        assert rank.wait(60) == 0 and logs.drain(1, 60)
        logs.close()
    assert captured.getvalue() == "[default0]:creating something\n"
