"""What the replay of a kept step is asked, in the environment, and what it answers, in a file. Plain data, without torch.

`rsup devices test --replay` starts a process for each device and step; `replay_case` in it reads the order and writes the
answer. Numbers are `repr` of floats: NaN and Inf are usual here, and JSON has none.
"""

from msgspec import Struct

VARIABLE = "RSUP_REPLAY"
"""Its value is a `ReplayOrder` as JSON."""
GRADIENTS = "all gradients, bit by bit"
"""Name under which `StepPass.digest` is compared."""


class ReplayOrder(Struct, kw_only=True):
    """Compute the step of the file `step` so often, on the device whose identity is given, and write to `answer`."""

    step: str
    answer: str
    times: int = 3
    kind: str = "cpu"
    """`cpu` or `cuda`."""
    uuid: str
    node: str = ""
    model: str = ""
    vbios: str = ""
    driver: str = ""
    fault: str = ""
    """A numeric fault to put in (`numeric_faults`), for programs that can; empty: none."""


class StepPass(Struct, kw_only=True):
    """One forward and backward pass of the step."""

    values: dict[str, str]
    """By check."""
    rejected: dict[str, str] = {}
    """Of fatal checks: what was wrong."""
    digest: str = ""
    """SHA-256 of all gradients' bytes; empty where the program does not compute the same bits every time."""


class Reference(Struct, kw_only=True):
    """What a device computed that the verdict cleared."""

    uuid: str
    likeness: str
    values: dict[str, str]


class ReplayAnswer(Struct, kw_only=True):
    """What a replay found. With a `problem` nothing was computed, and the rest says nothing."""

    problem: str = ""
    case_id: str = ""
    iteration: int = 0
    rank: int = 0
    verdict: str = ""
    """The case's when the step was kept; empty: it was still open."""
    recorded_on: str = ""
    """UUID of the device on which the checks had failed."""
    flagged: dict[str, str] = {}
    """The values that had been rejected, by check."""
    tolerances: dict[str, float] = {}
    reference: Reference | None = None
    likeness: str = ""
    """Of the device that computed now: results of devices with equal ones can be compared."""
    passes: list[StepPass] = []
    seconds: float = 0.0
    injected: bool = False
    """A fault was put in on purpose, now."""
