"""A step whose assumption fails is computed once more, with the same data and random numbers, once its graph is gone."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rsup.worker.cuda_graph.contract import Batches, GraphError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.speculative import SpeculativeStep
from rsup.worker.rerun.replay_state import ReplayState
from tests.worker.conftest import Runs

CPU = torch.device("cpu")
CAPACITY = 2.0


class Step:
    """A layer with dropout and running statistics that holds no input above a capacity, unless it is released."""

    def __init__(self, releases: bool = True) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
        self.flag, self.capacity, self.releases = torch.zeros(()), CAPACITY, releases
        self.seen: list[str] = []
        self.state = ReplayState(CPU)
        self.state.register_buffers("model", self.model)
        self.graph = FullIterationGraph(self.fast, CPU, warmup_steps=1, parameters=self.model.named_parameters())
        self.step = SpeculativeStep(
            self.graph,
            self.eager,
            self.flag,
            None,
            self.state,
            [self.release],
            after_fallback=[self.hold],
            zero_gradients=self.zero_gradients,
        )

    def fast(self, batches: Batches) -> Any:
        self.seen.append("fast")
        return self.compute(batches)

    def eager(self, batches: Batches) -> Any:
        self.seen.append("eager")
        return self.compute(batches)

    def compute(self, batches: Batches) -> Any:
        total = torch.zeros(())
        for batch in batches[0]:
            self.flag.logical_or_((batch["x"] > self.capacity).any())
            loss = self.model(batch["x"].clamp(max=self.capacity)).square().mean()
            loss.backward()
            total += loss.detach()
        return {"loss": total}

    def zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def release(self) -> None:
        assert not self.graph.captured, "the graph still refers to what is released"
        self.seen.append("release")
        if self.releases:
            self.capacity = float("inf")

    def hold(self) -> None:
        self.seen.append("hold")
        self.capacity = CAPACITY

    def result(self, *values: float) -> tuple[float, list[torch.Tensor]]:
        """Loss, and gradients and statistics after a step on micro-batches that are filled around `values`."""
        self.zero_gradients()
        batches = [{"x": torch.arange(6.0).view(2, 3) / 10 + value} for value in values]
        loss = float(self.step([batches]).value["loss"])
        found = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        return loss, found + [buffer.clone() for buffer in self.model.buffers()]


def same(one: tuple[float, list[torch.Tensor]], other: tuple[float, list[torch.Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("at", [0, 1, 2], ids=["in the warm-up", "in the capture", "in a replay"])
def test_a_step_that_overflows_is_that_of_a_run_without_a_capacity(at: int) -> None:
    values = [5.0 if number == at else 1.0 for number in range(5)]
    speculative = Step()
    results = [speculative.result(1.0, value) for value in values]
    unlimited = Step()  # which seeds the generators again
    unlimited.capacity = float("inf")
    for number, value in enumerate(values):
        assert same(results[number], unlimited.result(1.0, value)), f"step {number}"
    before = ["fast"] * (at + 1)
    assert speculative.seen == [*before, "release", "eager", "hold", *["fast"] * (4 - at)]
    assert speculative.step.num_fallbacks == 1 and unlimited.step.num_fallbacks == 0
    assert speculative.graph.captured == (4 - at > 1), "it warms up and is captured anew"


def test_the_graph_is_reset_and_others_that_share_its_buffers_too() -> None:
    speculative = Step()
    evaluation = FullIterationGraph(lambda batches: batches[0][0] * 2, CPU, name="evaluation", warmup_steps=0)
    evaluation([[torch.ones(2)]])
    assert evaluation.captured
    speculative.step = SpeculativeStep(
        speculative.graph,
        speculative.eager,
        speculative.flag,
        replay_state=speculative.state,
        on_fallback=[speculative.release, lambda: speculative.seen.append(f"evaluation {evaluation.captured}")],
        after_fallback=[speculative.hold],
        also_reset=[evaluation],
    )
    for value in (1.0, 1.0, 5.0):
        speculative.result(value)
    assert speculative.seen[-4:] == ["release", "evaluation False", "eager", "hold"]
    assert not speculative.graph.captured


def test_an_eager_pass_that_overflows_too_is_an_error_and_settings_go_back() -> None:
    speculative = Step(releases=False)
    with pytest.raises(GraphError, match=r"the eager pass of a speculative step raised its flag too: .*on_fallback") as raised:
        speculative.result(5.0)
    assert "\n" not in str(raised.value)
    assert speculative.seen == ["fast", "release", "eager", "hold"]


def test_without_a_replay_state_the_generators_go_on_which_is_not_the_same() -> None:
    """So the comparison above sees that random numbers are restored."""
    speculative = Step()
    speculative.step = SpeculativeStep(
        speculative.graph, speculative.eager, speculative.flag, None, None, [speculative.release]
    )
    result = speculative.result(5.0)
    unlimited = Step()
    unlimited.capacity = float("inf")
    assert not same(result, unlimited.result(5.0))


def test_a_stale_flag_of_the_step_before_counts_for_nothing() -> None:
    speculative = Step()
    speculative.flag.fill_(1.0)
    speculative.result(1.0)
    assert speculative.step.num_fallbacks == 0
    bypassed = speculative.step([[{"x": torch.ones(2, 3)}]], eager=True)
    assert float(bypassed.value["loss"]) > 0 and speculative.seen == ["fast", "fast"]
    speculative.result(1.0)
    assert speculative.graph.captured
    speculative.step.reset()
    assert not speculative.graph.captured


def test_two_ranks_fall_back_together_and_facts_that_differ_are_named(runs: Runs) -> None:
    attempt = runs.start(2, script=Path(__file__).with_name("speculative_ranks.py"))
    assert attempt.finish() == [0, 0], attempt.text() + attempt.text(1)
    assert "fine" in attempt.text() and "fine" in attempt.text(1)
