"""Training that goes on without its graph must not do so in silence: it may cost a third of the speed, for days."""

import os
import sys

import rsup.worker


def say_fallback(why: str) -> None:
    """One line on standard error of the first rank of the node, and in the job's story."""
    text = f"training goes on without a CUDA graph, kernel by kernel: {why}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr, flush=True)
        rsup.worker.note("warning", text)
