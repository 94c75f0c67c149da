"""In-process restart: ranks leave their training function after a fault and enter it again, without leaving their processes.

    from rsup.worker.inprocess import restartable

    def train() -> None:
        torch.distributed.init_process_group("nccl")    # in here, as all that belongs to one entry
        ...

    restartable(train)()

It works under `rsup launch`, whose supervisor sees every fault, tells every rank at once, replaces dead ranks and falls back to
a restart of all processes where a restart inside of them does not help. Elsewhere the function is simply called.
"""

from rsup.worker.inprocess.entry import Entry, current_entry
from rsup.worker.inprocess.settings import InProcessSettings
from rsup.worker.inprocess.wrapping import restartable

__all__ = ["Entry", "InProcessSettings", "current_entry", "restartable"]
