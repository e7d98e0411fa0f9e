"""Speculation stops where it does not pay and is tried again; no text depends on that."""

from __future__ import annotations

import itertools

import pytest
import torch

from infer.llm import LLM
from infer.params import SamplingParams
from infer.payoff import (
    FEWEST_PLAIN,
    FEWEST_SPECULATING,
    LONGEST_PAUSE,
    NUM_UNTIMED,
    ROUNDS_BETWEEN_PLAIN,
    SHORTEST_PAUSE,
    Payoff,
)
from infer.row import Row
from infer.strategy import Policy
from tests.infer.test_invariants import entries, fresh_row, layered_model, paged
from tests.tiny_engine import DEVICE, IN_PLACE, PROMPTS, Script, Tiny, model_of, oracle, texts_of

PLAIN, SPECULATING = 1.0, 1.5  # seconds of a round
GREEDY = SamplingParams(temperature=0, max_tokens=90)


def row(*, speculate: bool = True) -> Row:
    params = SamplingParams(speculate=speculate)
    return Row([1], params, seed=0, max_len=9, num_tiers=3, num_stages=2, blocks=[1], ring=1)


def play(payoff: Payoff, rows: list[Row], num_rounds: int, gain, seconds=(PLAIN, SPECULATING)) -> str:  # type: ignore[no-untyped-def]
    """Rounds in which speculation gives every row `gain(number)` tokens: p for a plain one, S for the others."""
    played = ""
    for number in range(num_rounds):
        is_speculating = payoff.choose(rows)
        played += "S" if is_speculating else "p"
        payoff.note(rows, [gain(number) if r.speculates else 1 for r in rows], seconds[is_speculating])
    return played


# ---- the decision ----


def test_speculation_that_pays_goes_on_but_for_a_plain_round_now_and_then():
    played = play(Payoff(), [row()], 400, lambda number: 2)
    assert played.startswith("p" * FEWEST_PLAIN + "S" * (NUM_UNTIMED + FEWEST_SPECULATING))
    assert [len(list(run)) for kind, run in itertools.groupby(played[7:]) if kind == "S"][1:-1] == [
        ROUNDS_BETWEEN_PLAIN - 1
    ] * 5
    assert played.count("pp") == 1  # in the beginning


def test_speculation_that_does_not_pay_is_tried_after_ever_longer_pauses():
    played = play(Payoff(), [row()], 800, lambda number: 1)
    pauses = [len(list(run)) for kind, run in itertools.groupby(played) if kind == "p"][1:]
    assert pauses[:7] == [SHORTEST_PAUSE - 1, 15, 31, 63, LONGEST_PAUSE - 1, LONGEST_PAUSE - 1, LONGEST_PAUSE - 1]
    assert played.count("S") < 16


def test_a_text_that_turns_foreseeable_is_speculated_in_again():
    payoff, rows = Payoff(), [row()]
    assert play(payoff, rows, 60, lambda number: 1).endswith("p" * 9)
    played = play(payoff, rows, 400, lambda number: 3)
    assert "S" * 50 in played


def test_break_even_is_the_ratio_of_times_whatever_the_gain():
    """1.5 tokens for 1.5 times the time: at 1.4 it stops, at 1.6 it goes on."""
    for gain, pays in ((1.4, False), (1.6, True)):
        played = play(Payoff(), [row()], 300, lambda number, gain=gain: gain)
        assert (played.count("S") > 250) == pays, played


def test_rounds_that_happen_to_gain_little_do_not_stop_a_text_that_pays():
    """Two tokens a round for 1.5 times the time, six tokens at once and then none for a while."""
    payoff = Payoff()
    play(payoff, [row()], 100, lambda number: 2)  # what texts usually gain
    played = play(payoff, [row()], 400, lambda number: 6 if number % 5 == 0 else 1)
    assert played.count("p") < 0.15 * len(played), played


def test_texts_that_gain_nothing_stay_plain_beside_texts_that_gain_much():
    """What texts usually gain pays here; in every second text it does not, and these have no more than trials."""
    payoff, shares = Payoff(), []
    for number in range(20):
        played = play(payoff, [row()], 150, lambda _, gain=1 if number % 2 else 4: gain)
        shares.append(played.count("S") / len(played))
    assert min(shares[2::2]) > 0.9 and max(shares[3::2]) < 0.2, shares


