"""What SLURM's variables say of the job and the step that a launch is in. Pure: reads an environment, asks nobody.

A *step* is what one `srun` starts. `srun rsup launch` is one agent on each node of the step; a launch in the batch script
itself, or in a shell of `salloc`, is in a job and in no step, and is a launch of one node. Names of nodes are SLURM's own
(`SLURMD_NODENAME`), which need not be the host's and need not resolve."""

from collections.abc import Mapping
from dataclasses import dataclass

from rsup.launcher.slurm.hostnames import node_names
from rsup.supervisor.wire import SLURM_GROUP, UsageError


@dataclass(frozen=True, slots=True)
class SlurmPlace:
    """Where in SLURM this process is. `step` is empty outside of a step; `nodes` are then the job's."""

    job: str
    cluster: str = ""
    step: str = ""
    node: str = ""
    """This one; empty outside of the allocation (a shell of `salloc`)."""
    nodes: tuple[str, ...] = ()
    node_index: int = 0
    """Of this node in the step."""
    num_nodes: int = 1
    """Of the step; 1 outside of one."""
    job_nodes: tuple[str, ...] = ()
    """Of the whole job as this process began; of a heterogeneous job those of its own component."""
    num_job_nodes: int = 1
    task: int = 0
    shares_nodes: bool = False
    """Several tasks of this step run on one node."""
    num_gpus: int = 0
    """Those that the job, or the step, has on this node."""
    gpu_indexes: tuple[str, ...] = ()
    """As SLURM numbers the job's GPUs on this node."""
    launch_address: str = ""
    """Of the host where `srun` was typed: the first node, if that was the batch script."""
    num_restarts: int = 0

    @property
    def in_step(self) -> bool:
        return bool(self.step)

    @property
    def whole_job(self) -> str:
        """The job on its cluster, over all its steps and starts."""
        return f"{SLURM_GROUP}{self.cluster or 'cluster'}-{self.job}"

    @property
    def group(self) -> str:
        """What the agents of one launch have in common, and no other launch has at that time."""
        return f"{self.whole_job}.{self.step}.{self.num_restarts}"


def read_place(environ: Mapping[str, str]) -> SlurmPlace | None:
    """Where this process is; None outside of a SLURM job. What is missing or makes no sense is left out."""
    job = environ.get("SLURM_JOB_ID", "")
    if not (job.isascii() and job.isdecimal()):
        return None
    step = environ.get("SLURM_STEP_ID", "")
    num_tasks, num_nodes = (_number(environ, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    in_step = step.isdecimal() and num_tasks > 0 and num_nodes > 0
    nodes = environ.get("SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST", "")
    return SlurmPlace(
        job=job,
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        step=step if in_step else "",
        node=environ.get("SLURMD_NODENAME", ""),
        nodes=tuple(node_names(nodes)),
        node_index=_number(environ, "SLURM_NODEID") if in_step else 0,
        num_nodes=num_nodes if in_step else 1,
        job_nodes=tuple(node_names(environ.get("SLURM_JOB_NODELIST", ""))),
        num_job_nodes=max(1, _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES")),
        task=_number(environ, "SLURM_PROCID") if in_step else 0,
        shares_nodes=in_step and (num_tasks > num_nodes or _number(environ, "SLURM_LOCALID") > 0),
        num_gpus=_num_gpus(environ),
        gpu_indexes=_words(environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""),
        launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        num_restarts=_number(environ, "SLURM_RESTART_COUNT"),
    )


def check_tasks(place: SlurmPlace) -> None:
    """Raise `SeveralAgents` if the step starts more than one agent on a node."""
    if place.shares_nodes:
        raise SeveralAgents(
            f"step {place.job}.{place.step} starts several tasks on a node, and an agent is for all ranks of its node: "
            "use srun --ntasks-per-node=1, and --nproc-per-node for the number of ranks"
        )


class SeveralAgents(UsageError):
    """The step starts more than one agent on a node."""


def _num_gpus(environ: Mapping[str, str]) -> int:
    """SLURM's count, or fewer where somebody has hidden some of them since."""
    given = _number(environ, "SLURM_GPUS_ON_NODE") or len(
        _words(environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or "")
    )
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return given if shown is None else min(given, len(_words(shown)))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else 0
