"""The collective parts of rotation and audit, on three real ranks; the checks are those of `rotation_ranks.py`."""

import ast
from pathlib import Path

SCRIPT = Path(__file__).with_name("rotation_ranks.py")


def names_of(script: Path) -> list[str]:
    """The checks that a script defines."""
    functions = [node.name for node in ast.parse(script.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("check_")]


def test_three_ranks_move_compare_rotate_and_audit(runs) -> None:
    run = runs.start(3, script=SCRIPT)
    codes = run.finish()
    assert codes == [0, 0, 0], "\n".join(run.text(rank)[-3000:] for rank in range(3))
    expected = [f"holds: {name}" for name in names_of(SCRIPT)]
    assert len(expected) >= 8
    for rank in range(3):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected
