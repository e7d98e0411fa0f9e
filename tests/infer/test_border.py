"""No program is called with what it can't take: the runtime refuses it first, whatever backend runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from infer import runner as runner_module
from infer.batch import Query
from infer.border import Border, BorderError, Takes, takes_of
from infer.failures import ProgramError
from infer.params import SamplingParams
from infer.row import Row
from tests.tiny_engine import BLOCK_SIZE, DEVICE, PROMPTS, Tiny, all_is_free, make_manifest, model_of, oracle

BORDER = Border(block_size=4, num_blocks=10, max_positions=32, vocab_size=100, device=torch.device("cpu"))
TRUNK, LOWEST, FLAT = Takes("x", torch.float32, 8), Takes("x", torch.int64, None), Takes("x", torch.float32, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def a_row(blocks: list[int]) -> Row:
    return Row((1, 2), SamplingParams(temperature=0), seed=0, max_len=32, num_tiers=1, num_stages=1, blocks=blocks,
               ring=1)  # fmt: skip


def query(**changes: Any) -> Query:
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    made = Query(positions=zeros, slots=zeros, block_table=zeros.clone(), ring=zeros.flatten(),
                 rows=[a_row([1]), a_row([2])], lengths=[3, 3], width=3)  # fmt: skip
    return replace(made, **changes)


def test_what_a_call_should_be_passes() -> None:
    BORDER.check_query(query())
    BORDER.check_input(TRUNK, torch.zeros(2, 3, 8), query())
    BORDER.check_input(LOWEST, torch.zeros(2, 3, dtype=torch.int64), query())
    BORDER.check_input(FLAT, torch.zeros(5, 8))
    BORDER.check_spans([a_row([1, 2])], [range(7, 8)])
    BORDER.check_blocks([[1, 9], [2]])
    BORDER.check_ids([0, 99])


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 3, 8, dtype=torch.bfloat16),  # dtype
        torch.zeros(2, 3, 8, dtype=torch.int64),
        torch.zeros(6, 8),  # rank
        torch.zeros(1, 2, 3, 8),
        torch.zeros(2, 3, 9),  # sizes
        torch.zeros(2, 4, 8),
        torch.zeros(3, 3, 8),
        torch.zeros(2, 3, 16)[..., ::2],  # strides
        torch.zeros(3, 2, 8).transpose(0, 1),
        torch.zeros(1, 3, 8).expand(2, 3, 8),
        torch.zeros(2, 3, 8, device="meta"),  # device
    ],
)
def test_a_wrong_input_over_pages_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(BorderError, match=r"x is .*, expected a contiguous torch.float32 \[2, 3, 8\] on cpu"):
        BORDER.check_input(TRUNK, x, query())


@pytest.mark.parametrize(
    "states", [torch.zeros(5, 8).half(), torch.zeros(5, 7), torch.zeros(8), torch.zeros(1, 5, 8), torch.zeros(8, 5).T,
               torch.zeros(0, 8)]
)  # fmt: skip
def test_wrong_states_are_refused(states: torch.Tensor) -> None:
    with pytest.raises(BorderError, match=r"expected a contiguous torch\.float32"):
        BORDER.check_input(FLAT, states)


@pytest.mark.parametrize("name", ["positions", "slots", "block_table"])
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3),
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(3, 3, dtype=torch.int64),
        torch.zeros(2, 6, dtype=torch.int64)[:, ::2],
        torch.zeros(2, 0, dtype=torch.int64),
    ],
)
def test_a_wrong_query_is_refused(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(BorderError, match=r"expected a contiguous torch\.int64"):
        BORDER.check_query(query(**{name: wrong}))


@pytest.mark.parametrize("span", [range(-1, 2), range(31, 33), range(32, 33), range(3, 3), range(7, 9)])
def test_positions_that_the_model_or_the_row_does_not_have_are_refused(span: range) -> None:
    with pytest.raises(BorderError, match="positions"):
        BORDER.check_spans([a_row([1, 2])], [span])


@pytest.mark.parametrize("block", [-1, 0, 10, 1 << 40])
def test_blocks_beyond_the_pool_and_the_null_block_are_refused(block: int) -> None:
    with pytest.raises(BorderError, match=rf"block {block} of a row must lie within 1\.\.9"):
        BORDER.check_blocks([[1, 2], [3, block]])


@pytest.mark.parametrize("token_id", [-1, 100, 1 << 40])
def test_ids_that_are_no_tokens_are_refused(token_id: int) -> None:
    with pytest.raises(BorderError, match=rf"token id {token_id} must lie within 0\.\.99"):
        BORDER.check_ids([5, token_id, 7])


def test_every_program_has_an_entry() -> None:
    manifest = make_manifest(model_of())
    takes = takes_of(manifest, torch.bfloat16)
    assert takes.keys() == manifest.kv_layers().keys()
    assert (takes["draft.trunk"].dtype, takes["draft.trunk"].width) == (torch.int64, None)
    assert (takes["target.trunk"].dtype, takes["target.trunk"].width) == (torch.bfloat16, 48)


# ---- in the engine ----


def add(tiny: Tiny, numbers: tuple[int, ...] = (0, 1)) -> list[Any]:
    requests = [tiny.request(PROMPTS[n], GREEDY) for n in numbers]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()  # prefill, and a first round
    return requests


def refuse_calls(tiny: Tiny) -> None:
    def called(*_: object) -> None:
        raise AssertionError("the program was called")

    for programs in (tiny.runner._trunks, tiny.runner._exits):
        programs[:] = [(called, *rest) for _, *rest in programs]


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (lambda row: row.block_table.__setitem__(0, 10_000), "block 10000"),
        (lambda row: row.block_table.__setitem__(0, 0), "block 0"),
        (lambda row: row.block_table.__delitem__(slice(1, None)), "beyond the row's 1 blocks"),
        (lambda row: row.token_ids.__setitem__(-1, 128), "token id 128"),
        (lambda row: row.token_ids.__setitem__(-1, -1), "token id -1"),
        (lambda row: row.token_ids.extend([1] * 200), "0..127"),
    ],
)
def test_a_row_with_wrong_numbers_reaches_no_program(harm: Callable[[Row], Any], cause: str) -> None:
    tiny = Tiny(model_of(), "autoregressive")
    (request,) = add(tiny, (1,))
    harm(request.row)
    tiny.runner._tables._kept.clear()  # else the row's table, seen before, is known
    refuse_calls(tiny)
    with pytest.raises(ProgramError) as error:
        tiny.runner.advance([request.row], 2)
    assert isinstance(error.value.__cause__, BorderError) and cause in str(error.value.__cause__)
    assert error.value.rows == [request.row]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q: replace(q, positions=q.positions.int()),
        lambda q: replace(q, slots=torch.stack([q.slots] * 2, -1)[..., 0]),
        lambda q: replace(q, block_table=q.block_table.repeat(2, 1)),
    ],
)
def test_a_spoilt_query_ends_its_rows_and_the_engine_serves_on(spoil: Callable[[Query], Query], monkeypatch) -> None:
    tiny = Tiny(model_of(), "layerskip")
    requests = add(tiny)
    made = runner_module.make_query
    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "make_query", lambda *args: spoil(made(*args)))
        kept = [list(programs) for programs in (tiny.runner._trunks, tiny.runner._exits)]
        refuse_calls(tiny)
        tiny.engine.step()
        tiny.runner._trunks[:], tiny.runner._exits[:] = kept
    assert {r.finish_reason for r in requests} == {"error"}
    assert all("expected a contiguous torch.int64" in r.stop_reason for r in requests)
    assert all_is_free(tiny)
    assert [r.token_ids for r in tiny.generate(PROMPTS[:2], GREEDY)] == [
        oracle("llama", p, 14)[:8] for p in PROMPTS[:2]
    ]


@pytest.mark.parametrize("spoil", [lambda x: x.double(), lambda x: x.repeat(1, 2)[:, ::2], lambda x: x[..., :-1]])
def test_what_a_program_left_is_checked_before_the_next_one_gets_it(spoil: Callable[[Any], Any]) -> None:
    tiny = Tiny(model_of(), "autoregressive")
    (request,) = add(tiny, (1,))
    exit_, *rest = tiny.runner._exits[2]
    tiny.runner._exits[2] = (lambda states: spoil(exit_(states)), *rest)
    rest = tiny.runner._unembeds[2][1:]

    def called(_: object) -> None:
        raise AssertionError("the program was called")

    tiny.runner._unembeds[2] = (called, *rest)
    tiny.engine.step()
    assert request.finish_reason == "error" and "unembed: x is" in request.stop_reason


def test_checks_cost_a_call_little() -> None:
    """A tier call's own host time may be 150 µs; the checks are to be a small part of that. The best of many, since
    others use the machine."""
    border = replace(BORDER, device=DEVICE)
    made = query()
    made = replace(made, **{n: getattr(made, n).to(DEVICE) for n in ("positions", "slots", "block_table")})
    x, rows, spans = torch.zeros(2, 3, 8, device=DEVICE), [a_row([1] * BLOCK_SIZE)] * 2, [range(3, 6)] * 2
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        border.check_spans(rows, spans)
        border.check_query(made)
        border.check_input(TRUNK, x, made)
        border.check_ids([5] * 6)
        best = min(best, time.perf_counter() - start)
    assert best < 50e-6, f"{1e6 * best:.0f} µs"
