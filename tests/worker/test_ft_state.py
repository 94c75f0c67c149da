"""Limits travel with the checkpoint, in the layout that Megatron-LM and NVRx use."""

from pathlib import Path

import pytest

from rsup.supervisor.wire import Limits
from rsup.worker.reference.hooks import FT_STATE_FILE, read_ft_state, write_ft_state


def test_what_is_written_is_read(tmp_path: Path) -> None:
    limits = Limits(
        sections={"step": 3.5, "setup": 60.0, "mine": 9.0}, out_of_section_s=70.0, calculated=["out-of-section", "step"]
    )
    write_ft_state(tmp_path, limits)
    read = read_ft_state(tmp_path)
    assert read is not None
    assert (read.sections, read.out_of_section_s) == ({"step": 3.5}, 70.0), "configured limits do not travel"
    assert sorted(read.calculated) == ["out-of-section", "step"]


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert read_ft_state(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"current_timeouts": {"section": {"calculated_sections": ["step"]}}}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FT_STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_ft_state(tmp_path)
