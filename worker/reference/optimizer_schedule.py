"""Learning rate by consumed samples: warm-up, then decay, as Megatron-LM's options describe it. Pure."""

import math
from dataclasses import dataclass

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@dataclass(frozen=True)
class LearningRate:
    """A schedule. Sample counts are global, over all ranks; `decay_samples` includes the warm-up.

    `WSD` stays at `lr` and goes down linearly over the last `wsd_decay_samples`.
    """

    lr: float
    min_lr: float = 0.0
    warmup_init: float = 0.0
    warmup_samples: int = 0
    decay_samples: int = 0
    decay_style: str = "linear"
    wsd_decay_samples: int = 0

    def at(self, consumed_samples: int) -> float:
        """The learning rate of the step that follows after `consumed_samples`."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.warmup_init + (self.lr - self.warmup_init) * consumed_samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            decayed = self.lr * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(consumed_samples, 1))
            return max(self.min_lr, decayed)
        return self.min_lr + (self.lr - self.min_lr) * self._coefficient(consumed_samples)

    def _coefficient(self, consumed_samples: int) -> float:
        if self.decay_style == "WSD":
            start = self.decay_samples - self.wsd_decay_samples
            if consumed_samples <= start:
                return 1.0
            return 1.0 - (consumed_samples - start) / self.wsd_decay_samples
        length = self.decay_samples - self.warmup_samples
        ratio = (consumed_samples - self.warmup_samples) / length if length > 0 else 1.0
        return 0.5 * (math.cos(math.pi * ratio) + 1.0) if self.decay_style == "cosine" else 1.0 - ratio
