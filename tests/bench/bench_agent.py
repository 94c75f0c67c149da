"""What the agent costs while eight ranks train: its processor time over some seconds, in percent of a core."""

import os
import subprocess
import sys
import time

import psutil

from tests.bench.table import RSUP, Row, Workplace

SECONDS = 10
STEPS = """
import time, rsup.worker
from rsup.worker.sections import TrainingSections
sections = TrainingSections(num_warmup_iters=0)
sections.on_setup()
end = time.time() + 60
iteration = 0
while time.time() < end:
    iteration += 1
    rsup.worker.set_iteration(iteration)
    with sections.training_step():
        time.sleep(0.05)
    with sections.checkpointing():
        pass
"""


def main(seconds: float = SECONDS) -> list[Row]:
    """One sample: percent of a core over `seconds`."""
    with Workplace() as place, open(os.devnull, "wb") as null:
        command = [*RSUP, "launch", "--nproc-per-node", "8", "--ft-rank-section-timeouts", "step:30,checkpointing:30"]
        process = subprocess.Popen([*command, place.script("steps.py", STEPS)], env=place.environment, stdout=null, stderr=null)
        agent = psutil.Process(process.pid)
        time.sleep(5)  # starting eight interpreters is not what is measured
        before = agent.cpu_times()
        time.sleep(seconds)
        after = agent.cpu_times()
        process.terminate()
        process.wait(timeout=60)
    used = after.user + after.system - before.user - before.system
    return [Row("agent with 8 ranks", "rsup", [100 * used / seconds], "% of a core", "< 2 %")]


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
