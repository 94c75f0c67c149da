"""torch's events of a launch (`--event-log-handler`), made by the agent and recorded by somebody who has imported torch.

The agent turns facts into the events that torchrun's agent records: `START` of each rank and `RENDEZVOUS` of the agent when
an attempt starts; at the job's end `SUCCEEDED`, `FAILED` or `TERMINATED` of each rank of the last attempt, and of the agent
`SUCCEEDED`, or `FAILED` where it was told to stop. They go through a pipe to the caller of the Python API, else to a process
of their own (`python -m rsup.launcher.event_log HANDLER`), so that neither torch nor a handler is in the agent's loop.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.option_table import BadValue
from rsup.launcher.process_state import AgentState
from rsup.launcher.rank_environment import run_id
from rsup.launcher.report_pipe import ReportPipe
from rsup.supervisor import wire

NO_HANDLER = "null"
LAST_EVENTS_S = 10.0
"""How long a launch waits at its end for the last events to be recorded; importing torch takes some of that."""


class JobReporter:
    """Tells the caller of the Python API, or the recorder of events, how this node's part of the job goes."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._recorder: subprocess.Popen[bytes] | None = None
        self._pipe: ReportPipe | None = None
        self._began_s = self._attempt_s = time.monotonic()
        if options.report_fd is not None:
            self._pipe = ReportPipe(options.report_fd)
        elif options.event_log_handler != NO_HANDLER:
            self._pipe = self._start_recorder()

    def saw(self, fact: wire.AnyFact, state: AgentState) -> None:
        """A fact that the agent reports."""
        if self._pipe is None:
            return
        if isinstance(fact, wire.AttemptStarted):
            took_ms = (time.monotonic() - self._attempt_s) * 1000
            self._send(self._event("RENDEZVOUS", "AGENT", state, duration_ms=took_ms))
            for local_rank in range(len(state.ranks)):
                self._send(self._event("START", "WORKER", state, local_rank))
        elif isinstance(fact, wire.RanksGone):
            self._attempt_s = time.monotonic()

    def ended(self, result: wire.JobResult, state: AgentState, failures: Sequence[dict[str, Any]]) -> None:
        """The job's result, and what this node knows of its failures."""
        if self._pipe is None:
            return
        by_rank = {failure["rank"]: failure for failure in failures}
        for local_rank, rank in enumerate(state.ranks):
            self._send(self._worker_end(state, local_rank, by_rank.get(rank.rank), result))
        self._send(self._event("FAILED" if state.signum else "SUCCEEDED", "AGENT", state))
        content = {
            "exit_code": result.exit_code,
            "reason": result.reason,
            "rank": result.rank,
            "node": result.node,
            "job_id": state.job_id,
            "signum": state.signum,
            "failures": list(failures),
        }
        self._pipe.send({"result": content}, is_last=True)

    def close(self) -> None:
        """Wait, not for ever, until it has been read; may be repeated."""
        if self._pipe is None:
            return
        self._pipe.close(LAST_EVENTS_S)
        if self._recorder is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._recorder.wait(LAST_EVENTS_S)

    # ------------------------------------------------------------------------------------------------------- events

    def _send(self, event: dict[str, Any]) -> None:
        assert self._pipe is not None
        self._pipe.send({"event": event})

    def _worker_end(
        self, state: AgentState, local_rank: int, failure: dict[str, Any] | None, result: wire.JobResult
    ) -> dict[str, Any]:
        if failure is None:
            return self._event("TERMINATED" if result.exit_code else "SUCCEEDED", "WORKER", state, local_rank)
        end = "TERMINATED" if failure["by_rsup"] else "FAILED"
        code = -failure["signal"] or failure["exit_code"]
        return self._event(end, "WORKER", state, local_rank, exit_code=code, raw_error=_error_data(failure))

    def _event(
        self,
        name: str,
        source: str,
        state: AgentState,
        local_rank: int | None = None,
        *,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        raw_error: str | None = None,
    ) -> dict[str, Any]:
        """torch's `Event` as JSON has it. (That numbers of ranks stand in lists is torch's: tuples of one in its source.)"""
        start, options = state.start, self._options
        more: dict[str, Any] = {
            "group_world_size": start.group_world_size if start else None,
            "entry_point": options.training_script,
        }
        if local_rank is not None and start is not None:
            role_rank = (start.first_role_rank if start.role_world_size else start.first_rank) + local_rank
            role_size = start.role_world_size or start.world_size
            more |= {"local_rank": [local_rank], "role_rank": [role_rank], "role_world_size": [role_size]}
            more |= {"exit_code": [exit_code], "worker_pid": [state.ranks[local_rank].pid]}
        metadata = {
            "run_id": run_id(options, start) if start else options.rdzv_id,
            "global_rank": start.first_rank + local_rank if start and local_rank is not None else None,
            "group_rank": start.group_rank if start else None,
            "worker_id": str(state.ranks[local_rank].pid) if local_rank is not None else None,
            "role": options.role,
            "hostname": socket.gethostname(),
            "state": name,
            "total_run_time": int(time.monotonic() - self._began_s),
            "rdzv_backend": options.rdzv_backend,
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": max(0, state.attempt - 1),
            "duration_ms": duration_ms,
        }
        return {
            "name": f"torchelastic.worker.status.{name}",
            "source": source,
            "timestamp": wire.now_us() // 1000,
            "metadata": metadata,
        }

    def _start_recorder(self) -> ReportPipe | None:
        reader, writer = os.pipe()
        try:
            self._recorder = subprocess.Popen(
                [sys.executable, "-P", "-m", "rsup.launcher.event_log", self._options.event_log_handler],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                process_group=0,  # ^C is for the launcher; in its session it counts as a helper
            )
        except OSError as error:
            os.close(writer)
            print(f"rsup: events are not recorded: {error}", file=sys.stderr)
            return None
        finally:
            os.close(reader)
        return ReportPipe(writer)


