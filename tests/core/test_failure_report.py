"""The report of a failed attempt, from facts alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher.failure_report import (
    MAX_REPORT_LINES,
    exit_text,
    failure_report,
    is_victim,
    read_error_file,
    telling_line,
)
from rsup.launcher.memory_kills import MemoryKills
from rsup.supervisor.exit_text import exit_lines
from rsup.supervisor.failure import is_of_a_peer, waited_in_vain
from rsup.supervisor.wire import NOT_OURS, RankExited

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("loss is nan")
ValueError: loss is nan
"""


def exited(rank: int, at_us: int, exit_code: int = 1, **fields: Any) -> RankExited:
    return RankExited(at_us=at_us, attempt=2, rank=rank, **{"exit_code": exit_code} | fields)


def test_the_first_mover_is_named_and_not_its_victims() -> None:
    exits = [
        exited(0, 10_000, error="RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3"),
        exited(3, 20_000, iteration=25, section="step", error="ValueError: loss is nan", log_tail=TRACEBACK),
        exited(1, 30_000, 143, signal=15, by_us="attempt 2 is stopped"),
        exited(2, 31_700, 143, signal=15, by_us="attempt 2 is stopped"),
        exited(5, 32_000, 137, signal=9, by_us="attempt 2 is stopped; the grace is over"),
        exited(4, 32_000, 0),
        exited(6, 33_000, 3, by_us="attempt 2 is stopped"),
    ]
    lines = failure_report("t1", exits, reason="rank 3 failed").splitlines()
    assert lines[1] == "job t1 failed: rank 3 failed"
    assert lines[2] == "  first: rank 3, exit code 1 at iteration 25, in section step (attempt 2, 00:00:00.020 UTC)"
    assert lines[3] == "  error: ValueError: loss is nan"
    assert "    | ValueError: loss is nan" in lines
    assert "  ended by rsup with SIGTERM: ranks 1-2, 10-11 ms later" in lines
    assert "  ended by rsup with SIGKILL: rank 5, 12 ms later" in lines
    assert "  left by itself (exit 3) after rsup asked it to end: rank 6, 13 ms later" in lines
    gloo = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3"
    assert f"  victims, of a lost peer: rank 0, 0 ms later: {gloo}" in lines
    assert lines[-2].startswith("more: rsup report t1")
    assert failure_report("t1", exits, reason="rank 3 failed", says_where=False).splitlines() == [*lines[:-2], lines[-1]]


def test_another_failure_without_a_text_ends_the_line_after_its_code() -> None:
    text = failure_report("job", [exited(0, 1, 7), exited(1, 2, 7), exited(2, 3, 7, error="ValueError: x")])
    assert "  also failed: rank 1, exit code 7, 0 ms later\n" in text
    assert "  also failed: rank 2, exit code 7, 0 ms later: ValueError: x\n" in text


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
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out of memory."),
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


def test_an_exception_that_the_process_outlived_is_not_what_ended_it() -> None:
    """In-process restart: the exception of entry 1 stands in the log when entry 2 ends the process."""
    outlived = (
        "rank 1: entry 1 into the training ends, in-process restart follows:\n"
        'Traceback (most recent call last):\n  File "train.py", line 3, in train\n    step()\nValueError: of entry 1\n'
    )
    assert telling_line(outlived + "train: error: it cannot be captured\n") == "train: error: it cannot be captured"
    assert telling_line(outlived) == ""
    assert telling_line(outlived + "Traceback (most recent call last):\n  File\nKeyError: 2\n") == "KeyError: 2"


def test_a_warning_is_not_why_a_rank_failed() -> None:
    warning = "/usr/lib/torch/cuda/__init__.py:61: FutureWarning: pynvml is deprecated.\n  import pynvml  # type: ignore\n"
    assert telling_line(warning) == ""
    assert telling_line("loading data\n" + warning) == "loading data"
    assert telling_line("RuntimeError: no data\n" + warning) == "RuntimeError: no data"


