"""What a graph's call returns: tensors that the next call writes over, so that an old one is refused and not misread."""

from typing import Any

from rsup.worker.cuda_graph.contract import StaleResultError
from rsup.worker.cuda_graph.nesting import cloned


class Results:
    """The latest result of one graph, and whom it was given to. `name`: of the graph, for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._value: Any = None
        self._why = ""

    def put(self, value: Any) -> "VolatileResult":
        """Hand out the result of the call that has just been made."""
        self._number += 1
        self._value = value
        self._why = ""
        return VolatileResult(self, self._number)

    def spoil(self, why: str) -> None:
        """From here on the latest result is no more; `why`: what happened to it, such as "was dropped by reset()"."""
        self._value = None
        self._why = why

    def get(self, number: int) -> Any:
        """The result that was handed out as `number`. Raises `StaleResultError`."""
        if number == self._number and not self._why:
            return self._value
        why = self._why if number == self._number else "was written over by a later call"
        raise StaleResultError(
            f"this result of the {self._name} graph {why}: read it, or keep a copy by materialize(), before the next call"
        )


class VolatileResult:
    """The result of one call of a graph, to be read before the next call: that one writes into the same tensors.

    Numbers and other values that are no tensors are those of the call that was captured. Holds no memory once it is stale.
    """

    def __init__(self, results: Results, number: int) -> None:
        self._results = results
        self._number = number

    @property
    def value(self) -> Any:
        """What the step returned, its tensors detached, on the device, maybe still to be computed there.

        Raises `StaleResultError` once a later call has begun or the graph was reset.
        """
        return self._results.get(self._number)

    def materialize(self) -> Any:
        """A deep copy, which stays; made on the current stream, without waiting. Raises `StaleResultError` as `value` does."""
        return cloned(self.value)
