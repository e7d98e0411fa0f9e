"""Lookahead decoding: the window is the paper's, every guess is verified, and what is accepted is where it belongs."""

from __future__ import annotations

import itertools

import pytest
import torch

from infer.branches import calls, own_branch
from infer.failures import ProgramError
from infer.llm import LLM
from infer.lookahead import Lookahead, Window
from infer.params import SamplingParams
from infer.strategy import Policy, rule_of, stages_of
from tests.infer.test_invariants import check_trunks, layered_model
from tests.tiny_engine import BLOCK_SIZE, DEVICE, PROMPTS, Tiny, make_manifest, model_of, oracle

SMALL = Policy(lookahead_window=3, lookahead_ngram=3, lookahead_guesses=3)
SHAPES = [(1, 2, 1), (3, 2, 2), (3, 3, 3), (2, 4, 1), (5, 4, 4), (7, 5, 7)]  # W, N, G
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def policy(shape: tuple[int, int, int]) -> Policy:
    return Policy(**dict(zip(("lookahead_window", "lookahead_ngram", "lookahead_guesses"), shape, strict=True)))


# ---- the window ----


def test_columns_and_ngrams_are_those_of_a_window_drawn_by_hand():
    """W = 3, N = 4. Level 0: 1 2, level 1: 3 4 5, level 2: 1 2 3; the last token is 9, and 6 7 8 come next."""
    window = Window(Lookahead(window=3, ngram=4, num_guesses=2), [1, 2, 3, 4, 5])
    assert window.columns(9) == [[9, 3, 1], [9, 1, 4, 2], [9, 1, 2, 5, 3]]
    window.slide(9, [6, 7, 8])
    assert [window.guesses(token, 9) for token in (9, 1, 2)] == [[(3, 1, 6)], [(4, 2, 7)], [(5, 3, 8)]]
    assert window.columns(0) == [[0, 1, 6], [0, 4, 2, 7], [0, 4, 5, 3, 8]]


def test_a_window_of_bigrams_is_a_jacobi_chain():
    window = Window(Lookahead(window=3, ngram=2, num_guesses=1), [1, 2])
    assert window.columns(9) == [[9], [9, 1], [9, 1, 2]]
    window.slide(9, [5, 6, 7])
    assert window.columns(8) == [[8], [8, 6], [8, 6, 7]]
    assert [window.guesses(token, 1) for token in (9, 1, 2, 7)] == [[(5,)], [(6,)], [(7,)], []]


def test_the_latest_ngrams_of_a_token_are_kept_and_short_room_cuts_them():
    window = Window(Lookahead(window=1, ngram=3, num_guesses=2), [4])
    for token in (1, 2, 1, 3):
        window.slide(9, [token])
    assert window.guesses(9, 9) == [(1, 3), (2, 1)]  # (4, 1) and (1, 2) came before
    assert window.guesses(9, 1) == [(1,), (2,)] and window.guesses(9, 0) == []


def test_columns_give_the_tokens_of_the_papers_one_masked_pass():
    """Hugging Face with the paper's mask: level 0 is a chain; a column sees it up to its place, and its own levels."""
    model, shape = model_of(), Lookahead(window=4, ngram=4, num_guesses=1)
    tiny = Tiny(model, "lookahead", policy((4, 4, 1)))
    request = tiny.request(PROMPTS[1], GREEDY)
    tiny.engine.add(request)
    for _ in range(5):  # until the window is full of its own guesses
        tiny.engine.step()
    row = request.row
    assert row is not None and row.window is not None
    chain, *deeper = row.window._levels
    last, start = row.token_ids[-1], len(row) - 1
    ids = [*row.token_ids[:-1], last, *chain, *itertools.chain(*deeper)]
    width, first = shape.window, start + shape.window
    positions = [*range(first), *(start + 1 + j + i for j in range(len(deeper)) for i in range(width))]
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for q in range(first):
        sees[q, : q + 1] = True
    for j, i in itertools.product(range(len(deeper)), range(width)):
        q = first + j * width + i
        sees[q, : start + i + 1] = True
        for level in range(j + 1):
            sees[q, first + level * width + i] = True
    base, saved = model.base, model.base.config._attn_implementation
    base.config._attn_implementation = "eager"
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = base(torch.tensor([ids], device=DEVICE), attention_mask=mask[None, None].to(DEVICE),
                      position_ids=torch.tensor([positions], device=DEVICE), use_cache=False).logits[0]  # fmt: skip
    base.config._attn_implementation = saved
    _, columns = tiny.round._branches(row)
    tiny.round._copy_begun_blocks(columns)
    torch.testing.assert_close(tiny.runner.score_branches(columns).logits, logits[-width:], rtol=1e-4, atol=1e-4)


