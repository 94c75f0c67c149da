"""What four ranks of `test_rerun_ranks.py` see of the whole machine under DDP, FSDP2 and a 2x2 mesh. A script."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.rerun.contract import Exit, RankDevice, RerunConfig, RerunMode, RerunState
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.state_machine import RerunStateMachine

Corrupt = Callable[[torch.Tensor, "Run"], torch.Tensor]
Made = tuple[nn.Module, nn.Module, ReplicaAxis | None]
"""The model as it is called, the module that holds its parameters, and the axis (None: all ranks)."""


class Run:
    """A few iterations on this rank. `verdict` is how the last case ended; equal on all ranks."""

    def __init__(self, make: Callable[[], Made], corrupt: Corrupt, **config: Any) -> None:
        torch.manual_seed(0)
        model, module, axis = make()
        self.rank, self.corrupt, self.passes, self.number = dist.get_rank(), corrupt, 0, 0
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.rerun = RerunStateMachine(RerunConfig(**config), device=RankDevice(f"GPU-{self.rank}"))
        self.rerun.attach(model, optimizer, axis=axis)
        self.module = module
        replica = axis.replica_of(self.rank) if axis is not None else self.rank
        torch.manual_seed(100 + replica)
        self.data = RerunDataIterator(self.loader(replica))
        self.exit = Exit(False, False, 0)
        self.skipped: list[int] = []
        while self.number < 5:
            self.number += 1
            self.iterate(model, optimizer)
            self.exit = self.rerun.should_checkpoint_and_exit()
            if self.exit.should_exit:
                break
            if self.rerun.skip_step:
                self.skipped.append(self.number)
            else:
                optimizer.step()

    def loader(self, replica: int) -> Iterable[dict[str, Any]]:
        return [self.batch(replica) for _ in range(40)]

    def batch(self, replica: int) -> dict[str, Any]:
        """Nested, of a size that differs from rank to rank."""
        return {"x": torch.randn(2 + replica, 8), "more": [torch.ones(1), "text"]}

    def iterate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        while self.rerun.should_run_forward_backward(self.data, self.number):
            self.passes += 1
            optimizer.zero_grad()
            for micro in range(2):
                batch = next(self.data)
                quiet = model.no_sync() if micro == 0 and hasattr(model, "no_sync") else contextlib.nullcontext()
                with quiet:
                    loss = self.corrupt(model(batch["x"]).square().mean(), self)
                    self.rerun.validate_loss(loss)
                    loss.backward()  # type: ignore[no-untyped-call]

    @property
    def verdict(self) -> str:
        reported = self.rerun.last_report
        assert reported is not None
        return f"{reported.verdict}: {','.join(reported.accused)}"


def ddp() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(model)
    return wrapped, model, None


def dropout_ddp() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    return DistributedDataParallel(model), model, None


def plain_ddp() -> Made:
    model = nn.Linear(8, 1)
    return DistributedDataParallel(model), model, None


def fsdp() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, model, None


def mesh() -> Made:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=grid["dp"])
    return model, model, ReplicaAxis.of_mesh(grid, "dp")


def healthy(loss: torch.Tensor, run: Run) -> torch.Tensor:
    return loss


def device(*ranks: int, factor: float = math.nan, first: int = 3) -> Corrupt:
    def corrupt(loss: torch.Tensor, run: Run) -> torch.Tensor:
        return loss * factor if run.rank in ranks and run.number >= first else loss

    return corrupt


def first_pass(rank: int, iteration: int) -> Corrupt:
    def corrupt(loss: torch.Tensor, run: Run) -> torch.Tensor:
        strikes = run.rank == rank and run.number == iteration and run.rerun.state is RerunState.INITIAL_RUN
        return loss * math.nan if strikes else loss

    return corrupt


def for_some_inputs(rank: int) -> Corrupt:
    """A device that fails for batches of one size only: its own."""

    def corrupt(loss: torch.Tensor, run: Run) -> torch.Tensor:
        own = run.rerun.state is not RerunState.RERUNNING_ROTATED
        return loss * math.nan if run.rank == rank and run.number >= 3 and own else loss

    return corrupt


def weights(run: Run) -> list[float]:
    return [float(p.detach().double().sum()) for p in run.module.parameters() if not hasattr(p, "to_local")]


def check_ddp_undisturbed_and_transient_end_alike(rank: int, size: int) -> None:
    """S4 on all ranks, S10: a fault on the first, a middle, the last rank."""
    plain = Run(ddp, healthy)
    assert plain.passes == 5 and not plain.exit.should_exit
    for where in (0, 2, size - 1):
        run = Run(ddp, first_pass(where, 3))
        assert run.passes == 6 and weights(run) == weights(plain)
        assert run.verdict == "transient: "


def check_ddp_names_the_device(rank: int, size: int) -> None:
    """S10: one rank, and two at once; three passes from fault to verdict."""
    for ranks, passes in (((1,), 5), ((0, 2), 5)):
        run = Run(ddp, device(*ranks))
        assert run.verdict == "persistent: " + ",".join(f"GPU-{r}" for r in ranks), run.verdict
        assert run.exit == Exit(True, True, 16) and run.passes == passes
    run = Run(ddp, for_some_inputs(1))
    assert run.verdict == "persistent: GPU-1" and run.passes == 6, (run.verdict, run.passes)


def check_ddp_accuses_nobody_when_all_fail(rank: int, size: int) -> None:
    run = Run(ddp, device(*range(size)))
    assert run.verdict == ": " and run.exit == Exit(True, True, 16)


def check_ddp_corrupted_parameters(rank: int, size: int) -> None:
    """One rank's copy of a parameter is no longer that of the others."""

    def corrupt(loss: torch.Tensor, run: Run) -> torch.Tensor:
        if run.rank == 2 and run.number == 3:
            next(run.module.parameters()).data[0, 0] = math.nan
        return loss

    def healed(loss: torch.Tensor, run: Run) -> torch.Tensor:
        corrupt(loss, run)
        return loss

    run = Run(ddp, healed)
    assert run.verdict == "corrupted state: GPU-2", run.verdict
    assert run.exit == Exit(False, True, 17)


