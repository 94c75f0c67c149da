"""In-process restart as the agent performs it: real ranks, real signals, and a supervisor whose decisions the test makes."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rsup.launcher.board_reader import BoardReader
from rsup.launcher.process_state import AgentState, Phase, Rank, Settings
from rsup.supervisor import heartbeat_board, wire

sys.path.insert(0, str(Path(__file__).parent))
from test_agent_alone import Launch, alive, children, command_of, launch

__all__ = ["launch"]

RANK = """
import json, os, subprocess, sys, time
import rsup.worker
from rsup.supervisor import wire

rank, join = os.environ["RANK"], os.environ.get("RSUP_JOIN", "")
out = os.environ["OUT"]

def leave_behind():
    "A child, a daemon in a session of its own, and one with an empty environment under a child: their pids."
    read, write = os.pipe()
    worker = "import os, subprocess, sys; os.write(%d, b'%%d\\\\n' %% subprocess.Popen("
    worker += "['sleep', '600'], env={}, start_new_session=True).pid); os.system('sleep 600')"
    child = subprocess.Popen([sys.executable, "-c", worker % write], pass_fds=[write])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, b"%d\\n" % os.getpid())
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    lines = b""
    while lines.count(b"\\n") < 2:
        lines += os.read(read, 100)
    return [child.pid, *map(int, lines.split())]

def tell(name, **what):
    with open(f"{out}/{name}-{rank}", "a") as file:
        file.write(json.dumps(what) + "\\n")

session = rsup.worker.init()
session.peers_failed = lambda told: tell("peers", gone=told.gone, deaths=told.deaths, failed=told.failed, entry=told.entry)
print(f"output of process {join or 0}", flush=True)
session.send(wire.RankEntered(1))
left = leave_behind()
tell("start", pid=os.getpid(), join=join, left=left, port=os.environ["MASTER_PORT"], slot=os.environ["RSUP_SLOT"],
     errors=os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]))
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write("{}")
time.sleep(600)
"""


def lines(launch: Launch, name: str) -> list[dict[str, Any]]:
    path = launch.folder / name
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )


def started(launch: Launch, rank: int, times: int) -> dict[str, Any]:
    """What the rank's `times`-th process said."""
    launch.until(lambda: len(lines(launch, f"start-{rank}")) >= times)
    return lines(launch, f"start-{rank}")[times - 1]


def restart(death: int, *, rank: int = 1) -> wire.RestartInProcess:
    return wire.RestartInProcess(0, f"rank {rank} was killed", 1, [rank], [rank], [rank], [death])


def all_dead(launch: Launch, *pids: int) -> None:
    launch.until(lambda: not any(alive(pid) for pid in pids))


def in_log(launch: Launch, text: str) -> Path:
    """The file with the output of rank 1, once it has that."""
    launch.until(lambda: any(text in path.read_text() for path in launch.folder.glob("logs/*/attempt_0/1/stdout.log")))
    (log,) = launch.folder.glob("logs/*/attempt_0/1/stdout.log")
    return log


