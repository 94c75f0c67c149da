"""The failing iteration of a case as a file, its replay by a training script's own loop, and what replays prove."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.device_test import replay as device_replay
from rsup.worker.device_test.replay import ReplayedDevice, add_replays, replay_command, steps_of
from rsup.worker.device_test.replay_judging import judge_replays
from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, DeviceReport
from rsup.worker.rerun import RerunDataIterator, RerunStateMachine, kept_step, replay_case, replayed_program, step_keeper
from rsup.worker.rerun.case_replay import replayed_checkpoint
from rsup.worker.rerun.contract import Exit, RankDevice, RerunConfig, RerunError
from rsup.worker.rerun.kept_step import MAX_CASES, case_folder, prune, read_step
from rsup.worker.rerun.replay_order import VARIABLE, Reference, ReplayAnswer, ReplayOrder, StepPass


class Loop:
    """A loop with dropout and an own generator, on `device`; GPU-bad gives NaN from iteration 3 on."""

    def __init__(self, device: str, folder: Path | None = None, iterators: int = 1, ends_at: int = 20, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rerun = RerunStateMachine(RerunConfig(**config), device=RankDevice(device, model="M"), ledger_folder=folder)
        self.rerun.attach(self.model, self.optimizer)
        self.rerun.program["width"] = 4
        self.noise = torch.Generator().manual_seed(3)
        self.rerun.replay_state.register_generator("noise", self.noise)
        self.data = [RerunDataIterator([torch.full((2, 4), i / 10) for i in range(1, ends_at)]) for _ in range(iterators)]
        self.device, self.number, self.losses = device, 0, list[float]()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        batch = next(self.data[0])
        noise = torch.rand((), generator=self.noise)
        loss = self.model(batch.mul_(2)).square().mean() + noise
        if self.device == "GPU-bad" and self.number in (0, 3):
            loss = loss * math.nan
        self.losses.append(float(loss.detach()))
        self.rerun.validate_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def run(self, last: int = 5) -> Exit:
        while self.number < last:
            self.number += 1
            while self.rerun.should_run_forward_backward(self.data, self.number):
                self.forward_backward()
            leave = self.rerun.should_checkpoint_and_exit()
            if leave.should_exit:
                return leave
            self.optimizer.step()
        return Exit(False, False, 0)


@pytest.fixture
def ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Orders a replay of a step from this process; the call returns the answer's reader."""

    def order(step: Path, uuid: str = "GPU-good") -> Path:
        answer = tmp_path / "answer.json"
        wanted = ReplayOrder(step=str(step), answer=str(answer), uuid=uuid, model="M")
        monkeypatch.setenv(VARIABLE, msgspec.json.encode(wanted).decode())
        return answer

    yield order


def read(answer: Path) -> ReplayAnswer:
    return msgspec.json.decode(answer.read_bytes(), type=ReplayAnswer)


def test_a_step_is_kept_and_another_device_computes_just_that(tmp_path: Path, ordered: Any) -> None:
    """S5: one rank fails, nobody can decide; its data, parameters, dropout and registered generator come back elsewhere."""
    failed = Loop("GPU-bad", tmp_path)
    assert failed.run().exit_code == 16
    report = failed.rerun.last_report
    assert report is not None and report.checkpoint == str(case_folder(tmp_path, report.case_id))
    (path,) = steps_of(report.checkpoint)
    step = read_step(path)
    assert (step.iteration, step.rank, step.verdict, step.device.uuid) == (3, 0, "", "GPU-bad")
    assert math.isnan(step.flagged["loss"]) and step.reference == {}

    undisturbed = Loop("GPU-good")
    undisturbed.run(3)
    other = Loop("GPU-good")
    assert not replay_case(other.rerun, other.data, other.forward_backward) and replayed_program() is None
    answer = ordered(path)
    assert replayed_program() == {"width": 4}
    assert replay_case(other.rerun, other.data, other.forward_backward)
    said = read(answer)
    assert said.problem == "" and not any(one.rejected for one in said.passes)
    assert other.losses == [undisturbed.losses[2]] * 3, "the undisturbed run's third loss, bit for bit, each time"

    bad = Loop("GPU-bad")
    assert replay_case(bad.rerun, bad.data, bad.forward_backward)
    assert [list(one.rejected) for one in read(answer).passes] == [["loss", "grad norm of bucket 0"]] * 3
    results = judge_replays({"GPU-bad": read(answer), "GPU-good": said})
    assert (results["GPU-bad"].outcome, results["GPU-good"].outcome) == (FAILED, SKIPPED)


