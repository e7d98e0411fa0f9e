import math

import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.noise import gumbel

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**31)


def mix64(z: int) -> int:
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def reference(seed: int, choice: int, position: int, token_id: int) -> float:
    state = mix64(seed % 2**64)
    for n in (choice, position, token_id):
        state = mix64((state + 0x9E3779B97F4A7C15 * (n + 1)) % 2**64)
    return -math.log(-math.log(((state >> 12) + 0.5) / 2**52))


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def uniforms(*args: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-gumbel(*args)))


def test_the_mixer_is_that_of_splitmix64():
    # The first outputs of the published C program for seed 1234567, as every SplitMix64 test quotes them.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(INT64, COUNT, COUNT, st.lists(COUNT, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_noise_equals_the_reference_in_python_integers(seed, choice, position, ids):
    noise = gumbel(column(seed), column(choice), column(position), column(*ids))
    expected = [reference(seed, choice, position, i) for i in ids]
    torch.testing.assert_close(noise[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)


@given(st.lists(st.tuples(INT64, COUNT, COUNT), min_size=1, max_size=5), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_noise_does_not_depend_on_batch_nor_on_which_ids_are_asked(rows, num_ids):
    seeds, choices, positions = (column(*values) for values in zip(*rows, strict=True))
    ids = torch.arange(num_ids)
    together = gumbel(seeds, choices, positions, ids)
    assert torch.equal(together, gumbel(seeds, choices, positions, ids.expand(len(rows), -1)))
    for i, row in enumerate(rows):
        for j in range(num_ids):
            assert gumbel(*(column(v) for v in row), column(j)).item() == together[i, j]


def test_each_of_the_four_keys_changes_the_noise():
    base = (7, 0, 11)
    ids = torch.arange(100)
    noise = gumbel(*(column(v) for v in base), ids)
    for i in range(3):
        other = gumbel(*(column(v + (i == j)) for j, v in enumerate(base)), ids)
        assert not (noise == other).any()
    assert noise.unique().numel() == 100
    swapped = gumbel(column(7), column(11), column(0), ids)
    assert not (noise == swapped).any()


def test_noise_is_gumbel_along_ids_positions_and_seeds():
    many = torch.arange(20_000)
    zeros = torch.zeros_like(many)
    along_ids = gumbel(column(1), column(0), column(5), many).flatten()
    along_positions = gumbel(zeros, zeros, many, column(3)).flatten()
    along_seeds = gumbel(many, zeros, zeros, column(3)).flatten()
    for sample in (along_ids, along_positions, along_seeds):
        assert scipy.stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-3


def test_neighbouring_streams_are_uncorrelated():
    u = uniforms(column(0, 1, 0, 0), column(0, 0, 1, 0), column(0, 0, 0, 1), torch.arange(20_000))
    for i in range(4):
        for j in range(i):
            cells = torch.bincount((u[i] * 8).long() * 8 + (u[j] * 8).long(), minlength=64)
            assert scipy.stats.chisquare(cells.numpy()).pvalue > 1e-3


def test_noise_is_finite_even_for_the_extreme_bits(monkeypatch):
    for bits in (0, -1):  # all 64 bits clear, all set
        monkeypatch.setattr("infer.noise._mix64", lambda z, bits=bits: torch.full_like(z, bits))
        noise = gumbel(column(0), column(0), column(0), column(0)).item()
        assert -3.7 < noise < 36.8
