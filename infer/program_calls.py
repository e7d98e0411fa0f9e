"""Calls of programs, made up and timed in turn: the sizes, the tensors and the clock of `program_bench`.

It knows programs as callables, whatever backend runs them, and no engine.
"""

# Shape legend: B rows, T query positions, M blocks per row, D hidden, E exit size, N = B·T

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infer.border import takes_of
from infer.manifest import Limits, Manifest
from infer.runner import Program

NUM_WARM_UPS = 3
LEAST_ROUNDS = 3  # whatever the time limit: fewer have no quartiles
LEAST_SECONDS = 0.1  # calls of microseconds get more rounds than were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Which calls are timed, and for how long. Every program is called with each batch size × number of tokens."""

    batch_sizes: tuple[int, ...] = (1, 8)  # B
    tokens: tuple[int, ...] = (1, 4, 8)  # T, of every row
    context: int = 256  # cached positions below them
    rounds: int = 20  # least number in a cell
    seconds_per_cell: float = 10.0  # after which a cell ends all the same, with at least LEAST_ROUNDS

    def __post_init__(self) -> None:
        for name, values, least in (
            ("batch_sizes", self.batch_sizes, 1),
            ("tokens", self.tokens, 1),
            ("context", (self.context,), 0),
            ("rounds", (self.rounds,), LEAST_ROUNDS),
        ):
            if wrong := [value for value in values if value < least]:
                raise ValueError(f"{name}={wrong[0]} must be at least {least}")
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={','.join(map(str, values))} must differ from each other")
        if not 0 < self.seconds_per_cell < float("inf"):
            raise ValueError(f"seconds_per_cell={self.seconds_per_cell} must be above 0")

    def check_fits(self, limits: Limits) -> None:
        """ValueError when the artifact allows no such calls."""
        if max(self.batch_sizes) > limits.max_batch:
            raise ValueError(f"batch_sizes={max(self.batch_sizes)}: the artifact allows at most {limits.max_batch}")
        if max(self.tokens) > limits.max_query_len:
            raise ValueError(f"tokens={max(self.tokens)}: the artifact allows at most {limits.max_query_len} in a call")
        if self.context + max(self.tokens) > limits.max_model_len:
            raise ValueError(
                f"context={self.context} and tokens={max(self.tokens)} need {self.context + max(self.tokens)} "
                f"positions, the artifact allows at most {limits.max_model_len}: choose a lower context"
            )


@torch.inference_mode()
def time_in_turn(
    programs: Sequence[Program], arguments: Sequence[Any], grid: Grid, device: torch.device
) -> list[list[float]]:
    """For each program the seconds of its calls, one for every round in which all of them are called once."""
    times: list[list[float]] = [[] for _ in programs]
    for program in programs:
        for _ in range(NUM_WARM_UPS):
            program(*arguments)
    _synchronize(device)
    begin = now = time.perf_counter()
    while True:
        for program, seconds in zip(programs, times, strict=True):
            start = time.perf_counter()
            program(*arguments)
            _synchronize(device)
            now = time.perf_counter()
            seconds.append(now - start)
        rounds, elapsed = len(times[0]), now - begin
        if rounds >= grid.rounds and elapsed >= LEAST_SECONDS:
            return times
        if rounds >= LEAST_ROUNDS and elapsed >= grid.seconds_per_cell:
            return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":  # a call's work is over only then
        torch.cuda.synchronize()


class Arguments:
    """What programs are called with: drawn states, and pages of which each row has its own blocks.

    Pages are made once, since CUDA graphs hold their addresses. They are independent tensors, as the runtime's are.
    """

    def __init__(self, manifest: Manifest, dtype: torch.dtype, device: torch.device, grid: Grid) -> None:
        base, size, rows = manifest.base, manifest.block_size, max(grid.batch_sizes)
        self._takes = takes_of(manifest, dtype)
        self._vocab_size, self._block_size, self._context, self._device = base.vocab_size, size, grid.context, device
        num_blocks = -(-(grid.context + max(grid.tokens)) // size)
        # Rows' blocks interleave and descend, as a pool's do after a while
        self._tables = torch.arange(rows * num_blocks, 0, -1).view(num_blocks, rows).T.contiguous()  # [B, M]
        shape = (1 + rows * num_blocks, size, base.num_kv_heads, base.head_dim)
        generator = torch.Generator().manual_seed(0)
        self._pages = {
            name: [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2 * len(layers))]
            for name, layers in manifest.kv_layers().items()
        }

    def of(self, program: str, batch_size: int, tokens: int) -> tuple[Any, ...]:
        """(x, positions, slots, block_table, pages) over pages; (states [N, D or E],) for the others."""
        takes, pages, shape = self._takes[program], self._pages[program], (batch_size, tokens)
        generator = torch.Generator().manual_seed(0)
        if not pages:
            states = torch.randn(batch_size * tokens, takes.width or 0, generator=generator)
            return (states.to(self._device, takes.dtype),)
        if takes.width is None:
            x = torch.randint(self._vocab_size, shape, generator=generator)
        else:
            x = torch.randn(*shape, takes.width, generator=generator).to(takes.dtype)
        size, end = self._block_size, self._context + tokens
        positions = torch.arange(self._context, end).repeat(batch_size, 1)
        table = self._tables[:batch_size, : -(-end // size)].contiguous()
        slots = table.gather(1, positions // size) * size + positions % size
        return (*(tensor.to(self._device) for tensor in (x, positions, slots, table)), pages)
