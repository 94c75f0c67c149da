"""Reads what other tools saw of hardware, for `rsup devices import`: a JSON list of records, an object with a list `evidence`
(as `rsup devices export` writes), or one record a line.

A record has `id` (or `uuid`, `serial`, `device`, `node`), `source`, `code`, and may have `at` (ISO time or UTC microseconds),
`text`, `count` and `episode`.
"""

import json
from typing import Any

from rsup.supervisor.moments import parse_moment
from rsup.supervisor.wire import UsageError

MAX_RECORDS = 100_000
_NAMES = {"device": ("id", "uuid", "device", "serial"), "node": ("id", "node", "name")}

Json = dict[str, Any]


def read_sightings(text: str, name: str, kind: str, now_us: int) -> list[tuple[str, Json]]:
    """(device or node, sighting) by record. Raise `UsageError`, which names the record, for a file that cannot be used."""
    records = _records(text, name)
    if len(records) > MAX_RECORDS:
        raise UsageError(f"{name} has more than {MAX_RECORDS} records; import it in parts")
    return [_sighting(record, f"record {number} of {name}", kind, now_us) for number, record in enumerate(records, 1)]


def _records(text: str, name: str) -> list[object]:
    try:
        content = json.loads(text)
    except ValueError as whole:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise UsageError(f"{name} is neither JSON nor one JSON record a line: {whole}") from None
    if isinstance(content, dict) and isinstance(content.get("evidence"), list):
        shared = {key: content[key] for key in ("uuid", "serial", "node") if isinstance(content.get(key), str)}
        return [{**shared, **one} if isinstance(one, dict) else one for one in content["evidence"]]
    return content if isinstance(content, list) else [content]


def _sighting(record: object, where: str, kind: str, now_us: int) -> tuple[str, Json]:
    if not isinstance(record, dict):
        raise UsageError(f"{where} is no object")
    subject = next((str(record[key]) for key in _NAMES[kind] if record.get(key)), "")
    if not subject:
        raise UsageError(f"{where} names no {kind}: it needs one of {', '.join(_NAMES[kind])}")
    for key in ("source", "code"):
        if not isinstance(record.get(key), str | int) or not str(record[key]):
            raise UsageError(f"{where} has no {key}")
    count = record.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 10**12:
        raise UsageError(f"{where}: {count!r} is no count")
    at = record.get("at", record.get("last", now_us))
    at_us = at if isinstance(at, int) and not isinstance(at, bool) else parse_moment(str(at), now_us, f"{where}: at")
    found: Json = {"source": str(record["source"])[:60], "code": str(record["code"])[:120], "at_us": at_us, "count": count}
    return subject, {**found, "text": str(record.get("text", ""))[:4096], "episode": str(record.get("episode", ""))[:300]}
