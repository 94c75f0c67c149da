"""Everything about a device or node: who is meant, what held at a time, the merged story in pages, and who may see what."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from rsup.supervisor.database import reader_engine
from rsup.supervisor.device_selector import AmbiguousHardware, find_device
from rsup.supervisor.hardware_views import UnknownHardware
from rsup.supervisor.history_views import timeline
from rsup.supervisor.records import IncidentSaved, Record, SeatSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.wire import UsageError
from tests.rest.history_story import (
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
)

J1 = key("train")
MOVED = "GPU-bbbb9999-0000"


def whole() -> list[Record]:
    """Three boards; B is accused in `train`, quarantined, repaired, and comes back in another node under another UUID."""
    seat_of_b = SeatSaved(B, at(0), "n1", "00000000:3d:00.0", SERIALS[B], "699-1", at(500), at(500), "boot1")
    return [
        *device(A, 0),
        *device(B, 0, pci="3d"),
        seat_of_b,
        *device(C, 0, node="n2"),
        job(J1, 1, 100),
        *attempt(J1, 1, 1, 50, [A, B], "failed"),
        *attempt(J1, 2, 51, 100, [A, f"{C}@n2"]),
        checkpoint(J1, 1, 10, 20),
        IncidentSaved(J1, 1, 1, at(49), "exit", 1, "n1", B, 25, text="secret words of the program"),
        case(J1, 1, 25, 48, B),
        case(J1, 1, 30, 49, A),
        evidence(B, 48, "verdict", "persistent", job=J1, attempt=1, rank=1, iteration=25, case_id=f"{J1}-a1-i25", weight=2.0),
        evidence(B, 10, "xid", "13", weight=0.0),
        *moves(B, (48, "quarantined", "evidence"), (400, "in_repair", "repair"), (700, "probation", "release")),
        *device(MOVED, 600, node="n2", pci="3d", serial=SERIALS[B]),
    ]


@pytest.fixture
def connection(store: SqlStore) -> Iterator[Connection]:
    store.commit(whole())
    engine = reader_engine(store.database)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


@pytest.mark.parametrize("selector", [A, A[:9], "aaaa1111", SERIALS[A], "n1:1b:00", "n1:0000:1B:00.0", "n1:00000000:1b:00.0"])
def test_a_device_is_named_by_uuid_serial_or_place(connection: Connection, selector: str) -> None:
    assert find_device(connection, selector).uuid == A


def test_a_place_means_what_sat_there_then(connection: Connection) -> None:
    assert find_device(connection, "n1:3d:00", at(100)).uuid == B
    with pytest.raises(UnknownHardware, match="no device 'n1:3d:00'"):
        find_device(connection, "n1:3d:00", at(550))
    assert find_device(connection, "n1:3d:00").uuid == B, "the last one where none sits now"


def test_a_board_keeps_its_story_under_another_uuid(connection: Connection) -> None:
    """A serial that comes back from repair in another node carries its record along."""
    assert find_device(connection, SERIALS[B]).uuids == tuple(sorted((B, MOVED)))
    found = timeline(connection, MOVED)
    assert found["subject"]["other_uuids"] == [B] and found["then"]["state"] == "probation"
    assert {item["what"] for item in found["items"]} >= {"case", "evidence", "transition", "seat", "placement", "incident"}


def test_one_serial_of_two_gpus_at_one_time_is_two_devices(store: SqlStore) -> None:
    """Boards with several GPUs, and MIG instances, share a serial."""
    store.commit([*device("GPU-x1-000", 0, serial="77"), *device("GPU-x2-000", 0, pci="2b", serial="77")])
    engine = reader_engine(store.database)
    with engine.connect() as connection:
        with pytest.raises(AmbiguousHardware, match="GPU-x1-000, GPU-x2-000"):
            find_device(connection, "77")
        assert find_device(connection, "GPU-x1-000").uuids == ("GPU-x1-000",)
    engine.dispose()


@pytest.mark.parametrize("selector", ["GPU-", "no", "0", "N/A", "n9:1b", "x" * 400, "%", "GPU-zzzz"])
def test_an_unknown_device_is_one_line(connection: Connection, selector: str) -> None:
    with pytest.raises(UnknownHardware, match="no device") as error:
        find_device(connection, selector)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_beginning_of_several_uuids_is_ambiguous(store: SqlStore) -> None:
    store.commit([*device(A, 0), *device(A.replace("1111", "2222"), 0, pci="2b")])
    engine = reader_engine(store.database)
    with engine.connect() as connection, pytest.raises(AmbiguousHardware, match=r"may be any of .*write more of it"):
        find_device(connection, "GPU-aaaa")
    engine.dispose()


def test_what_held_at_a_time(connection: Connection) -> None:
    then = timeline(connection, B, at(30))["then"]
    assert (then["state"], then["seat"]["node"], then["used_by"][0]["rank"]) == ("clear", "n1", 1)
    assert then["used_by"][0]["job"]["name"] == "train"
    assert then["evidence"] == {"known": 1, "counted": 0, "first_counted": None}
    then = timeline(connection, B, at(450))["then"]
    assert (then["state"], then["used_by"], then["seat"]["pci_bus_id"]) == ("in_repair", [], "00000000:3d:00.0")
    now = timeline(connection, B)["then"]
    assert (now["state"], now["seat"]["uuid"], now["seat"]["node"]) == ("probation", MOVED, "n2")


def test_the_story_up_to_a_time_is_newest_first(connection: Connection) -> None:
    items = timeline(connection, B, at(48))["items"]
    assert [item["at"] for item in items] == sorted((item["at"] for item in items), reverse=True)
    assert {item["what"] for item in items[:3]} == {"evidence", "transition", "case"}
    assert items[-1]["what"] == "seat"
    story = [(item["what"], item["text"]) for item in timeline(connection, B)["items"]]
    assert ("case", "case of iteration 25: persistent: another device computes another value") in story
    assert not any("iteration 30" in text for _, text in story), "a case of its job about another device"
    assert ("transition", "quarantined -> in_repair (repair by root): because of repair") in story


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages_hold_each_entry_once(store: SqlStore, limit: int) -> None:
    """Also where many things happened in one microsecond."""
    same = [evidence(A, 5, "xid", str(code)) for code in range(9)]
    store.commit([*device(A, 5), *same, evidence(A, 7), evidence(A, 3), *moves(A, (5, "watch", "evidence"))])
    engine = reader_engine(store.database)
    with engine.connect() as connection:
        whole_story = timeline(connection, A, limit=1000)
        assert whole_story["next_cursor"] is None and len(whole_story["items"]) == 13
        paged, cursor = [], ""
        while True:
            page = timeline(connection, A, limit=limit, cursor=cursor)
            assert len(page["items"]) <= limit
            paged += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert paged == whole_story["items"]
    engine.dispose()


def test_a_bad_cursor_is_one_line(connection: Connection) -> None:
    for cursor in ("x", "1", "-1-2", "1-2-3", "9" * 30 + "-1"):
        with pytest.raises(UsageError, match="is no cursor of this list"):
            timeline(connection, A, cursor=cursor)


def test_strangers_see_of_a_job_its_public_part(connection: Connection) -> None:
    told = str(timeline(connection, B, may_read=lambda owner: False))
    assert "train" in told and "persistent" in told
    for secret in ("secret words", "/secret/place", "NaN in loss", "another value"):
        assert secret not in told, secret
        assert secret in str(timeline(connection, B)), secret


def test_the_story_of_a_node(store: SqlStore) -> None:
    store.commit(
        [*whole(), evidence("n1", 60, "hang", "step", kind="node"), *moves("n1", (60, "suspect", "evidence"), kind="node")]
    )
    engine = reader_engine(store.database)
    with engine.connect() as connection:
        found = timeline(connection, "n1", kind="node")
        assert found["subject"] == {"kind": "node", "node": "n1"} and found["then"]["state"] == "suspect"
        assert {item["what"] for item in found["items"]} == {"evidence", "transition", "seat", "participation", "incident"}
        assert [user["rank"] for user in timeline(connection, "n1", at(30), kind="node")["then"]["used_by"]] == [1, 0]
        with pytest.raises(UnknownHardware, match="no node 'n7'"):
            timeline(connection, "n7", kind="node")
    engine.dispose()