# ---- the text ----


@pytest.mark.parametrize("bitwise_range", [None, (1, 4), (2, 3), (2, 12)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gives_the_oracles_tokens(shape, bitwise_range):
    tiny = Tiny(model_of(), "lookahead", policy(shape), num_blocks=600, bitwise_range=bitwise_range)
    prompts = PROMPTS[:3] if bitwise_range else PROMPTS
    got = tiny.generate(prompts, GREEDY)
    assert [r.token_ids for r in got] == [oracle("llama", p, 24) for p in prompts]
    assert shape[0] < 3 or tiny.round.stats[0].num_accepted > 0


def test_guesses_beside_the_first_are_accepted_too_and_stand_where_they_belong(monkeypatch):
    """After every round the KV below a row's cursors is that of a fresh prefill, whichever branch had written it."""
    tiny = Tiny(layered_model(), "lookahead", SMALL)
    moved = []
    move = tiny.runner.move
    monkeypatch.setattr(tiny.runner, "move", lambda *slots: (moved.append(len(slots[0])), move(*slots)))
    requests = [tiny.request(p, GREEDY) for p in PROMPTS[:4]]
    for request in requests:
        tiny.engine.add(request)
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        for request in tiny.engine.running:
            row = request.row
            assert row is not None
            check_trunks(tiny, row)
    assert sum(moved[1::2]) > 0  # of each round: begun blocks, then what was accepted


@pytest.mark.parametrize("num_blocks", [40, 50])
def test_rows_that_make_way_and_come_back_keep_their_texts(num_blocks):
    tiny = Tiny(model_of(), "lookahead", Policy(lookahead_window=2, lookahead_ngram=2, lookahead_guesses=1),
                num_blocks=num_blocks)  # fmt: skip
    each = [SamplingParams(temperature=0.9, seed=b, max_tokens=30) for b in range(4)]
    plain = [Tiny(model_of(), "autoregressive").generate([p], q)[0].token_ids for p, q in zip(PROMPTS, each)]
    assert [r.token_ids for r in tiny.generate(PROMPTS[:4], each)] == plain
    assert tiny.engine.num_preemptions > 0


@pytest.mark.parametrize("length", range(24, 32))
def test_a_row_near_its_greatest_length_ends_there(length):
    prompt = tuple(range(2, 33))[:length]
    tiny = Tiny(model_of(), "lookahead", SMALL, max_model_len=32)
    (request,) = tiny.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert request.token_ids == oracle("llama", prompt, 32 - length)


def test_scratch_blocks_are_counted_where_a_request_could_never_fit():
    tiny = Tiny(model_of(), "lookahead", SMALL, num_blocks=20)
    assert tiny.round.num_scratch_blocks == 5 * 2
    tiny.engine.check_fits(tiny.request([5] * 30, SamplingParams(max_tokens=6)))
    with pytest.raises(ValueError, match=r"need 20 KV blocks of 4 \(10 for branches\), the pool has 19"):
        tiny.engine.check_fits(tiny.request([5] * 30, SamplingParams(max_tokens=10)))


def test_a_request_that_is_decoded_plainly_needs_no_scratch_blocks():
    tiny = Tiny(model_of(), "lookahead", SMALL, num_blocks=10)  # fewer than would be needed to look ahead
    (request,) = tiny.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=20, speculate=False))
    assert request.token_ids == oracle("llama", PROMPTS[0], 20)


