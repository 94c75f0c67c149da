"""The reference trainer's timers and straggler reports: Megatron-LM's names, at the places that they stand for."""

import re

import pytest

RUN = ("--iterations=9", "--log-interval=4", "--global-batch-size=8", "--timing-log-level=2", "--log-straggler")
OF_STEP = {"forward-backward", "batch-generator", "forward-compute", "backward-compute", "optimizer"}
OF_OPTIMIZER = {"optimizer-clip-main-grad", "optimizer-inner-step"}


def times(text: str) -> list[dict[str, float]]:
    """Of each log point the longest time over ranks of each timer, in ms an iteration."""
    found: list[dict[str, float]] = []
    for line in text.splitlines():
        if line.startswith("max time across ranks (ms):"):
            found.append({})
        elif match := re.fullmatch(r"    ([a-z-]+) \.+: ([0-9.]+)", line):
            found[-1][match[1]] = float(match[2])
    return [one for one in found if OF_STEP & set(one)]


@pytest.mark.parametrize("graph", [(), ("--cuda-graph-impl=full_iteration",)], ids=["eager", "graph"])
def test_parts_of_a_step_are_timed_and_ranks_compared(runs, graph: tuple[str, ...]) -> None:
    run = runs.run(2, *RUN, "--timing-log-option=max", *graph, job=f"timed{len(graph)}")
    assert run.codes() == [0, 0], run.text()
    reports = times(run.text())
    assert len(reports) == 3, run.text()  # after the first step, the fourth and the eighth
    for report in reports:
        assert set(report) >= (OF_STEP if graph else OF_STEP | OF_OPTIMIZER), report
        for inner, outer in (("forward-compute", "forward-backward"), ("backward-compute", "forward-backward")):
            assert 0 < report[inner] < report[outer]
    compared = re.findall(
        r"stragglers, iterations (\d+) to (\d+): .*slowest: rank \d \(\d+\.\d ms\) \| fastest: rank \d", run.text()
    )
    assert compared == [("2", "4"), ("5", "8")], run.text()
