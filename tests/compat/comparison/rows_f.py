"""Rows F: batch systems, lost hardware, who may stop a job. (NUMA is in `rows_placement`.)"""

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from tests.compat.comparison.launches import Job, events_of, launch, script, within
from tests.compat.comparison.left_running import living
from tests.compat.comparison.row import Peer, Row, Seen

TWO = ("--nproc-per-node", "2")
ROOT = str(Path(__file__).parents[3])
WITHIN_S = 40.0
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGPWR", "SIGIO")
"""What batch systems are asked to send before the end (`sbatch --signal`), or send by themselves."""
TAKES_ALL = (
    "def take(number, _): say(f'got-{signal.Signals(number).name}-{rank}')\n"
    f"for name in {SIGNALS}: signal.signal(getattr(signal, name), take)\n"
    "say(f'up-{rank}'); wait_for('finish')\n"
)
READ_AFTER_S = 11
"""The agent reads the sections every 10 s."""
END_S = 6
"""From now to the scheduler's end of the job."""


def _up(folder: Path, *names: str, within_s: float = WITHIN_S) -> bool:
    return within(within_s, lambda: all((folder / name).exists() for name in names))


# --------------------------------------------------------------------------------------------------------- batch systems


def any_signal(peer: Peer, folder: Path) -> Seen:
    """Each signal to the launcher reaches both ranks, and training goes on to its end."""
    launched = launch(peer, folder, *TWO, script(folder, TAKES_ALL))
    assert _up(folder, "up-0", "up-1")
    for name in SIGNALS:
        launched.process.send_signal(getattr(signal, name))
        if not _up(folder, f"got-{name}-0", f"got-{name}-1", within_s=3.0 if peer.name == "torchrun" else WITHIN_S):
            code = launched.wait(1.0)
            return Seen(False, f"{name}: {f'the launcher dies of it ({code})' if code is not None else 'no rank gets it'}")
    (folder / "finish").touch()
    return Seen(launched.wait(WITHIN_S) == 0, f"{', '.join(SIGNALS)} reach the ranks, which train on")


def signal_to_the_step(peer: Peer, folder: Path) -> Seen:
    """Without `B:` SLURM signals every process of the step, launcher and ranks alike; with it, the batch script alone."""
    launched = launch(peer, folder, *TWO, script(folder, TAKES_ALL))
    assert _up(folder, "up-0", "up-1")
    for pid in living(folder):
        os.kill(pid, signal.SIGUSR1)
    got = _up(folder, "got-SIGUSR1-0", "got-SIGUSR1-1")
    (folder / "finish").touch()
    code = launched.wait(WITHIN_S)
    return Seen(got and code == 0, f"exit {code}{'' if code == 0 else ', the launcher dies of it'}")


def chosen_signal_ends(peer: Peer, folder: Path) -> Seen:
    """`--signals-to-handle SIGUSR2`: that one is passed on as it is, and ends the job."""
    text = (
        "def take(number, _): say(f'got-{signal.Signals(number).name}-{rank}')\n"
        "for name in ('SIGUSR2', 'SIGTERM'): signal.signal(getattr(signal, name), take)\n"
        "say(f'up-{rank}'); wait_for(f'got-SIGUSR2-{rank}'); say(f'saved-{rank}')\n"
    )
    launched = launch(peer, folder, *TWO, "--signals-to-handle", "SIGUSR2", script(folder, text))
    assert _up(folder, "up-0", "up-1")
    launched.process.send_signal(signal.SIGUSR2)
    code = launched.wait(WITHIN_S)
    saved = (folder / "saved-0").exists() and (folder / "saved-1").exists()
    return Seen(saved and code == 128 + signal.SIGUSR2, f"exit {code}, the ranks have {'saved' if saved else 'not saved'}")


def grace_fits(peer: Peer, folder: Path) -> Seen:
    """SIGTERM some seconds before the scheduler's end; the ranks do not heed it, and the grace is 30 s."""
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(f'up-{rank}'); time.sleep(90)\n"
    name = script(folder, text)
    end_s = int(time.time()) + END_S + (5 if peer.name == "torchrun" else 2)
    launched = launch(peer, folder, *TWO, name, env={"SLURM_JOB_END_TIME": str(end_s)})
    assert _up(folder, "up-0", "up-1")
    time.sleep(max(0.0, end_s - END_S - time.time()))
    launched.process.send_signal(signal.SIGTERM)
    code = launched.wait(END_S)
    if code is None:
        launched.process.kill()
        launched.process.wait()
        return Seen(False, f"still waiting for the ranks when the scheduler kills everything, {END_S} s later")
    left_s = end_s - time.time()
    said = len(launched.lines("the scheduler ends"))
    return Seen(left_s > 0 and code == 143 and said == 1, f"exit {code}, {left_s:.0f} s before the end, and a line says why")


# ---------------------------------------------------------------------------------------------------------------- hardware


