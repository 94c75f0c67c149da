"""The training log of one rank: what it prints and writes is what is true. Over ranks: `test_training_log_ranks.py`."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import rsup.worker
from rsup.worker.observe import training_log
from rsup.worker.observe.console_line import LineNumbers, log_line
from rsup.worker.observe.contract import RESTART_WITHIN_S, Point
from rsup.worker.observe.end_to_end import EndToEnd
from rsup.worker.observe.end_to_end_facts import RunFacts
from rsup.worker.observe.interval_counters import Interval, IntervalCounters
from rsup.worker.observe.late_scalars import LateScalars
from rsup.worker.observe.progress_log import ProgressLog, first_start
from rsup.worker.observe.step_reduction import StepReduction
from rsup.worker.observe.timer_report import GatheredTimes
from rsup.worker.observe.training_log import LogPoint, StepNumbers, TrainingLog, TrainingLogOptions
from rsup.worker.observe.writers import WriterOptions, make_writers
from rsup.worker.observe.writers.opentelemetry import OpenTelemetryWriter
from rsup.worker.reference import run_log, trainer
from rsup.worker.reference.command_line import parse_options
from rsup.worker.reference.observed import Observed
from rsup.worker.reference.run_log import RunLog
from rsup.worker.reference.state import Progress

INF, NAN = math.inf, math.nan
THROUGHPUTS = ("Job throughput", "Cumulative throughput")


class Kept:
    """A writer that keeps what it gets."""

    name = "kept"

    def __init__(self, takes_each_point: bool = False) -> None:
        self.takes_each_point = takes_each_point
        self.points: list[tuple[int, int, Point]] = []
        self.calls: list[str] = []
        self.stamps: dict[int, float | None] = {}
        self.at_flush: Callable[[], object] = lambda: None

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        assert not self.points or iteration >= self.points[-1][0], "iterations come in order"
        self.points += [(iteration, consumed_samples, point) for point in points]
        self.stamps.setdefault(iteration, at_s)

    def flush(self) -> None:
        self.at_flush()
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    def series(self, key: str) -> dict[int, float]:
        return {iteration: point.value for iteration, _, point in self.points if point.key == key}


class Bench:
    """A log of one rank, with a clock that only goes when told to, and all that it says."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.lines, self.warnings = 0.0, list[str](), list[str]()
        self.writer, self.live, self.log_points = Kept(), Kept(takes_each_point=True), list[LogPoint]()
        parts = {name: options.pop(name) for name in ("energy", "timers") if name in options}
        chosen: dict[str, Any] = {"train_iters": 100, "log_interval": 4} | options
        self.log = TrainingLog(
            TrainingLogOptions(**chosen),
            writers=[self.writer, self.live],
            say=self.lines.append,
            warn=self.warnings.append,
            **parts,
        )
        self.log._counters.clock = lambda: self.now_s
        self.log.on_point.append(self.log_points.append)
        self.log.start()

    def step(self, iteration: int, loss: Any = None, takes_s: float = 1.0, **more: Any) -> None:
        """One step, of 8 samples."""
        self.now_s += takes_s
        losses = more.pop("losses", {} if loss is None else {"lm loss": loss})
        numbers: dict[str, Any] = {"learning_rate": 0.1, "global_batch_size": 8} | more
        self.log.step(StepNumbers(iteration, iteration * 8, losses, **numbers))

    def said(self, name: str) -> list[str]:
        """A field of all lines so far; empty where a line lacks it."""
        found = [re.search(rf"\| {re.escape(name)}: (\S+) ", line) for line in self.lines if line.startswith(" iteration")]
        return ["" if match is None else match[1] for match in found]


def test_a_line_has_the_seeds_fields_in_their_order() -> None:
    numbers = LineNumbers(7, 500, 56, 8, 1e-4, 65536.0, 1.23456, 12.0, 3.5, 2, 123.44, 7.26, 350.0)
    interval = Interval(3, 1, 2, {"lm loss": 2.5, "mtp loss": NAN}, 2.0, 0.0, 24)
    assert log_line(numbers, interval) == (
        " iteration   7/500 | consumed samples: 56 | skipped samples: 2 | elapsed time per iteration (ms): 500.0 | "
        "throughput per GPU (TFLOP/s/GPU): 123.4 | energy per GPU (J/iter/GPU): 7.3 | power per GPU (W/GPU): 350.0 | "
        "learning rate: 1.000000E-04 | global batch size: 8 | lm loss: 2.500000E+00 | mtp loss: nan | loss scale: 65536.0 | "
        "grad norm: 1.235 | num zeros: 12 | params norm: 3.500 | "
        "number of skipped iterations: 1 | number of nan iterations: 2 |"
    )
    least = log_line(LineNumbers(1, 9, 8, 8, loss_scale=None), Interval(1, 0, 0, {}, 0.5, 0.0, 8))
    assert least == (
        " iteration 1/9 | consumed samples: 8 | elapsed time per iteration (ms): 500.0 | global batch size: 8 | "
        "number of skipped iterations: 0 | number of nan iterations: 0 |"
    )


