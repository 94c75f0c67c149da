"""Errors that never happened, to try the way from a rejection to a verdict: it fakes outcomes, not values.

    transient_error     the replay in place differs
    persistent_error    the replay in place is the same, a replay elsewhere differs
    correct_result      both are the same

Whether a check is hit follows from (seed, iteration, check, rank) alone: nothing is drawn from a generator of the training.
To corrupt real numbers, use `--fault`.
"""

import hashlib
from typing import Any

from rsup.worker.rerun.contract import INJECTION_TYPES, RerunError


class ErrorInjector:
    """The injector of one rank. `rate`: about one check in so many is hit; 0: none."""

    def __init__(self, rate: int = 0, type: str = "transient_error", seed: int = 0, rank: int = 0) -> None:
        if rate < 0:
            raise RerunError(f"--error-injection-rate {rate} is negative: use 0 for none, or N for about one check in N")
        if type not in INJECTION_TYPES:
            raise RerunError(f"unknown --error-injection-type {type!r}: use one of {', '.join(INJECTION_TYPES)}")
        self.rate = rate
        self.type = type
        self._seed = seed
        self._rank = rank
        self._hit: dict[str, str] = {}

    @property
    def is_armed(self) -> bool:
        """Whether it may hit, or has: evidence of such a run is marked as injected."""
        return self.rate > 0 or bool(self._hit)

    def fires(self, iteration: int, check: str) -> bool:
        """Whether `check` (a name that is unique in its pass) is to be rejected in the initial pass of `iteration`.

        Ask only for a check that its value passed, so that a real rejection is never compared by a fake.
        """
        if self.rate <= 0:
            return False
        key = f"{self._seed}:{iteration}:{self._rank}:{check}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        if draw % self.rate:
            return False
        self._hit[check] = self.type
        return True

    def is_injected(self, check: str) -> bool:
        """Whether the rejection of `check` in this iteration was made here."""
        return check in self._hit

    def outcome(self, check: str, elsewhere: bool) -> bool | None:
        """The fake answer to "is the replay's value of `check` the same?"; None: compare the values.

        `elsewhere`: the replay ran on another device (rotated, or from a checkpoint).
        """
        kind = self._hit.get(check)
        if kind is None:
            return None
        if kind == "transient_error":
            return False
        return not elsewhere if kind == "persistent_error" else True

    def clear(self) -> None:
        """The iteration has ended: forget what was hit in it."""
        self._hit.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was hit in the iteration, for a checkpoint from which it is replayed; plain strings."""
        return {"hit": dict(self._hit)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the fakes of the iteration that the checkpoint replays; rate and type stay those of this run."""
        hit = {str(check): str(kind) for check, kind in state.get("hit", {}).items()}
        self._hit = {check: kind for check, kind in hit.items() if kind in INJECTION_TYPES}
