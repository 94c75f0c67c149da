"""The rerun machine in a loop of one process: what the loop sees, what a checkpoint holds, and how another device decides."""

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rsup.worker.rerun.contract import Exit, RankDevice, RerunConfig, RerunError, RerunMode, RerunState
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine

NAN = math.nan
GO_ON = Exit(False, False, 0)
Corrupt = Callable[[torch.Tensor, "Loop"], torch.Tensor]


def healthy(loss: torch.Tensor, loop: "Loop") -> torch.Tensor:
    return loss


def once(iteration: int) -> Corrupt:
    """A transient fault: NaN in the first pass of that iteration."""

    def corrupt(loss: torch.Tensor, loop: "Loop") -> torch.Tensor:
        return loss * NAN if loop.number == iteration and loop.rerun.state is RerunState.INITIAL_RUN else loss

    return corrupt


def on_device(uuid: str, iteration: int) -> Corrupt:
    """A persistent fault of a device from that iteration on."""

    def corrupt(loss: torch.Tensor, loop: "Loop") -> torch.Tensor:
        return loss * NAN if loop.number >= iteration and loop.device == uuid else loss

    return corrupt


def in_data(iteration: int) -> Corrupt:
    """The iteration's data give NaN wherever they are computed."""

    def corrupt(loss: torch.Tensor, loop: "Loop") -> torch.Tensor:
        return loss * NAN if loop.number == iteration else loss

    return corrupt


