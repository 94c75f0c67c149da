"""The theory of the reference trainer's memory beside its real tensors.

No GPU: what autograd keeps is counted on the CPU, and the peak of a pass is followed on tensors that have a size and no memory.
Dropout is the kernel that GPUs have, which keeps a byte an element.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rsup.worker.observe.flops import training_flops
from rsup.worker.observe.log_points import memory_points
from rsup.worker.observe.memory_report import MemoryReport, comparison, memory_line
from rsup.worker.observe.parameter_count import parameter_counts
from rsup.worker.observe.reference_memory import (
    _Sizes,
    reference_description,
    reference_memory,
    theory_of_reference,
)
from rsup.worker.reference.model import GPT, ExpertsOfBlock, mean_loss


@dataclass(frozen=True)
class Run:
    """What `reference_memory` wants of options."""

    num_layers: int = 3
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 32
    micro_batch_size: int = 4
    num_microbatches: int = 1
    hidden_dropout: float = 0.0
    bf16: bool = False
    recompute_granularity: str | None = None
    is_graphed: bool = False
    num_experts: int = 0
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0

    def model(self, num_layers: int | None = None) -> GPT:
        experts = ExpertsOfBlock(self.num_experts, 2, self.moe_ffn_hidden_size) if self.num_experts else None
        layers = self.num_layers if num_layers is None else num_layers
        sizes = (layers, self.hidden_size, self.num_attention_heads, self.seq_length)
        return GPT(*sizes, 0.0, self.hidden_dropout, self.recompute_granularity, experts)

    def loss(self, model: GPT) -> torch.Tensor:
        text = torch.zeros((self.micro_batch_size, self.seq_length + 1), dtype=torch.int64)
        return mean_loss(model, text, torch.bfloat16 if self.bf16 else None)


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows how many bytes of tensors there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: set[int] = set()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive and key not in self.ignored:
            self._alive.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= size_bytes


def kept(run: Run, num_layers: int) -> int:
    """Bytes that autograd keeps of a forward pass, parameters aside."""
    model = run.model(num_layers)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = run.loss(model)
    assert loss.requires_grad
    return sum(int(storage.nbytes()) for storage in storages.values())


def peak_of(run: Run) -> int:
    """Bytes at the peak of all micro-batches' passes, gradients included."""
    with FakeTensorMode(), Sizes() as sizes:
        model = run.model()
        sizes.ignored = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        sizes.now = sizes.peak = 0
        if run.is_graphed:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16) if run.is_graphed else contextlib.nullcontext():
            for _ in range(run.num_microbatches):
                loss = run.loss(model)
                with torch.autocast("cpu", enabled=False) if run.is_graphed else contextlib.nullcontext():
                    loss.backward()  # type: ignore[no-untyped-call]
        peak: int = sizes.peak
    return peak


