"""The rejection rule is exact in law: proved over fractions by walking through all that can happen.

A whole round is played with the rule's own functions: the draft exit, whose vocabulary is trimmed, proposes, the
intermediate judges token by token, in as many inner rounds as the window takes, the target judges the block. What it
commits, continued by the target alone, must have the target's law over all texts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from infer.rejection import block_chances, left_over, num_in_block, num_in_sequence, token_chances
from infer.verify import Verdict

VOCAB = 3
TRIMMED = (0, 2)  # what the draft exit can propose
LENGTH = 5  # tokens of the texts that are compared

Text = tuple[int, ...]
LawOf = Callable[[Text], np.ndarray]  # of the token after a text
Spread = Iterator[tuple[Fraction, Verdict]]  # what a judge may say, and how often


def make_law(salt: int, ids: tuple[int, ...] = tuple(range(VOCAB))) -> LawOf:
    """Some law that depends on all tokens before; other ids than `ids` have none."""

    def law(text: Text) -> np.ndarray:
        weights = np.array([Fraction(0)] * VOCAB, dtype=object)
        for token in ids:
            weights[token] = Fraction(
                1 + (7 * salt + 5 * token + sum((i + 2) * (t + 1) for i, t in enumerate(text)) * (token + salt)) % 11
            )
        return weights / weights.sum()

    return law


def outcomes(chances: list[Fraction]) -> Iterator[tuple[Fraction, list[bool]]]:
    for passed in itertools.product([True, False], repeat=len(chances)):
        share = Fraction(1)
        for chance, has_passed in zip(chances, passed, strict=True):
            share *= chance if has_passed else 1 - chance
        if share:
            yield share, list(passed)


def judged(p: list[np.ndarray], q: list[np.ndarray], drafted: Text, is_target: bool) -> Spread:
    """Every verdict on the drafted tokens, with its probability."""
    if is_target:
        chances, weights = block_chances(p, q, drafted)
    else:
        chances, weights = token_chances(p, q, drafted), [1] * len(drafted)
    for share, passed in outcomes(chances):
        number = (num_in_block if is_target else num_in_sequence)(passed)
        own = p[number] if number == len(drafted) else left_over(p[number], q[number], weights[number])
        for token, weight in enumerate(own / own.sum()):
            if weight:
                yield share * weight, Verdict(number, token)


def sampled(law: LawOf, text: Text, count: int, least: Fraction = Fraction(0)) -> Iterator[tuple[Fraction, Text]]:
    """All texts of `count` more tokens, or fewer: none follows a token whose law gave no id the probability `least`."""
    if count == 0:
        yield Fraction(1), text
        return
    chances = law(text)
    left = count - 1 if max(chances) >= least else 0
    for token, share in enumerate(chances):
        if share:
            for rest, longer in sampled(law, (*text, token), left, least):
                yield share * rest, longer


def laws_along(law: LawOf, text: Text, start: int) -> list[np.ndarray]:
    return [law(text[:n]) for n in range(start, len(text) + 1)]


# Decides after the tokens so far whether a further inner round follows: (text, number of rounds) → bool
Stop = Callable[[Text, int], bool]


def tentative(
    draft: LawOf,
    middle: LawOf,
    gamma: int,
    has_more: Stop,
    text: Text = (),
    number: int = 0,
    least: Fraction = Fraction(0),
):
    """What the intermediate leaves for the target, with its probability; both exits stop where they are unsure."""
    if not has_more(text, number):
        yield Fraction(1), text
        return
    for share, drafted in sampled(draft, text, gamma, least):
        p, q = laws_along(middle, drafted, len(text)), laws_along(draft, drafted, len(text))
        for chance, verdict in judged(p, q, drafted[len(text) :], is_target=False):
            kept = (*drafted[: len(text) + verdict.num_accepted], verdict.own_token)
            if max(p[verdict.num_accepted]) < least:
                yield share * chance, kept
                continue
            for rest, longer in tentative(draft, middle, gamma, has_more, kept, number + 1, least):
                yield share * chance * rest, longer


def committed(blocks, middle: LawOf, target: LawOf):
    """What the target makes of blocks that were drawn from the intermediate's law."""
    for share, block in blocks:
        p, q = laws_along(target, block, 0), laws_along(middle, block, 0)
        for chance, verdict in judged(p, q, block, is_target=True):
            yield share * chance, (*block[: verdict.num_accepted], verdict.own_token)


def law_of_texts(parts, target: LawOf, length: int = LENGTH) -> dict[Text, Fraction]:
    """Of the first `length` tokens, once the target alone has continued what is shorter."""
    law: dict[Text, Fraction] = defaultdict(Fraction)
    for share, text in parts:
        for rest, longer in sampled(target, text[:length], length - len(text[:length])):
            law[longer] += share * rest
    return dict(law)


def plain(target: LawOf, length: int = LENGTH) -> dict[Text, Fraction]:
    return {text: share for share, text in sampled(target, (), length)}


DRAFT, MIDDLE, TARGET = make_law(1, TRIMMED), make_law(2), make_law(3)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("proposer", [DRAFT, MIDDLE, TARGET], ids=["trimmed", "full", "equal"])
def test_a_block_judged_by_the_target_has_the_targets_law(proposer, size):
    assert law_of_texts(committed(sampled(proposer, (), size), proposer, TARGET), TARGET) == plain(TARGET)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_what_the_intermediate_lets_pass_has_its_own_law(gamma):
    one_round = tentative(DRAFT, MIDDLE, gamma, lambda text, number: number < 1)
    assert law_of_texts(one_round, MIDDLE) == plain(MIDDLE)


@pytest.mark.parametrize(("gamma", "window", "rounds"), [(1, 2, 2), (2, 2, 2), (2, 3, 2), (1, 3, 3)])
def test_two_stages_have_the_targets_law(gamma, window, rounds):
    blocks = tentative(DRAFT, MIDDLE, gamma, lambda text, number: len(text) < window and number < rounds)
    assert law_of_texts(committed(blocks, MIDDLE, TARGET), TARGET) == plain(TARGET)


@pytest.mark.parametrize("middle_ids", [(0, 1), (1, 2), (1,)], ids=str)
def test_exits_of_different_vocabularies_have_the_targets_law(middle_ids):
    """The draft's ids are not all the intermediate's, nor the other way round."""
    middle = make_law(4, middle_ids)
    blocks = tentative(DRAFT, middle, 2, lambda text, number: len(text) < 2)
    assert law_of_texts(committed(blocks, middle, TARGET), TARGET) == plain(TARGET)


