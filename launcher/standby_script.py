"""Whether a script can be started again where it stands: what it does before it imports torch may then happen twice.

A standby finds out only when it runs the script that torch should not have been imported ahead, and then starts it again in
its own place. So the agent reads the script first. Imports, definitions, constants and a few harmless calls may come before the
first import of torch; an `open`, say, may not, and an environment variable that is set there makes the restart cold anyway.
Pure but for reading the file. A file that cannot be found or understood is no obstacle: the standby looks again.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HARMLESS_CALLS = frozenset(
    {
        "Path",
        "TypeVar",
        "append",
        "bool",
        "cast",
        "contextlib.suppress",
        "dataclass",
        "dict",
        "faulthandler.enable",
        "field",
        "float",
        "frozenset",
        "functools.partial",
        "get",
        "getLogger",
        "getattr",
        "hasattr",
        "insert",
        "int",
        "isinstance",
        "len",
        "list",
        "logging.basicConfig",
        "logging.getLogger",
        "max",
        "min",
        "namedtuple",
        "os.chdir",
        "os.environ.get",
        "os.getcwd",
        "os.getenv",
        "os.path.abspath",
        "os.path.basename",
        "os.path.dirname",
        "os.path.exists",
        "os.path.expanduser",
        "os.path.join",
        "os.path.realpath",
        "parent",
        "partial",
        "pathlib.Path",
        "print",
        "range",
        "repr",
        "resolve",
        "set",
        "sorted",
        "str",
        "super",
        "suppress",
        "sys.path.append",
        "sys.path.insert",
        "time.perf_counter",
        "time.time",
        "tuple",
        "type",
        "typing.cast",
        "warnings.filterwarnings",
        "warnings.simplefilter",
    }
)
INERT_NAMES = ("TOKENIZERS_", "WANDB_", "HF_", "TRANSFORMERS_", "ACCELERATE_", "NCCL_", "GLOO_", "MASTER_", "CUDA_")
MAX_BYTES = 2 << 20


def why_not_twice(path: Path | None) -> str:
    """Why no standby should run this script; empty: nothing against it."""
    try:
        if path is None or path.stat().st_size > MAX_BYTES:
            return ""
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
    is_direct = any("torch" in _roots(found) for found in _in_order(body) if isinstance(found, ast.Import | ast.ImportFrom))
    has_foreign_import = False
    for statement in _in_order(body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            roots = _roots(statement)
            if "torch" in roots:
                return ""
            has_foreign_import |= any(root not in sys.stdlib_module_names for root in roots)
        elif reason := _reason(statement):
            # without an import of torch here, a package that was imported above has most likely done it already
            is_after = has_foreign_import and not is_direct and not reason.startswith("sets")
            return "" if is_after else f"line {statement.lineno} {reason}"
    return "" if has_foreign_import else "it imports torch inside of a function"


def script_path(training_script: str, *, is_module: bool) -> Path | None:
    """The file of a script, or of a module as `python -m` would find it from here; None: not found."""
    if not is_module:
        return Path(training_script)
    root, *rest = training_script.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    bases = [Path.cwd() / root, *(Path(place) for place in (spec.submodule_search_locations or [] if spec else []))]
    for base in bases:
        below = base.joinpath(*rest)
        for found in (below.with_name(below.name + ".py"), below / "__main__.py"):
            if found.is_file():
                return found
    return None


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements as they run, those of `try`, `with` and `if` blocks in their place; not those of functions."""
    for statement in body:
        if isinstance(statement, ast.If) and not _is_main_guard(statement.test):
            yield from _in_order([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _in_order([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        else:
            yield statement


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _roots(statement: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(statement, ast.ImportFrom):
        return {(statement.module or "").partition(".")[0]} if not statement.level else {"."}
    return {alias.name.partition(".")[0] for alias in statement.names}


def _reason(statement: ast.stmt) -> str:
    """What stands against running this statement twice."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass | ast.Global):
        return ""
    if isinstance(statement, ast.If):
        return "starts the program before torch is imported"
    targets = statement.targets if isinstance(statement, ast.Assign | ast.Delete) else []
    for target in targets:
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
            name = str(target.slice.value) if isinstance(target.slice, ast.Constant) else "a variable"
            if not name.startswith(INERT_NAMES):
                return f"sets {name} before torch is imported"
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.Assert):
        return "does something before torch is imported that may not happen twice"
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "os.environ.setdefault" or called == "os.environ.update":
                return "sets environment variables before torch is imported"
            if called not in HARMLESS_CALLS and called.rpartition(".")[2] not in HARMLESS_CALLS:
                return f"calls {called[:60]} before torch is imported"
    return ""
