"""Jobs as the history of devices names them: what everybody may see of a job, read without the state of its machine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from rsup.supervisor.tables import jobs

MayRead = Callable[[str], bool]
"""Whether who asks may see all of the jobs of that owner."""

IN_CHUNK = 400
"""Values of one `IN (...)`: databases bound how many parameters a statement has."""

_Item = TypeVar("_Item")

_named = select(jobs.c.id, jobs.c.cluster, jobs.c.owner, jobs.c.job_id, jobs.c.run, jobs.c.phase)


def everything(owner: str) -> bool:
    """For who reads the store itself."""
    return True


def named_jobs(connection: Connection, numbers: Iterable[int | None]) -> dict[int, dict[str, Any]]:
    """By `jobs.id`: the fields of `views.PUBLIC_FIELDS`."""
    wanted = sorted({number for number in numbers if number is not None})
    found = {}
    for chunk in chunks(wanted):
        for row in connection.execute(_named.where(jobs.c.id.in_(chunk))):
            name = f"{row.job_id}.{row.run}" if row.run > 1 else row.job_id
            same = {"cluster": row.cluster, "owner": row.owner, "state": row.phase}
            found[row.id] = {"id": row.job_id, "run": row.run, "name": name, **same}
    return found


def chunks(items: Sequence[_Item], size: int = IN_CHUNK) -> Iterator[Sequence[_Item]]:
    """`items` in pieces of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
