"""What SLURM is asked to do with a batch job whose launch has ended: run it again on other nodes (16), run it again (88), or
see to it that it does not run again (93).

`scontrol requeue` and `requeuehold` kill the job that asks: SIGTERM to all of its processes, and SIGKILL when `KillWait` is
over (30 s by default). Whoever calls `settle` is one of them, so it ignores SIGTERM for the fraction of a second that the
rest takes. Nodes can only be excluded while the job is pending, hence `requeuehold`, `update`, `release`; a job that is killed
before its release would be held for ever, so all three together have a deadline within `KillWait`, and the last
quarter of it is the release's. Of an array the task alone is meant."""

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rsup.launcher.slurm import scontrol
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.launcher.slurm.other_nodes import listed, obstacle
from rsup.launcher.slurm.scontrol import WITHIN_S, SlurmSilent, SlurmUnavailable
from rsup.supervisor.wire import EXIT_NO_REQUEUE, EXIT_REQUEUE, EXIT_RERUN_ELSEWHERE

SETTLED_CODES = (EXIT_RERUN_ELSEWHERE, EXIT_REQUEUE, EXIT_NO_REQUEUE)
MOST_WITHIN_S = 20.0
USUAL_KILL_WAIT_S = 30
MAX_RESTARTS_AT_RISK = 3
"""So often a job may have been restarted, and is let run once more where its suspect's node could not be excluded."""
AGAIN_AFTER_S = 0.1
FINISH = "`rsup slurm finish RESULT-FILE` at the end of the batch script does it"
_SHIELDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How the launch ended: `nodes` are those that the job must not run on again. `leaves_others`: agents of other nodes may
    go on, so that neither `srun` nor the batch script ends with this one."""

    exit_code: int
    nodes: tuple[str, ...] = ()
    leaves_others: bool = False


def settle(outcome: Outcome, place: SlurmPlace, say: Say, *, instead: str = FINISH) -> bool:
    """Do what the exit code asks of SLURM. Main thread only. Returns whether it is done, or there is nothing to do; a line
    says what was done, or why it could not be and who can do it (`instead`). Never raises for SLURM."""
    if outcome.exit_code not in SETTLED_CODES:
        return True
    job = place.job
    try:
        shown = scontrol.show_job(job)
        job = target(shown, job)
        if shown.get("BatchFlag") != "1":
            say(f"rsup: exit {outcome.exit_code}: job {job} is no batch job, so SLURM cannot run it again: start it anew")
            return True
        nodes = _known(outcome.nodes, say)
        why_not = _why_not_without(nodes, shown) if nodes and outcome.exit_code != EXIT_NO_REQUEUE else ""
        if outcome.exit_code == EXIT_NO_REQUEUE:
            _call_off(job, shown, say)
        elif nodes and not why_not:
            _requeue_without(nodes, job, shown, outcome.exit_code, say)
        elif nodes and outcome.exit_code == EXIT_RERUN_ELSEWHERE:
            away = f"cannot be requeued away from {', '.join(nodes)}"
            say(f"rsup: exit 16: job {job} {away}, so it ends: {why_not}; submit it anew")
        elif outcome.exit_code == EXIT_REQUEUE and not outcome.leaves_others and _requeues_by_code(EXIT_REQUEUE):
            _warn_of(nodes, job, why_not, say)  # SLURM requeues it once the batch script ends with that code
        elif shown.get("Requeue") != "1":
            say(f"rsup: exit {outcome.exit_code}: job {job} was submitted with --no-requeue, so it ends; submit it again")
        else:
            _warn_of(nodes, job, why_not, say)
            _requeue(job, say)
    except SlurmUnavailable as error:
        say(f"rsup: exit {outcome.exit_code}, and SLURM cannot be told from here: {error}; {instead}")
        return False
    return True


def target(shown: Mapping[str, str], job: str) -> str:
    """How SLURM is told of this job and of nothing else: a task of an array is `ARRAY_TASK`, since the number of one of the
    tasks is the array's, too, and means all of them."""
    array, task = shown.get("ArrayJobId", ""), shown.get("ArrayTaskId", "")
    return f"{array}_{task}" if array.isdecimal() and task.isdecimal() else job


def _known(names: Sequence[str], say: Say) -> tuple[str, ...]:
    """Those that SLURM knows: it takes no list with another one."""
    known: list[str] = []
    for name in names:
        try:
            if _NODE.fullmatch(name):
                scontrol.show("node", name)
                known.append(name)
                continue
        except SlurmUnavailable as error:
            if "not found" not in str(error):
                raise
        say(f"rsup: SLURM knows no node {name[:64]!r}, so that one is not excluded")
    return tuple(known)


def _warn_of(nodes: Sequence[str], job: str, why_not: str, say: Say) -> None:
    """Of a requeue that cannot avoid these nodes."""
    if nodes:
        say(f"rsup: exit 88: job {job} cannot be kept off {', '.join(nodes)}: {why_not}; it may wait, or run there again")


