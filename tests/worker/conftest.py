"""Runs of the reference trainer in real processes, with a fresh store for each attempt, as `rsup launch` gives them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, at import
    from torch._C._distributed_c10d import TCPStore

DEADLINE_S = 100
OTHERS_END_WITHIN_S = 20
_TINY = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --eval-iters 0"
TINY = _TINY.split()


class RankForker:
    """The process of `rank_forker.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("rank_forker.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._started: queue.Queue[int] = queue.Queue()
        self.ended: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *numbers = line.decode().split()
            if word == "started":
                self.ended.pop(int(numbers[0]), None)  # process ids come again: an earlier rank may have had it
                self._started.put(int(numbers[0]))
            elif word == "ended":
                self.ended[int(numbers[0])] = int(numbers[1])

    def start(self, environment: dict[str, str], arguments: list[str], output: Path, script: Path | None) -> int:
        """Start a rank, or that script; return its pid."""
        order = {"environment": environment, "arguments": arguments, "output": str(output)}
        if script is not None:
            order["script"] = str(script)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._started.get(timeout=DEADLINE_S)

    def close(self) -> None:
        """Kill what is left, and end the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=DEADLINE_S)
        self._reader.join(timeout=DEADLINE_S)
        self._process.stdout.close()


@dataclass
class Attempt:
    """The ranks of one attempt. `outputs[r]` has rank r's standard output and error together."""

    forker: RankForker
    store: TCPStore
    pids: list[int] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)

    def codes(self) -> list[int | None]:
        """Exit codes so far; None for a rank that runs."""
        return [self.forker.ended.get(pid) for pid in self.pids]

    def text(self, rank: int = 0) -> str:
        """What that rank has printed so far."""
        return self.outputs[rank].read_text()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until it holds; fail, with what the ranks printed, when the time is up."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                printed = "\n".join(f"--- rank {rank}\n{self.text(rank)}" for rank in range(len(self.pids)))
                raise AssertionError(f"not in time: {what}; exit codes {self.codes()}\n{printed}")
            time.sleep(0.01)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Signal one rank."""
        os.kill(self.pids[rank], number)

    def finish(self) -> list[int]:
        """Wait for the end. When a rank fails, the others get a while to end by themselves, as from a launcher; then they are
        killed."""
        self.wait_for(lambda: None not in self.codes() or any(self.codes()), "the end of the attempt")
        end_s = time.monotonic() + OTHERS_END_WITHIN_S
        self.wait_for(lambda: None not in self.codes() or time.monotonic() > end_s, "the end of the others")
        self.kill()
        return [code for code in self.codes() if code is not None]

    def kill(self) -> None:
        """Kill every rank that is left."""
        for pid in self.pids:
            if pid not in self.forker.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: None not in self.codes(), "killed ranks to go")

    def digest(self) -> str:
        """The digest, which must be rank 0's last line."""
        last = self.text().splitlines()[-1]
        assert last.startswith("digest "), self.text()
        assert len(last) == len("digest ") + 64
        return last


class Runs:
    """Starts attempts of one test, and ends what it leaves."""

    def __init__(self, forker: RankForker, folder: Path) -> None:
        self._forker = forker
        self._folder = folder
        self._attempts: list[Attempt] = []

    def start(
        self,
        num_ranks: int,
        *arguments: str,
        number: int = 1,
        job: str = "job",
        environment: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> Attempt:
        """Start attempt `number` of `job` on `num_ranks` ranks, with a tiny model; or that many processes of `script`."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        attempt = Attempt(self._forker, store)
        self._attempts.append(attempt)
        for rank in range(num_ranks):
            output = self._folder / f"{len(self._attempts)}-rank-{rank}.txt"
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_RESTART_COUNT": str(number - 1),
                "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
                **(environment or {}),
            }
            attempt.outputs.append(output)
            attempt.pids.append(self._forker.start(variables, [*TINY, *arguments], output, script))
        return attempt

    def run(self, num_ranks: int, *arguments: str, number: int = 1, job: str = "job") -> Attempt:
        """Run one attempt to its end."""
        attempt = self.start(num_ranks, *arguments, number=number, job=job)
        attempt.finish()
        return attempt

    def run_with_restarts(self, num_ranks: int, *arguments: str, job: str = "job", most: int = 5) -> list[Attempt]:
        """Run attempts until one ends well; return all."""
        attempts: list[Attempt] = []
        while not attempts or any(attempts[-1].codes()):
            assert len(attempts) < most, attempts[-1].text()
            attempts.append(self.run(num_ranks, *arguments, number=len(attempts) + 1, job=job))
        return attempts

    def close(self) -> None:
        """Kill what the test left running."""
        for attempt in self._attempts:
            attempt.kill()


@pytest.fixture(scope="session")
def rank_forker(nothing_is_left: None) -> Iterator[RankForker]:
    """One forking process for all tests of this folder."""
    forker = RankForker()
    yield forker
    forker.close()


@pytest.fixture
def runs(rank_forker: RankForker, own_directories: Path) -> Iterator[Runs]:
    """Runs of the reference trainer."""
    outputs = own_directories / "outputs"
    outputs.mkdir()
    made = Runs(rank_forker, outputs)
    yield made
    made.close()
