"""Rows E: what ranks print, and the files of a launch."""

import contextlib
import json
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.compat.comparison.launches import Job, launch, one_line, script, within
from tests.compat.comparison.left_running import kill_all
from tests.compat.comparison.row import Peer, Row, Seen

TWO = ("--nproc-per-node", "2")
WITHIN_S = 40.0
LINE_BYTES = 20_000_000
MEMORY_KIB = 160 * 1024
"""A launcher that keeps two lines of 20 MB would have 40 MB more than one that has nothing to pass on."""
LAG_S = 0.025
"""More than any pipe takes on a loaded machine, less than half of what a poll every 0.1 s takes on an idle one."""
LOG_DISK_KIB = 256


# ------------------------------------------------------------------------------------------------- what ranks print


def strange_bytes(peer: Peer, folder: Path) -> Seen:
    """Bytes that are no UTF-8, NUL bytes and unfinished lines, on both streams, teed, redirected and plain: the next line still
    arrives, and the file has every byte."""
    strange = b"\\xff\\xc3\\x00\\xed\\xa0\\x80"
    text = (
        "for f in (sys.stdout, sys.stderr):\n"
        f"    f.buffer.write(b'{strange.decode()} odd\\nafter ' + str(rank).encode()); f.flush()\n"
    )
    name = script(folder, text)
    for words in (["--tee", "3"], ["--redirects", "3"], []):
        logs = folder / f"logs{'-'.join(words)}"
        launched = launch(peer, folder, *TWO, "--log-dir", str(logs), *words, name)
        code = launched.wait(WITHIN_S)
        files = [path.read_bytes() for path in logs.rglob("std*.log")]
        whole = [data for data in files if re.fullmatch(rb"\xff\xc3\x00\xed\xa0\x80 odd\nafter [01]", data)]
        shown = len(launched.lines("after ")) if "--redirects" not in words else 4
        if code != 0 or len(whole) != (4 if words else 0) or shown != 4:
            return Seen(False, f"{' '.join(words) or 'plain'}: exit {code}, {shown} of 4 lines, {len(whole)} of 4 files")
    return Seen(True, "arrives; files have every byte")


def endless_lines(peer: Peer, folder: Path) -> Seen:
    """Two lines of 20 MB, teed: all of it arrives, and the launcher's memory stays what it was."""
    text = f"for _ in range({LINE_BYTES // 100_000}): sys.stdout.write('x' * 100_000)\n"
    name = script(folder, text)
    launched = launch(peer, folder, *TWO, "--tee", "1", "--log-dir", str(folder / "logs"), name)
    peak_kib = 0
    while launched.process.poll() is None and launched.age_s < WITHIN_S:
        peak_kib = max(peak_kib, _peak_kib(launched.process.pid))
        time.sleep(0.01)
    code = launched.wait(1.0)
    shown, kept = launched.path.read_bytes().count(b"x"), sum(p.stat().st_size for p in folder.rglob("stdout.log"))
    right = code == 0 and shown == kept == 2 * LINE_BYTES and 0 < peak_kib < MEMORY_KIB
    return Seen(right, f"exit {code}, {shown / 1e6:.0f} of 40 MB shown, the launcher at {peak_kib / 1024:.0f} MB")


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), 0))


def whose_line(peer: Peer, folder: Path) -> Seen:
    """Two nodes of two ranks that print in pieces: with a prefix, each line is whole and says host and rank; as objects, each
    can be parsed; and a filter by the job's ranks."""
    text = (
        "for i in range(40):\n"
        "    for piece in (f'rank {rank}', ' of ', f'{world}', '\\n'): sys.stdout.write(piece); sys.stdout.flush()\n"
    )
    name = script(folder, text)
    host = socket.gethostname()
    prefix = ["--tee", "3"] if peer.name == "torchrun" else ["--log-prefix", "[${host}:${rank}] "]
    lines = _of_two_nodes(peer, folder, name, *prefix)
    whole = sum(re.fullmatch(rf"\[{re.escape(host)}:([0-3])\] rank \1 of 4", line) is not None for line in lines)
    if whole < 150:  # one that the machine held up for long in mid-line comes in two pieces, marked
        sample = next((line for line in lines if "rank" in line), "")
        return Seen(False, f"{whole} of 160 lines say host and rank: `{sample[:40]}`")
    objects = [json.loads(line) for line in _of_two_nodes(peer, folder, name, "--log-format", "json")]
    whole = sum(o["text"] == f"rank {o['rank']} of 4" and o["host"] == host for o in objects if o["stream"] == "stdout")
    if whole != 160:
        return Seen(False, f"{whole} of 160 lines are objects")
    shown = {line for line in _of_two_nodes(peer, folder, name, "--ranks-filter", "1-2") if line.startswith("rank")}
    right = shown == {"rank 1 of 4", "rank 2 of 4"}
    return Seen(right, "whole lines with host and rank, or objects; a filter by the job's ranks")


