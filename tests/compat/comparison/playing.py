"""Plays rows: finds them in the modules beside this one, gives each an empty folder, and ends what a launcher left there."""

import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.compat.comparison.left_running import kill_all
from tests.compat.comparison.row import Peer, Row, Seen, end_started

MODULES = "rows_*.py"


def all_rows() -> list[Row]:
    """Every row of every `rows_*.py` here, in the order of the modules' names."""
    names = sorted(path.stem for path in Path(__file__).parent.glob(MODULES))
    return [row for name in names for row in rows_of(name)]


def rows_of(module: str) -> Sequence[Row]:
    """`ROWS` of one module."""
    rows: Sequence[Row] = importlib.import_module(f"tests.compat.comparison.{module}").ROWS
    return rows


def play(row: Row, peer: Peer) -> Seen:
    """Run the row's recipe with that launcher. Whatever still runs in its folder afterwards is killed."""
    folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))  # short: a UNIX socket's path ends at 107 bytes
    try:
        return row.recipe(peer, folder)
    finally:
        kill_all(folder)
        end_started()
        shutil.rmtree(folder, ignore_errors=True)
