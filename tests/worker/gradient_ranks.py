"""What three ranks of `test_gradient_checks.py` check: local norms, and communication as without us. A script."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.deterministic import rank_order_hook
from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.exchange import gather
from rsup.worker.rerun.gradient_checks import GradientChecks

Attach = Callable[[GradientChecks, DistributedDataParallel], None]


def make_model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))


def local_gradients(rank: int, rounds: int = 1) -> list[torch.Tensor]:
    """What a rank's own gradients are, without any communication."""
    model = make_model()
    for number in range(rounds):
        model(batch_of(rank, number)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def batch_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, 7, generator=generator)


def norm_of(gradients: list[torch.Tensor]) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients]).double().norm())


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * abs(other)


def train(
    ddp: DistributedDataParallel, rank: int, sync_each: bool, keep: bool, checks: GradientChecks | None = None
) -> list[Any]:
    """Four iterations of two micro-batches; the reduced gradients of each, and the norms."""
    seen: list[Any] = []
    for iteration in range(4):
        ddp.zero_grad(set_to_none=not keep)
        for micro in range(2):
            context = contextlib.nullcontext() if sync_each or micro == 1 else ddp.no_sync()
            with context:
                ddp(batch_of(rank, 2 * iteration + micro)).square().sum().backward()
        seen += [p.grad.clone() for p in ddp.module.parameters()]
        if checks is not None:
            assert checks.take()
    return seen


def variants() -> Iterator[tuple[dict[str, Any], bool, bool]]:
    for view in (False, True):
        for sync_each in (False, True):
            for keep in (False, True):
                yield {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0002}, sync_each, keep


def check_ddp_reduces_bit_for_bit_as_without_us(rank: int, size: int) -> None:
    """Three ranks: 1/3 is not exact, so dividing and multiplying differ."""
    for options, sync_each, keep in variants():
        plain = train(DistributedDataParallel(make_model(), **options), rank, sync_each, keep)
        ddp = DistributedDataParallel(make_model(), **options)
        checks = GradientChecks()
        checks.attach(ddp)
        ours = train(ddp, rank, sync_each, keep, checks)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), (options, sync_each, keep)


def _given(hook: Any, state: Any) -> Attach:
    return lambda checks, ddp: checks.attach(ddp, hook=hook, state=state)


def _before(hook: Any, state: Any) -> Attach:
    def attach(checks: GradientChecks, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(state, hook)
        checks.attach(ddp)

    return attach


def _later(hook: Any, state: Any) -> Attach:
    def attach(checks: GradientChecks, ddp: DistributedDataParallel) -> None:
        checks.attach(ddp)
        ddp.register_comm_hook(state, hook)

    return attach


def check_a_hook_of_the_users_gives_the_same_results_and_local_norms_are_read(rank: int, size: int) -> None:
    for hook in (rank_order_hook, fp16_compress_hook):
        plain = DistributedDataParallel(make_model())
        plain.register_comm_hook(None, hook)
        expected = train(plain, rank, False, False)
        for attach in (_given(hook, None), _before(hook, None), _later(hook, None)):
            ddp = DistributedDataParallel(make_model())
            checks = GradientChecks()
            attach(checks, ddp)
            assert checks.names_a_rank
            ours = train(ddp, rank, False, False, checks)
            assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True)), (hook, attach)
            ddp.zero_grad()
            ddp(batch_of(rank, 0)).square().sum().backward()
            (message, norm), *more = checks.take()
            assert message == "grad norm of bucket 0" and not more
            assert close(float(norm), norm_of(local_gradients(rank))), (hook, attach)
    twice = DistributedDataParallel(make_model())
    twice.register_comm_hook(None, rank_order_hook)
    try:
        GradientChecks().attach(twice, hook=rank_order_hook)
    except RerunError as error:
        assert "has a comm hook already" in str(error)
    else:
        raise AssertionError("two hooks")