def _of_two_nodes(peer: Peer, folder: Path, name: str, *options: str) -> list[str]:
    """The lines on stdout of both nodes' launchers, without the launcher's own."""
    job = Job(peer, folder, ("--nnodes", "2", *TWO, *options), (name,))
    nodes = [job.node(rank) for rank in range(2)]
    for node in nodes:
        node.wait(WITHIN_S)
    return [line for node in nodes for line in node.text.splitlines() if "rank" in line and not line.startswith("rsup")]


def interleaved(peer: Peer, folder: Path) -> Seen:
    """Four ranks print in small pieces without `--tee`: no line of one has a piece of another."""
    text = (
        "word = 'abcd'[rank] * 4\n"
        "for i in range(60):\n    for piece in (word, word + '\\n'): os.write(1 + i % 2, piece.encode()); time.sleep(0.001)\n"
    )
    launched = launch(peer, folder, "--nproc-per-node", "4", script(folder, text))
    code = launched.wait(WITHIN_S)
    lines = [line.removesuffix(" [...]") for line in launched.text.splitlines()]  # a rank that the machine held up in mid-line
    lines = [line for line in lines if re.fullmatch("[abcd]+", line)]
    mixed = sum(len(set(line)) > 1 for line in lines)
    arrived = all(sum(line.count(word) for line in lines) == 8 * 60 for word in "abcd")
    return Seen(code == 0 and arrived and not mixed, f"{mixed} of 240 lines have pieces of several ranks")


def tee_lag(peer: Peer, folder: Path) -> Seen:
    """How long after a rank printed a line the reader of the launcher's output has it."""
    text = "for i in range(31): print('at', time.monotonic(), flush=True); time.sleep(0.037)\n"
    name = script(folder, text)
    process = peer.start(folder, *TWO, "--tee", "1", "--log-dir", str(folder / "logs"), name, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        lags = [
            time.monotonic() - float(at) for line in process.stdout for at in re.findall(r"\d+\.\d+", line)
        ]  # a peer may mix lines
    process.wait(WITHIN_S)
    median = statistics.median(lags) if lags else 60.0
    return Seen(len(lags) == 62 and median < LAG_S, f"{median * 1000:.1f} ms, the median of {len(lags)} lines")


# --------------------------------------------------------------------------------------------------------- log files


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A file system of 256 KiB; False where we may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK_KIB}k", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def full_log_disk(peer: Peer, folder: Path) -> Seen:
    """Ranks print 2 MB each into files on a file system of 256 KiB."""
    text = "for i in range(20): print('x' * 100_000)\nsys.stdout.flush(); say(f'lives-{rank}')\n"
    name = script(folder, text)
    for option in ("--redirects", "--tee"):
        with small_disk(folder / f"disk{option}") as mounted:
            where, limit = str(folder / f"disk{option}"), []
            if not mounted:  # a limit on the size of files does the same to whoever writes them
                limit = ["prlimit", f"--fsize={LOG_DISK_KIB * 1024}:{LOG_DISK_KIB * 1024}"]
            limited = Peer(peer.name, (*limit, *peer.program))
            launched = launch(limited, folder, *TWO, option, "1", "--log-dir", where, name)
            code = launched.wait(WITHIN_S)
            lived = list(folder.glob("lives-*"))
            for path in lived:
                path.unlink()
            kept = sum(path.stat().st_size for path in Path(where).rglob("stdout.log"))
        said, lost = launched.lines("cannot write to"), launched.lines("were lost")
        if code != 0 or len(lived) != 2:
            return Seen(False, f"{option}: exit {code}, {2 - len(lived)} of 2 ranks fail")
        if len(said) != 1 or not lost or f"{2 * 20 * 100_001 - kept} bytes" not in lost[-1]:
            return Seen(False, f"{option}: exit {code}, said {len(said)} times, {lost}")
    return Seen(True, "training goes on; said once, lost bytes counted")


def unwritable_log_dir(peer: Peer, folder: Path) -> Seen:
    """Directories that cannot be made, or with a file in their place: exit 2 before any rank."""
    name = script(folder, "say('ran')\n")
    (folder / "file").touch()
    for path in ("/proc/nope", str(folder / "file"), str(folder / "file" / "below")):
        launched = launch(peer, folder, *TWO, "--log-dir", path, "-r", "3", name)
        code = launched.wait(WITHIN_S)
        if code != 2 or not one_line(launched, path) or (folder / "ran").exists():
            trace = ", a traceback" if "Traceback" in launched.text else ""
            return Seen(False, f"--log-dir {path}: exit {code}, {len(launched.text.splitlines())} lines{trace}")
    return Seen(True, "exit 2 and one line with the path, before any rank")


