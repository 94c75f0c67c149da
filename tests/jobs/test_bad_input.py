"""Bad input: one clear line that says what to do, the right exit code, and nothing lost."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import Launched, Place, wait_until

TRUE = ("--nproc-per-node", "2", "--no-python", "true")
is_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a small tmpfs, or gives a folder away")


def refused(launched: Launched, exit_code: int, *said: str) -> None:
    """It ends at once with that code and one line that says all of `said`."""
    launched.ends(exit_code)
    lines = [line for line in launched.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    for text in said:
        assert text in lines[0], lines[0]
    assert "Traceback" not in launched.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--no-such-option", "x.py"), "--no-such-option"),
        (("--nproc-per-node", "0", "x.py"), "--nproc-per-node"),
        (("--max-restarts", "-1", "x.py"), "--max-restarts"),
        (("--nproc-per-node", "2", "no-such-script.py"), "no-such-script.py"),
        (("--nproc-per-node", "2", "-m", "no.such.module"), "no.such"),
        (("--ft-rank-section-timeouts", "step:-3", "--no-python", "true"), "step"),
        (("--log-dir", "/proc/nope", *TRUE), "/proc/nope"),
        (("--state-dir", "/proc/nope", *TRUE), "/proc/nope"),
        ((), "script"),
    ],
)
def test_wrong_usage(place: Place, arguments: tuple[str, ...], said: str) -> None:
    refused(place.launch(*arguments), 2, "rsup launch:", said)


def test_wrong_options_of_the_trainer_cost_one_attempt(place: Place) -> None:
    trainer = ("-m", "rsup.worker.reference.train", "--cuda-graph-impl", "local")
    launched = place.launch("--nproc-per-node", "2", "--max-restarts", "3", "--job-id", "w", *trainer).ends(2)
    assert "--cuda-graph-impl local does not go with a CUDA graph" in launched.stderr
    assert "would meet the same" in launched.stderr and len(place.status("w")["attempts"]) == 1


def test_a_store_port_in_use(place: Place) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        launched = place.launch("--master-port", port, *TRUE)
        assert launched.wait() == 2
        assert port in launched.stderr and "--master-port" in launched.stderr


def test_a_rendezvous_port_in_use(place: Place) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        launched = place.launch("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}", *TRUE)
        assert launched.wait() == 2
        assert port in launched.stderr and "in use" in launched.stderr


def test_an_interpreter_that_is_gone(place: Place) -> None:
    gone = "import sys; sys.executable = '/gone/python'; from rsup.launcher.cli import main; "
    launch = gone + f"sys.exit(main(['launch', *{TRUE}]))"
    done = subprocess.run([sys.executable, "-c", launch], env=place.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "with /gone/python: No such file" in done.stderr and "internal error" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_two_launches_with_one_live_id(place: Place) -> None:
    first = place.launch("--job-id", "one", "--no-python", "sleep", "300")
    wait_until(lambda: place.status("one").get("job", {}).get("state") == "running", "the first job")
    second = place.launch("--job-id", "one", "--no-python", "sleep", "300")
    assert second.wait() == 2
    assert "already running" in second.stderr and "--job-id" in second.stderr
    first.process.send_signal(signal.SIGTERM)
    first.ends(143)
    place.launch("--job-id", "one", "--no-python", "true").ends(0)
    assert {(job["id"], job["run"]) for job in json.loads(place.rsup("jobs", "--json"))} == {("one", 1), ("one", 2)}


def store_path() -> Path:
    return Path(os.environ["RSUP_STATE_DIR"], "rsup.db")


def after_a_first_job(place: Place) -> None:
    """A store with one job, and no supervisor."""
    place.launch("--job-id", "first", *TRUE).ends(0)
    place.supervisors_end()


def test_a_damaged_store_is_said_and_the_job_runs(place: Place) -> None:
    after_a_first_job(place)
    for path in store_path().parent.glob("rsup.db*"):
        path.write_bytes(b"this is no database, and was one once. " * 100)
    before = store_path().read_bytes()
    launched = place.launch("--job-id", "second", *TRUE).ends(0)
    assert store_path().read_bytes() == before
    assert str(store_path()) in launched.stderr


def test_a_newer_store_is_left_alone_and_the_job_runs(place: Place) -> None:
    after_a_first_job(place)
    with sqlite3.connect(store_path()) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()
    place.launch("--job-id", "second", *TRUE).ends(0)
    with sqlite3.connect(store_path()) as connection:
        rows = connection.execute("select job_id from jobs").fetchall()
    connection.close()
    assert rows == [("first",)]


@is_root
def test_a_state_directory_without_space(place: Place) -> None:
    state = Path(os.environ["RSUP_STATE_DIR"])
    state.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(state)], check=True)
    try:
        (state / "filler").write_bytes(b"x" * 60 * 1024)
        place.launch("--job-id", "full", *TRUE).ends(0)
    finally:
        place.supervisors_end()
        subprocess.run(["umount", "-l", str(state)], check=True)


def test_a_long_state_path(place: Place) -> None:
    deep = place.folder / ("d" * 100) / ("e" * 100)
    place.launch("--job-id", "deep", *TRUE, RSUP_STATE_DIR=str(deep)).ends(0)
    assert "deep" in place.rsup("jobs", "--json", RSUP_STATE_DIR=str(deep))


def test_a_stale_lease_is_taken_over(place: Place) -> None:
    first = place.launch("--job-id", "a", "--no-python", "sleep", "300")
    wait_until(lambda: place.status("a").get("job", {}).get("state") == "running", "the first job")
    os.kill(place.supervisor_pid(), signal.SIGKILL)
    first.process.kill()
    first.wait()
    place.launch("--job-id", "b", *TRUE).ends(0)
    wait_until(lambda: place.status("a").get("job", {}).get("state") == "ended", "the first job's end, which its keeper tells")


@is_root
def test_a_foreign_runtime_directory(place: Place) -> None:
    foreign = place.folder / "foreign"
    (foreign / "rsup").mkdir(parents=True, mode=0o700)
    os.chown(foreign / "rsup", 65534, 65534)
    usual = "rsup-" + str(os.getuid())
    there = set(Path("/tmp").glob(f"{usual}-*"))
    place.launch(*TRUE, XDG_RUNTIME_DIR=str(foreign)).ends(0)
    assert not list((foreign / "rsup").iterdir()), "what is another's is left alone: one of our own is made in /tmp"
    place.supervisors_end()  # it removes files there, too
    for made in set(Path("/tmp").glob(f"{usual}-*")) - there:
        shutil.rmtree(made)
    os.chown(foreign / "rsup", os.getuid(), -1)
    (foreign / "rsup").chmod(0o755)
    refused(place.launch(*TRUE, XDG_RUNTIME_DIR=str(foreign)), 2, str(foreign / "rsup"), "XDG_RUNTIME_DIR")


def test_scripts_with_strange_output(place: Place) -> None:
    binary = place.script("import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)", "binary.py")
    launched = place.launch("--nproc-per-node", "2", binary).ends(0)
    assert launched.stdout_path.stat().st_size == 2 * (256 * 1000 + 1)  # the unfinished last line of each rank is ended
    endless = place.script("import sys; sys.stdout.write('x' * 20_000_000)", "endless.py")
    launched = place.launch("--nproc-per-node", "2", endless).ends(0)
    assert launched.stdout.count("x") == 40_000_000


def test_a_script_that_exits_at_once(place: Place) -> None:
    place.launch("--nproc-per-node", "4", place.script("raise SystemExit(0)")).ends(0)
    launched = place.launch("--nproc-per-node", "4", place.script("raise SystemExit('no data here')")).ends(1)
    assert "no data here" in launched.stderr


def test_a_required_supervisor_that_is_not_there(place: Place) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # bound, so nobody gets it; not listened at, so a connection is refused
        launched = place.launch("--require-supervisor", *TRUE, RSUP_SUPERVISOR=f"tcp://127.0.0.1:{port}")
        fallback = place.launch("--job-id", "alone", *TRUE, RSUP_SUPERVISOR=f"tcp://127.0.0.1:{port}")  # both wait meanwhile
        assert launched.wait() == 75
        assert str(port) in launched.stderr
        fallback.ends(0)
    assert str(port) in fallback.stderr and f"`rsup db merge {os.environ['RSUP_STATE_DIR']}`" in fallback.stderr
