"""A small, seeded run of the kill test; the whole one is `python -m tests.soak.kill_in_save 200`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_killed_in_mid_save_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak.kill_in_save", "12", "--seed", "5", "--mib", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kills" in done.stdout and "times on disk: files, no commit.json" in done.stdout, done.stdout
