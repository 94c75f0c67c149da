"""The graph-captured step on one GPU: its replays compute what an eager run computes, and say so when they cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rsup.worker.activation_offload import ActivationOffload
from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import Batches, Code, Fallback, GraphError, OnChange, StaleResultError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.reference.model import GPT
from rsup.worker.rerun.contract import RerunConfig
from tests.gpu.graph_training import (
    DEVICE,
    Training,
    batches_of,
    differing,
    make_evaluation,
    rng_state,
    set_rng_state,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

WARM = 3
CAPTURED = WARM + 1
"""The step that captures."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, so that replays can be compared bit by bit."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def capture() -> SharedCapture:
    """A stream and pools of this test alone."""
    return SharedCapture(DEVICE)


# --------------------------------------------------------------------------------------------------- the same as eager


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_thousand_replays_with_changing_data_equal_eager_steps(capture: SharedCapture, dropout: float) -> None:
    """Bitwise, dropout included: the eager step begins with the random numbers that the replay began with."""
    graphed, eager = Training(capture, dropout=dropout), Training(capture, dropout=dropout, captures=False)
    assert not differing(graphed.state(), eager.state())
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(1, CAPTURED + 1000):
        batches, before = batches_of(step), rng_state()
        one = graphed.step(batches)
        after = rng_state()
        set_rng_state(before)
        other = eager.step(batches)
        assert torch.equal(after, rng_state()), f"step {step}: another number of random numbers was taken"
        losses.append((one, other))
    assert graphed.graph.captured and graphed.graph.num_graphs == 1 and not graphed.graph.is_eager_for_good
    of_graph, of_eager = (torch.stack([pair[which] for pair in losses]) for which in (0, 1))
    unlike = (of_graph != of_eager).nonzero().flatten().tolist()
    assert not unlike, f"losses of {len(unlike)} steps differ, first {unlike[0] + 1}: {losses[unlike[0]]}"
    assert not differing(graphed.state(), eager.state())
    assert float(of_graph[-20:].mean()) < float(of_graph[:20].mean()), "it has learned something"


def test_each_replay_drops_other_units(capture: SharedCapture) -> None:
    """And the same ones again when the generator is set back, as a rerun does."""
    training = Training(capture, dropout=0.5)
    batches = batches_of(1)
    with capture.on_stream():
        for _ in range(CAPTURED):
            training.graph(batches)
        before = rng_state()
        losses = [training.graph(batches).value.clone() for _ in range(8)]
        set_rng_state(before)
        again = [training.graph(batches, counts=False).value.clone() for _ in range(8)]
        set_rng_state(before)
        eager = training.graph(batches, eager=True).value.clone()
    assert len({float(loss) for loss in losses}) == 8
    assert torch.equal(torch.stack(losses), torch.stack(again))
    assert torch.equal(eager, losses[0])


def test_generators_of_the_program_advance_in_replays(capture: SharedCapture) -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)

    def forward_backward(batches: Batches) -> torch.Tensor:
        return torch.rand(4, device=DEVICE, generator=generator)

    graph = FullIterationGraph(forward_backward, DEVICE, generators=[generator], capture=capture)
    drawn = torch.stack([graph([[torch.ones(1)]]).value.clone() for _ in range(CAPTURED + 6)]).cpu()
    same = torch.Generator(DEVICE).manual_seed(3)
    expected = torch.stack([torch.rand(4, device=DEVICE, generator=same) for _ in range(CAPTURED + 6)]).cpu()
    assert torch.equal(drawn, expected)
    unknown = torch.Generator(DEVICE).manual_seed(3)
    other = FullIterationGraph(lambda _: torch.rand(4, device=DEVICE, generator=unknown), DEVICE, capture=capture)
    try:
        more = torch.stack([other([[torch.ones(1)]]).value.clone() for _ in range(CAPTURED + 6)]).cpu()
    except GraphError as error:
        print(error)
    else:  # newer torch finds the generators itself
        assert torch.equal(more, expected)
    assert float(torch.ones(4, device=DEVICE).sum()) == 4, "the device is usable after it"


