"""What a replay on a GPU finds again, without waiting for the device while all is well."""

from collections.abc import Iterator

import pytest
import torch

from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.replay_state import ReplayState
from rsup.worker.rerun.values import as_value, read_values

pytestmark = [pytest.mark.gpu(1), pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


def test_generators_of_a_cuda_graph_roll_back() -> None:
    """P10, S15: seed and offset are kept as numbers, not the generator that the graph goes on with."""
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(5)
    out = torch.zeros(8, device=device)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out.copy_(torch.rand(8, device=device, generator=generator))
    state = ReplayState(device)
    state.register_generator("graph", generator)
    state.register_rng_tracker("tracker", lambda: {"default": torch.cuda.default_generators[0]}, print)
    snapshot = state.capture()
    data = state.rng_bytes(snapshot)

    def draw() -> list[float]:
        graph.replay()
        return [*out.tolist(), *torch.rand(4, device=device).tolist()]

    expected = draw()
    assert draw() != expected
    for _ in range(2):
        state.restore(snapshot)
        assert draw() == expected
    state.restore_rng_bytes(data)
    assert draw() == expected


def test_nothing_waits_for_the_device_before_the_values_are_read() -> None:
    """P41"""
    device = torch.device("cuda", 0)
    window = torch.arange(1000, device=device)
    module = torch.nn.BatchNorm1d(4).to(device)
    state = ReplayState(device)
    state.register_buffers("model", module)

    def loader() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"tokens": window[0:100], "labels": window[1:101]}

    data = RerunDataIterator(loader())
    data.keeps_batches = True
    module(torch.ones(2, 4, device=device))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        snapshot = state.capture()
        batch = next(data)
        batch["labels"].zero_()
        values = [as_value(batch["tokens"].sum().float()), as_value(torch.ones((), device=device, dtype=torch.bfloat16))]
        state.restore(snapshot)
        data.rewind()
        again = next(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read_values([*values, 2.5]) == [0.0, 1.0, 2.5]
    assert again["labels"].tolist() == list(range(1, 101))
    again["labels"].zero_()
    assert int(again["tokens"].sum()) == 0  # still views of one memory


def test_batches_of_a_gpu_come_back_to_it_from_a_checkpoint() -> None:
    window = torch.arange(100, device="cuda")
    packed = pack_batch([window[0:8], window[1:9]])
    assert packed[0]["tensor"].device.type == "cpu"
    tokens, labels = unpack_batch(packed, torch.device("cuda", 0))
    assert tokens.is_cuda and labels.tolist() == list(range(1, 9))
    labels.zero_()
    assert tokens.tolist() == [0] * 8
