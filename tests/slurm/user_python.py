"""An interpreter with rsup that ordinary users can run: ours often lies in root's home directory, where they may not look.

Ours, if they can run it; else the system's of the same version with our packages on PYTHONPATH; what they cannot read there is
copied (not torch and its like: the jobs of ordinary users in the tests do without).
"""

import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import rsup.launcher

_TRIAL = "import rsup.launcher.agent, rsup.supervisor.main, rsup.launcher.slurm.finish"
_TOO_LARGE = ("torch*", "nvidia*", "triton*", "numpy*", "scipy*", "mypy*", "ruff*", "pyright*", "nodejs*", "*.dist-info/RECORD")
_UID_OF_A_STRANGER = 20001


@dataclass(frozen=True)
class UserPython:
    """`environ` goes with `path`."""

    path: str
    environ: Mapping[str, str] = field(default_factory=dict)


def find_user_python(folder: Path) -> UserPython | None:
    """One that works; None if there is none. `folder`: where copies may lie."""
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [Path(path) for path in site.getsitepackages()]
    ours = Path(rsup.launcher.__file__).parent.parent.parent  # of a checkout: the folder that the editable install names
    candidates = [UserPython(sys.executable)]
    if Path(system).exists():
        candidates.append(UserPython(system, {"PYTHONPATH": ":".join(map(str, [ours, *packages]))}))
    for candidate in candidates:
        if _works(candidate):
            return candidate
    if not Path(system).exists():
        return None
    copied = UserPython(system, {"PYTHONPATH": str(_copy(folder / "python", packages))})
    return copied if _works(copied) else None


def _works(python: UserPython) -> bool:
    command = [python.path, "-c", _TRIAL]
    try:
        done = subprocess.run(
            command, user=_UID_OF_A_STRANGER, group=_UID_OF_A_STRANGER, extra_groups=[], cwd="/", env=dict(python.environ),
            capture_output=True, timeout=60,
        )  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0


def _copy(target: Path, packages: list[Path]) -> Path:
    ignore = shutil.ignore_patterns(*_TOO_LARGE, "__pycache__")
    for folder in packages:
        shutil.copytree(folder, target, ignore=ignore, dirs_exist_ok=True)
    for name in ("launcher", "supervisor", "worker", "migrations"):
        source = Path(rsup.launcher.__file__).parent.parent / name
        shutil.copytree(source.resolve(), target / "rsup" / name, ignore=ignore, dirs_exist_ok=True)
    return target