def test_a_new_text_begins_with_what_texts_usually_gain():
    payoff = Payoff()
    play(payoff, [row()], 300, lambda number: 1)
    assert payoff.choose([row()]) is False
    payoff = Payoff()
    play(payoff, [row()], 100, lambda number: 2)
    other = row()
    assert payoff.choose([other]) and other.speculates


def test_a_stall_of_the_machine_decides_nothing():
    payoff, rows = Payoff(), [row()]
    play(payoff, rows, 40, lambda number: 2)
    payoff.choose(rows)
    payoff.note(rows, [2], 100.0)
    assert play(payoff, rows, 20, lambda number: 2) == "S" * 20


def test_rows_that_ask_for_plain_decoding_never_speculate_and_count_as_such():
    payoff, rows = Payoff(), [row(), row(speculate=False), row(speculate=False), row(speculate=False)]
    played = play(payoff, rows, 200, lambda number: 2)  # a mean of 1.25 tokens for 1.5 times the time
    assert not any(r.speculates for r in rows[1:]) and played.count("S") < 15


def test_numbers_of_rows_have_times_of_their_own():
    payoff, one, many = Payoff(), [row()], [row() for _ in range(8)]
    assert "S" * 50 in play(payoff, one, 200, lambda number: 2)
    assert "S" * 9 not in play(payoff, many, 200, lambda number: 2, seconds=(1.0, 3.0))
    assert "S" * 20 in play(payoff, one, 40, lambda number: 2)


# ---- what exits take of prompts ----

PER_TOKEN = 0.2  # seconds that exits take of a prompt's token


def learnt(gain: int = 2) -> Payoff:
    """One that knows what rounds of one row take, and that texts gain so much."""
    payoff = Payoff()
    play(payoff, [row()], 100, lambda number: gain)
    return payoff


def waiting_row(num_prompt: int, num_to_come: int) -> Row:
    params = SamplingParams()
    made = Row(
        [1] * num_prompt,
        params,
        seed=0,
        max_len=num_prompt + num_to_come,
        num_tiers=3,
        num_stages=2,
        blocks=[1],
        ring=1,
    )
    made.exits_wait = True
    return made


def test_a_prompt_is_shown_to_exits_where_its_answer_may_repay_it():
    """Two tokens a round of 1.5 times the time save a quarter: of 200 tokens, 100 of which are likely, 25 s, which
    exits take of 125 tokens."""
    payoff = learnt()
    assert payoff.expects_gain(1, 200, 120, PER_TOKEN) and not payoff.expects_gain(1, 200, 130, PER_TOKEN)
    assert not learnt(1).expects_gain(1, 10**6, 10, PER_TOKEN)


def test_rows_of_a_batch_share_what_speculation_saves():
    payoff = Payoff()
    play(payoff, [row(), row(), row(), row()], 100, lambda number: 2)
    assert payoff.expects_gain(4, 200, 30, PER_TOKEN) and not payoff.expects_gain(4, 200, 33, PER_TOKEN)


def test_long_texts_have_times_of_their_own():
    """A step of a long text takes twice as long: what was learnt in it says nothing about short ones."""
    payoff, long = learnt(), waiting_row(2000, 500)
    long.exits_wait = False
    assert "S" * 30 in play(payoff, [long], 60, lambda number: 2, seconds=(2.0, 3.0))
    assert "S" * 9 not in play(payoff, [row()], 60, lambda number: 1.2)
    assert "S" * 30 in play(payoff, [row()], 60, lambda number: 2)
    assert not payoff.expects_gain(1, 200, 130, PER_TOKEN) and payoff.expects_gain(1, 2500, 2000, PER_TOKEN)


def test_as_long_as_times_are_unknown_exits_see_every_prompt():
    assert Payoff().expects_gain(1, 1, 10**6, PER_TOKEN) and learnt().expects_gain(8, 1, 10**6, PER_TOKEN)


def test_exits_catch_up_where_a_text_pays_for_that():
    for num_to_come, pays in ((220, True), (180, False)):
        payoff = learnt()
        payoff.note_fill(100, 100 * PER_TOKEN)
        played = play(payoff, [waiting_row(125, num_to_come)], 20, lambda number: 2)
        assert ("S" in played) == pays, played


