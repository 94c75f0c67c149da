"""Verdicts beside the checkpoints: a case that has one is over, whatever an older checkpoint still asks for.

One JSON line a verdict in `rerun-verdicts.jsonl`, appended durably by rank 0 before the verdict is acted on. A damaged line
is passed over: at worst an iteration is replayed that need not be.
"""

import json
import os
from pathlib import Path

LEDGER_FILE = "rerun-verdicts.jsonl"


class Ledger:
    """The verdicts of the runs that save to `folder`; None: there is no such folder, and nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / LEDGER_FILE if folder is not None else None

    def add(self, case_id: str, verdict: str, iteration: int, reason: str) -> str:
        """Keep a verdict; return why it could not be kept, empty if it was."""
        if self._path is None:
            return ""
        line = json.dumps({"case_id": case_id, "verdict": verdict, "iteration": iteration, "reason": reason}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return f"cannot write {self._path}: {error.strerror}"
        return ""

    def verdict(self, case_id: str) -> str:
        """The verdict of that case, empty if it has none here."""
        if self._path is None:
            return ""
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("case_id") == case_id:
                return str(entry.get("verdict", ""))
        return ""
