"""Runs the computations on one device, round after round, and compares every result with the first one, bit by bit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rsup.worker.device_test.computations import Computation, Missing, bits, digest
from rsup.worker.device_test.injected_fault import InjectedFault
from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, TestResult

MIN_ROUNDS = 2
"""A computation that was not repeated was not tested."""


@dataclass
class _Running:
    computation: Computation
    result: TestResult
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None
    times: list[float] = field(default_factory=list)


class Screen:
    """One device's. Use from one thread, which computes."""

    def __init__(
        self,
        device: torch.device,
        listed: Sequence[Computation | Missing],
        fault: InjectedFault | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._fault = fault
        self._clock = clock
        self.rounds = 0
        self._broken = ""
        """The error after which the device's context is of no more use."""
        self._running = [
            _Running(one, TestResult(name=one.name, outcome=SKIPPED, reason="not run", unit=one.unit))
            for one in listed
            if isinstance(one, Computation)
        ]
        self._missing = [
            TestResult(name=one.name, outcome=SKIPPED, reason=one.reason, is_required=False)
            for one in listed
            if isinstance(one, Missing)
        ]

    def run(self, duration_s: float, after_each: Callable[[], None] = lambda: None) -> list[TestResult]:
        """Repeat all of them for about `duration_s`, at least twice. `after_each`: called between computations."""
        end_s = self._clock() + duration_s
        while not self._broken and (self.rounds < MIN_ROUNDS or self._clock() < end_s):
            for one in self._running:
                if self._broken:
                    break
                if self.rounds >= MIN_ROUNDS and self._clock() >= end_s:
                    break
                self._run_one(one)
                after_each()
            self.rounds += 1
        for one in self._running:
            self._close(one)
        return [*(one.result for one in self._running), *self._missing]

    def _run_one(self, one: _Running) -> None:
        result = one.result
        if result.outcome == FAILED or (result.reason and result.reason != "not run"):
            return
        start_s = self._clock()
        try:
            found = one.computation.run()
            self._wait()
        except (torch.OutOfMemoryError, MemoryError) as error:
            result.reason = f"not enough memory: {str(error).splitlines()[0][:200]}"
            return
        except RuntimeError as error:
            self._hear(one, str(error).splitlines()[0][:300])
            return
        one.times.append(self._clock() - start_s)
        if self._fault is not None:
            self._fault.spoil(found, result.repetitions)
        result.repetitions += 1
        one.last = found
        if one.first is None:
            one.first = found.clone()
            result.digest = digest(one.first)
            self._check(one)
        elif (different := _difference(one.first, found)) is not None:
            result.outcome, result.reason = FAILED, f"repetition {result.repetitions} differs from the first: {different}"
        elif result.repetitions >= MIN_ROUNDS:
            result.outcome, result.reason = PASSED, ""
        if result.outcome == SKIPPED and result.reason == "not run":
            result.reason = "" if result.repetitions else result.reason

    def _hear(self, one: _Running, what: str) -> None:
        """A computation raised: the device fails at what it could do before, or this build of torch cannot do it."""
        result = one.result
        result.reason = f"raised {what}"
        if "CUDA error" in what:
            self._broken = what
        if one.first is None and not self._broken:
            result.is_required = False
        elif one.first is not None:
            result.outcome = FAILED

    def _check(self, one: _Running) -> None:
        if one.computation.deviation is None or one.first is None:
            return
        one.result.error = one.computation.deviation(one.first)
        one.result.compared_with.append(one.computation.checked_by)
        if not one.result.error <= 1:
            text = f"off by {one.result.error:.3g} times what rounding explains"
            one.result.outcome, one.result.reason = FAILED, f"differs from {one.computation.checked_by}: {text}"

    def _close(self, one: _Running) -> None:
        result, computation = one.result, one.computation
        result.seconds = sum(one.times)
        if one.times and computation.work:
            result.rate = computation.work / max(min(one.times), 1e-9) / (1e12 if computation.unit == "TFLOP/s" else 1e9)
        if result.repetitions >= MIN_ROUNDS:
            result.compared_with.insert(0, "itself")
        if result.outcome == PASSED and not self._broken and one.last is not None and digest(one.last) != result.digest:
            # compared here on the host: a device that cannot add may not compare either
            result.outcome, result.reason = FAILED, "the last repetition differs from the first, and the device did not see it"
        if result.outcome == SKIPPED and not result.reason:
            result.reason = f"repeated {result.repetitions} times only"

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _difference(first: torch.Tensor, found: torch.Tensor) -> str | None:
    """Where two results differ; None: nowhere."""
    if torch.equal(bits(first), bits(found)):
        return None
    size = first.element_size()
    unequal = (bits(first).cpu() != bits(found).cpu()).view(-1, size).any(dim=1).nonzero().flatten()
    if not len(unequal):
        return "the device saw a difference where there is none"
    place = int(unequal[0])
    before, now = first.reshape(-1)[place].item(), found.reshape(-1)[place].item()
    return f"{len(unequal)} of {first.numel()} elements, the first at {place}: {now!r} instead of {before!r}"