def test_the_first_line_comes_after_the_first_step_and_clears_nothing() -> None:
    """Pitfall 17. After a resume, too: it is the first step of the process."""
    bench = Bench()
    for iteration, loss in ((10, 4.0), (11, 2.0), (12, 3.0), (13, 8.0), (16, 1.0)):
        bench.step(iteration, torch.tensor(loss), takes_s=2.0 if iteration == 10 else 1.0)
    assert bench.said("lm loss") == ["4.000000E+00", "3.000000E+00", "4.500000E+00"]
    assert bench.said("elapsed time per iteration (ms)") == ["2000.0", "1333.3", "1000.0"]
    assert [point.clears for point in bench.log_points] == [False, True, True]


def test_a_first_step_that_ends_an_interval_clears_it() -> None:
    bench = Bench(log_interval=1)
    for iteration, loss in ((5, 4.0), (6, 2.0)):
        bench.step(iteration, loss)
    assert bench.said("lm loss") == ["4.000000E+00", "2.000000E+00"]


@pytest.mark.parametrize(
    ("losses", "printed"),
    [
        ([0.0] * 4, "0.000000E+00"),  # pitfall 19
        ([-1.0, -3.0, -1.0, -3.0], "-2.000000E+00"),
        ([1.0, NAN, 1.0, 1.0], "nan"),
        ([1.0, INF, 1.0, 1.0], "inf"),
    ],
)
def test_a_loss_is_always_printed(losses: list[float], printed: str) -> None:
    bench = Bench()
    for iteration, loss in enumerate(losses, start=1):
        bench.step(iteration, torch.tensor(loss))
    assert bench.said("lm loss")[-1] == printed


def test_steps_that_were_skipped_or_not_finite_are_counted() -> None:
    """A NaN counts also where the step updated; a skipped step's loss is in no mean, and its time in the step time."""
    bench = Bench(flops_per_step=8e12, log_throughput=True)
    bench.step(1, 1.0)
    bench.step(2, INF, skipped=True, loss_scale=1024.0, grad_norm=None)
    bench.step(3, None, skipped=True, computed=False)
    bench.step(4, 3.0, loss_scale=512.0, grad_norm=NAN)
    bench.step(5, NAN)
    bench.step(8, 1.0)
    assert bench.said("lm loss") == ["1.000000E+00", "2.000000E+00", "nan"]
    assert bench.said("number of skipped iterations") == ["0", "2", "0"]
    assert bench.said("number of nan iterations") == ["0", "1", "1"]
    assert bench.said("elapsed time per iteration (ms)") == ["1000.0"] * 3
    assert bench.said("loss scale") == ["1.0", "512.0", "1.0"] and bench.said("grad norm") == ["", "nan", ""]
    assert bench.said("throughput per GPU (TFLOP/s/GPU)") == ["8.0", "6.0", "8.0"]  # nothing was computed in step 3
    assert bench.live.series("skipped-iterations") == {4: 2.0, 8: 0.0}
    assert bench.live.series("nan-iterations") == {4: 1.0, 8: 1.0}


def test_a_loss_that_comes_and_goes_is_averaged_over_the_steps_that_had_it() -> None:
    bench = Bench()
    steps: Sequence[dict[str, float]] = ({"a": 1.0}, {"a": 3.0, "b": 5.0}, {"b": 7.0}, {})
    for iteration, losses in enumerate((*steps, *steps), start=1):
        bench.step(iteration, losses=losses)
    assert bench.said("a")[1:] == ["2.000000E+00"] * 2 and bench.said("b")[1:] == ["6.000000E+00"] * 2
    assert bench.writer.series("a") == {1: 1.0, 2: 3.0, 5: 1.0, 6: 3.0}
    assert bench.writer.series("b") == {2: 5.0, 3: 7.0, 6: 5.0, 7: 7.0}
    missing = [f"no rank has the loss {name!r} in iteration {iteration}: " for name, iteration in (("a", 3), ("b", 4))]
    assert [text.partition("its mean")[0] for text in bench.warnings] == missing


def test_sums_and_counts_are_divided_and_other_shapes_are_warned_of_once() -> None:
    bench = Bench()
    for iteration in (1, 2):
        losses = {"lm loss": torch.tensor([6.0, 4.0]), "odd": torch.ones(3), "empty": torch.tensor([0.0, 0.0])}
        bench.step(iteration, losses=losses)
    bench.log.flush()
    assert bench.writer.series("lm loss") == {1: 1.5, 2: 1.5}
    assert bench.writer.series("odd") == {} and bench.writer.series("empty") == {}
    assert bench.warnings == ["the loss 'odd' is not logged: it has the shape [3], not [] or [2], sum and count"]