def test_nothing_of_a_replay_waits_for_the_device(capture: SharedCapture) -> None:
    """Neither the copy of pageable batches, nor the launch, nor the request for the result."""
    training = Training(capture, checks=RerunConfig())
    for step in range(CAPTURED + 2):
        training.step(batches_of(step))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(4):
            training.step(batches_of(step))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_results_are_those_of_the_last_call_only(capture: SharedCapture) -> None:
    training = Training(capture)
    with capture.on_stream():
        for step in range(CAPTURED):
            training.graph(batches_of(step))
        first = training.graph(batches_of(1))
        kept = first.materialize()
        value = float(first.value)
        training.graph(batches_of(2))
    with pytest.raises(StaleResultError):
        _ = first.value
    assert float(kept) == value


# --------------------------------------------------------------------------------------------- what cannot be captured


def _reads(loss: torch.Tensor) -> None:
    if float(loss.detach().item()) != float("inf"):
        torch.ones(1)


def _has_a_shape_of_its_data(loss: torch.Tensor) -> None:
    torch.nonzero(loss.detach() > 0)


def _waits(loss: torch.Tensor) -> None:
    torch.cuda.synchronize()


def _copies_from_the_host(loss: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0]).to(DEVICE)


def _makes_it_on_the_device(loss: torch.Tensor) -> None:
    loss.detach().add(torch.full((2,), 2.0, device=DEVICE))


@pytest.mark.parametrize("inside", [_reads, _has_a_shape_of_its_data, _waits, _copies_from_the_host])
def test_an_illegal_call_is_named_and_training_goes_on_if_asked(capture: SharedCapture, inside: Any) -> None:
    strict = Training(capture, inside=inside)
    with pytest.raises(GraphError) as raised:
        for step in range(1, CAPTURED + 1):
            strict.step(batches_of(step))
    print(f"{inside.__name__}: {raised.value}")
    assert "\n" not in str(raised.value)
    assert "test_gpu_graph.py" in str(raised.value), "the line of the program is named"

    lenient, eager = Training(capture, inside=inside, fallback=Fallback.EAGER), Training(capture, captures=False)
    for step in range(1, CAPTURED + 5):
        batches, before = batches_of(step), rng_state()
        lenient.step(batches)
        set_rng_state(before)
        eager.step(batches)
    assert lenient.graph.is_eager_for_good and lenient.graph.why and not lenient.graph.captured
    assert not differing(lenient.state(), eager.state()), "the failed capture counted as no step"


def test_a_constant_that_is_made_on_the_device_is_captured(capture: SharedCapture) -> None:
    """The remedy for one that is copied from the host."""
    training, eager = Training(capture, inside=_makes_it_on_the_device), Training(capture, captures=False)
    _run_beside_eager(training, eager, [2] * (CAPTURED + 3))
    assert training.graph.captured and not differing(training.state(), eager.state())


def test_a_replay_after_something_moved_is_refused(capture: SharedCapture) -> None:
    training = Training(capture)
    for step in range(CAPTURED + 1):
        training.step(batches_of(step))
    name, parameter = "norm.weight", training.model.norm.weight
    storage, gradient = parameter.data, parameter.grad
    parameter.data = storage.clone()
    with pytest.raises(GraphError, match=name):
        training.step(batches_of(1))
    parameter.data, parameter.grad = storage, None
    with pytest.raises(GraphError, match=name):
        training.step(batches_of(1))
    parameter.grad = gradient
    training.step(batches_of(1))


# -------------------------------------------------------------------------------------- other inputs, reset, evaluation


def _run_beside_eager(training: Training, eager: Training, sizes: list[int]) -> None:
    for step, size in enumerate(sizes, start=1):
        batches, before = batches_of(step, size), rng_state()
        one = training.step(batches)
        set_rng_state(before)
        assert torch.equal(one, eager.step(batches)), f"step {step}, batches of {size}"


