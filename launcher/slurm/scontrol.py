"""Asks and tells SLURM through its own programs, each call within a time limit and without a shell.

slurmctld may be busy, down or out of reach (a container has neither the programs nor munge): every call then ends in
`SlurmUnavailable`, one line, and whoever asked goes on without.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence

from rsup.supervisor.wire import RsupError

WITHIN_S = 5.0
MAX_OUTPUT_CHARS = 1 << 20
_JOB = re.compile(
    r"^JobId=(?P<job>\d+)(?P<kin>(?: [A-Za-z]\w*=\S+)*?(?P<het> HetJobId=\d+ HetJobOffset=\d+)?) JobName=(?P<name>.*?)"
    r"(?(het)(?: HetJobIdSet=\S*)?|) UserId=(?P<user>[^=\n]*?\(\d+\)) (?P<rest>GroupId=[^=\n]*\(\d+\) .*?)"
    r"(?= (?:Licenses|Network|Command)=|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""One job of `scontrol -o show job`. A job's name, its WCKey and what comes from `Network=` on (the script's arguments, paths,
comments) are the user's text, spaces, line ends and `KEY=VALUE` included; all that we read besides the name comes before."""
_WCKEY = re.compile(r" WCKey=.*?(?= JobState=[A-Z_]+ Reason=)", re.DOTALL)


class SlurmUnavailable(RsupError):
    """SLURM could not be asked, or has refused: the text says what was asked and why it failed."""


class SlurmSilent(SlurmUnavailable):
    """No answer in time: the next question would wait as long, and what was asked for may be done all the same."""


def is_here() -> bool:
    """Whether there is a `scontrol` to ask with."""
    return shutil.which("scontrol") is not None


def ask(*command: str, within_s: float = WITHIN_S) -> str:
    """What `command` (scontrol, sinfo, squeue or scancel, with arguments) prints. Raise `SlurmUnavailable`."""
    program = shutil.which(command[0])
    said = " ".join(command)
    if program is None:
        raise SlurmUnavailable(f"{command[0]} is not here")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{said}: no answer within {within_s:g} s") from None
    except OSError as error:
        raise SlurmUnavailable(f"{said}: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.split("\n", 1)[0].strip() or done.stdout.split("\n", 1)[0].strip()
        raise SlurmUnavailable(f"{said}: {words[:200] or f'exit code {done.returncode}'}")
    return done.stdout[:MAX_OUTPUT_CHARS]


def show(kind: str, name: str, within_s: float = WITHIN_S) -> dict[str, str]:
    """`scontrol show node|reservation NAME` by key. Raise `SlurmUnavailable`."""
    return fields(ask("scontrol", "-o", "show", kind, name, within_s=within_s))


def show_job(job: str, within_s: float = WITHIN_S) -> dict[str, str]:
    """`scontrol show job` of that job alone, by key. Raise `SlurmUnavailable`."""
    found = row_of_job(ask("scontrol", "-o", "show", "job", job, within_s=within_s), job)
    if not found:
        raise SlurmUnavailable(f"scontrol show job {job} does not show it")
    return found


def row_of_job(text: str, job: str) -> dict[str, str]:
    """The job with that JobId, by key; empty where there is none. One task of an array has the array's number, and asked for
    that SLURM shows all tasks; of a heterogeneous job it shows all components."""
    for found in _JOB.finditer(text):
        if found["job"] == job:
            own = {"JobId": job, "JobName": found["name"], "UserId": found["user"]}
            return fields(found["kin"]) | fields(_WCKEY.sub("", found["rest"])) | own
    return {}


def fields(line: str) -> dict[str, str]:
    """`KEY=VALUE` words of one line of `scontrol -o`, of several with the same key the first: what people wrote about a node
    or a reservation comes last. A value with spaces is cut."""
    pairs = [word.partition("=") for word in line.split() if "=" in word]
    return {name: value for name, _, value in reversed(pairs)}


def tell(commands: Sequence[Sequence[str]]) -> None:
    """Run them in order. Raise `SlurmUnavailable` at the first that fails."""
    for command in commands:
        ask(*command)
