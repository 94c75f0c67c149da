"""A large fleet's history, made up: 100,000 devices, 20 months of jobs, 5 million pieces of evidence, written quickly.

As public reports of such fleets have it: about 9 % of devices fail a year, most of what drivers say is noise, and few boards
say most of it.
"""

import random
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.sql_store import SqlStore

DAY_US = 86_400_000_000
END_US = 1_764_460_800_000_000
DAYS = 600
BEGIN_US = END_US - DAYS * DAY_US
BYTES_PER_EVIDENCE = 700
"""What the whole file takes, with indexes, about."""
NOISE = (
    ("xid", "43"),
    ("xid", "45"),
    ("xid", "13"),
    ("xid", "31"),
    ("throttle", "sw-power-cap"),
    ("xid", "66"),
    ("ecc", "corrected"),
)
TELLING = (
    ("xid", "94", 0.8),
    ("xid", "63", 0.4),
    ("hang", "step", 0.5),
    ("rank-lost", "SIGSEGV", 0.3),
    ("verdict", "transient", 0.6),
)
STATES = (
    ("watch",) * 58 + ("suspect",) * 13 + ("quarantined",) * 12 + ("in_repair",) * 8 + ("probation",) * 7 + ("retired",) * 2
)


@dataclass(frozen=True)
class Fleet:
    """What was made, for choosing subjects of questions."""

    path: Path
    uuids: list[str]
    told: list[str]
    """Devices that are not clear."""
    num_jobs: int
    failed: list[int]
    """Numbers of the failed jobs, oldest first; job N is called `jN`."""
    num_evidence: int


