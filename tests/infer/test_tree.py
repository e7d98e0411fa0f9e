"""Drafts with branches: what is committed is plain decoding's, and a right second choice gains as much as a first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.llm import LLM
from infer.params import SamplingParams
from infer.row import Row
from infer.strategy import Policy, most_scored, rule_of, stages_of
from infer.tree_round import Candidate, TreeRound
from tests.infer.test_invariants import check_trunks
from tests.tiny_engine import DEVICE, PROMPTS, Tiny, make_manifest, make_model, make_trimmed_model, model_of, oracle
from train.heads import ExitConfig

NUM_TOKENS = 18
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
RANKS = [(0,), (1,), (2,), (3,), (0, 1), (2, 0, 1), (1, 3, 0, 0)]  # where the exit has the right token, in turn


def policy(gamma: int = 2, branches: int = 3, **more: float) -> Policy:
    return Policy(num_draft_tokens=gamma, num_branches=branches, **({"branch_threshold": 0.01} | more))


def ranked(texts: dict[tuple[int, ...], list[int]], ranks: tuple[int, ...]):  # type: ignore[no-untyped-def]
    """A rig: at position p the exit has the target's token in place `ranks[p % len]`, wrong ones before and behind it.
    The four first have the probabilities 0.4, 0.3, 0.2 and 0.1."""

    def rig(row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        text = texts[tuple(row.token_ids[: row.num_prompt_tokens])]
        right = text[position] if position < len(text) else 0
        order = [(right + 1 + i) % len(logits) for i in range(4)]
        order[ranks[position % len(ranks)]] = right
        laws = torch.tensor([0.4, 0.3, 0.2, 0.1], device=logits.device).log()
        return torch.full_like(logits, -50.0).index_copy_(0, torch.tensor(order, device=logits.device), laws)

    return rig


def texts(prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> dict[tuple[int, ...], list[int]]:
    return {p: [*p, *oracle("llama", p, NUM_TOKENS)] for p in prompts}


# ---- what is gained ----


@pytest.mark.parametrize(
    ("gamma", "ranks", "bitwise_range"),
    [*((3, ranks, None) for ranks in RANKS), *((2, RANKS[-1], limits) for limits in ((1, 4), (2, 3), (2, 12)))],
    ids=str,
)
def test_any_rank_of_the_right_token_gives_the_oracles_tokens(gamma, ranks, bitwise_range):
    tiny = Tiny(model_of(), "layerskip", policy(gamma), rig=ranked(texts(), ranks), bitwise_range=bitwise_range)
    got = tiny.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in got] == [oracle("llama", p, NUM_TOKENS) for p in PROMPTS]


@pytest.mark.parametrize(("rank", "branches", "is_found"), [(0, 3, True), (1, 3, True), (3, 3, True), (3, 2, False)])
def test_a_right_candidate_in_any_branch_gains_two_tokens_a_round(rank, branches, is_found):
    tiny = Tiny(model_of(), "layerskip", policy(1, branches), rig=ranked(texts(), (rank,)))
    request = tiny.request(PROMPTS[1], GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    before = len(request.token_ids)
    tiny.engine.step()
    assert len(request.token_ids) - before == (2 if is_found else 1)


def test_a_branch_leaves_the_chain_where_the_chain_is_wrong():
    """γ = 3, first choices right but at every third place, where the second is."""
    prompt = PROMPTS[1]  # of 9 tokens: position 10 is the second that is drafted
    ranks = (0, 1, 0)
    tiny = Tiny(model_of(), "layerskip", policy(3), rig=ranked(texts(), ranks))
    request = tiny.request(prompt, GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    # 9 is right; at 10 the second choice is, and the target adds the token after it
    assert request.token_ids == oracle("llama", prompt, NUM_TOKENS)[:3]
    assert tiny.round.stats[1].num_accepted == 2


def test_only_candidates_of_the_least_probability_make_branches():
    for threshold, expected in ((0.05, 3), (0.15, 2), (0.25, 1), (0.35, 0)):
        tiny = Tiny(model_of(), "layerskip", policy(1, branch_threshold=threshold), rig=ranked(texts(), (0,)))
        request = tiny.request(PROMPTS[1], GREEDY)
        tiny.engine.add(request)
        asked = []
        branches = tiny.round._branches
        tiny.round._branches = lambda row: asked.append(branches(row)) or asked[-1]  # noqa: B023
        tiny.engine.step()
        assert [len(own) - 1 for own in asked] == [expected]


def test_chances_are_products_along_the_chain():
    tiny = Tiny(model_of(), "layerskip", policy(2), rig=ranked(texts(), (0,)))
    seen: list[Candidate] = []
    branches = tiny.round._branches
    tiny.round._branches = lambda row: seen.extend(tiny.round._candidates[row]) or branches(row)
    tiny.engine.add(tiny.request(PROMPTS[1], GREEDY))
    tiny.engine.step()
    assert [one.place for one in seen] == [9, 9, 9, 10, 10, 10]
    assert [one.chance for one in seen] == pytest.approx([0.3, 0.2, 0.1, 0.4 * 0.3, 0.4 * 0.2, 0.4 * 0.1], rel=1e-5)


def test_a_trimmed_exit_proposes_real_ids():
    vocab = torch.arange(0, 128, 2)
    model = make_trimmed_model(vocab.to(DEVICE))
    tiny = Tiny(model, "layerskip", policy(2, branch_threshold=0.0))
    seen: list[Candidate] = []
    branches = tiny.round._branches
    tiny.round._branches = lambda row: seen.extend(tiny.round._candidates.get(row, ())) or branches(row)
    got = tiny.generate(PROMPTS[:3], GREEDY)
    assert seen and {one.token_id % 2 for one in seen} == {0}
    assert [r.token_ids for r in got] == [
        r.token_ids for r in Tiny(model, "autoregressive").generate(PROMPTS[:3], GREEDY)
    ]


def test_looked_up_drafts_have_no_branches_and_other_rows_beside_them_have():
    tiny = Tiny(model_of(), "ngram_layerskip", policy(2, branch_threshold=0.0))
    asked: dict[bool, int] = {True: 0, False: 0}
    branches = tiny.round._branches

    def counting(row: Row):  # type: ignore[no-untyped-def]
        asked[row in tiny.round._candidates] += 1
        own = branches(row)
        assert (len(own) > 1) == (row in tiny.round._candidates)
        return own

    tiny.round._branches = counting
    got = tiny.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in got] == [oracle("llama", p, NUM_TOKENS) for p in PROMPTS]
    assert asked[True] and asked[False]


# ---- what stays behind ----


@pytest.mark.parametrize("ranks", [(1,), (1, 3, 0, 0)], ids=str)
def test_pages_and_rings_after_each_round_are_those_of_plain_decoding(ranks):
    """Whichever branch a token came from, its keys and values, and the states that exits read later, are the same."""
    exits = [ExitConfig(name="draft", layer=2, head="layer", context=4),
             ExitConfig(name="intermediate", layer=4, head="layer")]  # fmt: skip
    model = make_model(exits=exits)
    tiny = Tiny(model, "layerskip", policy(3), rig=ranked(texts(), ranks))
    requests = [tiny.request(p, GREEDY) for p in PROMPTS[:4]]
    for request in requests:
        tiny.engine.add(request)
    num_branched = 0
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        for request in tiny.engine.running:
            row = request.row
            assert row is not None
            check_trunks(tiny, row)
            plain = Tiny(model, "autoregressive")
            plain_request = plain.request(row.token_ids[: row.num_prompt_tokens], GREEDY)
            plain.engine.add(plain_request)
            while plain_request.row is None or len(plain_request.row) < len(row):
                plain.engine.step()
            first = row.num_prompt_tokens - 1
            for ring, plain_ring in zip(tiny.runner.rings.of_tier, plain.runner.rings.of_tier, strict=True):
                held = [ring[row.ring * 64 + p % 64] for p in range(first, len(row) - 1)]
                wanted = [plain_ring[plain_request.row.ring * 64 + p % 64] for p in range(first, len(row) - 1)]
                torch.testing.assert_close(torch.stack(held), torch.stack(wanted), rtol=1e-4, atol=1e-5)
                num_branched += 1
    assert num_branched and tiny.round.stats[1].num_accepted


def test_drafts_after_a_branch_are_those_of_an_exit_that_has_seen_the_same_text():
    """Without a context an exit's drafts are a function of the text, so they must not depend on how it was verified."""
    model = make_model(exits=[ExitConfig(name="draft", layer=2, head="layer")])
    drafts: dict[int, dict[tuple[int, ...], int]] = {}
    append = Row.append
    for branches in (0, 4):
        tiny = Tiny(model, "layerskip", policy(2, branches, branch_threshold=0.0))
        drafts[branches] = {}
        with pytest.MonkeyPatch.context() as patch:

            def noted(row, token_id, proposer=255):  # type: ignore[no-untyped-def]
                if proposer == 0:
                    drafts[branches].setdefault(tuple(row.token_ids), token_id)  # noqa: B023
                append(row, token_id, proposer)

            patch.setattr(Row, "append", noted)
            tiny.generate(PROMPTS[:4], GREEDY)
    common = drafts[0].keys() & drafts[4].keys()
    assert len(common) > 30
    assert {text: drafts[0][text] for text in common} == {text: drafts[4][text] for text in common}


