"""Looks at script and directories before anything starts, so that what cannot work is refused in one line with exit code 2."""

import importlib.machinery
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rsup.launcher.inventory_file import read_inventory_file
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.result_file import remove_old_result
from rsup.supervisor import places
from rsup.supervisor.wire import RsupError, UsageError

STDIN_SCRIPTS = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def check(options: LaunchOptions) -> None:
    """Raise `UsageError` if script, module, program, directories or key file cannot be used. Makes missing directories,
    and removes the result of an earlier launch."""
    if options.result_file is not None:
        _check_result_file(options.result_file)
    check_script(options)
    if options.logs_specs is not None:
        from rsup.launcher.logs_specs import find_logs_specs

        find_logs_specs(options.logs_specs)
    _check_directory("--state-dir", options.state_dir, mode=0o700)
    if options.log_dir is not None:
        _check_directory("--log-dir", options.log_dir)
    if options.device_inventory is not None:
        read_inventory_file(options.device_inventory, places.this_node())
    if options.device_policy is not None:
        _check_device_policy(options.device_policy)
    try:
        places.runtime_dir()
        if options.key_file is not None:
            places.check_key_file(options.key_file)
    except RsupError as error:
        raise UsageError(str(error)) from None


def notes_of_places(options: LaunchOptions) -> list[str]:
    """A line where the store is not where one would look for it."""
    usual, found = places.usual_state_dir(), options.state_dir
    if os.environ.get("RSUP_STATE_DIR") or found == usual or found != places.state_dir():
        return []
    return [f"{usual} cannot be written, so the store of this user is in {found}"]


def notes_of_preload(options: LaunchOptions) -> list[str]:
    """A line where a module that standbys are to import cannot be found. Imports nothing: of a dotted name the root alone is
    looked for."""
    if options.no_standby or options.no_python or os.environ.get("PYTHON_EXEC"):
        return []
    here = _working_directory()
    script = os.path.join(here, options.training_script)
    beside = here if options.module else script if os.path.isdir(script) else os.path.dirname(script)
    sys_path = [beside, *sys.path]
    roots = dict.fromkeys(name.partition(".")[0] for name in options.preload)
    missing = [root for root in roots if not (_find(root, sys_path) or _find(root, None))]
    if not missing:
        return []
    return [f"--preload {', '.join(missing)}: not found here, so standbys go without; check the name and PYTHONPATH"]


def check_script(options: LaunchOptions) -> None:
    """Raise `UsageError` if it is certain that the ranks could not even be started."""
    script = options.training_script
    reads_stdin = script in STDIN_SCRIPTS and not options.module and not options.no_python
    if reads_stdin and options.nproc_per_node > 1:
        ranks = options.nproc_per_node
        raise UsageError(f"script {script}: {ranks} ranks cannot share one standard input; name a file, or --nproc-per-node 1")
    if script == "-" and reads_stdin and not options.run_path:
        return
    if options.module:
        _check_module(script)
    elif options.no_python and not options.run_path:
        if shutil.which(script) is None:
            there = Path(script).exists()
            raise UsageError(
                f"{script} is not executable; chmod +x it, or leave out --no-python"
                if there
                else f"program {script} not found; check its name and PATH"
            )
    elif not Path(script).exists():
        where = "" if script.startswith("/") else f" in {_here()}"
        hint = "; did you mean -m?" if _is_module_name(script) and module_exists(script) else "; check its path"
        raise UsageError(f"script {script} not found{where}{hint}")
    elif Path(script).is_dir() and not Path(script, "__main__.py").exists():
        raise UsageError(f"script {script} is a directory without __main__.py")
    elif not os.access(script, os.R_OK):
        raise UsageError(f"script {script} cannot be read; check its permissions")


def _working_directory() -> str:
    """Empty where somebody has removed it."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _here() -> str:
    return _working_directory() or "the working directory, which has been removed"


def _check_module(name: str) -> None:
    if not _is_module_name(name):
        hint = f"; leave out -m to run the file {name}" if Path(name).exists() else ""
        raise UsageError(f"-m {name}: is no module name{hint}")
    python = os.environ.get("PYTHON_EXEC")
    if python and os.path.realpath(shutil.which(python) or python) != os.path.realpath(sys.executable):
        return  # another interpreter has other modules
    if not module_exists(name):
        raise UsageError(f"-m {name}: no module of that name can be run; check its name and PYTHONPATH")


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def module_exists(name: str) -> bool:
    """Whether `python -m NAME` in this directory would find something to run. Imports nothing, parents neither; when it cannot
    tell without importing (a package that sets its own `__path__`), it says yes."""
    here = _working_directory()
    sys_path = [here, *sys.path] if here else sys.path
    parts = name.split(".")
    spec = _find(parts[0], sys_path) or _find(parts[0], None)
    for depth in range(1, len(parts) + 1):
        if spec is None:
            return False
        locations = spec.submodule_search_locations
        if locations is None:
            return depth == len(parts)
        if _sets_its_own_path(spec):
            return True
        child = ".".join(parts[: depth + 1]) if depth < len(parts) else f"{name}.__main__"
        try:
            spec = _find(child, list(locations))
        except (KeyError, AttributeError):
            return True  # a namespace package inside a package that is not imported
    return spec is not None


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    if name in sys.modules and getattr(sys.modules[name], "__spec__", None) is not None:
        return sys.modules[name].__spec__
    finders: Iterable[object] = [importlib.machinery.PathFinder] if path is not None and "." not in name else sys.meta_path
    for finder in finders:
        find_spec = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find_spec(name, path) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _sets_its_own_path(spec: importlib.machinery.ModuleSpec) -> bool:
    if not spec.origin or not spec.origin.endswith(".py"):
        return False
    try:
        return b"__path__" in Path(spec.origin).read_bytes()
    except OSError:
        return True


def _check_directory(flag: str, path: Path, mode: int = 0o777) -> None:
    """Make it where it is missing, and see that a file can be made in it."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot write there ({error.strerror}); choose another directory") from None


def _check_device_policy(path: Path) -> None:
    """By the supervisor's own code, which this process does not load."""
    command = [sys.executable, "-P", "-m", "rsup.supervisor.hardware.policy_check", str(path.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--device-policy {path}: cannot be checked: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"its check ended with exit code {done.returncode}"]
        raise UsageError(f"--device-policy: {said[-1]}")


def _check_result_file(path: Path) -> None:
    _check_file("--result-file", path)
    try:
        remove_old_result(path)
    except OSError as error:
        why = f"an earlier launch's cannot be removed: {error.strerror}"
        raise UsageError(f"--result-file {path}: {why}; choose another file") from None


def _check_file(flag: str, path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a directory; give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{flag} {path}: cannot be written; choose another file")
    _check_directory(flag, path.parent)