@pytest.mark.parametrize(
    "warning",
    [
        "warning: OpenTelemetry cannot export, and goes on trying: [Errno 111] Connection refused",
        "warning: Weights & Biases cannot be reached (<urlopen error [Errno -2] Name or service not known>)",
        "rsup: warning: the health check failed",
        "WARNING:urllib3.connectionpool:Retrying after connection broken by 'NewConnectionError: Connection refused'",
        "WARNING: Logging before flag parsing goes to stderr: error",
        "[WARN] socket timeout, trying again",
    ],
)
def test_what_a_program_warned_of_is_not_why_a_rank_failed(warning: str) -> None:
    assert telling_line(f"{warning}\n") == ""
    assert telling_line(f"no durable checkpoint of iteration 60\n{warning}\n") == "no durable checkpoint of iteration 60"
    assert telling_line(f"warnings: 3 failed\n{warning}\n") == "warnings: 3 failed"


def test_a_rank_that_somebody_killed_is_no_victim_of_an_older_line() -> None:
    told = "connection refused by the metrics host"
    killed, fallen = exited(0, 10, 137, signal=9, error=told), exited(1, 20, 134, signal=6, error=told)
    assert (is_victim(killed), is_victim(fallen)) == (False, True)


AT_US = 1_767_225_600_123_456  # 2026-01-01 00:00:00.123456 UTC
KILLED_LATER: dict[str, Any] = {"exit_code": 143, "signal": 15, "by_us": "attempt 2 has failed"}
GOLDEN: dict[str, tuple[str, list[RankExited], str]] = {
    "an exception, and a peer in a collective": (
        "rank 1 on n1 exited with code 1: ValueError: bad sample 3; no restart: --max-restarts is 0",
        [
            exited(
                1,
                AT_US,
                error="ValueError: bad sample 3",
                log_tail='  File "t.py", line 3\n    f()\nValueError: bad sample 3\n',
            ),
            exited(0, AT_US + 52_000, error="RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:60050"),
            exited(2, AT_US + 52_500, **KILLED_LATER),
        ],
        """\
job j failed: rank 1 on n1 exited with code 1: ValueError: bad sample 3
  no restart: --max-restarts is 0
  first: rank 1, exit code 1 (attempt 2, 00:00:00.123 UTC)
  error: ValueError: bad sample 3
  last lines of its stderr:
    |   File "t.py", line 3
    |     f()
    | ValueError: bad sample 3
  ended by rsup with SIGTERM: rank 2, 52 ms later
  victims, of a lost peer: rank 0, 52 ms later: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:60050
""",
    ),
    "SIGKILL from outside": (
        "rank 0 on n1 was killed by SIGKILL",
        [exited(0, AT_US, 137, signal=9, killer=NOT_OURS, log_tail="step 7\n"), exited(1, AT_US + 900, **KILLED_LATER)],
        """\
job j failed: rank 0 on n1 was killed by SIGKILL
  first: rank 0, SIGKILL (signal 9) (attempt 2, 00:00:00.123 UTC)
  rsup did not send that signal
  last lines of its stderr:
    | step 7
  ended by rsup with SIGTERM: rank 1, 0 ms later
""",
    ),
    "an exit code and nothing else": (
        "",
        [exited(0, AT_US, 7)],
        """\
job j failed
  first: rank 0, exit code 7 (attempt 2, 00:00:00.123 UTC)
""",
    ),
    "sys.exit with a text, a second one, and a rank that would not go": (
        "rank 3 failed",
        [
            exited(3, AT_US, error="no such config", log_tail="no such config\n"),
            exited(5, AT_US + 3_000, error="no such config", log_tail="no such config\n"),
            exited(4, AT_US + 5_003_000, 137, signal=9, by_us="attempt 2 has failed; the grace is over"),
        ],
        """\
job j failed: rank 3 failed
  first: rank 3, exit code 1 (attempt 2, 00:00:00.123 UTC)
  error: no such config
  last lines of its stderr:
    | no such config
  also failed: rank 5, exit code 1, 3 ms later: no such config
  ended by rsup with SIGKILL: rank 4, 5003 ms later
  rank 4 stood in save (ckpt.py:12)
  stacks of 1 rank: rsup stacks j
""",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_console_text(name: str) -> None:
    reason, exits, text = GOLDEN[name]
    stood_in = [(4, "save (ckpt.py:12)")] if "would not go" in name else []
    rule = "-" * 72 + "\n"
    found = failure_report("j", exits, reason=reason, stood_in=stood_in) + "\n"
    assert found == f"{rule}{text}more: rsup report j    rsup events j\n{rule}"


def test_the_deciders_first_mover_is_the_reports() -> None:
    exits = [exited(0, AT_US, 1, error="x"), exited(1, AT_US + 1, 1, error="y")]
    assert "  first: rank 1, exit code 1 (" in failure_report("j", exits, rank=1)
    assert "  first: rank 0, exit code 1 (" in failure_report("j", exits, rank=9)


OF_A_PEER = [
    "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:60050",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Read error [10.0.0.1]:5: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:3690, remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Last error: socketProgress: Connection closed by remote peer host<41234>",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "RuntimeError: recvValue failed on SocketImpl(fd=23): Broken pipe",
    "torch.distributed.DistStoreError: Connection was likely closed. Did the remote server shutdown or crash?",
    "BrokenPipeError: [Errno 32] Broken pipe",
]
OF_ITS_OWN = [
    "ValueError: loss is nan",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "KeyError: 'peer'",
    "",
    "no such config",
]


def test_launcher_and_supervisor_take_the_same_errors_for_a_victims() -> None:
    for error in OF_A_PEER + OF_ITS_OWN:
        expected = error in OF_A_PEER
        assert is_victim(exited(0, 1, error=error)) is expected, error
        assert is_of_a_peer(error) is expected, error


@pytest.mark.parametrize(
    "error, waited",
    [
        ("RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0", True),
        ("ValueError: loss is nan", False),
        ("", False),
    ],
)
def test_after_which_errors_one_looks_at_those_who_live(error: str, waited: bool) -> None:
    assert waited_in_vain(error) is waited


def test_how_ranks_ended_in_the_report() -> None:
    def one(rank: int, at: str, **fields: object) -> dict[str, object]:
        plain = {"node": "n1", "exit_code": 1, "signal_name": "", "by_us": "", "killer": "", "error": "", "last_lines": []}
        return {"rank": rank, "at": f"2026-01-01T00:00:00.{at}Z"} | plain | fields

    exits = [
        one(0, "010000", error="RuntimeError: Connection closed by peer"),
        one(1, "009000", error="ValueError: nan", last_lines=["  x", "ValueError: nan"]),
        one(2, "020000", exit_code=143, signal_name="SIGTERM", by_us="attempt 1 has failed: rank 1 did"),
        one(3, "021000", exit_code=4, by_us="attempt 1 has failed: rank 1 did"),
        one(4, "022000", exit_code=3, by_us="attempt 1 has failed: rank 1 did"),
    ]
    assert exit_lines({"text": "rank 0 fell", "culprit": 1, "exits": exits}) == [
        "  first        rank 1 on n1 exited with code 1: ValueError: nan",
        "  last lines of its stderr:",
        "    |   x",
        "    | ValueError: nan",
        "  lost a peer  rank 0 on n1 exited with code 1: RuntimeError: Connection closed by peer, 1 ms later",
        "  left         ranks 3, 4 by themselves (exit 3, 4) after we asked them to end, 12 ms later: attempt 1 has failed",
        "  ended by us  rank 2 by SIGTERM, 11 ms later: attempt 1 has failed",
    ]
    assert exit_lines({"text": "a node was lost", "culprit": None, "exits": exits[2:]}) == []


def test_a_rank_that_the_kernel_killed_for_want_of_memory(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "job").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/job\n")
    (proc / "vmstat").write_text("oom_kill 3\n")
    events = cgroups / "job/memory.events"
    events.write_text("oom 0\noom_kill 2\n")
    (cgroups / "job/memory.max").write_text(f"{8 << 30}\n")
    kills = MemoryKills(proc, cgroups)
    assert kills.killer_of(9) == NOT_OURS
    assert kills.killer_of(11) == "", "a process brings that upon itself"
    events.write_text("oom 1\noom_kill 3\n")
    assert kills.killer_of(9) == "killed by the kernel for want of memory (the limit of 8.0 GiB of this job's cgroup)"
    assert kills.killer_of(15) == NOT_OURS
    kills.reset()
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert "it seems" in kills.killer_of(9)
    assert MemoryKills(tmp_path / "none", tmp_path / "none").killer_of(9) == NOT_OURS
