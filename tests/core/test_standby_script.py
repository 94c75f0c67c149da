"""What a script may do before it imports torch, if a standby is to run it."""

from pathlib import Path

import pytest

from rsup.launcher.standby_script import script_path, why_not_twice


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\nopen('x')", ""),
        ("'''Doc.'''\nfrom __future__ import annotations\nimport os, time\nimport numpy as np\nimport torch", ""),
        ("import os\nLR = float(os.environ.get('LR', 1))\nprint(LR)\ndef f(): open('x')\nfrom torch import nn", ""),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport torch", ""),
        ("import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).resolve().parent))\nimport torch", ""),
        ("try:\n    import fast\nexcept ImportError:\n    fast = None\nimport torch", ""),
        ("from lightning import Trainer\ndef main(): ...\nif __name__ == '__main__':\n    main()", ""),
        ("import yaml\nconfig = yaml.safe_load(open('x'))\nTrain(config)", ""),
        (
            "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch",
            "line 2 sets OMP_NUM_THREADS before torch is imported",
        ),
        ("import os, yaml\nos.environ['A'] = '1'\ngo()", "line 2 sets A before torch is imported"),
        ("import os\ndel os.environ['A']\nimport torch", "line 2 sets A before torch is imported"),
        (
            "import os\nos.environ.setdefault('A', '1')\nimport torch",
            "line 2 sets environment variables before torch is imported",
        ),
        ("import os, yaml\nfd = os.open('lock', os.O_EXCL)\nimport torch", "line 2 calls os.open before torch is imported"),
        (
            "with open('x') as f:\n    pass\nimport torch",
            "line 1 does something before torch is imported that may not happen twice",
        ),
        ("def main():\n    import torch", "it imports torch inside of a function"),
        ("if __name__ == '__main__':\n    import torch", "line 1 starts the program before torch is imported"),
        ("this is no Python", ""),
    ],
)
def test_what_may_come_before_torch(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert why_not_twice(path) == reason


def test_where_the_script_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg/sub").mkdir(parents=True)
    for name in ("pkg/train.py", "pkg/__main__.py", "pkg/sub/__main__.py", "alone.py"):
        (tmp_path / name).write_text("")
    assert script_path("x/train.py", is_module=False) == Path("x/train.py")
    assert script_path("pkg.train", is_module=True) == tmp_path / "pkg/train.py"
    assert script_path("pkg", is_module=True) == tmp_path / "pkg/__main__.py"
    assert script_path("pkg.sub", is_module=True) == tmp_path / "pkg/sub/__main__.py"
    assert script_path("alone", is_module=True) == tmp_path / "alone.py"
    found = script_path("rsup.worker.reference.train", is_module=True)
    assert found is not None and found.name == "train.py" and why_not_twice(found) == ""
    assert script_path("no.such", is_module=True) is None
    assert why_not_twice(tmp_path / "missing.py") == ""
