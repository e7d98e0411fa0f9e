"""A row that loses its blocks and is computed again ends up with the tokens that it would have had (DESIGN §6, 1)."""

import pytest
import torch

from infer.params import SamplingParams
from infer.row import Row
from infer.strategy import Policy
from tests.tiny_engine import IN_PLACE, PROMPTS, STRATEGIES, Script, Tiny, model_of, oracle, texts_of

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
ROWS = PROMPTS[:4]


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=NUM_TOKENS)


def plain(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return Tiny(model_of(), "autoregressive").generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("num_blocks", [9, 11, 14])
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_greedy_rows_in_a_pool_that_is_too_small_for_all_give_the_oracles_tokens(strategy, num_blocks):
    policy = Policy(num_draft_tokens=3, num_lookup_tokens=3)  # with long rounds rows are admitted one by one
    tiny = Tiny(model_of(), strategy, policy, num_blocks=num_blocks)
    assert [r.token_ids for r in tiny.generate(ROWS, GREEDY)] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]
    assert tiny.engine.num_preemptions > 0


@pytest.mark.parametrize("bitwise_range", [None, (1, 3), (2, 6)], ids=str)
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_seeded_rows_in_a_pool_that_is_too_small_for_all_give_plain_decodings_tokens(strategy, bitwise_range):
    tiny = Tiny(model_of(), strategy, num_blocks=10, bitwise_range=bitwise_range)
    got = tiny.generate(ROWS, [sampled(b) for b in range(len(ROWS))])
    assert [r.token_ids for r in got] == [plain(p, sampled(b)) for b, p in enumerate(ROWS)]
    assert tiny.engine.num_preemptions > 0


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preemption_after_any_round_changes_no_token(strategy, after):
    script = Script(texts_of("llama", ROWS, NUM_TOKENS), lambda row, tier, offset, number: (row + offset) % 3 > 0)
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=2), rig=script)
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    for _ in range(after):
        tiny.engine.step()
    for request in tiny.engine.running[::-2]:
        shown = list(request.token_ids)
        tiny.engine._preempt(request)
        tiny.engine.check_integrity()
        assert request.token_ids == shown
    tiny.drain()
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


def test_the_oldest_row_is_never_preempted_and_rows_return_in_their_order(monkeypatch):
    tiny = Tiny(model_of(), "hispec", num_blocks=11)
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    preempted = []
    preempt = tiny.engine._preempt
    monkeypatch.setattr(tiny.engine, "_preempt", lambda request: (preempted.append(request), preempt(request)))
    for request in requests:
        tiny.engine.add(request)
    while tiny.engine.has_unfinished:
        oldest = next(r for r in requests if not r.is_finished)
        tiny.engine.step()
        in_order = [*tiny.engine.running, *tiny.engine.waiting]
        assert in_order == [r for r in requests if not r.is_finished]
        assert oldest not in preempted
        preempted.clear()


def spans_of(tiny: Tiny, row: Row, tokens: int | None = None) -> list[tuple[int, int]]:
    spans = []
    while not row.is_ready:
        span = tiny.runner.next_chunk(row)
        spans.append((span.start, span.stop))
        tiny.runner.prefill(row, [0, 1, 2])
    return spans


@pytest.mark.parametrize("num_prompt", [1, 2, 8, 9, 10, 17, 20])
@pytest.mark.parametrize("num_new", [0, 1, 5, 12])
def test_a_prompt_is_computed_again_in_its_own_chunks_and_the_rest_within_the_range(num_prompt, num_new):
    tiny = Tiny(model_of(), "hispec", bitwise_range=(2, 6))
    row = Row([3] * num_prompt, GREEDY, seed=0, max_len=40, num_tiers=3, num_stages=3,
              blocks=list(range(1, 11)), ring=1)  # fmt: skip
    first = spans_of(tiny, row)
    assert first == [(s, min(s + 8, num_prompt - 1)) for s in range(0, num_prompt - 1, 8)]
    for _ in range(num_new):
        row.append(5)
    row.restart(list(range(20, 30)), 1, 3)
    widths, call = [], tiny.runner._call
    tiny.runner._call = lambda program, x, query: widths.append(query.width) or call(program, x, query)
    again = spans_of(tiny, row)
    assert again[: len(first)] == first
    rest = again[len(first) :]
    assert [p for start, stop in rest for p in range(start, stop)] == list(range(num_prompt - 1, len(row) - 1))
    assert all(2 <= width <= 6 for width in widths[len(first) * len(widths) // max(len(again), 1) :])
    assert row.cursors == row.exit_cursors == [len(row) - 1] * 3


def test_kv_is_the_same_before_and_after():
    tiny = Tiny(model_of(), "hispec")
    request = tiny.request(ROWS[1], GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    tiny.engine.step()

    def entries() -> list[torch.Tensor]:
        row = request.row
        slots = [row.block_table[p // 4] * 4 + p % 4 for p in range(len(row) - 1)]
        return [page.flatten(0, 1)[slots].clone() for page in tiny.runner._pages]

    before = entries()
    tiny.engine.pool.allocate(3)  # so that it gets other blocks
    tiny.engine._preempt(request)
    for page in tiny.runner._pages:
        page.fill_(7)
    tiny.engine._admit()
    tiny.engine._prefill()
    assert request.row.is_ready
    lag = request.row.exit_cursors[0] - 1  # an exit may have lagged by one before
    for old, new in zip(before, entries(), strict=True):
        torch.testing.assert_close(old[:lag], new[:lag], rtol=1e-4, atol=1e-5)


def test_an_abort_while_preempted_leaves_nothing_behind():
    tiny = Tiny(model_of(), "hispec")
    request = tiny.request(ROWS[1], GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    tiny.engine._preempt(request)
    tiny.engine.abort(request.request_id)
    assert not tiny.engine.has_unfinished
    assert request.token_ids == oracle("llama", ROWS[1], NUM_TOKENS)[: len(request.token_ids)]
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1


def test_more_rows_run_than_the_pool_could_hold_at_their_longest():
    tiny = Tiny(model_of(), "autoregressive", num_blocks=9)
    requests = [tiny.request([3, 4], SamplingParams(temperature=0, max_tokens=20)) for _ in range(3)]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    assert len(tiny.engine.running) == 3  # 6 blocks each at the end, of 8
    tiny.drain()
    assert [r.token_ids for r in requests] == [oracle("llama", (3, 4), 20)] * 3