def test_the_default_pool_holds_a_row_of_full_length_and_its_guesses(artifact):
    llm = LLM(artifact, "lookahead", max_num_seqs=1, device=str(DEVICE))
    (output,) = llm.generate([[5, 9, 3]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == llm.manifest.limits.max_model_len - 3


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (lambda row: row.block_table.__setitem__(0, 10_000), "block 10000"),
        (lambda row: row.block_table.__setitem__(-1, 0), "block 0"),
        (lambda row: row.token_ids.__setitem__(-1, 128), "token id 128"),
    ],
)
def test_a_branch_with_wrong_numbers_reaches_no_program(harm, cause):
    tiny = Tiny(model_of(), "lookahead", SMALL)
    request = tiny.request(PROMPTS[0], GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    harm(request.row)
    called = []
    tiny.runner._trunks = [(lambda *args: called.append(args), *rest) for _, *rest in tiny.runner._trunks]
    with pytest.raises(ProgramError) as error:
        tiny.runner.score_branches([own_branch(request.row, ()), *itertools.chain(*tiny.round._branches(request.row))])
    assert cause in str(error.value.__cause__) and not called


def test_a_program_that_fails_ends_the_rows_of_its_call_alone(monkeypatch):
    tiny = Tiny(model_of(), "lookahead", SMALL, bitwise_range=(1, 4))
    requests = [tiny.request(p, GREEDY) for p in PROMPTS[:3]]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    call = tiny.runner._call

    def failing(program, x, query):  # type: ignore[no-untyped-def]
        if requests[1].row in query.rows and requests[0].row not in query.rows and requests[2].row not in query.rows:
            raise ProgramError(query.rows)
        return call(program, x, query)

    monkeypatch.setattr(tiny.runner, "_call", failing)
    tiny.drain()
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert [requests[b].token_ids for b in (0, 2)] == [oracle("llama", PROMPTS[b], 24) for b in (0, 2)]


def test_calls_hold_a_branch_at_most_once_and_its_pieces_in_order():
    tiny = Tiny(model_of(), "lookahead", SMALL)
    request = tiny.request(PROMPTS[1], GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    branches = [own_branch(request.row, [1] * n) for n in (0, 4, 9, 2, 2)]
    for limit, most in itertools.product((None, 1, 3, 8), (1, 2, 16)):
        made = calls(branches, limit, most)
        for call in made:
            assert len({number for number, _ in call}) == len(call) <= most
            assert limit is None or len(call) * max(len(span) for _, span in call) <= limit
        for number, branch in enumerate(branches):
            got = [p for call in made for n, span in call if n == number for p in span]
            assert got == list(range(branch.start, branch.start + len(branch.token_ids)))


# ---- what is refused ----


def test_numbers_and_rules_that_it_can_not_have_are_refused():
    manifest = make_manifest(model_of())  # checked up to 32
    assert stages_of("lookahead", policy((30, 4, 1)), manifest)[0].lookahead.longest == 32
    with pytest.raises(ValueError, match=r"lookahead_window=31, lookahead_ngram=4 make a query of 33 tokens"):
        stages_of("lookahead", policy((31, 4, 1)), manifest)
    with pytest.raises(ValueError, match="lookahead_ngram=1 must be at least 2"):
        policy((3, 1, 1))
    with pytest.raises(ValueError, match=r"verification='rejection': lookahead verifies several guesses"):
        rule_of("rejection", stages_of("lookahead", SMALL, manifest), manifest)
    assert BLOCK_SIZE == 4  # which the numbers of blocks above rest on
