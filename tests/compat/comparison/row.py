"""One row of the comparison: a public complaint about torchrun, its recipe, and what each launcher does with it.

A recipe is run with a `Peer` in an empty directory of its own and returns `Seen`: whether that was the right behaviour, and one
clause for the table. The same recipe runs with torchrun and with rsup, so that the difference is the launcher's.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Seen:
    """What a launcher did. `right`: it behaved as the row asks. `text`: what was seen, a few words for the table."""

    right: bool
    text: str


_started: "list[subprocess.Popen[str]]" = []
"""Launchers that nobody has waited for yet, perhaps."""


def end_started() -> None:
    """Kill the launchers that recipes left running, take the exit status of each, and close their pipes."""
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):  # what its stdin still held for it
                if pipe is not None:
                    pipe.close()


@dataclass(frozen=True)
class Peer:
    """A launcher under comparison."""

    name: str
    """`torchrun` or `rsup`."""
    program: tuple[str, ...]

    def start(self, folder: Path, *words: str, env: Mapping[str, str] | None = None, **popen: object) -> subprocess.Popen[str]:
        """Start it in `folder`, in a session of its own, with stdout and stderr as text pipes unless `popen` says otherwise.
        A recipe may leave it to `end_started`. `env` is added to a clean environment: no `PET_*`, `TORCHELASTIC_*` or `RSUP_*`
        of ours."""
        process: subprocess.Popen[str]
        process = subprocess.Popen([*self.program, *words], **self._settings(folder, env) | popen)  # type: ignore[call-overload]
        _started.append(process)
        return process

    def run(
        self, folder: Path, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end. Raise `subprocess.TimeoutExpired` after `timeout_s`; the launcher is then killed."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            [*self.program, *words], timeout=timeout_s, **self._settings(folder, env) | {"stdin": subprocess.DEVNULL}
        )

    def _settings(self, folder: Path, env: Mapping[str, str] | None) -> dict[str, object]:
        ours = ("PET_", "TORCHELASTIC_", "RSUP_", "SLURM_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        clean |= {"RSUP_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
        return {
            "cwd": folder,
            "env": clean | dict(env or {}),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
            "start_new_session": True,
        }


_TORCHRUN = """import atexit, gc, sys
gc.disable()
from torch.distributed import run
gc.enable()
atexit.register(gc.freeze)
sys.argv[0] = run.__file__
sys.exit(run.main())"""
"""torchrun's command, only that Python does not look for garbage in its imports and at its end: a third of its CPU time."""

TORCHRUN = Peer("torchrun", (sys.executable, "-c", _TORCHRUN))
RSUP = Peer("rsup", (sys.executable, "-m", "rsup.launcher", "launch"))


@dataclass(frozen=True)
class Row:
    """One complaint. `recipe(peer, folder)` runs it. `torchrun_fails`: torchrun 2.13 was seen to get it wrong, so the suite
    runs it too and shows the difference; else only rsup is run."""

    number: str
    """As in the list of complaints: `1`, `8a`; siblings get `1+`, `1++`."""
    title: str
    recipe: Callable[[Peer, Path], Seen]
    torchrun_fails: bool
    right: str = ""
    """The right behaviour, a few words."""
    tags: frozenset[str] = field(default_factory=frozenset)
    """`slow`: more than 20 s with one of the two."""
