"""A real SLURM cluster of four nodes on this machine, its state in one folder: munged, slurmctld and a slurmd for each node.

The daemons run in the foreground as children, so that their ends are seen and their zombies reaped; they end with this
process, too (``setpriv --pdeathsig``). Node names do not resolve in DNS, CPUs and GPUs are made up, and only the prolog and its
like are swapped between tests (``hook``): what SLURM does about them is real. Requeued jobs start again after ``cred_expire``
(5 s, the least that SLURM takes).
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rsup.supervisor.heartbeat_board import remove_leftovers
from tests.slurm.cluster_conf import SLOTS, gres_text, hook_text, slurm_text
from tests.slurm.job_processes import job_processes
from tests.slurm.node_side import NodeSide

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "setpriv")
NUM_GPUS = 4
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
UIDS = range(20000, 20004)
TAKEN_OVER = ("RSUP_", "XDG_RUNTIME_DIR")  # of the test's own environment, for what runs as root


@dataclass
class Cluster:
    """One running cluster. ``environ`` is what a command needs to speak to it (SLURM_CONF, PATH)."""

    folder: Path
    first_port: int
    extra_conf: str = ""
    names: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    python: str = sys.executable
    """An interpreter with rsup that every user can run: ``[cluster.python, "-m", "rsup.launcher", ...]``."""
    python_environ: dict[str, str] = field(default_factory=dict)
    """Goes with it, and is part of ``environ``."""

    @property
    def conf(self) -> Path:
        """slurm.conf."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        """For commands of any user."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"SLURM_CONF": str(self.conf), "PATH": path, "LC_ALL": "C.UTF-8"} | self.python_environ

    @property
    def rsup(self) -> str:
        """The command ``rsup`` for batch scripts, for every user."""
        return f"{self.python} -m rsup.launcher"

    def start(self) -> None:
        """Write the configuration, start all daemons and wait until every node is idle. Raises TimeoutError, RuntimeError."""
        self._write_conf()
        key = self.folder / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        run = self.folder / "run"
        places = [f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", f"--seed-file={run}/munged.seed"]
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", *places
        )  # --force: /tmp is writable for all
        self.wait(lambda: self.run("munge", "-S", f"{run}/munge.socket", "-n", check=False).returncode == 0, "munged")
        self._spawn("slurmctld", "slurmctld", "-D", "-i", "-c")
        self.wait(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld")
        for name in self.names:
            self.start_node(name)
        self.wait(lambda: self.num_idle() == len(self.names), "all nodes to be idle")

    def start_controller_anew(self) -> None:
        """slurmctld without anything of what it knew: jobs, drains, reservations."""
        self._end_daemon("slurmctld", signal.SIGTERM)
        began_s = time.time()
        self.wait(lambda: int(time.time()) > began_s, "another second: SLURM tells times in seconds")
        self._spawn("slurmctld", "slurmctld", "-D", "-i", "-c")
        self.wait(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld")

    def stop(self) -> None:
        """End jobs, daemons and whatever jobs have left behind."""
        if self.daemons.get("slurmctld") is not None and self.daemons["slurmctld"].poll() is None:
            self.end_jobs()
        for name in [*self.names, "slurmctld", "munged"]:
            self._end_daemon(name, signal.SIGTERM)
        for pid in job_processes(self.conf):
            _kill(pid)
        deadline = time.monotonic() + 30
        while job_processes(self.conf) and time.monotonic() < deadline:
            time.sleep(0.02)
        remove_boards()

    # ---- commands ------------------------------------------------------------------------------------------------
    def run(
        self, *command: str, uid: int | None = None, environ: Mapping[str, str] | None = None, within_s: float = 90,
        check: bool = True, stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """One command as root, with the test's RSUP_ variables, or as an ordinary user in a home of his own. With ``check`` it
        raises RuntimeError for an exit code other than 0."""
        given = self.environ | self._person(uid) | dict(environ or {})
        group, groups = (None, None) if uid is None else (pwd.getpwuid(uid).pw_gid, [])
        done = subprocess.run(
            list(command), env=given, cwd=given.get("HOME", self.folder), user=uid, group=group, extra_groups=groups,
            timeout=within_s, capture_output=True, text=True, errors="replace", input=stdin or "",
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()} {done.stdout.strip()}")
        return done

    def submit(self, script: str, *options: str, uid: int | None = None, environ: Mapping[str, str] | None = None) -> int:
        """sbatch a script (without a first line: bash). Output of all its runs: ``output(job)``. Returns the job's id."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        where = ["--open-mode=append", f"--output={self.folder}/out/%j", "--parsable"]
        return int(self.run("sbatch", *where, *options, uid=uid, environ=environ, stdin=text).stdout.split(";")[0])

    def output(self, job: int) -> str:
        """What the batch script and its steps have printed so far; empty before they have."""
        path = self.folder / "out" / str(job)
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- questions -----------------------------------------------------------------------------------------------
    def state(self, node: str) -> tuple[str, str]:
        """sinfo's state of a node ("idle", "drained", "mixed", ...) and the reason, "" for none."""
        state, _, reason = self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T|%E").stdout.splitlines()[0].partition("|")
        return state, "" if reason.strip() == "none" else reason.strip()

    def num_idle(self) -> int:
        """Nodes that are idle and answer."""
        return self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split().count("idle")

    def job(self, job: int | str) -> dict[str, str]:
        """``scontrol show job`` as words: JobState, NodeList, ExcNodeList, Restarts, Reason, ..."""
        text = self.run("scontrol", "-o", "show", "job", str(job)).stdout
        pairs = [word.partition("=") for word in text.split() if "=" in word]
        return {name: value for name, _, value in pairs}

    def wait_job(self, job: int, *states: str, within_s: float = 100) -> str:
        """Wait until the job is in one of these states (any final one, if none is named). Returns it."""
        wanted = states or ENDED
        self.wait(lambda: self.job(job)["JobState"] in wanted, f"job {job} to be {' or '.join(wanted)}", within_s, job=job)
        return self.job(job)["JobState"]

    def wait(self, condition: Callable[[], bool], what: str, within_s: float = 90, job: int | None = None) -> None:
        """Ask every 50 ms. Raises TimeoutError that names what was waited for, and shows the job's output if one is named."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                shown = f"\n{self.job(job)}\n{self.output(job)}" if job is not None else ""
                raise TimeoutError(f"waited {within_s:g} s for {what}{shown}")
            time.sleep(0.05)

    # ---- what tests change ---------------------------------------------------------------------------------------
    def hook(self, slot: str, text: str) -> None:
        """What SLURM runs as "prolog", "epilog", "healthcheck", "taskprolog" and the like (``SLOTS``)."""
        assert slot in SLOTS, slot
        path = self.folder / "hooks" / slot
        new = path.with_suffix(".new")
        new.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        new.chmod(0o755)
        new.replace(path)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, if it does not run."""
        if name not in self.daemons or self.daemons[name].poll() is not None:
            self._spawn(name, "slurmd", "-D", "-N", name)

    def boot_node(self, name: str) -> None:
        """The node comes back as one that was booted just now."""
        self._end_daemon(name, signal.SIGTERM)
        self._spawn(name, "slurmd", "-D", "-N", name, "-b")

    def lose_node(self, name: str) -> None:
        """The node is gone at once, with all that runs on it, and SLURM is told (else it would see it a minute later)."""
        self._end_daemon(name, signal.SIGKILL)
        for pid in job_processes(self.conf, name):
            _kill(pid)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost by the test")

    def home(self, uid: int) -> Path:
        """A user's home: his state and runtime directories are in there."""
        return self.folder / "home" / str(uid)

    def restore(self) -> None:
        """After a test: no jobs, hooks or reservations, every node idle, every home empty."""
        self.end_jobs()
        for path in (self.folder / "hooks").iterdir():
            path.unlink()
        for line in self.run("scontrol", "-o", "show", "reservation").stdout.splitlines():
            if line.startswith("ReservationName="):
                self.run("scontrol", "delete", line.split()[0])
        for name in self.names:
            self.start_node(name)
        deadline = time.monotonic() + 90
        while self.num_idle() != len(self.names):
            if time.monotonic() > deadline:
                raise TimeoutError("nodes are not idle again: " + self.run("sinfo", "-N", "-o", "%N %T %E").stdout)
            self.resume_drained()
            time.sleep(0.05)
        shutil.rmtree(self.folder / "home", ignore_errors=True)
        remove_boards()

    def end_jobs(self) -> None:
        """Kill all jobs of the cluster and wait until they are gone."""
        if jobs := self.run("squeue", "-h", "-o", "%A").stdout.split():
            self.run("scancel", "--signal=KILL", "--full", *jobs, check=False)
            self.run("scancel", *jobs, check=False)
        self.wait(lambda: not self.run("squeue", "-h", "-t", "R,CG,CF,PD,S", "-o", "%A").stdout.split(), "jobs to end")

    def resume_drained(self) -> None:
        """Nodes that are drained or down run jobs again."""
        for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines():
            name, state = line.split()
            if state.rstrip("*").startswith(("drain", "down")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)

    # ---- inside --------------------------------------------------------------------------------------------------
    def _person(self, uid: int | None) -> dict[str, str]:
        mark = {"RSUP_TEST_RUN": os.environ["RSUP_TEST_RUN"]} if "RSUP_TEST_RUN" in os.environ else {}
        if uid is None:
            return {name: value for name, value in os.environ.items() if name.startswith(TAKEN_OVER)}
        home = self.home(uid)
        home.parent.mkdir(mode=0o755, exist_ok=True)
        for folder in (home, home / "run"):
            folder.mkdir(mode=0o700, exist_ok=True)
            os.chown(folder, uid, pwd.getpwuid(uid).pw_gid)
        name = pwd.getpwuid(uid).pw_name
        return {
            "HOME": str(home),
            "USER": name,
            "LOGNAME": name,
            "XDG_RUNTIME_DIR": str(home / "run"),
            "RSUP_IDLE_EXIT": "1",
        } | mark

    def _write_conf(self) -> None:
        for name in ("etc", "run", "log", "state", "hooks", "spool", "dev", "out"):
            (self.folder / name).mkdir(mode=0o755, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "out").chmod(0o1777)
        for slot in SLOTS:
            path = self.folder / "etc" / f"{slot}.sh"
            path.write_text(hook_text(self.folder, slot))
            path.chmod(0o755)
        for index in range(NUM_GPUS):  # SLURM takes only device nodes for GPUs: clones of /dev/null do
            os.mknod(self.folder / "dev" / f"nvidia{index}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "etc" / "gres.conf").write_text(gres_text(self.folder, self.names, NUM_GPUS))
        self.conf.write_text(slurm_text(self.folder, self.names, self.first_port, NUM_GPUS) + self.extra_conf)

    def _spawn(self, name: str, *command: str) -> None:
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            environ = self.environ | self._person(None)
            guarded = ["setpriv", "--pdeathsig", "TERM", *command]
            self.daemons[name] = subprocess.Popen(guarded, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def _end_daemon(self, name: str, how: signal.Signals) -> None:
        if (daemon := self.daemons.pop(name, None)) is None:
            return
        daemon.send_signal(how)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(30)


def refused_job(slurm: Cluster, node: NodeSide, script: str, *options: str) -> int:
    """Submit a job that the gate of its node refuses, and wait until it has; the job's id. A machine that is too busy for the
    gate's 4 s lets it in: then another."""

    def is_refused() -> bool:
        return slurm.state(node.name)[0] == "drained"

    for _ in range(3):
        job = slurm.submit(script, *options)
        slurm.wait(lambda job=job: is_refused() or slurm.job(job)["JobState"] in ENDED, "the refusal", job=job)  # type: ignore[misc]
        if is_refused() or not node.was_slow:
            break
    assert is_refused(), node.log()
    return job


def remove_boards() -> None:
    """Boards of agents that were killed together with their keepers: the user's next launch on the node would do it."""
    for uid in UIDS:
        remove_leftovers([Path("/dev/shm")], uid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