def test_writers_get_single_steps_under_their_own_iteration() -> None:
    """What was handed in counts, also where a graph fills the same memory in the next step."""
    bench = Bench(writer_interval=2, log_world_size=True, log_interval=10)
    buffer = torch.zeros(())
    for iteration in range(1, 8):
        buffer.fill_(iteration)
        figures = {
            "grad_norm": buffer * 2,
            "num_zeros": torch.tensor(16_777_217),
            "params_norm": 5.0,
            "max_attention_logit": buffer - 5,
        }
        bench.step(iteration, buffer, learning_rate=None if iteration == 4 else iteration / 8, **figures)
    assert bench.writer.points == []  # nobody has waited for them: the log point after step 1 is not due for writers
    bench.log.close()
    assert bench.writer.series("lm loss") == {2: 2.0, 4: 4.0, 6: 6.0} and bench.writer.series("grad-norm")[6] == 12.0
    assert bench.writer.series("learning-rate") == {2: 0.25, 6: 0.75}
    assert bench.live.series("lm loss") == {1: 1.0, 2: 2.0, 4: 4.0, 6: 6.0}
    of_two = {point.key: (point.value, point.vs_samples) for iteration, _, point in bench.writer.points if iteration == 2}
    assert of_two == {
        "learning-rate": (0.25, True),
        "batch-size": (8, True),
        "lm loss": (2.0, True),
        "loss-scale": (1.0, True),
        "world-size": (1, True),
        "grad-norm": (4.0, True),
        "num-zeros": (16_777_217.0, True),
        "params-norm": (5.0, True),
        "max_attention_logit": (-3.0, False),
    }
    assert {samples for iteration, samples, _ in bench.writer.points if iteration == 6} == {48}


def test_numbers_of_an_interval_go_to_writers_as_their_flags_say() -> None:
    """Never those of the line after the first step."""
    for flags, keys in (
        ({}, set()),
        ({"log_throughput": True}, set()),
        ({"log_timers": True}, {"iteration-time"}),
        ({"log_timers": True, "log_throughput": True}, {"iteration-time", "throughput"}),
    ):
        bench = Bench(flops_per_step=lambda samples: samples * 1e12, tokens_per_sample=16, **flags)
        for iteration in range(1, 5):
            bench.step(iteration, 1.0, takes_s=0.5)
        per_step = {"learning-rate", "batch-size", "lm loss", "loss-scale"}
        assert {point.key for _, _, point in bench.writer.points} == per_step | keys
        assert bench.live.series("iteration-time") == {4: 0.5} and bench.live.series("throughput") == {4: 16.0}
        assert bench.live.series("tokens-per-second") == {4: 256.0}


def test_flops_are_those_of_all_batches_of_the_interval() -> None:
    """Also while the batch size grows."""
    bench = Bench(flops_per_step=lambda samples: samples * 1e12, log_throughput=True)
    for iteration, size in ((1, 2), (2, 2), (3, 4), (4, 8)):
        bench.step(iteration, 1.0, global_batch_size=size)
    assert bench.said("throughput per GPU (TFLOP/s/GPU)") == ["2.0", "4.0"] and bench.log.flops == 16e12


def test_what_is_paused_is_no_step_time() -> None:
    """Pitfall 26; may be nested, and an exception inside ends the pause."""
    bench = Bench()
    bench.step(1, 1.0)
    with bench.log.paused():
        bench.now_s += 100
        with bench.log.paused():
            bench.now_s += 100
        bench.now_s += 100
    with pytest.raises(ValueError, match="in vain"), bench.log.paused():
        bench.now_s += 100
        raise ValueError("in vain")
    for iteration in (2, 3):
        bench.step(iteration, 1.0)
    bench.log.evaluation(3, 24, {"lm loss": (torch.tensor(6.0), 4)})
    bench.step(4, 1.0)
    assert bench.said("elapsed time per iteration (ms)")[-1] == "1000.0" and bench.log.train_s == 4.0
    assert bench.lines[1] == " validation loss at iteration 3 | lm loss value: 1.500000E+00 | lm loss PPL: 4.481689E+00 |"


def test_an_evaluation_that_is_nan_has_no_finite_perplexity() -> None:
    bench = Bench(log_validation_ppl=True)
    bench.log.evaluation(1, 8, {"lm loss": (NAN, 1.0)})
    assert bench.lines == [" validation loss at iteration 1 | lm loss value: nan | lm loss PPL: nan |"]
    assert math.isnan(bench.writer.series("lm loss validation ppl")[1])


def test_losses_may_be_tuples_numbers_or_none_and_what_is_neither_is_said_once() -> None:
    bench = Bench(log_interval=1)
    for iteration in (1, 2):
        losses = {"a": (3.0, 2.0), "b": None, "c": (torch.tensor(5.0), 2), "d": "high", "e": (1.0, 2.0, 3.0), "f": 7}
        bench.step(iteration, losses=losses)
    assert {name: bench.said(name)[-1] for name in "abcdef"} == {
        **dict.fromkeys("bde", ""),
        **{"a": "1.500000E+00", "c": "2.500000E+00", "f": "7.000000E+00"},
    }
    assert bench.warnings == [
        "the loss 'd' is not logged: it is a str, neither a number nor (sum, count)",
        "the loss 'e' is not logged: it is a tuple, neither a number nor (sum, count)",
    ]


