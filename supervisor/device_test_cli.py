"""`rsup devices test`: screens devices of this node (`rsup.worker.device_test`, in a process of its own), keeps what it found.

Here is what needs the store: which devices live jobs use, whether a case has a step to repeat, the record of what like devices
computed, and the result as evidence (`test`: `passed`, `failed` or `skipped`). Every result is also kept as a file, with all
its numbers. torch is never loaded here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rsup.supervisor import places
from rsup.supervisor.query_source import QueryError, name_of
from rsup.supervisor.sources import Sources
from rsup.supervisor.wire import RsupError, UsageError

MODULE = "rsup.worker.device_test"
FOLDER = "device-tests"
"""Below the state directory: results, and `known.json`, the record."""
OWN = {"--state-dir": "", "--supervisor": "", "--reason": ""}
MAX_LIVE_JOBS = 1000
MAX_REASON_CHARS = 480

Json = dict[str, Any]
Keep = Callable[[Json, str], str]
"""Takes a report and a sentence, keeps it as evidence, and returns a line for people."""


def main(argv: Sequence[str], keep: Keep | None = None, told: Callable[[list[Json]], object] = len) -> int:
    """Run `rsup devices test ARGV`; return its exit code. Raise `RsupError`. `keep` None: nothing becomes evidence. `told` gets
    the reports of all devices, those left alone too."""
    words, own, accepts_injected = _split(argv)
    if any(word in ("-h", "--help") for word in words):
        return subprocess.run(_command([*words]), env=_environment()).returncode
    state = places.state_dir(own["--state-dir"] or None)
    host_first = places.names_no_state_dir(own["--state-dir"])
    sources = [Sources(state, own["--supervisor"], note=lambda text: None, host_first=host_first)]
    if sources[0].asks_the_host():
        sources.append(Sources(state, "", note=lambda text: None, own_only=True))
    held = {uuid: job for one in sources for uuid, job in _held(one).items()}
    folder = state / FOLDER
    with tempfile.TemporaryDirectory(prefix="rsup-test-") as scratch:
        results = Path(scratch, "results.json")
        more = ["--results", str(results), "--records", str(folder / "known.json")]
        more += ["--held", ",".join(f"{uuid}={job}" for uuid, job in held.items())] if held else []
        if (case := _value_of(words, "--replay")) is not None:
            steps, why_none = _kept_steps(sources, case)
            more += ["--replay-steps", steps, "--replay-missing", why_none]
        code = _run(_command([*words, *more]))
        reports: list[Json] = json.loads(results.read_bytes()) if results.exists() else []
    told(reports)
    for report in (report for report in reports if report["was_tried"]):
        _keep(report, folder, own["--reason"], keep if accepts_injected or not report["injected"] else None)
    return code


def _run(command: Sequence[str]) -> int:
    """Its exit code. SIGTERM is passed on, so that the screen ends what it started."""
    process = subprocess.Popen(command, env=_environment())
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()) if is_main else None
    try:
        return process.wait()
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str], bool]:
    """What is the screen's, and what is ours."""
    own, words, left = dict(OWN), [], list(argv)
    accepts_injected = "--accept-injected" in left
    left = [word for word in left if word not in ("--accept-injected", "--debug")]
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name not in own:
            words.append(name + equals + value)
        elif equals:
            own[name] = value
        elif left:
            own[name] = left.pop(0)
        else:
            raise UsageError(f"{name} needs a value; see `rsup devices test --help`")
    return words, own, accepts_injected


def _value_of(words: Sequence[str], option: str) -> str | None:
    for place, word in enumerate(words):
        if word == option:
            return words[place + 1] if place + 1 < len(words) else None
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _command(words: Sequence[str]) -> list[str]:
    return [os.environ.get("PYTHON_EXEC") or sys.executable, "-P", "-m", MODULE, *words]


def _environment() -> dict[str, str]:
    """Without a rank's variables: a screen that a job's script starts is no rank."""
    return {name: value for name, value in os.environ.items() if name not in ("RSUP_RANK_SOCKET", "RSUP_BOARD")}


def _held(sources: Sources) -> dict[str, str]:
    """Devices that ranks of live jobs use, and the job. What cannot be asked holds nothing."""
    held: dict[str, str] = {}
    with contextlib.suppress(RsupError):
        for job in sources.read(lambda source: source.jobs(MAX_LIVE_JOBS, "live", "")):
            name = name_of(job)
            status = sources.read(lambda source, name=name: source.status(name, stacks=False))  # type: ignore[misc]
            for rank in status.get("ranks", []):
                if rank.get("device"):
                    held[rank["device"]] = name.name
    return held


def _kept_steps(sources: Sequence[Sources], case: str) -> tuple[str, str]:
    """The folder of the case's steps, and why nothing can be replayed where it holds none. Raise `UsageError` for a case that
    nobody knows."""
    if not case.strip():
        raise UsageError("--replay names no case; `rsup cases list` shows them")
    found: list[Json] = []
    for one in sources:
        try:
            found = found or one.read(lambda source: source.case(case))
        except QueryError as error:
            if one is sources[-1]:
                raise UsageError(str(error)) from None
    if not found:
        raise UsageError(f"no case {case[:200]!r}; `rsup cases list` shows them")
    folder = str(found[-1].get("checkpoint") or "")
    if not folder:
        why = (
            "nothing fatal failed, the ranks had nowhere to save, its data or program cannot be kept, or the model is too large"
        )
        return "", f"the case kept no step: {why}"
    return folder, f"its step is not in {folder} any more, or cannot be seen from this node"


def _keep(report: Json, folder: Path, reason: str, keep: Keep | None) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(report["at_us"] / 1e6))
    name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in report["uuid"])[:100]
    path = folder / f"{name}-{stamp}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))
    except OSError as error:
        print(f"rsup devices test: the result of {report['uuid']} is not kept: {error.strerror}", file=sys.stderr)
    if report["injected"] and keep is None:
        print(f"rsup devices test: {report['uuid']}: no evidence, since a fault was injected", file=sys.stderr)
    if keep is None:
        return
    try:
        print(f"rsup devices test: {keep(report, summary(report, reason, path))}", file=sys.stderr)
    except RsupError as error:
        print(f"rsup devices test: {report['uuid']}: not kept as evidence: {error}; see {path}", file=sys.stderr)


def summary(report: Json, reason: str, path: Path) -> str:
    """What is kept with the evidence: one line that says what was done, on what, how hot, and what came out."""
    passed = sum(test["outcome"] == "passed" for test in report["tests"])
    replays = [f"{test['name']}: {test['outcome']}" for test in report["tests"] if test["name"].startswith("replay of ")]
    injected = "a fault was injected; " if report["injected"] else ""
    words = [
        f"{injected}SDC screen {report['outcome']}",
        report["reason"],
        *replays[:2],
        f"{passed} of {len(report['tests'])} computations passed, {report['rounds']} rounds in {report['seconds']:.0f} s",
        *(_range(report[name], unit) for name, unit in (("temperature_c", "C"), ("sm_clock_mhz", "MHz"), ("power_w", "W"))),
        f"driver {report['driver']}" if report["driver"] else "",
        f"torch {report['torch']}" if report["torch"] else "",
        reason,
        str(path),
    ]
    return "; ".join(word for word in words if word)[:MAX_REASON_CHARS]


def _range(seen: Json | None, unit: str) -> str:
    return f"{seen['least']:.0f}-{seen['greatest']:.0f} {unit}" if seen else ""


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RsupError as error:
        print(f"rsup devices test: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
