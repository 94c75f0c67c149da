"""What two ranks of `test_graph_capture_ranks.py` agree on before a graph is captured; what becomes of those that differ."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.capture import Captured, SharedCapture
from rsup.worker.cuda_graph.contract import Batches, Fallback, GraphError, OnChange
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph

CPU = torch.device("cpu")
T = TypeVar("T")


class Refusing(SharedCapture):
    """Cannot record the step on rank 1."""

    def capture(self, function: Callable[[], T], what: str, generators: Sequence[torch.Generator] = ()) -> Captured[T]:
        torch.rand(3)  # what the host draws in a capture; no rank may keep it
        if dist.get_rank() == 1:
            raise GraphError(f"{what} cannot be captured here")
        return super().capture(function, what, generators)


def step(batches: Batches) -> Any:
    """The sum over the ranks: hangs, or sums what does not belong together, where one rank is alone."""
    total = torch.stack([batch.sum() for batch in batches[0]]).sum()
    dist.all_reduce(total)
    return total, torch.rand(1)


def batches_of(number: int, num_micros: int = 2) -> Batches:
    return [[torch.full((2,), float(number)) for _ in range(num_micros)]]


def graph(**options: Any) -> FullIterationGraph:
    return FullIterationGraph(step, CPU, **{"warmup_steps": 1, **options})


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except GraphError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def check_all_capture_at_once(rank: int) -> None:
    made = graph()
    for number in range(5):
        total, _ = made(batches_of(number)).value
        assert total.item() == 8 * number and made.captured is (number > 0)


def check_ranks_may_have_other_inputs_than_one_another(rank: int) -> None:
    """As the stages of a pipeline have: only what a rank's own inputs were counts."""
    for on_change in OnChange:
        made = graph(on_change=on_change)
        for number in range(4):
            total, _ = made(batches_of(number, num_micros=1 + rank)).value
            assert total.item() == 6 * number
        assert made.captured


def check_ranks_that_differ_are_named(rank: int) -> None:
    for on_change in (OnChange.RAISE, OnChange.RECAPTURE):
        made = graph(on_change=on_change, warmup_steps=3)
        made(batches_of(1))
        text = refusal(lambda made=made: made(batches_of(1), eager=rank == 1))  # type: ignore[misc]
        own = "to warm up" if on_change is OnChange.RAISE else "to follow its inputs"
        assert f"rank 0 {own} after 1 calls and 0 resets; rank 1 to run eagerly after 1 calls and 0 resets" in text, text
        if rank == 1:
            made.reset()
        text = refusal(lambda made=made: made(batches_of(1), counts=False))  # type: ignore[misc]
        assert f"rank 1 {own} after 1 calls and 1 resets, as a rerun: call and reset it alike" in text, text
        if rank == 0:
            made.reset()
        assert made(batches_of(1)).value[0].item() == 8
        assert made.num_calls == 2


def check_a_change_on_one_rank_is_a_change_for_all(rank: int) -> None:
    for on_change, numbers in ((OnChange.EAGER, [0, 1, 1, 1, 1, 1]), (OnChange.RECAPTURE, [0, 1, 1, 2, 2, 2])):
        made = graph(on_change=on_change)
        for call, num_graphs in enumerate(numbers):
            changed = rank == 1 and call in (2, 3)
            total, _ = made(batches_of(call, num_micros=3 if changed else 2)).value
            assert total.item() == (10 if call in (2, 3) else 8) * call
            assert made.num_graphs == num_graphs, (call, made.num_graphs)


def check_one_rank_that_cannot_capture_stops_all(rank: int) -> None:
    made = graph(fallback=Fallback.RAISE, capture=Refusing(CPU))
    made(batches_of(0))
    before = torch.get_rng_state()
    for _ in range(2):
        text = refusal(lambda: made(batches_of(1)))
        assert text == "rank 1: the training step cannot be captured here", text
        assert torch.equal(torch.get_rng_state(), before) and made.num_calls == 1


def check_one_rank_that_cannot_capture_lets_all_go_on_eagerly(rank: int) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(1).item() for _ in range(5)]
    torch.manual_seed(5)
    made = graph(fallback=Fallback.EAGER, capture=Refusing(CPU))
    for number in range(5):
        total, drawn = made(batches_of(number)).value
        assert total.item() == 8 * number and drawn.item() == expected[number]
        assert made.is_eager_for_good is (number > 0) and not made.captured
    assert made.why == "rank 1: the training step cannot be captured here"


def check_a_group_of_some_ranks(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    made = FullIterationGraph(
        lambda batches: batches[0][0].sum(), CPU, warmup_steps=1, group=alone, on_change=OnChange.RECAPTURE
    )
    for number in range(3 + rank):
        assert made(batches_of(number)).value.item() == 2 * number
    assert made.captured


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    for name, check in checks.items():
        check(dist.get_rank())
        print(f"holds: {name}", flush=True)
    dist.destroy_process_group()


main()