def test_trials_take_no_more_of_prompts_than_what_is_set_aside():
    """Texts that gain nothing, 90 tokens each behind prompts of which exits would take 10 plain rounds: a trial is due
    in every text, and happens in as many as 2 % of plain decoding pay for."""
    payoff, num_fills, num_texts = learnt(1), 0, 200
    payoff.note_fill(100, 10.0)
    for _ in range(num_texts):
        waiting = waiting_row(100, 90)
        for _ in range(90):
            is_speculating = payoff.choose([waiting])
            if is_speculating and waiting.exits_wait:
                num_fills, waiting.exits_wait = num_fills + 1, False
                payoff.note_fill(100, 10.0)
            payoff.note([waiting], [1], PLAIN if not is_speculating else SPECULATING)
    assert 20 <= num_fills <= 0.02 * 90 * num_texts / 10


# ---- in the engine ----


class Alternating(Payoff):
    """Long plain stretches, so that rings would run over, and speculation between them."""

    def __init__(self, plain: int = 70, speculating: int = 4, *, expects: bool = True) -> None:
        super().__init__()
        self._turns = itertools.cycle([False] * plain + [True] * speculating)
        self._expects = expects

    def expects_gain(self, *_):  # type: ignore[no-untyped-def]
        return self._expects

    def _pays(self, rows):  # type: ignore[no-untyped-def]
        return next(self._turns)


