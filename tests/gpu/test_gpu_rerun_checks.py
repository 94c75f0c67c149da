"""Gradient norms and digests on a GPU: no host sync, and the same numbers as on the CPU."""

import pytest
import torch
from torch import nn

from rsup.worker.rerun.checksums import tensor_digests
from rsup.worker.rerun.gradient_checks import GradientChecks
from rsup.worker.rerun.gradient_norms import local_norms

pytestmark = [pytest.mark.gpu(1), pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    """P41: flags are gathered on the device and read once."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    scaler = torch.amp.GradScaler("cuda")
    for checks in (GradientChecks(), GradientChecks(scaler)):
        checks.attach(model)
        for _ in range(2):
            scaler.scale(model(torch.ones(8, 64, device="cuda")).sum()).backward()
            checks.take()
        try:
            torch.cuda.set_sync_debug_mode("error")
            scaler.scale(model(torch.ones(8, 64, device="cuda")).sum()).backward()
            taken = checks.take()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert taken[0][1].is_cuda and float(taken[0][1]) > 0


def test_digests_and_norms_are_those_of_the_cpu() -> None:
    tensors = [torch.randn(100_003), torch.randn(7, 9).bfloat16(), torch.full((5,), float("nan")), torch.tensor(3)]
    on_gpu = {str(place): tensor.cuda() for place, tensor in enumerate(tensors)}
    assert torch.equal(tensor_digests(on_gpu).cpu(), tensor_digests(dict(enumerate(tensors))))  # type: ignore[arg-type]
    huge = torch.full((4,), 3e38)
    assert local_norms([huge.cuda(), tensors[0].cuda()]).cpu() == pytest.approx(local_norms([huge, tensors[0]]))
