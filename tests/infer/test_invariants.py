"""What holds between rounds (DESIGN §6): cursors, KV below them, nothing that matters beyond them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infer.params import SamplingParams
from infer.row import Row
from infer.stage import num_scratch_blocks
from infer.strategy import Policy, stages_of
from tests.tiny_engine import (
    BLOCK_SIZE,
    PROMPTS,
    STRATEGIES,
    Script,
    Tiny,
    make_manifest,
    make_model,
    model_of,
    oracle,
    texts_of,
)
from train.heads import ExitConfig

NUM_TOKENS = 14
ROWS = PROMPTS[:4]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LAYER_EXITS = tuple(ExitConfig(name=n, layer=d, head="layer") for n, d in (("draft", 2), ("intermediate", 4)))
_layered = None


def layered_model():
    """Both exits have KV of their own; the target is that of `model_of()`."""
    global _layered
    _layered = _layered or make_model("llama", LAYER_EXITS)
    return _layered


def paged(tiny: Tiny) -> list[tuple[str, int, list[Tensor]]]:
    """Kind, tier and pages of every program that has KV."""
    runner = tiny.runner
    both = [("trunk", runner._trunks), ("exit", runner._exits)]
    return [(kind, tier, program[2]) for kind, programs in both for tier, program in enumerate(programs) if program[2]]


def slots_of(row: Row, stop: int) -> list[int]:
    return [row.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(stop)]


def entries(pages: list[Tensor], row: Row, stop: int) -> Tensor:
    return torch.stack([page.flatten(0, 1)[slots_of(row, stop)] for page in pages])


def cursor(row: Row, kind: str, tier: int) -> int:
    return (row.cursors if kind == "trunk" else row.exit_cursors)[tier]


def fresh_row(tiny: Tiny, token_ids: list[int]) -> tuple[Tiny, Row]:
    other = Tiny(layered_model(), "hispec", max_model_len=max(128, len(token_ids)))
    row = Row(token_ids, GREEDY, seed=0, max_len=len(token_ids), num_tiers=3, num_stages=3,
              blocks=other.engine.pool.allocate(-(-len(token_ids) // BLOCK_SIZE)), ring=1)  # fmt: skip
    while not row.is_ready:
        other.runner.prefill(row, [0, 1, 2])
    return other, row


def check_trunks(tiny: Tiny, row: Row) -> None:
    """The trunks' KV of a row between two rounds is that of a fresh prefill, whoever has written it."""
    other, fresh = fresh_row(tiny, row.token_ids)
    for (kind, _, pages), (_, _, fresh_pages) in zip(paged(tiny), paged(other), strict=True):
        if kind == "trunk":
            stop = len(row) - 1
            torch.testing.assert_close(
                entries(pages, row, stop), entries(fresh_pages, fresh, stop), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("right", ["never", "always", "sometimes"])
def test_kv_below_every_cursor_is_that_of_a_fresh_prefill(right):
    """Invariant 2, exits included: after full acceptance an exit lags behind its tier and catches up later."""
    rule = {
        "never": lambda row, tier, offset, number: False,
        "always": lambda row, tier, offset, number: True,
        "sometimes": lambda row, tier, offset, number: (row + tier + offset + number) % 3 > 0,
    }[right]
    tiny = Tiny(
        layered_model(),
        "hispec",
        Policy(num_draft_tokens=3, window=5),
        rig=Script(texts_of("llama", ROWS, NUM_TOKENS), rule),
    )
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    lags = set()
    for _ in range(2):
        tiny.engine.step()
        for request in tiny.engine.running:
            row = request.row
            assert row.cursors == [len(row) - 1] * 3
            other, fresh = fresh_row(tiny, row.token_ids)
            for (kind, tier, pages), (_, _, fresh_pages) in zip(paged(tiny), paged(other), strict=True):
                stop = cursor(row, kind, tier)
                lags.add((kind, row.cursors[tier] - stop))
                torch.testing.assert_close(
                    entries(pages, row, stop), entries(fresh_pages, fresh, stop), rtol=1e-4, atol=1e-5
                )
    assert right != "always" or ("exit", 1) in lags


def poison(tiny: Tiny) -> None:
    """Finite garbage in every slot that no running row's cursor has passed, and in rings from which nothing is due."""
    rows = [r.row for r in tiny.engine.running]
    for kind, tier, pages in paged(tiny):
        kept = [s for row in rows for s in slots_of(row, cursor(row, kind, tier))]
        for page in pages:
            flat = page.flatten(0, 1)
            garbage = torch.full_like(flat, 1e4)
            garbage[kept] = flat[kept]
            page.copy_(garbage.view_as(page))
    for tier, ring in enumerate(tiny.runner.rings.of_tier):
        due = [row.ring * 64 + p % 64 for row in rows for p in range(row.exit_cursors[tier], row.cursors[tier])]
        # an exit without KV does not lag: its cursor is not kept up
        due = due if tiny.runner.exits[tier].has_kv else []
        garbage = torch.full_like(ring, 1e4)
        garbage[due] = ring[due]
        ring.copy_(garbage)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_finite_garbage_at_or_beyond_the_cursors_changes_nothing(strategy):
    tiny = Tiny(layered_model(), strategy, Policy(num_draft_tokens=3), num_blocks=40)
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    poison(tiny)
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        poison(tiny)
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


def test_garbage_in_lagging_exits_does_not_make_drafts_worse():
    """Poison changes no proposal either: the counts are those of an undisturbed run."""
    runs = []
    for disturb in (False, True):
        tiny = Tiny(layered_model(), "hispec")
        requests = [tiny.request(p, GREEDY) for p in ROWS]
        for request in requests:
            tiny.engine.add(request)
        while tiny.engine.has_unfinished:
            if disturb:
                poison(tiny)
            tiny.engine.step()
        runs.append([(s.num_drafts, s.num_draft_tokens, s.num_accepted) for s in tiny.round.stats])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_exits", [2, 3, 4])
def test_no_call_is_wider_than_the_query_that_the_policy_was_checked_for(num_exits):
    """Every judge below the target adds a token of its own to what waits."""
    prompts = ROWS[:1]
    # The first inner round gains one token, one less than the window, so that a second one follows and gains all.
    script = Script(texts_of("llama", prompts, NUM_TOKENS), lambda row, tier, offset, number: tier > 0 or offset > 0)
    exits = [ExitConfig(name=f"exit{i}", layer=i + 1, head="native") for i in range(num_exits)]
    gamma, window = 3, 2
    longest = window + gamma + num_exits - 1
    tiny = Tiny(make_model("llama", exits), "hispec",
                Policy(num_draft_tokens=gamma, window=window), rig=script)  # fmt: skip
    widths = []
    call = tiny.runner._call
    tiny.runner._call = lambda program, x, query: widths.append(query.width) or call(program, x, query)
    tiny.engine.add(tiny.request(prompts[0], GREEDY))
    tiny.engine.step()
    assert max(widths) == longest
    assert tiny.round.stages[0].window == longest


# ---- anything at all ----

row_params = st.one_of(
    st.builds(SamplingParams, temperature=st.just(0), max_tokens=st.integers(1, 9)),
    st.builds(
        SamplingParams,
        temperature=st.floats(0.3, 2),
        top_k=st.sampled_from([0, 3, 20]),
        top_p=st.sampled_from([0.5, 0.9, 1]),
        seed=st.integers(0, 2**63),
        max_tokens=st.integers(1, 9),
    ),
)
requests_ = st.lists(
    st.tuples(st.lists(st.integers(0, 127), min_size=1, max_size=11), row_params), min_size=1, max_size=4
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    requests=requests_,
    strategy=st.sampled_from(STRATEGIES[1:]),
    policy=st.builds(
        Policy,
        num_draft_tokens=st.integers(1, 5),
        window=st.integers(1, 6),
        inner_rounds=st.integers(1, 4),
        num_lookup_tokens=st.integers(1, 9),
        min_ngram=st.integers(1, 2),
        num_branches=st.sampled_from([0, 2]),
        branch_threshold=st.just(0.0),
        confidence_threshold=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
    ),
    max_num_seqs=st.integers(1, 4),
    bitwise_range=st.sampled_from([None, (1, 1), (1, 3), (2, 3), (2, 8)]),
    rig_seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_any_requests_under_any_policy_and_rig_give_plain_decodings_tokens(
    requests, strategy, policy, max_num_seqs, bitwise_range, rig_seed, data
):
    plain = Tiny(model_of(), "autoregressive")
    want = [plain.generate([prompt], params)[0].token_ids for prompt, params in requests]
    texts = {tuple(prompt): [*prompt, *answer] for (prompt, _), answer in zip(requests, want)}

    def is_right(row: int, tier: int, offset: int, number: int) -> bool:
        return hash((rig_seed, row, tier, offset, number)) % 4 > 0

    scratch = num_scratch_blocks(stages_of(strategy, policy, make_manifest(model_of())), BLOCK_SIZE)
    tiny = Tiny(model_of(), strategy, policy, num_blocks=16 + scratch, max_num_seqs=max_num_seqs,
                bitwise_range=bitwise_range, rig=Script(texts, is_right))  # fmt: skip
    pending = [tiny.request(prompt, params) for prompt, params in requests]
    for request in pending:
        tiny.engine.add(request)
    aborted = data.draw(st.sampled_from([None, *pending]))
    after = data.draw(st.integers(0, 3))
    for number in range(100):
        if aborted is not None and number == after and not aborted.is_finished:
            tiny.engine.abort(aborted.request_id)
        if not tiny.engine.has_unfinished:
            break
        for request in tiny.engine.step():
            row = request.row
            assert row.cursors == [len(row) - 1] * 3
            assert request.is_finished or [*request.prompt_token_ids, *request.token_ids] == row.token_ids
        tiny.engine.check_integrity()
    assert tiny.engine.pool.num_free == 15 + scratch
    assert sorted(tiny.engine._free_rings) == list(range(1, max_num_seqs + 1))
    for request, expected in zip(pending, want, strict=True):
        if request.finish_reason == "abort":
            assert request is aborted
            assert request.token_ids == expected[: len(request.token_ids)]
        else:
            assert request.token_ids == expected
