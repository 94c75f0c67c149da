"""Processes of the test cluster's jobs, found by their environment: a killed slurmd or slurmstepd leaves them behind."""

from pathlib import Path


def job_processes(conf: Path, node: str | None = None) -> list[int]:
    """Pids that carry this cluster's SLURM_CONF and a job's id (all slurmstepd too), of one node or of all."""
    wanted = f"SLURM_CONF={conf}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            step = (folder / "comm").read_text().strip() == "slurmstepd"
        except OSError:
            continue
        of_job = step or any(word.startswith(b"SLURM_JOB_ID=") for word in environ)
        if of_job and wanted in environ and (node is None or f"SLURMD_NODENAME={node}".encode() in environ):
            found.append(int(folder.name))
    return found
