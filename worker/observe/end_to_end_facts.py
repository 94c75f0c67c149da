"""What `end_to_end` is told of a run, what it asks for, and who hears of it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

STAGES = {
    "model_init": ("app_model_init_start_time", "app_model_init_finish_time"),
    "build_dataiters": ("app_build_dataiters_start_time", "app_build_dataiters_finish_time"),
    "build_optimizer": ("app_build_optimzer_start_time", "app_build_optimzer_finish_time"),  # one-logger's spelling
    "load_checkpoint": ("load_checkpoint_start_time", "load_checkpoint_finish_time"),
}
"""Stages before training, and one-logger's names of their begin and end."""


class Counters(NamedTuple):
    """What the training log has counted.

    `iteration`, `consumed_samples`: of the whole run. Since training started in this process: `train_s`, without evaluations
    and saves; `eval_s` and `eval_iterations`; `flops`, of all ranks, 0 where they are not known. `global_batch_size`: of the
    newest step, where it grows; None: that of the facts.
    """

    iteration: int
    consumed_samples: int
    train_s: float
    eval_s: float = 0.0
    eval_iterations: int = 0
    flops: float = 0.0
    global_batch_size: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """What does not change while a run goes on. Targets are of the whole run.

    `flops_before`: what earlier attempts have done, of all ranks; None where FLOPs are not known.
    """

    world_size: int
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    train_iterations_target: int
    train_samples_target: int | None = None
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    run_name: str = ""
    run_version: str = "0.0.0"
    evaluates: bool = True
    tests: bool = False
    saves: bool = True
    saves_async: bool = True
    flops_before: float | None = None

    @property
    def samples_target(self) -> int:
        """Samples of the whole run: as given, else from iterations and batch size."""
        given = self.train_samples_target
        return given if given is not None else self.train_iterations_target * self.global_batch_size


class Listener(Protocol):
    """Hears of each event at once. Moments are seconds since the epoch."""

    def stage_began(self, stage: str, at_s: float) -> None: ...

    def stage_finished(self, stage: str, at_s: float) -> None: ...

    def train_started(self, at_s: float, counters: Counters) -> None: ...

    def stepped(self, at_s: float) -> None: ...

    def evaluation_began(self, at_s: float) -> None: ...

    def evaluation_finished(self, at_s: float) -> None: ...

    def save_began(self, iteration: int, at_s: float) -> None: ...

    def save_returned(self, iteration: int, at_s: float) -> None: ...

    def save_durable(self, iteration: int, at_s: float) -> None: ...

    def save_failed(self, iteration: int, at_s: float) -> None: ...

    def train_finished(self, at_s: float) -> None: ...

    def app_finished(self, at_s: float) -> None: ...
