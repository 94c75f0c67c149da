"""The questions about devices and nodes, each as it is asked of a running supervisor and as it is read from the store.

Light, so that a command's `--help` is: what reads the store is imported when it is asked.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from sqlalchemy import Connection

Json = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """`path` and `query` (and `body`, if it is posted) for REST, `read` for the store."""

    path: str
    read: "Callable[[Connection], Json]"
    query: list[tuple[str, object]] = field(default_factory=list)
    body: Json | None = None


def now_us() -> int:
    """Now, in UTC microseconds."""
    return time.time_ns() // 1000


def iso_time(at_us: int | None) -> str:
    """A time for a query, empty for none."""
    from rsup.supervisor.view_times import iso

    return iso(at_us) or ""


def timeline(selector: str, *, kind: str = "device", at_us: int | None = None, cursor: str = "", limit: int = 100) -> Question:
    """`history_views.timeline`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor import history_views

        return history_views.timeline(connection, selector, at_us, kind=kind, cursor=cursor, limit=limit)

    query: list[tuple[str, object]] = [("at", iso_time(at_us)), ("cursor", cursor), ("limit", limit)]
    return Question(f"/{kind}s/{_part(selector)}/timeline", read, query)


def touched(selector: str, since_us: int | None = None) -> Question:
    """`contamination.touched`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor import contamination

        return contamination.touched(connection, selector, since_us)

    return Question(f"/devices/{_part(selector)}/touched", read, [("since", iso_time(since_us))])


def common(jobs: Sequence[str], failed_since_us: int | None = None, limit: int = 20) -> Question:
    """`common_devices.common_devices`; `jobs` as people write them."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.common_devices import common_devices
        from rsup.supervisor.job_selector import find_job
        from rsup.supervisor.principals import owner_name

        found = [find_job(connection, name, prefer_owner=owner_name()) for name in jobs]
        return common_devices(connection, found, failed_since_us=failed_since_us, now_us=now_us(), limit=limit)

    query: list[tuple[str, object]] = [("job", name) for name in jobs]
    return Question("/history/common", read, [*query, ("failed_since", iso_time(failed_since_us)), ("limit", limit)])


def offenders(days: float, kind: str = "device", limit: int = 100) -> Question:
    """`offenders.offenders`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.offenders import offenders

        return offenders(connection, now_us=now_us(), days=days, kind=kind, limit=limit)

    return Question("/history/offenders", read, [("days", days), ("kind", kind), ("limit", limit)])


def clusters(by: str, days: float, rack_pattern: str = "", limit: int = 50) -> Question:
    """`hardware_clusters.clusters`. A `rack_pattern` is not for REST: a regular expression of anybody's may run for ever."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.hardware_clusters import RACK_OF_NODE, clusters

        return clusters(connection, by, now_us=now_us(), days=days, rack_pattern=rack_pattern or RACK_OF_NODE, limit=limit)

    return Question("/history/clusters", read, [("by", by), ("days", days), ("limit", limit)])


def expiring(days: float, limit: int = 200) -> Question:
    """`repair_times.expiring`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.repair_times import expiring

        return expiring(connection, now_us=now_us(), days=days, limit=limit)

    return Question("/history/expiring", read, [("days", days), ("limit", limit)])


def stats(days: float, kind: str = "device") -> Question:
    """`repair_times.history_stats`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.repair_times import history_stats

        return history_stats(connection, now_us=now_us(), days=days, kind=kind)

    return Question("/history/stats", read, [("days", days), ("kind", kind)])


def replay(policy_text: str, name: str, days: float) -> Question:
    """`rule_replay.replay_policy` for a policy file's text; `name` is how messages call it."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.hardware import policy
        from rsup.supervisor.rule_replay import replay_policy

        return replay_policy(connection, policy.parse(policy_text, name), now_us=now_us(), days=days)

    return Question("/history/replay", read, [], {"policy": policy_text, "name": name, "days": days})


def export(selector: str, with_jobs: bool, kind: str = "device") -> Question:
    """`vendor_export.device_record`."""

    def read(connection: "Connection") -> Json:
        from rsup.supervisor.vendor_export import device_record

        return device_record(connection, selector, now_us=now_us(), with_jobs=with_jobs, kind=kind)

    return Question(f"/{kind}s/{_part(selector)}/export", read, [("with_jobs", str(with_jobs).lower())])


def _part(name: str) -> str:
    return quote(name, safe="")
