"""How a launch that did not succeed looks to a Python program: torch's exceptions, made from the launcher's report."""

import contextlib
import json
import signal
from typing import Any

from rsup.launcher.launch_options import LaunchOptions
from rsup.supervisor.wire import RsupError


class LaunchError(RsupError, RuntimeError):
    """Neither success nor a failed rank nor a signal ended the launch; `exit_code` is what `rsup launch` exits with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LaunchStopped(LaunchError):
    """Told to stop by a signal, where torch is not installed. `sigval`: which."""

    def __init__(self, message: str, sigval: signal.Signals) -> None:
        super().__init__(message, 128 + sigval)
        self.sigval = sigval


class RanksFailed(LaunchError):
    """Ranks failed, where torch is not installed. `failures`: as in the result file, the first mover first."""

    def __init__(self, message: str, exit_code: int, failures: list[dict[str, Any]]) -> None:
        super().__init__(message, exit_code)
        self.failures = failures


def job_error(options: LaunchOptions, result: dict[str, Any]) -> Exception:
    """The exception for a result with an exit code other than 0. Imports torch."""
    reason, exit_code = str(result["reason"]), int(result["exit_code"])
    if result["signum"]:
        return _stopped(reason, signal.Signals(result["signum"]))
    failures = list(result["failures"])
    if not failures and result["rank"] is not None:  # it was on another node
        failures = [_elsewhere(result)]
    if not failures:
        return LaunchError(reason, exit_code)
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError:
        return RanksFailed(reason, exit_code, failures)
    first_s = int(failures[0]["at_us"] / 1e6)
    return ChildFailedError(options.training_script, {f["rank"]: _process_failure(f, reason, first_s) for f in failures})


def _stopped(reason: str, signum: signal.Signals) -> Exception:
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
    except ImportError:
        return LaunchStopped(reason, signum)
    return SignalException(reason, sigval=signum)


def _elsewhere(result: dict[str, Any]) -> dict[str, Any]:
    code = int(result["exit_code"])
    known = {"rank": result["rank"], "exit_code": code, "error": f"on node {result['node']}: {result['reason']}"}
    return {"local_rank": -1, "pid": 0, "signal": 0, "at_us": 0, "by_rsup": "", "error_file": "", **known}


def _process_failure(failure: dict[str, Any], reason: str, first_s: int) -> Any:
    """torch's record of one failed rank. torch takes the smallest time stamp for the root cause, ours say when a rank ended:
    nobody is to come before the first mover."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    exit_code = -failure["signal"] or failure["exit_code"]
    error_file = failure["error_file"] if _is_readable(failure["error_file"]) else ""
    made = ProcessFailure(failure["local_rank"], failure["pid"], exit_code, error_file)
    if not error_file and (failure["by_rsup"] or failure["error"]):
        made.message = failure["by_rsup"] or failure["error"]
    if failure["at_us"]:
        made.timestamp = max(first_s, int(failure["at_us"] / 1e6))
    return made


def _is_readable(error_file: str) -> bool:
    """Whether torch can make something of it; it raises for a file that holds anything else."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(error_file) as file:
            message = json.load(file)["message"]
        return isinstance(message, str) or int(message["extraInfo"]["timestamp"]) >= 0
    return False
