"""Values are copied when they are checked, and compared by a rule that proves a match or finds a mismatch."""

import math
import random
from typing import Any

import pytest
import torch

from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.values import as_value, difference, is_same, read_values

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("initial", "again", "expected"),
    [
        (0.0, 0.0, 0.0),
        (0.0, -0.0, 0.0),
        (1.5, 1.5, 0.0),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
        (NAN, 1.0, INF),
        (1.0, NAN, INF),
        (INF, NAN, INF),
        (INF, 1.0, INF),
        (INF, -INF, INF),
        (0.0, 1.0, 2.0),
        (1.0, -1.0, 2.0),
        (1.0, 3.0, 1.0),
        (-1.0, -3.0, 1.0),
        (1.7e308, -1.7e308, 2.0),
        (1.7e308, 1.6e308, pytest.approx(2 * 0.1 / 3.3)),
        (0.0, 1e-15, pytest.approx(2e-3)),
    ],
)
def test_differences(initial: float, again: float, expected: float) -> None:
    """P12, S17: x against -x, 0 against x, infinities of two signs, NaN against a number are all mismatches."""
    assert difference(initial, again) == expected
    assert difference(again, initial) == expected
    assert is_same(initial, again, 0.0) == (expected == 0.0)


def test_difference_is_total() -> None:
    """P12: never NaN, never raises, 0 only for the same."""
    draw = random.Random(4)
    special = [0.0, -0.0, 5e-324, -5e-324, 1e-308, 1.7976931348623157e308, -1.7976931348623157e308, INF, -INF, NAN, 1.0]
    numbers = special + [draw.uniform(-1, 1) * 10.0 ** draw.randint(-320, 300) for _ in range(60)]
    for a in numbers:
        for b in numbers:
            found = difference(a, b)
            assert found >= 0, (a, b, found)
            assert (found == 0) == (a == b or (a != a and b != b)), (a, b, found)


def test_the_tolerance_is_relative_and_absolute_near_zero() -> None:
    assert is_same(1.0, 1.0009, 0.001)
    assert not is_same(1.0, 1.0011, 0.001)
    assert is_same(0.0, 1e-16, 0.001)
    assert not is_same(0.0, 1e-16, 0.0)
    assert not is_same(1.0, 1.0, NAN)


def test_a_comparison_of_the_users_must_prove_the_match() -> None:
    """P12: a comparison that returns NaN or raises is a mismatch."""

    def raises(_: float, __: float) -> float:
        raise ZeroDivisionError

    def compare(answer: Any) -> Any:
        return lambda _a, _b: answer

    assert is_same(1.0, 2.0, 0.0, compare(0.0))
    assert is_same(1.0, 2.0, 0.5, compare(torch.tensor(-0.5)))
    for answer in (NAN, INF, 0.6, -0.6, None, "same", True, False, torch.ones(2)):
        assert not is_same(1.0, 1.0, 0.5, compare(answer)), answer
    assert not is_same(1.0, 1.0, 0.5, raises)


def test_a_value_is_a_copy() -> None:
    """P7: scaling the loss in place after the check changes nothing."""
    loss = torch.tensor([[2.0]], requires_grad=True) * 1
    value = as_value(loss)
    assert isinstance(value, float), "on the CPU it is read at once"
    with torch.no_grad():
        loss /= 8
    assert read_values([value, 3.5, as_value(torch.tensor(0.1, dtype=torch.bfloat16))]) == [2.0, 3.5, 0.10009765625]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "not None"),
        (3, "not int"),
        (True, "not bool"),
        (1j, "not complex"),
        ("1.0", "not str"),
        (torch.tensor(3), "int64"),
        (torch.tensor(True), "bool"),
        (torch.tensor(1j), "complex64"),
        (torch.ones(2), r"shape \(2,\)"),
        (torch.ones(0), r"shape \(0,\)"),
        (torch.ones((), device="meta"), "meta"),
        (torch.ones(1).to_sparse(), "layout"),
    ],
)
def test_what_is_no_scalar_is_refused_in_one_line(result: object, says: str) -> None:
    with pytest.raises(RerunError, match=says) as caught:
        as_value(result)
    assert "\n" not in str(caught.value)


def test_a_distributed_tensor_is_never_reduced_silently() -> None:
    class DTensor(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            raise AssertionError("communicates, perhaps")

    with pytest.raises(RerunError, match="to_local"):
        as_value(torch.ones(1).as_subclass(DTensor))


def test_all_values_are_read_in_order_with_their_precision() -> None:
    """P41: read together, one copy from the device."""
    numbers = [0.1 * i for i in range(20)]
    kinds = (torch.float64, torch.float32, torch.float16, torch.float8_e5m2)
    values: list[torch.Tensor | float] = [
        number if i % 5 == 4 else torch.tensor(number, dtype=kinds[i % 4]) for i, number in enumerate(numbers)
    ]
    expected = [value if isinstance(value, float) else float(value) for value in values]
    assert read_values(values) == expected
    assert read_values([]) == []