def test_a_row_counts_the_exit_as_proposer_of_a_branchs_token():
    tiny = Tiny(model_of(), "layerskip", policy(1), rig=ranked(texts(), (2,)))
    (request,) = tiny.generate(PROMPTS[1:2], GREEDY)
    assert request.row is not None
    generated = list(request.row.proposers[len(PROMPTS[1]) :])
    assert generated == [0, 2] * (NUM_TOKENS // 2)


# ---- edges ----


@pytest.mark.parametrize("kind", ["seeded", "penalties", "logprobs", "plain"])
def test_every_kind_of_request_gets_plain_decodings_text(kind):
    params = {
        "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=NUM_TOKENS),
        "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=NUM_TOKENS),
        "logprobs": SamplingParams(temperature=0, logprobs=2, max_tokens=NUM_TOKENS),
        "plain": SamplingParams(temperature=0, speculate=False, max_tokens=NUM_TOKENS),
    }[kind]
    plain = Tiny(model_of(), "autoregressive").generate(PROMPTS, params)
    got = Tiny(model_of(), "layerskip", policy(2, branch_threshold=0.0)).generate(PROMPTS, params)
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    if kind == "logprobs":
        for one, other in zip(got, plain, strict=True):
            assert one.scores is not None and other.scores is not None
            for mine, theirs in zip(one.scores.generated, other.scores.generated, strict=True):
                assert (mine.ids, mine.rank) == (theirs.ids, theirs.rank)
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("length", range(25, 32))
def test_a_row_near_its_greatest_length_ends_there(length):
    prompt = tuple(range(2, 33))[:length]
    tiny = Tiny(model_of(), "layerskip", policy(3, branch_threshold=0.0), max_model_len=32)
    (request,) = tiny.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert request.token_ids == oracle("llama", prompt, 32 - length)


@pytest.mark.parametrize("num_blocks", [30, 40])
def test_rows_that_make_way_and_come_back_keep_their_texts(num_blocks):
    tiny = Tiny(model_of(), "layerskip", policy(1, 2, branch_threshold=0.0), num_blocks=num_blocks)
    each = [SamplingParams(temperature=0.9, seed=b, max_tokens=30) for b in range(4)]
    plain = [Tiny(model_of(), "autoregressive").generate([p], q)[0].token_ids for p, q in zip(PROMPTS, each)]
    assert [r.token_ids for r in tiny.generate(PROMPTS[:4], each)] == plain
    assert tiny.engine.num_preemptions > 0


def test_the_default_pool_holds_a_row_of_full_length_and_its_branches(artifact):
    llm = LLM(artifact, "layerskip", max_num_seqs=1, num_branches=3, branch_threshold=0.0, device=str(DEVICE))
    assert isinstance(llm.engine.round, TreeRound) and llm.engine.round.num_scratch_blocks == 3 * 2
    (output,) = llm.generate([[5, 9, 3]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == llm.manifest.limits.max_model_len - 3


def test_numbers_and_rules_that_it_can_not_have_are_refused():
    manifest = make_manifest(model_of())
    with pytest.raises(ValueError, match="num_branches=-1 must be a whole number of at least 0"):
        Policy(num_branches=-1)
    with pytest.raises(ValueError, match=r"branch_threshold=1\.0 must be a number of at least 0 and below 1"):
        Policy(branch_threshold=1.0)
    with pytest.raises(ValueError, match=r"verification='rejection': num_branches=3 verifies several candidates"):
        rule_of("rejection", stages_of("layerskip", policy(), manifest), manifest)
    assert most_scored(policy(9, 3), manifest) == 40  # 10 of the chain, and of each branch