class Loop:
    """A training loop with dropout and a loader; `run` returns the iteration at which it left, 0 at the end."""

    def __init__(self, corrupt: Corrupt = healthy, device: str = "GPU-a", folder: Path | None = None, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.device, self.corrupt, self.number, self.passes = device, corrupt, 0, 0
        self.rerun = RerunStateMachine(RerunConfig(**config), device=RankDevice(device), ledger_folder=folder)
        self.rerun.attach(self.model, self.optimizer)
        self.data = RerunDataIterator([{"x": torch.full((2, 4), float(i + 1)) / 10} for i in range(20)])
        self.exit = GO_ON
        self.skipped: list[int] = []
        self.seen: list[float] = []

    def run(self, last: int = 6) -> int:
        while self.number < last:
            self.number += 1
            self.step()
            self.exit = self.rerun.should_checkpoint_and_exit()
            if self.exit.should_exit:
                return self.number
            if self.rerun.skip_step:
                self.skipped.append(self.number)
            else:
                self.optimizer.step()
        return 0

    def step(self) -> None:
        while self.rerun.should_run_forward_backward(self.data, self.number):
            self.passes += 1
            self.optimizer.zero_grad()
            x = next(self.data)["x"]
            self.seen.append(float(x[0, 0]))
            x.mul_(2)  # the loop changes its batch in place
            loss = self.corrupt(self.model(x).square().mean(), self)
            self.rerun.validate_loss(loss)
            loss.mul(0.5).backward()  # type: ignore[no-untyped-call]

    def checkpoint(self) -> dict[str, Any]:
        """What the next attempt loads, through bytes and without pickled classes."""
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "rng": torch.get_rng_state(), "rerun": self.rerun.state_dict()}
        torch.save(state | {"iteration": self.number - 1}, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def resume(self, checkpoint: dict[str, Any]) -> str:
        self.model.load_state_dict(checkpoint["model"])
        said = self.rerun.load_state_dict(checkpoint["rerun"])
        self.number = checkpoint["iteration"]
        self.data = RerunDataIterator([{"x": torch.full((2, 4), float(i + 1)) / 10} for i in range(self.number, 20)])
        torch.set_rng_state(checkpoint["rng"])
        return said

    def weights(self) -> list[float]:
        return [float(value) for parameter in self.model.parameters() for value in parameter.detach().flatten()]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    loop = Loop()
    assert loop.run() == 0 and loop.passes == 6
    return loop.weights()


def test_a_transient_fault_leaves_no_trace(undisturbed: list[float]) -> None:
    """S4, S13, S15, P5, H3: replayed with pristine data and dropout, also in the first iteration of a process."""
    for iteration in (1, 4):
        loop = Loop(once(iteration))
        assert loop.run() == 0 and loop.passes == 7
        assert loop.weights() == undisturbed


def test_a_transient_fault_can_end_the_attempt_without_a_checkpoint() -> None:
    """S3: exit before the step, parameters as before it."""
    loop = Loop(once(3), on_transient="restart")
    assert loop.run() == 3 and loop.exit == Exit(False, True, 17)
    same = Loop()
    same.run(2)
    assert loop.weights() == same.weights()


def test_one_rank_asks_for_another_device_and_that_decides(undisturbed: list[float], tmp_path: Path) -> None:
    """S5, P6, P17: the same batch on another device; a persistent fault is off the device, and training goes on there."""
    first = Loop(on_device("GPU-a", 4), folder=tmp_path)
    assert first.run() == 4 and first.exit == Exit(True, True, 16)
    asked = first.checkpoint()
    second = Loop(on_device("GPU-a", 4), device="GPU-b", folder=tmp_path)
    assert second.resume(asked) == ""
    assert second.run() == 0
    assert second.weights() == undisturbed
    assert second.seen == [pytest.approx(0.4), pytest.approx(0.5), pytest.approx(0.6)]
    verdicts = [json.loads(line)["verdict"] for line in (tmp_path / "rerun-verdicts.jsonl").read_text().splitlines()]
    assert verdicts == ["persistent"]


def test_a_verdict_is_final(undisturbed: list[float], tmp_path: Path) -> None:
    """P17: the checkpoint still asks for a rerun of a case that has its verdict: it is not replayed as one again."""
    first = Loop(on_device("GPU-a", 4), folder=tmp_path)
    first.run()
    asked = first.checkpoint()
    for _ in range(2):  # the second time from the same checkpoint, as after a crash right after the verdict
        second = Loop(on_device("GPU-a", 4), device="GPU-b", folder=tmp_path)
        second.resume(asked)
        assert second.run() == 0 and second.weights() == undisturbed
    assert len((tmp_path / "rerun-verdicts.jsonl").read_text().splitlines()) == 1


def test_bad_data_are_the_applications(tmp_path: Path) -> None:
    """S6: the same comes out on the other device: exit 17, or the iteration is skipped."""
    first = Loop(in_data(4), folder=tmp_path)
    assert first.run() == 4 and first.exit == Exit(True, True, 16)
    asked = first.checkpoint()
    second = Loop(in_data(4), device="GPU-b")
    second.resume(asked)
    assert second.run() == 4 and second.exit == Exit(False, True, 17)
    third = Loop(in_data(4), device="GPU-b", on_application="skip")
    third.resume(asked)
    assert third.run() == 0 and third.skipped == [4]


def test_the_same_device_again_computes_nothing_and_asks_again() -> None:
    """S7: as often as it happens; who counts is the supervisor."""
    first = Loop(on_device("GPU-a", 4))
    first.run()
    again = Loop(on_device("GPU-a", 4))
    again.resume(first.checkpoint())
    assert again.run() == 4 and again.exit == Exit(False, True, 16) and again.passes == 0
    with pytest.raises(RerunError, match="must not go on"):
        again.step()


def test_what_no_longer_fits_is_ignored_with_a_word() -> None:
    """S8, S9, P42, P43: another number of ranks, mode disabled, another version, damage."""
    first = Loop(on_device("GPU-a", 4))
    first.run()
    asked = first.checkpoint()["rerun"]
    assert "sharding" in Loop().rerun.load_state_dict(asked | {"world_size": 2})
    assert "disabled" in Loop(mode=RerunMode.DISABLED).rerun.load_state_dict(asked)
    assert "version" in Loop().rerun.load_state_dict(asked | {"pending": asked["pending"] | {"version": 9}})
    assert "damaged" in Loop().rerun.load_state_dict(asked | {"pending": {"version": 1}})
    assert Loop().rerun.load_state_dict({"world_size": 1}) == ""


def test_a_steady_checkpoint_has_the_same_form_and_asks_for_nothing(undisturbed: list[float]) -> None:
    """S20, H2, P14: the form does not depend on what happened."""
    loop = Loop()
    loop.run(3)
    loop.number += 1
    steady = loop.checkpoint()
    loop.number = 3
    asking = Loop(on_device("GPU-a", 2))
    asking.run()
    assert steady["rerun"].keys() == asking.checkpoint()["rerun"].keys() and steady["rerun"]["pending"] is None
    second = Loop()
    second.resume(steady)
    assert second.run() == 0 and second.weights() == undisturbed


def test_skipping_the_iteration_drops_the_rerun_that_asks_for_it() -> None:
    """P17, S23."""
    first = Loop(in_data(4))
    first.run()
    second = Loop(in_data(4), device="GPU-b")
    second.resume(first.checkpoint())
    second.rerun.drop_pending(4)
    next(second.data)
    second.number = 4
    assert second.run() == 0 and second.passes == 2


def test_disabled_raises_for_a_fatal_check_and_warns_for_another(tmp_path: Path) -> None:
    """S1, S2, H5."""
    name = str(tmp_path / "rejected")
    loop = Loop(in_data(2), mode=RerunMode.DISABLED, result_rejected_tracker_filename=name)
    with pytest.raises(RuntimeError, match="NaN in loss at iteration 2"):
        loop.run()
    (line,) = [json.loads(line) for line in Path(name + ".rank0000.jsonl").read_text().splitlines()]
    assert (line["status"], line["iteration"], line["phase"]) == ("RERUN_DISABLED", 2, "train")
    other = Loop(mode=RerunMode.DISABLED)
    other.rerun.should_run_forward_backward(other.data, 1)
    with pytest.warns(RuntimeWarning, match="too warm"):
        other.rerun.validate_result(1.0, lambda value: value > 0, "too warm", fatal=False)


def test_evaluation_is_apart(tmp_path: Path) -> None:
    """S24, P15, P16: a NaN in an evaluation warns, marks no training iteration; an exception leaves the machine as it was."""
    name = str(tmp_path / "rejected")
    loop = Loop(result_rejected_tracker_filename=name, check_for_spiky_loss=True)
    loop.run(2)
    with pytest.warns(RuntimeWarning), loop.rerun.evaluation():
        loop.rerun.validate_loss(torch.tensor(NAN))
    with pytest.raises(KeyError), loop.rerun.evaluation():
        raise KeyError
    (line,) = [json.loads(line) for line in Path(name + ".rank0000.jsonl").read_text().splitlines()]
    assert line["phase"] == "eval"
    loop.corrupt = once(3)
    assert loop.run() == 0 and loop.passes == 7


def test_findings_of_one_iteration_do_not_reach_the_next() -> None:
    """P8, S12: a check that is not fatal failed in iteration 2; iteration 4 has a fatal one on its own."""
    loop = Loop(once(4))
    large = iter([False, True, True, False, False, False, False, False])

    def step() -> None:
        while loop.rerun.should_run_forward_backward(loop.data, loop.number):
            loop.passes += 1
            loop.optimizer.zero_grad()
            loss = loop.corrupt(loop.model(next(loop.data)["x"]).square().mean(), loop)
            loop.rerun.validate_loss(loss)
            loop.rerun.validate_result(loss, lambda _: next(large), "too warm", fatal=False)
            loss.backward()  # type: ignore[no-untyped-call]

    loop.step = step  # type: ignore[method-assign]
    assert loop.run() == 0 and loop.passes == 8


@pytest.mark.parametrize(
    "bad", [torch.ones(2), torch.ones((), dtype=torch.int64), None, 3, True, torch.ones((), dtype=torch.cfloat)]
)
def test_only_floating_scalars_can_be_validated(bad: Any) -> None:
    loop = Loop()
    assert loop.rerun.should_run_forward_backward(loop.data, 1)
    with pytest.raises(RerunError, match="result to validate"):
        loop.rerun.validate_result(bad, math.isnan, "bad")


def test_misuse_is_told_in_one_line() -> None:
    loop = Loop()
    with pytest.raises(RerunError, match="outside of an iteration"):
        loop.rerun.validate_loss(torch.ones(()))
    with pytest.raises(RerunError, match="wrap it once"):
        loop.rerun.should_run_forward_backward([iter([1])], 1)  # type: ignore[list-item]

    def breaks(value: float) -> bool:
        raise ZeroDivisionError("division by zero")

    loop = Loop()
    loop.rerun.should_run_forward_backward(loop.data, 1)
    loop.rerun.validate_result(1.0, breaks, "mine")
    with pytest.raises(RerunError, match="'mine' raised ZeroDivisionError"):
        loop.rerun.should_run_forward_backward(loop.data, 1)


def test_a_comparison_that_proves_nothing_is_no_match() -> None:
    """P12: NaN from a comparison function is not "reproducible": the case then is transient, the replay being clean."""
    loop = Loop()
    values = iter([5.0, 1.0])

    def step() -> None:
        while loop.rerun.should_run_forward_backward(loop.data, loop.number):
            next(loop.data)
            loop.passes += 1
            loop.rerun.validate_result(next(values), lambda value: value > 2, "mine", comparison_func=lambda a, b: NAN)

    loop.step = step  # type: ignore[method-assign]
    assert loop.run(1) == 0 and loop.passes == 2


def test_a_replay_that_makes_other_checks_proves_nothing() -> None:
    """A check in another order is found by its name; one that is missing leaves the case undecided."""
    for names, left in ((["b", "a"], 0), (["b"], 1)):
        loop = Loop()
        passes = iter([["a", "b"], names])

        def step(loop: Loop = loop, passes: Iterator[list[str]] = passes) -> None:
            while loop.rerun.should_run_forward_backward(loop.data, loop.number):
                next(loop.data)
                first = loop.rerun.state is RerunState.INITIAL_RUN
                for name in next(passes):
                    loop.rerun.validate_result(NAN if first and name == "a" else 1.0, math.isnan, name)

        loop.step = step  # type: ignore[method-assign]
        assert loop.run(1) == left
        assert loop.exit.exit_code == (17 if left else 0)


def test_data_that_end_in_the_middle_lose_nothing() -> None:
    loop = Loop()
    loop.data = RerunDataIterator([{"x": torch.ones(2, 4)}])
    assert loop.run(1) == 0
    with pytest.raises(StopIteration):
        loop.run(2)
    loop.data = RerunDataIterator([{"x": torch.ones(2, 4)}] * 3)
    assert loop.run(4) == 0


def test_statistics_run_every_iteration_twice(capfd: pytest.CaptureFixture[str], undisturbed: list[float]) -> None:
    """S19, P1, P7: reachable by both names, the second pass's gradients are used, and equal passes are equal."""
    loop = Loop(mode=RerunMode.REPORT_DETERMINISM_STATS)
    assert loop.run() == 0 and loop.passes == 12 and loop.weights() == undisturbed
    loop.rerun.report_statistics()
    said = capfd.readouterr().err
    assert "determinism of 'loss': 6 samples, all identical" in said and "grad norm" in said
    loop.rerun.report_statistics()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("kind", "left"), [("transient_error", 0), ("persistent_error", 16), ("correct_result", 16)])
