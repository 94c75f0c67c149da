"""Twenty launches of `true` on 2 ranks at once on one machine; peers: torchrun, ft_launcher."""

import sys
import time

from tests.bench.table import RSUP, Row, Workplace, peer

NUM_LAUNCHES = 20
WITHIN_S = 300.0


def one_crowd(place: Workplace, command: list[str]) -> tuple[list[float], int]:
    """Seconds from the first start to the end of each launch, and how many failed."""
    started = time.monotonic()
    running = {place.start([*command, "--nproc-per-node", "2", "--no-python", "true"]) for _ in range(NUM_LAUNCHES)}
    walls, num_failed = [], 0
    while running and time.monotonic() < started + WITHIN_S:
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            walls.append(time.monotonic() - started)
            num_failed += process.returncode != 0
        time.sleep(0.01)
    for process in running:
        place.kill(process)
    return walls, num_failed + len(running)


def main(runs: int = 1) -> list[Row]:
    """Rows in seconds of wall time, a launch a sample: the maximum is when all had ended."""
    commands = {"rsup": [*RSUP, "launch"]}
    if torchrun := peer("torchrun"):
        commands["torchrun"] = [torchrun]
    if ft_launcher := peer("ft_launcher"):
        commands["ft_launcher"] = [
            *(ft_launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--ft-rank-section-timeouts", "step:60"),
        ]
    rows = []
    for name, command in commands.items():
        walls, num_failed = [], 0
        for _ in range(runs):
            with Workplace() as place:
                found, failed = one_crowd(place, command)
            walls += found
            num_failed += failed
        rows.append(Row("20 launches at once", name, walls, "s", "", f"{num_failed} failed"))
    return rows


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
