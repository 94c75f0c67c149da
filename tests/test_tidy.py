"""Rules of the tree that no other tool checks: layers, names, and that nothing of a developer's machine is in it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("supervisor", "worker", "launcher", "migrations")
CONTRACT = {f"rsup.supervisor.{name}" for name in ("wire", "heartbeat_board", "places", "munge", "one_line_parser")}
HEAVY = {"torch", "sqlalchemy", "fastapi", "uvicorn", "alembic"}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert found
    return found


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, `from rsup.supervisor import wire` as `rsup.supervisor.wire`."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages = {"rsup", *(f"rsup.{package}" for package in PACKAGES)}
            names |= {f"{node.module}.{a.name}" for a in node.names} if node.module in packages else {node.module}
    return names


@pytest.mark.parametrize("package", ["worker", "launcher"])
def test_worker_and_launcher_know_only_the_contract(package: str) -> None:
    other = {"worker": "launcher", "launcher": "worker"}[package]
    for path in sources(package):
        for name in imports(path):
            assert not name.startswith(f"rsup.{other}"), f"{path}: imports {name}"
            if name.startswith("rsup.supervisor"):
                assert name in CONTRACT, f"{path}: imports {name}"


def test_the_contract_is_light() -> None:
    for name in CONTRACT:
        path = ROOT / (name.removeprefix("rsup.").replace(".", "/") + ".py")
        allowed = CONTRACT | {"msgspec"} | set(sys.stdlib_module_names)
        for used in imports(path, top_level_only=True):
            assert used in allowed or used.split(".")[0] in allowed, f"{path}: imports {used}"


def test_the_launcher_starts_without_heavy_imports() -> None:
    script = "import rsup.launcher.cli, rsup.launcher.agent, sys; print(sorted({'%s'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script % "','".join(sorted(HEAVY))], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_no_file_is_called_what_says_nothing() -> None:
    for path in sources(*PACKAGES, "tests"):
        assert path.stem not in BANNED_NAMES, path


def test_bare_package_names_are_never_imported() -> None:
    for path in sources(*PACKAGES, "tests"):
        for name in imports(path):
            assert name.split(".")[0] not in PACKAGES, f"{path}: import rsup.{name} instead of {name}"


def test_each_public_module_says_what_it_is() -> None:
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or not tree.body, f"{path} has no docstring"


def test_no_path_of_a_developers_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/")
    for name in tracked:
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or path.suffix in {".png", ".ico"}:
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert not found or path == Path(__file__), f"{name}: {found.group() if found else ''}"