def test_injected_errors_take_the_way_of_real_ones(kind: str, left: int) -> None:
    """F3, F4, F5, P37: nothing is drawn from the training's generators, and the fake travels with the checkpoint."""
    loop = Loop(error_injection_rate=8, error_injection_type=kind)
    loop.run()
    assert loop.exit.exit_code == left
    if not left:
        return
    second = Loop(device="GPU-b", error_injection_type=kind)
    second.resume(loop.checkpoint())
    second.run()
    assert second.exit.exit_code == (17 if kind == "correct_result" else 0)


def test_batches_of_the_iteration_come_back_with_a_checkpoint_of_a_verdict() -> None:
    """S14: a loader with a position of its own stands behind the batches that were drawn: they are played first, once."""

    class OwnPosition:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> "OwnPosition":
            return self

        def __next__(self) -> dict[str, torch.Tensor]:
            self.position += 1
            return {"x": torch.full((2, 4), float(self.position)) / 10}

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    first = Loop(on_device("GPU-a", 4))
    first.data = RerunDataIterator(OwnPosition())
    first.run()
    second = Loop(on_device("GPU-a", 4), device="GPU-b")
    second.resume(first.checkpoint())
    second.data = RerunDataIterator(OwnPosition())
    assert second.run() == 0
    assert second.seen == [pytest.approx(0.4), pytest.approx(0.5), pytest.approx(0.6)]


