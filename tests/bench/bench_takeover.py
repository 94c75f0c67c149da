"""How long a job is without its supervisor: from the leader's SIGKILL, SIGSTOP or loss of the database to the other's welcome.

`python -m tests.bench.bench_takeover [RUNS]`. Two `rsup serve` on one PostgreSQL database, one agent that knows both addresses.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.supervisor import places
from rsup.supervisor.wire import AgentInfo, JobSpec
from tests.bench.table import Row, print_table
from tests.process.two_supervisors import Serving
from tests.store.postgres_server import started_server

RUNS = 7
SETTLE_S = 3.5
"""A standby that has just connected waits before it trusts a free lease; that is not what is measured."""
REPORT_EVERY_S = 0.5


class Bench:
    """The pair and the agent."""

    def __init__(self, folder: Path, url: str) -> None:
        key = folder / "key"
        key.write_text("a secret of the benchmark's supervisors")
        key.chmod(0o600)
        self.leader = Serving(folder / "a", url, key).leads()
        self.other = Serving(folder / "b", url, key).stands_by()
        info = AgentInfo("agent", "node", "127.0.0.1", os.getpid(), places.boot_id())
        secret = places.link_key(places.read_key_file(key))
        self.client = SupervisorClient(f"{self.leader.rpc},{self.other.rpc}", info, JobSpec(owner="ann"), Spool(None), secret)
        self._reported_s = 0.0

    def turn(self) -> None:
        self.client.poll()
        if time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            self.client.send_report(1, 0, attempt=1)
        time.sleep(0.005)

    def one(self, signum: int) -> tuple[float, float]:
        """Seconds until the other leads, and until it has welcomed the agent."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s or not self.client.connected:
            self.turn()
        before, led, instance = time.monotonic(), self.other.times_led, self.client.supervisor
        self.leader.send(signum)
        leads_s = 0.0
        while self.client.supervisor == instance:
            self.turn()
            if not leads_s and self.other.times_led > led:
                leads_s = time.monotonic() - before
            assert time.monotonic() - before < 60, self.other.log[-2000:]
        welcomed_s = time.monotonic() - before
        stood_by = self.leader.times_stood_by
        if signum == signal.SIGKILL:
            self.leader.restart()
        else:
            self.leader.send(signal.SIGCONT)
        self.leader.stands_by(stood_by + 1)
        self.leader, self.other = self.other, self.leader
        return leads_s or welcomed_s, welcomed_s

    def close(self) -> None:
        self.client.close()
        for one in (self.leader, self.other):
            one.end()


def main(runs: int = RUNS) -> list[Row]:
    """Rows in seconds."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder, contextlib.closing(started_server()) as servers:
        (Path(folder) / "run").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = f"{folder}/run"
        bench = Bench(Path(folder), next(servers).new_database())
        try:
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                found = [bench.one(signum) for _ in range(runs)]
                rows.append(
                    Row(f"{signum.name} of the leader: another leads", "rsup", [leads for leads, _ in found], "s", "<= 5 s")
                )
                rows.append(
                    Row(f"{signum.name} of the leader: the agent is welcomed", "rsup", [all_ for _, all_ in found], "s")
                )
        finally:
            bench.close()
    return rows


if __name__ == "__main__":
    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
