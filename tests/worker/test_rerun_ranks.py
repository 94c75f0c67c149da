"""The whole rerun machine on four real ranks: DDP, FSDP2, data by tensor parallelism; the checks are in `rerun_ranks.py`."""

import ast
from pathlib import Path

SCRIPT = Path(__file__).with_name("rerun_ranks.py")


def test_four_ranks_find_whose_fault_it_is(runs) -> None:
    run = runs.start(4, script=SCRIPT)
    codes = run.finish()
    assert codes == [0] * 4, "\n".join(run.text(rank)[-3000:] for rank in range(4))
    names = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in names if name.startswith("check_")]
    assert len(expected) == 10
    for rank in range(4):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected
