"""Every question about devices and nodes gives the same answer over SQLite and PostgreSQL."""

from pathlib import Path

from sqlalchemy import Connection

from rsup.supervisor.common_devices import common_devices
from rsup.supervisor.contamination import touched
from rsup.supervisor.database import reader_engine
from rsup.supervisor.device_selector import find_device
from rsup.supervisor.hardware import policy
from rsup.supervisor.hardware_clusters import clusters
from rsup.supervisor.hardware_views import device_detail, list_devices
from rsup.supervisor.history_views import timeline
from rsup.supervisor.offenders import offenders
from rsup.supervisor.records import Record
from rsup.supervisor.repair_times import expiring, history_stats
from rsup.supervisor.rule_replay import replay_policy
from rsup.supervisor.vendor_export import device_record
from tests.rest.history_story import (
    DAY,
    SERIALS,
    A,
    B,
    C,
    at,
    attempt,
    case,
    checkpoint,
    device,
    evidence,
    job,
    key,
    moves,
    resume,
)

ONE, TWO = key("one"), key("two", "bob")
NOW_US = at(100 * DAY)


def story() -> list[Record]:
    verdict = {"job": ONE, "attempt": 1, "rank": 1, "iteration": 25, "case_id": f"{ONE}-a1-i25", "weight": 2.0}
    steps = [
        (50, "quarantined", "evidence"),
        (60, "in_repair", "repair"),
        (70, "probation", "release"),
        (80, "suspect", "evidence"),
    ]
    return [
        *device(A, 0),
        *device(B, 0, pci="3d"),
        *device(C, 0, node="n2"),
        job(ONE, 1, 100),
        *attempt(ONE, 1, 1, 50, [A, B], "failed", last_iteration=29),
        checkpoint(ONE, 1, 30, 49),
        case(ONE, 1, 25, 45, B),
        job(TWO, 50, None),
        *attempt(TWO, 1, 50, None, [f"{C}@n2"], start_iteration=30),
        resume(TWO, 1, 30, 51, "/ann/one/30"),
        checkpoint(TWO, 1, 40, 60),
        evidence(B, 46, "verdict", "persistent", **verdict),
        evidence(B, 47, "test", "failed", weight=2.0),
        evidence(B, 90 * DAY, "xid", "94"),
        evidence(B, 91 * DAY, "xid", "94", job=ONE),
        evidence("n1", 91 * DAY, "hang", "step", kind="node"),
        *moves(B, *((when * DAY, state, verb) for when, state, verb in steps), expires_us=NOW_US),
        *moves("n1", (91 * DAY, "watch", "evidence"), kind="node"),
    ]


def answers(connection: Connection) -> dict[str, object]:
    """All questions, by what they are called."""
    strict = policy.parse('[rules.xid-contained]\nfirst = "quarantined"\n', "strict.toml")
    names = {name: find_device(connection, name, at(10)).uuid for name in (B, SERIALS[B], "n1:3d:00", "GPU-bbbb")}
    record = device_record(connection, B, now_us=NOW_US)
    for part in ("evidence", "use", "cases"):
        record[part] = str(record[part]).count("job-")  # hashes are salted with the store's own id
    return {
        "names": names,
        "quarantined": list_devices(connection, state="suspect"),
        "page": device_detail(connection, B),
        "timeline": timeline(connection, B),
        "then": timeline(connection, B, at(48), limit=2),
        "node": timeline(connection, "n1", kind="node"),
        "touched": touched(connection, B, at(40)),
        "touched since the evidence": touched(connection, B),
        "common": common_devices(connection, failed_since_us=at(0), now_us=NOW_US),
        "offenders": offenders(connection, now_us=NOW_US),
        "clusters": [clusters(connection, by, now_us=NOW_US) for by in ("vbios", "driver", "model", "node", "rack")],
        "expiring": expiring(connection, now_us=NOW_US),
        "stats": history_stats(connection, now_us=NOW_US),
        "replay": replay_policy(connection, strict, now_us=NOW_US),
        "record": {name: value for name, value in record.items() if name not in ("incidents", "decisions")},
    }


def test_both_databases_answer_alike(open_store, database: Path, postgres: str) -> None:
    told = []
    for target in (database, postgres):
        open_store(target).commit(story())
        engine = reader_engine(target)
        with engine.connect() as connection:
            told.append(answers(connection))
        engine.dispose()
    ours, theirs = told
    for question, answer in ours.items():
        assert answer == theirs[question], question
    assert ours["names"] == dict.fromkeys(ours["names"], B)  # type: ignore[call-overload]
    assert ours["replay"]["counts"]["quarantined"] == 1 and ours["offenders"]["repeat"]  # type: ignore[index]
    assert ours["touched"]["counts"]["checkpoints"] == 2 and ours["stats"]["repairs"]["count"] == 1  # type: ignore[index]
