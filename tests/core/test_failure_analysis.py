"""First movers, culprits, stacks."""

import pytest

from rsup.supervisor.failure import Hung, culprit, exit_text, first_mover, group_stacks, is_of_a_peer, is_of_a_watchdog
from rsup.supervisor.states import RankExit
from rsup.supervisor.wire import RankOverdue, RankStack

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415"
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 milliseconds"


@pytest.mark.parametrize(
    ("exits", "first"),
    [
        ({0: RankExit(1, 1, 0), 1: RankExit(2, 1, 0)}, 0),
        ({0: RankExit(1, 1, 0, error=CLOSED), 1: RankExit(2, 137, 0, signal=9)}, 1),
        ({0: RankExit(1, 137, 0, signal=9, error=CLOSED), 1: RankExit(2, 1, 0)}, 0),  # an older line, and somebody's SIGKILL
        ({0: RankExit(1, 143, 0, signal=15, by_us="stop"), 1: RankExit(2, 1, 0, error=CLOSED)}, 1),
        ({0: RankExit(1, 143, 0, signal=15, by_us="stop")}, None),
        ({0: RankExit(1, 0, 0), 1: RankExit(2, 3, 0)}, 1),
        ({0: RankExit(1, 134, 0, signal=6, error=WATCHDOG), 1: RankExit(2, 1, 0, error=CLOSED)}, 1),
        ({0: RankExit(1, 134, 0, signal=6, error=WATCHDOG), 1: RankExit(2, 1, 0, error="ValueError: x")}, 1),
    ],
)
def test_first_mover(exits: dict[int, RankExit], first: int | None) -> None:
    found = first_mover(exits.items())
    assert (found[0] if found else None) == first


def test_errors_that_only_tell_of_a_peer() -> None:
    assert is_of_a_peer(CLOSED) and is_of_a_peer("ConnectionResetError: [Errno 104] Connection reset by peer")
    assert is_of_a_peer("torch.distributed.DistNetworkError: failed to recv, got 0 bytes")
    assert (
        not is_of_a_peer("ValueError: loss is nan") and not is_of_a_peer("") and not is_of_a_peer("CUDA error: out of memory")
    )
    assert is_of_a_watchdog(WATCHDOG) and not is_of_a_watchdog(CLOSED)


SLEEPS = """Process 41: python -m train
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    sleep_for_ever (data.py:12)
    next_batch (data.py:40)
    train_step (train.py:7)
    all_reduce_loss (train.py:90)
    main (train.py:99)
    run (train.py:100)
    backward_hook (torch/distributed/run.py:1)
Thread 44 (idle): "gloo-0"
    wait (torch/distributed/c10d.py:1)
"""
BACKWARD = """Process 42: python -m train
Python v3.11.7 (/usr/bin/python3.11)

Thread 42 (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:800)
    backward (torch/autograd/__init__.py:300)
    train_step (train.py:8)
Thread 45 (idle): "rsup-beat"
    _run (session.py:1)
"""
FAULTHANDLER = """Thread 0x00007f01 (most recent call first):
  File "torch/distributed/c10d.py", line 3 in wait
Current thread 0x00007f02 (most recent call first):
  File "data.py", line 12 in next_batch
  File "train.py", line 7 in train_step
"""


def hung(
    rank: int, *, iteration: int = 7, state: str = "S", stack: str = "all_reduce", age_s: float = 3.0, silent: bool = False
) -> Hung:
    overdue = RankOverdue(0, 1, rank, "step", age_s, 3.0)
    return Hung(f"a{rank}", rank, "n", iteration, age_s, state, stack, overdue, silent)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([hung(0), hung(1, state="T")], 1),
        ([hung(0, iteration=6), hung(1, state="T")], 1),
        ([hung(0), hung(1, iteration=6)], 1),
        ([hung(0), hung(1, stack="time.sleep")], 1),
        ([hung(0, stack=SLEEPS), hung(1, stack=BACKWARD)], 0),
        ([hung(0, stack=BACKWARD), hung(1, stack=SLEEPS)], 1),
        ([hung(0), hung(1, stack=BACKWARD.replace('(idle): "Main', '(idle+gil): "Main'))], 1),
        ([hung(0, stack="time.sleep"), hung(1, silent=True)], 1),
        ([hung(0, stack=FAULTHANDLER), hung(1)], 0),
        ([hung(0), hung(1, age_s=9.0)], 1),
        ([hung(0), hung(1)], 0),
    ],
)
def test_culprit_of_a_hang(ranks: list[Hung], expected: int) -> None:
    found = culprit(ranks)
    assert found and found.rank == expected
    assert culprit(reversed(ranks)) == found


def test_equal_stacks_are_kept_once() -> None:
    groups = group_stacks([RankStack(rank, 1, "py-spy", "sleep" if rank == 2 else "all_reduce", "S") for rank in range(8)])
    assert [(group["ranks"], group["text"]) for group in groups] == [([2], "sleep"), ([0, 1, 3, 4, 5, 6, 7], "all_reduce")]


def test_stacks_have_a_bound() -> None:
    groups = group_stacks([RankStack(rank, 1, "py-spy", f"{rank}" * 60_000) for rank in range(9)])
    assert len(groups) == 9 and sum(len(str(group["text"])) for group in groups) < 400_000


def test_the_sentence_about_an_exit() -> None:
    text = exit_text(3, "n1", RankExit(1, 137, 0, signal=9, iteration=25, section="step"))
    assert text == "rank 3 on n1 was killed by SIGKILL at iteration 25 in section step"
