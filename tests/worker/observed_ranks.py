"""Ranks whose timers and straggler detectors report together; run by `test_observed_ranks.py`."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rsup.supervisor.wire import StragglerReport
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.timers import Timers
from rsup.worker.observe.training_log import TrainingLog, TrainingLogOptions
from rsup.worker.rerun.contract import RankDevice


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns


def fail(text: str) -> None:
    raise AssertionError(text)


def alike(value: Any, size: int) -> bool:
    everyones = [None] * size
    dist.all_gather_object(everyones, value)
    return all(one == everyones[0] for one in everyones)


def check_times_of_all_ranks_come_in_one_collective(rank: int, size: int) -> None:
    timers = Timers(2, "minmax", warn=fail)
    timers("forward-compute", 2).set_elapsed(0.010 * (rank + 1))
    if rank == 1:
        timers("on one rank", 2).set_elapsed(0.5)
    names = ["forward-compute", "on one rank", "optimizer"]
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
        gathered = timers.gather(names, normalizer=2, reset=False)
        assert timers.gather([]).seconds == {}
    assert gathers.call_count == 1
    assert gathered.maxima() == {"forward-compute": 0.015, "on one rank": 0.25}
    assert gathered.minima()["forward-compute"] == 0.005 and gathered.seconds["on one rank"] == [None, 0.25, None]
    text = timers.log(reset=False)
    assert text is not None and "(10.00, 30.00)" in text and "(500.00, 500.00)" in text and alike(text, size)
    assert timers.maxima(["forward-compute"], reset=True) == {"forward-compute": 0.030}
    assert timers.maxima(["forward-compute"]) == {}


def check_a_gather_with_a_barrier_meets_all_ranks_once_whoever_runs_a_timer(rank: int, size: int) -> None:
    timers = Timers(2, warn=fail)
    if rank == 1:
        for name in ("forward-compute", "on one rank"):
            timers(name, 2).start()
    with mock.patch.object(dist, "barrier", return_value=None) as barriers:  # counted, so that a wrong number hangs nobody
        gathered = timers.gather(["forward-compute", "on one rank"], barrier=True)
    assert barriers.call_count == 1
    assert [time is not None for time in gathered.seconds["on one rank"]] == [False, True, False]
    text = timers.log(["on one rank"], barrier=True)
    assert text is not None and alike(text, size)
    if rank == 1:
        timers("forward-compute").stop()
        timers("on one rank").stop()


def check_timers_of_level_1_meet_the_other_ranks_at_their_start(rank: int, size: int) -> None:
    with mock.patch.object(dist, "barrier", wraps=dist.barrier) as barriers:
        timers = Timers(2, warn=fail)
        with timers("optimizer", 1), timers("forward-compute", 2), timers("evaluate", 0):
            assert barriers.call_count == 1
        assert barriers.call_count == 1
        timers("forward-compute").start(barrier=True)
        timers("forward-compute").elapsed_s(barrier=True)
        timers("forward-compute").stop()
        assert barriers.call_count == 4
        for without in (Timers(2, barrier_with_level_1=False, warn=fail), Timers(2, mode="event", warn=fail)):
            with without("optimizer", 1):
                pass
        assert barriers.call_count == 4


def played(
    rank: int, clock: Clock, *, enabled: bool = False, requested: Callable[[], Mapping[str, bool]] = dict
) -> StragglerDetector:
    """A rank's detector under a clock that the test moves."""
    return StragglerDetector(
        rank=rank,
        device=RankDevice(f"CPU-{rank}", f"n{rank}"),
        torch_device=torch.device("cpu"),
        group=None,
        warn=fail,
        enabled=enabled,
        requested=requested,
        section_totals=dict,
        now_ns=clock,
    )


def measured(detector: StragglerDetector, clock: Clock, rank: int) -> None:
    timer = detector.timer("forward-compute")
    assert timer is not None
    with timer:
        clock.ns += 20_000_000 if rank == 2 else 10_000_000


def check_all_ranks_name_the_slow_one_and_switch_together(rank: int, size: int) -> None:
    clock, asked = Clock(), dict[str, bool]()
    detector = played(rank, clock, requested=lambda: asked)
    reports: list[StragglerReport | None] = []
    for iteration in range(1, 7):
        measured(detector, clock, rank)
        if iteration == 2 + rank % 2:  # rank 1 hears of it later
            asked["stragglers"] = True
        reports.append(detector.report(iteration))
        assert detector.is_on == (2 <= iteration <= 4)
        if iteration == 4 + rank % 2:
            asked["stragglers"] = False
    assert [report is not None for report in reports] == [False, False, True, True, True, False], reports
    assert alike(reports[2:5], size)
    for report in reports[2:5]:
        assert report is not None and report.num_ranks == size
        assert [(one.rank, one.device, one.slowdown) for one in report.stragglers] == [(2, "CPU-2", 2.0)]
        assert report.slowest[0].node == "n2"
    detector.close()


def check_a_pause_hides_no_slow_rank(rank: int, size: int) -> None:
    clock = Clock()
    detector = played(rank, clock, enabled=True)
    log = TrainingLog(TrainingLogOptions(train_iters=9), say=lambda text: None, warn=fail, pausable=[detector])
    for iteration in range(1, 4):
        measured(detector, clock, rank)
        if iteration == 2:
            with log.paused():
                clock.ns += 25_000_000_000
        report = detector.report(iteration)
        named = [] if report is None else [one.rank for one in report.stragglers]
        assert named == ([2] if iteration > 1 else []), (iteration, report)
    log.close()
    detector.close()


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in CHECKS:
        one(dist.get_rank(), dist.get_world_size())
        print(f"holds: {one.__name__}", flush=True)
    dist.destroy_process_group()
