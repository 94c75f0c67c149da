"""What answers commands: a running supervisor (`rest_source`) or a store (`store_source`); `sources` chooses between them."""

from collections.abc import Sequence
from typing import Any, Protocol

from rsup.supervisor.history_questions import Question
from rsup.supervisor.job_name import JobName
from rsup.supervisor.wire import RsupError, UsageError

Json = dict[str, Any]


class QueryError(RsupError):
    """The question cannot be answered; the text is what the supervisor or the store says about it."""


class WrongQuestion(QueryError, UsageError):
    """The question is wrong in itself: a name that fits several devices, a time that is none, a malformed policy."""


class NoAnswer(QueryError):
    """Nobody answers at the supervisor's address."""


class NobodyRuns(NoAnswer):
    """No supervisor runs on the state directory."""


class Source(Protocol):
    """Answers in the shapes of `views`. Raises `RsupError`."""

    def jobs(self, limit: int, state: str, owner: str) -> list[Json]:
        """The newest jobs."""
        ...

    def newest(self) -> JobName:
        """The newest job: one's own if there is any."""
        ...

    def status(self, job: JobName, stacks: bool) -> Json:
        """`views.job_status`, or its public part."""
        ...

    def events(self, job: JobName, after: int, limit: int) -> list[Json]:
        """Events after a number."""
        ...

    def newest_events(self, job: JobName, count: int) -> list[Json]:
        """The last `count` events, in order."""
        ...

    def stacks(self, job: JobName, rank: int | None) -> Json:
        """`story_views.job_stacks`."""
        ...

    def metrics(self, job: JobName, names: Sequence[str], kind: str, points: int) -> Json:
        """`metric_views.series_of` (all series where no `names` are given) and `latest_of`, as `series` and `latest`."""
        ...

    def answer(self, question: Question) -> Json:
        """The answer to a question about devices or nodes."""
        ...

    def cases(self, job: JobName | None, limit: int, verdict: str) -> list[Json]:
        """The newest cases, of that job if given: `case_views.case_fields`, or their public part."""
        ...

    def case(self, case_id: str) -> list[Json]:
        """Cases of that id."""
        ...


def name_of(job: Json) -> JobName:
    """What names exactly that run of that job. A run of 1 is written too, since a newer one may come meanwhile."""
    return JobName(job["cluster"], job["owner"], f"{job['id']}.{job['run']}")
