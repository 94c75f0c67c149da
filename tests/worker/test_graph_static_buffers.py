"""Static inputs: one address for each tensor of a signature, everything else by value, and what must not be an input."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.cuda_graph.nesting import walk
from rsup.worker.cuda_graph.static_buffers import Signature, StaticBuffers, difference

CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    weight: float


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [item for _, item, is_leaf in walk(value) if is_leaf and isinstance(item, torch.Tensor)]


def nested(start: float) -> dict[str, Any]:
    """One micro-batch of every kind of nesting."""
    return {
        "tokens": torch.arange(6).view(2, 3) + int(start),
        "pair": Pair(torch.full((2,), start), "text"),
        "list": [torch.tensor(start), (torch.ones(1, dtype=torch.bool), None)],
        "sample": Sample(torch.full((3, 1), start, dtype=torch.bfloat16), 0.5),
        "more": UserDict(OrderedDict(mask=torch.empty(0, 4))),
        "scale": 2,
    }


def same(value: Any, other: Any) -> bool:
    """Whether the tensors of both are equal, and in the same order."""
    pairs = zip(tensors_in(value), tensors_in(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_tensors_stay_at_their_addresses_and_the_rest_comes_by_value() -> None:
    buffers = StaticBuffers(CPU)
    first, second = [[nested(1.0), nested(2.0)], [nested(3.0)]], [[nested(4.0), nested(5.0)], [nested(6.0)]]
    key = buffers.signature(first)
    assert buffers.signature(second) == key
    loaded = buffers.load(key, first)
    addresses = [tensor.data_ptr() for tensor in tensors_in(list(loaded)) if tensor.numel()]
    assert len(set(addresses)) == len(addresses) == 15
    assert all(address % 64 == 0 for address in addresses)
    assert same(list(loaded), first)
    sources = {tensor.data_ptr() for tensor in tensors_in(first) if tensor.numel()}
    assert not sources & set(addresses)
    again = buffers.load(key, second)
    assert same(list(again), second) and same(list(loaded), second)
    assert [tensor.data_ptr() for tensor in tensors_in(list(again)) if tensor.numel()] == addresses
    batch = again[0][0]
    assert type(batch["pair"]) is Pair and batch["pair"].second == "text"
    assert type(batch["sample"]) is Sample and batch["sample"].weight == 0.5
    assert type(batch["more"]) is UserDict and batch["list"][1][1] is None and batch["scale"] == 2
    tensors_in(second)[0].zero_()
    assert not same(list(again), second)


def test_each_signature_has_buffers_of_its_own_until_they_are_given_back() -> None:
    buffers = StaticBuffers(CPU)
    small, large = [[torch.zeros(4)]], [[torch.ones(1000)]]
    kept = buffers.load("small", small)[0][0]
    buffers.load("large", large)
    assert kept.tolist() == [0.0] * 4 and buffers.size_bytes == 256 + 4096
    buffers.keep(["small"])
    assert buffers.size_bytes == 256
    assert buffers.load("small", small)[0][0].data_ptr() == kept.data_ptr()


def test_layout_and_gradients_of_inputs_are_kept() -> None:
    buffers = StaticBuffers(CPU)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    part, wanted = torch.randn(4, 6)[:, 1:3], torch.randn(3, requires_grad=True)
    key = buffers.signature([[image, part, wanted]])
    static = buffers.load(key, [[image, part, wanted]])[0]
    assert static[0].stride() == image.stride() and static[1].is_contiguous()
    assert torch.equal(static[1], part)
    for _ in range(2):
        static = buffers.load(key, [[image, part, wanted]])[0]
        (2 * static[2]).sum().backward()
        assert static[2].grad.tolist() == [2.0] * 3
    assert wanted.grad is None


def change(text: str) -> tuple[Signature, Signature]:
    """Signatures of a batch, and of one that differs in one thing."""
    batches: list[list[Any]] = [[nested(1.0), nested(2.0)]]
    before = StaticBuffers(CPU).signature(batches)
    batch = batches[0][1]
    exec(text, {"torch": torch, "batch": batch, "batches": batches, "Pair": Pair, "Sample": Sample})
    return before, StaticBuffers(CPU).signature(batches)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "batch['tokens'] = batch['tokens'][:1]",
            "model chunk 0, micro-batch 1, tokens: a tensor [1, 3] torch.int64 instead of",
        ),
        ("batch['tokens'] = batch['tokens'].int()", "tokens: a tensor [2, 3] torch.int32 instead of"),
        ("batch['tokens'] = None", "tokens: None instead of a tensor"),
        ("batch['scale'] = 3", "scale: 3 instead of 2"),
        ("batch['scale'] = 2.0", "scale: 2.0 instead of 2"),
        ("batch['scale'] = True", "scale: True instead of 2"),
        ("batch['sample'] = Sample(batch['sample'].tokens, 0.25)", "sample.weight: 0.25 instead of 0.5"),
        ("batch['pair'] = tuple(batch['pair'])", "pair: a tuple of 2 instead of a Pair of 2"),
        ("batch['pair'] = Pair(batch['pair'].first.clone().requires_grad_(), 'text')", "pair.first: a tensor [2]"),
        ("batch['list'].append(1)", "list: a list of 3 instead of a list of 2"),
        ("del batch['scale']", "micro-batch 1: a dict of ("),
        ("batches[0].append(batch)", "model chunk 0: 3 micro-batches instead of 2 micro-batches"),
        ("batches.append([])", "2 model chunks instead of 1 model chunks"),
    ],
)
def test_what_changes_a_signature_is_named(text: str, named: str) -> None:
    before, after = change(text)
    assert before != after and hash(before) != hash(after)
    assert named in difference(before, after)


def test_what_changes_no_signature() -> None:
    buffers = StaticBuffers(CPU, ignored_inputs=["index", "meta", "*.lengths"])

    def batch(index: int) -> list[list[Any]]:
        lengths = torch.ones(index + 1)
        return [
            [{"x": torch.ones(2), "index": [index], "meta": {"name": object()}, "p": {"lengths": lengths}, "f": float("nan")}]
        ]

    key = buffers.signature(batch(1))
    assert buffers.signature(batch(2)) == key
    buffers.load(key, batch(1))
    loaded, given = buffers.load(key, other := batch(2))[0][0], other[0][0]
    assert loaded["index"] == [2] and loaded["meta"]["name"] is given["meta"]["name"]
    assert loaded["p"]["lengths"] is given["p"]["lengths"] and loaded["x"] is not given["x"]


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({"x": 1}, "the batches: a dict is not a sequence: give for each model chunk the list of its micro-batches"),
        ([{"x": 1}], "model chunk 0: a dict is not a sequence"),
        ((micro for micro in "ab"), "the batches: a generator is not a sequence"),
        ([torch.ones(2)], "model chunk 0: a Tensor is not a sequence"),
        (
            [[{"x": torch.ones(2).to_sparse()}]],
            "model chunk 0, micro-batch 0, x: a graph takes plain dense tensors, not torch.sparse",
        ),
        ([[torch.ones(2)], [numpy.ones(2)]], "model chunk 1, micro-batch 0, itself: a ndarray would be frozen in a graph"),
        (
            [[{"meta": {"ids": {1, 2}}}]],
            "meta.ids: a set would be frozen in a graph and its changes go unseen: make it a tensor",
        ),
    ],
)
def test_what_cannot_be_an_input_is_refused(batches: Any, said: str) -> None:
    with pytest.raises(GraphError) as raised:
        StaticBuffers(CPU).signature(batches)
    assert said in str(raised.value) and "\n" not in str(raised.value)
