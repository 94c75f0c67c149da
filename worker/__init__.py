"""What a training script tells rsup, and hears from it. Outside `rsup launch` every call does nothing.

    import rsup.worker

    rsup.worker.init()                              # once, early
    for iteration in range(start, end):
        rsup.worker.set_iteration(iteration)        # 1-based, global
        with rsup.worker.section("step"):
            train_step()

Calls come from the training thread; none of them blocks. A section costs well under a microsecond.
"""

import atexit
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rsup.supervisor import heartbeat_board as _board
from rsup.supervisor import wire as _wire
from rsup.worker.session import NoSession, Request, SectionLike, Session, connect

if TYPE_CHECKING:
    from rsup.worker.inprocess import InProcessSettings

_P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = [
    "Request",
    "agent_pid",
    "attempt",
    "declare_exit",
    "device_used",
    "heartbeat",
    "init",
    "is_supervised",
    "job_key",
    "limits",
    "note",
    "report_case",
    "report_checkpoint",
    "report_leaving",
    "report_metrics",
    "report_save",
    "report_straggler",
    "request_done",
    "requested",
    "requested_switches",
    "restartable",
    "resumed",
    "section",
    "section_totals",
    "set_iteration",
    "shutdown",
]

DECLARED_WITHIN_S = 1.0
_session: Session | NoSession | None = None


def init() -> Session | NoSession:
    """Join the agent that started this process; later calls return the same session. Made by itself at the first call."""
    global _session
    if _session is None:
        _session = connect()
        if _session.supervised:
            atexit.register(shutdown)  # the thread that sends is a daemon
    return _session


def section(name: str) -> SectionLike:
    """The section `name` of this rank (32 bytes of UTF-8, 24 names): a context manager with `enter()` and `exit()`."""
    return (_session or init()).section(name)


def section_totals() -> dict[str, tuple[int, int]]:
    """Of each section of this rank the times it was entered, and the total time in it, in ns; empty outside `rsup launch`."""
    return (_session or init()).section_totals()


def set_iteration(iteration: int, phase: str | None = None) -> None:
    """The loop reached `iteration` (1-based, global). `phase`: `setup`, `warmup`, `train`, `eval`; None leaves it."""
    session = _session or init()
    session.beat(iteration)
    if phase is not None:
        session.write(_board.PHASE, _board.PHASES.index(phase))


def heartbeat() -> None:
    """A sign of progress, for scripts that use `--ft-rank-heartbeat-timeout` instead of sections."""
    (_session or init()).heartbeat()


def requested() -> Request | None:
    """What `rsup checkpoint` or `rsup stop` asks of the loop, until `request_done`. Ranks see it at different moments."""
    return (_session or init()).requested()


def request_done(request_id: str, iteration: int, failure: str = "") -> None:
    """The loop has done what `request_id` asked, at `iteration`; or could not, and `failure` says why."""
    (_session or init()).request_done(request_id, iteration, failure)


def report_checkpoint(iteration: int, path: str, duration_s: float = 0.0) -> None:
    """A checkpoint of `iteration` has become durable at `path`. One rank reports it."""
    (_session or init()).send(_wire.RankCheckpoint(iteration, _absolute(path), duration_s))


def resumed(iteration: int, path: str, limits: _wire.Limits | None = None, durable: bool = True) -> None:
    """Training goes on from the checkpoint at `path`: `iteration` iterations are done. One rank reports it.

    `limits`: the ones kept beside the checkpoint; calculation goes on from them. `durable`: false for a local checkpoint.
    """
    (_session or init()).send(_wire.RankResumed(iteration, _absolute(path), limits, durable))


def _absolute(path: str) -> str:
    """The same for every job that names the same place: by it the history knows which jobs went on from a checkpoint."""
    return path if "://" in path or not path else os.path.abspath(path)


def agent_pid() -> int | None:
    """The process that started this rank and lives as long as the job has ranks on this node; None outside `rsup launch`."""
    return (_session or init()).agent_pid


def report_save(iteration: int, stage: str, path: str = "", stall_s: float = 0.0, text: str = "") -> None:
    """What became of a save other than durable: `begun`, `local` (a non-persistent one is complete), `failed` (why: `text`), or
    only what it cost: `stood`.

    `stall_s`: how long the training thread stood still for it. One rank reports it.
    """
    (_session or init()).send(_wire.RankSave(iteration, stage, path, stall_s, _wire.clip(text, 4096)))


