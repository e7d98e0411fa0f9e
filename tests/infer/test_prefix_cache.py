"""A prompt that begins as an earlier one begins behind it, with the same tokens as ever."""

import pytest
import torch

from infer.blocks import BlockPool
from infer.params import SamplingParams
from infer.prefix_cache import PrefixCache
from infer.row import Row
from tests.tiny_engine import IN_PLACE, NAN_ID, PROMPTS, STRATEGIES, Tiny, all_is_free, model_of, nan_model, oracle

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
BASE = tuple(range(2, 42))  # chunks of 8


def chunks_of(tiny: Tiny, prompts, params: SamplingParams = GREEDY) -> list[list[range]]:  # type: ignore[no-untyped-def]
    """The chunks that each prompt, one after the other, still has to compute; its tokens must be the oracle's."""
    every, prefill = [], tiny.runner.prefill
    for prompt in prompts:
        chunks: list[range] = []

        def counting(row: Row, tiers: list[int], into: list[range] = chunks) -> None:
            into.append(tiny.runner.next_chunk(row))
            prefill(row, tiers)

        tiny.runner.prefill = counting
        (request,) = tiny.generate([prompt], params)
        if params.is_greedy:
            assert request.token_ids == oracle("llama", tuple(prompt), NUM_TOKENS)
        every.append(chunks)
    tiny.runner.prefill = prefill
    return every


def caching(strategy: str = "hispec", **options: object) -> Tiny:
    return Tiny(model_of(), strategy, enable_prefix_caching=True, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_what_follows_the_known_beginning_is_computed(strategy):
    tiny = caching(strategy)
    prompts = [BASE, BASE, BASE[:17], (*BASE[:20], 99, 98, 97), (7, *BASE[1:])]
    got = chunks_of(tiny, prompts)
    assert [[(c.start, c.stop) for c in chunks] for chunks in got] == [
        [(0, 8), (8, 16), (16, 24), (24, 32), (32, 39)],
        [(32, 39)],
        [],  # 16 positions, two whole chunks
        [(16, 22)],
        [(0, 8), (8, 16), (16, 24), (24, 32), (32, 39)],
    ]
    assert all_is_free(tiny)


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prompt_sent_twice_and_a_longer_one_give_the_same_replies(strategy, num_prompt):
    """A20: whole numbers of blocks and of chunks, where nothing or all but the query is known."""
    chunks_of(caching(strategy), [BASE[:num_prompt], BASE[:num_prompt], BASE[: num_prompt + 3]])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeded_texts_are_those_without_a_cache(strategy):
    def texts(tiny: Tiny) -> list[list[int]]:
        each = [SamplingParams(temperature=1.2, seed=s, max_tokens=NUM_TOKENS, n=2) for s in range(3)]
        rounds = [tiny.generate([BASE, BASE[:30], BASE], each) for _ in range(2)]
        return [list(o.token_ids) for requests in rounds for r in requests for o in r.output().outputs]

    assert texts(caching(strategy)) == texts(Tiny(model_of(), "autoregressive"))


def test_cached_kv_has_the_bits_of_a_prompt_computed_anew():
    pages = []
    for is_warm in (False, True):
        tiny = caching()
        if is_warm:
            tiny.generate([(*BASE[:24], 77, 78, 79, 80, 81, 82, 83, 84, 85)], GREEDY)
        request = tiny.request(BASE, GREEDY)
        tiny.engine.add(request)
        tiny.engine._admit()
        tiny.engine._prefill()
        slots = [request.row.block_table[p // 4] * 4 + p % 4 for p in range(len(BASE) - 1)]
        pages.append([page.flatten(0, 1)[slots] for page in tiny.runner._pages])
    assert all(torch.equal(cold, warm) for cold, warm in zip(*pages, strict=True))


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_cached_blocks_make_way_for_rows_and_eviction_changes_no_token(strategy):
    tiny = caching(strategy, num_blocks=17)
    prompts = [BASE, BASE[::-1], BASE, (*BASE[:20], 99), BASE[::-1]]
    for _ in range(2):
        chunks_of(tiny, prompts)
    requests = tiny.generate(prompts, GREEDY)
    assert [r.token_ids for r in requests] == [oracle("llama", tuple(p), NUM_TOKENS) for p in prompts]
    assert all_is_free(tiny)


@pytest.mark.parametrize("strategy", ["layerskip", "hispec"])
def test_drafts_are_as_good_after_a_hit(strategy):
    """A22: an exit's own KV must be there too; free blocks hold garbage in between."""
    tiny = caching(strategy)
    counts = []
    for _ in range(2):
        (request,) = tiny.generate([BASE], GREEDY)
        counts.append([(t.num_draft_tokens, t.num_accepted) for t in request.output().metrics.tiers])
        held = {block for blocks in tiny.prefix_cache.blocks for block in blocks}
        for page in tiny.runner._pages:
            page[[b for b in range(1, tiny.engine.pool.num_blocks) if b not in held]] = 1e4
    assert counts[0] == counts[1]


@pytest.mark.parametrize("shift", [1, 256, 65_536])
def test_prompts_whose_ids_differ_by_a_power_of_256_share_nothing(shift):
    """A21."""
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool, 8)
    blocks = pool.allocate(4)
    cache.insert(BASE[:17], [0, 2], blocks)
    assert cache.match(BASE[:17], [0, 2]) == blocks
    assert cache.match([i + shift for i in BASE[:17]], [0, 2]) == []
    assert cache.match([*BASE[:8], *(i + shift for i in BASE[8:17])], [0, 2]) == blocks[:2]
    assert cache.match(BASE[:17], [2]) == []  # its exits were not all filled


def test_a_key_that_collides_is_no_hit(monkeypatch):
    class Weak:
        def __init__(self, data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr("infer.prefix_cache.hashlib.sha256", Weak)
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool, 8)
    cache.insert(BASE[:9], [0], pool.allocate(2))
    assert cache.match(BASE[1:10], [0]) == []


def test_the_last_used_beginning_goes_last_and_never_before_its_continuation():
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool, 8)
    first, second = pool.allocate(4), pool.allocate(2)
    cache.insert(BASE[:17], [0], first)
    cache.insert(BASE[20:29], [0], second)
    assert cache.match(BASE[:17], [0]) == first
    assert cache.pop_idle() is None  # the rows have them too
    pool.free(first)
    pool.free(second)
    order = []
    while idle := cache.pop_idle():
        order.append(idle)
        pool.free(idle)
    assert order == [second, first[2:], first[:2]]
    assert pool.num_free == 19


def test_a_prompt_that_gave_nan_is_not_kept():
    model, _ = nan_model()
    tiny = Tiny(model, "hispec", enable_prefix_caching=True)
    tiny.generate([[NAN_ID] * 20], GREEDY)
    assert tiny.prefix_cache.blocks == []
    assert all_is_free(tiny)


def test_a_prompt_is_kept_only_when_the_target_has_passed_it():
    tiny = caching(max_num_prefill_tokens=8)
    request = tiny.request(BASE, GREEDY)
    tiny.engine.add(request)
    while not request.token_ids:
        assert tiny.prefix_cache.blocks == []
        tiny.engine.step()
    assert len(tiny.prefix_cache.blocks) == 4
    tiny.drain()


def test_prompts_without_a_whole_chunk_are_not_kept():
    tiny = caching()
    tiny.generate([p for p in PROMPTS if len(p) <= 8], GREEDY)
    assert tiny.prefix_cache.blocks == []
