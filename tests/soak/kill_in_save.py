"""Kills ranks in the middle of saves, again and again: `python -m tests.soak.kill_in_save 200 [--seed N] [--ranks N]`.

Each strike: start the ranks, which go on from the newest whole checkpoint, durable or local, and check every value; aim at a
point of a durable or a local save of one rank, or at any time; wait for it and a random moment longer; SIGKILL that rank, or
all. It fails if ranks go on from an older checkpoint than the newest that was reported, or from one that is not what it says
it is. Prints where the strikes fell.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

warnings.simplefilter("ignore", FutureWarning)

import torch.distributed.checkpoint.state_dict_loader  # noqa: E402
import torch.distributed.checkpoint.state_dict_saver  # noqa: E402, F401

from tests.soak.saving_ranks import DURABLE_POINTS, LOCAL_POINTS, Place, Track, run_rank  # noqa: E402

START_WITHIN_S = 60.0
AIM_WITHIN_S = 5.0
MOST_DELAY_S = 0.02


@dataclass
class Strikes:
    """Where strikes fell, and what became of the next attempts."""

    fell: Counter[tuple[str, str]] = field(default_factory=Counter)
    on_disk: Counter[str] = field(default_factory=Counter)
    num_killed_all: int = 0
    num_iterations: int = 0


class Soak:
    """One directory of checkpoints and the attempts of one job on it."""

    def __init__(self, folder: Path, num_ranks: int, num_values: int, draw: random.Random) -> None:
        self.folder = folder
        self.num_ranks = num_ranks
        self.num_values = num_values
        self.draw = draw
        self.track = Track(folder / "track")
        self.strikes = Strikes()

    def start(self, attempt: int) -> list[int]:
        """Fork the ranks of an attempt; return their pids."""
        self.track.begin_attempt()
        pids = []
        for rank in range(self.num_ranks):
            pid = os.fork()
            if pid == 0:
                output = os.open(self.folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                run_rank(Place(self.folder, rank, self.num_ranks, attempt, self.num_values))
            pids.append(pid)
        return pids

    def strike(self, pids: list[int]) -> None:
        """Wait until the ranks save, aim, and kill."""
        self._wait(pids, lambda: self.track.is_running, START_WITHIN_S)
        victim, is_local = self.draw.randrange(self.num_ranks), self.draw.random() < 0.4
        points = (LOCAL_POINTS if is_local else DURABLE_POINTS)[1:]
        point = self.draw.choice([*points, "any time"])
        if point == "any time":
            time.sleep(self.draw.uniform(0, 0.3))  # the moment is what is random; nothing waits for it
        else:
            with contextlib.suppress(TimeoutError):
                self._wait(pids, lambda: self.track.at(victim, is_local) == point, AIM_WITHIN_S)
            time.sleep(self.draw.uniform(0, MOST_DELAY_S) * self.draw.random())
        kill_all = self.draw.random() < 0.3
        for pid in pids if kill_all else [pids[victim]]:
            os.kill(pid, signal.SIGKILL)
        self._note(victim, kill_all)

    def _note(self, victim: int, kill_all: bool) -> None:
        self.strikes.fell[self.track.at(victim, False), self.track.at(victim, True)] += 1
        self.strikes.num_killed_all += kill_all
        begun = list((self.folder / "save").glob("iter_*.tmp-*"))
        state = "no durable save begun"
        if begun:
            names = [path.name for path in begun[0].iterdir()] if begun[0].exists() else []
            state = "files, no commit.json" if names else "an empty folder"
            state = "commit.json, not renamed" if "commit.json" in names else state
        if any(self.folder.glob("node-*/rsup-*/.iter_*")):
            state += " + an unfinished local part"
        self.strikes.on_disk[state] += 1

    def _wait(self, pids: list[int], condition: Callable[[], bool], within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {within_s:g} s\n{self.outputs()}")
            for pid in pids:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    raise AssertionError(f"a rank ended by itself\n{self.outputs()}")

    def outputs(self) -> str:
        """What the ranks of the last attempt have printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("rank-*.txt")))

    def end(self, pids: list[int]) -> None:
        """Kill what is left, as a launcher does, and wait for all."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)

    def run(self, num_strikes: int) -> None:
        """All strikes, and one start more that has to go on from what the last left."""
        for attempt in range(1, num_strikes + 2):
            pids = self.start(attempt)
            try:
                if attempt <= num_strikes:
                    self.strike(pids)
                else:
                    self._wait(pids, lambda: self.track.is_running, START_WITHIN_S)
            finally:
                self.end(pids)
            (self.folder / f"store-{attempt}").unlink(missing_ok=True)
        self.strikes.num_iterations = self.track.reported[2]


def print_strikes(strikes: Strikes) -> None:
    """The table of where they fell."""
    print(f"{'durable save':14} {'local save':12} strikes")
    for (durable, local), count in sorted(strikes.fell.items()):
        print(f"{durable:14} {local:12} {count}")
    print()
    for state, count in sorted(strikes.on_disk.items(), key=lambda item: -item[1]):
        print(f"{count:4} times on disk: {state}")


def main() -> int:
    """Parse, strike, print; 0 if every attempt went on as it had to."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill_in_save", description=__doc__)
    parser.add_argument("strikes", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=4.0, help="size of the state")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rsup-soak-"))
    soak = Soak(folder, given.ranks, int(given.mib * (1 << 20) / 8), random.Random(given.seed))
    began_s = time.monotonic()
    try:
        soak.run(given.strikes)
    except (AssertionError, TimeoutError) as failure:
        print(f"seed {given.seed}, after {sum(soak.strikes.fell.values())} strikes: {failure}; see {folder}")
        return 1
    print_strikes(soak.strikes)
    number = sum(soak.strikes.fell.values())
    took_s = time.monotonic() - began_s
    print(
        f"\n{number} kills ({soak.strikes.num_killed_all} of all ranks), seed {given.seed}: each start went on from a whole "
        f"checkpoint, none older than the newest reported; iteration {soak.strikes.num_iterations} after {took_s:.0f} s"
    )
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