def test_batches_of_another_shape_go_by_the_policy(capture: SharedCapture) -> None:
    for policy in OnChange:
        training, eager = Training(capture, on_change=policy), Training(capture, captures=False)
        _run_beside_eager(training, eager, [2] * (CAPTURED + 2))
        if policy is OnChange.RAISE:
            with pytest.raises(GraphError):
                training.step(batches_of(9, 3))
            sizes = [2, 2]
        elif policy is OnChange.EAGER:
            sizes = [3, 2, 3, 3, 3, 3, 3, 3, 2]
        else:
            sizes = [3] * (CAPTURED + 2) + [2, 3, 2, 3, 3, 2]
        _run_beside_eager(training, eager, sizes)
        assert not differing(training.state(), eager.state())
        assert training.graph.num_graphs == (2 if policy is OnChange.RECAPTURE else 1)
        training.close()


def test_reset_warms_up_and_captures_anew(capture: SharedCapture) -> None:
    training, eager = Training(capture), Training(capture, captures=False)
    _run_beside_eager(training, eager, [2] * (CAPTURED + 3))
    training.close()
    assert not training.graph.captured
    _run_beside_eager(training, eager, [2] * WARM)
    assert not training.graph.captured
    _run_beside_eager(training, eager, [2] * 5)
    assert training.graph.captured
    assert not differing(training.state(), eager.state())


def test_evaluation_has_a_graph_beside_that_of_the_training(capture: SharedCapture) -> None:
    training, eager = Training(capture), Training(capture, captures=False)
    evaluation = make_evaluation(training.model, capture)
    for round_ in range(CAPTURED + 4):
        _run_beside_eager(training, eager, [2, 2])
        with capture.on_stream():
            for number in range(2):
                loss = evaluation(batches_of(1000 + round_, 4)).value.clone()
                expected = evaluation(batches_of(1000 + round_, 4), eager=True).value.clone()
                assert torch.equal(loss, expected), (round_, number)
        if round_ == CAPTURED + 1:
            training.close()  # a reset of one leaves the other
            assert evaluation.captured
    assert training.graph.captured and evaluation.captured
    assert not differing(training.state(), eager.state())


def _pools(training: Training, evaluation: FullIterationGraph) -> list[tuple[int, int]]:
    """The pool of each graph: training, evaluation, optimizer."""
    graphs: list[Any] = [known.captured for one in (training.graph, evaluation) for known in one._known.values()]
    graphs.append(training.update._captured)
    assert len(graphs) == 3 and None not in graphs, "all three are captured"
    return [graph._pool.id for graph in graphs]


@pytest.mark.parametrize("is_single", [True, False], ids=["one pool", "a pool each"])
def test_graphs_of_training_evaluation_and_optimizer_share_one_pool(is_single: bool) -> None:
    """And one stream. With pools of their own, which can be asked for, each keeps memory that the others cannot use."""
    shared = SharedCapture(DEVICE, use_single_mempool=is_single)
    training, eager = Training(shared), Training(shared, captures=False)
    evaluation = make_evaluation(training.model, shared)
    for round_ in range(CAPTURED + 2):
        _run_beside_eager(training, eager, [2])
        with shared.on_stream():
            evaluation(batches_of(1000 + round_, 4)).value.clone()
    assert training.graph.captured and training.update.is_captured and evaluation.captured
    assert len(set(_pools(training, evaluation))) == (1 if is_single else 3)
    _run_beside_eager(training, eager, [2, 2])
    assert not differing(training.state(), eager.state()), "no graph has written over what another one keeps"
    evaluation.reset()
    training.close()


