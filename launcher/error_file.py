"""torch's error file of the launcher itself: what a launcher of this launcher reads after the job's failure."""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from rsup.supervisor import wire

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(result: wire.JobResult, message: str, recorded: Path | None, environment: Mapping[str, str]) -> str:
    """After a failure, leave an error.json where `TORCHELASTIC_ERROR_FILE` of the launcher's environment says: that of the
    first failing rank (`recorded`, None if it left none here), else one of the same format with `message`.

    Returns a line if it could not be written, else ""; never raises for it.
    """
    target = environment.get(VARIABLE, "")
    if not target or result.exit_code == 0:
        return ""
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_bytes(_recorded(recorded, result.exit_code) or _written(message or result.reason, result.exit_code))
    except OSError as error:
        return f"rsup: cannot write {VARIABLE} {target}: {error.strerror}"
    return ""


def write_refusal(error: wire.RsupError, environment: Mapping[str, str]) -> None:
    """The launch was refused: leave that where `TORCHELASTIC_ERROR_FILE` says, if it can be."""
    write_error_file(wire.JobResult(error.exit_code, str(error)), f"{type(error).__name__}: {error}", None, environment)


def _recorded(path: Path | None, exit_code: int) -> bytes:
    """What the rank left, with the exit code in it as torch's agent adds it; as it is if it is not of torch's form."""
    try:
        data = path.read_bytes() if path else b""
    except OSError:
        return b""
    with contextlib.suppress(ValueError):
        content = json.loads(data)
        if isinstance(content, dict) and isinstance(content.get("message"), dict):
            content["message"]["errorCode"] = exit_code
            return json.dumps(content).encode()
    return data


def _written(message: str, exit_code: int) -> bytes:
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": message, "errorCode": exit_code, "extraInfo": extra}}).encode()
