"""Boards whose agents were killed together with their keepers, as SLURM does it: the user's next launch removes them."""

import mmap
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from rsup.launcher import agent_places
from rsup.supervisor.heartbeat_board import MAGIC, Board, pid_namespace, remove_leftovers

_AGENT = """
import sys, time
from pathlib import Path
from rsup.supervisor.heartbeat_board import Board
print(Board.create(2, Path(sys.argv[1]), shared_memory=Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_files_of_agents_in_other_pid_namespaces_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    live = agent_places.make_places("0123456789")
    live.rank_socket.touch()
    dead_pid = 4_194_999  # above any that Linux gives out
    mark = live.rank_socket.name.partition(".")[2].partition("-")[0]
    for name, is_kept in (
        (f"a-{dead_pid}.{mark}-x.ranks", False),
        (f"a-{dead_pid}.0-x.ranks", True),
        (f"a-{dead_pid}-x.ranks", False),
    ):
        path = live.runtime_dir / name
        path.touch()
        agent_places.make_places("abcdefghij").remove()
        assert (path.exists(), live.rank_socket.exists()) == (is_kept, True), name


def test_boards_of_the_dead_are_removed_and_no_others(tmp_path: Path) -> None:
    own = Board.create(1, tmp_path, shared_memory=tmp_path)
    with subprocess.Popen([sys.executable, "-c", _AGENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        board = Path(agent.stdout.readline().strip())
        assert remove_leftovers([tmp_path]) == [], "both live"
        agent.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        content = board.read_bytes()
        assert remove_leftovers([tmp_path], uid=os.getuid() + 1) == [] and remove_leftovers([tmp_path]) == [board]
    board.write_bytes(content)
    assert remove_leftovers([tmp_path]) == [board]
    for namespace, removed in ((pid_namespace() + 1, []), (0, [board])):  # of a container; of an older release
        board.write_bytes(content[:40] + struct.pack("<Q", namespace) + content[48:])
        assert remove_leftovers([tmp_path]) == removed
    board.write_bytes(content[:24] + bytes(8) + content[32:])
    assert remove_leftovers([tmp_path]) == [], "nobody has signed it yet"
    assert own.path.exists()


def test_a_board_is_one_only_when_its_owner_stands_in_it() -> None:
    """An agent that sweeps at that moment would take it for a leftover."""
    words: dict[int, int] = {}
    Board(Path(), cast(memoryview, words), cast(mmap.mmap, None), 3)._write_header()
    assert list(words)[-1] == 0 and words[0] == MAGIC and words[3] == os.getpid()
