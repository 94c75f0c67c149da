"""The result file: how the job ended, as it really was. (srun rewrites exit codes; nobody rewrites this.)"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rsup.launcher.failure_report import is_victim
from rsup.launcher.process_state import AgentState
from rsup.launcher.slurm.environment import read_place
from rsup.supervisor import wire

MAX_BYTES = 1 << 20


def failures_of(state: AgentState, error_file_of: Callable[[int], Path | None]) -> list[dict[str, Any]]:
    """What the ranks of this node that failed in the last attempt died of, the first mover first, victims last."""
    failed = sorted((e for e in state.exits if e.exit_code), key=lambda e: (is_victim(e), e.at_us, e.rank))
    return [_failure(exited, state, error_file_of(exited.rank)) for exited in failed]


def _failure(exited: wire.RankExited, state: AgentState, error_file: Path | None) -> dict[str, Any]:
    local_rank = exited.rank - state.start.first_rank if state.start else -1
    return {
        "rank": exited.rank,
        "local_rank": local_rank,
        "pid": state.ranks[local_rank].pid if 0 <= local_rank < len(state.ranks) else 0,
        "exit_code": exited.exit_code,
        "signal": exited.signal,
        "at_us": exited.at_us,
        "by_rsup": exited.by_us,
        "error": exited.error,
        "error_file": str(error_file) if error_file is not None and error_file.is_file() else "",
    }


def write_results(
    result: wire.JobResult,
    job_id: str,
    run: int,
    state_dir: Path,
    result_file: Path | None,
    *,
    is_first_node: bool = True,
    failures: Sequence[dict[str, Any]] = (),
    avoid_nodes: Sequence[str] = (),
) -> list[str]:
    """Write the result to `result_file` where one is named, and to `jobs/<id>.<run>/result.json` of the state directory.
    `failures`: of `failures_of`. `avoid_nodes`: on which the job must not run again.

    Each file is replaced at once, never half-written. Returns a line for each that could not be written; never raises for it.
    """
    content = {
        "job_id": job_id,
        "run": run,
        "exit_code": result.exit_code,
        "reason": result.reason,
        "rank": result.rank,
        "node": result.node,
        "avoid_nodes": list(avoid_nodes),
        "attempts": result.attempts,
        "failures": list(failures),
        "written_us": wire.now_us(),
        "slurm": _slurm_start(os.environ),
    }
    paths = [result_file] if result_file else []
    if job_id and is_first_node:
        paths.append(state_dir / "jobs" / f"{job_id.replace('/', '_')}.{run}" / "result.json")
    problems = []
    for path in paths:
        try:
            _replace(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            problems.append(f"rsup: cannot write the result file {path}: {error.strerror}")
    return problems


def read_result(path: Path) -> dict[str, Any]:
    """What a result file says. Raise OSError, or ValueError for what is none."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("a pipe, a device or a directory")
        content = json.loads(file.read(MAX_BYTES))
    if not isinstance(content, dict) or "exit_code" not in content:
        raise ValueError("no exit code")
    return content


def remove_old_result(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """The result of an earlier launch, which nobody must take for this one's; what another node of the same step has written
    stays, and so does what is no result file. Raise OSError where it cannot be removed."""
    try:
        old = read_result(path)
    except (OSError, ValueError):
        return
    this = _slurm_start(environ)
    if this is None or not this["step"] or old.get("slurm") != this:
        path.unlink(missing_ok=True)


def _slurm_start(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Which start of which SLURM job, and which of its steps; None outside of one."""
    place = read_place(environ)
    return {"job": place.job, "restarts": place.num_restarts, "step": place.step} if place else None


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