def test_what_is_no_number_is_one_warning_and_shifts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(torch.Tensor):
        """Holds its numbers elsewhere, as those do that torch cannot read."""

        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> Any:
            raise RuntimeError("in vain")

    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, ())  # type: ignore[attr-defined]
    bench = Bench(log_interval=1)
    for iteration in (1, 2):
        shape = [2] if iteration == 1 else [3]
        bad = {"complex": torch.tensor(1j), "meta": torch.ones((), device="meta"), "wrapped": wrapped, "large": 10**400}
        losses = {**bad, "sparse": torch.ones(1).to_sparse(), "lm loss": torch.nn.Parameter(torch.tensor(4.0))}
        figures = {"learning_rate": "x", "grad_norm": torch.ones(shape), "num_zeros": wrapped, "params_norm": 1j}
        bench.step(iteration, losses=losses, loss_scale=2, max_attention_logit=torch.tensor(8.0), **figures)
    bench.step(3, losses=cast(Any, None), learning_rate=torch.tensor(0.5))
    assert bench.said("lm loss") == ["4.000000E+00"] * 2 + [""] and bench.said("loss scale") == ["2.0", "2.0", "1.0"]
    assert bench.said("learning rate") == ["", "", "5.000000E-01"] and bench.said("grad norm") == [""] * 3
    assert bench.writer.series("max_attention_logit") == {1: 8.0, 2: 8.0}
    assert [text for text in bench.warnings if not text.startswith("no rank has")] == [
        "the learning rate is not logged: it is a str, no number",
        "the grad norm is not logged: it has the shape [2], not []",
        "the num zeros is not logged: it is a Wrapped, no plain tensor",
        "the params norm is not logged: it is a complex, no number",
        "the loss 'complex' is not logged: it is a complex tensor",
        "the loss 'meta' is not logged: it is a meta tensor",
        "the loss 'wrapped' is not logged: it is a Wrapped, no plain tensor",
        "the loss 'large' is not logged: int too large to convert to float",
        "the loss 'sparse' is not logged: it is a torch.sparse_coo tensor",
        "no loss is logged: what is given is a NoneType, not a mapping of names",
    ]


def test_a_subclass_that_is_memory_like_any_other_is_read() -> None:
    class Named(torch.Tensor):
        pass

    bench = Bench(log_interval=1)
    bench.step(1, torch.tensor(3.0).as_subclass(Named), grad_norm=torch.tensor(2.0).as_subclass(Named))
    assert bench.said("lm loss") == ["3.000000E+00"] and bench.said("grad norm") == ["2.000"] and bench.warnings == []


def test_an_evaluation_takes_what_a_step_takes() -> None:
    bench = Bench()
    losses = {"a": 2.0, "b": None, "c": torch.tensor([6.0, 4.0]), "d": "high", "e": (torch.tensor(3.0), 2), "f": (1.0, 1j)}
    for iteration in (1, 2):
        bench.log.evaluation(iteration, 8, cast(Any, losses))
    bench.log.evaluation(3, 8, cast(Any, None))
    assert bench.live.series("a validation") == {1: 2.0, 2: 2.0} and bench.live.series("b validation") == {}
    assert bench.live.series("c validation") == bench.live.series("e validation") == {1: 1.5, 2: 1.5}
    assert bench.warnings == [
        "the validation loss 'd' is not logged: it is a str, neither a number nor (sum, count)",
        "the validation loss 'f' is not logged: it is a tuple, neither a number nor (sum, count)",
        "no validation loss is logged: what is given is a NoneType, not a mapping of names",
    ]


@pytest.mark.parametrize("flops", [lambda samples: None, lambda samples: 1 / 0, "many"])
def test_flops_that_are_none_end_the_throughput_and_not_the_training(flops: Any) -> None:
    bench = Bench(flops_per_step=flops, log_throughput=True)
    for iteration in range(1, 5):
        bench.step(iteration, 1.0)
    assert bench.said("throughput per GPU (TFLOP/s/GPU)") == ["", ""] and bench.live.series("throughput") == {}
    (said,) = bench.warnings
    assert said.startswith("throughput is not logged any more: flops_per_step failed: ")


def test_a_function_of_a_point_that_raises_is_one_warning() -> None:
    bench, called = Bench(log_interval=1), list[int]()

    def fail(point: LogPoint) -> None:
        called.append(point.iteration)
        raise ValueError(f"in vain,\n{point.iteration} times")

    bench.log.on_point.insert(0, fail)
    for iteration in (1, 2):
        bench.step(iteration, 1.0)
    assert called == [point.iteration for point in bench.log_points] == [1, 2]
    assert bench.warnings == ["a function of on_point failed: ValueError: in vain, 1 times"]


def test_what_is_asked_for_in_vain_is_said() -> None:
    assert Bench(log_energy=True, timer_option="nonsense", log_interval=-3, writer_interval=-2).warnings == [
        "the log interval is -3: only the line after the first step is printed",
        "the writers' interval is -2: no single step is written",
        "energy cannot be logged: nobody measures it, see TrainingLog(energy=...)",
        "the timers' option 'nonsense' is none of max, minmax, all: their own holds",
    ]
    timers = SimpleNamespace(log_option="max", gather=lambda *_: GatheredTimes({"forward": [1.0]}))
    bench = Bench(timer_option="nonsense", timers=timers)
    bench.step(1, 1.0)
    assert bench.lines[-1].startswith("max time across ranks (ms):")


