"""What the page of `rsup report` is made of, gathered from a running supervisor or from the store: both say the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rsup.supervisor.history_questions import Question
from rsup.supervisor.job_name import JobName
from rsup.supervisor.query_source import NoAnswer, QueryError, Source
from rsup.supervisor.report_curves import MAX_POINTS, wanted
from rsup.supervisor.report_page import ReportData
from rsup.supervisor.report_story import devices_of_interest
from rsup.supervisor.sources import Sources
from rsup.supervisor.wire import RsupError

Json = Mapping[str, Any]

EVENTS_A_PAGE = 1000
MAX_EVENT_PAGES = 20


def gather(sources: Sources, job: JobName, status: Json) -> ReportData:
    """All of it about the job of that status. What cannot be had is left out; raise `QueryError` where nobody answers."""
    series, why = {}, ""
    latest = status.get("metrics")
    if latest is None:
        why = "The supervisor is of a release that kept no numbers of the training."
    for kind, names in wanted(latest or {}).items():
        try:
            series[kind] = sources.read(_metrics_of(job, names, kind))["series"]
        except QueryError as error:
            why = f"The numbers of the training cannot be read: {error}"
    return ReportData(status, series, _events(sources, job), _devices(sources, status), why)


def _metrics_of(job: JobName, names: Sequence[str], kind: str) -> Callable[[Source], Json]:
    return lambda source: source.metrics(job, names, kind, MAX_POINTS)


def _events(sources: Sources, job: JobName) -> list[Json]:
    """The newest 20,000, which begin where their numbers say."""
    newest = sources.read(lambda source: source.newest_events(job, 1))
    before = max(0, newest[-1]["number"] - EVENTS_A_PAGE * MAX_EVENT_PAGES) if newest else 0
    found: list[Json] = []
    for _ in range(MAX_EVENT_PAGES):
        after = found[-1]["number"] if found else before
        page = sources.read(lambda source, after=after: source.events(job, after, EVENTS_A_PAGE))  # type: ignore[misc]
        found += page
        if len(page) < EVENTS_A_PAGE:
            break
    return found


def _devices(sources: Sources, status: Json) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for uuid in devices_of_interest(status):
        try:
            one = sources.read(_device_of(uuid))
        except NoAnswer:
            raise
        except RsupError:  # nobody has seen it: the page says nothing of it
            continue
        if one["uuid"] == uuid:  # else one whose name begins so
            found[uuid] = one
    return found


def _device_of(uuid: str) -> Callable[[Source], Json]:
    def read(connection: Any) -> dict[str, Any]:
        from rsup.supervisor.device_selector import find_device
        from rsup.supervisor.hardware_views import device_detail

        return device_detail(connection, find_device(connection, uuid).uuid)

    return lambda source: source.answer(Question(f"/devices/{quote(uuid, safe='')}", read))