DDP = """
import warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rsup.worker.cuda_graph.capture import shared_capture
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.lifecycle import destroy_process_group
from rsup.worker.cuda_graph.live_constraints import DDP_WARMUP_STEPS

is_cuda = torch.cuda.is_available()
device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
if is_cuda:
    torch.cuda.set_device(device)
backend = "nccl" if is_cuda else "gloo"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if is_cuda else None)
capture = shared_capture(device)
torch.manual_seed(0)
plain = torch.nn.Linear(64, 64, device=device)
with capture.on_stream():
    model = torch.nn.Linear(64, 64, device=device)
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(model, device_ids=[0] if is_cuda else None, gradient_as_bucket_view=True)

def forward_backward(batches):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss = ddp(batches[0][0]).square().mean()
    loss.backward()
    return loss.detach()

options = {"warmup_steps": DDP_WARMUP_STEPS, "parameters": model.named_parameters(), "capture": capture}
graph = FullIterationGraph(forward_backward, device, **options)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for step in range(1, DDP_WARMUP_STEPS + 6):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = float(graph([[batch]]).value)
        plain.zero_grad()
        expected = plain(batch.to(device)).square().mean()
        expected.backward()
        assert abs(loss - float(expected.detach())) < 1e-4, step
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
assert graph.captured
for one in said:
    print("warned:", one.category.__name__, str(one.message).splitlines()[0])
graph.reset()
destroy_process_group()
print("captured")
"""


