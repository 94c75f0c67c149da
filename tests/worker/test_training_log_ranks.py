"""The training logs of three real ranks; the checks are in `logging_ranks.py`."""

import ast
from pathlib import Path

SCRIPT = Path(__file__).with_name("logging_ranks.py")


def test_three_ranks_log_together(runs) -> None:
    run = runs.start(3, script=SCRIPT)
    codes = run.finish()
    assert codes == [0] * 3, "\n".join(run.text(rank)[-3000:] for rank in range(3))
    names = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in names if name.startswith("check_")]
    assert len(expected) == 6
    for rank in range(3):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected
