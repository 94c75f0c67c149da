"""Ways out of the reference trainer, on real ranks without a launcher."""

import re
import resource
import signal
import time
from pathlib import Path

from rsup.worker.checkpoint_directory import CheckpointDirectory

LONG = ("--iterations", "1000000", "--log-interval", "5")


def is_training(attempt) -> bool:
    return len(re.findall(r"iteration +\d+/", attempt.text())) >= 3


def left_after(attempt) -> int:
    found = re.search(r"leaving after iteration (\d+): ", attempt.text())
    assert found is not None, attempt.text()
    return int(found[1])


def test_a_signal_on_one_rank_is_answered_while_iterations_are_skipped(runs, tmp_path: Path) -> None:
    """P33: skipped iterations are only not computed. Signals are answered, intervals kept, and the exit is durable."""
    skipped = ",".join(str(iteration) for iteration in range(7, 20000))
    options = ("--exit-signal-handler", "--exit-signal", "TERM,USR1", "--save-interval", "4", "--keep-checkpoints", "100000")
    run = runs.start(2, *LONG, "--save", str(tmp_path), *options, "--iterations-to-skip", skipped)
    run.wait_for(lambda: "iteration 12 is skipped" in run.text(), "skipped iterations")
    run.signal(1, signal.SIGUSR1)
    assert run.finish() == [0, 0]
    assert "signal SIGUSR1" in run.text() and 12 <= left_after(run) < 20000
    kept = CheckpointDirectory(tmp_path).iterations()
    assert {4, 8, 12} <= set(kept) and max(kept) == left_after(run)


def test_the_time_budget_counts_from_the_oldest_rank_and_not_from_its_standby(runs, tmp_path: Path) -> None:
    """MAX over ranks; what a process waited as a warm standby is no training time."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    environment = {"RSUP_RANK_STARTED_S": f"{now_s + 3600:.3f}"}
    options = ("--exit-duration-in-mins", "0.001", "--exit-interval", "9")
    run = runs.start(1, *LONG, "--save", str(tmp_path), *options, environment=environment)
    assert run.finish() == [0] and left_after(run) == 9
    environment = {"RSUP_RANK_STARTED_S": f"{now_s - 3600:.3f}"}
    run = runs.start(2, *LONG, "--save", str(tmp_path), "--exit-duration-in-mins", "59", environment=environment, number=2)
    assert run.finish() == [0, 0] and left_after(run) == 10


def test_a_signal_that_wants_no_save_ends_all_ranks_in_order(runs, tmp_path: Path) -> None:
    """P35: `--exit-signal-handler-for-training` does no collective in its handler, nor does it replace the other one."""
    run = runs.start(2, *LONG, "--save", str(tmp_path / "a"), "--exit-signal-handler-for-training")
    both = ("--exit-signal-handler", "--exit-signal-handler-for-training")
    saving = runs.start(1, *LONG, "--save", str(tmp_path / "b"), *both, job="saving")
    for attempt in (run, saving):
        attempt.wait_for(lambda attempt=attempt: is_training(attempt), "training")
        attempt.signal(0, signal.SIGTERM)
    assert run.finish() == [0, 0] and saving.finish() == [0]
    assert CheckpointDirectory(tmp_path / "a").iterations() == []
    assert CheckpointDirectory(tmp_path / "b").iterations() == [left_after(saving)]


def test_a_save_that_fails_on_the_way_out_ends_with_1_and_says_so(runs, tmp_path: Path) -> None:
    """An exit needs a durable save."""
    run = runs.start(2, *LONG, "--save", str(tmp_path), "--save-interval", "100000", "--exit-signal-handler")
    run.wait_for(lambda: is_training(run), "training")
    resource.prlimit(run.pids[1], resource.RLIMIT_FSIZE, (4096, 4096))  # as a disk that is full
    run.signal(0, signal.SIGTERM)
    run.wait_for(lambda: None not in run.codes(), "the end")
    assert run.codes() == [1, 1]
    assert f"no durable checkpoint of iteration {left_after(run)}: " in run.text()
    assert not list(tmp_path.glob("iter_*")), "what either rank had written goes, also on a disk that is full"


def test_ranks_of_another_phase_leave_at_once(runs, tmp_path: Path) -> None:
    """The checkpoint that is found decides which phase the job is in, not a counter."""
    first = runs.run(1, "--iterations", "6", "--save", str(tmp_path))
    assert first.codes() == [0]
    phase = {"RSUP_PHASE": "1", "RSUP_PHASE_ITERATION_OFFSET": "8", "RSUP_PHASE_UNTIL_ITERATION": "14"}
    early = runs.start(1, *LONG, "--save", str(tmp_path), environment=phase, number=2)
    assert early.finish() == [0] and left_after(early) == 6
    assert "6 iterations are done, and this phase begins after 8" in early.text()
    over = {"RSUP_PHASE": "0", "RSUP_PHASE_UNTIL_ITERATION": "6"}
    late = runs.start(1, *LONG, "--save", str(tmp_path), environment=over, number=3)
    assert late.finish() == [0] and "this phase ends after 6" in late.text()
    refused = runs.start(1, *LONG, "--save", str(tmp_path), "--phase-transition-iterations", "9", environment=over, number=4)
    assert refused.finish() == [2] and "the phases come from rsup launch --phases" in refused.text()


def test_reading_ahead_changes_nothing_of_the_result(runs, tmp_path: Path) -> None:
    """The position in a checkpoint is that of the samples trained on, not of those that the loader's processes have read."""
    plain = runs.run(1, "--iterations", "12", "--save", str(tmp_path / "a"))
    ahead = ("--save", str(tmp_path / "b"), "--num-workers", "2")
    first = runs.run(1, "--iterations", "12", "--exit-interval", "6", *ahead, job="ahead")
    assert first.codes() == [0] and left_after(first) == 6
    second = runs.run(1, "--iterations", "12", *ahead, job="ahead", number=2)
    assert second.codes() == [0] and second.digest() == plain.digest()


PLAIN = """
import sys, time
import torch.distributed as dist
from rsup.worker.leaving import Leaving

dist.init_process_group("gloo")
leaving = Leaving(save_interval=5, signals=("SIGUSR1",))
iteration = 0
while True:
    iteration += 1
    time.sleep(0.001)
    todo = leaving.after(iteration)
    try:
        if todo.save:
            with leaving.saving():
                if todo.leave and dist.get_rank() == 0:
                    raise OSError("the disk is full")
                print("saved", iteration, flush=True)
    except OSError as error:
        print(error, flush=True)
    if todo.leave:
        break
code = leaving.leave()
dist.destroy_process_group()
sys.exit(code)
"""


def test_a_plain_loop_of_two_ranks(runs, tmp_path: Path) -> None:
    """Three lines in a loop of one's own: a signal to one rank, one save on all; no success where one rank cannot save."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    run = runs.start(2, script=script)
    run.wait_for(lambda: "saved 10\n" in run.text(0) and "saved 10\n" in run.text(1), "saves at the interval")
    run.signal(1, signal.SIGUSR1)
    run.wait_for(lambda: None not in run.codes(), "the end")
    assert run.codes() == [1, 1], run.text()
    saved = [re.findall(r"saved (\d+)", run.text(rank))[-1] for rank in (0, 1)]
    assert "the disk is full" in run.text() and int(saved[1]) == left_after(run) != int(saved[0])
