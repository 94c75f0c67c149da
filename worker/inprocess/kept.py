"""What outlives the entry it belongs to: who keeps it, in words that a person finds in their script.

A process group that something refers to keeps its gloo connections open, and ranks that wait in them wait for ever; a CUDA
graph keeps the communicators whose kernels it holds from being aborted.
"""

import gc
import sys
import time
import types
from typing import Any

SEARCH_WITHIN_S = 1.0
MAX_LEVEL = 500
MAX_DEPTH = 12
_UNNAMED = (dict, tuple, types.CellType, types.ModuleType)


def holder_of(kept: object, within_s: float = SEARCH_WITHIN_S) -> str:
    """Where `kept` is referred to from, the nearest global or local variable; empty if none was found in `within_s`.

    Stops the other Python threads for some hundredths of a second at a time. Looks at types only: `isinstance` would ask the
    objects, of which some warn, or do worse.
    """
    end_s = time.monotonic() + within_s
    gc.unfreeze()  # what was made before the first entry is not searched else, and holds most of what is kept
    roots = _variables()
    level: list[Any] = [kept]
    child_of: dict[int, Any] = {}
    alive: list[Any] = []
    """So that no address is used twice."""
    for _ in range(MAX_DEPTH):
        for one in level:
            if id(one) in roots:
                return _story(roots[id(one)], one, kept, child_of)
        if time.monotonic() > end_s or not level:
            return ""
        alive.append(level)
        level = _referrers(level, kept, child_of, [level, alive, child_of, roots, *alive])
    return ""


def _referrers(level: list[Any], kept: object, child_of: dict[int, Any], ours: list[Any]) -> list[Any]:
    """What refers to any of `level` and was not seen before; `child_of` notes to which."""
    not_these = {id(one) for one in ours} | {id(kept)}
    ids = {id(one) for one in level}
    found = []
    for referrer in gc.get_referrers(*level):
        if id(referrer) in not_these or id(referrer) in child_of or type(referrer) is types.FrameType:
            continue
        child = next((one for one in gc.get_referents(referrer) if id(one) in ids), None)
        if child is not None:
            child_of[id(referrer)] = child
            found.append(referrer)
        if len(found) >= MAX_LEVEL:
            break
    return found


def _variables() -> dict[int, str]:
    """The values of all variables by address: locals of every thread's frames, and globals, the main script's first."""
    found: dict[int, str] = {}
    for frame in sys._current_frames().values():
        caller: types.FrameType | None = frame
        while caller is not None:
            if caller.f_globals.get("__package__") != __package__ and caller.f_code.co_name != "<module>":
                where = f"in {caller.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno})"
                for name, value in caller.f_locals.items():
                    found.setdefault(id(value), f"the local variable {name} {where}")
            caller = caller.f_back
    modules = sorted(sys.modules.items(), key=lambda item: item[0] != "__main__")
    for module_name, module in modules:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is not types.ModuleType:
                found.setdefault(id(value), f"the global variable {name} of {module_name}")
    return found


def _story(variable: str, holder: Any, kept: object, child_of: dict[int, Any]) -> str:
    """The variable, and what lies between it and what is kept."""
    between: list[str] = []
    while holder is not kept:
        if type(holder) not in _UNNAMED:
            between.append(type(holder).__name__)
        holder = child_of[id(holder)]
    return variable + (f" (a {', with a '.join(between)})" if between else "")


def graphs() -> list[Any]:
    """CUDA graphs that still exist."""
    import torch

    gc.unfreeze()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.cuda.CUDAGraph)]
