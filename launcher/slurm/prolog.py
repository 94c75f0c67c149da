"""`rsup slurm prolog`: the gate's question in SLURM's prolog. Exit codes and line as `rsup gate`.

Beyond asking it keeps where the kernel's log stood when the job began (the epilog's starting point), and spools what the
supervisor should hear: refusals, and questions that could not be answered. The answer is said before that: a sick disk may
lose these notes, it changes no answer.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from rsup.launcher.slurm.gate import (
    EXIT_ACCEPT,
    EXIT_REFUSE,
    EXIT_UNDECIDED,
    Asked,
    ask_in_time,
    end_time_box,
    say,
    start_time_box,
)
from rsup.launcher.slurm.gate_decision import REFUSED, UNDECIDED
from rsup.launcher.slurm.kernel_log import last_sequence
from rsup.launcher.slurm.node_inventory import sure_boards
from rsup.launcher.slurm.node_settings import boot_id, write_atomically
from rsup.launcher.slurm.node_spool import NodeEvent, NodeSpool, now_us

UNKNOWN_EVERY_S = 600
"""What cannot be answered is told the supervisor that often at most, not once a job."""
USAGE = """usage: rsup slurm prolog

For SLURM's Prolog, as root: may this job start on this node? Takes no arguments: the job is that of SLURM_JOB_ID, with the
GPUs of SLURM_JOB_GPUS. Prints one line that begins with `rsup:`, after a refusal `rsup-refused` too, and spools refusals for
the supervisor. By hand: rsup gate.

Exit codes: 0 accept, 1 refuse, 75 could not decide, 2 wrong usage. In mode observe a refusal is said, and the code is 0."""
REFUSED_MARK = "rsup-refused"
LEAST_S = 0.1
"""For the notes, however long the answer took."""
KINDS = {REFUSED: "prolog-refused", UNDECIDED: "gate-unknown"}


def main(words: Sequence[str]) -> int:
    """The verb. Never raises."""
    start_time_box()
    if words:
        if words[0] in ("-h", "--help"):
            print(USAGE)
            return 0
        print(f"rsup slurm prolog: takes no arguments, not {words[0]!r}", file=sys.stderr)
        return 2
    asked = ask_in_time()
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    code = _exit_code(asked)
    # Where the rest cannot even be killed, the hook goes by the second line.
    say(f"{asked.line}\n{REFUSED_MARK}" if code == EXIT_REFUSE else asked.line)
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(code))
    signal.setitimer(signal.ITIMER_REAL, max(left_s, LEAST_S))
    for note in (_keep_start, _spool):
        with suppress(Exception):  # the answer stands, and exit code 1 would be another one
            note(asked)
    end_time_box()
    return code


def _exit_code(asked: Asked) -> int:
    """`on_unknown = "refuse"` counts only where the mode enforces, and within the cap on one job's restarts."""
    code = asked.exit_code
    if code != EXIT_UNDECIDED or asked.settings.on_unknown != "refuse" or asked.settings.mode != "enforce":
        return code
    return EXIT_REFUSE if asked.question.num_restarts < asked.settings.max_restarts else EXIT_ACCEPT


def _keep_start(asked: Asked) -> None:
    job = asked.question.job
    if not job.isdecimal() or _exit_code(asked) == EXIT_REFUSE:
        return
    start = {
        "boot_id": boot_id(asked.places.root),
        "sequence": last_sequence(asked.places.kernel_log),
        "gpus": sure_boards(asked.boards, asked.question.indexes),
        "time_us": now_us(),
        "gate_s": _running_s(),
    }
    write_atomically(asked.places.jobs / job, json.dumps(start).encode())


def _running_s() -> float:
    """How long this process has been running, the interpreter's start included; 0: unknown."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/stat") as file:
        begun_s = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, round(time.clock_gettime(time.CLOCK_BOOTTIME) - begun_s, 3))
    return 0.0


def _spool(asked: Asked) -> None:
    answer, question = asked.answer, asked.question
    kind = KINDS.get(answer.verdict, "gate-cap" if answer.is_alarm else "")
    if not kind:
        return
    key = f"{kind}:{question.node}:{question.job}:{question.num_restarts}"
    if answer.verdict == UNDECIDED:
        period = int(time.clock_gettime(time.CLOCK_BOOTTIME)) // UNKNOWN_EVERY_S
        key = f"{kind}:{question.node}:{answer.why}:{boot_id(asked.places.root)}:{period}"
        if not _is_first(asked, f"{answer.why}-{period}"):
            return
    NodeSpool(asked.places.spool).add(
        NodeEvent(
            key, now_us(), kind, answer.device or None, None, f"{asked.settings.mode}: {answer.line}", question.job or None
        )
    )


def _is_first(asked: Asked, what: str) -> bool:
    """Whether no prolog of this node has told that before in this period."""
    path = asked.places.run / "unknown"
    with suppress(OSError):
        if path.read_text() == what:
            return False
    write_atomically(path, what.encode())
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
