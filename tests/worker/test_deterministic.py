"""The comm hook adds in rank order, whatever the bucket layout; and the digest sees every byte."""

import json
from pathlib import Path

import torch

from rsup.worker.deterministic import parameter_digest


def test_digest_sees_name_type_shape_and_every_value() -> None:
    def digest(make) -> str:
        module = torch.nn.Module()
        for name, value in make.items():
            module.register_parameter(name, torch.nn.Parameter(value))
        return parameter_digest(module)

    plain = torch.tensor([1.0, 2.0, 3.0, 4.0])
    variants = [
        {"a": plain},
        {"b": plain},
        {"a": plain.reshape(2, 2)},
        {"a": plain.double()},
        {"a": torch.tensor([1.0, 2.0, 3.0, 4.0000005])},
        {"a": plain, "b": torch.tensor([-0.0])},
        {"a": plain, "b": torch.tensor([0.0])},
    ]
    digests = [digest(make) for make in variants]
    assert len(set(digests)) == len(variants)
    assert digest({"b": torch.zeros(1), "a": plain}) == digests[-1]
    assert digest({"a": plain.bfloat16()}) not in digests


REDUCE = """
import json, os
import torch
import torch.distributed as dist
from rsup.worker.deterministic import rank_order_hook

class Bucket:
    def __init__(self, values):
        self.values = values.clone()
    def buffer(self):
        return self.values

dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(dist.get_rank())
mine = torch.randn(1001, generator=generator) * 10.0 ** torch.randint(-6, 6, (1001,), generator=generator)
whole = rank_order_hook(None, Bucket(mine)).wait()
parts = torch.cat([rank_order_hook(None, Bucket(part)).wait() for part in (mine[:300], mine[300:])])
print(json.dumps([mine.tolist(), whole.tolist(), parts.tolist()]))
dist.destroy_process_group()
"""


def test_the_sum_is_in_rank_order_and_the_layout_does_not_matter(runs, tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    run = runs.start(3, script=script)
    assert run.finish() == [0, 0, 0], run.text()
    outcomes = [json.loads(run.text(rank).splitlines()[-1]) for rank in range(3)]
    numbers = [torch.tensor(mine) for mine, _, _ in outcomes]
    expected = (((numbers[0] + numbers[1]) + numbers[2]) / 3).tolist()
    for _, whole, parts in outcomes:
        assert whole == expected and parts == expected
    assert expected != (((numbers[2] + numbers[1]) + numbers[0]) / 3).tolist()  # the order does matter
