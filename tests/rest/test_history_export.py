"""The record for the vendor's ticket: complete about the board, silent about users."""

import json
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from rsup.supervisor.database import reader_engine
from rsup.supervisor.records import IncidentSaved, JobKey, Record, SubjectSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.vendor_export import device_record, record_text
from tests.rest.history_story import HOUR, SERIALS, A, B, at, attempt, case, checkpoint, device, evidence, job, moves

SECRET = JobKey("local", "ursula", "secret-model-7b", 2)
SHORT = JobKey("local", "bob", "7", 1)
RAW = "NVRM: Xid (PCI:0000:3d:00): 94, pid=7, name=python, Contained ECC, 0x7 7"


def whole() -> list[Record]:
    by_job = {"job": SECRET, "attempt": 1, "rank": 1, "episode": f"boot:b1 job:local/ursula/{SECRET}"}
    return [
        *device(A, 0),
        *device(B, 0, pci="3d"),
        job(SECRET, 1, 4 * HOUR),
        *attempt(SECRET, 1, 0, 3 * HOUR, [A, B], "failed"),
        checkpoint(SECRET, 1, 10, 20, "/data/ursula/secret/10"),
        job(SHORT, 1, 4 * HOUR),
        *attempt(SHORT, 1, 3 * HOUR, 4 * HOUR, [B]),
        IncidentSaved(SECRET, 1, 1, at(100), "exit", 1, "n1", B, 25, text="ValueError: ursula's code"),
        case(SECRET, 1, 25, 50, B, checkpoint="/data/ursula/secret/24"),
        evidence(B, 60, "xid", "94", text=f"xid 94 on n1 during job {SECRET}\n{RAW}", **by_job),
        evidence(B, 61, "xid", "63", text=f"xid 63 on n1 during job 7\n{RAW}", job=SHORT, count=3),
        evidence(B, 62, "person", "flag", principal="ursula", text="ursula says that secret-model-7b looks odd"),
        evidence(B, 70, "test", "failed", weight=2.0, text="matmul bf16 4096: 3 of 16 differ"),
        *moves(B, (70, "quarantined", "evidence"), (80, "in_repair", "repair")),
        SubjectSaved("device", B, "in_repair", at(80), f"case {SECRET}-a1-i25: persistent", 3, serial=SERIALS[B]),
    ]


@pytest.fixture
def connection(store: SqlStore) -> Iterator[Connection]:
    store.commit(whole())
    engine = reader_engine(store.database)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def test_all_about_the_board_is_in_one_document(connection: Connection) -> None:
    record = device_record(connection, SERIALS[B], now_us=at(5 * HOUR))
    identity = record["identity"]
    assert (identity["serial"], identity["board"], identity["vbios"], identity["driver"]) == (
        SERIALS[B],
        "699-1",
        "96.00",
        "570.1",
    )
    assert record["state"]["state"] == "in_repair" and record["stays"][0]["pci_bus_id"] == "00000000:3d:00.0"
    assert [row["code"] for row in record["evidence"]] == ["failed", "flag", "63", "94"] and record["num_evidence"] == 4
    assert record["evidence"][3]["text"].endswith(RAW), "raw lines are untouched"
    assert [test["result"] for test in record["tests"]] == ["failed"]
    assert [row["after"] for row in record["decisions"]] == ["in_repair", "quarantined"]
    assert record["use"]["hours"] == 4.0 and len(record["use"]["placements"]) == 2
    assert record["cases"][0]["verdict"] == "persistent" and record["cases"][0]["findings"][0]["initial"] == "nan"
    json.dumps(record)


def test_nothing_of_users_is_in_it(connection: Connection) -> None:
    record = device_record(connection, B, now_us=at(5 * HOUR))
    text = json.dumps(record)
    for secret in ("ursula", "secret-model", "ValueError", "root", "during job 7", "bob"):
        assert secret not in text, secret
    names = {row["job"] for row in record["use"]["placements"]}
    assert len(names) == 2 and all(name.startswith("job-") for name in names)
    xid = record["evidence"][3]
    assert xid["job"] in names and f"during job {xid['job']}" in xid["text"] and xid["job"] in xid["episode"]
    assert record["evidence"][2]["text"].startswith(f"xid 63 on n1 during job {record['evidence'][2]['job']}\n")
    assert record["evidence"][2]["text"].endswith(RAW), "a 7 in a raw line is no job"


def test_with_jobs_for_ones_own_use(connection: Connection) -> None:
    record = device_record(connection, B, now_us=at(5 * HOUR), with_jobs=True)
    assert record["use"]["placements"][1]["job"] == "local/ursula/secret-model-7b.2"
    assert record["cases"][0]["checkpoint"] == "/data/ursula/secret/24" and "ursula" in record["evidence"][1]["text"]


def test_a_text_for_people(connection: Connection) -> None:
    text = record_text(device_record(connection, B, now_us=at(5 * HOUR)))
    for part in (
        f"serial {SERIALS[B]}",
        "VBIOS 96.00",
        "state in repair",
        "xid 63 x3",
        RAW,
        "failed: matmul bf16",
        "used for 4 h",
    ):
        assert part in text, part
    assert "ursula" not in text and max(map(len, text.splitlines())) < 200


def test_a_board_nothing_is_known_against(connection: Connection) -> None:
    record = device_record(connection, A, now_us=at(5 * HOUR))
    assert record["evidence"] == [] and "No active test was recorded." in record_text(record)
