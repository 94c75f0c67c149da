"""The end of what watches a run: in order, whatever one of the steps raises, and within one limit of time for all."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import cast

from rsup.worker.observe.contract import CLOSE_WITHIN_S, ClosesLater, Warn, Writer


def each_in_turn(steps: Sequence[tuple[str, Callable[[], object]]], warn: Warn) -> None:
    """Call all of them, in order. What one raises is a warning: it must not replace the error that ended the training, nor keep
    the later ones open. `steps`: with what the warning is to begin with. What is no `Exception` goes on to the caller, last."""
    with contextlib.ExitStack() as rest:
        for said, step in reversed(steps):
            rest.callback(_attempt, said, step, warn)


def _attempt(said: str, step: Callable[[], object], warn: Warn) -> None:
    try:
        step()
    except Exception as error:  # of a sink of others, a disk, a device that is lost
        with contextlib.suppress(Exception):  # standard error may be closed
            warn(f"{said}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def close_writers(writers: Sequence[Writer], warn: Warn, within_s: float = CLOSE_WITHIN_S) -> None:
    """Close all of them, at the same time where they can: whoever waits, waits `within_s` at most."""
    deadline_s = time.monotonic() + within_s

    def close(writer: Writer) -> None:
        if isinstance(writer, ClosesLater):
            cast(ClosesLater, writer).close(max(0.0, deadline_s - time.monotonic()))
        else:
            writer.close()

    began = [(f"{w.name} does not end in order", w.begin_close) for w in writers if isinstance(w, ClosesLater)]
    each_in_turn([*began, *((f"{w.name} cannot be closed", lambda w=w: close(w)) for w in writers)], warn)