def test_spoiled_parameters_are_neither_the_datas_fault_nor_saved() -> None:
    """One rank has no replica to compare with; a NaN in a parameter is there before the iteration: reload, no checkpoint."""
    loop = Loop()
    loop.run(3)
    next(loop.model.parameters()).data[0, 0] = NAN
    assert loop.run() == 4 and loop.exit == Exit(False, True, 17)
    report = loop.rerun.last_report
    assert report is not None and (report.verdict, report.action) == ("corrupted state", "restart")


def test_skipping_ends_when_every_iteration_is_bad() -> None:
    """Also across restarts: the count is in the checkpoint."""

    def always(loss: torch.Tensor, loop: Loop) -> torch.Tensor:
        return loss * NAN if loop.number >= 2 else loss

    loop = Loop(always, on_application="skip")
    devices = iter("bcdefgh")
    left = loop.run()
    while loop.exit.exit_code == 16:
        asked = loop.checkpoint()
        loop = Loop(always, device=f"GPU-{next(devices)}", on_application="skip")
        loop.resume(asked)
        left = loop.run()
    assert (left, loop.exit) == (4, Exit(False, True, 17))


def test_another_ranks_state_is_refused() -> None:
    first = Loop(on_device("GPU-a", 4))
    first.run()
    asked = first.checkpoint()["rerun"]
    assert "another rank's" in Loop().rerun.load_state_dict(asked | {"rank": 1})


