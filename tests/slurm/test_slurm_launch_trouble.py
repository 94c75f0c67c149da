"""Launches under SLURM when something is in the way: a lost node, a suspended job, scontrol that hangs, no supervisor."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from tests.jobs.conftest import free_port
from tests.slurm.cluster import Cluster
from tests.slurm.job_processes import job_processes
from tests.slurm.launching import ANN, script

WAITS = """
trap 'echo rank $RANK was told; touch $HOME/told.$RANK' USR1
echo attempt $RSUP_ATTEMPT rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME until ${RSUP_DEADLINE:-ever}
if [ $RSUP_ATTEMPT != 1 ]; then exit 0; fi
while [ ! -e $HOME/go ]; do
  if [ $RANK = 1 ] && [ -e $HOME/die ]; then exit 3; fi
  sleep 0.1
done
"""
"""A rank whose first attempt waits for $HOME/go, passes SIGUSR1 on as a file, and whose rank 1 dies of $HOME/die."""


def lines(slurm: Cluster, job: int, beginning: str) -> list[str]:
    return sorted(line for line in slurm.output(job).splitlines() if line.startswith(beginning))


def test_a_lost_node_is_replaced_within_the_allocation(slurm: Cluster) -> None:
    waits = script(slurm, WAITS, "waits.sh")
    launch = f"{slurm.rsup} launch --nnodes 2 --max-restarts 1 --result-file $HOME/result --no-python sh {waits}"
    job = slurm.submit(f"srun --no-kill {launch}; {slurm.rsup} slurm finish $HOME/result", "-N3", "--no-kill", uid=ANN)
    slurm.wait(lambda: len(lines(slurm, job, "attempt 1 rank")) == 2, "both ranks to run", job=job)
    slurm.lose_node("n1")
    assert slurm.wait_job(job, within_s=90) == "COMPLETED", slurm.output(job)  # srun says 137, the result file the truth
    assert [line.split(" until")[0] for line in lines(slurm, job, "attempt 2 rank")] == [
        "attempt 2 rank 0 of 2 on n0",
        "attempt 2 rank 1 of 2 on n2",
    ]
    assert "node n1 is out: it does not answer, and SLURM says that it is DOWN" in slurm.output(job)


def test_suspended_signalled_and_ended_in_time(slurm: Cluster) -> None:
    waits = script(slurm, WAITS, "waits.sh")
    launch = f"srun {slurm.rsup} launch --ft-rank-out-of-section-timeout 60 --no-python sh {waits}"
    job = slurm.submit(launch, "-N2", "--time=10", uid=ANN)
    slurm.wait(lambda: len(lines(slurm, job, "attempt 1 rank")) == 2, "both ranks to run", job=job)
    end_s = datetime.fromisoformat(slurm.job(job)["EndTime"]).timestamp()
    until = {float(line.split()[-1]) for line in lines(slurm, job, "attempt 1 rank")}
    assert until == {end_s}, "SLURM 22.05 does not tell the end in a variable: the launch asks"

    shells = {pid for pid in job_processes(slurm.conf) if "waits.sh" in command_of(pid) and "launch" not in command_of(pid)}
    ranks = [pid for pid in shells if parent_of(pid) not in shells]  # a shell that is about to become its `sleep` is none
    assert len(ranks) == 2
    slurm.run("scontrol", "suspend", str(job))
    slurm.wait(lambda: all(state_of(pid) == "T" for pid in ranks), "the ranks to be stopped", job=job)
    time.sleep(2.0)  # what the launcher has to account for
    slurm.run("scontrol", "resume", str(job))
    slurm.wait(lambda: all(state_of(pid) != "T" for pid in ranks), "the ranks to go on", job=job)

    slurm.run("scancel", "--signal=USR1", str(job), uid=ANN)
    told = [slurm.home(ANN) / f"told.{rank}" for rank in (0, 1)]
    slurm.wait(lambda: all(path.exists() for path in told), "the ranks to hear USR1", job=job)
    (slurm.home(ANN) / "go").touch()
    assert slurm.wait_job(job) == "COMPLETED", slurm.output(job)
    assert "attempt 2" not in slurm.output(job) and "suspected" not in slurm.output(job)


def test_scontrol_hangs(slurm: Cluster) -> None:
    bin_dir = slurm.folder / "out" / "bin"
    bin_dir.mkdir(exist_ok=True)
    hangs = script(slurm, "#!/bin/sh\nexec sleep 100\n", "bin/scontrol")
    hangs.chmod(0o755)
    launch = f"env PATH={bin_dir}:$PATH {slurm.rsup} launch --no-python sh -c 'echo rank $RANK on $SLURMD_NODENAME; exit 88'"
    job = slurm.submit(f"srun {launch}", "-N2", "--no-requeue", uid=ANN)
    slurm.wait(lambda: len(lines(slurm, job, "rank")) == 2, "both ranks to run", job=job)
    told = "n0 does not resolve, and scontrol -o show node n0: no answer within 5 s: the nodes meet at 127.0.0.1"
    slurm.wait(lambda: told in slurm.output(job), "the launch to say where its nodes meet", job=job)
    assert slurm.wait_job(job, within_s=90) == "FAILED", slurm.output(job)


def test_nobody_decides_for_a_while(slurm: Cluster) -> None:
    waits = script(slurm, WAITS, "waits.sh")
    home = slurm.home(ANN)
    with shared_supervisor(slurm) as supervisor:
        shared = {"RSUP_SUPERVISOR": supervisor.address, "RSUP_KEY_FILE": str(home / "key")}
        launch = f"srun {slurm.rsup} launch --max-restarts 1"
        waiting = slurm.submit(f"{launch} --no-python sh {waits}", "-N2", "--mem=100", uid=ANN, environ=shared)
        slurm.wait(lambda: len(lines(slurm, waiting, "attempt 1 rank")) == 2, "both ranks to run", job=waiting)
        hasty = slurm.submit(
            f"{launch} --supervisor-grace 2 --no-python sh {waits}", "-N2", "--mem=100", uid=ANN, environ=shared
        )
        slurm.wait(lambda: len(lines(slurm, hasty, "attempt 1 rank")) == 2, "both ranks to run", job=hasty)
        supervisor.kill()
        (home / "die").touch()
        late = slurm.submit(
            f"{launch} --no-python sh -c 'echo rank $RANK of $WORLD_SIZE'", "-N2", "--mem=100", uid=ANN, environ=shared
        )
        assert slurm.wait_job(late, within_s=90) == "COMPLETED", slurm.output(late)
        assert lines(slurm, late, "rank") == ["rank 0 of 2", "rank 1 of 2"]
        assert "an embedded one takes its place" in slurm.output(late)
        slurm.wait(lambda: slurm.job(hasty)["Restarts"] == "1", "the launch without patience to be requeued", job=hasty)
        assert "exit 88: please requeue" in slurm.output(hasty)
        assert slurm.job(waiting)["JobState"] == "RUNNING", "this one waits for the supervisor"
        (home / "die").unlink()
        (home / "go").touch()
        supervisor.start()
        assert slurm.wait_job(waiting, within_s=90) == "COMPLETED", slurm.output(waiting)
        assert [line.split(" until")[0] for line in lines(slurm, waiting, "attempt 2 rank")] == [
            f"attempt 2 rank {rank} of 2 on n{rank}" for rank in (0, 1)
        ]
        assert slurm.wait_job(hasty, within_s=90) == "COMPLETED", slurm.output(hasty)


class SharedSupervisor:
    """`rsup serve` of an ordinary user, at a fixed TCP port."""

    def __init__(self, slurm: Cluster) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._slurm = slurm
        self._process: subprocess.Popen[bytes] | None = None
        slurm.run("true", uid=ANN)  # makes the home
        self._home = slurm.home(ANN)
        slurm.run("sh", "-c", "umask 077; head -c 24 /dev/urandom | base64 > key", uid=ANN)
        self.start()

    def start(self) -> None:
        state = ["--state-dir", str(self._home / "serve"), "--listen", "127.0.0.1:0", "--key-file", str(self._home / "key")]
        command = [self._slurm.python, "-m", "rsup.launcher", "serve", "--rpc", f"tcp://{self.address}", *state]
        environ = self._slurm.environ | {"HOME": str(self._home), "XDG_RUNTIME_DIR": str(self._home / "run")}
        mark = {"RSUP_TEST_RUN": os.environ["RSUP_TEST_RUN"]}
        with Path(self._slurm.folder, "out", "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environ | mark, cwd="/", user=ANN, group=ANN, extra_groups=[], stdout=log, stderr=log
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def shared_supervisor(slurm: Cluster) -> Iterator[SharedSupervisor]:
    supervisor = SharedSupervisor(slurm)
    try:
        yield supervisor
    finally:
        supervisor.kill()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    return stat_of(pid)[0]


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


def stat_of(pid: int) -> list[str]:
    """The words of /proc from the state on; those of nobody where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "0"]
