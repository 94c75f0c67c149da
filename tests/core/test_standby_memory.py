"""What is free before the tightest limit, read from a made-up /proc and cgroup tree."""

import os
from pathlib import Path

from rsup.launcher.standby_memory import free_bytes, own_bytes

MB = 1 << 20


def tree(folder: Path, cgroup: str, **files: str) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * 1024} kB\nMemAvailable:   {10 * 1024} kB\n")
    (proc / "self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        path = cgroups / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    files = {"job__memory_dot_max": "max\n", "job__memory_dot_current": "5\n"}
    assert free_bytes(*tree(tmp_path, "0::/job", **files)) == 10 * MB


def test_the_tightest_of_the_groups_above_counts_and_file_cache_is_free(tmp_path: Path) -> None:
    files = {
        "a__memory_dot_max": f"{6 * MB}",
        "a__memory_dot_current": f"{4 * MB}",
        "a__memory_dot_stat": f"anon {3 * MB}\ninactive_file {1 * MB}\n",
        "a__b__memory_dot_max": f"{9 * MB}",
        "a__b__memory_dot_current": f"{1 * MB}",
    }
    assert free_bytes(*tree(tmp_path, "0::/a/b", **files)) == 3 * MB


def test_container_that_shows_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {"memory_dot_max": f"{2 * MB}", "memory_dot_current": f"{3 * MB}"}
    assert free_bytes(*tree(tmp_path, "0::/../../somewhere", **files)) == 0


def test_first_version_of_cgroups(tmp_path: Path) -> None:
    files = {
        "memory__job__memory_dot_limit_in_bytes": f"{8 * MB}",
        "memory__job__memory_dot_usage_in_bytes": f"{3 * MB}",
        "memory__job__memory_dot_stat": f"total_inactive_file {2 * MB}\n",
    }
    assert free_bytes(*tree(tmp_path, "4:memory:/job", **files)) == 7 * MB


def test_own_memory_of_a_process() -> None:
    assert 1 * MB < own_bytes(os.getpid()) < 10_000 * MB
    assert own_bytes(2**22 + 1) == 0
