"""The result file: how the job ended, as it really was. (srun rewrites exit codes; nobody rewrites this.)"""

import contextlib
import json
import os
from pathlib import Path

from rsup.supervisor import wire


def write_results(
    result: wire.JobResult, job_id: str, run: int, state_dir: Path, result_file: Path | None, *, is_first_node: bool = True
) -> list[str]:
    """Write the result to `result_file` where one is named, and to `jobs/<id>.<run>/result.json` of the state directory.

    Each file is replaced at once, never half-written. Returns a line for each that could not be written; never raises for it.
    """
    content = {
        "job_id": job_id,
        "run": run,
        "exit_code": result.exit_code,
        "reason": result.reason,
        "rank": result.rank,
        "node": result.node,
        "attempts": result.attempts,
        "written_us": wire.now_us(),
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