def test_a_dead_rank_alone_gets_a_new_process(launch: Launch) -> None:
    """P28: whichever rank dies, also rank 0 might have, its siblings keep their processes and are told at once."""
    launch.go(RANK, "--log-dir", str(launch.folder / "logs"), "--redirects", "3")
    supervisor = launch.supervisor
    pids = supervisor.start()
    sibling, first = started(launch, 0, 1), started(launch, 1, 1)
    in_log(launch, "output of process 0")
    os.kill(pids[1], signal.SIGKILL)
    supervisor.wait_for(wire.RankExited)
    supervisor.order(restart(1))
    second = started(launch, 1, 2)
    all_dead(launch, *first["left"])  # they were killed before its place was taken
    assert all(map(alive, [pids[0], *sibling["left"]]))
    assert second == first | {"pid": second["pid"], "join": "1", "left": second["left"]}
    launch.until(lambda: lines(launch, "peers-0") == [{"gone": [1], "deaths": [1], "failed": [1], "entry": 0}])
    launch.until(lambda: [beat.pid for beat in supervisor.beats] == [pids[0], second["pid"]])

    in_log(launch, "output of process 1")
    supervisor.order(wire.EndRanks(0, "rank 1 hangs", 1, [1]))
    fact = supervisor.wait_for(wire.RankExited, 2)
    assert (fact.rank, fact.signal, fact.by_us) == (1, 9, "rank 1 hangs")
    supervisor.order(restart(2))
    third = started(launch, 1, 3)
    assert third["join"] == "2"
    all_dead(launch, *second["left"])
    words = [line for line in in_log(launch, "output of process 2").read_text().splitlines() if line]
    assert words == [
        "output of process 0",
        "[rsup: process 2 of this rank in attempt 1 begins here]",
        "output of process 1",
        "[rsup: process 3 of this rank in attempt 1 begins here]",
        "output of process 2",
    ]
    assert launch.process is not None
    zombies = [pid for pid in (pids[1], second["pid"]) if Path(f"/proc/{pid}").exists()]
    assert not zombies, "replaced processes are not kept"

    os.kill(third["pid"], signal.SIGKILL)
    supervisor.wait_for(wire.RankExited, 3)
    supervisor.order(restart(3), wire.StopAttempt(0, "it does not help", 1, 5.0))  # while the next one is being started
    supervisor.wait_for(wire.RanksGone)
    assert [fact.by_us for fact in supervisor.of(wire.RankExited)[3:]] == ["it does not help"] * 2
    assert not any(map(alive, [*sibling["left"], *third["left"], pids[0]]))
    supervisor.end(1, "over")
    assert launch.wait() == 1
    launch.nothing_left()


WARM = """
import mmap, os, time
import torch
import rsup.worker
from rsup.supervisor import wire

session = rsup.worker.init()
out = os.environ["OUT"]
with open(f"{out}/libtorch_cpu.so", "a+b") as file:  # by which the agent sees that a rank has loaded torch
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
rsup.worker.set_iteration(3)
session.send(wire.RankEntered(1))
with open(f"{out}/start-{os.environ['RANK']}", "a") as file:
    file.write('{"pid": %d, "join": "%s"}\\n' % (os.getpid(), os.environ.get("RSUP_JOIN", "")))
time.sleep(600)
"""


