"""Offenders, lemons, clusters, what ends soon, repair times, and what another policy would have done."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from rsup.supervisor.database import reader_engine
from rsup.supervisor.hardware import policy
from rsup.supervisor.hardware.device_machine import Sighted, decide
from rsup.supervisor.hardware.states import clear_dossier
from rsup.supervisor.hardware_clusters import clusters
from rsup.supervisor.offenders import offenders
from rsup.supervisor.records import Record
from rsup.supervisor.repair_times import expiring, history_stats
from rsup.supervisor.rule_replay import ReplayTooLarge, replay_policy
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError
from tests.core.evidence_story import sighting_of
from tests.rest.history_story import DAY, A, B, C, at, device, evidence, moves

Open = Callable[..., Connection]
NOW = 100 * DAY


@pytest.fixture
def told(store: SqlStore) -> Iterator[Open]:
    """Commit records, and open a connection to read them."""
    engines = []

    def commit(*groups: list[Record]) -> Connection:
        store.commit([record for group in groups for record in group])
        engines.append(reader_engine(store.database))
        return engines[-1].connect()

    yield commit
    for engine in engines:
        engine.dispose()


def boards() -> list[Record]:
    return [*device(A, 0), *device(B, 0, pci="3d"), *device(C, 0, node="n2")]


def back(uuid: str, *, again: float | None = None, **more: Any) -> list[Record]:
    """Quarantined on day 10, repaired until day 20, clear on day 21, and perhaps quarantined again."""
    steps = [(10 * DAY, "quarantined", "evidence"), (12 * DAY, "in_repair", "repair"), (20 * DAY, "probation", "release")]
    steps.append((21 * DAY, "clear", "clean"))
    return moves(uuid, *steps, *([(again, "quarantined", "evidence")] if again else []), **more)


# ------------------------------------------------------------------------------------------------- offenders and lemons


def test_offenders_have_several_independent_episodes(told: Open) -> None:
    often = [evidence(A, NOW - day * DAY, episode=f"boot:{day}") for day in (1, 2, 3)]
    burst = [evidence(B, NOW - DAY + n, "xid", str(n), episode="boot:1") for n in range(5)]
    notes = [evidence(C, NOW - day * DAY, weight=0.0, episode=f"boot:{day}") for day in (1, 2)]
    old = [evidence(C, NOW - day * DAY, episode=f"boot:{day}") for day in (29, 50)]
    found = offenders(told(boards(), often, burst, notes, old, moves(A, (5, "suspect", "evidence"))), now_us=at(NOW))
    assert [(row["device"], row["episodes"], row["state"], row["node"]) for row in found["repeat"]] == [(A, 3, "suspect", "n1")]
    assert found["repeat"][0]["weight"] == 2.4 and found["lemons"] == []
    assert [row["device"] for row in offenders(told(), now_us=at(NOW), days=60)["repeat"]] == [A, C]


def test_lemons_failed_again_after_a_repair(told: Open) -> None:
    """Nobody sees that few boards fail again and again (node_health case 28)."""
    first_time = moves(C, (90 * DAY, "quarantined", "evidence"))
    found = offenders(told(boards(), back(A, again=95 * DAY), back(B), first_time), now_us=at(NOW))
    assert [row["device"] for row in found["lemons"]] == [A]
    lemon = found["lemons"][0]
    assert (lemon["repairs"], lemon["returned"], lemon["failed"], lemon["lasted_days"]) == (
        1,
        iso(at(20 * DAY)),
        iso(at(95 * DAY)),
        75,
    )
    assert offenders(told(), now_us=at(NOW), days=2)["lemons"] == [], "it failed before that"


def test_lemons_among_nodes(told: Open) -> None:
    found = offenders(told(back("n1", again=95 * DAY, kind="node")), now_us=at(NOW), kind="node")
    assert [row["node"] for row in found["lemons"]] == ["n1"]


# ------------------------------------------------------------------------------------------------------------- clusters


def fleet(bad: range) -> list[Record]:
    """100 devices on 12 nodes of 2 racks, two VBIOS versions; those of `bad` are quarantined."""
    records: list[Record] = []
    for number in range(100):
        node, vbios = f"r{number // 50}-n{number // 8:02}", "96.00.A5" if number < 20 else "96.00.B1"
        records += device(f"GPU-{number:03}-0000", 0, node, f"{number % 8:02}", vbios=vbios)
    for number in bad:
        records += moves(f"GPU-{number:03}-0000", (NOW - DAY, "quarantined", "evidence"))
    return records


def test_trouble_of_one_firmware(told: Open) -> None:
    connection = told(fleet(range(1, 20, 2)))
    found = clusters(connection, "vbios", now_us=at(NOW))
    first, second = found["groups_shown"]
    assert (first["vbios"], first["devices"], first["in_trouble"], first["expected"]) == ("96.00.A5", 20, 10, 2.0)
    assert first["probability"] > 0.95 and first["above_one"] > 0.99 and first["ratio"] > 3
    assert (second["in_trouble"], second["probability"]) == (0, None)
    same = clusters(connection, "driver", now_us=at(NOW))
    assert same["groups_shown"][0]["probability"] == 0.0 and same["none"] == 1.0, "one driver for all explains nothing"


@pytest.mark.parametrize(("by", "name"), [("node", "r0-n01"), ("rack", "r0"), ("model", "NVIDIA H200")])
def test_groups_of_each_kind(told: Open, by: str, name: str) -> None:
    found = clusters(told(fleet(range(8, 16))), by, now_us=at(NOW))
    assert found["groups_shown"][0][by] == name and found["groups_shown"][0]["in_trouble"] == 8
    assert found["devices"] == 100 and found["in_trouble"] == 8


def test_a_pattern_of_ones_own_for_racks(told: Open) -> None:
    connection = told(fleet(range(8, 16)))
    assert clusters(connection, "rack", now_us=at(NOW), rack_pattern="-(n0)")["groups_shown"][0]["rack"] == "n0"
    for wrong, message in (("(", "no regular expression"), ("abc", "has no group")):
        with pytest.raises(UsageError, match=message):
            clusters(connection, "rack", now_us=at(NOW), rack_pattern=wrong)
    with pytest.raises(UsageError, match="cannot group by 'colour'; use one of vbios"):
        clusters(connection, "colour", now_us=at(NOW))


def test_an_empty_store_has_no_clusters(told: Open) -> None:
    assert clusters(told(), "vbios", now_us=at(NOW))["groups_shown"] == []


# ------------------------------------------------------------------------------------------------- endings and figures


def test_what_ends_soon(told: Open) -> None:
    word = {"override": "allow", "override_actor": "ann", "override_reason": "needed", "override_until_us": at(NOW + DAY)}
    records = [
        *moves(A, (1, "suspect", "evidence"), expires_us=at(NOW + 2 * DAY)),
        *moves(B, (1, "quarantined", "evidence"), **word),
        *moves(C, (1, "suspect", "evidence"), expires_us=at(NOW + 9 * DAY)),
        *moves("n1", (1, "watch", "evidence"), kind="node", expires_us=at(NOW - 5)),
    ]
    found = expiring(told(boards(), records), now_us=at(NOW))
    assert [(row["subject"], row["what"], row["actor"]) for row in found["items"]] == [
        ("n1", "watch", ""),
        (B, "allow", "ann"),
        (A, "suspect", ""),
    ]
    assert expiring(told(), now_us=at(NOW), days=10)["count"] == 4


def test_repair_times_and_precision(told: Open) -> None:
    """A repaired board confirms its quarantine; one that was released, and stayed well, refutes it; what came again is open."""
    released = moves(C, (30 * DAY, "quarantined", "evidence"), (31 * DAY, "probation", "release"), (33 * DAY, "clear", "clean"))
    found = history_stats(told(boards(), back(A), back(B, again=95 * DAY), released), now_us=at(NOW))
    assert found["states"]["clear"] == 2 and found["states"]["quarantined"] == 1 and found["known"] == 3
    assert found["repairs"] == {"count": 2, "mean_hours": 240.0, "median_hours": 240.0, "longest_hours": 240.0}
    assert found["outcomes"]["confirmed"] == 2 and found["outcomes"]["refuted"] == 1
    assert found["outcomes"]["precision"] == pytest.approx(2 / 3) and found["outcomes"]["refuted_hours"] == 24.0
    assert found["by_rule"] == [{"rule": "rsup-1/some", "confirmed": 2, "refuted": 1, "unknown": 0}]
    assert history_stats(told(), now_us=at(NOW), days=1)["repairs"]["count"] == 0


def test_back_in_quarantine_soon_refutes_nothing(told: Open) -> None:
    steps = [(70 * DAY, "quarantined", "evidence"), (71 * DAY, "probation", "release"), (72 * DAY, "quarantined", "evidence")]
    found = history_stats(told(boards(), moves(A, *steps)), now_us=at(NOW))
    assert found["outcomes"]["unknown"] == 1 and found["outcomes"]["refuted"] == 0 and found["outcomes"]["precision"] is None


# --------------------------------------------------------------------------------------------------------------- replay

STRICT = '[rules.xid-application]\nfirst = "quarantined"\nweight = 2.0\ndrain = "now"\n'
MILD = '[rules.xid-reset]\nfirst = "watch"\nrepeat = "watch"\nweight = 0.1\n'


def seen(uuid: str, day: float, code: str, **more: object) -> list[Record]:
    return [evidence(uuid, day * DAY, "xid", code, weight=0.0 if code == "13" else 1.5, **more)]


def test_a_stricter_rule_would_have_put_away_more(told: Open) -> None:
    """In the last month three devices had Xid 13; one was repaired later, one released, of one nothing is known."""
    records = [*seen(A, 80, "13"), *seen(B, 81, "13"), *seen(C, 82, "13"), *seen(A, 20, "13")]
    repaired = moves(A, (85 * DAY, "in_repair", "repair"), (86 * DAY, "probation", "release"))
    tested = evidence(B, 83 * DAY, "test", "passed", weight=0.0)
    connection = told(boards(), records, repaired, [tested])
    usual = replay_policy(connection, policy.built_in(), now_us=at(NOW))
    assert usual["counts"]["quarantined"] == 0
    found = replay_policy(connection, policy.parse(STRICT, "strict.toml"), now_us=at(NOW))
    counts = found["counts"]
    assert (counts["quarantined"], counts["drained"]) == (3, 3)
    assert (counts["confirmed"], counts["refuted"], counts["open"]) == (1, 1, 1)
    assert counts["changes"] == {"new": 3, "gone": 0, "other": 0, "same": 0}
    assert {row["subject"]: row["outcome"] for row in found["subjects"]} == {A: "confirmed", B: "refuted", C: "open"}
    assert found["subjects"][1]["would"] == {"quarantined": iso(at(81 * DAY))}
    assert found["policy"] == "rsup-1+strict" and found["num_evidence"] == 4, "with a month before it, for the windows"


def test_a_milder_rule_would_have_left_alone(told: Open) -> None:
    connection = told(boards(), seen(A, 80, "119"), moves(A, (80 * DAY, "quarantined", "evidence")))
    assert replay_policy(connection, policy.built_in(), now_us=at(NOW))["counts"]["changes"]["same"] == 1
    found = replay_policy(connection, policy.parse(MILD, "mild.toml"), now_us=at(NOW))
    assert found["counts"]["changes"]["gone"] == 1 and found["subjects"][0]["did"] == {"quarantined": iso(at(80 * DAY))}


def test_a_replay_of_the_same_policy_gives_what_the_machine_did(told: Open) -> None:
    """The stored evidence through the same pure machine: nothing would have been otherwise."""
    records: list[Record] = []
    told_of = [("94", 70, "b1"), ("94", 72, "b2"), ("48", 75, "b3"), ("63", 78, "b4"), ("13", 79, "b5"), ("94", 95, "b6")]
    for uuid in (A, B):
        dossier = clear_dossier("device", uuid)
        for code, day, boot in told_of if uuid == A else told_of[:2]:
            row = evidence(uuid, day * DAY, "xid", code, episode=boot)
            dossier, rows = decide(dossier, Sighted(sighting_of(row)), policy.built_in(), at(day * DAY))
            records += rows
    found = replay_policy(told(boards(), records), policy.built_in(), now_us=at(NOW), days=60)
    assert found["counts"]["changes"] == {"new": 0, "gone": 0, "other": 0, "same": 2}
    assert all(row["would"] == row["did"] for row in found["subjects"])


def test_refused_and_injected_evidence_moves_nothing_in_a_replay(told: Open) -> None:
    records = [*seen(A, 80, "119", effect="inert: injected", injected=True), *seen(B, 80, "119", effect="refused: not held")]
    assert replay_policy(told(boards(), records), policy.built_in(), now_us=at(NOW))["subjects"] == []


def test_a_replay_is_bounded(told: Open) -> None:
    connection = told(boards(), seen(A, 80, "119"), seen(B, 80, "119"), seen(C, 80, "119"))
    with pytest.raises(ReplayTooLarge, match="take fewer --days"):
        replay_policy(connection, policy.built_in(), now_us=at(NOW), max_evidence=2)


@pytest.mark.parametrize(
    "text", ["rules = 3", "[rules.x]\nsource = 1", "=", '[rules.xid-reset]\nfirst = "explode"', "nothing = 1"]
)
def test_a_malformed_policy_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"the device policy mine\.toml") as error:
        policy.parse(text, "mine.toml")
    assert "\n" not in str(error.value)
