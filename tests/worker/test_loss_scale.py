"""The loss scale of `--fp16`: Megatron-LM's rules, what is kept of it, and what it does to gradients."""

import gc
import json
import math
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.reference.build import make_loss_scale
from rsup.worker.reference.command_line import parse_options
from rsup.worker.reference.loss_scale import LossScale, ScaleRules
from rsup.worker.reference.mixed_precision import ScaledGradients, compute_dtype
from rsup.worker.reference.program import follow, program_of, read_program
from rsup.worker.rerun.kept_step import KeptStep


def scales(rules: ScaleRules, steps: str) -> list[float]:
    """The scale behind each step; `x` overflowed, `.` did not."""
    scale, found = LossScale(rules), []
    for step in steps:
        scale.update(step == "x")
        found.append(scale.value)
    return found


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({}, "xxx", [16, 8, 4]),  # the hysteresis is spent once, not for each halving
        ({"hysteresis": 1}, "x.x", [8, 8, 4]),
        ({"hysteresis": 3}, "x.x.x", [16, 16, 16, 16, 8]),
        ({}, "...x...", [16, 16, 32, 32, 32, 32, 64]),  # an overflow begins the window anew
        ({}, "x...xx", [16, 16, 16, 32, 32, 16]),  # growth begins the hysteresis anew
        ({"minimum": 6.0, "hysteresis": 1}, "xxx", [8, 6, 6]),
        ({"is_dynamic": False}, "xxx....", [16] * 7),
        ({"window": 1}, "..", [32, 64]),
    ],
)
def test_the_scale_follows_overflows(changes: dict[str, Any], steps: str, expected: list[float]) -> None:
    rules = ScaleRules(**({"initial": 16.0, "window": 3} | changes))
    assert scales(rules, steps) == expected


def test_no_growth_ends_in_infinity() -> None:
    """Gradients that are all zero never overflow; from Inf nothing would lead back."""
    found = scales(ScaleRules(initial=2.0**1022, window=1), "....")
    assert found == [2.0**1023] * 4 and all(map(math.isfinite, found))


def test_a_run_that_goes_on_has_the_scales_of_one_that_was_not_interrupted() -> None:
    rules, steps = ScaleRules(initial=2.0**20, window=4, hysteresis=2), "xx....x.....xxx..x......"
    whole = scales(rules, steps)
    for cut in range(len(steps)):
        first, second = LossScale(rules), LossScale(rules)
        for step in steps[:cut]:
            first.update(step == "x")
        second.load_state_dict(first.state_dict())
        for step in steps[cut:]:
            second.update(step == "x")
        assert second.value == whole[-1], cut


