"""The reference model's experts: numbers are those of a loop over tokens, and the load balancing loss has only a gradient."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from rsup.supervisor.wire import UsageError
from rsup.worker.observe.flops import step_flops
from rsup.worker.observe.reference_memory import reference_description
from rsup.worker.reference.build import make_model
from rsup.worker.reference.command_line import parse_options
from rsup.worker.reference.experts import MixtureOfExperts, balance_loss
from rsup.worker.reference.model import GPT, ExpertsOfBlock
from rsup.worker.reference.program import program_of, read_program


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def slow(layer: MixtureOfExperts, token: torch.Tensor, topk: int) -> tuple[torch.Tensor, list[int]]:
    """Output and chosen experts of one token, [hidden]."""
    logits = layer.router.weight @ token
    best = sorted(range(len(logits)), key=lambda expert: -float(logits[expert]))[:topk]
    weights = logits[best].softmax(0) if topk > 1 else logits.softmax(0)[best]
    first, second = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    parts = [w * (second[expert] @ functional.gelu(first[expert] @ token)) for w, expert in zip(weights, best, strict=True)]
    return torch.stack(parts).sum(0), best


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_the_layer_is_that_of_a_loop_over_tokens(topk: int) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(4, 6, 3, topk)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    told: list[torch.Tensor] = []
    layer.experts.linear_fc1.register_forward_pre_hook(lambda module, inputs: told.append(inputs[1]))
    hidden = torch.randn(2, 5, 4, requires_grad=True)
    out, balance = layer(hidden)
    counts = torch.zeros(3, dtype=torch.int64)
    for sample in range(2):
        for place in range(5):
            expected, chosen = slow(layer, hidden[sample, place], topk)
            assert torch.allclose(out[sample, place], expected, atol=1e-5)
            counts[chosen] += 1
    assert told[0].tolist() == counts.tolist() and int(counts.sum()) == 10 * topk
    shares = (layer.router(hidden).flatten(0, 1).softmax(-1)).mean(0)
    assert torch.allclose(balance, 3 * (counts / (10 * topk) * shares).sum())
    out.square().sum().backward()
    assert layer.router.weight.grad is not None and bool(layer.router.weight.grad.any()), (
        "the router learns from the loss alone"
    )


def test_the_balance_loss_is_1_where_all_is_even_and_the_number_of_experts_where_one_takes_all() -> None:
    assert float(balance_loss(torch.full((6, 3), 1 / 3), torch.tensor([4, 4, 4]), topk=2)) == pytest.approx(1)
    one = torch.tensor([[1.0, 0, 0]] * 6)
    assert float(balance_loss(one, torch.tensor([6, 0, 0]), topk=1)) == pytest.approx(3)


def gradients(coeff: float, recompute: str | None = None, training: bool = True) -> tuple[float, GPT, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(2, 8, 2, 6, 0.0, 0.0, recompute, ExpertsOfBlock(4, 2, 5, coeff)).train(training)
    loss = model(torch.arange(14).view(2, 7))
    loss.backward()
    assert all(block.balance is None for block in model.blocks), "no autograd graph is kept"
    return float(loss.detach()), model, [p.grad for p in model.parameters() if p.grad is not None]


def test_the_load_balancing_loss_changes_gradients_and_no_loss() -> None:
    plain, without, expected = gradients(0.0)
    loss, model, found = gradients(0.25)
    assert loss == plain and without.balance is None
    assert model.balance is not None and 1 <= float(model.balance) < 4 and not model.balance.requires_grad
    again, _, recomputed = gradients(0.25, "full")
    assert again == loss and all(torch.equal(one, other) for one, other in zip(found, recomputed, strict=True))
    _, evaluated, of_evaluation = gradients(0.25, training=False)
    assert evaluated.balance is None and all(torch.equal(a, b) for a, b in zip(expected, of_evaluation, strict=True))

    torch.manual_seed(0)
    aside = GPT(2, 8, 2, 6, 0.0, 0.0, None, ExpertsOfBlock(4, 2, 5))
    hidden, total = aside.embed(torch.arange(14).view(2, 7)[:, :-1]), torch.zeros(())
    for block in aside.blocks:
        hidden = block(hidden)
        total = total + block.balance  # type: ignore[operator]
    (aside.loss(hidden, torch.arange(14).view(2, 7)[:, 1:]) + 0.25 * total).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for p in aside.parameters() if p.grad is not None]
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(found, wanted, strict=True))
    assert not all(torch.allclose(one, other, atol=1e-7) for one, other in zip(found, expected, strict=True))
    assert float(model.balance) == pytest.approx(float(total.detach()) / 2)


def test_options_make_the_model_and_say_what_cannot_be() -> None:
    options = parse_options(["--num-experts=4", "--hidden-size=8", "--num-attention-heads=2", "--moe-ffn-hidden-size=5"])
    names = dict(make_model(options, torch.device("cpu")).named_parameters())
    assert tuple(names["blocks.1.mlp.experts.linear_fc2.weight"].shape) == (4, 8, 5)
    assert not any("mlp_in" in name for name in names)
    dense = parse_options(["--hidden-size=8", "--num-attention-heads=2"])
    active = step_flops(reference_description(options), options.seq_length)(1)
    assert active < step_flops(reference_description(dense), dense.seq_length)(1), "2 experts of width 5 for one of 32"
    graphed = parse_options(["--num-experts=4", "--cuda-graph-impl=full_iteration"])
    assert graphed.graph_facts.num_experts == 4 and dense.graph_facts.num_experts is None
    kept: Any = SimpleNamespace(program=program_of(options, deterministic=True))
    assert make_model(read_program(kept)[0], torch.device("cpu")).state_dict().keys() == names.keys(), (
        "a kept step tells of them"
    )
    for given, complaint in (
        (["--moe-aux-loss-coeff=0.1"], "--moe-aux-loss-coeff needs --num-experts"),
        (["--num-experts=2", "--moe-router-topk=3"], "--moe-router-topk 3 is more than --num-experts 2"),
        (["--save-tokens-per-expert-interval=2", "--save=x"], "--save-tokens-per-expert-interval needs --num-experts"),
        (["--save-params-interval=2"], "--save-params-interval needs --save: dumps lie beside the checkpoints"),
        (
            ["--save-grads", "--save=x", "--save-wgrads-interval=3"],
            "--save-grads needs --save-interval, or give --save-dgrads-int",
        ),
        (
            ["--dump-modules=*", "--save=x", "--save-wgrads-interval=3"],
            "--dump-modules needs --save-activations-interval or --sa",
        ),
        (["--dump-modules=, ", "--save=x", "--save-activations-interval=3"], "--dump-modules: ', ' is no pattern"),
        (["--save-params-interval=-1", "--save=x"], "--save-params-interval: -1 is negative"),
    ):
        with pytest.raises(UsageError) as raised:
            parse_options(given)
        assert complaint in str(raised.value)
