"""The processes of the matrix: one set of gloo ranks for each number of ranks, forked from one that has imported torch. A set
does all runs of its size, one after the other."""

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rsup.worker
from rsup.supervisor.wire import CaseReport
from rsup.worker.corruption import MemoryMarks
from rsup.worker.deterministic import make_deterministic
from rsup.worker.faults import parse_any_fault
from rsup.worker.numeric_faults import NumericFault
from tests.rerun_matrix.runs import Expected, Run
from tests.rerun_matrix.supervision import MAX_RESTARTS, Placement
from tests.rerun_matrix.training_loop import Outcome, Rank, run_attempt

COLLECTIVE_S = 120.0


@dataclass(frozen=True)
class Found:
    """What became of a run, and what is wrong with that (empty: nothing)."""

    number: int
    verdicts: tuple[str, ...]
    accused: tuple[str, ...]
    ends: str
    num_attempts: int
    wrong: str
    reasons: tuple[str, ...] = ()


def run_all(runs: Sequence[Run], within_s: float) -> list[Found]:
    """Run them; the processes have ended when this returns. Raise `RuntimeError` when a rank fails or time is up."""
    found: list[Found] = []
    folder = Path(tempfile.mkdtemp(prefix="rm-", dir="/tmp"))
    deadline = time.monotonic() + within_s
    try:
        for world_size in sorted({run.world_size for run in runs}):
            ours = [run for run in runs if run.world_size == world_size]
            found += _run_set(ours, world_size, folder / str(world_size), deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _run_set(runs: Sequence[Run], world_size: int, folder: Path, deadline: float) -> list[Found]:
    folder.mkdir()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _become_rank(runs, rank, world_size, folder)
        pids.append(pid)
    failed = ""
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            pids.remove(pid)
            failed = failed or ("" if status == 0 else f"a rank of {world_size} ended with {status}")
        if pids and not pid and (failed or time.monotonic() > deadline):
            for left in pids:
                os.kill(left, signal.SIGKILL)
            failed = failed or f"{world_size} ranks were not done in time"
        elif not pid:
            time.sleep(0.02)
    if failed:
        done = (folder / "found.jsonl").read_text().splitlines() if (folder / "found.jsonl").exists() else []
        raise RuntimeError(
            f"{failed}; {len(done)} of {len(runs)} runs were done, so it was in {runs[min(len(done), len(runs) - 1)]}"
        )
    return [_from_json(line) for line in (folder / "found.jsonl").read_text().splitlines()]


def _from_json(line: str) -> Found:
    values: dict[str, Any] = json.loads(line)
    lists: dict[str, Any] = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Found(**(values | lists))


def _become_rank(runs: Sequence[Run], rank: int, world_size: int, folder: Path) -> None:
    code = 1
    try:
        make_deterministic()
        where, timeout = f"file://{folder}/store", timedelta(seconds=COLLECTIVE_S)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=timeout)
        player = _Player(rank, folder)
        for run in runs:
            found = player.play(run)
            if rank == 0:
                with (folder / "found.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Player:
    """Plays runs on one rank, and judges them."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = folder
        self._reports: list[CaseReport] = []
        self._references: dict[tuple[Any, ...], str] = {}
        self._attempt = 1
        self._job = ""
        worker: Any = rsup.worker
        worker.report_case = self._hear
        worker.attempt = lambda: self._attempt
        worker.job_key = lambda: self._job

    def _hear(self, report: CaseReport, within_s: float = 0.0) -> bool:
        self._reports.append(report)
        return True

    def play(self, run: Run) -> Found:
        """Train to the end, with restarts. Collective."""
        self._job, self._attempt = f"run-{run.number}", 1
        folder = self._folder / self._job
        mine = Rank(run, self._rank, folder, MemoryMarks(), [])
        placement, outcome, ends = Placement(run.devices, run.spares), Outcome("", b""), ""
        reports: list[CaseReport] = []
        while not ends:
            self._reports = []
            outcome = run_attempt(mine, placement.devices[self._rank], outcome.checkpoint)
            told = self._told_by_rank_0()
            reports += told
            ends = _follow(outcome, told, placement)
            self._attempt += 1
            mine.attempt = self._attempt
            if self._attempt > MAX_RESTARTS + 1:
                ends = ends or "restarts without end"
        shutil.rmtree(folder, ignore_errors=True)
        struck = self._anyone(bool(mine.said))
        return self._judge(run, reports, ends, outcome.digest, struck)

    def _told_by_rank_0(self) -> list[CaseReport]:
        box: list[Any] = [self._reports]
        dist.broadcast_object_list(box, src=0)
        told: list[CaseReport] = box[0]
        return told

    def _anyone(self, mine: bool) -> bool:
        number = torch.tensor([int(mine)])
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number[0])

    def _judge(self, run: Run, reports: list[CaseReport], ends: str, digest: str, struck: bool) -> Found:
        closed = {report.case_id: report for report in reports if report.verdict}
        verdicts = tuple(report.verdict for report in closed.values())
        if run.expected.may_be_undecided_first:
            first = next((i for i, verdict in enumerate(verdicts) if verdict != "undecided"), len(verdicts))
            verdicts = verdicts[first:]
        accused = frozenset(uuid for report in closed.values() if report.verdict == "persistent" for uuid in report.accused)
        expected = run.expected if struck or not _may_not_strike(run) else Expected(((),), result="undisturbed")
        if run.expected.may_stay_open and not verdicts:
            expected = Expected(((),), ends="no second device")
        wrong = []
        if verdicts not in expected.verdicts:
            wrong.append(f"verdicts {list(verdicts)} instead of {' or '.join(str(list(v)) for v in expected.verdicts)}")
        if accused - expected.accused:
            wrong.append(f"healthy {sorted(accused - expected.accused)} accused")
        if verdicts and expected.accused - accused:
            wrong.append(f"{sorted(expected.accused - accused)} not accused")
        if ends != expected.ends:
            wrong.append(f"ends {ends!r} instead of {expected.ends!r}")
        if len(closed) != sum(bool(report.verdict) for report in reports):
            wrong.append("two verdicts on one case")
        if expected.result and ends == "finished" and digest != self._reference(run, expected.result):
            wrong.append("its parameters are not those of the run without the fault")
        reasons = tuple(report.reason for report in reports if report.reason)
        return Found(run.number, verdicts, tuple(sorted(accused)), ends, self._attempt - 1, "; ".join(wrong), reasons)

    def _reference(self, run: Run, kind: str) -> str:
        """Digest of the run without faults, or with the poisoned iterations left out. Collective."""
        faults = [parse_any_fault(text) for text in run.faults]
        poisoned = frozenset(f.iteration for f in faults if isinstance(f, NumericFault) and f.is_data)
        skip = poisoned if kind == "skipped" else frozenset()
        key = (run.dropout, run.own_position, skip)
        if key not in self._references:
            calm = replace(run, faults=(), kill_at=None, audit_interval=0)
            mine = Rank(calm, self._rank, self._folder / "reference", MemoryMarks(), [], skip=skip)
            self._references[key] = run_attempt(mine, f"D{self._rank}", b"").digest
        return self._references[key]


def _may_not_strike(run: Run) -> bool:
    """Of faults that show for some data only it is known afterwards whether they struck."""
    return any("when=" in fault for fault in run.faults)


def _follow(outcome: Outcome, told: list[CaseReport], placement: Placement) -> str:
    """How the run ends; empty: with another attempt."""
    if outcome.ended == "finished":
        return "finished"
    if outcome.ended == "killed":
        return ""
    last = told[-1] if told else None
    if last is None or not last.action:
        return f"exit {outcome.exit_code} without a case"
    if last.action == "restart":
        return ""
    if last.action == "leave":
        return "left"
    if last.action != "elsewhere":
        return f"exit {outcome.exit_code} after {last.action}"
    if last.verdict == "persistent":
        return "" if placement.without(last.accused) else "no device left"
    return "" if placement.elsewhere(last.tried) else "no second device"
