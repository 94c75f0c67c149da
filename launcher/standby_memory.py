"""How much memory a standby takes, and how much is free before the container or the machine runs out."""

from __future__ import annotations

from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a huge number for "no limit"."""


def own_bytes(pid: int) -> int:
    """Memory that ends with the process: anonymous and shared, not the pages of files. 0 if it is gone."""
    fields = _fields(Path(f"/proc/{pid}/status"))
    return 1024 * (fields.get("RssAnon", 0) + fields.get("RssShmem", 0))


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes until this process's tightest limit: the machine's available memory, and that of each cgroup above it (v1 or
    v2), whose file cache counts as free. The two paths are for tests."""
    free = 1024 * _fields(proc / "meminfo").get("MemAvailable", 0)
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free = min(free, _free_in(cgroups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, _free_in(cgroups / "memory", path, *names))
    return free


def _free_in(root: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> int:
    """The tightest of the cgroup and those above it; in a container the path may not exist below the mount: its root then."""
    folder = root / path.lstrip("/")
    if not folder.is_dir():
        folder = root
    free = UNLIMITED_BYTES
    while True:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            cache = _fields(folder / "memory.stat").get(cache_name, 0)
            free = min(free, max(0, limit - usage + cache))
        if folder == root:
            return free
        folder = folder.parent


def _fields(path: Path) -> dict[str, int]:
    """Lines `name: number` or `name number`."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
