"""The trainer's non-persistent checkpoints: where they are, and what is said about them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rsup.worker
from rsup.worker.faults import FaultPlan
from rsup.worker.local_checkpoint import LocalCheckpointer, LocalResult
from rsup.worker.local_checkpoint_directory import LocalDirectory, memory_root, this_launcher
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks


class LocalSaves:
    """Local saves of one rank, as the options ask for them. Made on every rank; `Saves` calls it. Raises `UsageError`."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        job: tuple[str, int],
        faults: FaultPlan,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._say = say
        self._warn = warn
        self.newest_iteration = -1
        """Of the newest local checkpoint that is whole; -1 before there is one."""
        in_memory = options.non_persistent_ckpt_type == "in_memory"
        root = memory_root() if in_memory else Path(options.non_persistent_local_ckpt_dir or "").absolute()
        directory = LocalDirectory(root, job[0], in_memory)
        group = dist.new_group(backend="gloo", timeout=timedelta(minutes=options.distributed_timeout_minutes))
        assert isinstance(group, dist.ProcessGroup)
        self.checkpointer = LocalCheckpointer(
            directory,
            this_launcher(rsup.worker.agent_pid()),
            job[1],
            group,
            ranks.control,
            options.replicas,
            options.non_persistent_local_ckpt_algo == "fully_parallel",
            warn,
            _report,
            faults.while_saving,
        )

    def save(
        self, iteration: int, own: dict[str, torch.Tensor], shared: dict[str, torch.Tensor], record: dict[str, Any]
    ) -> None:
        """Begin a local save, unless the one before is still on its way somewhere. Collective."""
        self.report(self.checkpointer.poll())
        if self.checkpointer.save(iteration, own, shared, record) is None:
            self._warn(f"no local checkpoint of iteration {iteration}: the one before is still being written")

    def report(self, result: LocalResult | None) -> None:
        """Say how a save ended. The job's story has it from the writing thread."""
        if result is None:
            return
        if result.error:
            self._warn(f"no local checkpoint of iteration {result.iteration}: {result.error}")
            return
        self.newest_iteration = result.iteration
        self._say(
            f"local checkpoint of iteration {result.iteration} is whole: {result.path} ({result.duration_s:.2f} s, "
            f"training stood still for {result.stall_s * 1e3:.1f} ms)"
        )
        if result.lost_copies:
            self._warn(f"copies of the local checkpoint of iteration {result.iteration} are missing: {result.lost_copies}")

    def poll(self) -> None:
        """Take the result of a save that is over."""
        self.report(self.checkpointer.poll())

    def finish(self) -> None:
        """Wait for the save that is on its way."""
        self.report(self.checkpointer.finish())


def _report(result: LocalResult) -> None:
    stage = "failed" if result.error else "local"
    text = f"local checkpoint: {result.error}" if result.error else result.lost_copies
    rsup.worker.report_save(result.iteration, stage, str(result.path), result.stall_s, text)