def test_a_line_is_one_line_whatever_a_loss_is_called() -> None:
    bench = Bench()
    bench.step(1, losses={"lm\nloss": 2.0})
    bench.log.evaluation(1, 8, {"lm\nloss": 2.0})
    assert all("\n" not in line for line in bench.lines) and bench.said("lm loss") == ["2.000000E+00"]
    assert bench.live.series("lm\nloss") == {1: 2.0}


def test_the_writers_of_a_run_get_what_they_are_promised_though_nobody_sorts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor and OpenTelemetry each log point; the others what the intervals and flags say."""
    heard: dict[str, dict[int, float]] = {}

    def hear(iteration: int, values: dict[str, float], *_: object, **__: object) -> None:
        for key, value in values.items():
            heard.setdefault(key, {})[iteration] = value

    monkeypatch.setattr(rsup.worker, "report_metrics", hear)
    writers = make_writers(WriterOptions(), warn=pytest.fail, run_name="", config={}, resumed_at=0)
    other = Kept()
    options = TrainingLogOptions(100, log_interval=4, writer_interval=3, tokens_per_sample=16)
    log = TrainingLog(options, writers=[*writers, other], say=lambda text: None, warn=pytest.fail)
    for iteration in range(1, 9):
        loss = NAN if iteration == 2 else 1.0
        log.step(StepNumbers(iteration, iteration, {"lm loss": loss}, 0.1, 1, skipped=iteration == 3))
    log.close()
    assert heard["skipped-iterations"] == {4: 1.0, 8: 0.0} and heard["nan-iterations"] == {4: 1.0, 8: 0.0}
    assert heard["iteration-time"].keys() == heard["tokens-per-second"].keys() == {4, 8}
    assert heard["learning-rate"].keys() == {1, 3, 4, 6, 8}
    assert {point.key for _, _, point in other.points} == {"learning-rate", "batch-size", "lm loss", "loss-scale"}
    assert other.series("lm loss").keys() == {3, 6} and OpenTelemetryWriter.takes_each_point


def test_a_writer_that_raises_is_given_up_and_the_training_goes_on() -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such\ntable")

    for method in ("write", "flush"):
        bench = Bench(log_interval=2)
        setattr(bench.writer, method, fail)
        for iteration in (1, 2):
            bench.step(iteration, 1.0)
        bench.log.flush()
        bench.step(3, 1.0)
        bench.log.evaluation(3, 24, {"lm loss": (1.0, 1.0)})
        bench.step(4, 1.0)
        bench.log.close()
        assert bench.warnings == ["kept failed, nothing more goes there: RuntimeError: no such table"], method
        assert sorted(bench.live.series("lm loss")) == [1, 2, 3, 4] and bench.writer.calls == ["close"], method
        assert max(bench.writer.series("lm loss"), default=0) <= 2


def test_steps_that_wait_too_long_by_the_clock_are_written_before_a_line() -> None:
    bench = Bench(log_interval=1000)
    for iteration in range(1, 10):
        bench.step(iteration, 1.0, takes_s=90.0 if iteration == 1 else 20.0)
    assert sorted(bench.writer.series("lm loss")) == [1, 2, 3, 4, 5, 6, 7, 8]  # the slow first one, then 60 s each


def test_a_device_that_does_not_end_a_step_holds_up_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "DEVICE_WITHIN_S", 0.0)
    bench = Bench()
    for iteration in (1, 2, 3):
        bench.step(iteration, 1.0)
    stuck = SimpleNamespace(num_rows=1, is_there=lambda: False)
    bench.log._late._blocks = {cast(Any, "layout"): [cast(Any, stuck)]}
    bench.log.close()
    assert bench.warnings == ["iterations 2 to 3 are not written: the device has not ended them"]
    assert sorted(bench.writer.series("lm loss")) == [1] and bench.writer.calls == ["close"]


def test_evaluations_are_written_with_their_perplexity() -> None:
    bench = Bench(log_validation_ppl=True)
    bench.step(1, 1.0)
    bench.log.evaluation(1, 8, {"lm loss": (50.0, 2.0), "b": (1.0, 1.0)}, suffix="-held-out")
    assert bench.writer.series("lm loss validation-held-out") == {1: 25.0}
    assert bench.writer.series("lm loss validation-held-out ppl") == {1: math.exp(20)}
    assert bench.lines[-1].startswith(" validation-held-out loss at iteration 1 | lm loss value: 2.500000E+01 |")


def test_what_the_device_and_other_ranks_still_do_is_step_time_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched runs on while the host is in the evaluation already: it was nobody's time."""
    bench = Bench()
    bench.step(1, 1.0)

    def passes(seconds: float) -> Callable[[], None]:
        return lambda: bench.__setattr__("now_s", bench.now_s + seconds)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", passes(2.0))
    monkeypatch.setattr(bench.log._reduction, "barrier", passes(1.0))
    with bench.log.paused(), bench.log.paused():
        bench.now_s += 100
    assert bench.log.train_s == 1.0 + 2.0 + 1.0


