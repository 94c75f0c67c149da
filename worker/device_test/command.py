"""`python -m rsup.worker.device_test`: which devices are screened, a process for each, and the report for people.

It knows nothing of the store: `rsup devices test` says which devices live jobs hold, and keeps the results.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.places import this_node
from rsup.supervisor.wire import UsageError, now_us
from rsup.worker.device_test.chosen import Chosen, begin_nvml, choose, devices_here
from rsup.worker.device_test.device_users import processes_on_gpus, ranks_with
from rsup.worker.device_test.injected_fault import read_fault
from rsup.worker.device_test.judging import Known, judge, learned
from rsup.worker.device_test.one_device import Order
from rsup.worker.device_test.replay import ReplayedDevice, add_replays, end_group, replay_command, steps_of
from rsup.worker.device_test.results import EXIT_CODES, PASSED, SKIPPED, DeviceReport, Range, overall
from rsup.worker.numeric_faults import parse_numeric_fault

DEFAULT_S = {"cuda": 30.0, "cpu": 5.0}
STARTS_WITHIN_S = 180.0
"""What loading torch, making the inputs and the float64 checks may take on a busy machine."""
SLOWEST = 4.0
"""Two rounds may take so many times the wanted duration."""


def parser() -> argparse.ArgumentParser:
    """Options of `rsup devices test`."""
    parsed = OneLineParser(
        prog="rsup devices test",
        description="Screen devices of this node for silent data corruption: fixed-seed computations, compared bit by bit.",
        epilog="Exit codes: 0 passed, 1 failed, 75 could not decide (a skip is no pass), 2 wrong usage.",
        allow_abbrev=False,
    )
    parsed.add_argument("device", metavar="ID", nargs="*", help="UUID or an unambiguous beginning, serial, index, or cpu")
    parsed.add_argument("--all", action="store_true", help="all GPUs of this node; without GPUs two shares of its cores")
    parsed.add_argument("--duration", type=_seconds, metavar="S", help="about so long a device (GPU 30, CPU 5)")
    parsed.add_argument("--replay", metavar="CASE", help="repeat the failing step of a case, too")
    parsed.add_argument(
        "--replay-command",
        metavar="COMMAND",
        default="",
        help="of a script that calls replay_case; default: the reference trainer",
    )
    parsed.add_argument("--force", action="store_true", help="also devices that a live job uses: it will be slowed down")
    parsed.add_argument("--device-inventory", metavar="FILE", help="[RSUP_DEVICE_INVENTORY]: CPU stand-ins by name")
    parsed.add_argument("--json", action="store_true", help="print the reports as JSON")
    for hidden in ("--fault", "--held", "--records", "--results", "--size", "--replay-steps", "--replay-missing"):
        parsed.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parsed


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds up to 86400")
    return value


def main(argv: Sequence[str]) -> int:
    """Screen, print, and return the exit code. Raise `UsageError`."""
    arguments = parser().parse_args(list(argv))
    if arguments.replay is not None and not arguments.replay.strip():
        raise UsageError("--replay names no case; `rsup cases list` shows them")
    command, numeric_fault = replay_command(arguments.replay_command), _take_numeric_fault(arguments)
    here = devices_here(arguments)
    chosen = choose(arguments, here)
    held = {} if arguments.force else _users(chosen, arguments.held)
    reports = [_left_alone(device, held[device.uuid]) for device in chosen if device.uuid in held]
    free = [device for device in chosen if device.uuid not in held]
    witness = _witness(free, here, arguments.held)
    _check_fault_device(arguments.fault or numeric_fault, [*chosen, *([witness] if witness else [])])
    started_s = time.monotonic()
    if free and not arguments.json:
        beside = f", beside {witness.uuid}" if witness else ""
        print(f"screening {', '.join(device.uuid for device in free)}{beside} ...", file=sys.stderr, flush=True)
    reports += screen_all([*free, *([witness] if witness else [])], arguments)
    records_path = Path(arguments.records) if arguments.records else None
    records = read_records(records_path)
    judge(reports, records)
    if arguments.replay:
        known = {one.uuid: ReplayedDevice(one.uuid, one.kind, one.model, one.vbios, one.driver) for one in [*here, *chosen]}
        steps, missing = steps_of(arguments.replay_steps), arguments.replay_missing
        add_replays(reports, known, arguments.replay, steps, command, numeric_fault, missing)
    if records_path is not None and (now_known := learned(reports, records)) != records:
        write_records(records_path, now_known)
    if witness:
        other = reports.pop()
        if other.outcome != PASSED:
            print(f"{other.uuid}, the like device beside it: {other.outcome}: {other.reason}", file=sys.stderr)
    if arguments.results:
        Path(arguments.results).write_bytes(msgspec.json.encode(reports))
    _print(reports, arguments.json, time.monotonic() - started_s)
    return EXIT_CODES[overall(reports)]


def _check_fault_device(fault: str, tested: Sequence[Chosen]) -> None:
    named = next((word.partition("=")[2] for word in fault.split(",") if word.startswith("device=")), "")
    if named and all(device.uuid != named for device in tested):
        raise UsageError(f"--fault {fault}: {named[:100]} is none of the devices under test")


def _take_numeric_fault(arguments: argparse.Namespace) -> str:
    """A fault for the replayed step (`site=` says so) is none for the screen. Raise `UsageError`."""
    if "site=" not in arguments.fault:
        read_fault(arguments.fault)
        return ""
    fault = parse_numeric_fault(arguments.fault)
    if not fault.device or not arguments.replay:
        raise UsageError(f"--fault {arguments.fault}: a fault with site= is for a replay: give device=ID, and --replay CASE")
    text, arguments.fault = arguments.fault, ""
    return str(text)


def _users(chosen: Sequence[Chosen], held: str) -> dict[str, str]:
    """Who uses which device. `held`: what the store says, `UUID=JOB,...`."""
    found = ranks_with(device.uuid for device in chosen if device.kind == "cpu")
    if gpus := [device.uuid for device in chosen if device.kind == "cuda"]:
        nvml = begin_nvml()
        found |= processes_on_gpus(nvml, gpus) if nvml is not None else {}
    for uuid, _, job in (word.partition("=") for word in held.split(",") if word):
        if any(device.uuid == uuid for device in chosen):
            found[uuid] = f"job {job} uses it"
    return found


# ------------------------------------------------------------------------------------------------------- the processes


def screen_all(chosen: Sequence[Chosen], arguments: argparse.Namespace) -> list[DeviceReport]:
    """A process for each, all at once; one that does not end in time is killed and reported as skipped."""
    running: list[tuple[Chosen, subprocess.Popen[bytes], float]] = []
    try:
        for place, device in enumerate(chosen):
            duration_s = DEFAULT_S[device.kind] if arguments.duration is None else arguments.duration
            limit_s = STARTS_WITHIN_S + SLOWEST * duration_s
            running.append((device, _start(device, arguments, duration_s, (place, len(chosen))), limit_s))
        started_s = time.monotonic()
        return [_collect(device, process, started_s + limit_s, limit_s) for device, process, limit_s in running]
    finally:
        for _, process, _ in running:
            if process.poll() is None:
                end_group(process)


def _start(
    device: Chosen, arguments: argparse.Namespace, duration_s: float, share: tuple[int, int]
) -> "subprocess.Popen[bytes]":
    order = Order(
        uuid=device.uuid,
        kind=device.kind,
        duration_s=duration_s,
        node=this_node(),
        model=device.model,
        fault=arguments.fault,
        size=arguments.size,
        share=share,
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid if device.kind == "cuda" else ""}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = [sys.executable, "-P", "-W", "ignore", "-m", "rsup.worker.device_test.one_device"]
    return subprocess.Popen(
        [*command, msgspec.json.encode(order).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _collect(device: Chosen, process: "subprocess.Popen[bytes]", end_s: float, limit_s: float) -> DeviceReport:
    try:
        data, _ = process.communicate(timeout=max(0.1, end_s - time.monotonic()))
        report = msgspec.json.decode(data, type=DeviceReport)
        report.serial = report.serial or device.serial
        return report
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            return _no_report(device, f"did not end within {limit_s:.0f} s and cannot be killed: it is stuck in the driver")
        return _no_report(device, f"did not end within {limit_s:.0f} s and was ended")
    except msgspec.DecodeError:
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return _no_report(device, f"its process {how} without a report; is torch installed?")


def _no_report(device: Chosen, reason: str) -> DeviceReport:
    return DeviceReport(
        uuid=device.uuid,
        outcome=SKIPPED,
        reason=f"a skip is no pass: {reason}",
        node=this_node(),
        model=device.model,
        serial=device.serial,
        at_us=now_us(),
    )


def _witness(free: Sequence[Chosen], here: Sequence[Chosen], held: str) -> Chosen | None:
    """A like device that nobody uses, for one that is screened alone."""
    if len(free) != 1:
        return None
    others = [one for one in here if (one.kind, one.model) == (free[0].kind, free[0].model) and one.uuid != free[0].uuid]
    users = _users(others, held)
    return next((one for one in others if one.uuid not in users), None)


def _left_alone(device: Chosen, who: str) -> DeviceReport:
    report = _no_report(device, f"{who}: wait for its end, or --force")
    report.was_tried = False
    return report


# --------------------------------------------------------------------------------------------- records, and what is shown


def read_records(path: Path | None) -> dict[str, dict[str, Known]]:
    """What like devices computed; empty where nothing is known, or the file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Known]]) if path else {}
    except (OSError, msgspec.MsgspecError):
        return {}


