"""Starts ranks of the reference trainer by fork from a process that has imported torch once: 50 ms a rank instead of 3 s.

Reads one JSON object a line on standard input: `{"environment": {...}, "arguments": [...], "output": PATH}`, and with
`"script": PATH` runs that script instead. Answers with
`started PID`, and with `ended PID CODE` when that rank has ended (CODE is negative for a signal). At end of input it kills
what is left.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

warnings.simplefilter("ignore", FutureWarning)
gc.disable()  # it finds nothing in an import, and takes a quarter of its time

import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint.state_dict_loader  # noqa: E402
import torch.distributed.checkpoint.state_dict_saver  # noqa: E402, F401

import rsup.worker.reference.trainer  # noqa: E402, F401
from rsup.worker.reference.train import run_as_program  # noqa: E402

gc.freeze()  # so that ranks never look through, and copy, what they share
gc.enable()


def become_rank(order: dict[str, Any]) -> NoReturn:
    """In the child: take over environment, arguments and output, and train."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    if "script" in order:
        runpy.run_path(order["script"], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    sys.argv = ["train", *order["arguments"]]
    run_as_program()


def reap(children: set[int]) -> None:
    """Report the children that have ended."""
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


def serve() -> None:
    """Fork ranks until standard input ends."""
    wakeup, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(bell)
    children: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakeup, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == wakeup:
                reap(children)
                continue
            if not data:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for pid in children:
                    os.waitpid(pid, 0)
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                Path(order["output"]).touch()
                pid = os.fork()
                if pid == 0:
                    become_rank(order)
                children.add(pid)
                print("started", pid, flush=True)


if __name__ == "__main__":
    serve()