def test_no_flush_and_no_evaluation_is_time_or_energy_of_a_step() -> None:
    made: list[Bench] = []
    meter = Meter(lambda: made[0])
    made.append(Bench.__new__(Bench))
    bench = made[0]
    bench.now_s = 0.0
    bench.__init__(log_energy=True, energy=meter)  # type: ignore[misc]

    def stall() -> None:
        bench.now_s += 50

    bench.writer.at_flush = stall
    bench.step(1, 1.0)
    bench.log.flush()
    bench.log.evaluation(1, 8, {"lm loss": (1.0, 1.0)})
    log = RunLog.__new__(RunLog)
    log.training, log._reached = bench.log, Progress(iteration=1, consumed_samples=8)
    log._say = bench.lines.append
    log._observed = SimpleNamespace(timers=SimpleNamespace(log=lambda names: stall()))  # type: ignore[assignment]
    log.evaluated((1.0, 1.0))
    for iteration in (2, 3, 4):
        bench.step(iteration, 1.0)
    assert bench.said("elapsed time per iteration (ms)")[-1] == "1000.0" and bench.log.train_s == 4.0
    assert bench.said("energy per GPU (J/iter/GPU)")[-1] == "10.0"


def test_steps_are_stamped_when_they_were_and_not_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time axis of a curve is a staircase."""
    bench = Bench()
    monkeypatch.setattr(training_log.time, "time", lambda: 1000.0 + bench.now_s)
    for iteration in range(1, 5):
        bench.step(iteration, 1.0)
    assert bench.writer.stamps == {iteration: 1000.0 + iteration for iteration in range(1, 5)} == bench.live.stamps


def test_a_way_out_closes_everything_and_raises_nothing() -> None:
    """An error of a disk or of a device that is lost must not stand in the place of what ended the training."""

    def fail() -> None:
        raise OSError(28, "No space left on device")

    bench = Bench()
    bench.step(1, 1.0)
    bench.step(2, 1.0)
    bench.writer.close = fail  # type: ignore[method-assign]
    bench.log._late.take = fail  # type: ignore[method-assign, assignment]
    ended: list[str] = []
    log = RunLog.__new__(RunLog)
    log._is_closed, log.training, log._warn, log._report = False, bench.log, bench.warnings.append, None
    log._end_to_end = SimpleNamespace(train_finished=fail, app_finished=lambda: ended.append("application"))  # type: ignore[assignment]
    log._observed = SimpleNamespace(straggler=SimpleNamespace(close=lambda: ended.append("detector")))  # type: ignore[assignment]
    log._energy = SimpleNamespace(close=lambda: ended.append("meter"))  # type: ignore[assignment]
    log.close()
    assert bench.live.calls == ["close"] and ended == ["application", "detector", "meter"]
    full = "OSError: [Errno 28] No space left on device"
    assert bench.warnings == [
        f"the end of the training is not noted: {full}",
        f"the newest steps are not written: {full}",
        f"kept cannot be closed: {full}",
    ]


def test_the_trainers_log_is_closed_also_where_leaving_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    one = trainer.Trainer.__new__(trainer.Trainer)
    fakes = {name: None for name in ("ranks", "_end_to_end", "_observed", "progress")}
    fail = {"on_shutdown": lambda: 1 / 0}
    one.__dict__ |= fakes | {
        "options": SimpleNamespace(async_save=False),
        "sections": SimpleNamespace(**fail),
        "_device": SimpleNamespace(uuid=""),
        "_resume": lambda: None,
        "_run": lambda: 0,
    }
    log = SimpleNamespace(close=lambda ends=True: closed.append(ends))
    monkeypatch.setattr(trainer, "open_run_log", lambda *_: log)
    with pytest.raises(ZeroDivisionError):
        one.train()
    assert closed == [True]


def test_what_was_opened_before_an_interruption_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, nobody = Kept(), cast(Any, None)

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_log, "run_writers", lambda *_: [writer])
    monkeypatch.setattr(run_log, "energy_meter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_log.open_run_log(nobody, nobody, nobody, nobody, nobody, "", print, print)
    assert writer.calls == ["close"]


def test_the_trainers_straggler_detector_pauses_with_its_log() -> None:
    calls = list[str]()
    straggler = SimpleNamespace(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    log = RunLog(
        parse_options([]),
        cast(Any, SimpleNamespace(rank=1, world_size=1, control=None, device=torch.device("cpu"))),
        Progress(),
        EndToEnd(RunFacts(1, 8, 8, 16, 100), app_started_s=0.0),
        say=print,
        warn=pytest.fail,
        writers=[],
        observed=Observed(straggler=cast(Any, straggler)),
        energy=None,
    )
    with log.evaluating(), log.training.paused():
        calls.append("evaluates")
    with pytest.raises(KeyError), log.saving(is_durable=False):
        raise KeyError
    assert calls == ["pause", "evaluates", "resume", "pause", "resume"]


def test_writers_end_together_and_sooner_where_the_training_is_entered_again() -> None:
    calls: list[tuple[str, str]] = []
    limits: list[float] = []

    class Slow(Kept):
        def begin_close(self) -> None:
            calls.append(("begin", self.name))

        def close(self, within_s: float = 0.0) -> None:
            limits.append(within_s)
            calls.append(("close", self.name))

    slow = [Slow(), Slow()]
    slow[0].name, slow[1].name = "a", "b"
    log = TrainingLog(TrainingLogOptions(train_iters=1), writers=slow, say=print, warn=pytest.fail)
    run = RunLog.__new__(RunLog)
    run._is_closed, run.training, run._warn, run._report, run._energy = False, log, pytest.fail, None, None
    run._end_to_end = SimpleNamespace(train_finished=lambda: None)  # type: ignore[assignment]
    run._observed = SimpleNamespace(straggler=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
    run.close(ends=False)
    assert calls == [("begin", "a"), ("begin", "b"), ("close", "a"), ("close", "b")]
    assert RESTART_WITHIN_S >= limits[0] >= limits[1] > 0


class Meter:
    """10 W, of which each reading is noted."""

    def __init__(self, bench: Callable[[], Bench]) -> None:
        self._bench, self._since_s, self._lap_j, self._runs = bench, 0.0, 0.0, False
        self.calls: list[str] = []

    def _collect(self) -> None:
        now_s = self._bench().now_s
        self._lap_j += 10 * (now_s - self._since_s) if self._runs else 0.0
        self._since_s = now_s

    def resume(self) -> None:
        self._collect()
        self._runs = True

    def pause(self) -> None:
        self._collect()
        self._runs = False

    def peek_j(self) -> float:
        self._collect()
        self.calls.append("peek")
        return self._lap_j

    def lap_j(self) -> float:
        self._collect()
        self.calls.append("lap")
        lap_j, self._lap_j = self._lap_j, 0.0
        return lap_j


def test_no_energy_is_lost_to_the_first_line_nor_to_pauses() -> None:
    made: list[Bench] = []
    meter = Meter(lambda: made[0])
    made.append(Bench.__new__(Bench))
    made[0].now_s = 0.0
    bench = made[0]
    bench.__init__(log_energy=True, energy=meter)  # type: ignore[misc]
    for iteration in range(1, 5):
        bench.step(iteration, 1.0, takes_s=2.0)
        with bench.log.paused():
            bench.now_s += 5
    assert bench.said("energy per GPU (J/iter/GPU)") == ["20.0", "20.0"] and bench.said("power per GPU (W/GPU)") == ["10.0"] * 2
    assert meter.calls == ["lap", "peek", "lap"]
    assert bench.writer.series("iter-energy/gpu") == {4: 20.0} and bench.live.series("power/gpu") == {4: 10.0}
    silent = Bench(energy=meter)
    silent.step(1, 1.0)
    assert silent.said("energy per GPU (J/iter/GPU)") == [""]


class Timed:
    """Timers that only note what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, bool]] = []
        self.log_option = "all"

    def gather(self, names: Sequence[str] | None, normalizer: float, reset: bool) -> GatheredTimes:
        self.asked.append((normalizer, reset))
        return GatheredTimes({"optimizer": [0.25]})