def check_an_echo_accuses_nobody(rank: int, size: int) -> None:
    """DDP that reduces after each micro-batch spoils every rank's gradients: only the rank that did it is to move."""

    class Noisy(Run):
        def iterate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            while self.rerun.should_run_forward_backward(self.data, self.number):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = model(next(self.data)["x"]).square().mean()
                    self.corrupt(loss, self).backward()  # type: ignore[no-untyped-call]

    run = Noisy(ddp, device(1), rotate=False)
    report = run.rerun.last_report
    assert report is not None and (report.verdict, report.action) == ("", "elsewhere"), report
    assert {finding.rank for finding in report.findings} == {1}, report.findings
    assert report.tried == {1: ["GPU-1"]}, report.tried


class Augmenting(Run):
    """Batches are made when they are drawn, from the generator that dropout uses."""

    def loader(self, replica: int) -> Iterable[dict[str, Any]]:
        for number in range(40):
            batch = self.batch(replica)
            if replica == 2 and number == 5:  # of the third iteration
                self.spoil(batch["x"])
            yield batch

    def spoil(self, x: torch.Tensor) -> None:
        """This rank's batch."""

    def iterate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().iterate(model, optimizer)
        self.left = torch.get_rng_state()


def check_a_loader_that_draws_from_the_same_generator_as_dropout(rank: int, size: int) -> None:
    """What a batch left in the generators moves with it: another rank computes exactly what this one did."""
    plain = Augmenting(dropout_ddp, healthy)
    run = Augmenting(dropout_ddp, first_pass(1, 3))
    assert run.verdict == "transient: " and weights(run) == weights(plain) and torch.equal(run.left, plain.left)
    audited = Augmenting(dropout_ddp, healthy, mode=RerunMode.AUDIT, audit_interval=1)
    assert not audited.exit.should_exit and audited.rerun.last_report is None, audited.rerun.last_report
    assert audited.passes == 15 and torch.equal(audited.left, plain.left), "its own generators came back"
    run = Augmenting(dropout_ddp, device(1))
    assert run.verdict == "persistent: GPU-1" and run.passes == 5, (run.verdict, run.passes)

    class Spoiled(Augmenting):
        def spoil(self, x: torch.Tensor) -> None:
            x[0, 0] = math.nan

    run = Spoiled(dropout_ddp, healthy, on_application="skip")
    assert run.verdict == "application: " and run.skipped == [3], run.verdict


def check_data_that_do_not_move_accuse_nobody(rank: int, size: int) -> None:
    """What a rank computes follows from its number, or from nothing that went through the iterator: no board is to blame."""

    class Elsewhere(Run):
        def iterate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            taken = self.data if self.takes else None
            while self.rerun.should_run_forward_backward(taken, self.number):
                optimizer.zero_grad()
                if self.takes:
                    next(self.data)
                x = torch.full((2, 8), 0.1 * (self.rank + 1))
                loss = self.corrupt(model(x).square().mean(), self)
                self.rerun.validate_loss(loss)
                loss.backward()  # type: ignore[no-untyped-call]

    for takes in (False, True):
        Elsewhere.takes = takes  # type: ignore[attr-defined]
        run = Elsewhere(plain_ddp, device(1))
        assert (run.verdict, run.exit) == (": ", Exit(True, True, 16)), run.verdict
        run = Elsewhere(plain_ddp, healthy, mode=RerunMode.AUDIT, audit_interval=1)
        assert not run.exit.should_exit and run.rerun.last_report is None


def check_fsdp_names_the_device(rank: int, size: int) -> None:
    run = Run(fsdp, device(3))
    assert run.verdict == "persistent: GPU-3" and run.exit == Exit(True, True, 16), run.verdict
    run = Run(fsdp, first_pass(1, 3))
    assert run.verdict == "transient: " and not run.exit.should_exit


def check_mesh_points_to_a_replica(rank: int, size: int) -> None:
    """A fault inside a tensor-parallel pair: one of its two members, and neither is quarantined for that."""
    run = Run(mesh, device(2))
    report = run.rerun.last_report
    assert report is not None and (report.verdict, report.suspect_of) == ("persistent", 2), report
    assert report.accused == ["GPU-2", "GPU-3"]


def check_audit_finds_what_is_never_nan(rank: int, size: int) -> None:
    plain = Run(ddp, healthy, mode=RerunMode.AUDIT, audit_interval=2)
    assert not plain.exit.should_exit
    run = Run(ddp, device(1, factor=1.001), mode=RerunMode.AUDIT, audit_interval=1)
    assert run.verdict == "persistent: GPU-1", run.verdict
    assert run.exit == Exit(True, True, 16)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    for name, check in checks.items():
        check(dist.get_rank(), dist.get_world_size())
        print(f"holds: {name}", flush=True)
    dist.destroy_process_group()


main()
