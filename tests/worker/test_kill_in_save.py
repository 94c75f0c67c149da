"""A small, seeded run of the kill test; the whole one is `python -m tests.soak.kill_in_save 200`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(420)
def test_a_run_killed_in_mid_save_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    for seed in range(5, 8):  # again where the processor had other things to do whenever files were being written
        command = [sys.executable, "-m", "tests.soak.kill_in_save", "12", "--seed", str(seed), "--mib", "2"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "12 kills" in done.stdout
        if "times on disk: files, no commit.json" in done.stdout:
            return
    pytest.fail(done.stdout)
