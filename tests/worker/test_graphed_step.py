"""Steps launched before the numbers of the one before are read: what a fault leaves behind is nothing. On the CPU, eagerly; the
same on GPUs, with graphs, is in `tests/gpu`."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rsup.worker.cuda_graph.contract import Batches, GraphError
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.graphed_step import GraphedStep, StepReport
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph, prepare_optimizer_for_graph
from rsup.worker.cuda_graph.weight_decay import ScheduledWeightDecay
from rsup.worker.rerun.contract import Exit, RankDevice, RerunConfig, RerunMode
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NUM_MICROBATCHES = 2
Strikes = Callable[[int, int], float]
"""By iteration and pass: what the loss is multiplied with."""


def healthy(iteration: int, number: int) -> float:
    return 1.0


def once(at: int, factor: float = math.nan) -> Strikes:
    return lambda iteration, number: factor if (iteration, number) == (at, 1) else 1.0


def once_launched(at: int) -> Strikes:
    """In the first launch of that iteration, which need not be its only one."""
    left = [math.nan]
    return lambda iteration, number: left.pop() if iteration == at and left else 1.0


def always(at: int, factor: float = math.nan) -> Strikes:
    return lambda iteration, number: factor if iteration == at else 1.0


class Loop:
    """A loop as a user would write it, with dropout, running statistics and a loader."""

    def __init__(
        self,
        strikes: Strikes = healthy,
        folder: Path | None = None,
        length: int = 60,
        generator: torch.Generator | None = None,
        decays: bool = False,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        self.generator = generator
        self.fails_at: tuple[int, int] | None = None
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        prepare_optimizer_for_graph(self.optimizer)
        self.strikes, self.factor = strikes, torch.ones(())
        self.passes: list[tuple[int, int]] = []
        self.seen: list[float] = []
        settings = RerunConfig(**config)
        self.rerun = RerunStateMachine(settings, device=RankDevice("GPU-a"), ledger_folder=folder)
        self.rerun.attach(self.model, self.optimizer, measures_gradients=False)
        self.gradients = GradientGroups(list(self.model.parameters()), None)
        names = [f"grad norm of bucket {number}" for number in range(self.gradients.num_groups)]
        self.checks = DeviceChecks(NUM_MICROBATCHES, len(names), CPU, config=settings, group=None)
        graph = FullIterationGraph(
            self.forward_backward,
            CPU,
            warmup_steps=2,
            parameters=self.model.parameters(),
            generators=[generator] if generator is not None else (),
        )
        self.decay = ScheduledWeightDecay(self.optimizer, self.checks.gate) if decays else None
        update = OptimizerGraph(
            self.optimizer,
            CPU,
            gate=self.checks.gate,
            max_norm=1.0,
            gradients=self.gradients,
            weight_decay=self.decay,
        )
        self.data = RerunDataIterator([{"x": torch.full((2, 4), float(i + 1)) / 10} for i in range(length)])
        self.step = GraphedStep(
            graph,
            update,
            self.checks,
            self.rerun,
            self.data,
            self.take,
            names,
            schedule=self.schedule,
            before_pass=self.before_pass,
        )
        self.done: list[int] = []
        self.skipped: list[int] = []
        self.losses: dict[int, float] = {}

    def forward_backward(self, batches: Batches) -> torch.Tensor:
        self.checks.begin()
        self.gradients.zero_()
        total = torch.zeros(())
        for number, batch in enumerate(batches[0]):
            noise = torch.rand((), generator=self.generator) if self.generator is not None else 0.0
            loss = (self.model(batch["x"]) - 1 + noise).square().mean() * self.factor
            self.checks.loss(number, loss.detach())
            (loss / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / NUM_MICROBATCHES
        self.gradients.reduce(self.checks.norm)
        self.checks.judge()
        return total

    def take(self) -> Batches:
        batches = [next(self.data) for _ in range(NUM_MICROBATCHES)]
        self.seen.append(float(batches[0]["x"][0, 0]))
        return [batches]

    def schedule(self, iteration: int) -> None:
        if self.decay is not None:
            self.decay.set(0.01 * iteration)

    def before_pass(self, iteration: int, number: int, batches: Batches) -> None:
        if (iteration, number) == self.fails_at:
            self.fails_at = None
            raise OSError("the program has failed")
        self.passes.append((iteration, number))
        self.factor.fill_(self.strikes(iteration, number))

    def run(self, last: int, settles_at: tuple[int, ...] = ()) -> Exit:
        torch.manual_seed(1)
        for iteration in range(1, last + 1):
            if self.note(self.step.run(iteration, 0.1 / iteration)).should_exit:
                return self.exit
            if iteration in settles_at and self.note(self.step.settle()).should_exit:
                return self.exit
        return self.note(self.step.settle())

    def note(self, report: StepReport) -> Exit:
        for one in report.settled:
            self.done.append(one.iteration)
            if one.skipped:
                self.skipped.append(one.iteration)
            elif one.loss is not None:
                self.losses[one.iteration] = one.loss
        self.exit = report.exit
        return report.exit

    def go_on(self, last: int) -> Exit:
        """As `run`, from where it stands."""
        for iteration in range(max(self.done, default=0) + 1, last + 1):
            if self.note(self.step.run(iteration, 0.1 / iteration)).should_exit:
                return self.exit
        return self.note(self.step.settle())

    def state(self) -> list[torch.Tensor]:
        """All that an iteration changes, copied."""
        found = [value for value in self.model.state_dict().values()]
        found += [value for state in self.optimizer.state.values() for value in state.values()]
        generators = [self.generator.get_state()] if self.generator is not None else []
        return [value.clone() for value in found] + generators + [torch.get_rng_state()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> Loop:
    loop = Loop()
    assert not loop.run(8).should_exit and len(loop.passes) == 8
    return loop


def test_an_undisturbed_run_computes_each_iteration_once(undisturbed: Loop) -> None:
    assert undisturbed.done == list(range(1, 9))
    assert undisturbed.seen == pytest.approx([0.1 + 0.2 * i for i in range(8)])
    eager = Loop()
    eager.run(8, settles_at=tuple(range(1, 9)))
    assert equal(eager.state(), undisturbed.state()), "reading late changes nothing"


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_transient_fault_leaves_no_trace(undisturbed: Loop, at: int, factor: float) -> None:
    """In the warm-up, in the capture, in replays, and in the last iteration, which nothing follows."""
    loop = Loop(once(at, factor))
    assert not loop.run(8).should_exit
    assert loop.done == undisturbed.done and loop.losses == undisturbed.losses
    assert equal(loop.state(), undisturbed.state())
    report = loop.rerun.last_report
    assert report is not None and report.verdict == "transient" and report.iteration == at


def test_two_faults_in_a_row_leave_no_trace(undisturbed: Loop) -> None:
    struck: set[int] = set()

    def strikes(iteration: int, number: int) -> float:
        if iteration not in (4, 5) or iteration in struck or (iteration == 5 and 4 not in struck):
            return 1.0
        struck.add(iteration)
        return math.nan

    loop = Loop(strikes)
    assert not loop.run(8).should_exit
    assert loop.done == undisturbed.done and equal(loop.state(), undisturbed.state())


def test_a_fault_that_stays_ends_the_attempt_with_parameters_as_before_it(tmp_path: Path) -> None:
    loop = Loop(always(5), folder=tmp_path)
    assert loop.run(8) == Exit(True, True, 16)
    assert loop.done == [1, 2, 3, 4]
    before = Loop()
    before.run(4)
    # the generator may have been used by the replays; parameters, statistics and moments are those of four iterations
    assert equal(loop.state()[:-1], before.state()[:-1])
    kept = loop.rerun.state_dict()
    assert kept["pending"] is not None
    assert [float(batch["x"][0, 0]) for batch in loop.data.not_consumed()] == pytest.approx([0.9, 1.0, 1.1, 1.2])


def test_without_reruns_a_fault_raises_and_nothing_is_updated() -> None:
    loop = Loop(always(5), mode=RerunMode.DISABLED)
    before = Loop(mode=RerunMode.DISABLED)
    before.run(4)
    with pytest.raises(RuntimeError, match="NaN in loss"):
        loop.run(8)
    parameters = [parameter.detach() for parameter in loop.model.parameters()]
    assert equal(parameters, [parameter.detach() for parameter in before.model.parameters()])


def test_the_end_of_the_data_comes_before_anything_of_the_iteration(undisturbed: Loop) -> None:
    loop = Loop(length=16)
    loop.run(8)
    with pytest.raises(StopIteration):
        loop.step.run(9, 0.1)
    assert equal(loop.state(), undisturbed.state())


@pytest.mark.parametrize("strikes", [healthy, once(5), once(6), always(5)])
def test_a_launch_that_fails_has_not_begun(undisturbed: Loop, strikes: Strikes) -> None:
    """The iteration before it is judged, and rerun, on its own data; the failed one then begins again with its own."""
    loop = Loop(strikes)
    loop.fails_at = (6, 1)
    with pytest.raises(OSError, match="has failed"):
        loop.run(8)
    assert loop.done == [1, 2, 3, 4]
    report = loop.step.settle()
    assert loop.note(report).should_exit == (strikes(5, 2) != 1.0)
    if report.exit.should_exit:
        assert loop.done == [1, 2, 3, 4] and loop.seen[-1] == pytest.approx(0.9), "iteration 5 was replayed on other data"
        return
    assert loop.done == [1, 2, 3, 4, 5]
    assert not loop.go_on(8).should_exit
    assert loop.losses == undisturbed.losses and equal(loop.state(), undisturbed.state())


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize(("fails_at", "done"), [((5, 2), [1, 2, 3, 4]), ((1, 1), []), ((6, 1), [1, 2, 3, 4])])
def test_a_loop_may_try_again_after_an_exception(
    undisturbed: Loop, fails_at: tuple[int, int], done: list[int], settles: bool
) -> None:
    """In the rerun of a rejected iteration, in the first of a run, and in the launch behind a rejected one."""
    loop = Loop(once(5))
    loop.fails_at = fails_at
    with pytest.raises(OSError, match="has failed"):
        loop.run(8)
    assert loop.done == done
    if settles:
        loop.note(loop.step.settle())
        begin = max(loop.done, default=0) + 1
    else:
        begin = 6 if fails_at != (1, 1) else 1  # what the loop was at
    for iteration in range(begin, 9):
        assert not loop.note(loop.step.run(iteration, 0.1 / iteration)).should_exit
    assert not loop.note(loop.step.settle()).should_exit
    assert loop.done == undisturbed.done and loop.losses == undisturbed.losses
    assert equal(loop.state(), undisturbed.state())


@pytest.mark.parametrize(("at", "strikes"), [(1, healthy), (6, healthy), (6, once(5)), (6, once_launched(6))])
def test_an_update_that_fails(undisturbed: Loop, at: int, strikes: Strikes) -> None:
    """Behind another iteration nothing has changed, and it may be tried again; in one that is run to its end nobody knows."""
    loop = Loop(strikes)
    update = loop.step._optimizer

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(update, name)

        def step(self) -> Any:
            loop.step._optimizer = update
            raise OSError("the update has failed")

    for iteration in range(1, at):
        if iteration == 1:
            torch.manual_seed(1)
        loop.note(loop.step.run(iteration, 0.1 / iteration))
    loop.step._optimizer = Failing()  # type: ignore[assignment]
    with pytest.raises(OSError, match="has failed"):
        loop.step.run(at, 0.1 / at)
    if at == 1:
        with pytest.raises(GraphError, match=r"update of iteration 1 has failed .*OSError.*; go on from a checkpoint"):
            loop.step.run(1, 0.1)
        return
    for iteration in range(at, 9):
        loop.note(loop.step.run(iteration, 0.1 / iteration))
    loop.note(loop.step.settle())
    assert loop.done == undisturbed.done and equal(loop.state(), undisturbed.state())


def test_an_audited_iteration_may_be_tried_again() -> None:
    loop, same = (Loop(mode=RerunMode.REPORT_DETERMINISM_STATS) for _ in range(2))
    loop.fails_at = (3, 2)
    with pytest.raises(OSError, match="has failed"):
        loop.run(5)
    assert loop.done == [1, 2] and not loop.go_on(5).should_exit
    same.run(5)
    assert loop.losses == same.losses and equal(loop.state(), same.state())


@pytest.mark.parametrize("length", [12, 13])
def test_a_fault_in_the_last_iteration_before_the_data_end(length: int) -> None:
    """At the end of an iteration, or in the middle of the next."""
    loop, same = Loop(once(6), length=length), Loop()
    with pytest.raises(StopIteration):
        loop.run(8)
    assert not loop.note(loop.step.settle()).should_exit
    same.run(6)
    assert loop.done == [1, 2, 3, 4, 5, 6] and loop.losses == same.losses
    assert equal(loop.state(), same.state())
    report = loop.rerun.last_report
    assert report is not None and report.verdict == "transient"


def test_what_follows_the_iteration_follows_it_into_a_rerun() -> None:
    """A scheduled weight decay, and a generator that only the graph was told of."""
    loop = Loop(once(5), decays=True, generator=torch.Generator().manual_seed(3))
    same = Loop(decays=True, generator=torch.Generator().manual_seed(3))
    assert not loop.run(8).should_exit and not same.run(8).should_exit
    assert loop.losses == same.losses and equal(loop.state(), same.state())


def test_what_only_the_devices_rule_rejects_is_computed_once_more(undisturbed: Loop) -> None:
    """The host's rules have the last word, on the values of a pass whose gradients are used."""
    loop = Loop()
    limits = loop.checks._limits.clone()

    def doubtful(iteration: int, number: int) -> float:
        strict = iteration == 4 and loop.passes.count((4, 1)) == 1
        loop.checks._limits.copy_(torch.zeros_like(limits) if strict else limits)
        return 1.0

    loop.strikes = doubtful
    assert not loop.run(8).should_exit
    assert loop.passes.count((4, 1)) == 2 and loop.rerun.last_report is None
    assert loop.losses == undisturbed.losses and equal(loop.state(), undisturbed.state())