@pytest.fixture
def gpu_dropout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dropout as GPUs compute it."""

    def dropout(hidden: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(hidden, p, training)[0] if p else hidden

    monkeypatch.setattr(functional, "dropout", dropout)
    yield


EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 96}


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(bf16=True),
        Run(recompute_granularity="selective"),
        Run(bf16=True, **EXPERTS),
        Run(hidden_dropout=0.1, **EXPERTS),
    ],
    ids=["fp32", "bf16", "selective", "experts bf16", "experts fp32, dropout"],
)
def test_a_layer_keeps_to_the_byte_what_the_table_says(run: Run, gpu_dropout: None) -> None:
    assert kept(run, 3) - kept(run, 2) == _Sizes(run).layer


WIDE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "micro_batch_size": 4,
}
SMALL: dict[str, Any] = WIDE | {"seq_length": 256, "micro_batch_size": 1}
PEAKS = {
    "fp32": Run(**WIDE),
    "fp32, dropout, full": Run(**WIDE, hidden_dropout=0.1, recompute_granularity="full"),
    "bf16, dropout": Run(**WIDE, hidden_dropout=0.1, bf16=True),
    "bf16, full": Run(**WIDE, bf16=True, recompute_granularity="full"),
    "bf16, little data, two micro-batches": Run(**SMALL, bf16=True, num_microbatches=2),
    "bf16, little data, full": Run(**SMALL, bf16=True, recompute_granularity="full"),
    "graph, bf16, full": Run(**WIDE, bf16=True, recompute_granularity="full", is_graphed=True, num_microbatches=2),
    "experts, bf16": Run(**WIDE, bf16=True, num_experts=4, moe_ffn_hidden_size=1024),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_pass_is_where_theory_has_it(name: str, gpu_dropout: None) -> None:
    run = PEAKS[name]
    parameters = parameter_counts(reference_description(run)).total
    estimated = reference_memory(run).activations + 4 * parameters
    assert estimated == pytest.approx(peak_of(run), rel=0.02)


def test_the_description_has_the_models_parameters_and_flops() -> None:
    for run in (Run(), Run(**EXPERTS)):
        counts = parameter_counts(reference_description(run))
        assert counts.total == sum(parameter.numel() for parameter in run.model().parameters())
    run = Run()
    matrices = sum(parameter.numel() for name, parameter in run.model().named_parameters() if parameter.dim() == 2)
    assert training_flops(reference_description(run), 1, 0) == 6 * (matrices - run.seq_length * run.hidden_size)


def test_what_is_there_all_the_time() -> None:
    parameters = parameter_counts(reference_description(Run())).total
    eager, graphed = reference_memory(Run()), reference_memory(Run(is_graphed=True))
    assert (eager.weights_and_optimizer, graphed.weights_and_optimizer) == (20 * parameters, 16 * parameters)
    assert reference_memory(Run(), state_bytes=0).optimizer == 0
    assert eager.peak == eager.weights_and_optimizer + eager.activations + eager.workspace


# -------------------------------------------------------------------------------------------------------- the report


def test_theory_comes_once_and_memory_twice_then_around_saves_and_at_intervals() -> None:
    said: list[str] = []
    asked: list[int] = []

    def theory() -> tuple[list[str], int]:
        asked.append(1)
        return theory_of_reference(Run())

    report = MemoryReport(torch.device("cpu"), 0, say=said.append, theory=theory, interval=4)
    for iteration in range(1, 13):
        if iteration in (1, 4, 10):
            report.at_log_point(iteration)
        report.at_step(iteration)
    assert asked == [1]
    assert [line.partition(" memory")[0] for line in said] == [
        "parameters in millions: 0.17 in all, 0.17 active",
        "theoretical",
        "[Rank 0] (after 1 iterations)",
        "[Rank 0] (after 4 iterations)",
        "[Rank 0] (after 8 iterations)",
        "[Rank 0] (after 12 iterations)",
    ]
    said.clear()
    for iteration in range(5):
        with report.around_save(iteration):
            said.append("saves")
    assert [line.partition(")")[0] for line in said[:3]] == [
        "[Rank 0] (before the save of iteration 0",
        "saves",
        "[Rank 0] (after the save of iteration 0",
    ]
    assert said.count("saves") == 5 and len(said) == 5 + 2 * 3


def test_other_ranks_ask_for_no_theory_and_may_say_nothing() -> None:
    said: list[str] = []
    report = MemoryReport(torch.device("cpu"), 3, say=said.append, speaks=False, theory=lambda: (["theory"], 1))
    report.at_log_point(1)
    report.at_log_point(2)
    assert said == [] and memory_points() == {}


def test_on_a_gpu_the_second_report_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    statistics = {
        "allocated_bytes.all.current": mib,
        "allocated_bytes.all.peak": 2 * mib,
        "reserved_bytes.all.current": 3 * mib,
    }
    statistics |= {"reserved_bytes.all.peak": 4 * mib, "allocation.all.current": 7}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: statistics)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * mib, 16 * mib))
    said: list[str] = []
    theory = (["theory"], 3 * mib)
    report = MemoryReport(torch.device("cuda", 0), 0, say=said.append, theory=lambda: theory, device_memory_used=True)
    for iteration in (1, 10, 20):
        report.at_log_point(iteration)
    sizes = "memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.00 | max reserved: 4.00"
    sizes += " | total device memory used: 6.00 |"
    compared = "memory at the peak (MB): estimated 3.00, measured 2.00 (+50.0 %)"
    assert said == ["theory", f"[Rank 0] (after 1 iterations) {sizes}", f"[Rank 0] (after 10 iterations) {sizes}", compared]
    assert memory_points() == {
        "mem-reserved-bytes": 3 * mib,
        "mem-allocated-bytes": mib,
        "mem-max-allocated-bytes": 2 * mib,
        "mem-allocated-count": 7,
    }


def test_measured_lines() -> None:
    line = memory_line(torch.device("cpu"), 2, "(after 1 iterations)")
    assert line.startswith("[Rank 2] (after 1 iterations) memory (MB) | resident: ") and line.endswith(" |")
    assert float(line.split("resident: ")[1].split(" ")[0]) > 50  # this process has torch in it
    mib = 1 << 20
    assert comparison(105 * mib, 100 * mib) == "memory at the peak (MB): estimated 105.00, measured 100.00 (+5.0 %)"
    assert comparison(mib, 0) == "memory at the peak (MB): estimated 1.00, measured 0.00"
