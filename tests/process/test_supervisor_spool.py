"""The agent's spool: nothing is lost by the death of its writer, nothing grows without bound."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rsup.launcher.spool import Spool
from rsup.supervisor import wire
from rsup.supervisor.wire import Note, RanksGone


def note(text: str) -> Note:
    return Note(0, "info", text)


def texts(spool: Spool, after: int = 0) -> list[tuple[int, str]]:
    return [(sequence, fact.text) for sequence, fact in spool.pending(after) if isinstance(fact, Note)]


def test_facts_are_numbered_kept_and_forgotten(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert [spool.append(note(t)) for t in "abc"] == [1, 2, 3]
    spool.acknowledge(1)
    assert texts(spool) == [(2, "b"), (3, "c")]
    assert texts(spool, after=2) == [(3, "c")]
    spool.acknowledge(99)
    spool.acknowledge(0)
    assert texts(spool) == [(2, "b"), (3, "c")] and spool.acked == 1
    spool.close()


def test_pending_is_bounded_but_never_empty(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for i in range(10):
        spool.append(note(f"{i}" * 1000))
    assert len(spool.pending(max_facts=3)) == 3
    assert len(spool.pending(max_bytes=1)) == 1
    assert len(spool.pending(max_bytes=3000)) == 2
    spool.close()


WRITER = """
import os, signal, sys
from pathlib import Path
from rsup.launcher.spool import Spool
from rsup.supervisor.wire import Note
spool = Spool(Path(sys.argv[1]))
for i in range(1000):
    spool.append(Note(0, "info", f"fact {i}"))
    if i == 600:
        spool.acknowledge(100)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_owner_finds_everything_after_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    done = subprocess.run([sys.executable, "-c", WRITER, str(path)], timeout=90)
    assert done.returncode == -signal.SIGKILL
    spool = Spool(path)
    assert texts(spool) == [(i + 1, f"fact {i}") for i in range(1000)]
    spool.acknowledge(999)
    assert spool.append(note("by the keeper")) == 1001
    assert texts(spool) == [(1000, "fact 999"), (1001, "by the keeper")]
    spool.close(remove=True)
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 3, 5, 20])
def test_a_truncated_tail_costs_only_the_last_fact(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    for text in ("one", "two", "three and a long tail of text"):
        spool.append(note(text))
    spool.close()
    os.truncate(path, path.stat().st_size - cut)
    again = Spool(path)
    assert texts(again) == [(1, "one"), (2, "two")]
    assert again.append(note("new")) == 3
    again.close()
    assert [sequence for sequence, _ in Spool(path).pending()] == [1, 2, 3]


def test_numbers_go_on_after_the_file_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    for i in range(200):
        spool.append(note("x" * 1000 + str(i)))
    before = path.stat().st_size
    spool.acknowledge(200)
    assert path.stat().st_size < 100 < before
    spool.close()
    again = Spool(path)
    assert (again.acked, again.last, len(again)) == (200, 200, 0)
    assert again.append(note("next")) == 201
    again.close()


def test_memory_is_bounded_while_the_file_has_everything(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", memory_limit_bytes=50_000)
    for i in range(400):
        spool.append(note(f"{i} " + "y" * 1000))
    kept = [entry for entry in spool._entries if entry.fact is not None]
    assert sum(entry.size_bytes for entry in kept) <= 52_000
    assert [text.split()[0] for _, text in texts(spool)] == [str(i) for i in range(400)]
    spool.close()


def test_when_there_is_no_room_only_what_decides_is_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", file_limit_bytes=3000)
    for _ in range(10):
        spool.append(note("z" * 1000))
    assert spool.num_lost == 8 and spool.last == 2
    assert spool.append(RanksGone(0, 1)) == 3
    spool.close()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from rsup.launcher.spool import Spool
from rsup.supervisor.wire import RanksGone
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
spool = Spool(Path(sys.argv[1]))
for i in range(100):
    spool.append(RanksGone(0, i))
assert "cannot write the spool" in spool.file_error, spool.file_error
assert [f.attempt for _, f in spool.pending()] == list(range(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append(RanksGone(0, 100))
assert not spool.file_error
"""


def test_a_full_disk_loses_nothing_and_is_made_up_for(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    path = tmp_path / "spool"
    subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=True, timeout=90)
    found = [fact.attempt for _, fact in Spool(path).pending() if isinstance(fact, RanksGone)]
    assert found == list(range(101))


def test_a_supervisor_with_another_history_gets_fresh_numbers(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    for text in "abcd":
        spool.append(note(text))
    spool.acknowledge(2)
    spool.rebase(0)
    assert texts(spool) == [(1, "c"), (2, "d")]
    spool.rebase(56)
    assert texts(spool) == [(57, "c"), (58, "d")]
    spool.close()
    assert texts(Spool(path)) == [(57, "c"), (58, "d")]


def test_an_unusable_path_keeps_facts_in_memory(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "missing" / "spool")
    assert spool.append(note("a")) == 1 and texts(spool) == [(1, "a")]
    assert "cannot use the spool" in spool.file_error


def test_a_fact_too_large_for_a_message_becomes_a_note(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    stack = wire.RankStack(0, 1, "py-spy", "x" * wire.MAX_MESSAGE_BYTES)
    spool.append(wire.StacksTaken(0, 1, [stack]))
    ((_, fact),) = spool.pending()
    assert isinstance(fact, Note) and "too large" in fact.text
    spool.close()
