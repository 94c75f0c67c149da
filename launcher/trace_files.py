"""Where PyTorch's flight recorder dumps what the ranks' collectives were doing: a name for each attempt, beside the logs.

torch writes one file a rank, always under the same name (`~/.cache/torch/comm_lib_trace_rank_N`, older releases
`/tmp/nccl_trace_rank_N`), so that a restart overwrites what the hang before it left, and so does the next job. Whoever names
the file himself gets exactly that name. Pure but for `traces_in`.
"""

from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variable of torch 2.9 and newer, and the older one, which newer releases still read."""
STEM = "nccl_trace_rank_"
"""torch appends the rank."""


def trace_environment(attempt_dir: Path | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables for a rank whose attempt logs to that directory; none if the user has set one, or there is none."""
    if attempt_dir is None or any(inherited.get(name) for name in VARIABLES):
        return {}
    return dict.fromkeys(VARIABLES, str(attempt_dir / STEM))


def traces_in(attempt_dir: Path) -> list[Path]:
    """What the ranks of one attempt have dumped."""
    return sorted(attempt_dir.glob(f"{STEM}*"))
