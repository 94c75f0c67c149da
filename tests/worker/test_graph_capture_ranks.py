"""Two real ranks capture together, or not at all; the checks are in `graph_capture_ranks.py`."""

import ast
from pathlib import Path

SCRIPT = Path(__file__).with_name("graph_capture_ranks.py")


def test_two_ranks_capture_together_or_not_at_all(runs) -> None:
    run = runs.start(2, script=SCRIPT)
    codes = run.finish()
    assert codes == [0] * 2, "\n".join(run.text(rank)[-3000:] for rank in range(2))
    names = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in names if name.startswith("check_")]
    assert len(expected) == 7
    for rank in range(2):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected
