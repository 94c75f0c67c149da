"""Bad surroundings: closed streams, directories that cannot be used, limits, locales. A job runs where it can, else one line
says why it cannot."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.supervisor import places
from tests.jobs.conftest import Place, place, wait_until

__all__ = ["place"]
RSUP = f"{sys.executable} -m rsup.launcher launch"
DONE = "import os; open(os.environ['OUT'] + '/done-' + os.environ['RANK'], 'w').close()\n"
NEEDS_ROOT = "needs root: mounts small file systems, or becomes another user"
is_root = pytest.mark.skipif(os.getuid() != 0, reason=NEEDS_ROOT)
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
"""Root that may not write where the mode says no."""


def shell(place: Place, line: str, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of shell to its end."""
    command = ["bash", "-c", line]
    return subprocess.run(command, env=place.environment(**extra), capture_output=True, text=True, timeout=100)


def done_ranks(place: Place) -> int:
    return len(list(place.folder.glob("done-*")))


def is_one_line(stderr: str, *said: str) -> bool:
    lines = stderr.splitlines()
    return len(lines) == 1 and all(text in lines[0] for text in said)


@pytest.fixture
def small_disk(place: Place) -> Iterator[Path]:
    """A file system with room for one file or directory more."""
    path = place.folder / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=2", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# ---------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(("closed", "ranks"), [("<&-", 2), (">&-", 2), ("2>&-", 1), ("<&- >&- 2>&-", 1), ("<&- >&- 2>&-", 2)])
def test_closed_streams(place: Place, closed: str, ranks: int) -> None:
    script = place.script(DONE + "import sys; print('to stdout'); print('to stderr', file=sys.stderr)")
    done = shell(place, f"{RSUP} --nproc-per-node {ranks} --log-dir {place.folder}/logs --redirects 2 {script} {closed}")
    assert done.returncode == 0 and done_ranks(place) == ranks, done
    assert done.stdout == ("" if ">&-" in closed.split() else "to stdout\n" * ranks)
    files = list(place.folder.rglob("stderr.log"))
    assert [path.read_text() for path in files] == ["to stderr\n"] * ranks


def test_a_refusal_with_stderr_closed_does_not_go_to_stdout(place: Place) -> None:
    done = shell(place, f"{RSUP} no-such.py 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reader_of_stdout_goes(place: Place, ranks: int) -> None:
    script = place.script(f"for i in range(30000): print(i, 'y' * 50)\n{DONE}")
    done = shell(place, f"{RSUP} --nproc-per-node {ranks} {script} | head -1; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0 and done.stdout == f"0 {'y' * 50}\n" and done_ranks(place) == ranks
    assert done.stderr.count("cannot write to stdout: Broken pipe") == 1


def test_stdout_on_a_full_disk(place: Place) -> None:
    script = place.script(f"for i in range(30000): print(i, 'y' * 50)\n{DONE}")
    done = shell(place, f"{RSUP} --nproc-per-node 2 {script} > /dev/full")
    assert done.returncode == 0 and done_ranks(place) == 2
    assert done.stderr.count("No space left on device") == 1 and "bytes of output to stdout were lost" in done.stderr


def test_a_locale_without_unicode(place: Place) -> None:
    script = place.script("import sys; sys.stdout.buffer.write('é日\\n'.encode()); raise ValueError(ascii('ü日'))")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = shell(place, f"{RSUP} --role rück --tee 3 {script}", **ascii_only)
    assert done.returncode == 1 and "[rück0]:é日\n" in done.stdout
    assert "Error: '\\xfc\\u65e5'" in done.stderr and "internal error" not in done.stderr


# ------------------------------------------------------------------------------------------------------------ directories


def test_the_working_directory_is_gone(place: Place) -> None:
    script = place.script(DONE)
    gone = f"mkdir {place.folder}/gone; cd {place.folder}/gone; rmdir {place.folder}/gone; "
    done = shell(place, f"{gone} {RSUP} {script}")
    assert done.returncode == 0 and done_ranks(place) == 1, done.stderr
    for words, said in (("script.py", "working directory, which has been removed"), ("-m script", "no module of that name")):
        refused = shell(place, f"{gone} {RSUP} {words}")
        assert refused.returncode == 2 and is_one_line(refused.stderr, said), refused.stderr


def test_a_home_that_cannot_be_written(place: Place) -> None:
    home = place.folder / "home"
    home.mkdir(mode=0o555)
    without = {name: "" for name in ("RSUP_STATE_DIR", "RSUP_TOKEN_FILE")} | {"HOME": str(home)}
    line = " ".join([*WITHOUT_RIGHTS, RSUP, "--job-id homeless", place.script(DONE)])
    done = shell(place, line, **without)
    assert done.returncode == 0 and done_ranks(place) == 1, done.stderr
    state = Path(os.environ["XDG_RUNTIME_DIR"], "rsup", "state")
    assert f"{home}/.local/state/rsup cannot be written, so the store of this user is in {state}" in done.stderr
    status = shell(place, " ".join([*WITHOUT_RIGHTS, sys.executable, "-m rsup.launcher status homeless --json"]), **without)
    assert json.loads(status.stdout)["job"]["exit_code"] == 0
    chosen = shell(place, line, **without | {"RSUP_STATE_DIR": str(home / "state")})
    assert chosen.returncode == 2 and is_one_line(chosen.stderr, str(home / "state")), chosen.stderr


def test_no_home_at_all(place: Place) -> None:
    done = shell(place, f"env -u HOME {RSUP} {place.script(DONE)}")
    assert done.returncode == 0 and done_ranks(place) == 1, done.stderr


def test_a_runtime_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(f"/tmp/rsup-{os.getuid()}")
    was_there = own.exists()
    for base in (tmp_path / "not-there", tmp_path / "closed"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path))
        (tmp_path / "closed").mkdir(mode=0o555, exist_ok=True)
        assert places.runtime_dir() == own
    if not was_there:
        with contextlib.suppress(OSError):  # somebody else's launch needs it by now
            own.rmdir()


@is_root
def test_another_user_in_the_place_of_the_runtime_directory() -> None:
    """As with root of several containers that have /tmp in common."""
    uid = 3_000_000_000 + os.getpid()
    theirs = Path(f"/tmp/rsup-{uid}")
    theirs.mkdir(mode=0o700)
    script = f"import os; from rsup.supervisor import places; os.setuid({uid}); print(places.runtime_dir())"
    without = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=without, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    found = {Path(process.communicate(timeout=60)[0].strip()) for process in started}
    theirs.rmdir()
    assert len(found) == 1, "they meet there"
    ours = found.pop()
    assert ours.name.startswith(f"{theirs.name}-") and (ours.stat().st_uid, ours.stat().st_mode & 0o777) == (uid, 0o700)
    ours.rmdir()


@is_root
def test_directories_that_are_mounted_read_only(place: Place) -> None:
    path = place.folder / "ro"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)], check=True)
    try:
        for option in ("--log-dir", "--state-dir"):
            done = shell(place, f"{RSUP} {option} {path} -r 3 {place.script(DONE)}")
            assert done.returncode == 2 and is_one_line(done.stderr, option, str(path), "Read-only"), done.stderr
        assert done_ranks(place) == 0
        done = shell(place, f"{RSUP} --nproc-per-node 2 {place.script(DONE)}", TMPDIR=str(path))
        assert done.returncode == 0 and done_ranks(place) == 2, done.stderr
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_no_directory_for_temporary_files(place: Place) -> None:
    done = shell(place, f"{RSUP} --nproc-per-node 2 {place.script(DONE)}", TMPDIR="/nonexistent")
    assert done.returncode == 0 and done_ranks(place) == 2, done.stderr


@is_root
def test_temporary_files_without_space_cost_the_error_files_only(place: Place, small_disk: Path) -> None:
    script = place.script(f"{DONE}\nassert 'TORCHELASTIC_ERROR_FILE' not in os.environ")
    done = shell(place, f"{RSUP} --nproc-per-node 2 {script}", TMPDIR=str(small_disk))
    assert done.returncode == 0 and done_ranks(place) == 2, done.stderr
    assert done.stderr.count(f"cannot make a log directory in {small_disk}") == 1
    (small_disk / "last").touch()
    refused = shell(place, f"{RSUP} --log-dir {small_disk} {script}")
    assert refused.returncode == 2 and is_one_line(refused.stderr, str(small_disk), "No space left"), refused.stderr


