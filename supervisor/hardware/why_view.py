"""Why a device or node is in its state, as fields: its detail, with the rerun cases that its newest evidence names."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection

from rsup.supervisor.case_views import UnknownCase, find_cases
from rsup.supervisor.device_selector import find_device
from rsup.supervisor.hardware_views import device_detail
from rsup.supervisor.history_jobs import MayRead, everything
from rsup.supervisor.node_story import node_story

Json = dict[str, Any]


def why(connection: Connection, kind: str, selector: str, may_read: MayRead = everything, others: Collection[str] = ()) -> Json:
    """The detail of that device or node, and `cases`, each as who asks may see it. `others`: nodes that are known from
    elsewhere, too. Raise as `find_device`."""
    if kind == "node":
        found = node_story(connection, selector, may_read, others)
    else:
        found = device_detail(connection, find_device(connection, selector).uuid, may_read)
    named = dict.fromkeys(one["case_id"] for one in found["newest_evidence"] if one["case_id"])
    cases = []
    for case_id in named:
        try:
            cases.append(find_cases(connection, case_id, may_read, by_prefix=False)[-1])
        except UnknownCase:
            continue
    return {**found, "cases": cases}
