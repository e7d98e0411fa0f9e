from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.batch import RING_SIZE, cut, make_query, runs_of, split_by_size, token_rectangle
from infer.params import SamplingParams
from infer.row import Row

CPU = torch.device("cpu")
SIZE = 4


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Row], list[range]]:
    rows, spans, next_block = [], [], 1
    for number in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, 70)), draw(st.integers(1, 9))
        num_blocks = -(-(start + length + draw(st.integers(0, 20))) // SIZE)
        blocks = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        row = Row(range(start + length), SamplingParams(), seed=0, max_len=200, num_tiers=1, num_stages=1,
                  blocks=blocks, ring=number + 1)  # fmt: skip
        rows.append(row)
        spans.append(range(start, start + length))
    return rows, spans


@given(call=calls())
def test_a_table_that_would_end_in_a_gap_is_filled_up_with_the_row_s_first_block(call):
    rows, spans = call
    plain, wider = (
        make_query(rows, spans, SIZE, CPU).block_table,
        make_query(rows, spans, SIZE, CPU, gaps=[(0, 512)]).block_table,
    )
    assert wider.shape == (len(rows), 512 // SIZE)
    for row, table in zip(rows, wider, strict=True):
        own = row.block_table[: wider.shape[1]]
        assert table.tolist() == own + own[:1] * (wider.shape[1] - len(own))
    assert (wider[:, : plain.shape[1]] == plain).all()


@given(call=calls(), min_width=st.integers(1, 12))
def test_padding_stands_right_with_position_minus_one_in_the_null_block_and_ring_0(call, min_width):
    rows, spans = call
    query = make_query(rows, spans, SIZE, CPU, min_width)
    assert query.width == max(min_width, *(len(s) for s in spans))
    assert query.positions.shape == query.slots.shape == (len(rows), query.width)
    ring = query.ring.view(len(rows), -1)
    for b, span in enumerate(spans):
        n = len(span)
        assert query.positions[b].tolist() == [*span] + [-1] * (query.width - n)
        assert query.slots[b, n:].eq(0).all()
        assert ring[b, n:].eq(0).all()


@given(call=calls())
def test_a_query_writes_where_the_block_table_says_and_nowhere_twice(call):
    rows, spans = call
    query = make_query(rows, spans, SIZE, CPU)
    used = [s for line, span in zip(query.slots.tolist(), spans) for s in line[: len(span)]]
    assert len(set(used)) == len(used)
    assert min(used) >= SIZE  # the null block is for padding
    for b, span in enumerate(spans):
        for t, position in enumerate(span):
            block = query.block_table[b, position // SIZE]
            assert query.slots[b, t] == block * SIZE + position % SIZE
            assert query.ring[b * query.width + t] == rows[b].ring * RING_SIZE + position % RING_SIZE


@given(call=calls(), min_width=st.integers(1, 5))
def test_a_querys_tensors_are_contiguous_and_begin_at_16_bytes(call, min_width):
    query = make_query(*call, SIZE, CPU, min_width)
    for tensor in (query.positions, query.slots, query.block_table, query.ring):
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


@given(call=calls())
def test_a_row_reads_only_its_own_blocks(call):
    rows, spans = call
    query = make_query(rows, spans, SIZE, CPU)
    assert query.block_table.shape[1] == max(-(-s.stop // SIZE) for s in spans)
    for row, table in zip(rows, query.block_table.tolist()):
        assert set(table) <= set(row.block_table)  # not even masked: 0 × NaN is NaN


@given(call=calls())
def test_flat_index_picks_the_cells_that_are_no_padding(call):
    rows, spans = call
    query = make_query(rows, spans, SIZE, CPU)
    tokens = token_rectangle(rows, spans, query.width, CPU)
    assert tokens.flatten()[query.flat_index(CPU)].tolist() == [p for span in spans for p in span]
    assert query.is_full == (query.positions >= 0).all()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), limit=st.one_of(st.none(), st.integers(9, 30)))
def test_split_by_size_keeps_order_and_limit(lengths, limit):
    spans = [range(n) for n in lengths]
    runs = split_by_size(spans, limit)
    assert [i for run in runs for i in run] == list(range(len(spans)))
    for run in runs:
        cells = len(run) * max(lengths[i] for i in run)
        assert limit is None or cells <= limit
    if limit is None:
        assert len(runs) == 1


@given(span=st.builds(range, st.integers(0, 50), st.integers(0, 90)), limit=st.one_of(st.none(), st.integers(1, 30)))
def test_cut_keeps_every_position_in_order(span, limit):
    pieces = cut(span, limit)
    assert [p for piece in pieces for p in piece] == list(span)
    assert all(0 < len(piece) <= (limit or len(span)) for piece in pieces)


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12), limit=st.integers(9, 30))
def test_split_by_size_cuts_only_where_it_must(lengths, limit):
    runs = split_by_size([range(n) for n in lengths], limit)
    for run, after in pairwise(runs):
        together = lengths[run.start : after.start + 1]
        assert len(together) * max(together) > limit


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=12), limit=st.one_of(st.none(), st.integers(1, 30)))
def test_runs_sum_up_to_the_limit_and_are_cut_only_where_they_must(counts, limit):
    runs = runs_of(counts, limit)
    assert [i for run in runs for i in run] == list(range(len(counts)))
    totals = [sum(counts[i] for i in run) for run in runs]
    if limit is None:
        assert len(runs) == 1
        return
    assert all(total <= limit or len(run) == 1 for run, total in zip(runs, totals, strict=True))
    assert all(total + counts[after.start] > limit for total, (_, after) in zip(totals, pairwise(runs)))
