"""Rows put together: batches of similar length, or several rows packed into one sequence; knows nothing of files.

A packed row is trained as if it stood alone: its positions begin at 0, its tokens attend to none of another row
(`train.family.row_mask`), and its first token is no label, since nothing of its own predicts it.
"""

# Shape legend: B rows or packed sequences, T tokens of the longest, D hidden size, K exits

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from train.chat import Encoded

Item = TypeVar("Item")

# `widen` makes batches as long as a multiple of this: on CPU every new length costs 16 MB for oneDNN's kernels, kept to
# the end, and the time to make them
WIDTH = 32


class Kept(NamedTuple):
    """What the base has computed of a batch before, and `train.features` has kept."""

    hidden: Tensor  # [K + 1, B, T, D] the K exits' inputs and the last, before any norm
    log_partition: Tensor  # [B, T] float32, logsumexp of the target's logits


class Batch(NamedTuple):
    """Rows padded on the right; padding is known by its place, never by its id."""

    token_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True: this token is a label (predicted at the position before it)
    positions: Tensor | None = None  # [B, T] int64, 0 where a packed row begins; None: every row begins at column 0
    kept: Kept | None = None


def collate(rows: Sequence[Encoded]) -> Batch:
    batch = collate_packed([[row] for row in rows])
    return batch._replace(positions=None)


def collate_packed(sequences: Sequence[Sequence[Encoded]]) -> Batch:
    """Each sequence's rows one after another; padding has position 0, so it belongs to no row."""
    longest = max(num_tokens(sequence) for sequence in sequences)
    token_ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    loss_mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    positions = torch.zeros(len(sequences), longest, dtype=torch.int64)
    for n, sequence in enumerate(sequences):
        start = 0
        for row in sequence:
            stop = start + len(row.token_ids)
            token_ids[n, start:stop] = torch.tensor(row.token_ids)
            loss_mask[n, start + 1 : stop] = torch.tensor(row.loss_mask[1:])
            positions[n, start:stop] = torch.arange(stop - start)
            start = stop
    return Batch(token_ids, loss_mask, positions)


def widen(batch: Batch, limit: int) -> Batch:
    """More padding, up to a multiple of WIDTH columns but not beyond `limit`."""
    width = batch.token_ids.shape[1]
    more = min(-width % WIDTH, max(0, limit - width))
    positions = None if batch.positions is None else F.pad(batch.positions, (0, more))
    return Batch(F.pad(batch.token_ids, (0, more)), F.pad(batch.loss_mask, (0, more)), positions)


def num_tokens(sequence: Sequence[Encoded]) -> int:
    return sum(len(row.token_ids) for row in sequence)


def pack(rows: Sequence[Encoded], max_length: int, seed: int) -> list[list[Encoded]]:
    """Every row once and whole, in sequences of at most `max_length` tokens: best fit, the longest rows first."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda row: -len(row.token_ids))  # stable: equal lengths stay shuffled
    sequences: list[list[Encoded]] = []
    free: list[tuple[int, int]] = []  # (tokens left, sequence), ascending
    for row in order:
        length = len(row.token_ids)
        assert length <= max_length, (length, max_length)
        fit = bisect_left(free, (length, -1))
        if fit < len(free):
            left, index = free.pop(fit)
        else:
            left, index = max_length, len(sequences)
            sequences.append([])
        sequences[index].append(row)
        insort(free, (left - length, index))
    return sequences


def bucket(
    items: Sequence[Item],
    batch_size: int,
    seed: int,
    *,
    length: Callable[[Item], int] | None = None,
    multiple_of: int = 1,
) -> list[list[Item]]:
    """Every item once, in batches in random order.

    Args:
        length: with it a batch holds items of similar length, so that little is padding.
        multiple_of: number of ranks. Batches are halved until each rank gets as many as the others; else the sampler
            gives some twice. Batches of one item can't be halved, so with batch_size=1, or with fewer items than ranks,
            that happens, and is told.
    """
    order = list(items)
    random.Random(seed).shuffle(order)
    if length is not None:
        order.sort(key=length)  # stable: equal lengths stay shuffled
    batches = [order[n : n + batch_size] for n in range(0, len(order), batch_size)]
    while len(batches) % multiple_of:
        largest = max(batches, key=len)
        if len(largest) == 1:
            rank_zero_warn(
                f"{len(batches)} batches of one don't divide among {multiple_of} ranks: {-len(batches) % multiple_of} "
                "come twice in every epoch. Choose data.batch_size of 2 or more, or a number of rows that divides"
            )
            break
        half = len(largest) // 2
        batches.append(largest[half:])
        del largest[half:]
    random.Random(seed + 1).shuffle(batches)
    return batches