def test_times_of_parts_are_those_of_one_step() -> None:
    """Behind the first step they are divided by one step, and go on adding up."""
    timed = Timed()
    bench = Bench(timers=timed, log_timers=True, timer_option="max")
    for iteration in (1, 2, 3, 4):
        bench.step(iteration, 1.0)
    assert timed.asked == [(1, False), (4, True)]
    assert bench.writer.series("optimizer-time") == {4: 0.25}
    assert re.search(r"max time across ranks \(ms\):\n +optimizer \.+: 250\.00", bench.lines[-1])
    own = Bench(timers=timed)
    own.step(1, 1.0)
    assert own.lines[-1].startswith("times across ranks (ms):"), "as the timers themselves are told"


def test_intervals_of_zero_and_unknown_flops_are_warned_of_and_harm_nothing() -> None:
    bench = Bench(log_interval=0, writer_interval=0, log_throughput=True)
    for iteration in range(1, 30):
        bench.step(iteration, 1.0)
    bench.log.close()
    assert len(bench.lines) == 1 and bench.writer.points == [] and len(bench.warnings) == 3
    assert "throughput" in bench.warnings[2] and bench.said("throughput per GPU (TFLOP/s/GPU)") == [""]


def test_steps_that_wait_too_long_for_a_line_are_written_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "FLUSH_AFTER_STEPS", 3)
    bench = Bench(log_interval=1000)
    for iteration in range(1, 9):
        bench.step(iteration, float(iteration))
    assert sorted(bench.writer.series("lm loss")) == [1, 2, 3, 4, 5, 6, 7]
    bench.step(1000, 1000.0)
    assert bench.said("lm loss")[-1] == f"{(sum(range(1, 9)) + 1000) / 9:.6E}"


def test_it_is_closed_once_and_nothing_waits_then() -> None:
    """Pitfalls 21 and 24."""
    bench = Bench()
    for iteration in (1, 2):
        bench.step(iteration, 1.0)
    bench.log.close()
    bench.log.close()
    assert bench.writer.series("lm loss") == {1: 1.0, 2: 1.0} and bench.writer.calls == bench.live.calls == ["close"]