def check_ddp_norms_are_local_and_do_not_follow_ddps_buckets(rank: int, size: int) -> None:
    """The first pass and the ones after DDP has arranged its buckets anew give the same values."""
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.0002)
    checks = GradientChecks()
    checks.attach(ddp)
    passes = []
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch_of(rank, 0)).square().sum().backward()
        ddp(batch_of(rank, 1)).square().sum().backward()
        passes.append([(message, float(norm)) for message, norm in checks.take()])
        assert checks.take() == []
    assert passes[0] == passes[1] == passes[2] and [message for message, _ in passes[0]] == ["grad norm of bucket 0"]
    assert close(passes[0][0][1], norm_of(local_gradients(rank, rounds=2)))
    assert len({norms[0][1] for norms in gather(passes[0:1][0:1][0], None) for norms in [norms]}) == size


def check_reductions_of_one_pass_have_names_of_their_own(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(make_model())
    checks = GradientChecks()
    checks.attach(ddp)
    for number in range(3):
        ddp(batch_of(rank, number)).square().sum().backward()
    names = [message for message, _ in checks.take()]
    assert names == [f"grad norm of bucket 0{tail}" for tail in ("", ", reduction 2", ", reduction 3")]
    ddp(batch_of(rank, 0)).square().sum().backward()
    checks.begin()
    assert checks.take() == [], "a pass that was broken off is forgotten"


def check_a_corrupted_gradient_names_its_rank_under_ddp_and_fsdp(rank: int, size: int) -> None:
    for kind in ("ddp", "fsdp"):
        for bad in (float("nan"), float("inf"), 1e36):
            model = make_model()
            wrapped: Any = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
            checks = GradientChecks()
            checks.attach(wrapped)

            def spoil(gradient: torch.Tensor, bad: float = bad) -> torch.Tensor:
                return gradient.index_fill(0, torch.tensor([1]), bad) if rank == 1 else gradient

            handle = (
                model[2].weight.register_hook(spoil)
                if kind == "ddp"
                else model[2].register_full_backward_hook(
                    lambda module, into, out: tuple(spoil(part) if part is not None else None for part in into)
                )
            )
            wrapped(batch_of(rank, 0)).square().sum().backward()
            handle.remove()
            worst = max(float(norm.nan_to_num(nan=float("inf"))) for _, norm in checks.take())
            huge = [value > 1e30 for value in gather(worst, None)]
            assert huge == [False, True, False], (kind, bad, huge)
            assert checks.names_a_rank
            if bad == 1e36:
                assert worst < float("inf"), "finite gradients do not read as Inf"


def check_fsdp_norms_are_local_by_module_and_results_are_unchanged(rank: int, size: int) -> None:
    def sharded(attach: GradientChecks | None, policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
        model = make_model()
        for part in (model[0], model[2]):
            fully_shard(part, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if attach is not None:
            attach.attach(model)
        for number in range(2):
            model(batch_of(rank, number)).square().sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        return [gradient.full_tensor() for gradient in gradients]

    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        checks = GradientChecks()
        ours, plain = sharded(checks, policy), sharded(None, policy)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
        taken = checks.take()
        assert [message for message, _ in taken] == [f"grad norm of bucket {place}" for place in (0, 0, 1, 1, 2, 2)]
        if policy.param_dtype is None:
            first = local_gradients(rank)
            expected = [norm_of(first[4:]), norm_of(first[:2]), norm_of(first[2:4])]
            values = [float(norm) for _, norm in taken[::2]]
            assert all(close(one, other) for one, other in zip(values, expected, strict=True)), (values, expected)
            second = [norm for _, norm in taken[1::2]]
            assert len(set(gather(float(second[0]), None))) == size


def check_a_module_reduced_by_others_says_that_it_names_no_rank(rank: int, size: int) -> None:
    model = make_model()
    checks = GradientChecks()
    checks.attach(model)
    model(batch_of(rank, 0)).square().sum().backward()
    (_, norm), *_ = checks.take()
    assert not checks.names_a_rank and close(float(norm), norm_of(local_gradients(rank)))
    try:
        checks.attach(make_model(), hook=rank_order_hook)
    except RerunError as error:
        assert "takes no comm hook" in str(error)
    else:
        raise AssertionError("a hook without place")


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in CHECKS:
        one(dist.get_rank(), dist.get_world_size())
        print(f"holds: {one.__name__}", flush=True)
    dist.destroy_process_group()
