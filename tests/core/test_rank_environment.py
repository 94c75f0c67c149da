"""What a rank finds in its environment."""

import pytest

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.rank_environment import SessionPlaces, rank_environment, threads_notice
from rsup.supervisor.wire import StartAttempt, UsageError

START = StartAttempt(1, "r", 3, 7, 4, 2, 8, 2, 4, "10.0.0.1", 4321, "job", 2, max_restarts=5)
PLACES = SessionPlaces("agent", "/dev/shm/b", "/run/s", "/run/st", True)
OPTIONS = LaunchOptions("train.py", role="trainer")


def test_torchruns_variables_and_ours() -> None:
    found = rank_environment({"PATH": "/bin", "TORCHELASTIC_ERROR_FILE": "outer"}, OPTIONS, START, 1, PLACES, "/log/error.json")
    assert found == {
        "PATH": "/bin",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job.2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/log/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "RSUP_JOB_ID": "job",
        "RSUP_RUN": "2",
        "RSUP_ATTEMPT": "3",
        "RSUP_SLOT": "1",
        "RSUP_MARK": "agent",
        "RSUP_STACKS_DIR": "/run/st",
        "RSUP_BOARD": "/dev/shm/b",
        "RSUP_RANK_SOCKET": "/run/s",
    }


def test_what_the_user_set_stays() -> None:
    given = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_VISIBLE_DEVICES": "3,5"}
    found = rank_environment(given, OPTIONS, START, 0, PLACES)
    assert {name: found[name] for name in given} == given
    assert "TORCHELASTIC_ERROR_FILE" not in found
    assert threads_notice(given, 2) == "" and threads_notice({}, 1) == ""
    assert "OMP_NUM_THREADS=1" in threads_notice({}, 2)


def test_virtual_local_rank_narrows_the_devices() -> None:
    options = LaunchOptions("train.py", virtual_local_rank=True)
    found = rank_environment({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, options, START, 1, PLACES)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"], found["RSUP_SLOT"]) == ("0", "GPU-b", "1")
    assert rank_environment({}, options, START, 1, PLACES)["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(UsageError, match="nproc-per-node 1"):
        rank_environment({"CUDA_VISIBLE_DEVICES": "3"}, options, START, 1, PLACES)
