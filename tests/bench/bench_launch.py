"""Start and end of `true` on two ranks, whole command; peers: torchrun, ft_launcher."""

import sys

from tests.bench.table import RSUP, Row, Workplace, peer

RUNS = 10


def main(runs: int = RUNS) -> list[Row]:
    """Rows in seconds of wall time."""
    rows = []
    with Workplace() as place:
        cold = []
        for i in range(runs):
            state = str(place.folder / f"state-{i}")
            cold.append(place.run([*RSUP, "launch", "--nproc-per-node", "2", "--no-python", "true"], RSUP_STATE_DIR=state)[1])
        rows.append(Row("true on 2 ranks", "rsup, new state directory", cold, "s", "<= 1.0 s"))
        warm = [place.run([*RSUP, "launch", "--nproc-per-node", "2", "--no-python", "true"])[1] for _ in range(runs + 1)]
        rows.append(Row("true on 2 ranks", "rsup, supervisor running", warm[1:], "s", "<= 0.5 s"))
        for name, extra in (
            ("torchrun", []),
            (
                "ft_launcher",
                ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ft-rank-section-timeouts", "step:60"],
            ),
        ):
            command = peer(name)
            if command:
                walls = [place.run([command, "--nproc-per-node", "2", *extra, "--no-python", "true"])[1] for _ in range(runs)]
                rows.append(Row("true on 2 ranks", name, walls, "s"))
    return rows


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