def test_ddp_that_is_built_on_the_capture_stream_is_captured_without_a_warning_of_stale_streams() -> None:
    """Gradients are accumulated on the stream that was current when DDP asked for their nodes. A process of its own: torch says
    some things once only."""
    done = subprocess.run([sys.executable, "-c", DDP], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    *warned, last = [line for line in done.stdout.splitlines() if line.startswith(("warned: ", "captured"))]
    print(*warned, sep="\n")
    assert last == "captured"
    for text in (*warned, *done.stderr.splitlines()):
        assert "AccumulateGrad" not in text and "stale" not in text.lower() and "stream does not match" not in text, text


# ------------------------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.CLEAN])
def test_each_code_leaves_parameters_moments_and_step_count_as_they_are(capture: SharedCapture, code: Code) -> None:
    """In the step that it comes from, and in those behind it until the host opens the gate."""
    config = RerunConfig(check_for_spiky_loss=True, check_for_large_grads=True)
    training = Training(capture, checks=config)
    checks = training.checks
    assert checks is not None
    for step in range(120):  # the baselines learn for 100
        training.step(batches_of(step))
    assert checks.parse(checks.result.tolist()).agreed is Code.CLEAN
    key, factor = {
        Code.NAN: ("loss_factor", float("nan")),
        Code.INF: ("loss_factor", float("inf")),
        Code.SPIKY_LOSS: ("loss_factor", 1000.0),
        Code.LARGE_GRADIENT: ("norm_factor", 1000.0),
    }[code]
    before = training.state()
    bad = batches_of(7)
    bad[0][0][key].fill_(factor)
    training.step(bad)
    verdict = checks.parse(checks.result.tolist())
    assert (verdict.code, verdict.agreed) == (code, code)
    assert float(checks.gate) == 1.0
    assert not differing(before, training.state())
    training.step(batches_of(8))
    assert checks.parse(checks.result.tolist()).code is Code.CLEAN and float(checks.gate) == 1.0
    assert not differing(before, training.state())
    checks.open_gate()
    training.step(batches_of(8))
    assert len(differing(before, training.state())) == len(before), "everything moves again"


def test_a_rejected_step_and_its_rerun_leave_no_trace(capture: SharedCapture) -> None:
    """The state is set back, the same data replayed, the gate opened: bitwise as if nothing had been."""
    disturbed, plain = Training(capture, checks=RerunConfig()), Training(capture, checks=RerunConfig())
    assert disturbed.checks is not None
    for step in range(1, CAPTURED + 20):
        before = rng_state()
        if step in (1, CAPTURED, CAPTURED + 9):  # in the warm-up, in the step that captures, in a replay
            bad = batches_of(step)
            bad[0][1]["norm_factor"].fill_(1.0)
            bad[0][1]["loss_factor"].fill_(float("nan"))
            disturbed.step(bad)
            disturbed.step(batches_of(step + 1))  # the one launched behind it
            set_rng_state(before)
            disturbed.checks.open_gate()
        disturbed.step(batches_of(step))
        set_rng_state(before)
        plain.step(batches_of(step))
    assert not differing(disturbed.state(), plain.state())


# ------------------------------------------------------------------------------------------------- recompute, and memory


class Recomputed(nn.Module):
    """A GPT's blocks whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        out: torch.Tensor = checkpoint(self.block, hidden, use_reentrant=False, preserve_rng_state=False)
        return out


def test_activations_are_computed_again_inside_the_graph(capture: SharedCapture) -> None:
    graphed, eager = Training(capture, dropout=0.0), Training(capture, dropout=0.0, captures=False)
    for training in (graphed, eager):
        blocks = training.model.blocks
        for place, block in enumerate(blocks):
            blocks[place] = Recomputed(block)
    _run_beside_eager(graphed, eager, [2] * (CAPTURED + 30))
    assert graphed.graph.captured
    assert not differing(graphed.state(), eager.state())


def test_activations_come_back_whole_from_host_memory(capture: SharedCapture) -> None:
    """Eagerly and in the graph, with a copying stream that is far behind."""
    torch.manual_seed(3)
    model = GPT(4, 256, 4, 128, 0.0, 0.0).to(DEVICE)
    texts = [torch.randint(256, (4, 129), device=DEVICE) for _ in range(3)]

    def gradients() -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def forward_backward(batches: Batches) -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast("cuda", torch.bfloat16):
            loss: torch.Tensor = model(batches[0][0])
        if model.offload is not None and model.offload._stream is not None:
            with torch.cuda.stream(model.offload._stream):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        if model.offload is not None:
            model.offload.join()
        return loss.detach()

    expected = []
    for text in texts:
        forward_backward([[text]])
        expected.append(gradients())
    model.offload = ActivationOffload(DEVICE, max_inflight=1, min_bytes=0)
    graph = FullIterationGraph(forward_backward, DEVICE, capture=capture, parameters=model.parameters())
    for step in range(CAPTURED + 6):
        graph([[texts[step % 3]]])
        found = gradients()
        same = [torch.equal(one, other) for one, other in zip(found, expected[step % 3], strict=True)]
        assert all(same), f"step {step + 1}"
    assert graph.captured and model.offload.num_offloaded > 0


def test_memory_of_a_graph_comes_back_when_it_is_destroyed(capture: SharedCapture) -> None:
    linear = nn.Linear(4096, 4096, device=DEVICE)

    def forward_backward(batches: Batches) -> torch.Tensor:
        hidden: torch.Tensor = batches[0][0]
        for _ in range(8):
            hidden = torch.relu(linear(hidden))
        loss = hidden.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    graph = FullIterationGraph(forward_backward, DEVICE, capture=capture)
    inputs = [[torch.ones(4096, 4096, device=DEVICE)]]
    linear.weight.grad, linear.bias.grad = torch.zeros_like(linear.weight), torch.zeros_like(linear.bias)
    for _ in range(WARM):
        graph(inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before_mib, free_before = torch.cuda.memory_reserved() >> 20, torch.cuda.mem_get_info()[0] >> 20
    graph(inputs)
    with_graph_mib = torch.cuda.memory_reserved() >> 20
    assert graph.captured and with_graph_mib >= before_mib + 256
    graph.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after_mib, free_after = torch.cuda.memory_reserved() >> 20, torch.cuda.mem_get_info()[0] >> 20
    print(
        f"reserved: {before_mib} MiB, with the graph {with_graph_mib}, after it {after_mib}; free {free_before}, {free_after}"
    )
    assert after_mib <= before_mib + 32
    assert free_after >= free_before - 64


def test_a_pool_whose_graphs_were_garbage_collected_is_not_used_again(capture: SharedCapture) -> None:
    """As after an exception through a training function: its graphs are gone before anybody has destroyed them."""
    pinned = [torch.zeros(8, pin_memory=True)]
    source = torch.ones(8, device=DEVICE)

    def copies_out() -> torch.Tensor:
        pinned[0].copy_(source, non_blocking=True)
        return source + 1

    captured = capture.capture(copies_out, "the copy")
    del captured
    again = capture.capture(copies_out, "the copy")
    again.replay()
    torch.cuda.synchronize()
    assert again.result.tolist() == [2.0] * 8
