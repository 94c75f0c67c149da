"""The batch scripts of deploy/slurm run on a cluster as they are, submitted by an ordinary user."""

import json
import os
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "deploy" / "slurm"
ANN = 20001

SAYS = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["SLURMD_NODENAME"], *sys.argv[1:])
"""

WAITS = """
import os, pathlib, time
node, attempt = os.environ["SLURMD_NODENAME"], os.environ["RSUP_ATTEMPT"]
print("rank", os.environ["RANK"], "on", node, "attempt", attempt, flush=True)
pathlib.Path(f"on-{node}-{attempt}").touch()
while not pathlib.Path("finish").exists():
    time.sleep(0.05)
"""

# No scontrol, no munge, its own process numbers and shared memory: as in a container.
CONTAINER = """#!/bin/bash
export PATH=$HOME/bin:/usr/bin:/bin SLURM_CONF=/nonexistent
exec unshare --user --map-root-user --pid --fork --mount --mount-proc --kill-child "$@"
"""


class User:
    """An ordinary user who submits the examples from his home."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.run("true", uid=ANN)  # makes the home
        self.home = cluster.home(ANN)
        (self.home / "bin").mkdir(exist_ok=True)
        self.write("bin/rsup", f'#!/bin/sh\nexec {cluster.rsup} "$@"\n')
        self.environ = {"PATH": f"{self.home}/bin:{cluster.environ['PATH']}"}

    def write(self, name: str, text: str) -> str:
        path = self.home / name
        path.write_text(text)
        os.chown(path, ANN, ANN)
        path.chmod(0o700)
        return str(path)

    def sbatch(self, example: str, *words: str, options: tuple[str, ...] = (), **environ: str) -> int:
        """Submit an example; `words` follow its name. Returns the job's id."""
        command = ("sbatch", "--parsable", *options, str(EXAMPLES / f"{example}.sbatch"), *words)
        return int(self.cluster.run(*command, uid=ANN, environ=self.environ | environ).stdout.split(";")[0])

    def nodes_of_attempt(self, attempt: int) -> list[str]:
        """Where ranks of the waiting script have started."""
        return sorted(path.name.split("-")[1] for path in self.home.glob(f"on-*-{attempt}"))

    def output(self, job: int, name: str = "train") -> str:
        path = self.home / f"{name}-{job}.out"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def ann(slurm: Cluster) -> User:
    return User(slurm)


@pytest.mark.timeout(400)
def test_each_example_runs_as_it_is(ann: User, slurm: Cluster) -> None:
    """While the job with a spare learns that a node is lost, which takes 15 s, the others run on the nodes that are left."""
    script, waits = ann.write("train.py", SAYS), ann.write("waits.py", WAITS)
    container = ann.write("container", CONTAINER)
    spare = ann.sbatch("spare_nodes", waits, options=("--job-name=spare",))
    slurm.wait(lambda: len(ann.nodes_of_attempt(1)) == 2, "both ranks", 100, job=spare)
    lost = ann.nodes_of_attempt(1)[1]
    slurm.lose_node(lost)

    single = ann.sbatch("single_node", script, "alone", options=("--gres=gpu:2",))
    many = ann.sbatch("many_nodes", script, "together", options=("--gres=gpu:2",))
    inside = ann.sbatch("container", script, "inside", options=("--gres=gpu:1",), CONTAINER=container)
    chain = [ann.sbatch("singleton_chain", script, f"link {n}", options=("--job-name=gpt", "--gres=gpu:1")) for n in (1, 2)]
    for job in (single, many, inside, *chain):
        assert slurm.wait_job(job, within_s=90) == "COMPLETED", ann.output(job) + ann.output(job, "gpt")
    assert all(f"rank {rank} of 2 on n" in ann.output(single) for rank in range(2)), ann.output(single)
    assert all(f"rank {rank} of 4 on n" in ann.output(many) for rank in range(4)), ann.output(many)
    assert all(f"rank {rank} of 2 on n" in ann.output(inside) for rank in range(2)), ann.output(inside)
    result = json.loads((ann.home / f"train-{inside}.result.json").read_text())
    assert result["exit_code"] == 0 and result["job_id"] == str(inside)
    first, second = (ann.output(job, "gpt") for job in chain)
    assert "link 1" in first and "link 2" in second and "job gpt" in first and "job gpt" in second

    slurm.wait(lambda: len(ann.nodes_of_attempt(2)) == 2, "the attempt with the spare", 100, job=spare)
    assert lost not in ann.nodes_of_attempt(2)
    (ann.home / "finish").touch()
    assert slurm.wait_job(spare, within_s=60) == "COMPLETED", ann.output(spare, "spare")
