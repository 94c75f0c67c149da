"""Which iterations a new run should leave out, from what earlier runs rejected.

Derived once, by rank 0, and broadcast: ranks that each read the files may see different content and would then part ways.

An iteration is left out when
- a case ended with the verdict `application` in it, or
- a fatal check rejected it reproducibly (or rejected it with reruns disabled) in two different runs or attempts of one job, on
  the same rank and by the same check, and nothing speaks against its data being the cause. Against it speak: a verdict
  `persistent` or `corrupted state` in that iteration, and more than one rank that rejected it in one attempt, since bad data
  belong to one rank while a corrupted model shows on all.

A verdict is final: no veto applies to it. Evaluation never counts. Jobs that share the files are judged each by itself.
"""

from collections import defaultdict
from collections.abc import Iterable

from rsup.worker.rerun.contract import Rejection
from rsup.worker.rerun.tracker import TRAINING, RejectionRecord

_REPRODUCED = frozenset({Rejection.RERUN_DISABLED, Rejection.FIRST_RERUN_REPRODUCIBLE, Rejection.SECOND_RERUN_REPRODUCIBLE})
_NOT_THE_DATA = frozenset({"persistent", "corrupted state"})

_Run = tuple[str, int]
_Site = tuple[int, str]


def iterations_to_skip(records: Iterable[RejectionRecord], job: str | None = None) -> tuple[int, ...]:
    """Iterations (1-based, global) to leave out, ascending. `job`: only what that job's runs recorded; None: all there is."""
    by_iteration: dict[tuple[str, int], list[RejectionRecord]] = defaultdict(list)
    for record in records:
        if record.phase == TRAINING and (job is None or record.job == job):
            by_iteration[record.job, record.iteration].append(record)
    return tuple(sorted({iteration for (_, iteration), found in by_iteration.items() if _is_skipped(found)}))


def _is_skipped(records: list[RejectionRecord]) -> bool:
    """Whether what one job recorded of one iteration is reason enough."""
    verdicts = {record.verdict for record in records if record.status == Rejection.VERDICT}
    if "application" in verdicts:
        return True
    if verdicts & _NOT_THE_DATA:
        return False
    runs: dict[_Site, set[_Run]] = defaultdict(set)
    ranks: dict[_Run, set[int]] = defaultdict(set)
    for record in records:
        if record.status in _REPRODUCED and record.fatal:
            run = (record.run, record.attempt)
            runs[record.rank, record.check].add(run)
            ranks[run].add(record.rank)
    if any(len(reporting) > 1 for reporting in ranks.values()):
        return False
    return any(len(seen_in) > 1 for seen_in in runs.values())