@pytest.mark.parametrize("block", [(1,), (0, 2, 2), (2, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("target", [TARGET, make_law(4, (1, 2))], ids=["anything", "some ids never"])
def test_a_block_that_was_looked_up_leaves_the_targets_law(block, target):
    """Its tokens were certain, so q is 1 on each of them."""

    def certain(text: Text) -> np.ndarray:
        return np.array([Fraction(int(i == block[len(text) % len(block)])) for i in range(VOCAB)], dtype=object)

    blocks = list(sampled(certain, (), len(block)))
    assert blocks == [(1, block)]
    assert law_of_texts(committed(blocks, certain, target), target) == plain(target)


def test_a_stop_that_looks_at_the_tokens_before_is_exact():
    blocks = tentative(DRAFT, MIDDLE, 1, lambda text, number: number < 3 and (not text or text[-1] != 1))
    assert law_of_texts(committed(blocks, MIDDLE, TARGET), TARGET) == plain(TARGET)


@pytest.mark.parametrize("least", [Fraction(2, 5), Fraction(1, 2), Fraction(3, 5)], ids=str)
def test_a_stop_where_an_exit_is_unsure_is_exact(least):
    """Each of them cuts some drafts and some windows short and leaves others."""
    blocks = list(tentative(DRAFT, MIDDLE, 2, lambda text, number: len(text) < 3 and number < 2, least=least))
    assert len({len(block) for _, block in blocks}) > 1
    assert law_of_texts(committed(blocks, MIDDLE, TARGET), TARGET) == plain(TARGET)


def test_a_stop_that_looks_at_the_token_itself_is_not():
    """The proof can fail: a block that leaves out its last token where that is 1."""
    whole = tentative(DRAFT, MIDDLE, 1, lambda text, number: number < 2)
    blocks = ((share, text[:-1] if text[-1] == 1 else text) for share, text in whole)
    assert law_of_texts(committed(blocks, MIDDLE, TARGET), TARGET) != plain(TARGET)


def lowest_sure(least: Fraction, *exits: LawOf) -> LawOf:
    """AdaDecode's exit for the token after a text: the lowest that gives some id so much; no weight where none does."""

    def law(text: Text) -> np.ndarray:
        sure = [one(text) for one in exits if max(one(text)) >= least]
        return sure[0] if sure else np.array([Fraction(0)] * VOCAB, dtype=object)

    return law


def drafted_by(law: LawOf, count: int, text: Text = ()) -> Iterator[tuple[Fraction, Text]]:
    """Texts of up to `count` tokens of the law, which end where it has none."""
    if count == 0 or not law(text).any():
        yield Fraction(1), text
        return
    for token, share in enumerate(law(text)):
        if share:
            for rest, longer in drafted_by(law, count - 1, (*text, token)):
                yield share * rest, longer


@pytest.mark.parametrize(
    ("salts", "least"), [((6, 2), Fraction(2, 5)), ((1, 2), Fraction(1, 2)), ((7, 5), Fraction(3, 5))]
)
def test_tokens_from_the_lowest_exit_that_is_sure_have_the_targets_law(salts, least):
    """AdaDecode: which exit, and whether any, follows from laws that were there before the token was drawn."""
    draft, middle = map(make_law, salts)
    law = lowest_sure(least, draft, middle)
    blocks = list(drafted_by(law, 3))
    assert {len(block) for _, block in blocks} == {1, 2, 3}
    assert len({max(draft(block[:n])) < least for _, block in blocks for n in range(len(block))}) == 2  # both are used
    assert law_of_texts(committed(blocks, law, TARGET), TARGET) == plain(TARGET)


def test_an_exit_chosen_by_the_token_that_it_drew_is_not_exact():
    """The draft exit's token is kept where it is probable itself, else the intermediate draws in its place."""
    draft, blocks = make_law(1), []  # the trimmed one would divide by zero
    least = sorted(draft(()))[1]
    for token, share in enumerate(draft(())):
        if share >= least:
            blocks.append((share, (token,)))
        else:
            blocks += [(share * other, (i,)) for i, other in enumerate(MIDDLE(()))]
    assert sum(share for share, _ in blocks) == 1 and len(blocks) > 3
    assert law_of_texts(committed(blocks, lowest_sure(least, draft, MIDDLE), TARGET), TARGET) != plain(TARGET)


def test_judging_the_second_stage_by_the_drafts_law_is_not_exact():
    """q of the target is the intermediate's law, as its verdict made the tokens its own."""
    blocks = [*tentative(DRAFT, MIDDLE, 1, lambda text, number: number < 1)]
    full_draft = make_law(1)  # the trimmed one would divide by zero
    assert law_of_texts(committed(blocks, full_draft, TARGET), TARGET) != plain(TARGET)


def test_a_block_is_accepted_at_least_as_far_as_token_by_token():
    """Sun et al., Theorem 2."""

    def mean_accepted(is_target: bool) -> Fraction:
        total = Fraction(0)
        for share, block in sampled(MIDDLE, (), 3):
            p, q = laws_along(TARGET, block, 0), laws_along(MIDDLE, block, 0)
            total += share * sum(c * verdict.num_accepted for c, verdict in judged(p, q, block, is_target))
        return total

    assert mean_accepted(True) > mean_accepted(False)


def test_greedy_drafts_are_judged_by_a_law_of_one_token():
    """The draft takes its most probable token, so its q is 1 there; its softmax would give .7, .175, 0, .125."""
    p = np.array([Fraction(n, 100) for n in (50, 30, 15, 5)], dtype=object)
    softmax = np.array([Fraction(n, 10) for n in (1, 2, 3, 4)], dtype=object)
    one_hot = np.array([Fraction(int(i == 3)) for i in range(4)], dtype=object)

    def law(q: np.ndarray, is_target: bool) -> list[Fraction]:
        shares = [Fraction(0)] * 4
        for share, verdict in judged([p, p], [q], (3,), is_target):
            shares[3 if verdict.num_accepted else verdict.own_token] += share
        return shares

    for is_target in (False, True):
        assert law(one_hot, is_target) == list(p)
        assert law(softmax, is_target) == [Fraction(7, 10), Fraction(7, 40), 0, Fraction(1, 8)]


def test_equal_laws_accept_everything_and_disjoint_ones_nothing():
    p = [TARGET(()), TARGET((1,)), TARGET((1, 2))]
    assert block_chances(p, p[:2], (1, 2)) == ([1, 1], [1, 1, 1])
    assert token_chances(p, p[:2], (1, 2)) == [1, 1]
    left, right = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert block_chances([left, left], [right], (1,))[0] == token_chances([left, left], [right], (1,)) == [0.0]