def report_leaving(iteration: int, kind: str, reason: str, durable: bool, consumed_samples: int = 0, phase: int = 0) -> None:
    """The loop leaves on purpose after `iteration`, for a `kind` of `wire.LEAVE_KINDS`. One rank reports it."""
    if kind not in _wire.LEAVE_KINDS:
        raise ValueError(f"unknown kind of leaving {kind!r}; use one of {_wire.LEAVE_KINDS}")
    session = _session or init()
    session.send(_wire.RankLeaving(iteration, kind, _wire.clip(reason, 4096), durable, consumed_samples, phase))
    session.flush(DECLARED_WITHIN_S)  # what follows may end the process without asking anybody


def restartable(function: "Callable[_P, _R]", settings: "InProcessSettings | None" = None) -> "Callable[_P, _R | None]":
    """`function`, entered again in the same process after a fault of any rank: see `rsup.worker.inprocess`."""
    from rsup.worker.inprocess import restartable as wrap

    return wrap(function, settings)


def declare_exit(code: int, reason: str) -> None:
    """This rank will exit with `code` (16, 17, 75, 88 or 93; undeclared, these become 1) on purpose; or with 2 for wrong usage,
    which no restart makes better."""
    if code not in _wire.DECLARABLE_EXIT_CODES:
        raise ValueError(f"exit code {code} cannot be declared; use one of {_wire.DECLARABLE_EXIT_CODES}")
    session = _session or init()
    session.send(_wire.RankDeclares(code, _wire.clip(reason, 4096)))
    session.flush(DECLARED_WITHIN_S)  # what follows may end the process without asking anybody


def note(level: str, text: str) -> None:
    """A line for the job's story; `level` is `info`, `warning` or `error`."""
    (_session or init()).send(_wire.RankNote(level, _wire.clip(text, 4096)))


def device_used(uuid: str) -> None:
    """The UUID of the device this rank really uses."""
    (_session or init()).device_used(uuid)


def report_case(report: _wire.CaseReport, within_s: float = 10.0) -> bool:
    """Tell what is known of a rerun case, and wait until that is stored, at most `within_s` (0: do not wait); whether it is."""
    return (_session or init()).report_case(report, within_s)


def report_metrics(
    iteration: int,
    values: Mapping[str, float],
    consumed_samples: int = 0,
    kind: str = "training",
    *,
    at_s: float | None = None,
    warn: "Callable[[str], None] | None" = None,
) -> None:
    """Numbers of `iteration` (1-based, global) for `rsup status`, the page and Prometheus, by name (64 bytes, 256 a kind).

    `kind`: one of `wire.METRIC_KINDS`. Of one series one rank reports, in order; an earlier iteration than the last takes back
    what was reported from there on. Never blocks; at most a message a second goes out, in which neighbours may be put together.
    What is no number (a tensor counts as one, and is waited for), and names beyond those bounds, are left out with a warning,
    which goes to `warn`, if given. `at_s`: when they were true, in seconds since the epoch; None: now.
    """
    (_session or init()).report_metrics(iteration, values, consumed_samples, kind, at_s, warn)


def report_straggler(report: _wire.StragglerReport) -> None:
    """How evenly the ranks ran over an interval. One rank reports it, also where nobody was slow: that ends an episode."""
    most = _wire.MAX_STRAGGLER_RANKS
    if max(len(report.slowest), len(report.fastest), len(report.stragglers)) > most:
        lists = (report.slowest[:most], report.fastest[:most], report.stragglers[:most])
        report = _wire.StragglerReport(report.first, report.iteration, report.num_ranks, *lists)
    (_session or init()).send(_wire.RankStragglers(report))


def requested_switches() -> Mapping[str, bool]:
    """What people have switched on or off in the running job (`wire.SWITCHES`, e.g. `{"stragglers": True}`); names that are
    not there stay as the script has them. Each rank sees a change at its own moment."""
    return (_session or init()).switches


def limits() -> _wire.Limits | None:
    """The limits in force, for `ft_state.json` beside the checkpoint; None while unknown."""
    return (_session or init()).limits


def attempt() -> int:
    """The attempt this process belongs to, from 1."""
    return (_session or init()).attempt


def job_key() -> str:
    """`ID.RUN` of the job, empty outside `rsup launch`."""
    return (_session or init()).job_key


def is_supervised() -> bool:
    """Whether an agent watches this process."""
    return (_session or init()).supervised


def shutdown() -> None:
    """Flush what is queued and end the session; further calls do nothing."""
    global _session
    if _session is not None:
        _session.close()
    _session = NoSession()


def _forget_in_child() -> None:
    """A forked child (a data loader's worker, say) is not the rank and must not write its slot."""
    global _session
    if _session is not None:
        _session = NoSession()


os.register_at_fork(after_in_child=_forget_in_child)
