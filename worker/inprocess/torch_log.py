"""torch's own log in C++, which writes to the terminal."""

import ctypes
import os
from pathlib import Path

ERROR = 2
"""Of the levels that `TORCH_CPP_LOG_LEVEL` names; WARNING is 1."""


def only_errors() -> None:
    """Let torch's C++ log write errors and no warnings, unless the user has set `TORCH_CPP_LOG_LEVEL`.

    A store of an entry that is over is closed on whoever waits in it, and torch warns of that with 25 lines of C++ frames in
    each such rank; the exception, which follows, is told in one line. torch reads the variable when it is imported, which has
    been: what it sets is set here. Where a torch has no such number, the warnings stay.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    level = _level()
    if level is not None and level.value < ERROR:
        level.value = ERROR


def _level() -> "ctypes.c_int | None":
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
