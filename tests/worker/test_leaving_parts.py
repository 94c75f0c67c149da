"""The parts of leaving on purpose, each alone: deadline, owner of signals, phases, a plain loop, a loader's processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker.agreement import Agreement
from rsup.worker.deadline import ASSUMED_SAVE_S, SAVE_FACTOR, WAY_OUT_S, Deadline, read_deadline
from rsup.worker.exit_signals import ExitSignals
from rsup.worker.leaving import Leaving
from rsup.worker.phases import JobPhase, current_phase
from rsup.worker.reference.batch_sizes import BatchSizes
from rsup.worker.reference.phase_start import FROM_THE_BEGINNING, PhaseStart, begin_of_phase

# ---------------------------------------------------------------------------------------------------------------- deadline


def test_the_last_safe_moment_follows_from_what_was_measured() -> None:
    deadline = Deadline(end_s=1000.0, margin_s=10.0)
    deadline.iterated_in(2.0)
    deadline.iterated_in(3.0)
    deadline.saved_in(20.0)
    deadline.saved_in(30.0)
    last_s = 1000.0 - 10.0 - SAVE_FACTOR * 30.0 - 3.0
    assert deadline.last_safe_s(0.0) == last_s
    assert not deadline.is_near(last_s - 0.1) and deadline.is_near(last_s)
    assert "a save takes 30.0 s (measured), an iteration 3.0 s" in deadline.text(last_s)
    assert deadline.is_near(1029.0) and not deadline.is_near(1031.0), "an end that nothing outlives was moved"


def test_an_end_that_is_near_only_by_assumption_is_a_reason_to_measure() -> None:
    deadline = Deadline(end_s=1000.0, margin_s=10.0)
    near_s = 1000.0 - 10.0 - SAVE_FACTOR * ASSUMED_SAVE_S
    assert not deadline.should_measure(near_s - 1) and deadline.should_measure(near_s)
    deadline.measure(near_s)
    assert not deadline.should_measure(near_s + 1) and not deadline.is_near(near_s + 1), "the save is under way"
    assert deadline.is_near(near_s + 60), "so slow a save would not be done twice in time"
    deadline.saved_in(0.5)
    assert not deadline.is_near(near_s + 60)
    assert not Deadline(1000.0, 10.0).should_measure(995.0), "too late for an experiment"
    assert not Deadline(1000.0, 10.0, save_s=5.0).should_measure(near_s), "an earlier attempt has measured"


@pytest.mark.parametrize(
    ("environ", "end_s", "margin_s"),
    [
        ({}, None, 0.0),
        ({"RSUP_DEADLINE": "2000", "RSUP_DEADLINE_MARGIN": "7", "SLURM_JOB_END_TIME": "1"}, 2000.0, 7 + WAY_OUT_S),
        ({"SLURM_JOB_END_TIME": "3000"}, 3000.0, WAY_OUT_S),
        ({"RSUP_DEADLINE": "soon"}, None, 0.0),
        ({"RSUP_DEADLINE": "nan"}, None, 0.0),
        ({"RSUP_DEADLINE": "-5"}, None, 0.0),
    ],
)
def test_the_deadline_comes_from_the_environment(environ: dict[str, str], end_s: float | None, margin_s: float) -> None:
    found = read_deadline(environ)
    assert (found.end_s if found else None) == end_s
    assert found is None or found.margin_s == margin_s


# ----------------------------------------------------------------------------------------------------------------- signals


@pytest.fixture
def default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
def test_signals_have_one_owner_also_over_entries() -> None:
    """P35: an entry that a fault ended released nothing; the next one takes over, and what was there first comes back."""
    mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    first = ExitSignals(("SIGUSR1", "SIGUSR2"))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert first.received == "SIGUSR2"
    second = ExitSignals(("SIGUSR1", "SIGUSR2"))
    assert second.received == "SIGUSR2", "what came before the fault still counts"
    os.kill(os.getpid(), signal.SIGUSR1)
    assert second.received == "SIGUSR2" and not second.replaced()
    first.release()
    assert not second.replaced(), "an object that owns nothing any more changes nothing"
    third = ExitSignals(("SIGUSR1",))
    assert third.received == "SIGUSR1" and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    third.release()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, mine)


@pytest.mark.usefixtures("default_handlers")
def test_another_handler_over_ours_is_noticed_and_left_alone() -> None:
    ours = ExitSignals(("SIGUSR1",))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert ours.replaced() == ["SIGUSR1"]
    ours.release()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


# ------------------------------------------------------------------------------------------------------------------ phases


def test_the_phase_comes_from_the_environment() -> None:
    assert current_phase({}) is None
    environ = {
        "RSUP_PHASE": "1",
        "RSUP_PHASE_NAME": "x",
        "RSUP_PHASE_ITERATION_OFFSET": "8",
        "RSUP_PHASE_UNTIL_ITERATION": "14",
    }
    phase = current_phase(environ)
    assert phase is not None and phase == JobPhase(1, "x", 8, None, 14)
    assert [bool(phase.problem_at(iteration)) for iteration in (7, 8, 13, 14)] == [True, False, False, True]
    ends = current_phase({**environ, "RSUP_PHASE_ENDS": "8,14,30"})
    assert ends is not None and [ends.left_out(last) for last in (31, 30, 14)] == [
        "",
        "phase 3 ends after iteration 30 and the training after 30: the last phase gets no iterations",
        "phase 2 ends after iteration 14 and the training after 14: phases 3 to 4 get no iterations",
    ]
    with pytest.raises(UsageError, match="RSUP_PHASE=one is not a whole number"):
        current_phase({"RSUP_PHASE": "one"})


@pytest.mark.parametrize(
    ("phase", "transitions", "iteration", "samples", "saved", "start"),
    [
        (None, (), 7, 56, FROM_THE_BEGINNING, PhaseStart(0, 0)),
        (None, (8, 14), 7, 56, FROM_THE_BEGINNING, PhaseStart(0, 0)),
        (None, (8, 14), 8, 60, FROM_THE_BEGINNING, PhaseStart(8, 60)),
        (None, (8, 14), 9, 68, PhaseStart(8, 60), PhaseStart(8, 60)),
        (None, (8, 14), 9, 72, FROM_THE_BEGINNING, PhaseStart(8, 64)),
        (JobPhase(1, "", 8, 61, 14), (), 9, 68, PhaseStart(8, 60), PhaseStart(8, 61)),
        (JobPhase(1, "", 8, None, 14), (), 8, 60, FROM_THE_BEGINNING, PhaseStart(8, 60)),
    ],
    ids=["none", "first", "begins", "goes on", "not told", "supervisor knows", "supervisor does not"],
)
def test_where_a_phase_began(
    phase: JobPhase | None, transitions: tuple[int, ...], iteration: int, samples: int, saved: PhaseStart, start: PhaseStart
) -> None:
    assert begin_of_phase(phase, transitions, iteration, samples, saved, BatchSizes(8).consumed_after) == start


# ------------------------------------------------------------------------------------------------------------ a plain loop


@pytest.mark.usefixtures("default_handlers")
def test_a_plain_loop_leaves_after_its_save(capsys: pytest.CaptureFixture[str]) -> None:
    leaving = Leaving(save_interval=2, signals=("SIGUSR1",))
    saved = []
    for iteration in range(1, 10):
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        todo = leaving.after(iteration)
        if todo.save:
            with leaving.saving():
                saved.append(iteration)
        if todo.leave:
            assert (iteration, todo.kind, leaving.leave()) == (3, "signal", 0)
            break
    assert saved == [2, 3] and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert "leaving after iteration 3: signal SIGUSR1" in capsys.readouterr().out


def test_a_plain_loop_whose_save_fails_ends_with_1() -> None:
    """An exit needs a durable save: without one the way out is no success."""
    leaving = Leaving(signals=(), exit_interval=1)
    assert leaving.after(1).save
    with pytest.raises(OSError, match="disk"), leaving.saving():
        raise OSError("the disk is full")
    assert leaving.leave() == 1


def test_a_plain_loop_of_another_phase_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSUP_PHASE", "1")
    monkeypatch.setenv("RSUP_PHASE_ITERATION_OFFSET", "8")
    leaving = Leaving(signals=())
    assert not leaving.resumed(8).leave
    todo = leaving.resumed(5)
    assert todo.leave and todo.kind == "phase" and not todo.save and leaving.leave() == 0


# -------------------------------------------------------------------------------------------------- a loader's processes

LOADER = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from rsup.worker.data_workers import WorkerInit, starting

class Pids(Dataset):
    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])

def main(method):
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    loader = DataLoader(Pids(), batch_size=None, sampler=range(1 << 40), num_workers=2, multiprocessing_context=method,
                        worker_init_fn=WorkerInit(("SIGTERM", "SIGINT")))
    with starting(("SIGTERM", "SIGINT"), method):
        batches = iter(loader)
        os.killpg(0, signal.SIGTERM)        # while they start, to all of them
    seen = [next(batches).tolist() for _ in range(8)]
    os.killpg(0, signal.SIGTERM)            # a fork server among them
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    seen += [next(batches).tolist() for _ in range(8)]
    assert [index for index, _ in seen] == list(range(16)), seen
    assert len({pid for _, pid in seen}) == 2, "no worker was replaced"
    assert got == [signal.SIGTERM] * 2, got
    print("fine")

got = []
if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_signals_to_the_whole_group_leave_the_loaders_processes_alive(method: str, tmp_path: os.PathLike[str]) -> None:
    """P35: workers keep an exit signal from killing them, those of a fork server (which start as spawned ones do) as well."""
    script = os.path.join(tmp_path, "loader.py")
    with open(script, "w") as file:
        file.write(LOADER)
    command = [sys.executable, "-W", "ignore", script, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, start_new_session=True)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stdout + done.stderr


def test_an_iteration_is_measured_where_every_iteration_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: the time of the save is no iteration's, and the rest of the iteration counts all the same."""
    clock = [100.0]
    monkeypatch.setattr("rsup.worker.agreement.time.monotonic", lambda: clock[0])
    deadline = Deadline(end_s=1e12)
    agreement = Agreement(deadline=deadline)
    for iteration in range(1, 4):
        agreement.ask(iteration)
        with agreement.standing_still():
            clock[0] += 50.0
        clock[0] += 2.0
    assert "an iteration 2.0 s" in deadline.text(0.0)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the rank tells the supervisor of its saves."""
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr("rsup.worker.report_save", lambda *words, text="": told.append((*words, text)))
    monkeypatch.setattr("rsup.worker.report_checkpoint", lambda *words: told.append(("durable", *words)))
    return told


def test_a_plain_loops_saves_are_reported_with_the_time_that_they_took(reports: list[tuple[object, ...]]) -> None:
    """So that goodput knows them: training stands still for all of such a save."""
    leaving = Leaving(save_interval=1, signals=())
    assert leaving.after(1).save
    with leaving.saving("/c"):
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.01:
            pass
    begun, durable, stood = reports
    assert begun == (1, "begun", "/c", "") and durable[:3] == ("durable", 1, "/c")
    assert stood[:3] == (1, "stood", "/c") and stood[3] == durable[3]
    assert isinstance(stood[3], float) and stood[3] >= 0.01


def test_a_failed_save_is_said_at_once_and_counts_nowhere(
    capsys: pytest.CaptureFixture[str], reports: list[tuple[object, ...]]
) -> None:
    leaving = Leaving(save_interval=1, signals=())
    assert leaving.after(1).save
    with pytest.raises(OSError, match="disk"), leaving.saving("/c"):
        raise OSError("the disk is full")
    assert reports == [(1, "begun", "/c", ""), (1, "failed", "/c", "OSError: the disk is full")]
    assert "the save of iteration 1 has failed: OSError: the disk is full" in capsys.readouterr().err
    assert leaving.leave() == 1