def temporary_directories(peer: Peer, folder: Path) -> Seen:
    """What a launch leaves in TMPDIR: nothing after success; after a failure the error files; of a killed launch, nothing."""
    good = script(folder, "pass\n", "good.py")
    bad = script(folder, "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}'); sys.exit(3)\n", "bad.py")
    stays = script(folder, "say(f'up-{rank}'); time.sleep(60)\n", "stays.py")
    launch(peer, folder, *TWO, good).wait(WITHIN_S)
    if left := _temporary(folder):
        return Seen(False, f"after success {len(left)} directory is left: {left[0].name[:16]}...")
    launch(peer, folder, *TWO, bad).wait(WITHIN_S)
    if not any(list(path.rglob("error.json")) for path in _temporary(folder)):
        return Seen(False, "after a failure the error files are gone")
    kept = set(_temporary(folder))
    killed = launch(peer, folder, *TWO, stays)
    assert within(WITHIN_S, (folder / "up-1").exists)
    kill_all(folder)  # launcher and all its helpers at once, so that none can clean up
    killed.wait(WITHIN_S)
    launch(peer, folder, *TWO, good).wait(WITHIN_S)
    left = [path for path in _temporary(folder) if path not in kept]
    return Seen(not left, f"nothing after success, error files after a failure, {len(left)} of a killed launch")


def _temporary(folder: Path) -> list[Path]:
    """Log trees in the folder, which is TMPDIR."""
    return [path for path in folder.iterdir() if path.is_dir() and path.name.startswith(("torchelastic_", "rsup-"))]


def standard_input(peer: Peer, folder: Path) -> Seen:
    """`echo hello |` with two ranks: none gets a part of it; with one rank, that gets all."""
    name = script(folder, "say(f'read-{rank}', sys.stdin.read())\n")
    for ranks in (2, 1):
        null = subprocess.DEVNULL
        process = peer.start(folder, "--nproc-per-node", str(ranks), name, stdin=subprocess.PIPE, stdout=null, stderr=null)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("hello\n" * 3)
            process.stdin.close()
        process.wait(WITHIN_S)
        got = [(folder / f"read-{rank}").read_text() for rank in range(ranks)]
        if got != (["", ""] if ranks == 2 else ["hello\n" * 3]):
            return Seen(False, f"{ranks} ranks read {got}")
    return Seen(True, "nothing for several ranks, all for a single one")


def flight_recorder_files(peer: Peer, folder: Path) -> Seen:
    """Ranks dump as torch does, under the name that its variable gives, else its own; then the job restarts and dumps again. A
    name that the user chose is left alone."""
    text = (
        "own = os.path.expanduser('~/.cache/torch/comm_lib_trace_rank_')\n"
        "stem = os.environ.get('TORCH_FR_DUMP_TEMP_FILE') or os.environ.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE') or own\n"
        "os.makedirs(os.path.dirname(stem), exist_ok=True)\n"
        "open(f'{stem}{rank}', 'w').write(f'trace of attempt {restart}'); say(f'dumped-{rank}-{restart}', stem)\n"
        "[wait_for(f'dumped-{other}-{restart}') for other in range(world)]\n"
        "sys.exit(3 if restart == 0 else 0)\n"
    )
    name = script(folder, text)
    words = (*TWO, "--max-restarts", "1", "--log-dir", str(folder / "logs"), name)
    launched = launch(peer, folder, *words, env={"HOME": str(folder)})
    code = launched.wait(WITHIN_S)
    first = [path for path in folder.rglob("*_rank_*") if path.read_text() == "trace of attempt 0"]
    if code != 0 or len(first) != 2:
        return Seen(False, f"exit {code}, {len(first)} of 2 traces of the first attempt are left")
    chosen = launch(peer, folder, *words, env={"HOME": str(folder), "TORCH_FR_DUMP_TEMP_FILE": str(folder / "mine-")})
    chosen.wait(WITHIN_S)
    right = (folder / "mine-0").exists() and bool(launched.lines(str(first[0].parent)))
    return Seen(right, "a name for each attempt, said at its end; the user's own stays")


ROWS: tuple[Row, ...] = (
    Row("53", "a byte that is no UTF-8 stops the log", strange_bytes, False, "bytes arrive; nothing stops"),
    Row("54", "a line of 20 MB", endless_lines, False, "bounded memory"),
    Row("55", "lines do not say host and rank", whose_line, True, "host and rank on whole lines, or JSON; a filter by rank"),
    Row("55+", "ranks' lines are mixed without `--tee`", interleaved, True, "whole lines"),
    Row("56", "`--tee` comes late", tee_lag, True, "at once"),
    Row("58", "a full log disk fails the training", full_log_disk, True, "said once, lost bytes counted, training goes on"),
    Row("59", "an unwritable log directory", unwritable_log_dir, True, "exit 2, one line"),
    Row("60", "temporary directories are left", temporary_directories, True, "none after success"),
    Row("62", "standard input is shared out", standard_input, True, "none for several ranks"),
    Row("63", "a restart overwrites the flight recorder's traces", flight_recorder_files, True, "a name for each attempt"),
)
