"""The test cluster's configuration files as text: what mattered is said beside it."""

import os
import socket
from pathlib import Path

SLOTS = ("prolog", "epilog", "prologslurmctld", "epilogslurmctld", "taskprolog", "taskepilog", "healthcheck")
NUM_CPUS = 8


def hook_text(folder: Path, slot: str) -> str:
    """What slurm.conf names for a slot: the test's hook, if there is one. So tests need no reconfiguration."""
    hook = folder / "hooks" / slot
    return f"#!/bin/bash\nif [ -x {hook} ]; then exec {hook}; fi\nexit 0\n"


def gres_text(folder: Path, names: tuple[str, ...], num_gpus: int) -> str:
    """gres.conf: GPUs without a File= would make the node invalid."""
    return f"NodeName={','.join(names)} Name=gpu File={folder}/dev/nvidia[0-{num_gpus - 1}]\n"


def slurm_text(folder: Path, names: tuple[str, ...], first_port: int, num_gpus: int) -> str:
    """slurm.conf. ``first_port`` is slurmctld's, the nodes' follow."""
    host = socket.gethostname().split(".")[0]
    hooks = "".join(f"{key}={folder}/etc/{slot}.sh\n" for key, slot in _HOOKS)
    nodes = "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port + 1 + index} CPUs={NUM_CPUS} Sockets=1 "
        f"CoresPerSocket={NUM_CPUS} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{num_gpus} State=UNKNOWN\n"
        for index, name in enumerate(names)
    )
    first_job = 1000 + int.from_bytes(os.urandom(3))  # clusters on one host: ports of a launch follow from its job's number
    places = _PLACES.format(host=host, port=first_port, folder=folder, first_job=first_job)
    return (
        places
        + hooks
        + _BEHAVIOUR
        + nodes
        + f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP\n"
    )


_HOOKS = (
    ("Prolog", "prolog"), ("Epilog", "epilog"), ("PrologSlurmctld", "prologslurmctld"), ("EpilogSlurmctld", "epilogslurmctld"),
    ("TaskProlog", "taskprolog"), ("TaskEpilog", "taskepilog"), ("HealthCheckProgram", "healthcheck"),
)  # fmt: skip

_PLACES = """\
ClusterName=rsup
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
"""

# No cgroups are touched (linuxproc, none); fake hardware is believed (config_overrides); nodes that were down stay so until a
# test resumes them (ReturnToService=0).
_BEHAVIOUR = """\
SlurmctldDebug=debug
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0,nohold_on_prolog_fail
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=0
MpiDefault=none
SwitchType=switch/none
SlurmdTimeout=60
SlurmctldTimeout=60
MessageTimeout=10
KillWait=5
UnkillableStepTimeout=30
CompleteWait=0
InactiveLimit=0
MinJobAge=600
JobRequeue=1
RequeueExit=88
RequeueExitHold=89
PrologFlags=Alloc,DeferBatch
PrologEpilogTimeout=20
HealthCheckInterval=5
HealthCheckNodeState=ANY
RebootProgram=/bin/true
"""
