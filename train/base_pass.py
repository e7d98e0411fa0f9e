"""One pass of the base over a batch, which serves all exits; knows nothing of heads, losses or files."""

# Shape legend: B rows, T tokens, D hidden size, L layers of the base, K exits

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from train.family import DENSE_ATTENTION, Family, row_mask


class BasePass(NamedTuple):
    """What the base has computed of a batch."""

    positions: Tensor  # [B, T] int64
    attention: dict[str, Tensor]  # what the attention function is to know of packed rows
    below: list[Tensor]  # of each exit [B, T, D], before any norm
    last: Tensor  # [B, T, D], the target's, before any norm
    depths: dict[int, Tensor]  # depth → [B, T, D] before any norm, what was asked for


class Asked(NamedTuple):
    """What LayerSkip wants of a pass."""

    depths: Sequence[int]  # whose states to give
    dropped: Tensor  # [L, B] bool, which rows skip which layers


NOTHING = Asked((), torch.zeros(0, 0, dtype=torch.bool))


def run_base(
    family: Family, exit_layers: Sequence[int], token_ids: Tensor, positions: Tensor | None, asked: Asked = NOTHING
) -> BasePass:
    """token_ids [B, T] int64, padded on the right; positions [B, T] int64 of packed rows, or None."""
    positions, attention = prepare(family, token_ids, positions)
    layers = sorted({*exit_layers, *asked.depths, family.num_layers})
    states = hidden_after(family, layers, token_ids, positions, attention, asked.dropped)
    hidden = dict(zip(layers, states, strict=True))
    below, depths = [hidden[layer] for layer in exit_layers], {depth: hidden[depth] for depth in asked.depths}
    return BasePass(positions, attention, below, hidden[family.num_layers], depths)


def pass_again(family: Family, hidden: Tensor, token_ids: Tensor, positions: Tensor | None) -> BasePass:
    """What `run_base` would give, from what it gave before, hidden [K + 1, B, T, D]: of each exit, and the last."""
    positions, attention = prepare(family, token_ids, positions)
    *below, last = hidden.unbind()
    return BasePass(positions, attention, below, last, {})


def prepare(family: Family, token_ids: Tensor, positions: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """→ positions [B, T], and what the attention function is to know of packed rows.

    Raises:
        ValueError: a row is longer than the base's sliding window.
    """
    family.use_attention(DENSE_ATTENTION)
    longest = token_ids.shape[1] if positions is None or family.sliding_window is None else int(positions.max()) + 1
    if family.sliding_window is not None and longest > family.sliding_window:
        raise ValueError(
            f"a sequence of {longest} tokens is longer than the base's sliding window of "
            f"{family.sliding_window}; set data.max_length to that or less"
        )
    if positions is not None:
        return positions, {"visible": row_mask(positions)}
    return torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids), {}


def hidden_after(
    family: Family,
    layers: Iterable[int],
    token_ids: Tensor,
    positions: Tensor,
    attention: Mapping[str, Tensor],
    dropped: Tensor = NOTHING.dropped,
) -> Iterator[Tensor]:
    """The hidden states [B, T, D] before any norm, after each number of `layers`, ascending.

    dropped: [L, B] bool, rows that skip a layer; empty: none.
    """
    hidden, depth = family.embed(token_ids, positions), 0
    for layer in layers:
        if len(dropped):
            for n in range(depth, layer):
                after = family.run_layers(hidden, positions, n, n + 1, **attention)
                # Not left out of the computation: under DDP every parameter must get a gradient, if only zeros
                hidden = torch.where(dropped[n].to(hidden.device).view(-1, 1, 1), hidden, after)
        else:
            hidden = family.run_layers(hidden, positions, depth, layer, **attention)
        depth = layer
        yield hidden