# ------------------------------------------------------------------------ loaders that draw from the process's own generators


class Augmented(Loop):
    """Each batch gets noise, in this process, from the generator that dropout uses."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.data = self.loader(0)

    def loader(self, first: int) -> RerunDataIterator:
        return RerunDataIterator(self.noisy(i) for i in range(first, 20))

    def noisy(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2, 4), float(i + 1)) / 10 + 0.1 * torch.randn(2, 4)}

    def resume(self, checkpoint: dict[str, Any]) -> str:
        said = super().resume(checkpoint)
        self.data = self.loader(self.number)
        return said


class Shuffled(Augmented):
    """An epoch takes three iterations, and a loader that shuffles takes a seed where one begins: at iterations 1 and 4."""

    def loader(self, first: int) -> RerunDataIterator:
        def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"x": torch.stack(rows)}

        def epochs() -> Iterator[dict[str, torch.Tensor]]:
            while True:
                yield from DataLoader(torch.rand(6, 4), batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

        return RerunDataIterator(epochs())


@pytest.mark.parametrize("kind", [Augmented, Shuffled])
def test_a_fault_leaves_no_trace_where_the_loader_draws_too(kind: type[Augmented]) -> None:
    plain = kind()
    assert plain.run() == 0
    rng = torch.get_rng_state()
    for iteration in (1, 4, 5):
        loop = kind(once(iteration))
        assert loop.run() == 0 and loop.passes == 7
        assert loop.weights() == plain.weights() and torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("kind", [Augmented, Shuffled])
@pytest.mark.parametrize("mode", ["persistent", "application"])
def test_a_device_is_told_from_the_data_where_the_loader_draws_too(kind: type[Augmented], mode: str, tmp_path: Path) -> None:
    """The replay from the checkpoint draws the same dropout: values that had been healthy come out the same."""
    plain = kind()
    plain.run(4)
    rng = torch.get_rng_state()

    def corrupt(loss: torch.Tensor, loop: Loop) -> torch.Tensor:
        loop.rerun.validate_result(loss, math.isnan, "another value, which is healthy")
        strikes = loop.number == 4 and (mode == "application" or loop.device == "GPU-a")
        return loss * NAN if strikes else loss

    first = kind(corrupt, folder=tmp_path)
    assert first.run() == 4 and first.exit == Exit(True, True, 16)
    asked = first.checkpoint()
    second = kind(corrupt, device="GPU-b", folder=tmp_path)
    second.resume(asked)
    second.run(4)
    report = second.rerun.last_report
    assert report is not None and report.verdict == mode, report
    if mode == "persistent":
        assert second.weights() == plain.weights() and torch.equal(torch.get_rng_state(), rng)


def test_a_loader_that_is_placed_by_the_loop_draws_nothing_while_it_is_moved_on(tmp_path: Path) -> None:
    plain = Augmented()
    plain.run()
    first = Augmented(on_device("GPU-a", 4), folder=tmp_path)
    first.run()
    second = Augmented(on_device("GPU-a", 4), device="GPU-b", folder=tmp_path)
    second.resume(first.checkpoint())
    assert second.run() == 0 and second.weights() == plain.weights()


def test_a_checkpoint_of_a_release_that_kept_no_draws_is_read() -> None:
    first = Augmented(on_device("GPU-a", 4))
    first.run()
    asked = first.checkpoint()
    for state in asked["rerun"]["pending"]["iterators"]:
        assert [sorted(batch) for batch in state["batches"]] == [["batch", "rng"]]
        for batch in state["batches"]:
            del batch["rng"]
    second = Augmented(on_device("GPU-a", 4), device="GPU-b")
    second.resume(asked)
    assert second.run() == 0 and second.number == 6