def test_without_reruns_a_large_loss_is_warned_of_and_changes_nothing() -> None:
    loop = Loop(once(52, 1e6), length=130, mode=RerunMode.DISABLED, check_for_spiky_loss=True)
    with pytest.warns(RuntimeWarning, match="unexpectedly large loss at iteration 52"):
        assert not loop.run(54).should_exit
    assert loop.done == list(range(1, 55)) and len(loop.passes) == 54


def test_a_skipped_iteration_takes_its_data_only() -> None:
    loop = Loop()
    for iteration in range(1, 7):
        loop.note(loop.step.skip(iteration) if iteration == 4 else loop.step.run(iteration, 0.1))
    loop.note(loop.step.settle())
    assert loop.done == [1, 2, 3, 4, 5, 6] and loop.skipped == [4]
    assert [iteration for iteration, _ in loop.passes] == [1, 2, 3, 5, 6]


def test_a_large_loss_that_comes_once_is_replayed_and_not_learned(undisturbed: Loop) -> None:
    many = 52  # the 100 values of a baseline come from 50 iterations
    loop = Loop(once(many, 1e6), length=130, check_for_spiky_loss=True)
    same = Loop(length=130, check_for_spiky_loss=True)
    assert not loop.run(54).should_exit and not same.run(54).should_exit
    assert (many, 2) in loop.passes and len(same.passes) == 54
    assert loop.losses == same.losses and equal(loop.state(), same.state())
    assert loop.rerun.large_values.state_dict() == same.rerun.large_values.state_dict()
