"""Whether our products with weights pay for a model on this processor: a trial against the library's own.

Where a processor multiplies tiles (AMX), the library's large products are several times as fast; elsewhere its products
of few tokens are slow, most so where matrices are small.
"""

# Shape legend: N outputs, K inputs

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from export.cpu_kernels.library import library, pointer
from export.cpu_kernels.linear import pack

FEW, MANY = 4, 128  # tokens of a call that decodes, and of a piece of a prompt
MAX_BYTES = 400e6  # of the matrices that are tried
ROUNDS = 5


class Trial(NamedTuple):
    """Seconds of our products and of the library's, each for FEW and MANY tokens."""

    ours: tuple[float, float]
    theirs: tuple[float, float]

    @property
    def pays(self) -> bool:
        """Whether a request of two pieces of a prompt and 128 calls that decode is faster with ours."""
        (few, many), (their_few, their_many) = self
        return 128 * few + 2 * many < 128 * their_few + 2 * their_many

    def __str__(self) -> str:
        few, many = (mine / theirs for mine, theirs in zip(*self))
        return f"{few:.2f} of the library's time for {FEW} tokens, {many:.2f} for {MANY}"


@torch.no_grad()
def try_products(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Trial:
    """Time both on matrices [N, K] of `shapes`, or the first of them, in turn; medians.

    Called as packages call them, not as operators, whose way through Python takes longer than a small product.
    """
    ends = accumulate(n * k * dtype.itemsize for n, k in shapes)
    shapes = [shape for shape, end in zip(shapes, ends) if end <= MAX_BYTES] or [min(shapes)]
    weights = [torch.full(shape, 0.01, dtype=dtype) for shape in shapes]
    ours, theirs = [pack(weight) for weight in weights], [_library_weight(weight) for weight in weights]
    few, many = (
        _in_turn([_ours(shapes, ours, tokens, dtype), _theirs(shapes, theirs, tokens, dtype)]) for tokens in (FEW, MANY)
    )
    return Trial((few[0], many[0]), (few[1], many[1]))


def _ours(
    shapes: Sequence[tuple[int, int]], weights: Sequence[Tensor], tokens: int, dtype: torch.dtype
) -> Callable[[], None]:
    multiply, is_float32 = library().hispec_linear, ctypes.c_bool(dtype == torch.float32)
    out, x = (torch.ones(tokens, max(sizes), dtype=dtype) for sizes in zip(*shapes))
    calls = [((ctypes.c_int64 * 3)(tokens, *shape), pointer(weight)) for shape, weight in zip(shapes, weights)]

    def run() -> None:
        for sizes, weight in calls:
            multiply(is_float32, sizes, pointer(x), weight, None, pointer(out))

    return run


def _theirs(
    shapes: Sequence[tuple[int, int]], weights: Sequence[Tensor], tokens: int, dtype: torch.dtype
) -> Callable[[], None]:
    xs = {k: torch.ones(tokens, k, dtype=dtype) for _, k in shapes}

    def run() -> None:
        for (_, k), weight in zip(shapes, weights):
            if _has_library(dtype):
                torch.ops.mkldnn._linear_pointwise(xs[k], weight, None, "none", [], "")
            else:
                torch.nn.functional.linear(xs[k], weight)

    return run


def _library_weight(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None) if _has_library(weight.dtype) else weight


def _has_library(dtype: torch.dtype) -> bool:
    """Whether Inductor gives such products to oneDNN on this processor."""
    supports_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return torch.backends.mkldnn.is_available() and (dtype != torch.bfloat16 or bool(supports_bf16()))


def _in_turn(calls: Sequence[Callable[[], None]]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS + 1):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            if number:  # the first warms up
                taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 2] for taken in times]
