"""Whole runs of the reference trainer: ways out, refused commits, faults, wrong usage."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rsup.supervisor.wire import EXIT_NO_REQUEUE
from rsup.worker.checkpoint_directory import CheckpointDirectory

LONG = ("--iterations", "1000000", "--log-interval", "5")


def iterations_said(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"iteration +(\d+)/", text)]


def is_training(attempt) -> bool:
    return any(number >= 5 for number in iterations_said(attempt.text()))


@pytest.mark.parametrize(("name", "options"), [("SIGTERM", ()), ("SIGUSR1", ("--exit-signal", "USR1"))])
def test_the_exit_signal_on_one_rank_saves_and_ends_all(runs, tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    run = runs.start(2, *LONG, "--save", str(tmp_path), "--exit-signal-handler", *options)
    run.wait_for(lambda: is_training(run), "training")
    run.signal(1, signal.Signals[name])
    assert run.finish() == [0, 0]
    found = re.search(rf"leaving after iteration (\d+): signal {name}\ndigest", run.text())
    assert found is not None, run.text()
    assert CheckpointDirectory(tmp_path).iterations() == [int(found[1])]


def test_without_the_handler_a_signal_kills(runs, tmp_path: Path) -> None:
    run = runs.start(1, *LONG, "--save", str(tmp_path))
    run.wait_for(lambda: is_training(run), "training")
    run.signal(0, signal.SIGTERM)
    assert run.finish() == [-signal.SIGTERM]
    assert CheckpointDirectory(tmp_path).iterations() == []


def test_the_time_budget_of_any_rank_ends_all(runs, tmp_path: Path) -> None:
    run = runs.run(2, *LONG, "--save", str(tmp_path), "--exit-duration-in-mins", "0.01")
    assert run.codes() == [0, 0]
    assert "the time budget is used up" in run.text()
    assert len(CheckpointDirectory(tmp_path).iterations()) == 1


def test_a_save_at_the_exit_iteration_happens_once(runs, tmp_path: Path) -> None:
    options = ("--save-interval", "6", "--exit-interval", "6", "--phase-transition-iterations", "4,6")
    first = runs.run(1, *LONG, "--save", str(tmp_path), *options)
    assert "leaving after iteration 4: iteration 4 ends a phase" in first.text()
    second = runs.run(1, *LONG, "--save", str(tmp_path), *options, number=2)
    assert "leaving after iteration 6: iteration 6 is a multiple of the exit interval" in second.text()
    assert second.text().count("is durable") == 1
    third = runs.run(1, *LONG, "--save", str(tmp_path), *options, number=3)
    assert "leaving after iteration 12" in third.text()


def test_a_newer_attempt_makes_the_stale_one_end_without_committing(runs, tmp_path: Path) -> None:
    run = runs.start(2, *LONG, "--save", str(tmp_path), "--save-interval", "5")
    run.wait_for(lambda: "iteration 5 is durable" in run.text(), "a checkpoint")
    fence = json.loads((tmp_path / "fence.json").read_text())
    CheckpointDirectory(tmp_path).claim(fence["job_key"], 2)
    last = CheckpointDirectory(tmp_path).iterations()[0]
    assert set(run.finish()) <= {1, -9} and 1 in run.codes()
    assert "error: attempt 2 of this job has taken" in run.text() + run.text(1)
    assert "Traceback" not in run.text() + run.text(1)
    assert CheckpointDirectory(tmp_path).iterations()[0] == last


def test_another_job_in_the_directory_ends_the_first_for_good(runs, tmp_path: Path) -> None:
    run = runs.start(1, *LONG, "--save", str(tmp_path), "--save-interval", "5")
    run.wait_for(lambda: "iteration 5 is durable" in run.text(), "a checkpoint")
    refused = runs.run(1, *LONG, "--save", str(tmp_path), job="another")
    assert refused.codes() == [EXIT_NO_REQUEUE] and run.codes() == [None]
    told = refused.text().splitlines()[-1]
    assert f"error: {tmp_path} holds checkpoints of job job, the newest of iteration " in told and "is job another: " in told
    taken = runs.run(1, "--iterations", "5", "--save", str(tmp_path), "--load", str(tmp_path), job="another")
    assert taken.codes() == [0] and f"warning: {tmp_path} was job job's" in taken.text()
    assert run.finish() == [EXIT_NO_REQUEUE]
    assert "has taken the checkpoint directory" in run.text().splitlines()[-1]


@pytest.mark.parametrize("kind", ["hang", "gil-hang", "sigstop"])
def test_a_hung_rank_stays_where_it_is_told(runs, kind: str) -> None:
    run = runs.start(2, *LONG, "--fault", f"rank=1,iteration=8,kind={kind}")
    run.wait_for(lambda: "injected fault" in run.text(1), "the fault")
    assert iterations_said(run.text())[-1] == 5
    if kind != "hang":
        return
    time.sleep(0.3)  # long enough for many more iterations, were it not hung
    assert iterations_said(run.text())[-1] == 5 and run.codes() == [None, None]


def test_a_hang_at_the_start_strikes_once(runs, tmp_path: Path) -> None:
    fault = ("--iterations", "6", "--fault", "rank=0,kind=hang-at-start")
    run = runs.start(1, *fault)
    run.wait_for(lambda: "injected fault" in run.text(), "the fault")
    run.kill()
    again = runs.run(1, *fault, number=2)  # remembered in the runtime directory, as there is no --save
    assert again.codes() == [0] and iterations_said(again.text())
    other = runs.start(1, *fault, job="another")
    other.wait_for(lambda: "injected fault" in other.text(), "the fault, in another job")


def test_a_hang_in_a_checkpoint_and_the_way_on(runs, tmp_path: Path) -> None:
    options = ("--iterations", "8", "--save", str(tmp_path), "--save-interval", "4")
    fault = ("--fault", "rank=1,iteration=8,kind=hang-in-checkpoint")
    run = runs.start(2, *options, *fault)
    run.wait_for(lambda: "injected fault" in run.text(1), "the fault")
    run.wait_for(lambda: CheckpointDirectory(tmp_path).iterations() == [4], "the checkpoint before")
    run.kill()
    again = runs.run(2, *options, *fault, number=2)
    assert again.codes() == [0, 0] and "resumed from" in again.text()


def test_an_exception_leaves_a_traceback_and_an_error_file(runs, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    run = runs.start(
        1,
        "--iterations",
        "3",
        "--fault",
        "rank=0,iteration=2,kind=exception",
        environment={"TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    assert run.finish() == [1]
    assert "InjectedFault: rank=0,iteration=2,kind=exception" in run.text()
    assert "InjectedFault" in json.loads(error_file.read_text())["message"]["message"]


def test_a_repeated_fault_strikes_in_every_attempt(runs, tmp_path: Path) -> None:
    options = ("--iterations", "4", "--save", str(tmp_path), "--fault", "rank=0,iteration=2,exit=5,repeat")
    assert runs.run(1, *options).codes() == [5]
    assert runs.run(1, *options, number=2).codes() == [5]


def test_the_surviving_rank_says_in_one_line_that_another_is_gone(runs) -> None:
    run = runs.start(2, *LONG, "--fault", "rank=1,iteration=6,kind=sigkill")
    run.wait_for(lambda: None not in run.codes(), "both ranks to end")
    assert run.codes() == [1, -9]
    assert run.text().splitlines()[-1].startswith("rank 0: another rank is gone: Connection ")
    assert "Traceback" not in run.text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--iterations 0", "argument --train-iters/--iterations: 0 is not 1 or more"),
        ("--iterations many", "invalid count value: 'many'"),
        ("--lr -1", "is not a finite number"),
        ("--hidden-dropout 1", "1 is not in [0, 1)"),
        ("--global-batch-size 6 --micro-batch-size 4", "not divisible by --micro-batch-size 4 times 1 ranks"),
        ("--hidden-size 30 --num-attention-heads 4", "not divisible by --num-attention-heads 4"),
        ("--save-interval 5", "--save-interval needs --save"),
        ("--enable-ft-package", "--enable-ft-package needs --save"),
        ("--min-lr 1 --lr 0.1", "--min-lr 1.0 is above --lr 0.1"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-samples"),
        ("--exit-signal KILL", "is no signal that can be caught"),
        ("--fault rank=0,iteration=5,kind=explode", "unknown kind"),
        ("--fault rank=1,iteration=5,kind=hang", "there is no rank 1 among 1"),
        ("--cpu-offloading", "--cpu-offloading is not available yet"),
        ("--timing-log-level 3", "argument --timing-log-level: invalid choice: 3"),
        ("--ft-param-rank_section_timeouts=step:5", "is an option of rsup launch"),
        ("--save /proc/nowhere", "cannot save to /proc/nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(monkeypatch, capsys, arguments: str, complaint: str) -> None:
    from rsup.worker.reference import train

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(sys, "argv", ["train", *arguments.split()])
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit) as ended:
        train.run_as_program()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert complaint in said.err and said.err.count("\n") == 1 and not said.out


def test_wrong_usage_is_answered_without_torch_and_once_a_node(tmp_path: Path) -> None:
    script = (
        "import sys, rsup.worker.reference.train as t\n"
        "try: t.main(['--iterations', 'x'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n"
    command = [sys.executable, "-m", "rsup.worker.reference.train", "--save", str(tmp_path / "file")]
    (tmp_path / "file").write_text("")
    for local_rank, lines in (("0", 1), ("1", 0)):
        environment = {"PATH": "/bin", "LOCAL_RANK": local_rank, "RANK": local_rank, "WORLD_SIZE": "2"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, lines), done.stderr
