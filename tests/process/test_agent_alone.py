"""The agent with real ranks and signals, and a supervisor whose decisions the test makes by hand."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.supervisor import wire

sys.path.insert(0, str(Path(__file__).parent))
from scripted_supervisor import ScriptedSupervisor

SLEEPS = "import time; time.sleep(600)"
PATIENT = "import sys; from rsup.launcher import agent, cli; agent.FAREWELL_S = 30.0; sys.exit(cli.main())"
"""A launcher whose goodbye does not depend on how soon this process acknowledges its last facts."""


class Launch:
    """One `rsup launch` under the scripted supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = ScriptedSupervisor(folder)
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        (folder / "tmp").mkdir()

    def go(self, script: str, *options: str, ranks: int = 2) -> None:
        path = self.folder / "script.py"
        path.write_text(script)
        self.command(*options, "--nproc-per-node", str(ranks), str(path))

    def command(self, *words: str) -> None:
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PATIENT, "launch", *words],
                env=os.environ
                | {
                    "RSUP_SUPERVISOR": self.supervisor.address,
                    "OUT": str(self.folder),
                    "TMPDIR": str(self.folder / "tmp"),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pids.append(self.process.pid)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def out(self) -> bytes:
        return (self.folder / "out").read_bytes()

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def wait(self, within_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def keepers(self) -> list[int]:
        assert self.process is not None
        return [pid for pid in children(self.process.pid) if b"keeper_process" in command_of(pid)]

    def left(self) -> list[Path]:
        """Files of this test's agents in the runtime directory, in shared memory and for temporary logs."""
        boards = [path for pid in self.pids for path in Path("/dev/shm").glob(f"rsup-board-{os.getuid()}-{pid}-*")]
        return [*(self.folder / "run/rsup").glob("a-*"), *boards, *(self.folder / "tmp").iterdir()]

    def nothing_left(self) -> None:
        """Fail if something is still there after a while."""
        self.until(lambda: not self.left())

    def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        """Let the supervisor answer until the condition holds."""
        self.supervisor.serve(condition, within_s)


@pytest.fixture
def launch(own_directories: Path) -> Iterator[Launch]:
    launch = Launch(own_directories)
    yield launch
    if launch.process and launch.process.poll() is None:
        launch.process.kill()
        launch.process.wait()
    launch.supervisor.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    """Its command line; empty if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_success_and_the_result_file(launch: Launch) -> None:
    launch.go(
        "import os; open(os.environ['OUT'] + '/rank-' + os.environ['RANK'], 'w')", "--result-file", str(launch.folder / "r")
    )
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end(0, "all ranks exited 0")
    assert launch.wait() == 0
    assert (launch.folder / "rank-0").exists() and (launch.folder / "rank-1").exists()
    for path in (launch.folder / "r", launch.folder / "state/jobs/job.1/result.json"):
        assert json.loads(path.read_text())["reason"] == "all ranks exited 0"
    assert list((launch.folder / "run/rsup").iterdir()) == []


def test_a_killed_rank_is_told_at_once_and_a_new_attempt_replaces_all(launch: Launch) -> None:
    launch.go("import os, time\nif not os.path.exists(os.environ['OUT'] + '/last'): time.sleep(600)")
    told_after_s: list[float] = []
    while not told_after_s or (min(told_after_s) >= 0.5 and len(told_after_s) < 3):  # a busy machine may hold up one
        attempt = len(told_after_s) + 1
        pids = launch.supervisor.start(attempt, reason="rank 1 was killed by SIGKILL")
        killed_at = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        fact = launch.supervisor.wait_for(wire.RankExited, 2 * attempt - 1)
        told_after_s.append(time.monotonic() - killed_at)
        assert (fact.rank, fact.signal, fact.exit_code, fact.by_us) == (1, 9, 137, "")
        assert alive(pids[0])
        launch.supervisor.order(wire.StopAttempt(0, "rank 1 was killed by SIGKILL", attempt, 10.0))
        launch.supervisor.wait_for(wire.RanksGone, attempt)
        assert not alive(pids[0])
        assert launch.supervisor.of(wire.RankExited)[2 * attempt - 1].by_us == "rank 1 was killed by SIGKILL"
    assert min(told_after_s) < 0.5
    (launch.folder / "last").touch()
    launch.supervisor.start(attempt + 1, reason="rank 1 was killed by SIGKILL")
    launch.supervisor.wait_for(wire.RanksGone, attempt + 1)
    launch.supervisor.end()
    assert launch.wait() == 0
    assert "rsup: attempt 2 starts: rank 1 was killed by SIGKILL (restart 1 of 3)" in launch.err


def test_a_failing_rank_is_reported_with_its_last_lines(launch: Launch) -> None:
    launch.go("import os, sys\nif os.environ['RANK'] == '1': raise ValueError('no such layer')\nimport time; time.sleep(600)")
    launch.supervisor.start()
    fact = launch.supervisor.wait_for(wire.RankExited)
    assert (fact.exit_code, fact.error) == (1, "ValueError: no such layer")
    launch.supervisor.order(wire.StopAttempt(0, "rank 1 failed", 1, 5.0))
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end(1, "rank 1 exited with 1")
    assert launch.wait() == 1
    assert "no such layer" in launch.err


def test_what_ranks_leave_behind_is_reaped_before_the_attempt_is_gone(launch: Launch) -> None:
    launch.go(
        "import os, subprocess\n"
        "a = subprocess.Popen(['sleep', '417']); b = subprocess.Popen(['setsid', 'sleep', '418'])\n"
        "open(os.environ['OUT'] + '/left', 'w').write(f'{a.pid} {b.pid}'); os._exit(5)",
        ranks=1,
    )
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RanksGone)
    assert not any(alive(int(pid)) for pid in (launch.folder / "left").read_text().split())
    launch.supervisor.end(5)
    assert launch.wait() == 5


UPLOADS = """
import os, signal, sys, time
def finish(*_):
    time.sleep(1.0)
    open(os.environ["OUT"] + "/uploaded", "w")
    sys.exit()
signal.signal(signal.SIGTERM, finish)
print(flush=True)
time.sleep(600)
"""


def test_what_success_leaves_behind_may_finish(launch: Launch) -> None:
    launch.go(
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {UPLOADS!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); os._exit(0)",
        ranks=1,
    )
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RankExited)
    launch.supervisor.end(0, "all ranks exited 0")
    assert launch.wait() == 0
    assert (launch.folder / "uploaded").exists()
    assert "left behind" not in launch.err


def test_what_success_leaves_behind_and_had_to_be_killed_is_told(launch: Launch) -> None:
    launch.go(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo; exec sleep 419'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); os._exit(0)",
        ranks=1,
    )
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RankExited)
    launch.signal(signal.SIGTERM)
    launch.supervisor.wait_for(wire.SignalReceived)
    launch.signal(signal.SIGTERM)
    launch.until(lambda: "told to stop again" in launch.err)
    launch.signal(signal.SIGTERM)
    launch.supervisor.wait_for(wire.RanksGone, within_s=8)  # without the third they had 10 s
    note = next(fact for fact in launch.supervisor.of(wire.Note) if "left behind" in fact.text)
    assert note.text == "ended 1 process that rank 0 left behind, with SIGKILL"
    launch.until(lambda: f"rsup: {note.text}" in launch.err)
    launch.supervisor.end(0)
    assert launch.wait() == 0


def test_sigterm_is_passed_on_and_told(launch: Launch) -> None:
    launch.go(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "open(os.environ['OUT'] + '/ready-' + os.environ['RANK'], 'w')\ntime.sleep(600)"
    )
    launch.supervisor.start()
    launch.until(lambda: len(list(launch.folder.glob("ready-*"))) == 2)
    launch.signal(signal.SIGTERM)
    assert launch.supervisor.wait_for(wire.SignalReceived).signal == signal.SIGTERM
    launch.supervisor.wait_for(wire.RanksGone)
    assert [(fact.exit_code, fact.by_us) for fact in launch.supervisor.of(wire.RankExited)] == [
        (0, "the launcher received SIGTERM")
    ] * 2
    launch.supervisor.end(143, "told to stop by SIGTERM")
    assert launch.wait() == 143


def test_a_third_signal_does_not_wait_for_the_grace(launch: Launch) -> None:
    launch.go(
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open(os.environ['OUT'] + '/ready-' + os.environ['RANK'], 'w')\ntime.sleep(600)"
    )
    launch.supervisor.start()
    launch.until(lambda: len(list(launch.folder.glob("ready-*"))) == 2)
    launch.signal(signal.SIGINT)
    launch.supervisor.wait_for(wire.SignalReceived)
    launch.signal(signal.SIGINT)
    launch.until(lambda: "told to stop again; ranks are killed in 10 s" in launch.err)
    launch.signal(signal.SIGINT)
    launch.supervisor.wait_for(wire.RanksGone, within_s=8)
    assert {fact.signal for fact in launch.supervisor.of(wire.RankExited)} == {9}
    assert "exit code 130" in launch.supervisor.wait_for(wire.AgentGone).reason
    assert launch.wait() == 130
    launch.nothing_left()


def test_usr1_reaches_a_rank_that_handles_it_and_harms_none(launch: Launch) -> None:
    launch.go(
        "import os, signal, time\nout = os.environ['OUT'] + '/'\n"
        "if os.environ['RANK'] == '0': signal.signal(signal.SIGUSR1, lambda *_: open(out + 'got', 'w'))\n"
        "open(out + 'ready-' + os.environ['RANK'], 'w')\n"
        "while not os.path.exists(out + 'end'): time.sleep(0.05)"
    )
    launch.supervisor.start()
    launch.until(lambda: len(list(launch.folder.glob("ready-*"))) == 2)
    launch.signal(signal.SIGUSR1)
    launch.until((launch.folder / "got").exists)
    (launch.folder / "end").touch()
    launch.supervisor.wait_for(wire.RanksGone)
    assert [fact.exit_code for fact in launch.supervisor.of(wire.RankExited)] == [0, 0]
    launch.supervisor.end()
    assert launch.wait() == 0


STEPS = """
import os, time, rsup.worker
rsup.worker.set_iteration(7)
if os.environ["RANK"] == "1":
    rsup.worker.section("setup").enter()
    rsup.worker.section("step").enter()
open(os.environ["OUT"] + "/ready-" + os.environ["RANK"], "w")
while not os.path.exists(os.environ["OUT"] + "/end"):
    rsup.worker.requested()
    if os.environ["RANK"] == "1" and os.path.exists(os.environ["OUT"] + "/again"):
        os.unlink(os.environ["OUT"] + "/again")
        rsup.worker.section("step").exit()
        rsup.worker.section("step").enter()
    time.sleep(0.05)
"""


def test_an_expired_section_is_told_within_a_quarter_second(launch: Launch) -> None:
    launch.go(STEPS)
    pids = launch.supervisor.start(limits=wire.Limits(sections={"step": 1.0}))
    ages_s: list[float] = []
    while not ages_s or (min(ages_s) >= 1.3 and len(ages_s) < 3):  # a busy machine may hold up one
        if ages_s:
            (launch.folder / "again").touch()
        fact = launch.supervisor.wait_for(wire.RankOverdue, len(ages_s) + 1)
        assert (fact.rank, fact.limit, fact.limit_s, fact.iteration, fact.calculated) == (1, "step", 1.0, 7, False)
        ages_s.append(fact.age_s)
    assert 1.0 < min(ages_s) < 1.3
    launch.supervisor.order(wire.TakeStacks(0, "rank 1 is overdue", 1, 8.0))
    stacks = launch.supervisor.wait_for(wire.StacksTaken).stacks
    assert [(stack.rank, stack.pid) for stack in stacks] == list(enumerate(pids))
    launch.supervisor.order(wire.StopAttempt(0, "rank 1 hung", 1, 0.0))
    launch.supervisor.wait_for(wire.RanksGone)
    exited = {fact.rank: fact for fact in launch.supervisor.of(wire.RankExited)}
    assert (exited[1].signal, exited[1].section, exited[1].iteration, exited[1].by_us) == (9, "step", 7, "rank 1 hung")
    assert launch.supervisor.of(wire.SectionsObserved)[-1].closing
    launch.supervisor.end(1)
    assert launch.wait() == 1


def test_agent_and_ranks_suspended_together_for_ten_times_the_limit(launch: Launch) -> None:
    launch.go("import os, time\nwhile not os.path.exists(os.environ['OUT'] + '/go'): time.sleep(0.02)\n" + STEPS)
    pids = launch.supervisor.start(limits=wire.Limits(sections={"step": 0.8, "setup": 0.8}))
    assert launch.process is not None
    group = [launch.process.pid, *pids]
    os.kill(group[0], signal.SIGSTOP)
    (launch.folder / "go").touch()  # not before: between the section's begin and the stop, its limit could pass
    launch.until((launch.folder / "ready-1").exists)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    suspended_at = time.monotonic()
    launch.until(lambda: time.monotonic() - suspended_at > 8.0)
    assert not launch.supervisor.of(wire.RankOverdue)
    num_before = len(launch.supervisor.facts)
    for pid in reversed(group):
        os.kill(pid, signal.SIGCONT)
    overdue = launch.supervisor.wait_for(wire.RankOverdue)
    told = launch.supervisor.facts[num_before:]
    note = next(fact for fact in told if isinstance(fact, wire.Note))
    assert "did not run for" in note.text and told.index(note) < told.index(overdue)
    assert overdue.age_s < 8.0
    (launch.folder / "end").touch()
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end()
    assert launch.wait() == 0


def test_requests_and_limits_reach_the_ranks(launch: Launch) -> None:
    launch.go(
        "import os, time, rsup.worker\nrsup.worker.set_iteration(3)\n"
        "while not (request := rsup.worker.requested()): time.sleep(0.02)\n"
        "rsup.worker.report_checkpoint(3, '/ckpt/3', 0.5)\n"
        "rsup.worker.request_done(request.request_id, 3)\n"
        "assert rsup.worker.limits().heartbeat_s == 99\n"
        "rsup.worker.shutdown()\nraise SystemExit(0 if request.leave else 1)",
        ranks=1,
    )
    launch.supervisor.start(limits=wire.Limits(heartbeat_s=99))
    launch.until(lambda: bool(launch.supervisor.beats) and launch.supervisor.beats[0].iteration == 3)
    launch.supervisor.order(wire.StopTraining(0, "rsup stop", "q1", 60.0))
    assert launch.supervisor.wait_for(wire.RequestDone) == wire.RequestDone(
        launch.supervisor.of(wire.RequestDone)[0].at_us, "q1", True
    )
    launch.supervisor.wait_for(wire.RanksGone)
    assert launch.supervisor.of(wire.CheckpointCommitted)[0].path == "/ckpt/3"
    (exited,) = launch.supervisor.of(wire.RankExited)
    assert (exited.exit_code, exited.saved, exited.by_us) == (0, True, "rsup stop")
    launch.supervisor.end()
    assert launch.wait() == 0


def test_a_silent_supervisor_after_a_failure_ends_in_88(launch: Launch) -> None:
    launch.go(
        "import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\ntime.sleep(1)\nraise SystemExit(3)",
        "--supervisor-grace",
        "5",
    )
    pids = launch.supervisor.start()
    launch.supervisor.answers = False
    assert launch.wait() == 88
    assert not any(alive(pid) for pid in pids)
    assert "requeue" in launch.err and "goes on telling it for 300 s" in launch.err
    assert json.loads((launch.folder / "state/jobs/job.1/result.json").read_text())["exit_code"] == 88
    launch.supervisor.answers = True
    gone = launch.supervisor.wait_for(wire.AgentGone)
    assert launch.supervisor.facts[-1] is gone and "left: exit code 88, a decision was due" in gone.reason
    assert [fact.exit_code for fact in launch.supervisor.of(wire.RankExited)] == [3, 143]
    assert len(launch.supervisor.of(wire.RanksGone)) == 1
    launch.nothing_left()


def test_success_with_a_silent_supervisor_is_success(launch: Launch) -> None:
    launch.go("import time; time.sleep(1)", "--supervisor-grace", "5")
    launch.supervisor.start()
    launch.supervisor.answers = False
    assert launch.wait() == 0
    launch.supervisor.answers = True
    assert "left: exit code 0" in launch.supervisor.wait_for(wire.AgentGone).reason
    assert [fact.exit_code for fact in launch.supervisor.of(wire.RankExited)] == [0, 0]
    assert not launch.supervisor.said_bye
    launch.nothing_left()


def test_the_agents_death_takes_its_ranks_along(launch: Launch) -> None:
    launch.go(SLEEPS)
    pids = launch.supervisor.start()
    (keeper,) = launch.keepers()
    launch.signal(signal.SIGKILL)
    launch.wait()
    gone_by = time.monotonic() + 20.0
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < gone_by
        time.sleep(0.01)
    assert "ended without a word" in launch.supervisor.wait_for(wire.AgentGone).reason
    launch.until(lambda: not alive(keeper))
    launch.nothing_left()


def test_agent_and_keeper_killed_together(launch: Launch) -> None:
    launch.go(SLEEPS)
    pids = launch.supervisor.start()
    assert launch.process is not None
    launch.signal(signal.SIGSTOP)  # else it could start another keeper in between
    for pid in (*launch.keepers(), launch.process.pid):
        os.kill(pid, signal.SIGKILL)
    launch.wait()
    launch.until(lambda: not any(map(alive, pids)), 20.0)
    left = {path.suffix for path in launch.left()}
    assert left == {".spool", ".keeper", ".ranks", ".stacks", ".logs", ".ft", ""}
    launch.supervisor.close()
    launch.supervisor = ScriptedSupervisor(launch.folder)
    launch.go("pass")
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end()
    assert launch.wait() == 0
    assert [path.suffix for path in launch.left()] == [".spool"], "it is kept a day"


def test_a_suspended_agent_is_fenced_though_a_message_waits_for_it(launch: Launch) -> None:
    launch.go(STEPS, "--fence-timeout", "6")
    pids = launch.supervisor.start()
    assert launch.process is not None
    launch.until((launch.folder / "ready-1").exists)
    for pid in (launch.process.pid, *pids):
        os.kill(pid, signal.SIGSTOP)
    suspended_at = time.monotonic()
    launch.until(lambda: time.monotonic() - suspended_at > 7.0)
    launch.supervisor.order(wire.SetLimits(0, "it waits in the socket", wire.Limits()))
    launch.signal(signal.SIGCONT)
    launch.supervisor.wait_for(wire.RanksGone)
    exits = launch.supervisor.of(wire.RankExited)
    assert [(fact.signal, "fence timeout" in fact.by_us) for fact in exits] == [(9, True), (9, True)]
    launch.supervisor.end(1)
    assert launch.wait() == 1


def test_the_keepers_death_costs_nothing(launch: Launch) -> None:
    launch.go("import os, time\nwhile not os.path.exists(os.environ['OUT'] + '/end'): time.sleep(0.05)")
    launch.supervisor.start()
    os.kill(launch.keepers()[0], signal.SIGKILL)
    launch.until(lambda: any("keeper" in note.text for note in launch.supervisor.of(wire.Note)))
    (launch.folder / "end").touch()
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end()
    assert launch.wait() == 0


def test_binary_output_and_20_mb_without_a_newline(launch: Launch) -> None:
    launch.go("import sys; sys.stdout.buffer.write(b'\\xff\\x00' * 10_000_000)", ranks=1)
    launch.supervisor.start()
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end()
    assert launch.wait() == 0
    assert launch.out.count(b"\xff\x00") == 10_000_000


def test_a_master_port_in_use_is_one_clear_line(launch: Launch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        launch.go(SLEEPS, "--master-port", str(port))
        launch.until(lambda: launch.supervisor.hello is not None)
        launch.supervisor.order(wire.HostStore(0, "first node", 1, port))
        failed = launch.supervisor.wait_for(wire.StartFailed)
    assert str(port) in failed.message and "\n" not in failed.message
    launch.supervisor.end(1, failed.message)
    assert launch.wait() == 1


def test_a_program_that_cannot_run_is_a_failed_start(launch: Launch) -> None:
    program = launch.folder / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    launch.command("--no-python", "--nproc-per-node", "2", str(program))
    launch.until(lambda: launch.supervisor.hello is not None)
    numbers = (1, 1, 0, 2, 2, 0, 1)
    launch.supervisor.epoch = 1
    launch.supervisor.order(wire.StartAttempt(0, "start", *numbers, "127.0.0.1", 1, "job", 1, max_restarts=0))
    assert launch.supervisor.wait_for(wire.StartFailed).exit_code == 126
    launch.supervisor.wait_for(wire.RanksGone)
    launch.supervisor.end(126)
    assert launch.wait() == 126


def test_a_newcomer_that_is_refused_says_why(launch: Launch) -> None:
    launch.go(SLEEPS)
    launch.supervisor.refuse = wire.Refusal(2, "job t1 is already running: choose another --job-id")
    launch.until(lambda: launch.process is not None and launch.process.poll() is not None)
    assert launch.wait() == 2
    assert "job t1 is already running" in launch.err


@pytest.mark.parametrize("required", [False, True])
def test_a_supervisor_that_reads_late_hears_that_the_launch_has_gone(own_directories: Path, required: bool) -> None:
    """By then the launch has said `Hello` from two identities, as to one of an older release."""
    late = ScriptedSupervisor(own_directories)
    try:
        words = ["--supervisor", late.address, *(["--require-supervisor"] if required else []), "--no-python", "true"]
        impatient = "import sys; from rsup.launcher import cli, decider; decider.FALLBACK_AFTER_S = 5.0; sys.exit(cli.main())"
        done = subprocess.run([sys.executable, "-c", impatient, "launch", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == (75 if required else 0), done.stderr
        last: dict[bytes, wire.ToSupervisor] = {}
        while late._socket.poll(2000):
            identity, content = late._socket.recv_multipart()
            last[identity] = wire.decode_to_supervisor(content)
        assert last and all(isinstance(message, wire.Bye) for message in last.values()), last
    finally:
        late.close()


def test_a_required_supervisor_that_is_absent(own_directories: Path) -> None:
    script = own_directories / "s.py"
    script.write_text("")
    words = ["--supervisor", f"ipc://{own_directories}/nobody", "--require-supervisor", str(script)]
    impatient = "import sys; from rsup.launcher import cli, decider; decider.FALLBACK_AFTER_S = 2.0; sys.exit(cli.main())"
    done = subprocess.run([sys.executable, "-c", impatient, "launch", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert "did not answer" in done.stderr and done.stderr.count("\n") == 1
