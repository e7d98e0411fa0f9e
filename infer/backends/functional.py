"""Programs in the functional form, called as those that write pages themselves.

A program reads pages and returns its new keys and values, and the call writes these to the pages. It knows no library:
what runs the program is a kernel that reads and fills PyTorch's memory.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, K kv heads, D hidden, E exit size, N tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Kernel(Protocol):
    """One program, loaded."""

    @property
    def width(self) -> int:  # of the first output: D, E or V
        ...

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Read `inputs` and fill `outputs`, all contiguous and of the program's dtypes and shapes, in its order."""
        ...


class PagedCall:
    """A trunk or a `layer` exit: (x, positions, slots, block_table, pages) → [B, T, D or E], pages written."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(
        self, x: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pages: Sequence[Tensor]
    ) -> Tensor:
        shape = tuple(positions.shape)
        states = pages[0].new_empty(*shape, self._kernel.width)
        new = [page.new_empty(*shape, *page.shape[2:]) for page in pages]
        given = [tensor.contiguous() for tensor in (x, positions, slots, block_table)]
        self._kernel.run([*given, *pages], [states, *new])
        for page, entries in zip(pages, new, strict=True):
            page.view(-1, *page.shape[2:]).index_put_((slots,), entries)
        return states


class FlatCall:
    """An exit or an unembedding over single tokens: [N, D or E] → [N, E or V]."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, states: Tensor) -> Tensor:
        result = states.new_empty(len(states), self._kernel.width)
        self._kernel.run([states.contiguous()], [result])
        return result
