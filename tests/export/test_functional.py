"""The two forms of a tier: the functional one gives the inplace one's very bits and writes nothing."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from export.programs import Program, make_programs
from tests.export.tiny_exits import ALL_HEADS, make_early_exit
from tests.tiny_engine import DEVICE

BLOCK = 4
NUM_BLOCKS = 32
MODELS = ("llama", "qwen3", "opt")


@cache
def both(family: str) -> tuple[dict[str, Program], dict[str, Program]]:
    """A family's programs over pages by name, inplace and functional."""
    model = make_early_exit(family, ALL_HEADS)
    inplace, functional = (
        {p.name: p for p in make_programs(model, BLOCK, form) if p.kv_layers} for form in ("inplace", "functional")
    )
    return inplace, functional


def rectangle(starts: list[int], counts: list[int], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """positions, slots [B, length] and block_table [B, M]: row b's tokens at starts[b] .., then padding.

    Blocks descend, and what a row's table lacks is filled with its first block, as the runtime does.
    """
    per_row = -(-max(start + count for start, count in zip(starts, counts)) // BLOCK)
    table = torch.arange(len(starts) * per_row, 0, -1).view(len(starts), per_row)
    positions, slots = (torch.full((len(starts), length), filler) for filler in (-1, 0))
    for b, (start, count) in enumerate(zip(starts, counts)):
        positions[b, :count] = torch.arange(start, start + count)
        table[b, -(-(start + count) // BLOCK) :] = table[b, 0]
        slots[b, :count] = table[b, positions[b, :count] // BLOCK] * BLOCK + positions[b, :count] % BLOCK
    return positions.to(DEVICE), slots.to(DEVICE), table.to(DEVICE)


def inputs(program: Program, positions: Tensor, table: Tensor, stale: float) -> tuple[Tensor, list[Tensor]]:
    """x and pages. Blocks that are in no table, the null block among them, hold `stale`."""
    generator = torch.Generator().manual_seed(5)
    example, shape = program.inputs[0], positions.shape
    if example.dtype == torch.long:
        x = torch.randint(100, shape, generator=generator)
    else:
        x = torch.randn(*shape, example.shape[-1], generator=generator)
    pages = [torch.randn(NUM_BLOCKS, *p.shape[1:], generator=generator).to(DEVICE) for p in program.inputs[4]]
    unused = [block for block in range(NUM_BLOCKS) if block not in table.flatten().tolist()]
    for page in pages:
        page[unused] = stale
    return x.to(DEVICE), pages


def compare(family: str, name: str, starts: list[int], counts: list[int], length: int, stale: float) -> None:
    inplace, functional = (programs[name] for programs in both(family))
    positions, slots, table = rectangle(starts, counts, length)
    x, pages = inputs(inplace, positions, table, stale)
    # Where a row will write, its pages hold what an earlier owner left: neither form may let it through. A block that
    # also fills a short row's table is seen there before it is written, so that only finite garbage may stand in it.
    fillers = [int(row[0]) for row in table if len(row.unique()) < len(row)]
    own = slots[positions >= 0]
    is_filler = torch.isin(own // BLOCK, torch.tensor(fillers, device=DEVICE))
    for page in pages:
        page.view(-1, *page.shape[2:])[own] = torch.where(is_filler, 3e4, stale)[:, None, None]
    written = [page.clone() for page in pages]
    before = [page.clone() for page in pages]
    with torch.no_grad():
        expected: Any = inplace.module(x, positions, slots, table, written)
        got, *new = functional.module(x, positions, slots, table, pages)
    real = positions >= 0
    assert torch.equal(got[real], expected[real]) and got[real].isfinite().all(), name
    assert len(new) == len(pages)
    for page, old, entry, wanted in zip(pages, before, new, written, strict=True):
        assert torch.equal(page.nan_to_num(7.0), old.nan_to_num(7.0)), "a functional program wrote a page"
        flat, theirs = page.view(-1, *page.shape[2:]), wanted.view(-1, *page.shape[2:])
        flat[slots[real]] = entry[real]
        assert torch.equal(flat[BLOCK:].nan_to_num(7.0), theirs[BLOCK:].nan_to_num(7.0))  # the null block is anybody's


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", ["first.trunk", "target.trunk", "draft.exit"])
@pytest.mark.parametrize("length", range(1, 9))
def test_both_forms_have_the_same_bits(family: str, name: str, length: int) -> None:
    for start in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 2):  # at, before and across the borders of blocks
        compare(family, name, [start, start + 3, 1], [length] * 3, length, stale=float("nan"))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", ["first.trunk", "target.trunk", "draft.exit"])
def test_padding_overwrites_no_entry(family: str, name: str) -> None:
    """Ragged rows: position 0 and the first and last entries of a row are where padding would land unnoticed."""
    for starts, counts in (
        ([0, 9, 4], [1, 5, 3]),
        ([7, 0, 0], [4, 2, 8]),
        ([3, 12, 1], [8, 1, 7]),
        ([5, 0, 2], [2, 0, 4]),  # a row that sits the call out
    ):
        compare(family, name, starts, counts, 8, stale=3e4)


def test_padding_may_stand_anywhere_in_a_row() -> None:
    inplace, functional = (programs["target.trunk"] for programs in both("llama"))
    positions, slots, table = rectangle([2, 6], [5, 5], 5)
    order = torch.tensor([[4, 0, 1, 2, 3], [0, 1, 4, 2, 3]], device=DEVICE)  # the last token's place becomes padding
    positions[:, 4], slots[:, 4] = -1, 0
    positions, slots = positions.gather(1, order), slots.gather(1, order)
    x, pages = inputs(inplace, positions, table, stale=3e4)
    with torch.no_grad():
        got, *_ = functional.module(x, positions, slots, table, pages)
        expected = inplace.module(x, positions, slots, table, pages)
    assert torch.equal(got[positions >= 0], expected[positions >= 0])


def test_programs_without_pages_are_the_same_in_both_forms() -> None:
    model = make_early_exit("llama", ALL_HEADS)
    for mine, theirs in zip(make_programs(model, BLOCK), make_programs(model, BLOCK, "functional"), strict=True):
        assert (mine.name, mine.kind, mine.kv_layers) == (theirs.name, theirs.kind, theirs.kv_layers)
        assert [n for n, _ in mine.module.named_parameters()] == [n for n, _ in theirs.module.named_parameters()]
