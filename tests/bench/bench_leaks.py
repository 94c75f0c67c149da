"""A thousand restarts of one launch: descriptors, memory, threads, processes and files after 100 and at the end.

python -m tests.bench.bench_leaks [RESTARTS]
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.table import RSUP, Workplace

RESTARTS = 1000
WARM_UP = 100
FAILS = 'n=$(cat "$OUT/count" 2>/dev/null || echo 0); [ "$RANK" = 0 ] && echo $((n + 1)) > "$OUT/count"; sleep 0.01; exit 3'


def main(restarts: int = RESTARTS) -> int:
    """Print a line a process (agent, keeper, supervisor); return 1 if something grew."""
    with Workplace() as place:
        words = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--identical-failures", str(restarts + 2)]
        started = time.monotonic()
        process = place.start([*RSUP, "launch", *words, "--no-python", "sh", "-c", FAILS])
        first: dict[str, dict[str, int]] = {}
        last: dict[str, dict[str, int]] = {}
        while process.poll() is None:
            if _restarts(place) >= WARM_UP:
                seen = _sample(place, process)
                first = first or seen
                last = seen or last
            time.sleep(0.2)
        wall_s = time.monotonic() - started
        left = _left_files(place)
        code, num = process.returncode, _restarts(place)
        place.kill(process)
    print(f"{num - 1} restarts in {wall_s:.1f} s ({wall_s / max(1, num) * 1e3:.0f} ms each), exit code {code}")
    print(f"{'process':12}{'what':14}{'after 100':>12}{'at the end':>12}")
    for who, fields in first.items():
        for what, value in fields.items():
            print(f"{who:12}{what:14}{value:>12}{last.get(who, {}).get(what, 0):>12}")
    print(f"left in the runtime directory, /dev/shm and TMPDIR: {', '.join(left) or 'nothing'}")
    return int(code != 3 or bool(left) or any(_grew(first[who], last.get(who, {})) for who in first))


def _restarts(place: Workplace) -> int:
    try:
        return int((place.folder / "count").read_text() or 0)
    except (OSError, ValueError):
        return 0


def _grew(first: dict[str, int], last: dict[str, int]) -> bool:
    """Memory by half, or a number by more than what one attempt in progress explains."""
    return any(last.get(what, 0) > (value * 1.5 if what == "memory kB" else value + 8) for what, value in first.items())


def _sample(place: Workplace, process: "subprocess.Popen[bytes]") -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    pids = {"agent": process.pid} | {_role(pid): pid for pid in _children(process.pid)}
    with contextlib.suppress(OSError, ValueError):
        pids["supervisor"] = int(json.loads((place.folder / "state" / "supervisor.json").read_text())["pid"])
    for who, pid in pids.items():
        try:
            if who:
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = {
                    line.split(":")[0]: int(line.split()[1])
                    for line in status.splitlines()
                    if line.startswith(("VmRSS", "Thr"))
                }
                num_fds = len(os.listdir(f"/proc/{pid}/fd"))
                found[who] = {"descriptors": num_fds, "memory kB": numbers["VmRSS"], "threads": numbers["Threads"]}
        except (OSError, KeyError):
            continue
    if len(found) == 3:
        found["node"] = {"children": len(_children(process.pid)), "files": len(_files(place))}
        return found
    return {}


def _role(pid: int) -> str:
    try:
        return "keeper" if b"keeper_process" in Path(f"/proc/{pid}/cmdline").read_bytes() else ""
    except OSError:
        return ""


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def _files(place: Workplace) -> list[str]:
    return [str(path) for path in place.folder.rglob("*") if "state" not in path.parts and path.is_file()]


def _left_files(place: Workplace) -> list[str]:
    """What is neither ours nor the supervisor's, which still runs."""
    ours = {"count", "last.log"}
    return [path for path in _files(place) if Path(path).name not in ours and not Path(path).parent.name.startswith("s-")]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RESTARTS))
