"""The rank's side of board and socket, against a real board and a real socket."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rsup.supervisor import heartbeat_board as layout
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Board


@dataclass
class FakeAgent:
    """Only the two ends that a rank sees: its slot and its socket."""

    board: Board
    listener: socket.socket
    environment: dict[str, str]

    def run(self, script: str) -> "subprocess.Popen[bytes]":
        """Start a rank with that script."""
        return subprocess.Popen(
            [sys.executable, "-c", script], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def accept(self) -> socket.socket:
        self.listener.settimeout(60)
        link, _ = self.listener.accept()
        link.settimeout(60)
        return link


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    board = Board.create(2, tmp_path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "rank.sock"))
    listener.listen()
    environment = os.environ | {
        "RSUP_BOARD": str(board.path),
        "RSUP_RANK_SOCKET": str(tmp_path / "rank.sock"),
        "RSUP_ATTEMPT": "3",
        "RSUP_JOB_ID": "j",
        "RSUP_RUN": "2",
        "RSUP_STACKS_DIR": str(tmp_path),
        "RANK": "5",
        "LOCAL_RANK": "1",
    }
    yield FakeAgent(board, listener, environment)
    listener.close()
    board.close()
    board.unlink()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.005)


def receive(link: socket.socket) -> wire.RankToAgent:
    return wire.decode_rank_to_agent(link.recv(wire.MAX_RANK_MESSAGE_BYTES))


def finish(rank: "subprocess.Popen[bytes]") -> bytes:
    output, _ = rank.communicate(timeout=60)
    assert rank.returncode == 0
    return output


def test_the_board_shows_what_the_rank_does(agent: FakeAgent) -> None:
    rank = agent.run(
        "import rsup.worker as w\n"
        "w.set_iteration(7, 'train')\n"
        "with w.section('outer'), w.section('step'):\n"
        "    input()\n"
        "input()\n"
    )
    assert rank.stdin
    wait_until(lambda: sum(s.open_since_ns > 0 for s in agent.board.read(1).sections) == 2, "two open sections")
    sample = agent.board.read(1)
    assert (sample.pid, sample.attempt, sample.iteration, sample.phase, sample.calls) == (rank.pid, 3, 7, "train", 1)
    assert [s.name for s in sample.sections if s.open_since_ns] == ["outer", "step"]
    rank.stdin.write(b"\n")
    rank.stdin.flush()
    wait_until(lambda: not any(s.open_since_ns for s in agent.board.read(1).sections), "closed sections")
    beat = agent.board.read(1).liveness_ns
    wait_until(lambda: agent.board.read(1).liveness_ns > beat, "another beat")
    rank.communicate(b"\n", timeout=60)


def test_a_section_closes_on_an_exception(agent: FakeAgent) -> None:
    rank = agent.run(
        "import rsup.worker as w, contextlib\n"
        "from rsup.worker.sections import TrainingSections\n"
        "s = TrainingSections(num_warmup_iters=0)\n"
        "s.on_setup()\n"
        "for wrap in (s.training_step, s.eval_step, s.checkpointing):\n"
        "    with contextlib.suppress(ZeroDivisionError), wrap():\n"
        "        1 / 0\n"
    )
    finish(rank)
    sections = {s.name: s for s in agent.board.read(1).sections}
    assert set(sections) == {"setup", "step", "checkpointing"}
    assert all(s.open_since_ns == 0 for s in sections.values())
    assert (sections["setup"].entered, sections["step"].entered, sections["checkpointing"].entered) == (1, 2, 1)


def test_warm_up_steps_stay_out_of_the_step_section(agent: FakeAgent) -> None:
    rank = agent.run(
        "from rsup.worker.sections import TrainingSections\n"
        "s = TrainingSections(num_warmup_iters=2)\n"
        "for _ in range(5):\n"
        "    with s.training_step(): pass\n"
        "for _ in range(3):\n"
        "    with s.eval_step(): pass\n"
    )
    finish(rank)
    sample = agent.board.read(1)
    entered = {s.name: s.entered for s in sample.sections}
    assert entered["step"] == 3 + 1
    assert (sample.train_steps, sample.eval_steps) == (5, 3)


def test_messages_and_requests_cross_the_socket(agent: FakeAgent) -> None:
    rank = agent.run(
        "import rsup.worker as w, time\n"
        "w.init()\n"
        "w.report_checkpoint(10, '/c/iter_10', 0.5)\n"
        "w.declare_exit(16, 'elsewhere')\n"
        "while not (r := w.requested()): time.sleep(0.01)\n"
        "w.request_done(r.request_id, 12)\n"
        "assert r.leave and w.requested() is None\n"
        "while not w.limits(): time.sleep(0.01)\n"
        "assert w.limits().sections == {'step': 3.0} and w.job_key() == 'j.2' and w.attempt() == 3\n"
        "w.shutdown()\n"
    )
    link = agent.accept()
    assert receive(link) == wire.RankHello(5, 3, rank.pid)
    assert receive(link) == wire.RankCheckpoint(10, "/c/iter_10", 0.5)
    assert receive(link) == wire.RankDeclares(16, "elsewhere")
    assert receive(link) == wire.RankHello(5, 3, rank.pid, takes_requests=True)
    link.send(b"\xc1 garbage is not a message")
    link.send(wire.encode(wire.SaveNow("r1", leave=True)))
    assert receive(link) == wire.RankRequestDone("r1", 12)
    link.send(wire.encode(wire.LimitsNow(wire.Limits(sections={"step": 3.0}))))
    finish(rank)
    link.close()


def test_a_message_that_cannot_be_made_is_lost_and_the_rank_lives_on(agent: FakeAgent) -> None:
    """A rank whose beat thread has died looks hung, though it trains."""
    rank = agent.run("""if True:
        import sys
        import rsup.worker as worker
        def fail(now_s, all_of_it):
            raise RuntimeError("in vain")
        worker.init()._metrics.due = fail
        worker.report_metrics(1, {"x": 1.0})
        worker.note("info", "\\ud800")
        worker.note("info", "first")
        sys.stdin.readline()
        worker.note("info", "last")
        sys.stdin.readline()
    """)
    link = agent.accept()
    assert rank.stdin is not None
    for text in ("first", "last"):
        while not isinstance(message := receive(link), wire.RankNote):
            pass
        assert message.text == text
        if text == "first":
            rank.stdin.write(b"\n")
            rank.stdin.flush()
    rank.communicate(b"\n", timeout=60)
    assert rank.returncode == 0
    link.close()


def test_odd_arguments_are_a_warning_and_training_goes_on(agent: FakeAgent) -> None:
    rank = agent.run(
        "import warnings, rsup.worker as w\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    w.set_iteration(5)\n"
        "    w.set_iteration(-1)\n"
        "    w.set_iteration(None)\n"
        "    w.report_metrics(1, [1])\n"
        "    w.report_metrics(None, {'x': 1.0})\n"
        "    w.report_metrics(float('nan'), {'x': 1.0})\n"
        "    w.report_metrics(7, {'x': 1.0})\n"
        "assert {one.filename for one in caught} == {'<string>'}, 'the script is where it says'\n"
        "print(*[str(one.message) for one in caught], w._session.iteration, sep='\\n')\n"
        "w._session.close()\n"
    )
    lines = finish(rank).decode().splitlines()
    starts = ("rsup: set_iteration takes", "rsup: set_iteration takes", "rsup: metrics of iteration 1 are left out", "5")
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts)), lines
    link = agent.accept()
    while not isinstance(message := receive(link), wire.RankMetrics):
        pass
    link.close()
    assert [one.first for one in message.series["x"]] == [7]


def test_a_stopped_agent_never_blocks_the_rank(agent: FakeAgent) -> None:
    rank = agent.run(
        "import rsup.worker as w\nfor i in range(20_000):\n    w.note('info', 'x' * 1000)\n    w.set_iteration(i)\n"
    )
    link = agent.accept()  # and nobody reads it
    finish(rank)
    assert agent.board.read(1).iteration == 19_999
    link.close()


def test_a_missing_board_is_a_warning_and_training_goes_on(agent: FakeAgent) -> None:
    agent.environment["RSUP_BOARD"] = "/nowhere/board"
    rank = agent.run(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import rsup.worker as w\n"
        "    w.set_iteration(3)\n"
        "    with w.section('step'): pass\n"
        "print(len(seen), seen[0].message)\n"
    )
    assert finish(rank).decode().startswith("1 rsup: this rank is not watched: cannot open the heartbeat board")


def test_a_forked_child_does_not_write_the_slot(agent: FakeAgent) -> None:
    rank = agent.run(
        "import os, rsup.worker as w\n"
        "w.set_iteration(4)\n"
        "if (pid := os.fork()) == 0:\n"
        "    w.set_iteration(99)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    finish(rank)
    assert agent.board.read(1).iteration == 4


def test_a_new_process_takes_the_slot_over_clean(agent: FakeAgent) -> None:
    first = agent.run("import rsup.worker as w, os, signal\nw.section('step').enter()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    assert agent.board.read(1).sections[0].open_since_ns
    finish(agent.run("import rsup.worker as w\nw.init()\n"))
    assert agent.board.read(1).sections == ()


def test_a_rank_at_a_debugger_prompt_is_marked(agent: FakeAgent) -> None:
    rank = agent.run("import rsup.worker as w, pdb\nw.init()\npdb.set_trace()\nprint('on')\n")
    wait_until(lambda: bool(agent.board.read(1).flags & layout.FLAG_DEBUGGER), "the debugger flag")
    output, _ = rank.communicate(b"c\n", timeout=60)
    assert b"on" in output


def test_stacks_come_by_signal_where_nobody_may_trace(agent: FakeAgent, tmp_path: Path) -> None:
    rank = agent.run("import rsup.worker as w\nw.init()\ndef waits_here(): input()\nwaits_here()\n")
    wait_until(lambda: agent.board.read(1).pid == rank.pid and agent.board.read(1).liveness_ns > 0, "the session")
    path = tmp_path / "rank-5.txt"

    def asked() -> bool:
        os.kill(rank.pid, signal.SIGRTMIN + 5)
        return "waits_here" in path.read_text()

    wait_until(asked, "the stacks")
    rank.communicate(b"\n", timeout=60)


def test_more_sections_than_the_board_holds_is_a_warning(agent: FakeAgent) -> None:
    rank = agent.run(
        "import warnings\n"
        "import rsup.worker as w\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for i in range(26):\n"
        "        with w.section(f's{i}'): pass\n"
        "print(len(seen))\n"
    )
    assert finish(rank) == b"2\n"
    assert len(agent.board.read(1).sections) == layout.NUM_SECTIONS


def test_outside_rsup_launch_nothing_happens() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RSUP_")}
    script = (
        "import rsup.worker as w, sys\n"
        "w.set_iteration(1, 'train'); w.heartbeat(); w.report_checkpoint(1, 'x'); w.declare_exit(17, 'y')\n"
        "with w.section('step'): pass\n"
        "assert w.requested() is None and w.limits() is None and not w.is_supervised() and w.attempt() == 1\n"
        "heavy = {'torch', 'sqlalchemy', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
