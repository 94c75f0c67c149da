"""All benchmarks, one table: `python -m tests.bench` (minutes); one: `python -m tests.bench.bench_launch`."""

import os
import platform
import time

from tests.bench import (
    bench_agent,
    bench_checks,
    bench_crowd,
    bench_gate,
    bench_hang,
    bench_history,
    bench_inprocess,
    bench_launch,
    bench_leaving,
    bench_observe,
    bench_rerun,
    bench_restart,
    bench_saves,
    bench_sections,
    bench_snapshot,
    bench_takeover,
    bench_writers,
)
from tests.bench.table import Row, print_table


def main() -> None:
    """Run them one after the other; nothing else should run meanwhile."""
    rows: list[Row] = []
    for bench in (
        bench_sections,
        bench_launch,
        bench_crowd,
        bench_restart,
        bench_inprocess,
        bench_leaving,
        bench_saves,
        bench_gate,
        bench_hang,
        bench_agent,
        bench_history,
        bench_takeover,
        bench_checks,
        bench_rerun,
        bench_snapshot,
        bench_observe,
        bench_writers,
    ):
        rows += bench.main()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%F', time.gmtime())}")
    print_table(rows)


if __name__ == "__main__":
    main()