def test_a_step_is_repeated_with_what_its_loader_had_drawn(tmp_path: Path, ordered: Any) -> None:
    """Noise from the generator that dropout uses: it is in the batch, and out of the generator."""

    def noisy(loop: Loop) -> Loop:
        loop.data = [RerunDataIterator(torch.full((2, 4), i / 10) + torch.randn(2, 4) for i in range(1, 20))]
        return loop

    failed = noisy(Loop("GPU-bad", tmp_path))
    assert failed.run().exit_code == 16 and failed.rerun.last_report is not None
    undisturbed = noisy(Loop("GPU-good"))
    undisturbed.run(3)
    other = noisy(Loop("GPU-good"))
    ordered(steps_of(failed.rerun.last_report.checkpoint)[0])
    assert replay_case(other.rerun, other.data, other.forward_backward)
    assert other.losses == [undisturbed.losses[2]] * 3


def test_what_a_replay_refuses(tmp_path: Path, ordered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model, other iterators, a damaged file, no parameters: one sentence in the answer."""
    failed = Loop("GPU-bad", tmp_path)
    failed.run()
    assert failed.rerun.last_report is not None
    (path,) = steps_of(failed.rerun.last_report.checkpoint)

    def problem(loop: Loop, step: Path = path) -> str:
        answer = ordered(step)
        assert replay_case(loop.rerun, loop.data, loop.forward_backward)
        return read(answer).problem

    assert "the batches of 1 iterators, the program hands in 2" in problem(Loop("GPU-good", iterators=2))
    other = Loop("GPU-good")
    other.rerun.attach(torch.nn.Linear(1, 1))
    assert "parameter bias of module 1 is not in both" in problem(other)
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:-100])
    assert "cut.pt cannot be read" in problem(Loop("GPU-good"), tmp_path / "cut.pt")
    torch.save({"format": 99}, tmp_path / "new.pt")
    assert "another release" in problem(Loop("GPU-good"), tmp_path / "new.pt")
    monkeypatch.setenv(VARIABLE, "{")
    with pytest.raises(RerunError, match="is no order for a replay"):
        replay_case(other.rerun, other.data, other.forward_backward)


def test_what_is_not_kept_is_said_and_costs_nothing_else(
    tmp_path: Path, ordered: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder, a folder that cannot be written, parameters that are too many (the checkpoint then has to have them)."""
    alone = Loop("GPU-bad")
    assert alone.run().exit_code == 16
    assert alone.rerun.last_report is not None and alone.rerun.last_report.checkpoint == ""

    (tmp_path / "file").write_text("")
    blocked = Loop("GPU-bad", tmp_path / "file")
    assert blocked.run().exit_code == 16
    assert blocked.rerun.last_report is not None and blocked.rerun.last_report.checkpoint == ""
    assert "the step of case" in capfd.readouterr().err

    monkeypatch.setattr(step_keeper, "MAX_PARAMETER_BYTES", 1)
    large = Loop("GPU-bad", tmp_path / "large")
    large.run()
    assert large.rerun.last_report is not None
    step = read_step(steps_of(large.rerun.last_report.checkpoint)[0])
    assert step.parameters is None and step.checkpoint == str(tmp_path / "large")
    answer = ordered(steps_of(large.rerun.last_report.checkpoint)[0])
    assert replayed_checkpoint() == (tmp_path / "large", 2)
    other = Loop("GPU-good")
    assert replay_case(other.rerun, other.data, other.forward_backward) and other.losses == []
    assert "the step's parameters are in the checkpoint of iteration 2" in read(answer).problem
    assert replay_case(other.rerun, other.data, other.forward_backward, has_loaded_parameters=True) and len(other.losses) == 3


def test_a_program_that_cannot_be_read_back_is_not_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither what cannot be pickled nor what a reader of plain values refuses costs more than the step."""
    for name, value, kind in (("call", lambda: 0, "function"), ("path", {"x": [tmp_path]}, "Path")):
        loop = Loop("GPU-bad", tmp_path)
        loop.rerun.program[name] = value
        assert loop.run().exit_code == 16
        assert loop.rerun.last_report is not None and loop.rerun.last_report.checkpoint == ""
        told = capfd.readouterr().err
        assert f"rerun.program['{name}']" in told and kind in told


def test_gradients_of_the_pass_before_are_cleared(tmp_path: Path, ordered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that leaves zero_grad to another place repeats itself all the same."""
    failed = Loop("GPU-bad", tmp_path)
    failed.run()
    assert failed.rerun.last_report is not None
    answer = ordered(steps_of(failed.rerun.last_report.checkpoint)[0])
    other = Loop("GPU-good")
    monkeypatch.setattr(other.optimizer, "zero_grad", lambda: None)
    assert replay_case(other.rerun, other.data, other.forward_backward)
    first, *more = read(answer).passes
    assert len(first.values) > 1 and all(one.values == first.values for one in more)


def test_old_steps_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(number: int) -> Path:
        folder = case_folder(tmp_path, f"job.1-a1-i{number}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank00000.pt").write_bytes(bytes(100))
        os.utime(folder, (number, number))
        return folder

    cases = [case(number) for number in range(MAX_CASES + 3)]
    prune(tmp_path, cases[0])
    left = {path.name for path in (tmp_path / kept_step.FOLDER).iterdir()}
    assert left == {cases[0].name, *(one.name for one in cases[-MAX_CASES + 1 :])}, "the newest, and the one just written"
    monkeypatch.setattr(kept_step, "MAX_BYTES", 250)
    prune(tmp_path, cases[0])
    assert len(list((tmp_path / kept_step.FOLDER).iterdir())) == 3
    assert case_folder(tmp_path, "../x/..").parent == tmp_path / kept_step.FOLDER


# ---------------------------------------------------------------------------------------------------------- the judgement


def answer(*losses: float, likeness: str = "L", reference: float | None = None, verdict: str = "", **more: Any) -> ReplayAnswer:
    """A replay with these losses, a pass each; the loss had been NaN when it was kept."""
    passes = [
        StepPass(values={"loss": repr(loss)}, rejected={} if math.isfinite(loss) else {"loss": "NaN in loss"})
        for loss in losses
    ]
    told = None if reference is None else Reference(uuid="ref", likeness="L", values={"loss": repr(reference)})
    values: dict[str, Any] = {"flagged": {"loss": "nan"}, "tolerances": {"loss": 0.0}, "recorded_on": "bad", "case_id": "c"}
    return ReplayAnswer(passes=passes, likeness=likeness, reference=told, verdict=verdict, **(values | more))


NAN = math.nan


@pytest.mark.parametrize(
    ("answers", "outcomes", "says"),
    [
        # with what a cleared device had computed
        ([answer(1, 1, 1, reference=1.0)], [PASSED], ""),
        ([answer(NAN, NAN, reference=1.0)], [FAILED], "loss: NaN in loss, and loss is nan instead of 1.0 (reference (ref))"),
        ([answer(1.1, 1.1, reference=1.0)], [SKIPPED], "nothing tells which is wrong"),
        ([answer(1.1, 1.1, reference=1.0, flagged={"loss": "1.1"})], [FAILED], "loss is 1.1 instead of 1.0"),  # it came again
        ([answer(1, 1.5, reference=1.0)], [SKIPPED], "test a like device beside it"),
        ([answer(1, 1.5), answer(1, 1)], [FAILED, SKIPPED], "pass 2 differs from the first: loss is 1.5 instead of 1"),
        ([answer(1, 1.5), answer(1, 1.5)], [SKIPPED, SKIPPED], "the program does not repeat itself"),
        ([answer(2, 2, reference=1.0), answer(2, 2, reference=1.0)], [SKIPPED, SKIPPED], "nothing tells which"),  # a tie
        ([answer(2, 2), answer(2, 2), answer(1, 1), answer(1, 1)], [SKIPPED] * 4, "nothing tells which"),
        ([answer(NAN, NAN, reference=NAN, verdict="application")], [PASSED], ""),
        # with a like device
        ([answer(1, 1), answer(1, 1)], [PASSED, PASSED], ""),
        ([answer(NAN, NAN), answer(1, 1)], [FAILED, SKIPPED], ""),
        ([answer(NAN, NAN), answer(NAN, NAN)], [SKIPPED, SKIPPED], "on 1 as well: the data, the program, or all of them"),
        ([answer(2, 2), answer(1, 1)], [SKIPPED, SKIPPED], "nothing tells which is wrong: test a third like device"),
        ([answer(2, 2), answer(1, 1), answer(1, 1)], [FAILED, PASSED, PASSED], "instead of 1 (1, 2)"),
        ([answer(2, 2, reference=1.0), answer(1, 1, reference=1.0)], [FAILED, PASSED], ""),
        (
            [answer(2, 2), answer(1, 2)],
            [SKIPPED, FAILED],
            "there is nothing to compare with",
        ),  # who differs from itself is none
        # nothing to compare with
        ([answer(1, 1)], [SKIPPED], "there is nothing to compare with"),
        ([answer(1, 1), answer(1, 1, likeness="other")], [SKIPPED, SKIPPED], "there is nothing to compare with"),
        ([answer(NAN, NAN, reference=1.0, likeness="other")], [SKIPPED], "there is nothing to compare with"),
        ([answer(1, reference=1.0)], [SKIPPED], "computed 1 times only"),
        ([answer(1, 1, flagged={"mine": "nan"}, reference=1.0)], [SKIPPED], "did not make the check 'mine'"),
        ([answer(problem="no GPU here")], [SKIPPED], "no GPU here"),
    ],
)
def test_what_replays_prove(answers: list[ReplayAnswer], outcomes: list[str], says: str) -> None:
    results = judge_replays({str(place): one for place, one in enumerate(answers)})
    assert [results[str(place)].outcome for place in range(len(answers))] == outcomes
    assert says in results["0"].reason


def test_gradients_are_compared_bit_by_bit_where_they_can_be() -> None:
    one, other = answer(1, 1), answer(1, 1)
    for step, digest in ((one, "a"), (other, "b")):
        for one_pass in step.passes:
            one_pass.digest = digest
    assert "all gradients, bit by bit" in judge_replays({"x": one, "y": other})["x"].reason
    one.passes[1].digest = "c"
    assert judge_replays({"x": one, "y": other})["x"].outcome == FAILED


def test_a_program_that_answers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip, with what to look at; so is a case without steps, and a device in use is left out."""
    assert replay_command("python 'my train.py' --x") == ["python", "my train.py", "--x"]
    for text in ("'", " "):
        with pytest.raises(UsageError, match="--replay-command"):
            replay_command(text)
    devices = {uuid: ReplayedDevice(uuid, "cpu") for uuid in ("a", "b")}

    def reports() -> list[DeviceReport]:
        held = DeviceReport(uuid="b", outcome=SKIPPED, reason="a job uses it", was_tried=False)
        return [DeviceReport(uuid="a", outcome=PASSED), held]

    step = tmp_path / "rank00001.pt"
    for command, says in (
        (["false"], "the replay ended with code 1 without an answer"),
        (["no-such-program"], "cannot start no-such-program"),
    ):
        told = reports()
        add_replays(told, devices, "c", [step], command)
        assert told[0].outcome == SKIPPED and says in told[0].reason and "a skip is no pass" in told[0].reason
        assert told[0].tests[0].name == "replay of c, rank00001" and told[1].tests == []
    told = reports()
    add_replays(told, devices, "c", [], ["false"], why_none="the case kept no step")
    assert "a skip is no pass: replay of c: the case kept no step" in told[0].reason
    monkeypatch.setattr(device_replay, "WITHIN_S", 0.1)
    told = reports()
    add_replays(told, devices, "c", [step], ["sleep", "30"])
    assert "did not end within" in told[0].reason
    assert json.loads(msgspec.json.encode(told))[0]["tests"][0]["values"] == {}
