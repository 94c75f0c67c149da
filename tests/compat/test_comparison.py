"""Public complaints about torchrun: rsup is right in every row, and where torchrun was seen to be wrong, it still is."""

import pytest

from tests.compat.comparison import playing
from tests.compat.comparison.row import RSUP, TORCHRUN, Row

ROWS = playing.all_rows()


def _parameters(rows: list[Row]) -> list[object]:
    return [pytest.param(row, id=row.number, marks=[pytest.mark.slow] if "slow" in row.tags else []) for row in rows]


@pytest.mark.parametrize("row", _parameters(ROWS))
def test_rsup_is_right(row: Row) -> None:
    seen = playing.play(row, RSUP)
    assert seen.right, f"{row.number}, {row.title}: {seen.text}; right: {row.right}"


TORCHRUN_ROWS = [row for row in ROWS if row.torchrun_fails and not row.tags & {"table only", "slow"}]
"""`make comparison` runs torchrun in the others too."""


@pytest.mark.peer
@pytest.mark.parametrize("row", _parameters(TORCHRUN_ROWS))
def test_torchrun_is_not(row: Row) -> None:
    """If this fails, torchrun has been mended: say so in the row. Where it is right by chance, it is asked again."""
    seen = playing.play(row, TORCHRUN)
    for _ in range(3 if "by chance" in row.tags else 0):
        seen = playing.play(row, TORCHRUN) if seen.right else seen
    assert not seen.right, f"{row.number}, {row.title}: {seen.text}"


def test_rows_have_names_of_their_own() -> None:
    numbers = [row.number for row in ROWS]
    assert len(numbers) == len(set(numbers)), sorted(number for number in numbers if numbers.count(number) > 1)
