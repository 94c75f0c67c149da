"""What is computed: products in several types and shapes, attention, reductions and a memory pattern, all from fixed seeds.

Each computation gives a tensor whose bits must be the same at every repetition, and on every like device. Kernels with atomic
additions are left out, their order is no fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from rsup.worker.device_test import float64_bound as bound
from rsup.worker.device_test.float64_bound import Roundoff

SEED = 20_240_229
LARGE_BYTES = 24 << 30
"""A device with so much free memory gets the large shapes."""
SHAPES = {
    "small": ((192, 256, 160), (96, 768, 130)),
    "medium": ((2048, 2048, 2048), (1000, 3000, 776)),
    "large": ((4096, 4096, 4096), (8192, 1024, 8192), (1000, 3000, 776)),
}
"""Rows, inner size, columns. Odd ones use other kernels."""
PATTERN_BYTES = {"small": 8 << 20, "medium": 1 << 30, "large": 8 << 30}
ATTENTION = {"small": (1, 2, 64, 32), "medium": (2, 8, 512, 64), "large": (4, 16, 2048, 64)}
"""Batch, heads, length, head size."""
CHUNK_WORDS = 1 << 24


@dataclass(frozen=True)
class Computation:
    """`run` gives the result on the device. `deviation`: of that result from float64, above 1 is wrong; None: not checked.
    `work`: floating point operations or bytes of one run, in `unit` a second over 1e12 or 1e9."""

    name: str
    run: Callable[[], torch.Tensor]
    deviation: Callable[[torch.Tensor], float] | None = None
    checked_by: str = "float64"
    work: float = 0.0
    unit: str = "TFLOP/s"


@dataclass(frozen=True)
class Missing:
    """A computation that this device or this torch cannot do."""

    name: str
    reason: str


def size_of(device: torch.device) -> str:
    """Which shapes a device gets."""
    if device.type != "cuda":
        return "small"
    free, _ = torch.cuda.mem_get_info(device)
    return "large" if free >= LARGE_BYTES else "medium" if free >= 4 << 30 else "small"


def computations(device: torch.device, size: str) -> list[Computation | Missing]:
    """All of them for that device. Inputs are made now and stay in its memory."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    found: list[Computation | Missing] = []
    for shape in SHAPES[size]:
        found += _products(device, shape)
    return [*found, *_fp8(device, SHAPES[size][0]), _attention(device, size), _reduction(device, size), _pattern(device, size)]


