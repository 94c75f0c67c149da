"""The program in docs/cuda_graph.md runs as it stands, on two ranks, and learns from iterations that are all settled."""

import re
from pathlib import Path

from tests.worker.conftest import Runs

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_document_runs(runs: Runs, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs/cuda_graph.md").read_text(), re.DOTALL)
    assert found is not None
    script = tmp_path / "example.py"
    script.write_text(found[1])
    attempt = runs.start(2, script=script)
    assert attempt.finish() == [0, 0], attempt.text() + attempt.text(1)
    lines = attempt.text().splitlines()
    assert [line.split(":")[0] for line in lines] == [f"iteration {number}" for number in range(1, 21)]
    assert all(re.fullmatch(r"iteration \d+: loss \d+\.\d{4}, gradient norm \d+\.\d{4}", line) for line in lines), lines
