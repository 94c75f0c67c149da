"""Replays kept steps of a case, each on each device in a process of its own, and adds what came out to the reports.

The steps are files (`rsup.worker.rerun.kept_step`); torch is loaded in the processes only.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rsup.supervisor.places import this_node
from rsup.supervisor.wire import UsageError
from rsup.worker.device_test.replay_judging import judge_replays
from rsup.worker.device_test.results import SKIPPED, DeviceReport, TestResult, whole
from rsup.worker.rerun.replay_order import VARIABLE, ReplayAnswer, ReplayOrder

REFERENCE_TRAINER = ("-P", "-W", "ignore", "-m", "rsup.worker.reference.replay")
WITHIN_S = 600.0
"""What one replay may take, start included."""
ENDS_WITHIN_S = 5.0
"""After it was killed."""
TIMES = 3


@dataclass(frozen=True)
class ReplayedDevice:
    """A device as the order names it."""

    uuid: str
    kind: str
    model: str = ""
    vbios: str = ""
    driver: str = ""


def replay_command(text: str) -> list[str]:
    """The words of `--replay-command`, or what replays a step of the reference trainer. Raise `UsageError`."""
    if not text:
        return [sys.executable, *REFERENCE_TRAINER]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--replay-command {text[:100]!r}: {error}") from None
    if not words:
        raise UsageError("--replay-command names no command")
    return words


def steps_of(case_folder: str) -> list[Path]:
    """The kept steps of a case; empty where its folder is not here."""
    return sorted(Path(case_folder).glob("rank*.pt")) if case_folder else []


def add_replays(
    reports: Sequence[DeviceReport],
    devices: Mapping[str, ReplayedDevice],
    case: str,
    steps: Sequence[Path],
    command: Sequence[str],
    fault: str = "",
    why_none: str = "",
) -> None:
    """Replay each step on the devices of these reports that were tried, judge, and complete the reports in place.
    `why_none`: what to say where there is no step."""
    tried = [report for report in reports if report.was_tried]
    for report in tried:
        report.injected = report.injected or bool(fault and f"device={report.uuid}," in f"{fault},")
    if not steps:
        for report in tried:
            _add(report, TestResult(name=f"replay of {case}", outcome=SKIPPED, reason=why_none))
    for step in steps:
        answers = _replay(step, [devices[report.uuid] for report in tried], command, fault)
        for uuid, result in judge_replays(answers).items():
            result.name = result.name if answers[uuid].case_id else f"replay of {case}, {step.stem}"
            _add(next(report for report in tried if report.uuid == uuid), result)


def _add(report: DeviceReport, result: TestResult) -> None:
    report.tests.append(result)
    report.outcome, report.reason = whole(report.tests)


def _replay(step: Path, devices: Sequence[ReplayedDevice], command: Sequence[str], fault: str) -> dict[str, ReplayAnswer]:
    """All devices at once."""
    answers: dict[str, ReplayAnswer] = {}
    with tempfile.TemporaryDirectory(prefix="rsup-replay-") as folder:
        running: list[tuple[ReplayedDevice, Path, subprocess.Popen[bytes] | str]] = []
        try:
            for place, device in enumerate(devices):
                path = Path(folder, f"{place}.json")
                running.append((device, path, _start(step, device, path, command, fault)))
            end_s = time.monotonic() + WITHIN_S
            for device, path, process in running:
                answers[device.uuid] = _collect(process, path, end_s)
        finally:
            for _, _, process in running:
                if not isinstance(process, str):
                    end_group(process)
    return answers


def _start(
    step: Path, device: ReplayedDevice, answer: Path, command: Sequence[str], fault: str
) -> "subprocess.Popen[bytes] | str":
    """The process, or why there is none."""
    order = ReplayOrder(
        step=str(step),
        answer=str(answer),
        times=TIMES,
        kind=device.kind,
        uuid=device.uuid,
        node=this_node(),
        model=device.model or ("CPU" if device.kind == "cpu" else ""),
        vbios=device.vbios,
        driver=device.driver,
        fault=fault if f"device={device.uuid}," in f"{fault}," else "",
    )
    own = {VARIABLE: msgspec.json.encode(order).decode(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    own["CUDA_VISIBLE_DEVICES"] = device.uuid if device.kind == "cuda" else ""
    if device.kind == "cpu":
        own["OMP_NUM_THREADS"] = "1"
    try:
        environment, out = {**os.environ, **own}, sys.stderr.fileno()
        return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=out, env=environment, start_new_session=True)
    except OSError as error:
        return f"cannot start {command[0]}: {error.strerror}"


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill it and what it started, which is its session; wait a little for one that the driver may hold.

    One that has ended and was waited for is left: its number may be another group's by now.
    """
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=ENDS_WITHIN_S)


def _collect(process: "subprocess.Popen[bytes] | str", path: Path, end_s: float) -> ReplayAnswer:
    if isinstance(process, str):
        return ReplayAnswer(problem=process)
    try:
        code = process.wait(timeout=max(0.1, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        end_group(process)
        return ReplayAnswer(problem=f"the replay did not end within {WITHIN_S:.0f} s and was ended")
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayAnswer)
    except (OSError, msgspec.MsgspecError):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return ReplayAnswer(problem=f"the replay {how} without an answer; does its program call rsup.worker.rerun.replay_case?")
