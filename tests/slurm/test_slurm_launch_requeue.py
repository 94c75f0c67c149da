"""What a launch has SLURM do at its end: 16, 88 and 93, the gate's refusal, a job that is killed while it starts, a
container."""

import json
import re

from tests.slurm.cluster import Cluster
from tests.slurm.launching import ANN, DECLARES, script, snapshot

SAY = "echo run $SLURM_RESTART_COUNT rank $RANK on $SLURMD_NODENAME"
CONTAINER = "unshare --user --map-root-user --mount --pid --fork --mount-proc"


def test_requeued_elsewhere_again_or_never(slurm: Cluster) -> None:
    declares = script(slurm, DECLARES, "declares.py")

    def submit(code: int, *options: str) -> int:
        return slurm.submit(
            f"srun {slurm.rsup} launch {declares} {code}", f"--job-name=x{code}", "--mem=100", *options, uid=ANN
        )

    elsewhere, again, never = submit(16, "-N2"), submit(88, "-N1"), submit(93, "-N1")
    # Of an array the task with the array's number alone is requeued: what SLURM is told of that number is told of all tasks.
    leads = f"[ $SLURM_JOB_ID != $SLURM_ARRAY_JOB_ID ] || exec srun {slurm.rsup} launch {declares} 16"
    array = slurm.submit(f"{leads}; while [ ! -e $HOME/go ]; do sleep 0.1; done", "-N1", "--mem=100", "--array=1-2", uid=ANN)
    followers = [
        slurm.submit("true", "--job-name=x93", "--dependency=singleton", uid=ANN),
        slurm.submit("true", f"--dependency=afterany:{never}", uid=ANN),
    ]
    bystander = slurm.submit("true", "--job-name=other", f"--dependency=afterany:{elsewhere}", uid=ANN)

    assert slurm.wait_job(never) == "FAILED", slurm.output(never)
    assert (slurm.job(never)["ExitCode"], slurm.job(never)["Requeue"]) == ("93:0", "0")
    assert [slurm.wait_job(job) for job in followers] == ["CANCELLED", "CANCELLED"]
    assert f"cancelled what would have gone on with job {never}" in slurm.output(never)

    slurm.wait(lambda: slurm.job(elsewhere)["Restarts"] == "1", "the requeue after 16", job=elsewhere)
    assert slurm.wait_job(elsewhere, within_s=90) == "COMPLETED", slurm.output(elsewhere)
    first = next(line for line in slurm.output(elsewhere).splitlines() if line.startswith("run 0 rank 0 on"))
    suspect = first.split()[-1]
    assert slurm.job(elsewhere)["ExcNodeList"] == suspect
    assert f"job {elsewhere} is requeued and will not run on {suspect} again" in slurm.output(elsewhere)
    assert "attempt 2 starts" in slurm.output(elsewhere), "the requeued launch goes on with the job that it was"
    ran = {line.split()[-1] for line in slurm.output(elsewhere).splitlines() if line.startswith("run 1 rank")}
    assert len(ran) == 2 and suspect not in ran

    def task(index: int) -> dict[str, str]:
        return slurm.job(f"{array}_{index}")

    slurm.wait(lambda: task(2)["Restarts"] == "1" and task(2)["JobState"] == "COMPLETED", "the second run", job=array)
    assert task(2)["JobId"] == str(array) and task(2)["ExcNodeList"] != "(null)"
    assert f"job {array}_2 is requeued and will not run on {task(2)['ExcNodeList']} again" in slurm.output(array)
    slurm.wait(lambda: task(1)["JobState"] == "RUNNING", "the other task to run", job=array)
    assert [task(1)[key] for key in ("JobState", "Restarts", "ExcNodeList", "Requeue")] == ["RUNNING", "0", "(null)", "1"]
    (slurm.home(ANN) / "go").touch()

    slurm.wait(lambda: slurm.job(again)["Restarts"] == "1", "the requeue after 88", job=again)
    assert slurm.wait_job(again, within_s=90) == "COMPLETED", slurm.output(again)
    assert (slurm.job(again)["Restarts"], slurm.job(again)["ExcNodeList"]) == ("1", "(null)")
    assert slurm.wait_job(bystander) == "COMPLETED"


