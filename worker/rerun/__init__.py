"""Rerun: was it the GPU, the data, or a cosmic ray?

    from rsup.worker.rerun import RerunDataIterator, RerunStateMachine

The parts are imported when a name of them is first used: importing `rsup.worker` costs nothing of this.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsup.worker.rerun.case_replay import replay_case, replayed_checkpoint, replayed_program
    from rsup.worker.rerun.contract import RerunConfig, RerunError, RerunMode, RerunState
    from rsup.worker.rerun.data_iterator import RerunDataIterator
    from rsup.worker.rerun.replica_axis import ReplicaAxis
    from rsup.worker.rerun.state_machine import RerunStateMachine

_PLACES = {
    "ReplicaAxis": "replica_axis",
    "RerunConfig": "contract",
    "RerunDataIterator": "data_iterator",
    "RerunError": "contract",
    "RerunMode": "contract",
    "RerunState": "contract",
    "RerunStateMachine": "state_machine",
    "replay_case": "case_replay",
    "replayed_checkpoint": "case_replay",
    "replayed_program": "case_replay",
}

__all__ = [
    "ReplicaAxis",
    "RerunConfig",
    "RerunDataIterator",
    "RerunError",
    "RerunMode",
    "RerunState",
    "RerunStateMachine",
    "replay_case",
    "replayed_checkpoint",
    "replayed_program",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
