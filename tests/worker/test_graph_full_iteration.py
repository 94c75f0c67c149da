"""The states of a graph of the whole step, without CUDA: warm-up, replay, volatile results, changed inputs, reset."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rsup.worker.cuda_graph.contract import Batches, GraphError, OnChange, StaleResultError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from tests.worker.graph_trained import CPU, Trained, batches_of, equal


@pytest.mark.parametrize(("num_chunks", "warmup_steps"), [(1, 3), (3, 0), (2, 11)])
def test_every_call_computes_the_step_once_and_as_without_a_graph(num_chunks: int, warmup_steps: int) -> None:
    plain, graphed = Trained(num_chunks), Trained(num_chunks)
    expected = []
    for number in range(14):
        expected.append(plain.step(batches_of(number, num_chunks=num_chunks))["losses"])
        plain.update()
    torch.manual_seed(1)
    step = graphed.graph(warmup_steps=warmup_steps)
    for number in range(14):
        assert step.captured is (number > warmup_steps) and step.num_calls == number
        result = step(batches_of(number, num_chunks=num_chunks))
        assert graphed.executions == number + 1
        assert equal(result.value["losses"], expected[number])
        assert not any(loss.requires_grad for loss in result.value["losses"])
        graphed.update()
    assert equal(plain.weights(), graphed.weights()) and step.num_graphs == 1
    assert result.value["calls"] == warmup_steps + 1, "what is no tensor stays as it was captured"


def test_the_schedule_may_be_in_any_order() -> None:
    plain, graphed = Trained(), Trained()
    expected = [plain.combined(batches_of(number)) for number in range(5)]
    torch.manual_seed(1)
    step = FullIterationGraph(graphed.combined, CPU, warmup_steps=1)
    for number in range(5):
        assert equal(step(batches_of(number)).value, expected[number])
    assert equal([p.grad for p in plain.chunks.parameters()], [p.grad for p in graphed.chunks.parameters()])  # type: ignore[misc]


def test_a_result_is_good_until_the_next_call() -> None:
    step = Trained().graph(warmup_steps=1)
    old = None
    for number in range(4):
        result = step(batches_of(number))
        copy = result.materialize()
        assert equal(copy["losses"], result.value["losses"])
        if old is not None:
            with pytest.raises(StaleResultError, match=r"training graph was written over by a later call: read it, or keep"):
                old[0].value  # noqa: B018
            assert not equal(old[1]["losses"], result.value["losses"])
        tensors = result.value["losses"]
        old = result, copy
    step(batches_of(9))
    assert not equal(tensors, copy["losses"]), "a replay writes into the very tensors that it returned"
    step.reset()
    with pytest.raises(StaleResultError, match="was written over"):
        result.value  # noqa: B018


# ---------------------------------------------------------------------------------------------------- changed inputs

CHANGED = [batches_of(7, num_micros=3), batches_of(7, rows=1), batches_of(7, scale=2.0), batches_of(7, num_micros=1)]


@pytest.mark.parametrize("changed", CHANGED)
def test_changed_inputs_are_refused_and_nothing_is_computed(changed: Batches) -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1, name="evaluation")
    for number in range(3):
        result = step(batches_of(number))
    with pytest.raises(GraphError, match=r"the evaluation graph was captured with other inputs: model chunk 0.* instead of "):
        step(changed)
    assert trained.executions == step.num_calls == 3 and result.value
    step(batches_of(4))
    assert trained.executions == 4


def test_changed_inputs_run_eagerly() -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1, on_change=OnChange.EAGER)
    for number in range(3):
        step(batches_of(number))
    held_bytes = step._buffers.size_bytes
    for changed in CHANGED:
        result = step(changed)
        assert len(result.value["losses"]) == len(changed[0]) and result.value["calls"] == trained.executions
    assert step.num_graphs == 1 and trained.executions == 7
    assert step(batches_of(9)).value["calls"] == 2 and step._buffers.size_bytes == held_bytes


def test_changed_inputs_are_captured_and_the_least_recently_used_graph_goes() -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1, on_change=OnChange.RECAPTURE, max_graphs=2)

    def of_size(num_micros: int) -> Callable[[int], Batches]:
        return lambda number: batches_of(number, num_micros)

    first, second, third = of_size(1), of_size(2), of_size(3)
    for batches, expected in ((first, 0), (first, 1), (second, 1), (second, 2), (first, 2), (third, 2), (third, 2)):
        step(batches(trained.executions))
        assert step.num_graphs == expected
    assert step._buffers.size_bytes == 256 * (1 + 3), "the buffers of the graph that went are gone"
    assert step(first(8)).value["calls"] == 2, "used after the second, and still there"
    assert step(third(9)).value["calls"] == 7
    assert step(second(10)).value["calls"] == trained.executions == 10, "captured again at once: it has been warmed up"
    assert step.num_graphs == 2


def test_inputs_that_never_stay_the_same_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsup.worker.cuda_graph.full_iteration._MAX_KNOWN", 4)
    step = Trained().graph(warmup_steps=1, on_change=OnChange.EAGER)
    for number in range(3):
        step(batches_of(number))
    for number in range(12):
        step(batches_of(number, scale=float(number + 2)))
    assert len(step._known) == len(step._numbers) == 4 and step.captured
    assert step(batches_of(3)).value["calls"] == 2


# ----------------------------------------------------------------------------------------------- eager calls, reruns, reset


def test_an_eager_call_leaves_the_graph_as_it_is() -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=2)
    for number, eager in enumerate([True, False, True, False, False, True, False]):
        result = step(batches_of(number), eager=eager)
        assert step.captured is (number >= 4) and trained.executions == number + 1
        assert result.value["calls"] == (number + 1 if eager or number < 4 else 5)


def test_a_rerun_neither_warms_up_nor_captures() -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1)
    for counts, captured in ((False, False), (True, False), (False, False), (False, False), (True, True), (False, True)):
        step(batches_of(1), counts=counts)
        assert step.captured is captured
    assert step.num_calls == 2 and trained.executions == 6


def test_a_rerun_finds_what_the_first_pass_computed() -> None:
    """A fault in the warm-up, in the capture iteration or in a replay is rerun with generators as they were."""
    trained = Trained()
    step = trained.graph(warmup_steps=1)
    for number in range(4):
        before = torch.get_rng_state()
        first = step(batches_of(number)).materialize()
        torch.set_rng_state(before)
        assert equal(step(batches_of(number), counts=False).value["losses"], first["losses"])


def test_nan_in_the_warm_up_leaves_no_trace_in_the_graph() -> None:
    step = Trained().graph(warmup_steps=2)
    for number in range(5):
        batches = batches_of(number)
        if number < 3:
            batches[0][0]["x"].fill_(float("nan"))
        losses = step(batches).value["losses"]
        assert losses[0].isnan().item() is (number < 3) and not losses[1].isnan()


def test_reset_warms_up_anew_in_the_same_buffers() -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1)
    addresses = set()
    for _ in range(2):
        for number in range(3):
            result = step(batches_of(number))
            assert step.captured is (number > 0)
        (buffers,) = step._buffers._sets.values()
        addresses.add(buffers.tensors[0].data_ptr())
        step.reset()
        with pytest.raises(StaleResultError, match=r"was dropped by reset\(\)"):
            result.value  # noqa: B018
        assert not step.captured
    assert trained.executions == step.num_calls == 6 and len(addresses) == 1


def test_reset_and_calls_in_the_midst_of_a_call_are_refused() -> None:
    training, evaluation = Trained(), Trained()
    inner: list[Callable[[], object]] = []

    def step(batches: Batches) -> Any:
        for call in inner:
            call()
        return evaluation.step(batches)

    trains = training.graph(warmup_steps=0)
    evaluates = FullIterationGraph(step, CPU, name="evaluation", warmup_steps=0)
    trains(batches_of(0))
    evaluates(batches_of(0))
    inner.append(evaluates.reset)
    with pytest.raises(GraphError, match="the evaluation graph cannot be reset in the midst of a call"):
        evaluates(batches_of(1))
    inner[:] = [lambda: evaluates(batches_of(2))]
    with pytest.raises(GraphError, match="the evaluation graph is called from within its own step"):
        evaluates(batches_of(1))
    inner[:] = [trains.reset]
    assert evaluates(batches_of(1)).value["losses"] and evaluates.captured
    assert not trains.captured
    inner.clear()
    evaluates.reset()
    evaluates(batches_of(3))
    assert evaluates.captured


def test_training_and_evaluation_live_side_by_side() -> None:
    trained = Trained()

    @torch.no_grad()
    def evaluate(batches: Batches) -> Any:
        trained.chunks.eval()
        value = [trained.chunks[0](batch["x"]).square().mean() for batch in batches[0]]
        trained.chunks.train()
        return value

    step, evaluation = trained.graph(), FullIterationGraph(evaluate, CPU, name="evaluation", warmup_steps=1)
    for number in range(6):
        result = step(batches_of(number))
        kept = result.materialize()
        if number % 2:
            batches = batches_of(number, rows=5)
            assert equal(evaluation(batches).value, evaluate(batches))
        assert equal(result.value["losses"], kept["losses"])
        trained.update()
    assert step.num_calls == 6 and evaluation.num_calls == 3 and step.captured and evaluation.captured


# ------------------------------------------------------------------------------------------------------------- addresses


def replace_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def move(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_gradient, "the gradient of 0.0.bias lies elsewhere in memory"),
        (drop_gradient, "the gradient of 0.0.bias is None"),
        (move, "0.0.bias lies elsewhere in memory"),
    ],
)
def test_memory_that_moved_is_named(change: Callable[[nn.Parameter], None], said: str) -> None:
    trained = Trained()
    step = trained.graph(warmup_steps=1)
    for number in range(3):
        step(batches_of(number))
    change(dict(trained.chunks.named_parameters())["0.0.bias"])
    for _ in range(2):
        with pytest.raises(GraphError, match=re.escape(f"and now {said}: use zero_grad(set_to_none=False), and reset")):
            step(batches_of(3))
    assert trained.executions == 3
    step.reset()
    step(batches_of(4))


def test_a_shard_that_moved_is_named() -> None:
    """A sharded parameter is no memory itself: what counts is where its shard lies."""
    trained = Trained()
    parameter = dict(trained.chunks.named_parameters())["0.0.weight"]
    shards = [torch.zeros(2)]
    parameter.to_local = lambda: shards[0]  # type: ignore[attr-defined]
    step = trained.graph(warmup_steps=0)
    step(batches_of(0))
    step(batches_of(1))
    shards[0] = torch.zeros(2)
    with pytest.raises(GraphError, match=r"and now 0\.0\.weight lies elsewhere in memory"):
        step(batches_of(2))