def write_records(path: Path, records: dict[str, dict[str, Known]]) -> None:
    """In one piece; a record that cannot be kept is no reason to fail."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.write_bytes(msgspec.json.encode(records))
        new.rename(path)
    except OSError as error:
        print(f"rsup devices test: the record is not kept: {error}", file=sys.stderr)


def _print(reports: Sequence[DeviceReport], as_json: bool, took_s: float) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode())
        return
    for report in reports:
        print("\n".join(lines_of(report)))
    print(f"{overall(list(reports))}: {len(reports)} device{'s'[: len(reports) != 1]} in {took_s:.1f} s")


def lines_of(report: DeviceReport) -> list[str]:
    """A report for people."""
    about = [report.model, report.driver and f"driver {report.driver}", report.torch and f"torch {report.torch}"]
    lines = [f"{report.uuid}  {', '.join(word for word in about if word)}"]
    width = max((len(test.name) for test in report.tests), default=0)
    for test in report.tests:
        rate = f"{test.rate:8.2f} {test.unit}" if test.rate else ""
        with_whom = f"= {', '.join(test.compared_with)}" if test.outcome == "passed" else test.reason
        lines.append(f"  {test.outcome:7}  {test.name:{width}}  {test.repetitions:5}x {rate:18} {with_whom}".rstrip())
    seen = [
        _range_text(report.temperature_c, "C"),
        _range_text(report.sm_clock_mhz, "MHz"),
        _range_text(report.power_w, "W"),
    ]
    injected = ["a fault was injected"] if report.injected else []
    told = [f"{report.rounds} rounds in {report.seconds:.1f} s", *(text for text in seen if text), *injected]
    lines.append(f"  {report.outcome}: {report.reason or ', '.join(told)}")
    if report.reason and report.rounds:
        lines.append(f"  {', '.join(told)}")
    return lines


def _range_text(seen: Range | None, unit: str) -> str:
    if seen is None:
        return ""
    return f"{seen.least:.0f} {unit}" if seen.least == seen.greatest else f"{seen.least:.0f}-{seen.greatest:.0f} {unit}"