def _error_data(failure: dict[str, Any]) -> str:
    """What the rank recorded, as torch has it in the event."""
    with contextlib.suppress(OSError, ValueError):
        if failure["error_file"]:
            with open(failure["error_file"]) as file:
                return json.dumps(json.load(file))
    return json.dumps({"message": failure["error"] or "<NONE>"})


# ------------------------------------------------------------------------------------------------- where torch is imported


def record_event(event: dict[str, Any], handler: str) -> None:
    """Hand an event to torch's handler of that name. Imports torch. Raise KeyError if there is no such handler."""
    from torch.distributed.elastic import events
    from torch.distributed.elastic.events.api import Event, EventSource

    fields = {"name": event["name"], "timestamp": event["timestamp"], "metadata": event["metadata"]}
    events.record(Event(source=EventSource(event["source"]), **fields), handler)


def check_handler(name: str) -> None:
    """Imports torch, if `name` is not `null`. Raise `BadValue` if torch, as this process has it, knows no such handler."""
    if name == NO_HANDLER:
        return
    try:
        from torch.distributed.elastic.events.handlers import get_logging_handler

        get_logging_handler(name)
    except ImportError:
        raise BadValue(f"--event-log-handler {name}: torch is not installed; leave it out") from None
    except KeyError:
        raise BadValue(f"--event-log-handler {name}: torch has no handler of that name; register it first") from None


def lines_of(stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The messages of a `ReportPipe`; a last line that was cut off is none."""
    for line in stream:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def main(argv: Sequence[str]) -> int:
    """Record the events that come on standard input. One line on stderr if that cannot be."""
    handler = argv[0]
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # of importing torch
    try:
        for message in lines_of(sys.stdin.buffer):
            if "event" in message:
                record_event(message["event"], handler)
    except ImportError as error:
        print(f"rsup: events are not recorded: --event-log-handler needs torch ({error})", file=sys.stderr)
    except KeyError:
        print(f"rsup: events are not recorded: torch has no event log handler that is called {handler}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
