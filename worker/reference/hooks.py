"""The section hooks that the trainer calls: rsup's with `--enable-ft-package`, else none, as in the seed of the design."""

import contextlib
import json
from pathlib import Path
from typing import Any, Protocol

from rsup.supervisor.wire import Limits
from rsup.worker.checkpoint_directory import write_durably

FT_STATE_FILE = "ft_state.json"
OUT_OF_SECTION = "out-of-section"
"""What `Limits.calculated` calls the limit outside of all sections."""


class Sections(Protocol):
    """What the trainer needs of `rsup.worker.sections.TrainingSections`."""

    def on_setup(self) -> None: ...
    def on_checkpoint_loaded(self, is_local: bool = False) -> None: ...
    def on_async_save(self) -> None: ...
    def on_replay(self) -> None: ...
    def on_shutdown(self) -> None: ...
    def training_step(self) -> contextlib.AbstractContextManager[None]: ...
    def eval_step(self) -> contextlib.AbstractContextManager[None]: ...
    def checkpointing(self, is_async_finalization: bool = False) -> contextlib.AbstractContextManager[None]: ...


class NoSections:
    """Hooks that do nothing."""

    def on_setup(self) -> None:
        pass

    def on_checkpoint_loaded(self, is_local: bool = False) -> None:
        pass

    def on_async_save(self) -> None:
        pass

    def on_replay(self) -> None:
        pass

    def on_shutdown(self) -> None:
        pass

    def training_step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def eval_step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def checkpointing(self, is_async_finalization: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def make_sections(enabled: bool, num_warmup_iters: int) -> Sections:
    """The hooks of this run."""
    if not enabled:
        return NoSections()
    from rsup.worker.sections import TrainingSections

    return TrainingSections(num_warmup_iters)


def write_ft_state(folder: Path, limits: Limits) -> None:
    """Keep the limits beside the checkpoints, in the layout of Megatron-LM's and NVRx's `ft_state.json`."""
    section: dict[str, Any] = {
        "section": limits.sections,
        "out_of_section": limits.out_of_section_s,
        "calculated_sections": [name for name in limits.calculated if name in limits.sections],
        "is_out_of_section_calculated": OUT_OF_SECTION in limits.calculated,
    }
    write_durably(folder / FT_STATE_FILE, json.dumps({"current_timeouts": {"section": section}}, indent=1) + "\n")


def read_ft_state(folder: Path) -> Limits | None:
    """The calculated limits kept beside the checkpoints, None where there are none. Raise `ValueError` for another file."""
    try:
        content = json.loads((folder / FT_STATE_FILE).read_text())
    except FileNotFoundError:
        return None
    try:
        state = content["current_timeouts"]["section"]
        calculated = [*state["calculated_sections"], *([OUT_OF_SECTION] if state["is_out_of_section_calculated"] else [])]
        sections = {str(name): float(state["section"][name]) for name in state["calculated_sections"]}
        out_of_section_s = state["out_of_section"]
        return Limits(
            sections=dict(sections),
            out_of_section_s=None if out_of_section_s is None else float(out_of_section_s),
            calculated=calculated,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}") from None
