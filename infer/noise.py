"""Gumbel noise that can be looked up instead of drawn: a pure function of (seed, choice, position, id).

Every tier asks for the noise of the ids that it happens to score and gets what every other tier would get for them, in
any order, any batch, any number of times: that is what makes drafting and judging agree (`sampler`). Nothing here knows
logits or tiers.

The bits come from SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
a counter-based generator: output n of a stream is mix64(state + GOLDEN * (n + 1)), so any n can be asked for directly.
Streams are nested: seed -> choice -> position -> id.
"""

import torch
from torch import Tensor

# Shape legend: N rows, K ids per row. All integers are int64 and wrap around, as the generator wants.

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, odd; the constants are written as signed 64 bit
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Noise [N, K] float64 for `ids` ([N, K], or [K] for all rows), given `seeds`, `choices` and `positions` [N]."""
    return gumbel_of(stream_keys(seeds, choices, positions).unsqueeze(-1), ids)


def stream_keys(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """The state [N] of the stream whose outputs are numbered by token id."""
    return _output(_output(_mix64(seeds), choices), positions)


def gumbel_of(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for `ids` in the streams `keys`; shapes broadcast. Finite: between -3.6 and 36.8."""
    # 52 bits and a half: 53 significant bits, so u is exact and lies in the open interval (0, 1).
    uniform = (_shift(_output(keys, ids), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _output(state: Tensor, n: Tensor) -> Tensor:
    return _mix64(state + _GOLDEN * (n + 1))


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, num_bits: int) -> Tensor:
    """Logical shift to the right: `>>` on int64 copies the sign bit, the mask takes it away."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)
