"""Scripts that never heard of rsup, and the deaths of everything around them."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Place, free_port, wait_until

SLEEPS = """
import os, sys, time
open(f"{os.environ['OUT']}/pid-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").write(str(os.getpid()))
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not os.path.exists(os.environ["OUT"] + "/finish"):
    time.sleep(0.02)
"""


def pids(place: Place, attempt: int = 0) -> dict[int, int]:
    """Rank -> pid of an attempt's sleepers."""
    found = {}
    for path in place.folder.glob(f"pid-*-{attempt}"):
        text = path.read_text()
        if text:
            found[int(path.name.split("-")[1])] = int(text)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_exit_codes_are_the_first_failing_ranks(place: Place) -> None:
    place.launch("--nproc-per-node", "2", place.script("import os, sys; sys.exit(3 * int(os.environ['RANK']))")).ends(3)
    place.launch("--nproc-per-node", "2", place.script("import os; os.kill(os.getpid(), 9 * int(os.environ['RANK']))")).ends(
        137
    )
    place.launch("--nproc-per-node", "2", "--no-python", "true").ends(0)
    place.launch("--nproc-per-node", "1", place.script("import sys; sys.exit(93)")).ends(1)


def test_a_restart_meets_a_clean_machine(place: Place) -> None:
    script = place.script(
        "import os, subprocess, sys\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt == 0:\n"
        "    if os.environ['RANK'] == '0':\n"
        "        child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "        open(os.environ['OUT'] + '/child', 'w').write(str(child.pid))\n"
        "        os._exit(5)\n"
        "    import time; time.sleep(600)\n"
        "pid = int(open(os.environ['OUT'] + '/child').read())\n"
        "sys.exit(7 if os.path.exists(f'/proc/{pid}') else 0)\n"
    )
    place.launch("--nproc-per-node", "2", "--max-restarts", "1", script).ends(0)


def test_a_dead_agent_takes_its_ranks_and_the_job_is_recorded(place: Place) -> None:
    launched = place.launch("--nproc-per-node", "2", "--job-id", "k", place.script(SLEEPS), "300")
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    launched.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(place).values()), "no rank left", within_s=20)
    status = wait_until(lambda: (s := place.status("k")) and s["job"]["state"] == "ended" and s, "the job's end")
    assert status["job"]["exit_code"] != 0
    assert status["incidents"]


def test_agent_and_ranks_suspended_together_are_left_alone(place: Place) -> None:
    script = place.script(
        "import os, time, rsup.worker\n"
        "rsup.worker.set_iteration(1)\n"
        "open(f\"{os.environ['OUT']}/up-{os.environ['RANK']}\", 'w').close()\n"
        "while not all(os.path.exists(f\"{os.environ['OUT']}/up-{rank}\") for rank in (0, 1)): time.sleep(0.01)\n"
        "with rsup.worker.section('step'):\n"
        "    open(f\"{os.environ['OUT']}/pid-{os.environ['RANK']}-0\", 'w').write(str(os.getpid()))\n"
        "    while not os.path.exists(os.environ['OUT'] + '/finish'): time.sleep(0.01)\n"
    )
    launched = place.launch("--nproc-per-node", "2", "--job-id", "z", "--ft-rank-section-timeouts", "step:5", script)
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    everyone = [launched.pid, *pids(place).values()]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(15)  # three times the limit: the length of the suspension is what is tested
    for pid in reversed(everyone):  # the agent last: who is stopped while it looks is hung
        os.kill(pid, signal.SIGCONT)
    Path(place.folder, "finish").touch()
    launched.ends(0)
    assert not place.status("z")["incidents"]


def test_a_silent_script_is_never_touched(place: Place) -> None:
    launched = place.launch("--nproc-per-node", "2", "--job-id", "q", place.script(SLEEPS), "4").ends(0)
    assert not place.status("q")["incidents"]
    assert "hang" not in launched.stderr


def test_a_rank_that_sleeps_in_a_section_without_limits_is_only_reported(place: Place) -> None:
    script = place.script("import time, rsup.worker\nwith rsup.worker.section('step'):\n    time.sleep(4)\n")
    place.launch("--nproc-per-node", "2", "--job-id", "p", script).ends(0)
    assert len(place.status("p")["attempts"]) == 1


def test_a_signal_to_the_launcher_ends_the_job(place: Place) -> None:
    launched = place.launch("--nproc-per-node", "2", "--job-id", "t", place.script(SLEEPS), "300")
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    launched.process.send_signal(signal.SIGTERM)
    launched.ends(143, within_s=20)
    assert not any(is_alive(pid) for pid in pids(place).values())


def test_two_agents_one_fails(place: Place) -> None:
    script = place.script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(11)\ntime.sleep(600)\n")
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "1")
    agents = [place.launch(*options, "--node-rank", str(n), script) for n in (0, 1)]
    for agent in agents:
        agent.ends(11)


def test_node_rank_decides_the_order(place: Place) -> None:
    script = place.script("import os\nopen(f\"{os.environ['OUT']}/{os.environ['NAME']}\", 'w').write(os.environ['RANK'])\n")
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "1")
    second = place.launch(*options, "--node-rank", "1", script, NAME="b")
    first = place.launch(*options, "--node-rank", "0", script, NAME="a")
    first.ends(0)
    second.ends(0)
    assert (Path(place.folder, "a").read_text(), Path(place.folder, "b").read_text()) == ("0", "1")


@pytest.mark.timeout(180)
def test_one_of_two_agents_is_killed_and_a_spare_takes_over(place: Place) -> None:
    script = place.script(SLEEPS)
    options = ("--nnodes", "2:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "1", "--max-restarts", "2")
    agents = [place.launch(*options, "--job-id", "sp", "--node-rank", str(n), script, "300") for n in (0, 1)]
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    spare = place.launch(*options, "--job-id", "sp", script, "300")
    wait_until(lambda: "spare" in str(place.rsup("events", "sp", "--json")), "the spare")
    assert ", 1 spare node" in place.rsup("status", "sp")
    agents[1].process.kill()
    wait_until(lambda: len(pids(place, attempt=1)) == 2, "both ranks of the second attempt")
    Path(place.folder, "finish").touch()
    agents[0].ends(0)
    spare.ends(0)
    assert [i["kind"] for i in place.status("sp")["incidents"]] == ["agent-lost"]


def test_a_killed_agent_of_a_job_without_restarts_ends_it_everywhere(place: Place) -> None:
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "1")
    agents = [place.launch(*options, "--node-rank", str(n), place.script(SLEEPS), "300") for n in (0, 1)]
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    agents[1].process.kill()
    assert agents[0].wait() != 0
    assert not any(is_alive(pid) for pid in pids(place).values())


def test_identical_failures_stop_the_job(place: Place) -> None:
    script = place.script("raise ImportError('no such thing')")
    launched = place.launch("--nproc-per-node", "2", "--restart", "auto", "--job-id", "i", script).ends(93)
    assert len(place.status("i")["attempts"]) == 3
    assert "no such thing" in launched.stderr