@pytest.mark.parametrize("expects", [True, False], ids=["exits", "exits-wait"])
@pytest.mark.parametrize("turns", [(70, 4), (1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("strategy", [*IN_PLACE, "lookahead", "branches"])
def test_texts_are_plain_decodings_whenever_speculation_is_on(strategy, turns, expects):
    policy = Policy(num_draft_tokens=3, lookahead_window=2, lookahead_ngram=3, lookahead_guesses=2)
    if strategy == "branches":
        strategy, policy = "layerskip", Policy(num_draft_tokens=2, num_branches=2, branch_threshold=0.0)
    tiny = Tiny(layered_model(), strategy, policy)
    tiny.engine.payoff = Alternating(*turns, expects=expects)
    each = [GREEDY, SamplingParams(temperature=0.8, seed=4, max_tokens=90), GREEDY]
    plain = Tiny(layered_model(), "autoregressive").generate(PROMPTS[:3], each)
    assert [r.token_ids for r in tiny.generate(PROMPTS[:3], each)] == [r.token_ids for r in plain]


@pytest.mark.parametrize("expects", [True, False], ids=["exits", "exits-wait"])
@pytest.mark.parametrize("bitwise_range", [None, (1, 32)], ids=str)
@pytest.mark.parametrize("num_plain", [50, *range(57, 65), 74])
@pytest.mark.parametrize("strategy", ["layerskip", "hispec", "adadecode"])
def test_exits_keep_up_in_long_plain_stretches(strategy, num_plain, bitwise_range, expects):
    """All exits' keys below their cursors are those of a fresh prefill, however long nobody asked them."""
    policy = Policy(num_draft_tokens=3, exit_threshold=0.02)  # honest exits give 0.01 to 0.03
    tiny = Tiny(layered_model(), strategy, policy, bitwise_range=bitwise_range)
    tiny.engine.payoff = Alternating(num_plain, 2, expects=expects)
    request = tiny.request(PROMPTS[0], GREEDY)
    tiny.engine.add(request)
    for _ in range(num_plain + 2):
        tiny.engine.step()
    current = request.row
    assert current is not None and len(current) > num_plain and request.finish_reason != "error"
    other, fresh = fresh_row(tiny, current.token_ids)
    for (kind, tier, pages), (_, _, fresh_pages) in zip(paged(tiny), paged(other), strict=True):
        stop = current.exit_cursors[tier] if kind == "exit" else current.cursors[tier]
        assert tier > 0 or stop > num_plain
        mine, theirs = entries(pages, current, stop), entries(fresh_pages, fresh, stop)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expects", [True, False], ids=["exits", "exits-wait"])
def test_drafts_are_right_again_after_a_plain_stretch(expects):
    """With exits that are always right, every speculating round gains all that it can, the first after a pause too."""
    script = Script(texts_of("llama", PROMPTS[:1], 90), lambda *_: True)
    tiny = Tiny(model_of(), "layerskip", Policy(num_draft_tokens=3), rig=script)
    tiny.engine.payoff = Alternating(20, 2, expects=expects)
    request = tiny.request(PROMPTS[0], GREEDY)
    tiny.engine.add(request)
    lengths = [0]
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        lengths.append(len(request.token_ids))
    steps = [b - a for a, b in itertools.pairwise(lengths)]
    assert steps[:22] == [1] * 20 + [4] * 2
    assert request.token_ids == oracle("llama", PROMPTS[0], 90)


def filled(num_plain: int, **options) -> tuple[Tiny, Row, list[torch.Tensor]]:  # type: ignore[no-untyped-def]
    """An engine whose only row is about to speculate for the first time, that row, and copies of all pages."""
    tiny = Tiny(layered_model(), "hispec", Policy(num_draft_tokens=2), **options)
    tiny.engine.payoff = Alternating(num_plain, 2, expects=False)
    request = tiny.request(tuple(range(40, 71)), GREEDY)
    tiny.engine.add(request)
    for _ in range(num_plain):
        tiny.engine.step()
    assert request.row is not None and request.row.exits_wait
    return tiny, request.row, [page.clone() for page in tiny.runner._pages]


def test_exits_that_catch_up_change_no_bit_of_a_prompts_keys_in_trunks():
    tiny, waiting, before = filled(5)
    assert waiting.exit_cursors == [0, 0, 0]
    tiny.runner.fill_exits(waiting, tiny.round.judging_tiers)
    assert not waiting.exits_wait and waiting.exit_cursors[:2] == [len(waiting) - 1] * 2
    pages = list(zip(tiny.runner._pages, before, strict=True))
    num_layers, num_prompt = 2 * tiny.manifest.base.num_layers, waiting.num_prompt_tokens - 1
    for now, then in pages[:num_layers]:
        assert torch.equal(entries([now], waiting, num_prompt), entries([then], waiting, num_prompt))
    assert not any(torch.equal(now, then) for now, then in pages[num_layers:])


def test_a_program_that_fails_while_exits_catch_up_fails_its_row_and_no_other():
    tiny, _, _ = filled(5)
    (request,) = tiny.engine.running
    other = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=9, speculate=False))
    tiny.engine.add(other)
    run, *rest = tiny.runner._exits[0]

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of order")

    tiny.runner._exits[0] = (broken, *rest)
    tiny.engine.step()
    tiny.runner._exits[0] = (run, *rest)
    tiny.drain()
    assert request.finish_reason == "error" and other.finish_reason == "length"
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1


def test_what_others_are_to_read_is_computed_with_exits_at_once():
    for n, caching in ((2, False), (1, True)):
        tiny = Tiny(layered_model(), "layerskip", enable_prefix_caching=caching)
        tiny.engine.payoff = Alternating(expects=False)
        request = tiny.request(PROMPTS[0], SamplingParams(temperature=0.8, seed=1, n=n, max_tokens=4))
        tiny.engine.add(request)
        tiny.engine.step()
        assert request.row is not None and not request.row.exits_wait
        tiny.drain()


def test_a_row_that_never_speculates_shows_exits_nothing():
    tiny = Tiny(layered_model(), "layerskip")
    request = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, speculate=False))
    tiny.engine.add(request)
    tiny.drain()
    assert request.row is not None and request.row.exit_cursors == [0, 0, 0]


# ---- in the LLM ----


def test_it_is_learnt_for_each_setting_and_kept(artifact):
    llm = LLM(artifact, "layerskip", adaptive=True, device=str(DEVICE))
    first = llm.engine.payoff
    assert first is not None
    llm.use("layerskip", Policy(num_draft_tokens=4), adaptive=True)
    assert llm.engine.payoff is not first
    llm.use("layerskip", Policy(), adaptive=True)
    assert llm.engine.payoff is first
    llm.use("layerskip", Policy())
    assert llm.engine.payoff is None
    llm.use("autoregressive", adaptive=True)
    assert llm.engine.payoff is None


def test_it_is_refused_where_texts_would_depend_on_it(artifact):
    with pytest.raises(ValueError, match=r"adaptive=True with verification='rejection': its texts depend on what"):
        LLM(artifact, "layerskip", verification="rejection", adaptive=True, device=str(DEVICE))
    llm = LLM(artifact, "layerskip", device=str(DEVICE))
    with pytest.raises(ValueError, match=r"adaptive=True with verification='rejection'"):
        llm.use("layerskip", verification="rejection", adaptive=True)
    assert llm.engine.payoff is None
