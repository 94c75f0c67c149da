"""The report of a failed attempt, from facts alone."""

import json
from pathlib import Path

import pytest

from rsup.launcher.failure_report import MAX_REPORT_LINES, exit_text, failure_report, read_error_file, telling_line
from rsup.supervisor.wire import RankExited

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("loss is nan")
ValueError: loss is nan
"""


def exited(rank: int, at_us: int, exit_code: int = 1, **fields: object) -> RankExited:
    return RankExited(at_us=at_us, attempt=2, rank=rank, exit_code=exit_code, **fields)  # type: ignore[arg-type]


def test_the_first_mover_is_named_and_not_its_victims() -> None:
    exits = [
        exited(0, 10, error="RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3"),
        exited(3, 20, iteration=25, section="step", error="ValueError: loss is nan", log_tail=TRACEBACK),
        exited(1, 30, 143, signal=15, by_us="attempt 2 is stopped"),
        exited(2, 31, 143, signal=15, by_us="attempt 2 is stopped"),
        exited(4, 32, 0),
    ]
    lines = failure_report("t1", exits, reason="rank 3 failed").splitlines()
    assert lines[1] == "job t1 failed: rank 3 failed"
    assert lines[2] == "  first: rank 3, exit code 1 at iteration 25, in section step (attempt 2)"
    assert lines[3] == "  error: ValueError: loss is nan"
    assert "    | ValueError: loss is nan" in lines
    assert "  victims, ended by rsup or by the loss of a peer: ranks 0-2" in lines
    assert lines[-2].startswith("more: rsup report t1")


def test_another_failure_without_a_text_ends_the_line_after_its_code() -> None:
    text = failure_report("job", [exited(0, 1, 7), exited(1, 2, 7), exited(2, 3, 7, error="ValueError: x")])
    assert "  also failed: rank 1, exit code 7\n" in text
    assert "  also failed: rank 2, exit code 7: ValueError: x\n" in text


def test_it_is_plain_and_short() -> None:
    tail = "\x1b[31mrot\x1b[0m ü\tx\x07\n" * 500
    exits = [exited(rank, rank, error="Fehler: é日\nzweite", log_tail=tail) for rank in range(2000)]
    report = failure_report("t1", exits, num_tail_lines=400)
    assert len(report.splitlines()) <= MAX_REPORT_LINES
    assert "  error: Fehler: é日\n" in report and "    | rot ü    x\n" in report
    assert report.replace("\n", "").isprintable()
    assert "more: rsup report t1" in report
    assert all(len(line) <= 160 for line in report.splitlines())


def test_what_would_move_or_reorder_the_text_is_shown_escaped() -> None:
    assert telling_line("ValueError: a\u202eb\x9bc\udcff\u3000d\n") == "ValueError: a\\u202eb\\x9bc\\udcff d"


def test_nothing_failed() -> None:
    assert failure_report("t1", [exited(0, 1, 0)]) == ""
    assert "job t1 failed: no node came" in failure_report("t1", [], reason="no node came")


def test_exit_texts() -> None:
    assert exit_text(3, 0) == "exit code 3"
    assert exit_text(137, 9) == "SIGKILL (signal 9)"
    assert exit_text(128 + 39, 39) == "SIGRTMIN+5 (signal 39)"


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        (TRACEBACK + "some last words\n", "ValueError: loss is nan"),
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n", "[rank1]: torch.OutOfMemoryError: CUDA out of memory."),
        ("x: 3\nFatal Python error: Segmentation fault\n\nExtension modules: x\n", "Fatal Python error: Segmentation fault"),
        ("bye\n\n", "bye"),
        ("", ""),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_the_line_that_tells(tail: str, line: str) -> None:
    assert telling_line(tail) == line


def test_an_error_file_as_torch_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": TRACEBACK, "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "ValueError: loss is nan\nmore", "extraInfo": extra}}))
    error = read_error_file(path)
    assert error is not None
    assert (error.line, error.traceback, error.at_us) == ("ValueError: loss is nan", TRACEBACK, 1_700_000_000_000_000)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": null}', "[" * 100_000])
def test_an_error_file_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert read_error_file(tmp_path / "error.json") is None
    assert read_error_file(tmp_path / "missing.json") is None


def test_an_error_file_of_odd_content(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": {"message": "boom", "extraInfo": {"timestamp": "soon"}}}')
    error = read_error_file(path)
    assert error is not None and (error.line, error.at_us) == ("boom", 0)
    path.write_text('{"message": "plain text\\nsecond"}')
    error = read_error_file(path)
    assert error is not None and error.line == "plain text"


def test_a_warning_is_not_why_a_rank_failed() -> None:
    warning = "/usr/lib/torch/cuda/__init__.py:61: FutureWarning: pynvml is deprecated.\n  import pynvml  # type: ignore\n"
    assert telling_line(warning) == ""
    assert telling_line("loading data\n" + warning) == "loading data"
    assert telling_line("RuntimeError: no data\n" + warning) == "RuntimeError: no data"