def test_a_state_is_fitted_to_the_options_of_now() -> None:
    kept = LossScale(ScaleRules(initial=2.0, hysteresis=5)).state_dict()
    scale = LossScale(ScaleRules(minimum=4.0, hysteresis=1))
    scale.load_state_dict(kept)
    assert scale.value == 4.0 and scale.is_at_minimum and scale.state_dict()["hysteresis"] == 1
    fixed = LossScale(ScaleRules(initial=512.0, is_dynamic=False))
    fixed.load_state_dict(kept)
    assert fixed.value == 512.0 and fixed.state_dict() == {} and fixed.is_at_minimum


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ("", None),
        ("--bf16", None),
        ("--fp16", ScaleRules()),
        ("--fp16 --loss-scale 0", ScaleRules()),
        ("--fp16 --loss-scale 1024", ScaleRules(initial=1024.0, is_dynamic=False)),
        (
            "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 50 --hysteresis 3",
            ScaleRules(65536.0, 2.0, 50, 3),
        ),
    ],
)
def test_options(arguments: str, rules: ScaleRules | None) -> None:
    options = parse_options(arguments.split())
    assert options.scale_rules == rules
    assert compute_dtype(options) == (torch.float16 if "fp16" in arguments else torch.bfloat16 if arguments else None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--fp16 --bf16", "--fp16 and --bf16 do not go together"),
        ("--loss-scale 8", "--loss-scale needs --fp16"),
        ("--bf16 --hysteresis 3", "--hysteresis needs --fp16"),
        ("--fp16 --loss-scale 8 --loss-scale-window 5", "--loss-scale-window is for a dynamic loss scale, and --loss-scale 8"),
        ("--fp16 --initial-loss-scale 0", "--initial-loss-scale and --min-loss-scale must be more than 0"),
        ("--fp16 --initial-loss-scale 4 --min-loss-scale 8", "--min-loss-scale 8 is above --initial-loss-scale 4"),
        ("--fp16 --loss-scale -1", "-1 is not a finite number, 0 or more"),
        ("--fp16 --hysteresis 0", "0 is not 1 or more"),
        ("--fp16 --cuda-graph-impl full_iteration", "--fp16 without --loss-scale does not go with a CUDA graph"),
        (
            "--fp16 --loss-scale 8 --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
            "keeps an overflow from the parameters; leave it out",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(arguments: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)) as raised:
        parse_options(arguments.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fixed", [None, 1024.0])
def test_a_kept_step_is_of_its_own_scale_and_batch_size(fixed: float | None) -> None:
    options = replace(
        parse_options(["--fp16", "--global-batch-size=16", "--rampup-batch-size", "4", "4", "90"]), loss_scale=fixed
    )
    program, scale = program_of(options, True), make_loss_scale(options)
    assert scale is not None
    for _ in range(3):
        scale.update(True)
    follow(program, 8, scale)
    read, _ = read_program(cast(KeptStep, SimpleNamespace(program=json.loads(json.dumps(program)))))
    assert read.fp16 and read.scale_rules is not None
    assert (read.scale_rules.initial, read.scale_rules.is_dynamic) == (fixed or 2.0**30, fixed is None)
    assert read.batch_sizes.at(0) == 8 and read.num_microbatches == 2
    for name in ("loss_scale", "is_loss_scale_fixed"):  # one of an older release
        del program[name]
    del program["options"]["fp16"]
    old, _ = read_program(cast(KeptStep, SimpleNamespace(program=program)))
    assert old.scale_rules is None


def linear(scale: LossScale) -> tuple[torch.nn.Linear, ScaledGradients]:
    module = torch.nn.Linear(3, 1)
    return module, ScaledGradients(scale, module.parameters())


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_gradients_come_out_without_the_scale(is_dynamic: bool) -> None:
    scale = LossScale(ScaleRules(initial=2.0**16, is_dynamic=is_dynamic))
    module, scaling = linear(scale)
    for _ in range(2):  # two micro-batches
        scaling.scaled(module(torch.ones(1, 3)).sum()).backward()  # type: ignore[no-untyped-call]
    gradient = module.weight.grad
    assert gradient is not None
    assert gradient.tolist() == [[2.0 * (2.0**16 if is_dynamic else 1.0)] * 3]  # a fixed one is never in them
    assert not scaling.take_out() and gradient.tolist() == [[2.0] * 3]
    assert (scaling.for_rerun is scaling) == is_dynamic


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_anywhere_is_found(value: float) -> None:
    for is_dynamic, behind in ((True, 128.0), (False, 256.0)):
        scale = LossScale(ScaleRules(initial=256.0, hysteresis=1, is_dynamic=is_dynamic))
        module, scaling = linear(scale)
        scaling.scaled(module(torch.ones(1, 3)).sum()).backward()  # type: ignore[no-untyped-call]
        assert module.bias.grad is not None
        module.bias.grad.fill_(value)
        assert scaling.take_out() and scale.value == behind


def test_a_parameter_is_not_kept_alive_by_its_hook() -> None:
    """An in-process restart makes the model anew: the old one must go at once, without a garbage collection."""
    module, scaling = linear(LossScale(ScaleRules(is_dynamic=False)))
    known = weakref.ref(module.weight)
    gc.disable()
    try:
        del module, scaling
        assert known() is None
    finally:
        gc.enable()
