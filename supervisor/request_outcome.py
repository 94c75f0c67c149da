"""What became of a request that `rsup stop` or `rsup checkpoint` has made: the ranks' answer, as the job's story tells it."""

import time
from typing import Any

from rsup.supervisor.job_name import JobName
from rsup.supervisor.query_source import NoAnswer
from rsup.supervisor.rest_source import RestSource

WITHIN_S = 3.0
ASK_EVERY_S = 0.1
NEWEST = 100

Json = dict[str, Any]


def outcome(source: RestSource, job: JobName, asked: Json) -> Json:
    """`taken_up` (true once every node that was asked has taken it up, false if one could not, null if they have not all
    answered in `WITHIN_S`) and the `message` about it. `asked`: the supervisor's answer to the request."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        try:
            events = source.newest_events(job, NEWEST)
        except NoAnswer:  # an embedded supervisor goes with its last job
            return {"taken_up": None, "message": asked["message"]}
        found = _judge([one for one in events if one["data"].get("request_id") == asked["request_id"]], asked["message"])
        if found is not None:
            return found
        if time.monotonic() >= deadline_s:
            return {"taken_up": None, "message": f"{asked['message']}; asked, not answered yet: `rsup events` tells when"}
        time.sleep(ASK_EVERY_S)


def _judge(events: list[Json], message: str) -> Json | None:
    """What these events of one request say, None while an answer is out."""
    asked = next((one["data"]["nodes"] for one in events if "nodes" in one["data"]), None)
    answers = [one for one in events if one["kind"] == "RequestDone"]
    refused: dict[str, set[str]] = {}
    for one in answers:
        if not one["data"]["done"]:
            refused.setdefault(one["data"]["message"], set()).add(one["node"])
    if refused:
        told = "; ".join(f"{', '.join(sorted(nodes))}: {why}" for why, nodes in refused.items())
        return {"taken_up": False, "message": f"not taken up: {told}"}
    if asked is None or len(answers) < len(asked):
        return None
    more = sorted({one["data"]["message"] for one in answers} - {""})
    news = f"; {'; '.join(more)}" if more else "; all ranks have taken it up" if asked else ""
    return {"taken_up": True, "message": f"{message}{news}"}