def test_the_gate_is_asked_for_all_nodes(slurm: Cluster) -> None:
    refusing, observing = slurm.folder / "out" / "refusing", slurm.folder / "out" / "observing"
    snapshot(refusing, {"n1": "SDC vote 3/3"})
    snapshot(observing, {"n1": "SDC vote 3/3"}, mode="observe")
    (slurm.folder / "out" / "broken").mkdir(exist_ok=True)
    launch = f"srun {slurm.rsup} launch --restart auto --no-python sh -c '{SAY}'"

    def submit(root: str, *options: str) -> int:
        return slurm.submit(
            launch, "--mem=100", *options, uid=ANN, environ={"RSUP_NODE_ROOT": str(slurm.folder / "out" / root)}
        )

    several, alone = submit("refusing", "-N2"), submit("refusing", "-N1", "--exclude=n0,n2,n3")
    watched, unknown = submit("observing", "-N2"), submit("broken", "-N2")

    assert slurm.wait_job(watched) == slurm.wait_job(unknown) == "COMPLETED"
    assert "only observes: rsup:observe would refuse: Q-7 node n1 SDC vote 3/3" in slurm.output(watched)
    assert "run rank 0 on n0" in slurm.output(watched).replace("  ", " ")
    slurm.wait(lambda: int(slurm.job(alone)["Restarts"]) >= 1, "the requeue", job=alone)  # again and again, meanwhile
    assert slurm.job(alone)["ExcNodeList"] == "n[0,2-3]", "it could run nowhere without n1"
    slurm.run("scancel", str(alone))
    assert "the gate refuses n1: nothing was started here; exit 88" in slurm.output(alone)
    assert "rank" not in slurm.output(alone)
    slurm.wait(lambda: slurm.job(several)["Restarts"] == "1", "the requeue", job=several)
    assert slurm.wait_job(several, within_s=90) == "COMPLETED", slurm.output(several)
    assert slurm.job(several)["ExcNodeList"] == "n1"
    ran = sorted(line for line in slurm.output(several).splitlines() if line.startswith("run"))
    assert [line.rpartition(" on ")[0] for line in ran] == ["run 1 rank 0", "run 1 rank 1"], slurm.output(several)
    assert not any(line.endswith("n1") for line in ran)


def test_what_a_container_cannot_do_is_done_in_the_batch_script(slurm: Cluster) -> None:
    declares = script(slurm, DECLARES, "declares.py")
    hide = f"mount -t tmpfs none /dev/shm && mount -t tmpfs none {slurm.folder}/run && export PATH=/nowhere"
    launch = f"exec {slurm.rsup} launch --result-file $HOME/result {declares} 16"
    step = f"srun {CONTAINER} sh -c '{hide}; {launch}'; {slurm.rsup} slurm finish $HOME/result; echo after"
    job = slurm.submit(step, "-N2", "--mem=100", "--job-name=x JobId=5 Requeue=0", "--comment=Requeue=0 NodeList=n9", uid=ANN)
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "the requeue after 16", job=job)
    assert slurm.wait_job(job, within_s=90) == "COMPLETED", slurm.output(job)
    output = slurm.output(job)
    assert "SLURM cannot be told from here: scontrol is not here; `rsup slurm finish" in output
    assert slurm.job(job)["ExcNodeList"] == "n0" and "will not run on n0 again" in output
    assert sorted(line for line in output.splitlines() if line.startswith("run 1")) == [
        "run 1 rank 0 on n1",
        "run 1 rank 1 on n2",
    ]
    result = json.loads((slurm.home(ANN) / "result").read_text())
    assert (result["exit_code"], result["avoid_nodes"]) == (0, [])
    assert (result["slurm"]["job"], result["slurm"]["restarts"]) == (str(job), 1)

    finish = f"{slurm.rsup} slurm finish $HOME/result || echo code $?"
    stale = slurm.submit(finish, "-N1", uid=ANN)
    assert slurm.wait_job(stale) == "COMPLETED", slurm.output(stale)
    told = "; the launch has not ended by itself, and SLURM is told nothing\ncode 1\n"
    assert f"result is of job {job}{told}" in slurm.output(stale)
    launch = f"{slurm.rsup} launch --result-file $HOME/result --no-python sleep 100 &"
    killed = slurm.submit(f"{launch} while [ -e $HOME/result ]; do sleep 0.1; done; kill -9 $!; wait; {finish}", "-N1", uid=ANN)
    assert slurm.wait_job(killed) == "COMPLETED", slurm.output(killed)
    assert f"result: No such file or directory{told}" in slurm.output(killed), slurm.output(killed)


def test_started_and_killed_at_once(slurm: Cluster) -> None:
    """As by a prolog that refuses another node: whenever in its start a launch is killed, the next one starts as the first; one
    that had started before SLURM took it away counts."""
    jobs = []
    says = "echo rank $RANK of run $SLURM_RESTART_COUNT, attempt $RSUP_ATTEMPT; [ $SLURM_RESTART_COUNT ] || sleep 100"
    launch = f"srun {slurm.rsup} launch --no-python sh -c '{says}'"  # none ends before it was looked at
    for _ in range(4):
        jobs.append(slurm.submit(launch, "-N2", "--mem=100", uid=ANN))
    sights = [".", "rsup.lock", "rsup.db", "supervisor.json"]  # how far a start has come, by what lies in its state directory
    for sight, job in zip(sights, jobs, strict=True):
        path = slurm.home(ANN) / f".local/state/rsup/slurm/rsup-{job}" / sight
        slurm.wait(path.exists, f"the start to get as far as {sight}", job=job)
        slurm.run("scontrol", "requeue", str(job))
    for job in jobs:
        assert slurm.wait_job(job, within_s=90) == "COMPLETED", slurm.output(job)
        output = slurm.output(job)
        attempt = max(map(int, re.findall(r"attempt (\d+) starts", output)))  # the first may not have been said
        assert attempt <= 2, output
        lines = [line for line in output.splitlines() if line.startswith("rank") and "of run 1" in line]
        assert sorted(lines) == [f"rank {rank} of run 1, attempt {attempt}" for rank in range(2)], output
