"""Tests that need GPUs: marked `gpu(n)`, skipped with a reason where there are fewer."""

import subprocess
import sys
from functools import cache

import pytest

from tests.jobs.conftest import place  # noqa: F401 - the fixture


@cache
def num_gpus() -> int:
    """GPUs that torch sees, asked in another process: no CUDA context of ours."""
    script = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None and num_gpus() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, torch sees {num_gpus()}")