@is_root
@pytest.mark.parametrize("options", ["size=4k", "ro"])
def test_shared_memory_without_space(place: Place, options: str) -> None:
    script = place.script(DONE)
    fill = "head -c 4096 /dev/zero > /dev/shm/full" if options != "ro" else "true"
    line = f"mount -t tmpfs -o {options} tmpfs /dev/shm; {fill}; {RSUP} --nproc-per-node 2 {script}"
    done = shell(place, f"unshare -m bash -c '{line}'")
    assert done.returncode == 0 and done_ranks(place) == 2, done.stderr
    assert "run unwatched" not in done.stderr


@pytest.mark.parametrize("umask", ["077", "000"])
def test_the_umask_is_the_ranks_and_does_not_open_the_state(place: Place, umask: str) -> None:
    script = place.script(f"{DONE}print(os.umask(0o22))")
    logs = place.folder / "logs"
    done = shell(place, f"umask {umask}; {RSUP} --log-dir {logs} -r 1 {script}")
    assert done.returncode == 0, done.stderr
    (log,) = logs.rglob("stdout.log")
    assert log.read_text() == f"{int(umask, 8)}\n" and log.stat().st_mode & 0o777 == 0o666 & ~int(umask, 8)
    state = Path(os.environ["RSUP_STATE_DIR"])
    wait_until((state / "token").exists, "the token, which the supervisor makes when it already serves")
    assert state.stat().st_mode & 0o077 == 0 and (state / "token").stat().st_mode & 0o077 == 0


# ----------------------------------------------------------------------------------------------------------------- limits


def test_long_arguments(place: Place) -> None:
    script = place.script("import sys; print(len(sys.argv), sum(map(len, sys.argv[1:])))")
    place.launch(script, *["a" * 10_000] * 20, *map(str, range(10_000))).ends(0)
    assert place.launched[-1].stdout == f"10021 {200_000 + sum(len(str(i)) for i in range(10_000))}\n"
    for word in ("x", "a://", "&token"):  # a pattern that looks for secrets must not take its time
        longest = word * (131_000 // len(word))
        place.launch(script, longest).ends(0, within_s=60)
        assert place.launched[-1].stdout == f"2 {len(longest)}\n"


def test_more_environment_than_the_system_takes(place: Place) -> None:
    env = place.environment()
    words = [*RSUP.split(), "--nproc-per-node", "2", place.script(DONE)]
    room = os.sysconf("SC_ARG_MAX") - 600 - sum(len(name) + len(value) + 10 for name, value in env.items())
    room -= sum(len(word) + 9 for word in words)
    number = 0
    while room > 20:
        name = f"BIG_{number}"
        env[name] = "x" * min(100_000, room - len(name) - 10)
        room -= len(name) + len(env[name]) + 10
        number += 1
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 126) and done_ranks(place) == 0, done
    said = [line for line in done.stderr.splitlines() if "longer than the system takes" in line]
    assert len(said) == 1 and "internal error" not in done.stderr, done.stderr


def test_few_descriptors(place: Place) -> None:
    script = place.script(f"{DONE}import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    done = shell(place, f"ulimit -Sn 30; {RSUP} --nproc-per-node 4 {script}")
    assert done.returncode == 0 and done.stdout == "30\n" * 4, done.stderr
    for limit in (44, 26):
        few = shell(place, f"ulimit -n {limit}; {RSUP} --nproc-per-node 12 {script}")
        assert few.returncode == 1 and few.stderr.count("raise ulimit -n") == 1, few.stderr
        assert "internal error" not in few.stderr


@is_root
def test_few_processes(place: Place) -> None:
    user = 64_250
    for path in (place.folder, Path(os.environ["XDG_RUNTIME_DIR"])):
        os.chown(path, user, user)
    reach = "+dac_override,+dac_read_search"
    other = f"setpriv --reuid {user} --clear-groups --inh-caps {reach} --ambient-caps {reach}"
    line = f"{other} bash -c 'ulimit -u 30; exec {RSUP} --nproc-per-node 40 --no-python sleep 30'"
    done = shell(place, line, RSUP_STATE_DIR=str(place.folder / "their-state"))
    assert done.returncode == 1 and "limit of processes is reached (ulimit -u" in done.stderr, done.stderr
    assert "internal error" not in done.stderr
