"""What is measured of a program: the calls in which every token has the same bits."""

import pytest
import torch

from export import bitwise

WIDTH, PAGE_SHAPE = 3, (16, 1, 2)


def noisy(n: int, groups: list[int]) -> float:
    """What a library adds that switches kernels at these numbers of tokens."""
    return 1e-3 * sum(n >= start for start in groups)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [([], (1, 64)), ([33], (1, 32)), ([2], (2, 64)), ([2, 16], (2, 15)), ([2, 3], None), ([3, 2, 4], None)],
)
def test_range_is_where_no_kernel_changes(groups, expected):
    def flat(x):
        return x + noisy(len(x), groups)

    def paged(x, positions, slots, block_table, kv):
        return x + noisy(x.shape[0] * x.shape[1], groups)

    tokens = torch.randn(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    assert bitwise.flat_range(flat, tokens[0]) == expected
    assert bitwise.paged_range(paged, tokens, PAGE_SHAPE, 1, torch.float32) == expected


def test_two_tokens_that_happen_to_match_are_no_range_where_a_token_of_padding_gives_one():
    """Seen on an AMD EPYC: a kernel of its own for one token, whose sums of another order often have the same bits."""

    def told_apart(x):
        return x + 1e-3 * (x[..., :1] > 0) if x[..., 0].numel() == 1 else x

    tokens = torch.ones(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    tokens[:2, 0] = tokens[0, :2] = -1
    assert bitwise.flat_range(told_apart, tokens[0]) == (2, 64)
    assert bitwise.paged_range(lambda x, *_: told_apart(x), tokens, PAGE_SHAPE, 1, torch.float32) == (2, 64)


def test_a_program_that_depends_on_the_width_of_the_block_table_has_no_range():
    def program(x, positions, slots, block_table, kv):
        return x + 1e-3 * block_table.shape[1]

    tokens = torch.randn(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    assert bitwise.paged_range(program, tokens, PAGE_SHAPE, 1, torch.float32) is None


def test_padding_of_a_single_token_is_marked_as_padding():
    seen = []

    def program(x, positions, slots, block_table, kv):
        if x.shape[0] * x.shape[1] == 2 and (positions == -1).any():
            seen.append((positions.tolist(), slots.tolist()))
        return x + noisy(x.shape[0] * x.shape[1], [2])

    tokens = torch.randn(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    bitwise.paged_range(program, tokens, PAGE_SHAPE, 1, torch.float32)
    assert seen and all(p[0][1] == -1 and s[0][1] == 0 for p, s in seen)


def last_piece(block_table):
    """Slots of the table behind the last whole 512."""
    return (block_table.shape[1] * PAGE_SHAPE[0] - 1) % 512 + 1


@pytest.mark.parametrize(
    ("is_halved", "expected"),
    [
        (lambda last: False, []),
        (lambda last: 192 < last < 384, [(192, 384)]),
        (lambda last: last < 512, [(0, 512)]),
    ],
)
def test_gaps_are_the_widths_whose_sums_come_in_another_order(is_halved, expected):
    """Seen on an AMD EPYC: MKL takes up to 192 terms in one go, and more, below 384, in halves."""

    def program(x, positions, slots, block_table, kv):
        return x + 1e-3 * is_halved(last_piece(block_table)) * block_table.shape[1]

    tokens = torch.randn(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    assert bitwise.slot_gaps(program, tokens, PAGE_SHAPE, 1, torch.float32, 2048) == expected
    assert bitwise.slot_gaps(program, tokens, PAGE_SHAPE, 1, torch.float32, 16) == []  # no text gets so long


def test_where_every_width_has_bits_of_its_own_no_gaps_help():
    def program(x, positions, slots, block_table, kv):
        return x + 1e-3 * block_table.shape[1]

    tokens = torch.randn(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, WIDTH)
    assert bitwise.slot_gaps(program, tokens, PAGE_SHAPE, 1, torch.float32, 2048) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_here_has_the_same_bits_in_longer_tables(dtype):
    """The library's own, with heads enough that a sum of another order shows."""
    heads, head_dim, rows = 48, 64, 4

    def program(x, positions, slots, block_table, kv):
        keys, values = (page[block_table].flatten(1, 2).transpose(1, 2) for page in kv)
        draw = torch.Generator().manual_seed(int(positions[0, -1]))
        query = torch.randn(1, heads, 2 * rows, head_dim, generator=draw).to(dtype)
        seen = torch.arange(keys.shape[2]) <= positions.view(2, 1)
        mask = seen.repeat_interleave(rows, 0).view(1, 1, 2 * rows, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    tokens = torch.zeros(1, 2, WIDTH)
    assert bitwise.slot_gaps(program, tokens, (16, heads, head_dim), 1, dtype, 2048) is not None
