"""Rows D: errors, exit codes and restarts, on one node."""

import signal
from collections.abc import Callable
from pathlib import Path

from tests.compat.comparison.launches import Launched, events_of, launch, script, within
from tests.compat.comparison.left_running import living
from tests.compat.comparison.row import Peer, Row, Seen

TWO = ("--nproc-per-node", "2")
MEET = "say(f'up-{rank}-{restart}', os.getpid()); [wait_for(f'up-{other}-{restart}') for other in range(world)]\n"
"""Ranks wait for each other; `up-RANK-RESTART` has the pid."""
STAYS = "time.sleep(60)\n"


def _run(peer: Peer, folder: Path, text: str, *options: str, within_s: float = 40.0) -> tuple[Launched, int | None]:
    launched = launch(peer, folder, *TWO, *options, script(folder, text))
    return launched, launched.wait(within_s)


# ----------------------------------------------------------------------------------------------------------- exit codes


def rank_1_ends_by(statement: str, expected: int, *says: str) -> Callable[[Peer, Path], Seen]:
    """Rank 1 ends that way while rank 0 runs. `says`: words that the report of the launcher must have."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        done, code = _run(peer, folder, f"{MEET}if rank == 1: {statement}\n{STAYS}")
        missing = [word for word in says if word not in _report(peer, done)]
        what = f"exit {code}"
        if says:
            what += f", the report {f'lacks {missing[0]!r}' if missing else 'has the reason'}"
        return Seen(code == expected and not missing, what)

    return recipe


def _report(peer: Peer, done: Launched) -> str:
    """What the launcher itself printed at the end, without what the ranks had printed before."""
    text = done.text
    begin = text.find("Root Cause") if peer.name == "torchrun" else text.find(" failed: rank ")
    return text[begin:] if begin >= 0 else ""


def first_mover_is_named(peer: Peer, folder: Path) -> Seen:
    """Rank 1 fails; rank 0 waits for it as in a collective, and fails a moment later for want of its peer."""
    done, code = _run(
        peer,
        folder,
        "import socket\n"
        "if rank == 0:\n"
        "    server = socket.create_server(('127.0.0.1', 0)); say('port', server.getsockname()[1]); peer, _ = server.accept()\n"
        "    if not peer.recv(1): raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')\n"
        "wait_for('port'); peer = socket.create_connection(('127.0.0.1', int(open('port').read())))\n"
        "time.sleep(0.2)\nraise ValueError('loss is NaN in shard 7')\n",
    )
    report = _report(peer, done)
    first, victim = report.find("loss is NaN in shard 7"), report.find("Connection closed by peer")
    right = code == 1 and first >= 0 and (victim < 0 or first < victim)
    return Seen(
        right,
        "rank 1 and its error first" if right else "the report has no reason" if first < 0 else "the victim is named first",
    )


def who_signalled_whom(peer: Peer, folder: Path) -> Seen:
    """Rank 0 is ended by the launcher, since rank 1 has failed."""
    _run(peer, folder, f"{MEET}if rank == 1: sys.exit(3)\n{STAYS}")
    ended = [event for event in events_of(folder) if event["kind"] == "RankExited" and event["rank"] == 0]
    data = ended[0]["data"] if ended else {}
    right = data.get("signal") == signal.SIGTERM and "rank 1" in str(data.get("by_us")) and "." in str(ended[0]["at"])
    return Seen(right, f"rank 0: signal {data.get('signal')}, by us: {data.get('by_us')}")


# ------------------------------------------------------------------------------------------------------------- restarts


def starts_of(text: str, expected: int, code: int, *options: str) -> Callable[[Peer, Path], Seen]:
    """How often the job is started, and how it ends."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        _, ended = _run(peer, folder, f"say(f'start-{{rank}}-{{restart}}')\n{text}", *options)
        starts = len(
            {path.name.rpartition("-")[2] for path in folder.glob("start-?-?")}
        )  # a rank may be ended before it says so
        return Seen(starts == expected and ended == code, f"{starts} starts, exit {ended}")

    return recipe


def waits_for_old_processes(rank_ignores_term: bool) -> Callable[[Peer, Path], Seen]:
    """The first start leaves strays that ignore SIGTERM, and ranks that do; the second looks for them as it begins."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        _, code = _run(
            peer,
            folder,
            f"signal.signal(signal.SIGTERM, {'signal.SIG_IGN' if rank_ignores_term else 'signal.SIG_DFL'})\n"
            "if restart:\n"
            "    old = [name for name in os.listdir('.') if name.startswith('old-')]\n"
            "    alive = [name for name in old if os.path.exists(f'/proc/{open(name).read()}')]\n"
            "    say(f'alive-{rank}', ' '.join(sorted(alive))); sys.exit(0)\n"
            "say(f'old-rank-{rank}', os.getpid())\n"
            "ignore = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "stray = subprocess.Popen(['sleep', '60'], start_new_session=True, preexec_fn=ignore)\n"
            "say(f'old-stray-{rank}', stray.pid); wait_for('old-stray-0'); wait_for('old-stray-1')\n"
            "if rank == 1: os._exit(4)\n" + STAYS,
            *("--max-restarts", "1", "--shutdown-timeout", "1"),
        )
        alive = sorted({name for path in folder.glob("alive-?") for name in path.read_text().split()})
        return Seen(code == 0 and not alive, f"exit {code}; alive at the second start: {', '.join(alive) or 'nothing'}")

    return recipe


def store_dies_before_the_error(peer: Peer, folder: Path) -> Seen:
    """Rank 1 kills the process that holds the job's store, then fails: its own error is what counts."""
    done, code = _run(
        peer,
        folder,
        MEET + "if rank == 0: time.sleep(60)\n"
        "wanted = f\"{int(os.environ['MASTER_PORT']):04X}\"\n"
        "rows = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/net/{name}').readlines()[1:]]\n"
        "inodes = {f'socket:[{row[9]}]' for row in rows if row[3] == '0A' and row[1].endswith(':' + wanted)}\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        held = any(os.readlink(f'/proc/{pid}/fd/{fd}') in inodes for fd in os.listdir(f'/proc/{pid}/fd'))\n"
        "    except OSError: continue\n"
        "    if held and int(pid) != os.getppid(): os.kill(int(pid), signal.SIGKILL); say('killed', pid)\n"
        "time.sleep(0.3)\nraise SystemExit('the disk is gone')\n",
    )
    killed = (folder / "killed").exists()
    right = killed and code == 1 and "the disk is gone" in _report(peer, done)
    return Seen(
        right, f"exit {code}, {'the error is reported' if right else 'the error is hidden' if killed else 'no store was found'}"
    )


# ----------------------------------------------------------------------------------------------------------------- hangs


def stacks_of_the_hung(peer: Peer, folder: Path) -> Seen:
    """Rank 0 hangs in a function; rank 1 gives up on it, as after a collective's timeout."""
    text = "def waits_for_ever(): time.sleep(60)\n" + MEET + "if rank == 0: waits_for_ever()\ntime.sleep(0.5)\n"
    done, code = _run(peer, folder, text + "raise RuntimeError('timed out after 5 s waiting for rank 0')\n")
    where = done.text + "".join(str(event["data"]) for event in events_of(folder)) if peer.name == "rsup" else done.text
    found = "waits_for_ever" in where
    return Seen(found and code == 1, f"exit {code}, rank 0's stack is {'kept' if found else 'lost'}")


def open_section_over_a_restart(peer: Peer, folder: Path) -> Seen:
    """A rank dies in a section with a limit; the next attempt never opens it and runs for longer than the limit."""
    _, code = _run(
        peer,
        folder,
        "from rsup import worker\nworker.init()\n" + MEET + "if restart == 0 and rank == 1:\n"
        "    worker.section('checkpointing').enter(); os._exit(5)\n"
        "time.sleep(4 if restart else 60)\n",
        *("--max-restarts", "1", "--ft-rank-section-timeouts", "checkpointing:1.5"),
    )
    hangs = [event for event in events_of(folder) if "hang" in str(event["kind"]).lower() or event["kind"] == "RankOverdue"]
    return Seen(code == 0 and not hangs, f"exit {code}, hangs reported: {len(hangs)}")


def main_thread_is_stuck(peer: Peer, folder: Path) -> Seen:
    """The thread that beats lives on; the step does not end."""
    done, code = _run(
        peer,
        folder,
        "from rsup import worker\nworker.init()\n"
        + MEET
        + "with worker.section('step'):\n    time.sleep(60 if rank == 1 else 0)\ntime.sleep(60)\n",
        *("--ft-rank-section-timeouts", "step:1.5"),
    )
    found = "rank 1" in done.text and "step" in done.text
    return Seen(code not in (0, None) and found and done.took_s < 30, f"exit {code}, {'named' if found else 'not named'}")


def launcher_alone_gets_sigterm(peer: Peer, folder: Path) -> Seen:
    text = "signal.signal(signal.SIGTERM, lambda *_: (say(f'told-{rank}'), sys.exit(0)))\n" + MEET + STAYS
    launched = launch(peer, folder, *TWO, script(folder, text))
    within(30, lambda: all((folder / f"up-{rank}-0").exists() for rank in (0, 1)))
    launched.process.terminate()
    code = launched.wait(20)
    told = len(list(folder.glob("told-?")))
    return Seen(told == 2 and code is not None and not living(folder, "script.py"), f"{told} of 2 ranks told, exit {code}")


IN_A_THREAD = "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(0.5); sys.exit(5)"
KILLED_FOUR_TIMES = MEET + "if restart < 4:\n    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n    time.sleep(60)\n"
no_import = starts_of("import no_such_module\n", 3, 93, "--max-restarts", "5")
killed_again_and_again = starts_of(KILLED_FOUR_TIMES, 5, 0, "--max-restarts", "4")
segfault = rank_1_ends_by("os.kill(os.getpid(), signal.SIGSEGV)", 139)
killed = rank_1_ends_by("os.kill(os.getpid(), signal.SIGKILL)", 137)
exits_93 = rank_1_ends_by("sys.exit(93)", 1, "did not declare")
exits_with_text = rank_1_ends_by("sys.exit('no data at /data')", 1, "no data at /data")
interrupted = rank_1_ends_by("raise KeyboardInterrupt", 130, "KeyboardInterrupt")
fails_in_a_thread = rank_1_ends_by(IN_A_THREAD, 5, "ZeroDivisionError")

CODE = "exit with the rank's code, or 128 + its signal"
REASON = "the launcher's report has the reason"
ROWS = (
    Row("37", "`sys.exit(3)`", rank_1_ends_by("sys.exit(3)", 3), True, CODE),
    Row("37+", "`sys.exit(255)`", rank_1_ends_by("sys.exit(255)", 255), False, CODE),
    Row("37++", "a rank dies of SIGSEGV", segfault, False, CODE),
    Row("37+++", "a rank is killed", killed, False, CODE),
    Row("37++++", "a rank exits with a code that has a meaning here", exits_93, False, "exit 1, and why"),
    Row("39", "no reason in the report, a victim is blamed", first_mover_is_named, True, "the first mover and its error"),
    Row("40", '`sys.exit("text")`', exits_with_text, True, REASON),
    Row("40+", "KeyboardInterrupt", interrupted, True, REASON),
    Row("40++", "an exception in a thread", fails_in_a_thread, False, REASON),
    Row("41", "no record of what the launcher ended", who_signalled_whom, False, "who signalled whom, when, why"),
    Row("42", "an ImportError, `--max-restarts 5`", no_import, True, "three equal failures end the job, exit 93"),
    Row("42+", "killed from outside, `--max-restarts 4`", killed_again_and_again, False, "no two are taken for equal"),
    Row("44", "`--run-path` and `sys.exit(0)`", starts_of("sys.exit(0)\n", 1, 0, "--run-path"), False, "ends"),
    Row("44+", "`--run-path` and `sys.exit(3)`", starts_of("sys.exit(3)\n", 1, 3, "--run-path"), False, CODE),
    Row("45", "the store dies before a rank fails", store_dies_before_the_error, False, "the rank's error all the same"),
    Row("46", "a hung rank is killed before its stack is known", stacks_of_the_hung, True, "stacks of the live ranks first"),
    Row("47", "an open section survives a restart", open_section_over_a_restart, False, "each attempt has its own"),
    Row("48", "a heartbeat thread lies", main_thread_is_stuck, False, "limits look at the training thread's sections"),
    Row("50", "SIGTERM to the launcher only", launcher_alone_gets_sigterm, False, "passed on to every rank"),
    Row("51", "a new attempt beside old processes", waits_for_old_processes(False), True, "every one is gone first"),
    Row("51+", "the same, ranks ignore SIGTERM", waits_for_old_processes(True), False, "the same, after the grace"),
)
