"""Rotation on a 2x2 mesh of data and tensor parallelism, four real ranks; the checks are those of `mesh_ranks.py`."""

import ast
from pathlib import Path

SCRIPT = Path(__file__).with_name("mesh_ranks.py")


def test_four_ranks_rotate_by_replica(runs) -> None:
    """P24: with model parallelism the fault has spread before anyone looks, so its replica is named, not a device."""
    run = runs.start(4, script=SCRIPT)
    codes = run.finish()
    assert codes == [0] * 4, "\n".join(run.text(rank)[-3000:] for rank in range(4))
    functions = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in functions if name.startswith("check_")]
    assert len(expected) == 4
    for rank in range(4):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected
