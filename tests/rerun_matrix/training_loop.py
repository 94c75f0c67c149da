"""One attempt of a small training loop on one rank: DDP over gloo, values really damaged, the machine as users call it."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.corruption import Corruption, MemoryMarks
from rsup.worker.deterministic import parameter_digest, rank_order_hook
from rsup.worker.faults import parse_any_fault
from rsup.worker.numeric_faults import poisons
from rsup.worker.rerun.contract import RankDevice, RerunConfig, RerunMode
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.rng import capture_rng, restore_rng, seed_rng
from tests.rerun_matrix.runs import NUM_ITERATIONS, SAVE_INTERVAL, Run

NUM_MICROBATCHES = 2
BATCH = 4


class Net(nn.Module):
    """Two layers, dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(12, 1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """`data`: [batch, 6]; gives [batch]."""
        hidden: torch.Tensor = self.dropout(torch.tanh(self.norm(self.inner(data))))
        out: torch.Tensor = self.out(hidden)
        return out[:, 0]


class Loader:
    """Nested batches, drawn by a generator of its own. With `own_position` that generator's state is the only position there
    is, and it stands behind the batches that were drawn; else the position follows from the iteration."""

    def __init__(self, rank: int, own_position: bool, is_poisoned: Callable[[int], bool]) -> None:
        self._rank = rank
        self._is_poisoned = is_poisoned
        self._drawn = 0
        self._generator = torch.Generator().manual_seed(1000 + rank)
        if own_position:
            self.state_dict = self._state
            self.load_state_dict = self._load

    def seek(self, iteration: int) -> None:
        """Stand before the iteration after so many completed ones."""
        self._generator.manual_seed(1000 + self._rank)
        self._drawn = 0
        for _ in range(iteration * NUM_MICROBATCHES):
            next(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, Any]:
        numbers = torch.randn(BATCH, 7, generator=self._generator)
        weight = torch.full((BATCH,), 0.1)
        if self._drawn % NUM_MICROBATCHES == 0 and self._is_poisoned(self._drawn // NUM_MICROBATCHES + 1):
            weight[0] = float("nan")
        self._drawn += 1
        return {"x": numbers[:, :6].clone(), "more": [numbers[:, 6].clone(), {"weight": weight}]}

    def _state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "generator": self._generator.get_state()}

    def _load(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._generator.set_state(state["generator"])


class Killed(Exception):
    """All ranks die here."""


@dataclass
class Outcome:
    """How an attempt ended: `finished`, `killed`, or `exited` with a code; `checkpoint` is the newest one."""

    ended: str
    checkpoint: bytes
    exit_code: int = 0
    digest: str = ""


@dataclass
class Rank:
    """What stays over the attempts of a run, on one rank."""

    run: Run
    rank: int
    folder: Path
    marks: MemoryMarks
    said: list[str]
    attempt: int = 1
    skip: frozenset[int] = frozenset()
    """Iterations whose computation is left out."""


def run_attempt(mine: Rank, device: str, checkpoint: bytes) -> Outcome:
    """Train from `checkpoint` (empty: from the start) on `device`. Collective."""
    return _Attempt(mine, device, checkpoint).train()


class _Attempt:
    def __init__(self, mine: Rank, device: str, checkpoint: bytes) -> None:
        run, rank = mine.run, mine.rank
        self.mine = mine
        self.checkpoint = checkpoint
        faults = [parse_any_fault(text) for text in run.faults]
        seed_rng(7)
        self.module = Net(0.2 if run.dropout else 0.0)
        seed_rng(100 + rank)
        self.ddp = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.loader = Loader(rank, run.own_position, poisons(faults, rank))
        self.data = RerunDataIterator(self.loader)
        self.corruption = Corruption(faults, rank, device, mine.marks, self.module, mine.said.append)
        config = RerunConfig(
            mode=RerunMode.AUDIT if run.audit_interval else RerunMode.VALIDATE_RESULTS,
            audit_interval=run.audit_interval,
            on_application=run.on_application,
            on_transient=run.on_transient,
        )
        model = dict(run.models).get(device, "usual")
        self.rerun = RerunStateMachine(
            config,
            device=RankDevice(device, node="here", model=model),
            group=dist.group.WORLD if run.world_size > 1 else None,
            ledger_folder=mine.folder,
            injected=True,
        )
        self.rerun.attach(self.ddp, self.optimizer, hook=rank_order_hook)
        self.iteration = 0
        if checkpoint:
            self._load()
        else:
            self._save()

    def train(self) -> Outcome:
        try:
            while self.iteration < NUM_ITERATIONS:
                code = self._iterate()
                if code:
                    return Outcome("exited", self.checkpoint, code)
                if self.iteration % SAVE_INTERVAL == 0:
                    self._save()
        except Killed:
            return Outcome("killed", self.checkpoint)
        return Outcome("finished", self.checkpoint, digest=parameter_digest(self.module))

    def _iterate(self) -> int:
        iteration = self.iteration + 1
        if iteration in self.mine.skip:
            self.rerun.drop_pending(iteration)
            self.data.advance()
            for _ in range(NUM_MICROBATCHES):
                next(self.data)
            self.iteration = iteration
            return 0
        num_passes = 0
        while self.rerun.should_run_forward_backward(self.data, iteration):
            num_passes += 1
            if self.mine.run.kill_at == (self.mine.attempt, iteration, num_passes):
                raise Killed
            self._forward_backward(iteration)
        leave = self.rerun.should_checkpoint_and_exit()
        if leave.should_exit:
            if leave.should_checkpoint:
                self._save()
            return leave.exit_code
        if not self.rerun.skip_step:
            self.optimizer.step()
        self.iteration = iteration
        return 0

    def _forward_backward(self, iteration: int) -> None:
        self.optimizer.zero_grad()
        self.corruption.begin_pass(iteration)
        for micro in range(NUM_MICROBATCHES):
            batch = next(self.data)
            self.corruption.takes(batch)
            target, rest = batch["more"]
            batch["x"].mul_(0.5)  # a loop may change its batch in place
            rest["weight"].add_(0.0)
            self.ddp.require_backward_grad_sync = micro == NUM_MICROBATCHES - 1
            errors = (self.ddp(batch["x"]) - target).square() * rest["weight"]
            loss = errors.mean()
            self.corruption.damage_loss(loss)
            self.rerun.validate_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            loss.data.div_(NUM_MICROBATCHES)  # P7: schedules scale the loss in place after it was checked

    def _save(self) -> None:
        state: dict[str, Any] = {
            "iteration": self.iteration,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": capture_rng(),
            "rerun": self.rerun.state_dict(),
        }
        if self.mine.run.own_position:
            state["loader"] = self.loader.state_dict()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.checkpoint = buffer.getvalue()

    def _load(self) -> None:
        state = torch.load(io.BytesIO(self.checkpoint), weights_only=True)
        self.iteration = state["iteration"]
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_rng(state["rng"])
        if self.mine.run.own_position:
            self.loader.load_state_dict(state["loader"])
        else:
            self.loader.seek(self.iteration)
        ignored = self.rerun.load_state_dict(state["rerun"])
        assert not ignored, ignored