def broken_node(peer: Peer, folder: Path) -> Seen:
    """A rank of the second node finds its device broken, tells the launcher if that listens, and fails; the job is elastic."""
    text = (
        f"sys.path.insert(0, {ROOT!r})\n"
        "say(f'up-{rank}-{restart}')\n"
        "if os.environ['NODE'] == '1':\n"
        "    wait_for('up-0-0')\n"
        "    if 'FT_LAUNCHER_IPC_SOCKET' in os.environ:\n"
        "        from tests.compat.nvrx_client import WorkloadAction, control\n"
        "        control(WorkloadAction.ExcludeThisNode, 'GPU 3 has fallen off the bus', rank)\n"
        "    sys.exit(9)\n"
        "if world == 2: time.sleep(60)\n"
    )
    options = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1")
    job = Job(peer, folder, options, (script(folder, text),))
    nodes = [job.node(number, NODE=str(number)) for number in range(2)]
    codes = [node.wait(WITHIN_S) for node in (nodes[1], nodes[0])]
    said = bool(nodes[1].lines("fallen off the bus"))
    right = codes[1] == 0 and codes[0] not in (0, None) and said
    return Seen(right, f"its node: exit {codes[0]}{', with the reason' if said else ''}; the other forms anew, exit {codes[1]}")


# ------------------------------------------------------------------------------------------------------------------ access


def who_may_stop(peer: Peer, folder: Path) -> Seen:
    """The address that can stop a job: at the loopback device, and only for who knows the token."""
    launched = launch(peer, folder, *TWO, "--job-id", "guarded", script(folder, "say(f'up-{rank}'); time.sleep(90)\n"))
    assert _up(folder, "up-0", "up-1")
    address, token = _rest(folder)
    path = f"{address}/api/v1/jobs/guarded/stop"
    answers = {
        "no token": _post(path, ""),
        "a wrong one": _post(path, "x" * len(token)),
        "a shorter one": _post(path, token[:-1]),
        "reading without": _post(f"{address}/api/v1/jobs", "", method="GET"),
    }
    goes_on = launched.process.poll() is None
    outside = _reachable_outside(urlsplit(address).port or 0)
    stopped = _post(path, token)
    code = launched.wait(WITHIN_S)
    right = set(answers.values()) == {401} and goes_on and not outside and stopped == 202 and code is not None
    where = "at every address" if outside else "at 127.0.0.1 alone"
    return Seen(right, f"{where}; {', '.join(f'{who} {status}' for who, status in answers.items())}; with the token {stopped}")


def _rest(folder: Path) -> tuple[str, str]:
    found = json.loads((folder / "state" / "supervisor.json").read_text())
    return found["rest"], (folder / "state" / "token").read_text().split()[-1]


def _post(url: str, token: str, method: str = "POST") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, method=method, headers=headers | {"Content-Type": "application/json"}, data=b"{}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _reachable_outside(port: int) -> bool:
    """Whether the port answers at another address of this host."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.2", port)) == 0


# -------------------------------------------------------------------------------------------------- stopping without a reason


def only_reported(peer: Peer, folder: Path, *options: str, hangs_s: float, steps: int) -> Seen:
    """A step takes far longer than its limit: it is reported, with what would have been done, and nothing is stopped."""
    text = (
        "import rsup.worker\n"
        f"for i in range({steps}):\n"
        "    rsup.worker.set_iteration(i + 1)\n"
        "    with rsup.worker.section('batch'): time.sleep(0.01)\n"
        f"time.sleep({READ_AFTER_S if steps > 1 else 0})\n"
        f"with rsup.worker.section('batch'): time.sleep({hangs_s} if rank == 1 else 0.1)\n"
    )
    launched = launch(peer, folder, *TWO, *options, script(folder, text))
    code = launched.wait(WITHIN_S + 30)
    events = events_of(folder)
    reports = [event["text"] for event in events if event["kind"] == "SuspectedHang"]
    attempts = sum(event["kind"] == "StartAttempt" for event in events)
    said = len(reports) == 1 and "rank 1" in reports[0] and "nothing is killed" in reports[0]
    return Seen(code == 0 and said and attempts == 1, f"exit {code}; `{reports[0].partition('; ')[2] if reports else ''}`")


def reported_on_request(peer: Peer, folder: Path) -> Seen:
    """`--on-hang report` with a limit of 1 s."""
    return only_reported(peer, folder, "--on-hang", "report", "--ft-rank-section-timeouts", "batch:1", hangs_s=3.0, steps=1)


def reported_by_default(peer: Peer, folder: Path) -> Seen:
    """A limit that nobody configured: calculated from what 40 steps took, and never below 10 s."""
    return only_reported(peer, folder, hangs_s=13.0, steps=40)


ROWS: tuple[Row, ...] = (
    Row("64", "signals of the batch system are hard-coded", any_signal, True, "any is passed on, training goes on"),
    Row("64+", "`--signal` without `B:` reaches launcher and ranks", signal_to_the_step, True, "training goes on"),
    Row("64++", "a signal of one's own ends the job", chosen_signal_ends, True, "passed on as it is, exit 128 + its number"),
    Row("67", "the grace is longer than what the scheduler leaves", grace_fits, True, "it fits in, and the report is printed"),
    Row("68", "a device breaks on one node", broken_node, False, "that node leaves, the others go on"),
    Row("69", "anybody may stop a job", who_may_stop, False, "loopback alone, and a token"),
    Row(
        "70", "a false stop is worse than a missed one", reported_on_request, False, "`--on-hang report`: said, nothing stopped"
    ),
    Row("70+", "limits that nobody configured", reported_by_default, False, "said, nothing stopped", frozenset({"slow"})),
)
