"""Times of all ranks side by side, and how they are printed. Pure; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OPTIONS = ("max", "minmax", "all")
"""What is printed of each timer: its longest time over ranks, the shortest and the longest, or every rank's."""

_HEADERS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}
_NAME_WIDTH = 48


@dataclass(frozen=True)
class GatheredTimes:
    """`seconds[name][rank]`: of a step, as the normalizer made it; None where that rank has not run the timer. Names that
    no rank has run are left out."""

    seconds: Mapping[str, Sequence[float | None]]

    def maxima(self) -> dict[str, float]:
        """Of each name the longest time over ranks, in seconds."""
        return {name: max(measured(times)) for name, times in self.seconds.items()}

    def minima(self) -> dict[str, float]:
        """Of each name the shortest time over the ranks that have run it, in seconds."""
        return {name: min(measured(times)) for name, times in self.seconds.items()}

    def text(self, option: str) -> str | None:
        """Several lines, in milliseconds; None where there is nothing to say. `option`: one of `OPTIONS`."""
        if not self.seconds:
            return None
        return "\n".join([_HEADERS[option], *(_line(name, times, option) for name, times in self.seconds.items())])


NOTHING = GatheredTimes({})


def table(names: Sequence[str], rows: Sequence[Sequence[float]], normalizer: float) -> GatheredTimes:
    """`rows[rank][i]`: seconds of `names[i]`; what is not positive was not run. `normalizer`: the number of steps."""
    divisor = normalizer if normalizer > 0 else 1.0
    columns = {name: [row[number] / divisor if row[number] > 0 else None for row in rows] for number, name in enumerate(names)}
    return GatheredTimes({name: times for name, times in columns.items() if measured(times)})


def merged(of_ranks: Sequence[Mapping[str, float]], normalizer: float) -> GatheredTimes:
    """As `table`, of ranks that may have timers of different names."""
    names = list(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))
    return table(names, [[of_rank.get(name, 0.0) for name in names] for of_rank in of_ranks], normalizer)


def measured(times: Sequence[float | None]) -> list[float]:
    """Those of the ranks that have run it."""
    return [time for time in times if time is not None]


def _line(name: str, times: Sequence[float | None], option: str) -> str:
    label = f"    {(name + ' ').ljust(_NAME_WIDTH, '.')}:"
    values = measured(times)
    if option == "max":
        return f"{label} {max(values) * 1e3:.2f}"
    if option == "minmax":
        return f"{label} ({min(values) * 1e3:.2f}, {max(values) * 1e3:.2f})"
    of_ranks = (f"     rank {rank:4d}: {time * 1e3:.2f}" for rank, time in enumerate(times) if time is not None)
    return "\n".join([label, *of_ranks])
