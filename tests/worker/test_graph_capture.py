"""Captures, without CUDA: those that fail leave everything as it was, and the call that failed is named."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from rsup.worker.cuda_graph.capture import Captured, SharedCapture, _record, shared_capture
from rsup.worker.cuda_graph.capture_failure import failure_text, forget_locals
from rsup.worker.cuda_graph.contract import Batches, Fallback, GraphError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from tests.worker.graph_trained import CPU, Trained, batches_of, equal

T = TypeVar("T")


class Refusing(SharedCapture):
    """Captures as a device would that cannot record the step: it gets as far as the illegal call, and nothing is computed."""

    def __init__(self, refuses: bool = True) -> None:
        super().__init__(CPU)
        self.refuses = refuses

    def capture(self, function: Callable[[], T], what: str, generators: Sequence[torch.Generator] = ()) -> Captured[T]:
        if not self.refuses:
            return super().capture(function, what, generators)
        try:
            with torch.no_grad():
                random.random()
                torch.rand(3)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        except RuntimeError as error:
            raise GraphError(failure_text(what, error)) from error


def test_a_failed_capture_is_an_error_and_leaves_everything_as_it_was() -> None:
    trained = Trained()
    capture = Refusing()
    step = trained.graph(warmup_steps=1, capture=capture)
    step(batches_of(0))
    before = torch.get_rng_state(), random.getstate()
    for _ in range(2):
        with pytest.raises(
            GraphError, match=r"the training step cannot be captured at .*: RuntimeError: CUDA error: operation not"
        ):
            step(batches_of(1))
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert trained.executions == step.num_calls == 1 and not step.is_eager_for_good
    capture.refuses = False
    step(batches_of(1))
    assert step.captured


def test_a_failed_capture_goes_on_eagerly_if_asked() -> None:
    plain, trained = Trained(), Trained()
    expected = [plain.step(batches_of(number))["losses"] for number in range(6)]
    torch.manual_seed(1)
    step = trained.graph(warmup_steps=2, fallback=Fallback.EAGER, capture=Refusing())
    for number in range(6):
        assert equal(step(batches_of(number)).value["losses"], expected[number])
        assert trained.executions == number + 1
        assert step.is_eager_for_good is (number >= 2)
    assert "operation not permitted when stream is capturing" in step.why and not step.captured
    step.reset()
    step(batches_of(6, num_micros=5))
    assert step.is_eager_for_good and not step.captured


def test_gradients_of_a_failed_capture_are_nobodys() -> None:
    trained = Trained()

    class Spoiling(Refusing):
        def capture(self, function: Callable[[], T], what: str, generators: Sequence[torch.Generator] = ()) -> Captured[T]:
            for parameter in trained.chunks.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))  # as backward would, in memory of the graph
            return super().capture(function, what, generators)

    for parameter in trained.chunks.parameters():
        parameter.grad = None
    step = trained.graph(warmup_steps=0, fallback=Fallback.EAGER, capture=Spoiling())
    step(batches_of(0))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.chunks.parameters())


def test_an_error_of_the_step_itself_passes_and_the_graph_goes_on() -> None:
    trained = Trained()
    fails = [False]

    def step_that_may_fail(batches: Batches) -> Any:
        if fails[0]:
            raise StopIteration
        return trained.step(batches)

    step = FullIterationGraph(step_that_may_fail, CPU, warmup_steps=1)
    for number in range(4):
        fails[0] = True
        with pytest.raises(StopIteration):
            step(batches_of(number))
        fails[0] = False
        step(batches_of(number))
    assert step.num_calls == trained.executions == 4 and step.captured


def test_a_result_that_changes_its_form_is_refused() -> None:
    form: list[Any] = [torch.ones(2)]
    step = FullIterationGraph(lambda batches: list(form), CPU, warmup_steps=0)
    step(batches_of(0))
    form[0] = torch.ones(3)
    with pytest.raises(GraphError, match="the training step returned another kind of tensor for 0 than when it was captured"):
        step(batches_of(0))
    form.append(1)
    with pytest.raises(GraphError, match="returned 1 values when it was captured and now 2"):
        step(batches_of(0))


def test_a_shared_capture_is_one_for_the_process_and_its_graphs_can_be_destroyed() -> None:
    capture = shared_capture(CPU)
    assert shared_capture(torch.device("cpu")) is capture and capture.stream is None
    counted = [0]

    def count() -> torch.Tensor:
        counted[0] += 1
        return torch.tensor(counted[0])

    captured = capture.capture(count, "a count")
    with pytest.raises(GraphError, match="a count has no result yet"):
        captured.result  # noqa: B018
    for number in range(1, 4):
        captured.replay()
        assert captured.result.item() == number
    captured.destroy()
    captured.destroy()
    with pytest.raises(GraphError, match="a count was destroyed"):
        captured.replay()
    assert counted == [3]


def test_bad_numbers_are_refused() -> None:
    for options in ({"warmup_steps": -1}, {"max_graphs": 0}):
        with pytest.raises(GraphError, match="needs warmup_steps >= 0 and max_graphs >= 1"):
            Trained().graph(**options)


# --------------------------------------------------------------------------------------------- the illegal call by its name


class Stepping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(7, 7)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].view(7, 7)


def in_a_module() -> Any:
    return nn.Sequential(Stepping())(torch.ones(3))


def in_a_backward() -> Any:
    x = torch.ones(3, requires_grad=True)
    Backward.apply(x).sum().backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def in_a_generator() -> Any:
    def items() -> Iterator[torch.Tensor]:
        yield torch.ones(3).reshape(7, 7)

    return sum(items())


@pytest.mark.parametrize(
    ("fails", "call"),
    [
        (in_a_module, "in forward: `return x.view(7, 7)`: RuntimeError: shape '[7, 7]' is invalid for input of size 3;"),
        (in_a_backward, "in backward: `return gradients[0].view(7, 7)`: RuntimeError: shape"),
        (in_a_generator, "in items: `yield torch.ones(3).reshape(7, 7)`: RuntimeError: shape"),
    ],
)
def test_the_illegal_call_is_named(fails: Callable[[], Any], call: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        fails()
    text = failure_text("the training step", raised.value)
    assert text.startswith(f"the training step cannot be captured at {__file__}:") and call in text and "\n" not in text


class FakeGraph:
    """A `CUDAGraph` whose capture the runtime has ended because of an illegal call, if `fails`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.said: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.said += [pool, capture_error_mode, gc.isenabled()]

    def capture_end(self) -> None:
        self.said.append("ended")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")


class FakePool:
    id = (0, 1)


def test_a_capture_is_always_ended_and_its_first_error_counts() -> None:
    class Memory:
        alive = 0

        def __init__(self) -> None:
            Memory.alive += 1

        def __del__(self) -> None:
            Memory.alive -= 1

    def illegal() -> None:
        memory = Memory()
        raise RuntimeError(f"host sync {type(memory).__name__}")

    def interrupted() -> None:
        raise KeyboardInterrupt

    for function, fails, expected in (
        (lambda: None, False, None),
        (illegal, True, "host sync Memory"),
        (illegal, False, "host sync Memory"),
        (lambda: None, True, "operation failed due to a previous error during capture"),
        (interrupted, True, ""),
    ):
        graph = FakeGraph(fails)
        error = _record(graph, FakePool(), function, [])  # type: ignore[arg-type]
        assert graph.said == [(0, 1), "thread_local", False, "ended"] and gc.isenabled()
        assert (error is None) is (expected is None) and str(error or "") == (expected or "")
        if error is not None:
            forget_locals(error)
        assert Memory.alive == 0, "what the step held is let go of while the error is still known"
