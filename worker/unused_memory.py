"""`--empty-unused-memory-level`, as Megatron-LM has it: cached GPU memory that nobody uses goes back to the driver in each
iteration.

Level 1: after the forward and backward passes (and each evaluation step). Level 2: after the optimizer's step as well. It
helps against fragmentation, and costs the time of asking for the memory again: 0, never, is the default.
"""

from typing import Any

import torch


def empty_unused_memory(level: int, at_level: int, device: torch.device) -> None:
    """Empty the cache of `device` if the run's `level` reaches `at_level`; nothing on a CPU."""
    if level >= at_level and device.type == "cuda":
        torch.cuda.empty_cache()


def make_room_for_save(module: Any, device: torch.device) -> None:
    """Before an asynchronous save: free buffers that only overlap communication, where the model has a
    `free_overlap_buffers`, and the cache, so that whoever writes the checkpoint finds memory on the device."""
    free = getattr(module, "free_overlap_buffers", None)
    if callable(free):
        free()
    if device.type == "cuda":
        torch.cuda.empty_cache()