def _why_not_without(nodes: Sequence[str], shown: Mapping[str, str]) -> str:
    return obstacle(nodes, shown) if shown.get("Requeue") == "1" else "it was submitted with --no-requeue"


def _requeue_without(nodes: Sequence[str], job: str, shown: Mapping[str, str], exit_code: int, say: Say) -> None:
    excluded = [*dict.fromkeys([*listed(shown, "ExcNodeList"), *nodes])]
    within_s = _within_s()
    say(f"rsup: job {job} is requeued and will not run on {', '.join(nodes)} again")
    _shield()
    began_s = time.monotonic()
    try:
        scontrol.ask("scontrol", "requeuehold", job, within_s=min(WITHIN_S, within_s / 2))
    except SlurmSilent as error:  # done perhaps: then it must not stay held
        say(f"rsup: {error}")
    problem = _until_pending(
        began_s + within_s * 3 / 4, "scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(excluded)}"
    )
    if problem:
        say(f"rsup: {', '.join(nodes)} could not be excluded: {problem}")
        restarts = shown.get("Restarts", "")
        if exit_code == EXIT_RERUN_ELSEWHERE and restarts.isdecimal() and int(restarts) >= MAX_RESTARTS_AT_RISK:
            say(f"rsup: job {job} was restarted {restarts} times and stays held: scontrol release {job} runs it there again")
            return
    if problem := _until_pending(began_s + within_s, "scontrol", "release", job):  # better on the same node than held for ever
        say(f"rsup: job {job} is held: {problem}; scontrol release {job}")


def _within_s() -> float:
    """How long a job that has been requeued may go on telling SLURM things, seconds."""
    try:
        word = _setting("KillWait").split(" ", 1)[0]
    except SlurmUnavailable:
        word = ""
    kill_wait_s = int(word) if word.isascii() and word.isdecimal() else USUAL_KILL_WAIT_S
    return min(MOST_WITHIN_S, max(2.0, kill_wait_s - 1.0))


def _requeue(job: str, say: Say) -> None:
    say(f"rsup: job {job} is requeued")
    _shield()
    scontrol.ask("scontrol", "requeue", job)


def _requeues_by_code(exit_code: int) -> bool:
    """Whether SLURM does it by itself (`RequeueExit`), for a job submitted with --no-requeue too."""
    return _names_code(_setting("RequeueExit"), exit_code)


def _setting(name: str) -> str:
    """Of slurm.conf, empty where SLURM shows none. Raise `SlurmUnavailable`."""
    for line in scontrol.ask("scontrol", "show", "config").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == name:
            return value.strip()
    return ""


def _names_code(text: str, exit_code: int) -> bool:
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(first) <= exit_code <= int(last or first):
            return True
    return False


def _call_off(job: str, shown: dict[str, str], say: Say) -> None:
    """No requeue by anybody, and nothing that waits only to go on with this job."""
    if shown.get("Requeue") == "1":
        scontrol.ask("scontrol", "update", f"jobid={job}", "requeue=0")
    user = shown.get("UserId", "").partition("(")[2].rstrip(")")
    waiting = scontrol.ask("squeue", "-h", "-t", "PD", "-u", user, "-o", "%A|%F|%E|%j") if user.isdecimal() else ""
    followers = [words[0] for words in (line.split("|", 3) for line in waiting.splitlines()) if _follows(words, job, shown)]
    if followers:
        scontrol.ask("scancel", *followers)
        say(f"rsup: exit 93, do not requeue: cancelled what would have gone on with job {job}: {', '.join(followers)}")


def _follows(words: Sequence[str], job: str, shown: Mapping[str, str]) -> bool:
    """Whether a waiting job (number, number of its array, dependency, name) would go on with ours. Other tasks of our array do
    not, nor does what waits for the array as a whole."""
    if len(words) != 4 or shown.get("ArrayJobId", job) in words[:2]:
        return False
    dependency, name = words[2], words[3]
    after = re.search(rf"\bafter(?:any|notok|ok|corr)?:(?:\d+\S*:)*{job}\b", dependency) is not None
    return after or ("singleton" in dependency and name == shown.get("JobName"))


def _shield() -> None:
    for signum in _SHIELDED:
        signal.signal(signum, signal.SIG_IGN)


def _until_pending(until_s: float, *command: str) -> str:
    """Until SLURM takes it: the job is still ending at first. `until_s`: monotonic. Returns why it did not, empty if it did."""
    while True:
        try:
            scontrol.ask(*command, within_s=min(WITHIN_S, max(0.5, until_s - time.monotonic())))
            return ""
        except SlurmUnavailable as error:
            if time.monotonic() + AGAIN_AFTER_S >= until_s:
                return str(error)
        time.sleep(AGAIN_AFTER_S)
