"""How lines look on the console, what is said where some are lost, and where the flight recorder's traces go."""

import errno
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rsup.launcher.log_lines import JsonLines
from rsup.launcher.log_options import LogOptions
from rsup.launcher.log_sinks import Sink
from rsup.launcher.logs import LogPump
from rsup.launcher.trace_files import VARIABLES, trace_environment


def printed(
    options: LogOptions, data: bytes, ranks: tuple[int, ...] = (0, 1), say: str = ""
) -> tuple[str, str, list[str], LogPump]:
    """What the console shows when each of these ranks prints `data` to stdout; and the notes."""
    out, err = io.StringIO(), io.StringIO()
    logs = LogPump(options, len(ranks), stdout=out, stderr=err)
    for local_rank, rank in enumerate(ranks):
        pipes = logs.open_rank(2, local_rank, rank)
        os.write(pipes.stdout_fd, data)
        pipes.close_writer_ends()
    assert logs.drain(2, 60)
    if say:
        logs.say(say)
    notes = logs.take_notes()
    logs.close(success=True)
    return out.getvalue(), err.getvalue(), notes, logs


def test_objects_hold_whole_lines_whatever_their_bytes() -> None:
    lines = JsonLines("h1", "stderr", rank=3, local_rank=1, attempt=2)
    objects = [json.loads(line) for line in lines.render(b'a "quoted"\n\xff\x00\n\n10%\r20%\rend').splitlines()]
    assert [o["text"] for o in objects] == ['a "quoted"', "\ufffd\x00", "10%", "20%", "end"]
    assert {(o["host"], o["rank"], o["local_rank"], o["attempt"], o["stream"]) for o in objects} == {("h1", 3, 1, 2, "stderr")}
    assert list(objects[0]) == ["time", "host", "rank", "local_rank", "attempt", "stream", "text"]
    assert objects[0]["time"].endswith("Z") and lines.ends_at(b"a\rb") == 2 and lines.ends_at(b"ab") == 0


def test_a_console_of_objects(tmp_path: Path) -> None:
    options = LogOptions(str(tmp_path / "logs"), tee=1, as_json=True)
    out, err, _, logs = printed(options, b"one\ntwo", ranks=(4, 5), say="rsup: a report\nof two lines")
    found = sorted((o["rank"], o["attempt"], o["text"]) for o in map(json.loads, out.splitlines()))
    assert found == [(4, 2, "one"), (4, 2, "two"), (5, 2, "one"), (5, 2, "two")]
    (own,) = map(json.loads, err.splitlines())
    assert (own["stream"], own["rank"], own["text"]) == ("rsup", None, "rsup: a report\nof two lines")
    assert logs.run_dir is not None
    assert (logs.run_dir / "attempt_1/0/stdout.log").read_bytes() == b"one\ntwo"


def test_an_unfinished_line_is_one_object(tmp_path: Path) -> None:
    out = io.StringIO()
    logs = LogPump(LogOptions(str(tmp_path), as_json=True), 2, stdout=out, stderr=out)
    pipes = logs.open_rank(1, 0, 0)
    os.write(pipes.stdout_fd, b"begun ")
    time.sleep(0.5)  # longer than a text console waits for the rest
    os.write(pipes.stdout_fd, b"and ended\n")
    pipes.close_writer_ends()
    assert logs.drain(1, 60)
    logs.close()
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["begun and ended"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (lambda d: LogOptions(d, line_prefix_template="<${rank}/${attempt}/${stream}> "), ["<4/2/stdout> x", "<5/2/stdout> x"]),
        (lambda d: LogOptions(d, tee=1, line_prefix_template=""), ["x", "x"]),
        (lambda d: LogOptions(d, tee=1, line_prefix_template="${nothing}$ "), ["${nothing}$ x", "${nothing}$ x"]),
        (lambda d: LogOptions(d, tee=1), ["[default4]:x", "[default5]:x"]),
        (lambda d: LogOptions(d, tee=1, role="r\udcc3"), ["[r\ufffd4]:x", "[r\ufffd5]:x"]),
        (lambda d: LogOptions(d), ["x", "x"]),
        (lambda d: LogOptions(d, ranks_filter=frozenset({5, 9})), ["x"]),
        (lambda d: LogOptions(d, tee=1, ranks_filter=frozenset({5})), ["[default5]:x"]),
        (lambda d: LogOptions(d, ranks_filter=frozenset({5}), local_ranks_filter=frozenset({0})), []),
        (lambda d: LogOptions(d, ranks_filter=frozenset()), []),
    ],
)
def test_prefixes_and_filters(tmp_path: Path, options: Callable[[str], LogOptions], shown: list[str]) -> None:
    out, _, _, _ = printed(options(str(tmp_path)), b"x\n", ranks=(4, 5))
    assert sorted(out.splitlines()) == shown


class FailingTarget:
    """Takes nothing as long as `full`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full = True
        self.data = b""

    def write(self, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.data += data
        return len(data)

    def close(self) -> None:
        self.full = True


def test_a_full_disk_is_said_once_and_the_gap_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.launcher.log_sinks.LAST_WRITE_S", 60.0)
    said: list[str] = []
    sink = Sink("files", 1.0, said.append)
    first, second = FailingTarget("first"), FailingTarget("second")
    for target in (first, second, first):
        sink.put(target, b"lost line\n")
        assert sink.flush(time.monotonic() + 60)
    first.full = False
    sink.put(first, b"kept\n")
    assert sink.flush(time.monotonic() + 60)
    assert first.data == b"\n[rsup: 20 bytes of output were lost here]\nkept\n"
    assert len(said) == 1 and "first" in said[0] and "No space left" in said[0]
    assert sink.lost_bytes == 30
    assert sink.close(1.0, lambda: False)


def test_traces_are_named_by_attempt_unless_the_user_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert trace_environment(tmp_path, {}) == dict.fromkeys(VARIABLES, f"{tmp_path}/nccl_trace_rank_")
    assert trace_environment(None, {}) == {}
    for name in VARIABLES:
        assert trace_environment(tmp_path, {name: "/mine"}) == {}


def test_a_temporary_tree_with_traces_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = LogPump(LogOptions(), 2, stdout=io.StringIO(), stderr=io.StringIO())
    for attempt in (1, 2):
        for local_rank in range(2):
            pipes = logs.open_rank(attempt, local_rank, local_rank)
            if attempt == 1:
                Path(f"{pipes.environment[VARIABLES[0]]}{local_rank}").write_bytes(b"trace")
            pipes.close_writer_ends()
        assert logs.drain(attempt, 60)
    notes = logs.take_notes()
    assert len(notes) == 1 and "attempt 1" in notes[0] and f"{logs.run_dir}/attempt_0/nccl_trace_rank_0" in notes[0]
    logs.close(success=True)
    assert logs.run_dir is not None and len(list(logs.run_dir.rglob("nccl_trace_rank_*"))) == 2


def test_no_place_for_temporary_files_costs_the_error_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    logs = LogPump(LogOptions(), 2, stdout=io.StringIO(), stderr=io.StringIO())
    assert logs.run_dir is None and len(logs.take_notes()) == 1
    pipes = logs.open_rank(1, 0, 0)
    assert pipes.error_file is None and not pipes.environment
    pipes.close_writer_ends()
    logs.close()
