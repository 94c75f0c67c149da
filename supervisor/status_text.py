"""`rsup jobs` and `rsup status` for people: text from the dicts of `views`."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rsup.supervisor.case_text import cases_text
from rsup.supervisor.curve_text import curve_lines
from rsup.supervisor.render import PLAIN, STATE_COLOURS, Paint, clean, duration, moment, percent, plural, table
from rsup.supervisor.straggler_text import straggler_lines
from rsup.supervisor.training_text import time_table, work_lines

Json = Mapping[str, Any]

MAX_RANKS = 64
MAX_INCIDENTS = 10
MAX_CASES = 5


def size_of(job: Json) -> str:
    """Its ranks and nodes, and those that wait for a loss."""
    spares = f", {plural(job['num_spares'], 'spare node')}" if job.get("num_spares") else ""
    return f"{plural(job['num_ranks'], 'rank')} on {plural(job['num_nodes'], 'node')}{spares}"


def state_of(job: Json) -> str:
    """The state, or how it ended."""
    return str(job.get("outcome") or job["state"])


def jobs_text(jobs: Sequence[Json], width: int | None = None, paint: Paint = PLAIN) -> str:
    """A table of jobs, newest first."""
    if not jobs:
        return "no jobs yet: start one with `rsup launch`"
    is_of_slurm = any(job.get("state_dir") for job in jobs)
    headings = ["JOB", "OWNER", "STATE", "EXIT", "ITERATION", "ATTEMPTS", "INCIDENTS", "CREATED", "REASON"]
    headings[-1:-1] = ["STATE DIRECTORY"] * is_of_slurm
    rows = [
        (
            job["name"],
            job["owner"],
            state_of(job),
            job.get("exit_code"),
            job.get("iteration") or None,
            job.get("num_attempts"),
            job.get("num_incidents"),
            moment(job.get("created")),
            *[_below_slurm(job.get("state_dir"))] * is_of_slurm,
            job.get("reason"),
        )
        for job in jobs
    ]
    return table(headings, rows, width, right=(3, 4, 5, 6), paint=paint)


def _below_slurm(state_dir: str | None) -> str:
    return f"slurm/{PurePath(state_dir).name}" if state_dir else ""


def status_text(status: Json, width: int | None = None, paint: Paint = PLAIN) -> str:
    """Header, what looks stuck, ranks, incidents, checkpoints and what is at risk, where the time went."""
    job = status["job"]
    if "ranks" not in status:
        return f"job {clean(job['name'])} of {clean(job['owner'])}: {job['state']} (only its owner and operators see more)"
    parts = [_header(status, paint)]
    parts += [f"{paint('looks stuck:', 'yellow')} {_suspect(one)}" for one in status["suspects"]]
    parts += straggler_lines(status.get("stragglers"), paint)
    parts += ["", _ranks(status, width, paint)]
    if status["incidents"]:
        parts += ["", _incidents(status, width, paint)]
    if status["cases"]:
        parts += ["", cases_text(status["cases"][-MAX_CASES:], width, paint)]
    if curves := status.get("curves"):  # an older supervisor has none
        parts += ["", *curve_lines(curves, paint)]
    parts += ["", *work_lines(status, paint)]
    if status["goodput"]["ratio"] is not None:
        parts += ["", time_table(status["goodput"], width, paint)]
    return "\n".join(parts)


def _header(status: Json, paint: Paint) -> str:
    job, goodput, supervisor = status["job"], status["goodput"], status["supervisor"]
    state = state_of(job)
    colour = "red" if state == "failed" else "green" if state == "succeeded" else STATE_COLOURS.get(state, "")
    facts = [f"iteration {job['iteration']}"] if job["iteration"] else []
    facts += [f"goodput {percent(goodput['ratio'])}"] if goodput["ratio"] is not None else []
    facts += [f"exit code {job['exit_code']}"] if job["exit_code"] is not None else []
    lines = ["  ".join([paint(f"job {clean(job['name'])}", "bold"), paint(state, colour), *facts])]
    until = f"to {moment(job['ended'])}" if job["ended"] else "until now"
    lines.append(f"  owner {clean(job['owner'])}, attempt {job['attempt']}, {size_of(job)}")
    lines.append(f"  from {moment(job['created'])} {until} ({duration(goodput['wall_s'])})")
    if job.get("waiting_for"):
        lines.append(f"  {paint('waits for:' if job['state'] != 'running' else 'note:', 'yellow')} {clean(job['waiting_for'])}")
    if job["reason"]:
        lines.append(f"  {clean(job['reason'])}")
    if standbys := status["standbys"]:
        ready, size = sum(one["ready"] for one in standbys), sum(one["size_bytes"] for one in standbys)
        lines.append(f"  {plural(ready, 'warm standby')} ready, {size >> 20} MB")
    if supervisor:
        lines.append(f"  supervisor {supervisor['pid']} on {supervisor['host']}, page {supervisor['address'] or 'off'}")
    elif not job["ended"]:
        seen = f"ranks as last stored at {moment(status['beats_at'])}" if status["beats_at"] else "no beats stored"
        lines.append(f"  no supervisor answers; {seen}")
    return "\n".join(lines)


def _suspect(one: Json) -> str:
    where = f", on {clean(one['node'])}" if one["node"] else ""
    return f"{clean(one['text'])}{where}, since {moment(one['since'])} (nothing was killed)"


def _ranks(status: Json, width: int | None, paint: Paint) -> str:
    ranks = status["ranks"]
    if not ranks:
        return "no ranks yet" if not status["job"]["ended"] else "no rank was ever started"
    shown = ranks
    if len(ranks) > MAX_RANKS:
        shown = sorted(ranks, key=_trouble, reverse=True)[:MAX_RANKS]
    headings = ("RANK", "NODE", "DEVICE", "ITERATION", "OPEN SECTION", "BEAT", "PID", "END")
    rows = [
        (
            rank["rank"],
            rank["node"],
            short_device(rank["device"]),
            rank["iteration"] or None,
            ", ".join(f"{one['name']} {duration(one['age_s'])}" for one in rank["open_sections"]),
            duration(rank["beat_age_s"]),
            rank["pid"],
            end_of_rank(rank),
        )
        for rank in shown
    ]
    text = table(headings, rows, width, right=(0, 3, 5, 6), paint=paint)
    return text if shown is ranks else f"{text}\n{len(shown)} of {len(ranks)} ranks, oldest beats first; --json has all"


def short_device(device: str | None) -> str:
    """A device as a table shows it: the stand-in of a rank without a GPU has a long name that says nothing to people."""
    return "CPU" if device and device.startswith("CPU-") else device or ""


def _trouble(rank: Json) -> tuple[int, float]:
    return (1 if rank["exit_code"] else 0, rank["beat_age_s"] or 0.0)


def end_of_rank(rank: Json) -> str:
    """How a rank ended, empty while it runs."""
    if rank["signal"]:
        return f"signal {rank['signal']}"
    return "" if rank["exit_code"] is None else f"exit {rank['exit_code']}"


def _incidents(status: Json, width: int | None, paint: Paint) -> str:
    found, count = status["incidents"], status["counts"]["incidents"]
    headings = ("INCIDENT", "TIME", "ATTEMPT", "KIND", "RANK", "ITERATION", "RECOVERY", "LOST", "WHAT")
    rows = [
        (
            one["incident"],
            moment(one["at"]),
            one["attempt"],
            one["kind"],
            one["rank"],
            one["iteration"] or None,
            duration(one["recovery_s"]),
            one["lost_iterations"],
            one["text"],
        )
        for one in found[-MAX_INCIDENTS:]
    ]
    text = table(headings, rows, width, right=(0, 2, 4, 5, 6, 7), paint=paint)
    if count > len(rows):
        text += f"\nthe newest {len(rows)} of {count} incidents; `rsup report` tells more"
    return text
