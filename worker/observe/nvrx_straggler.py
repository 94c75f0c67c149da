"""NVRx's straggler detector, where it loads: how fast each rank runs the same kernels, by CUPTI.

It needs a GPU, CUPTI and the extension module of nvidia-resiliency-ext; on any other machine there is none, and sections alone
are compared. Source: `nvidia_resiliency_ext.straggler` (to 0.5), `nvidia_resiliency_ext.attribution.straggler` (since).
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

PROFILE_EVERY = 10
"""Of so many passes through the section the kernels of one are profiled: CUPTI costs several per cent."""
_SECTION = "rsup"
_MODULES = ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler")


class KernelScores:
    """Profiles kernels of one section of this process. NVRx's detector is a singleton, and so is this. Training thread.

    `detector`: NVRx's class, initialized. `warn`: takes a line. Whatever fails in it is warned of, and ends it.
    """

    def __init__(self, detector: Any, warn: Callable[[str], None]) -> None:
        self._detector = detector
        self._warn = warn
        self._section: contextlib.AbstractContextManager[None] | None = None
        self.works = True

    def start(self) -> None:
        """The section begins."""
        if self.works:
            self._section = self._try(self._begun)

    def stop(self) -> None:
        """The section ends."""
        section, self._section = self._section, None
        if section is not None and self.works:
            self._try(lambda: section.__exit__(None, None, None))

    def scores(self) -> dict[int, tuple[float, float]]:
        """Relative and individual score of each rank since the last call, on rank 0; empty elsewhere. Waits for the device.
        Collective, on the default group."""
        return (self._try(self._reported) if self.works else None) or {}

    def close(self) -> None:
        """Profile no more."""
        self.stop()
        self._try(self._detector.shutdown)

    def _begun(self) -> contextlib.AbstractContextManager[None]:
        section: contextlib.AbstractContextManager[None] = self._detector.detection_section(_SECTION, profile_cuda=True)
        section.__enter__()
        return section

    def _reported(self) -> dict[int, tuple[float, float]]:
        report = self._detector.generate_report()
        if report is None:
            return {}
        individual = report.gpu_individual_perf_scores or {}
        relative = report.gpu_relative_perf_scores or {}
        return {rank: (float(score), float(individual.get(rank, 1.0))) for rank, score in relative.items()}

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # of a library of others, which only watches: training goes on without it
            if self.works:
                self._warn(f"NVRx's kernel scores end here: {type(error).__name__}: {error}")
            self.works = False
            return None


def load_kernel_scores(
    device: torch.device, node: str, warn: Callable[[str], None], profile_every: int = PROFILE_EVERY
) -> KernelScores | None:
    """NVRx's detector at work in this process, or None where it does not load: on a CPU without a word, else with a warning."""
    if device.type != "cuda":
        return None
    trouble = "nvidia-resiliency-ext is not installed"
    for name in _MODULES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                detector = importlib.import_module(name).Detector
            if detector.initialized:
                detector.shutdown()
            detector.initialize(gather_on_rank0=True, profiling_interval=profile_every, node_name=node)
            return KernelScores(detector, warn)
        except Exception as error:  # ImportError, and whatever its extension makes of a missing CUPTI
            if not isinstance(error, ModuleNotFoundError) or "nvidia_resiliency_ext" not in str(error):
                trouble = f"{type(error).__name__}: {error}"
    warn(f"kernels are not compared, sections are: NVRx's straggler detector does not load ({trouble})")
    return None
