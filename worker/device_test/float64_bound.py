"""How far a product may be from the exact one: a check in float64 on the CPU that looks at every element for little work.

Freivalds' check: for a vector r of signs, C r must be A (B r). Both sides cost n squared, not n cubed. What rounding can
explain is bounded for each row by |A| (|B| |r|) times the unit roundoff of the inputs, of the accumulation (grows with the
inner size) and of the result. Sources: R. Freivalds, "Probabilistic machines can use less running time", IFIP 1977; N. Higham,
"Accuracy and Stability of Numerical Algorithms", section 3.5.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs: of what the hardware makes of the inputs, of its accumulation, and of the result's type."""

    inputs: float
    accumulation: float
    result: float


FP64 = Roundoff(0.0, 2.0**-53, 2.0**-53)
FP32 = Roundoff(0.0, 2.0**-23, 2.0**-24)
TF32 = Roundoff(2.0**-10, 2.0**-22, 2.0**-24)
"""The accumulation of tensor cores cuts off instead of rounding: twice and four times the usual roundoff is allowed for."""
BF16 = Roundoff(0.0, 2.0**-22, 2.0**-8)
FP16 = Roundoff(0.0, 2.0**-22, 2.0**-11)
FP8 = Roundoff(0.0, 2.0**-13, 2.0**-8)
"""Inputs are exact; accumulated in about 14 bits, result in bfloat16."""

NUM_VECTORS = 2


def deviation(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, roundoff: Roundoff, seed: int) -> float:
    """Largest deviation of `product` [m, n] from `left` [m, k] @ `right` [k, n] as a share of the bound; above 1 is wrong, and
    `inf` where the product has NaN or Inf. Any dtypes, any device; computed in float64 on the CPU."""
    exact_left, exact_right, found = (tensor.detach().cpu().double() for tensor in (left, right, product))
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    inner = exact_left.shape[1]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (found.shape[1], NUM_VECTORS), generator=generator).double() * 2 - 1
    expected = exact_left @ (exact_right @ signs)
    size = exact_left.abs() @ exact_right.abs().sum(dim=1, keepdim=True)
    factor = 2 * roundoff.inputs + roundoff.inputs**2 + (inner + 2) * roundoff.accumulation + roundoff.result
    slack = found.shape[1] * inner * 2.0**-53  # of this very check
    bound = (factor + slack) * size + torch.finfo(torch.float32).tiny
    return float(((found @ signs - expected).abs() / bound).max())


def same_as_float64(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> float:
    """Largest deviation from `exact` relative to its size, as a share of `tolerance`; `inf` for NaN and Inf."""
    values, expected = found.detach().cpu().double(), exact.detach().cpu().double()
    if not bool(torch.isfinite(values).all()):
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float((values - expected).abs().max() / scale / tolerance)
