"""Graphs that have to go in the midst of a training on one GPU: what follows equals an eager run to the bit."""

import os
from collections.abc import Iterator

import pytest
import torch

from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import Batches
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.speculative import SpeculativeStep
from rsup.worker.optimizer_offload import OptimizerOffload
from rsup.worker.rerun.replay_state import ReplayState
from tests.gpu.graph_training import DEVICE, Training, batches_of, differing, rng_state, set_rng_state

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]

CAPTURED = 4
"""The step that captures, after three of warm-up."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_an_optimizer_that_was_in_host_memory_is_captured_anew() -> None:
    capture = SharedCapture(DEVICE)
    graphed, eager = Training(capture, dropout=0.0), Training(capture, dropout=0.0, captures=False)
    offload = OptimizerOffload(graphed.optimizer)
    for step in range(1, 2 * CAPTURED + 4):
        if step == CAPTURED + 2:
            assert graphed.graph.captured
            with offload.away():
                moments = [state["exp_avg"] for state in graphed.optimizer.state.values()]
                assert moments and all(not moment.is_cuda for moment in moments)
            assert not graphed.graph.captured
        batches = batches_of(step)
        assert torch.equal(graphed.step(batches), eager.step(batches)), f"step {step}"
    assert graphed.graph.captured and not differing(graphed.state(), eager.state())
    graphed.close()


def test_a_speculative_step_that_was_wrong_is_computed_again_with_the_same_random_numbers() -> None:
    capture = SharedCapture(DEVICE)
    graphed, eager = Training(capture), Training(capture, captures=False)
    flag = torch.zeros((), device=DEVICE)

    def fast(batches: Batches) -> torch.Tensor:
        """Wrong where a micro-batch is marked: gradients twice as large."""
        loss = graphed.forward_backward(batches)
        flag.copy_((batches[0][0]["loss_factor"].to(DEVICE)[0] > 1).to(flag.dtype))
        for parameter in graphed.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1 + flag)
        return loss

    graph = FullIterationGraph(fast, DEVICE, parameters=graphed.model.named_parameters(), capture=capture)
    step = SpeculativeStep(graph, graphed.forward_backward, flag, None, ReplayState(DEVICE), capture=capture)
    wrong = (2, 2 + CAPTURED, 2 + 2 * CAPTURED + 2)
    """In the warm-up, at the capture (of the graph that warms up anew), in a replay."""
    for number in range(1, wrong[-1] + CAPTURED + 2):
        batches = batches_of(number)
        if number in wrong:
            batches[0][0]["loss_factor"].fill_(2.0)
        before = rng_state()
        with capture.on_stream():
            loss = step(batches).value.clone()
            graphed.update.step()
        after = rng_state()
        set_rng_state(before)
        assert torch.equal(loss, eager.step(batches)), f"step {number}"
        assert torch.equal(after, rng_state()), f"step {number}"
    assert step.num_fallbacks == len(wrong) and graph.captured
    assert not differing(graphed.state(), eager.state())
    graph.reset()
    graphed.close()
