"""The launcher's process behind `rsup.launcher.main`: reads its options from a pipe, dies with its caller, runs the agent."""

import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Sequence

from rsup.launcher.error_file import write_refusal
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.processes import PR_SET_PDEATHSIG
from rsup.supervisor.wire import RsupError


def main(argv: Sequence[str]) -> int:
    """Run one launch; the words are the descriptor to read the caller's pid and options from."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        with open(int(argv[0]), "rb") as orders:
            caller_pid, options = pickle.load(orders)  # not to the end of the pipe: others may hold it
    except EOFError:
        return 1
    assert isinstance(options, LaunchOptions) and options.report_fd is not None
    if os.getppid() != caller_pid:  # it died before the first line
        return 128 + signal.SIGKILL
    refusals = os.dup(options.report_fd)  # the agent closes the other one
    from rsup.launcher.agent import run

    try:
        return run(options)
    except RsupError as error:
        write_refusal(error, os.environ)
        refused = {"exit_code": error.exit_code, "reason": str(error), "rank": None, "node": "", "signum": 0, "failures": []}
        os.write(refusals, json.dumps({"result": refused}).encode() + b"\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