def test_a_dead_rank_takes_over_its_warm_standby_and_another_is_made(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    package = launch.folder / "small" / "torch"
    for name in ("", "nn", "distributed"):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text("")
    for name in ("nn/parallel", "distributed/checkpoint", "_dynamo"):
        (package / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    launch.go(WARM)
    pids = launch.supervisor.start()

    def standbys() -> set[int]:
        assert launch.process is not None
        found = {pid for pid in children(launch.process.pid) if b"standby_process" in command_of(pid)}
        return found - {*pids, *taken}

    def are_ready() -> bool:
        notes = launch.supervisor.of(wire.Note)
        return sum("2 warm standbys are ready" in note.text for note in notes) > len(taken)

    taken: list[int] = []
    for death in (1, 2):
        launch.until(are_ready)
        waiting = standbys()
        assert len(waiting) == 2
        os.kill(taken[-1] if taken else pids[1], signal.SIGKILL)
        launch.supervisor.wait_for(wire.RankExited, death)
        launch.supervisor.order(restart(death))
        new = started(launch, 1, death + 1)
        assert new["pid"] in waiting and new["join"] == str(death)
        taken.append(new["pid"])
    assert alive(pids[0])
    launch.supervisor.order(wire.StopAttempt(0, "enough", 1, 0.0))
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end(1, "over")
    assert launch.wait() == 1
    launch.nothing_left()


def test_the_agents_death_takes_new_processes_with_it(launch: Launch) -> None:
    launch.go(RANK)
    pids = launch.supervisor.start()
    for rank in (0, 1):
        started(launch, rank, 1)
    os.kill(pids[0], signal.SIGKILL)
    launch.supervisor.wait_for(wire.RankExited)
    launch.supervisor.order(restart(1, rank=0))
    second = started(launch, 0, 2)
    launch.until(lambda: b"output of process 0" in launch.out and b"output of process 1" in launch.out)
    launch.signal(signal.SIGKILL)
    launch.wait()
    launch.supervisor.wait_for(wire.AgentGone)
    all_dead(launch, pids[1], second["pid"], *second["left"])
    launch.nothing_left()


def test_a_process_that_cannot_be_started_is_told_as_one_that_ended(launch: Launch) -> None:
    program = launch.folder / "program"
    program.write_text('#!/bin/sh\n: > "$OUT/ready-$RANK"\nexec sleep 600\n')
    program.chmod(0o755)
    launch.command("--nproc-per-node", "2", "--no-python", str(program))
    pids = launch.supervisor.start()
    launch.until(lambda: len(list(launch.folder.glob("ready-*"))) == 2)  # a shell opens its script after its start
    program.unlink()
    os.kill(pids[1], signal.SIGKILL)
    launch.supervisor.wait_for(wire.RankExited)
    launch.supervisor.order(restart(1))
    fact = launch.supervisor.wait_for(wire.RankExited, 2)
    assert (fact.rank, fact.exit_code) == (1, 127) and "there is no such program" in fact.error
    assert alive(pids[0])
    launch.supervisor.order(wire.StopAttempt(0, "rank 1 cannot be replaced", 1, 0.0))
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end(127, "over")
    assert launch.wait() == 127


# ------------------------------------------------------------------------------------------------- a newcomer on the board


@pytest.fixture
def reader(own_directories: Path) -> Iterator[BoardReader]:
    reader = BoardReader(2, own_directories)
    yield reader
    reader.close()


def test_a_new_process_is_watched_as_a_newcomer(reader: BoardReader) -> None:
    """Nothing of the dead one is held against it: no open section, no iteration; its own start-up limit begins."""
    reader.begin(1)
    assert reader.path is not None
    board = heartbeat_board.Board.open(reader.path)
    slot = board.slot(0)
    now_ns = time.monotonic_ns()

    def connect(pid: int) -> None:
        slot.take_over(pid, 1)
        slot.set(heartbeat_board.CALLS, 1)
        slot.set(heartbeat_board.CLOSED_SINCE_NS, now_ns)

    connect(11)
    slot.set(heartbeat_board.ITERATION, 7)
    slot.section("step").enter()
    served = board.slot(2)  # of rank 0 as a client of NVRx's, written by the node's server for it
    served.take_over(11, 1)
    for field, value in ((heartbeat_board.CALLS, 1), (heartbeat_board.ITERATION, 5), (heartbeat_board.MAIN_NS, now_ns)):
        served.set(field, value)
    group = SimpleNamespace(start=SimpleNamespace(attempt=1), started_ns=[now_ns - 61 * 10**9])
    limits = wire.Limits(sections={"step": 1e-6}, startup_s=60.0)
    state = AgentState(Settings(), Phase.RUNNING, 0.0, 0.0, ranks=(Rank(0, 11),), limits=limits)

    def look(state: AgentState) -> list[tuple[str, int]]:
        looks = [reader.look(cast(Any, group), state, 0) for _ in range(3)]  # the first may come within the limit
        return [(fact.limit, fact.iteration) for facts in looks for fact in facts]

    assert look(state) == [("step", 7)]
    assert reader.last_words(cast(Any, group), 0) == (7, "step")
    reader.forget(0, 0)
    assert reader.sections(1, 0, closing=True) is None
    fresh = AgentState(Settings(), Phase.RUNNING, 0.0, 0.0, ranks=(Rank(0, 12),), limits=limits)
    group.started_ns = [time.monotonic_ns()]
    assert look(fresh) == []
    assert [(beat.pid, beat.iteration, beat.open_sections) for beat in reader.beats()] == [(12, 0, [])]
    assert reader.last_words(cast(Any, group), 0) == (0, "")
    group.started_ns = [now_ns - 61 * 10**9]
    assert look(fresh) == [("startup", 0)]
    served.take_over(12, 1)
    served.set(heartbeat_board.CALLS, 1)
    assert reader.last_words(cast(Any, group), 0) == (0, "")
    connect(12)
    assert look(fresh) == []
    slot.section("step").enter()
    assert look(fresh) == [("step", 0)], "the same limit of the same rank is told again of another process"