def make_fleet(path: Path, scale: float, seed: int = 4) -> Fleet:
    """Write it to a new file at `path`. Raise `RuntimeError` where there is too little room."""
    num_devices, num_evidence, num_jobs = (max(16, round(n * scale)) for n in (100_000, 5_000_000, 20_000))
    needed, free = num_evidence * BYTES_PER_EVIDENCE, shutil.disk_usage(path.parent).free
    if free < 2 * needed:
        raise RuntimeError(f"{path.parent} has {free >> 20} MiB left, twice the {needed >> 20} MiB needed are wanted")
    SqlStore.open(path, holder=LeaseHolder.this_process("bench"), alone_may_migrate=False).close()
    chance = random.Random(seed)
    uuids = [f"GPU-{chance.getrandbits(64):016x}-{number:06x}" for number in range(num_devices)]
    told = sorted(chance.sample(uuids, max(8, num_devices * 6 // 100)))
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = MEMORY", "synchronous = OFF", "cache_size = -400000", "foreign_keys = OFF"):
        connection.execute(f"PRAGMA {pragma}")
    indexes = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    connection.execute("BEGIN")
    for name, _ in indexes:
        connection.execute(f"DROP INDEX {name}")
    _devices(connection, uuids, chance)
    failed = _jobs(connection, uuids, num_jobs, chance)
    _states(connection, uuids, told, chance)
    _evidence(connection, uuids, told, num_evidence, num_jobs, chance)
    for _, statement in indexes:
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.close()
    return Fleet(path, uuids, told, num_jobs, failed, num_evidence)


def _node(number: int) -> str:
    return f"r{number // 64:03}-n{number // 8:05}"


def _insert(connection: sqlite3.Connection, table: str, columns: str, rows: Iterable[tuple[object, ...]]) -> None:
    marks = ", ".join("?" * len(columns.split(",")))
    connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)


def _devices(connection: sqlite3.Connection, uuids: list[str], chance: random.Random) -> None:
    def devices() -> Iterator[tuple[object, ...]]:
        for number, uuid in enumerate(uuids):
            model = "NVIDIA H100 80GB HBM3" if number % 3 else "NVIDIA H200"
            firmware = f"96.00.{chance.choice(('5A', '6B', '74', '9F'))}.00.0{number % 5}"
            place = (_node(number), model, f"165{number:010}", "692-2G520-0200-000", f"00000000:{16 + number % 8:02x}:00.0")
            yield uuid, BEGIN_US, END_US, *place, firmware, f"570.{chance.choice((86, 124, 133))}.20"

    _insert(connection, "devices", "uuid, first_us, at_us, node, model, serial, board, pci_bus_id, vbios, driver", devices())
    seats = (
        (uuid, BEGIN_US, _node(n), f"00000000:{16 + n % 8:02x}:00.0", f"165{n:010}", "692", END_US, "boot")
        for n, uuid in enumerate(uuids)
    )
    _insert(connection, "seats", "uuid, from_us, node, pci_bus_id, serial, board, seen_us, boot_id", seats)
    nodes = ((_node(number), BEGIN_US, END_US, "active", "[]") for number in range(0, len(uuids), 8))
    _insert(connection, "nodes", "node, first_us, at_us, role, devices", nodes)


def _jobs(connection: sqlite3.Connection, uuids: list[str], num_jobs: int, chance: random.Random) -> list[int]:
    """Jobs of 8 to 1024 ranks on neighbouring devices, of one or two attempts; return the failed ones."""
    parts: dict[str, list[tuple[object, ...]]] = {
        name: [] for name in ("jobs", "attempts", "placements", "checkpoints", "resumes")
    }
    failed = []
    for job in range(1, num_jobs + 1):
        begin_us = BEGIN_US + (END_US - BEGIN_US - 2 * DAY_US) * job // num_jobs
        size = min(len(uuids), chance.choice((8,) * 8 + (16,) * 5 + (64,) * 3 + (256,) * 2 + (1024,)))
        length_us = round(chance.uniform(0.02, 1.5) * DAY_US)
        tries = 2 if chance.random() < 0.3 else 1
        fails = chance.random() < 0.1
        failed += [job] if fails else []
        end_us = begin_us + tries * length_us
        parts["jobs"].append(
            ("local", f"user{job % 97}", f"j{job}", 1, b"s", "ended", 1, tries, begin_us, end_us, end_us, int(fails))
        )
        for attempt in range(1, tries + 1):
            from_us = begin_us + (attempt - 1) * length_us
            to_us = from_us + length_us - 1
            outcome = "failed" if attempt < tries or fails else "succeeded"
            parts["attempts"].append((job, attempt, 1, from_us, to_us, size, outcome, 100 * (attempt - 1), 100 * attempt))
            first = chance.randrange(0, len(uuids) - size + 1) // 8 * 8
            for rank in range(size):
                number = first + rank
                parts["placements"].append((job, attempt, rank, uuids[number], _node(number), from_us, to_us))
            for step in range(1, 11):
                iteration = 100 * (attempt - 1) + 10 * step
                at_us = from_us + length_us * step // 11
                parts["checkpoints"].append((job, attempt, iteration, f"/ckpt/user{job % 97}/j{job}/{iteration}", at_us))
            if attempt > 1:
                parts["resumes"].append((job, attempt, 100, f"/ckpt/user{job % 97}/j{job}/100", from_us + 1))
            elif job > 50 and chance.random() < 0.2:
                source = job - chance.randrange(1, 50)
                parts["resumes"].append((job, 1, 0, f"/ckpt/user{source % 97}/j{source}/100", from_us + 1))
    columns = {
        "jobs": "cluster, owner, job_id, run, state, phase, epoch, attempt, created_us, updated_us, ended_us, exit_code",
        "attempts": "job, attempt, epoch, started_us, stopped_us, world_size, outcome, start_iteration, last_iteration",
        "placements": "job, attempt, rank, device, node, from_us, to_us",
        "checkpoints": "job, attempt, iteration, path, at_us",
        "resumes": "job, attempt, iteration, path, at_us",
    }
    constants = {
        "jobs": (", reason, command, num_nodes, num_ranks, iteration, injected", ("", "", 1, 8, 100, 0)),
        "attempts": (", nodes, reason", ("[]", "")),
        "checkpoints": (", duration_s", (1.0,)),
    }
    for name, rows in parts.items():
        more, values = constants.get(name, ("", ()))
        _insert(connection, name, columns[name] + more, (row + values for row in rows))
    return failed


def _states(connection: sqlite3.Connection, uuids: list[str], told: list[str], chance: random.Random) -> None:
    """States of those told of, and of some that are clear again; their changes."""
    before = chance.sample(uuids, len(uuids) * 4 // 10)
    state_of = {uuid: "clear" for uuid in before} | {uuid: chance.choice(STATES) for uuid in told}
    subjects, changes = [], []
    for uuid, state in state_of.items():
        steps = ["watch"]
        if chance.random() < 0.25 or state in ("in_repair", "probation", "retired"):
            steps += ["quarantined", "in_repair", "probation", "clear"]
        steps += ["watch", "suspect", "quarantined"][: {"watch": 1, "suspect": 2}.get(state, 3)] if state != "clear" else []
        steps.append(state)
        first_us = chance.randrange(BEGIN_US, END_US)
        last_us = END_US if state != "clear" else min(END_US, first_us + 60 * DAY_US)
        times = sorted(chance.randrange(first_us, last_us + 1) for _ in steps)
        last = "clear"
        for version, (at_us, after) in enumerate(zip(times, steps, strict=True), 1):
            person = "root" if after in ("in_repair", "probation", "retired") else ""
            changes.append(
                (
                    "device",
                    uuid,
                    version,
                    at_us,
                    last,
                    after,
                    "reason of a change",
                    person,
                    "evidence",
                    "rsup-1/xid-contained",
                    "",
                )
            )
            last = after
        expires_us = END_US + round(chance.random() * 30 * DAY_US) if state in ("watch", "suspect") else None
        subjects.append(("device", uuid, state, times[-1], "xid 94 on a node", len(steps), 0.8, expires_us))
    more = "serial, rule, clean_us, override, override_actor, override_reason, ticket, held_by_test, settled_us, may_drain"
    columns = f"kind, subject, state, since_us, reason, version, score, expires_us, {more}"
    _insert(
        connection, "subjects", columns, ((*row, "", "rsup-1/xid-contained", 0, "", "", "", "", 0, 0, "") for row in subjects)
    )
    columns = "kind, subject, version, at_us, before, after, reason, principal, verb, rule, fingerprint"
    _insert(connection, "transitions", columns, changes)


def _evidence(
    connection: sqlite3.Connection, uuids: list[str], told: list[str], num: int, num_jobs: int, chance: random.Random
) -> None:
    """Nine tenths of it noise; a tenth of all is about those that are told of, and a few say very much."""
    number_of = {uuid: number for number, uuid in enumerate(uuids)}

    def rows() -> Iterator[tuple[object, ...]]:
        pick, bits = chance.random, chance.getrandbits
        for count in range(num):
            tells = pick() < 0.1
            source, code, weight = TELLING[bits(16) % 5] if tells else (*NOISE[bits(16) % 7], 0.0)
            uuid = told[int(len(told) * pick() ** 3)] if pick() < 0.1 else uuids[int(len(uuids) * pick())]
            last_us = BEGIN_US + int((END_US - BEGIN_US) * pick())
            number = number_of[uuid]
            job = 1 + bits(30) % num_jobs if bits(2) == 0 else None
            text = f"{source} {code}"
            identity = (
                f"{bits(96):024x}{count:08x}",
                "device",
                uuid,
                source,
                code,
                f"boot:{number // 8:05}-{last_us // (10 * DAY_US)}",
            )
            yield *identity, last_us - 60_000_000, last_us, last_us, 1, weight, f"165{number:010}", _node(number), job, text

    columns = "fingerprint, kind, subject, source, code, episode, first_us, last_us, recorded_us, count, weight, serial, node"
    constants = (0, 0, "", "", 0, "counted", "rsup-1/xid-contained", 1.0)
    more = "job, text, attempt, iteration, case_id, principal, injected, effect, rule, share"
    _insert(connection, "evidence", f"{columns}, {more}", (row + constants for row in rows()))
