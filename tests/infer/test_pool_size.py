"""How many blocks a pool gets, with a GPU that says what a test wants."""

from dataclasses import replace

import pytest
import torch

from infer import pool_size
from infer.manifest import BaseInfo, ExitInfo, Limits, Manifest, TierInfo
from infer.pool_size import BYTES_PER_SCORE, default_num_blocks
from infer.strategy import Policy, most_scored
from tests.tiny_engine import make_manifest, model_of

GIB = 1 << 30
BASE = BaseInfo(
    name="tiny", revision=None, config_sha256="0" * 64, family="llama", num_layers=4, hidden_size=64, exit_size=64,
    vocab_size=1000, num_kv_heads=2, head_dim=64,
)  # fmt: skip
MANIFEST = Manifest(
    base=BASE,
    tiers=[TierInfo(name="target", start=0, stop=4, exit="target")],
    exits=[ExitInfo(name="target", layer=4, head="native", vocab_size=None, has_kv=False)],
    dtypes=["bfloat16"],
    block_size=16,
    limits=Limits(max_model_len=2000, prefill_chunk=128, max_query_len=8, max_batch=64),
    eos_token_ids=[0],
    provenance={},
)
ROW = 125  # blocks of a sequence of 2,000 tokens
BLOCK_BYTES = 2 * 4 * 16 * 2 * 64 * 2  # k and v, layers, slots, heads, head_dim, bf16
SCORES = 8 * 5 * 1000 * BYTES_PER_SCORE


def num_blocks(utilization: float = 0.9, device: str = "cuda", manifest: Manifest = MANIFEST) -> int:
    return default_num_blocks(
        manifest, 2, 8, device=device, gpu_memory_utilization=utilization, num_scored=5
    )  # fmt: skip


def gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize("used_share", [0.0, 0.25, 0.5])
def test_the_pool_fills_the_share_of_the_whole_memory_that_is_not_in_use(monkeypatch, used_share):
    total = 400 * BLOCK_BYTES * 2
    gpu(monkeypatch, int(total * (1 - used_share)), total)
    allowed = total * 0.9 - total * used_share - SCORES
    assert num_blocks(0.9) == int(allowed // BLOCK_BYTES)
    got = num_blocks(0.9) * BLOCK_BYTES + SCORES + total * used_share
    assert total * 0.9 - BLOCK_BYTES < got <= total * 0.9


def test_blocks_for_guesses_come_with_every_sequence():
    options = {"device": "cpu", "gpu_memory_utilization": 0.9, "num_scored": 5}
    assert default_num_blocks(MANIFEST, 2, 8, **options, num_scratch_blocks=14) == 1 + 8 * (ROW + 14)
    assert default_num_blocks(MANIFEST, 2, 10**9, **options) == 1 + GIB // BLOCK_BYTES
    huge = replace(MANIFEST, limits=replace(MANIFEST.limits, max_model_len=10**9))
    assert default_num_blocks(huge, 2, 8, **options, num_scratch_blocks=14) == 1 + -(-(10**9) // 16) + 14


def test_a_large_gpu_gives_every_sequence_its_greatest_length_and_no_more(monkeypatch):
    gpu(monkeypatch, 70 * GIB, 80 * GIB)
    assert num_blocks() == 1 + 8 * ROW


def test_room_for_exactly_one_sequence_is_enough_and_one_block_less_is_refused(monkeypatch):
    needed = (1 + ROW) * BLOCK_BYTES + SCORES
    gpu(monkeypatch, needed, needed)
    assert num_blocks(1.0) == 1 + ROW
    gpu(monkeypatch, needed - 1, needed)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=1.0.*max_model_len=2000.*lower max_num_seqs"):
        num_blocks(1.0)


def test_a_gpu_that_others_fill_is_refused_with_what_they_hold(monkeypatch):
    gpu(monkeypatch, 2 * GIB, 80 * GIB)  # 78 in use, 72 allowed
    with pytest.raises(ValueError, match=r"leaves 0.00 GiB for KV blocks \(78.00 GiB are in use"):
        num_blocks(0.9)


def test_on_cpu_the_pool_has_a_gibibyte_or_one_sequence_whatever_the_gpu_share(monkeypatch):
    assert num_blocks(0.01, device="cpu") == 1 + 8 * ROW
    monkeypatch.setattr(pool_size, "DEFAULT_KV_BYTES", 300 * BLOCK_BYTES)
    assert num_blocks(device="cpu") == 301
    monkeypatch.setattr(pool_size, "DEFAULT_KV_BYTES", 1)
    assert num_blocks(device="cpu") == 1 + ROW


def test_exits_with_kv_of_their_own_count_as_layers(monkeypatch):
    gpu(monkeypatch, 500 * BLOCK_BYTES + SCORES, 500 * BLOCK_BYTES + SCORES)
    exits = [*MANIFEST.exits, ExitInfo(name="draft", layer=2, head="layer", vocab_size=None, has_kv=True)]
    tiers = [
        TierInfo(name="draft", start=0, stop=2, exit="draft"),
        TierInfo(name="target", start=2, stop=4, exit="target"),
    ]
    assert num_blocks(1.0) == 500
    assert num_blocks(1.0, manifest=replace(MANIFEST, exits=exits, tiers=tiers)) == 400


def test_room_is_left_for_the_scores_of_any_strategy_that_may_be_chosen_later():
    manifest = make_manifest(model_of())
    few = {"num_draft_tokens": 2, "lookahead_window": 1, "lookahead_ngram": 2, "lookahead_guesses": 1}
    assert most_scored(Policy(**few, window=4, num_lookup_tokens=3), manifest) == 7  # hispec: N_i + γ + 1
    assert most_scored(Policy(**few, window=4, num_lookup_tokens=9), manifest) == 10  # what is looked up
    assert most_scored(Policy(**(few | {"num_draft_tokens": 20}), window=20), manifest) == 21  # hispec can't have that
    assert most_scored(Policy(), manifest) == 4 * 4 + 4  # lookahead: guesses of N tokens, and the window
