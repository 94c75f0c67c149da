"""The matrix of reruns: `python -m tests.rerun_matrix` runs them all and prints a table; `--part N` a part of them."""

import argparse
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence

from tests.rerun_matrix.runs import Run, all_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.rerun_matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=1, help="run one in N")
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("--without", help="leave out runs whose name contains this")
    parser.add_argument("--number", type=int, help="only this run")
    parser.add_argument("--within", type=float, default=900.0, help="seconds that it may take")
    chosen = parser.parse_args(arguments)
    runs = [
        run
        for run in all_runs(chosen.seed, chosen.part)
        if (not chosen.only or chosen.only in run.name)
        and (not chosen.without or chosen.without not in run.name)
        and chosen.number in (None, run.number)
    ]
    warnings.simplefilter("ignore", FutureWarning)
    from tests.rerun_matrix.ranks import Found, run_all

    began_s = time.monotonic()
    found = {one.number: one for one in run_all(runs, chosen.within)}
    _print_table(runs, {number: one.verdicts for number, one in found.items()}, {n: bool(f.wrong) for n, f in found.items()})
    wrong: list[tuple[Run, Found]] = [(run, found[run.number]) for run in runs if found[run.number].wrong]
    for run, one in wrong:
        print(f"WRONG {run}: {one.wrong}\n      {' | '.join(one.reasons)}")
    accused_healthy = sum("healthy" in one.wrong for one in found.values())
    print(
        f"{len(found)} runs, {len(wrong)} wrong, {accused_healthy} with a healthy device accused; "
        f"seed {chosen.seed}, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if wrong else 0


def _print_table(runs: Sequence[Run], verdicts: dict[int, tuple[str, ...]], wrong: dict[int, bool]) -> None:
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for run in runs:
        row = rows[run.name]
        row["runs"] += 1
        row["right"] += not wrong[run.number]
        row["dropout"] += run.dropout
        row["killed"] += run.kill_at is not None
        row["own position"] += run.own_position
        row[f"-> {', '.join(verdicts[run.number]) or 'no verdict'}"] += 1
    fixed = ("runs", "right", "dropout", "killed", "own position")
    lines: list[tuple[str, ...]] = [("fault", *fixed, "verdicts")]
    for name, row in rows.items():
        given = "; ".join(f"{key[3:]} {count}" for key, count in row.items() if key.startswith("-> "))
        lines.append((name, *(str(row[key]) for key in fixed), given))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