def _numbers(device: torch.device, dtype: torch.dtype, *shape: int, salt: int) -> torch.Tensor:
    """Made on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(SEED + salt)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def _products(device: torch.device, shape: tuple[int, int, int]) -> list[Computation | Missing]:
    rows, inner, columns = shape
    kinds: list[tuple[str, torch.dtype, Roundoff, bool]] = [("fp32", torch.float32, bound.FP32, False)]
    if device.type == "cuda":
        kinds.append(("tf32", torch.float32, bound.TF32, True))
    else:
        kinds.append(("fp64", torch.float64, bound.FP64, False))
    kinds += [("bf16", torch.bfloat16, bound.BF16, False), ("fp16", torch.float16, bound.FP16, False)]
    found: list[Computation | Missing] = []
    for kind, dtype, roundoff, tf32 in kinds:
        name = f"{kind} {rows}x{inner}x{columns}"
        if kind == "tf32" and torch.cuda.get_device_capability(device)[0] < 8:
            found.append(Missing(name, "this GPU has no TF32"))
            continue
        left, right = (
            _numbers(device, dtype, rows, inner, salt=1),
            _numbers(device, dtype, inner, columns, salt=2),
        )
        found.append(_product(name, left, right, roundoff, tf32))
    return found


def _product(name: str, left: torch.Tensor, right: torch.Tensor, roundoff: Roundoff, tf32: bool) -> Computation:
    def run() -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return left @ right

    (rows, inner), columns = left.shape, right.shape[1]
    return Computation(
        name, run, lambda found: bound.deviation(left, right, found, roundoff, SEED), work=2.0 * rows * inner * columns
    )


def _fp8(device: torch.device, shape: tuple[int, int, int]) -> list[Computation | Missing]:
    rows, inner, columns = shape
    name = f"fp8 {rows}x{inner}x{columns}"
    if device.type != "cuda":
        return []
    if torch.cuda.get_device_capability(device) < (8, 9) or not hasattr(torch, "_scaled_mm"):
        return [Missing(name, "this GPU has no FP8")]
    left = _numbers(device, torch.float32, rows, inner, salt=3).to(torch.float8_e4m3fn)
    right = _numbers(device, torch.float32, columns, inner, salt=4).to(torch.float8_e4m3fn).t()  # column-major, as it must be
    one = torch.ones((), device=device)

    def run() -> torch.Tensor:
        return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=False)  # pyright: ignore[reportPrivateImportUsage]

    check = lambda found: bound.deviation(left.float(), right.float(), found, bound.FP8, SEED)  # noqa: E731
    return [Computation(name, run, check, work=2.0 * rows * inner * columns)]


def _attention(device: torch.device, size: str) -> Computation:
    batch, heads, length, width = ATTENTION[size]
    query, key, value = (_numbers(device, torch.bfloat16, batch, heads, length, width, salt=10 + i) for i in range(3))

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def deviation(found: torch.Tensor) -> float:
        parts = [tensor[:1, :1].cpu().double() for tensor in (query, key, value)]
        exact = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return bound.same_as_float64(found[:1, :1], exact, 0.05)

    return Computation("attention bf16", run, deviation, work=2.0 * batch * heads * length * length * width)


def _reduction(device: torch.device, size: str) -> Computation:
    rows = {"small": 64, "medium": 2048, "large": 8192}[size]
    numbers = _numbers(device, torch.float32, rows, 4096, salt=20)

    def run() -> torch.Tensor:
        normed = functional.layer_norm(numbers, (numbers.shape[1],))
        return torch.cat(
            [torch.softmax(normed, dim=1).amax(dim=1), (normed * normed.sin()).sum(dim=1), normed.exp().sum(dim=0)]
        )

    def deviation(found: torch.Tensor) -> float:
        normed = functional.layer_norm(numbers.cpu().double(), (numbers.shape[1],))
        parts = [torch.softmax(normed, dim=1).amax(dim=1), (normed * normed.sin()).sum(dim=1), normed.exp().sum(dim=0)]
        sizes, errors = [len(part) for part in parts], []
        for part, exact in zip(torch.split(found, sizes), parts, strict=True):
            errors.append(bound.same_as_float64(part, exact, 1e-3))
        return max(errors)

    return Computation("reductions fp32", run, deviation, work=4.0 * numbers.numel() * 4, unit="GB/s")


def _pattern(device: torch.device, size: str) -> Computation:
    """Writes numbers that tell their own place over much memory, and their complement, and counts what reads back otherwise."""
    words = PATTERN_BYTES[size] // 8
    if device.type == "cuda":
        words = min(words, torch.cuda.mem_get_info(device)[0] // 2 // 8)

    def run() -> torch.Tensor:
        memory = torch.empty(words, dtype=torch.int64, device=device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for mask in (0x5555_5555_5555_5555, -1, 0):
            for start in range(0, words, CHUNK_WORDS):
                part = memory[start : start + CHUNK_WORDS]
                torch.arange(start, start + len(part), out=part)
                part.bitwise_xor_(mask)
            for start in range(0, words, CHUNK_WORDS):
                part = memory[start : start + CHUNK_WORDS]
                expected = torch.arange(start, start + len(part), dtype=torch.int64, device=device).bitwise_xor_(mask)
                wrong += (part != expected).sum()
        return wrong.reshape(1)

    return Computation(
        "memory pattern",
        run,
        lambda found: 0.0 if int(found) == 0 else float("inf"),
        checked_by="what was written",
        work=6.0 * 8 * words,
        unit="GB/s",
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on its device: equal bits are equal, NaN or not."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes, computed on the host."""
    return hashlib.sha256(bits(tensor).cpu().numpy().tobytes()).hexdigest()


def names(listed: Sequence[Computation | Missing]) -> list[str]:
    """Their names."""
    return [one.name for one in listed]
