"""`srun rsup launch` on a real cluster, by ordinary users: what SLURM's variables tell needs no flag, and jobs keep apart."""

import json

from tests.slurm.cluster import Cluster
from tests.slurm.launching import ANN, BEN

SAY = "echo $SLURM_STEP_ID: rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $SLURMD_NODENAME"


def said(slurm: Cluster, job: int, what: str = "rank ") -> list[str]:
    """The job's lines with that in them, sorted."""
    return sorted(line for line in slurm.output(job).splitlines() if what in line and not line.startswith("rsup"))


def test_steps_of_two_users_beside_one_another(slurm: Cluster) -> None:
    launch = f"{slurm.rsup} launch --no-python sh -c '{SAY}'"
    ann = slurm.submit(f"srun {launch}", "-N3", "--gres=gpu:2", uid=ANN)
    step = f"srun --exact -N2 -n2 {launch}"
    ben = slurm.submit(f"{step} & {step} & wait -n; wait -n", "-N2", "--ntasks-per-node=2", uid=BEN)
    crowd = f"srun --exact -N2 -n3 {launch}; echo code $?; {launch}"
    several = slurm.submit(crowd, "-N2", "--ntasks-per-node=2", "--gres=gpu:1", uid=BEN)

    assert slurm.wait_job(ann, within_s=100) == "COMPLETED", slurm.output(ann)
    nodes = [f"0: rank {rank} of 6, {rank % 2} of 2 on n{rank // 2}" for rank in range(6)]
    assert said(slurm, ann) == nodes  # ranks in the order of the nodes, one for each GPU that SLURM gave
    assert slurm.wait_job(ben, within_s=100) == "COMPLETED", slurm.output(ben)
    assert said(slurm, ben) == [f"{step}: rank {rank} of 2, 0 of 1 on n{rank}" for step in (0, 1) for rank in (0, 1)]
    assert slurm.wait_job(several, within_s=100) == "COMPLETED", slurm.output(several)
    output = slurm.output(several)
    assert output.count("starts several tasks on a node") == 1 and "code 2" in output
    assert "has 2 nodes, and this launch is on one: write srun" in output
    assert said(slurm, several, ": rank") == [": rank 0 of 1, 0 of 1 on n0"]

    state = slurm.home(ANN) / f".local/state/rsup/slurm/rsup-{ann}"
    result = json.loads((state / "jobs" / f"{ann}.1" / "result.json").read_text())
    assert (result["job_id"], result["exit_code"], result["avoid_nodes"]) == (str(ann), 0, [])
    asked = slurm.run(slurm.python, "-m", "rsup.launcher", "status", str(ann), "--json", uid=ANN)  # as on a login node
    assert json.loads(asked.stdout)["job"]["outcome"] == "succeeded" and f"is in {state}" in asked.stderr


def test_twenty_jobs_at_once(slurm: Cluster) -> None:
    launch = f"srun {slurm.rsup} launch --no-python sh -c 'echo job $SLURM_JOB_ID rank $RANK of $WORLD_SIZE'"
    sizes = [1 + number % 2 for number in range(20)]
    jobs = [slurm.submit(launch, f"-N{size}", "--mem=100", uid=(ANN, BEN)[number // 10]) for number, size in enumerate(sizes)]
    for job, size in zip(jobs, sizes, strict=True):
        assert slurm.wait_job(job, within_s=100) == "COMPLETED", slurm.output(job)
        assert said(slurm, job) == [f"job {job} rank {rank} of {size}" for rank in range(size)]