def test_counters_and_reduction_alone() -> None:
    clock = [0.0]
    counters = IntervalCounters(lambda: clock[0])
    counters.add_step(False, 1.0, 8)
    clock[0] = 3.0
    assert counters.report(True, elapsed_s=2.0).elapsed_s == 2.0 and counters.elapsed_s() == 1.0  # what came since
    (only,), extra = StepReduction().steps([{"a": (3.0, 2.0), "b": (0.0, 0.0)}], [(None, NAN, INF, -INF, 2.0)], (5.0, 1.0))
    assert only.losses == {"a": 1.5} and extra == (5.0, 1.0)
    assert only.maxima[0] is None and only.maxima[2:] == (INF, INF, 2.0)
    assert only.maxima[1] is not None and math.isnan(only.maxima[1])
    rows = LateScalars()
    rows.put([1.0, torch.tensor([2.0, 3.0]), torch.tensor(4, dtype=torch.int64)])
    rows.put([])
    assert (len(rows), rows.take(), rows.take()) == (2, [[1.0, 2.0, 3.0, 4.0], []], [])


def test_the_progress_log_names_the_job_of_slurm_or_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsup.worker, "job_key", lambda: "tiny.2")
    for slurms, shown in (("", "tiny.2"), ("77", "77")):
        monkeypatch.setenv("SLURM_JOB_ID", slurms)
        ProgressLog(tmp_path, 2, pytest.fail).started()
        assert f"\tJob ID: {shown}\t" in (tmp_path / "progress.txt").read_text().splitlines()[-1]


def test_the_progress_log_counts_throughput_over_starts_with_as_many_ranks(tmp_path: Path) -> None:
    warnings: list[str] = []
    log = ProgressLog(tmp_path, 2, warnings.append, job="77")
    log.started()
    log.saving(5, 3e15, 2_500_000_000)
    log.saved_async(5)
    log.saved(6, 3.6e15, 3_000_000_000)
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[1:4] for line in lines] == [
        ["Job ID: 77", "# GPUs: 2", "Starting job"],
        ["Job ID: 77", "# GPUs: 2", "Saving async checkpoint"],
        ["Job ID: 77", "# GPUs: 2", "Saved async checkpoint"],
        ["Job ID: 77", "# GPUs: 2", "Saved checkpoint"],
    ]
    for line, figures in ((lines[1], ("5", "3.00e+15", "2.50")), (lines[3], ("6", "3.60e+15", "3.00"))):
        # which field is where: Megatron-LM's reader takes them by their place
        names, values = zip(*(field.split(": ") for field in line.split("\t")[4:]), strict=True)
        assert names == ("Iteration", *THROUGHPUTS, "Floating-point operations", "Tokens (in billions)")
        assert (values[0], *values[3:]) == figures and float(values[1].removesuffix(" TFLOP/s/GPU")) > 0
    assert lines[2].endswith("Saved async checkpoint\tIteration: 5")
    other = "2026-01-01 00:00:00\tJob ID: 1\t# GPUs: 4\tStarting job"
    again = "2026-01-02 00:00:00\tJob ID: 2\t# GPUs: 2\tStarting job"
    found = first_start([*lines, other, again, "torn li", again.replace("02 00", "03 00")], 2)
    assert found is not None and (found.at.day, found.flops) == (2, 3.6e15)
    assert first_start([again, other], 2) is None
    (tmp_path / "progress.txt").unlink()
    (tmp_path / "progress.txt").mkdir()
    log.saving(6, 1.0, 1)
    log.saved_async(6)
    assert len(warnings) == 1 and "Is a directory" in warnings[0]


@pytest.mark.parametrize("heard", [True, False])
def test_the_progress_log_of_another_program_is_read_by_the_rule_of_asynchronous_saves(heard: bool) -> None:
    """Figures of a save that has begun count once it is said to be saved; a local checkpoint is none."""
    rates = "\t".join(f"{name}: 1.0 TFLOP/s/GPU" for name in THROUGHPUTS)
    figures = f"{rates}\tFloating-point operations: {{}}\tTokens (in billions): 1.00"
    events = [
        (4, "Starting job"),
        (4, f"Saving async checkpoint\tIteration: 100\t{figures.format('1.44e+18')}"),
        (4, "Saved async checkpoint\tIteration: 100"),
        (4, f"Saving async checkpoint\tIteration: 200\t{figures.format('2.88e+18')}"),
        (4, f"Saving async checkpoint\tIteration: 300\t{figures.format('4.32e+18')}"),
        (4, "Saved async local checkpoint\tIteration: 300"),
        *(((4, "Saved async checkpoint\tIteration: 200"),) if heard else ()),
        (2, "Starting job"),
    ]
    lines = [f"2026-01-01 0{hour}:00:00\tJob ID: 1\t# GPUs: {size}\t{event}" for hour, (size, event) in enumerate(events)]
    found = first_start(lines, 2)
    assert found is not None and (found.at.hour, found.flops) == (len(events) - 1, 2.88e18 if heard else 1.44e18)
