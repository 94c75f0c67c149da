"""Activations away and back: the same gradients to the bit, parameters stay, buffers are used again."""

import torch
from torch import nn

from rsup.worker.activation_offload import ActivationOffload
from rsup.worker.reference.model import GPT

CPU = torch.device("cpu")


def make_model() -> GPT:
    torch.manual_seed(5)
    return GPT(2, 16, 2, 8, 0.0, 0.0)


def gradients(model: nn.Module, text: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(6)
    model(text).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_the_same_and_memory_is_used_again() -> None:
    text = torch.arange(36).view(4, 9)
    expected = gradients(make_model(), text)
    model = make_model()
    model.offload = offload = ActivationOffload(CPU, max_inflight=1, min_bytes=256)
    sizes = []
    for _ in range(3):
        found = gradients(model, text)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        sizes.append((offload.num_offloaded, offload.host_bytes))
    (num_first, first_bytes), (num_second, _), (_, last_bytes) = sizes
    assert num_second == 2 * num_first > 0 and last_bytes == first_bytes > 0


def test_what_is_small_or_a_parameter_stays() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    data = torch.ones(2, 64, requires_grad=True)
    offload = ActivationOffload(CPU, min_bytes=1024)
    with offload.saving([weight]):
        out = data @ weight.t()  # saves both: 512 bytes, and a view of the parameter
    out.sum().backward()
    assert offload.num_offloaded == 0 and weight.grad is not None
    with offload.saving([weight]):
        out = (data.repeat(4, 1) @ weight.t()).square().sum()
    out.backward()
    assert offload.num_offloaded == 2


def test_the_layout_in_memory_is_kept() -> None:
    offload = ActivationOffload(CPU, min_bytes=0)
    source = torch.randn(2, 3, 4, requires_grad=True)
    with offload.saving():
        out = source.permute(2, 0, 1).exp()
    assert offload.num_offloaded == 1
    saved = getattr(out.grad_fn, "_saved_result")  # noqa: B009 - autograd's own
    assert saved.stride() == out.stride() == (1, 12, 4) and torch.equal(saved, out)


def test_a_pass_without_backward_gives_its_memory_back() -> None:
    offload = ActivationOffload(CPU, min_bytes=0)
    data = torch.ones(8, requires_grad=True)
    for _ in range(3):
        with offload.saving():
            data.exp()
    assert offload.num_offloaded == 3 and offload.host_bytes == 32
