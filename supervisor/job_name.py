"""How people write a job: `ID`, `ID.RUN`, `OWNER/ID`, `CLUSTER/OWNER/ID`, each of the last two also with a run."""

from typing import NamedTuple


class JobName(NamedTuple):
    """A job as it is asked for. `name` is `ID` or `ID.RUN`; empty cluster and owner: any."""

    cluster: str
    owner: str
    name: str


def readings(asked: JobName) -> list[JobName]:
    """What `asked` may mean, likeliest first: an id may hold slashes itself, so the whole text comes before its parts."""
    found = [asked]
    if not asked.owner and "/" in asked.name:
        owner, name = asked.name.split("/", 1)
        found.append(JobName(asked.cluster, owner, name))
        if not asked.cluster and "/" in name:
            found.append(JobName(owner, *name.split("/", 1)))
    return found
