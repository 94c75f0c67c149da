"""The test cluster does what the other tests take for granted."""

from tests.slurm.cluster import Cluster


def test_a_job_of_a_user_runs_on_its_nodes_and_sees_its_gpus(slurm: Cluster) -> None:
    job = slurm.submit(
        "srun bash -c 'echo task $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(id -u)'",
        "-N2",
        "--gres=gpu:2",
        uid=20001,
    )
    assert slurm.wait_job(job) == "COMPLETED"
    assert sorted(slurm.output(job).splitlines()) == ["task 0 n0 0,1 20001", "task 1 n1 0,1 20001"]


def test_hooks_and_states(slurm: Cluster) -> None:
    slurm.hook("prolog", "[ $SLURMD_NODENAME = n0 ] && exit 1; exit 0")
    job = slurm.submit("echo ran on $SLURM_JOB_NODELIST", "-N1")
    slurm.wait(lambda: slurm.state("n0")[0] == "drained", "n0 to be drained")
    assert slurm.state("n0")[1] == "Prolog error"
    assert slurm.state("n1")[1] == ""
    slurm.wait_job(job)
    assert slurm.output(job) == "ran on n1\n"
