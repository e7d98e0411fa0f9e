"""Rounds walked over picks, by hand and against the engine's own rule; figures add up over batches."""

import random

import pytest
import torch

from infer.strategy import Policy
from infer.verify import verify
from train.acceptance import Acceptance, Walk, run_lengths
from train.costs import single_exit_speedup, walk_speedup
from train.figures import Figures
from train.linear_loss import LossSum


def breaks(*starts, size):
    flags = torch.zeros(size, dtype=torch.bool)
    flags[list(starts)] = True
    return flags


def test_run_lengths_stop_at_a_mismatch_at_four_and_at_a_break():
    matches = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1]).bool()
    assert run_lengths(matches, breaks(0, 8, size=10), 4).tolist() == [2, 1, 0, 4, 4, 3, 2, 1, 2, 1]


def test_acceptance_walks_rounds_as_the_engine_does():
    acceptance = Acceptance(4)
    judged = torch.zeros(10, dtype=torch.int64)
    drafted = torch.tensor([0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    acceptance.update(drafted, judged, breaks(0, size=10))
    # rounds start at 0 (2 accepted), 3 (4 accepted), 8 (2 accepted, the text ends)
    assert acceptance.accepted == [3, 3, 1, 1] and acceptance.num_rounds == 3
    assert acceptance.rates == [1, 1, 1 / 3, 1 / 3]
    assert acceptance.length == 1 + 8 / 3 == pytest.approx(1 + sum(acceptance.rates))
    assert acceptance.agreement == 0.9


def test_the_draft_at_each_place_of_a_round_is_the_one_made_there():
    """Three places: the first is right at even positions, the second at odd ones, those behind nowhere."""
    judged = torch.zeros(9, dtype=torch.int64)
    even = torch.arange(9) % 2
    drafted = torch.stack([even, 1 - even, torch.ones(9, dtype=torch.int64)])
    acceptance = Acceptance(4)
    acceptance.update(drafted, judged, breaks(0, size=9))
    # from 0: right, right, wrong → 3; from 3: wrong → 4; from 4 → 7; from 7: wrong → 8; from 8: right, the text ends
    assert acceptance.num_rounds == 5 and acceptance.accepted == [3, 2, 0, 0]
    assert acceptance.agreement == 5 / 9
    walk = Walk(Policy(num_draft_tokens=4), [0, 0])
    walk.update([drafted, judged], breaks(0, size=9))
    assert walk.calls[1] == 5


def test_a_walks_places_count_from_the_last_full_verification():
    """The middle tier keeps all; the draft is right at the first two places after the target's own token alone."""
    judged = torch.zeros(12, dtype=torch.int64)
    drafted = torch.stack([judged, judged, torch.ones(12, dtype=torch.int64)])
    walk = Walk(Policy(num_draft_tokens=2, window=4, inner_rounds=4), [0, 0, 0])
    walk.update([drafted, judged, judged], breaks(0, size=12))
    # a round: 2 drafts + the middle's own = 3 tokens, then 2 wrong drafts + its own = 1 token; the target adds one: 5
    assert walk.calls == [10, 5, 3]


def random_picks(seed, num_tiers=3, size=60):
    draw = random.Random(seed)
    return [torch.tensor([draw.randrange(2) for _ in range(size)]) for _ in range(num_tiers)]


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_over_one_exit_is_the_walk_of_acceptance(seed):
    draft, target = random_picks(seed, num_tiers=2)
    acceptance, walk = Acceptance(3), Walk(Policy(num_draft_tokens=3), [0, 0])
    acceptance.update(draft, target, breaks(0, 40, size=60))
    walk.update([draft, target], breaks(0, 40, size=60))
    assert walk.calls[1] == acceptance.num_rounds and walk.num_tokens == 60


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", [Policy(), Policy(num_draft_tokens=3, window=5, inner_rounds=2)])
def test_a_walk_over_two_exits_is_the_round_spelt_out(seed, policy):
    draft, middle, target = (tier.tolist() for tier in random_picks(seed))
    calls, position, size = [0, 0, 0], 0, 60
    while position < size:
        waiting: list[int] = []  # the middle exit's tokens
        for _ in range(policy.inner_rounds):
            start = position + len(waiting)
            if len(waiting) >= policy.window or start >= size:
                break
            drafted = draft[start : start + policy.num_draft_tokens]
            verdict = verify(drafted, [*middle[start:], 9][: len(drafted) + 1])
            waiting += [*drafted[: verdict.num_accepted], verdict.own_token]
            calls[0] += len(drafted)
            calls[1] += 1
        position += verify(waiting, [*target[position:], 8, 8][: len(waiting) + 1]).num_accepted + 1
        calls[2] += 1
    walk = Walk(policy, [0, 0, 0])
    walk.update([torch.tensor(tier) for tier in (draft, middle, target)], breaks(0, size=size))
    assert walk.calls == calls


def test_a_perfect_exit_gives_the_speed_of_its_cost():
    same = torch.zeros(12, dtype=torch.int64)
    acceptance, walk = Acceptance(3), Walk(Policy(num_draft_tokens=2, window=4, inner_rounds=4), [0, 0, 0])
    acceptance.update(same, same, breaks(0, size=12))
    walk.update([same, same, same], breaks(0, size=12))
    assert single_exit_speedup(acceptance, 0.1, 1.0) == pytest.approx(4 / 1.3)
    # 7 tokens a round: two inner rounds of 2 drafts + 1, the target's own; the last round ends with the text
    assert walk.calls[2] == 2
    assert walk_speedup(walk, [0.1, 0.3, 1.0]) == pytest.approx(12 / (walk.calls[0] * 0.1 + walk.calls[1] * 0.3 + 2))


def test_a_useless_exit_is_predicted_to_slow_down_and_by_the_fewest_drafts():
    acceptance = Acceptance(4)
    acceptance.update(torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), breaks(0, size=8))
    assert acceptance.length == 1 and single_exit_speedup(acceptance, 0.25, 1.0) == 0.8


def test_figures_of_two_ranks_add_up_to_those_of_one():
    names, costs = ("draft", "intermediate"), {"draft": 0.1, "intermediate": 0.4, "target": 1.0}
    whole, ranks = Figures(names, costs, 3), [Figures(names, costs, 3) for _ in range(2)]
    for seed in range(4):
        picks = dict(zip((*names, "target"), random_picks(seed)))
        losses = {name: LossSum(torch.tensor(float(seed)), {"kl": torch.tensor(2.0 * seed)}) for name in names}
        for figures in (whole, ranks[seed % 2]):
            figures.update(losses, picks, breaks(0, 20, size=60))
    added = [sum(pair) for pair in zip(*(rank.sums() for rank in ranks))]
    ranks[0].set_sums(added)
    assert ranks[0].named() == whole.named()
    assert whole.named()["draft/kl"] == 2 * whole.named()["draft/loss"] == 12 / 240
    pairs = {f"{d}/acceptance_rate_{j}{s}" for d, s in [("draft", ""), ("draft", "_intermediate")] for j in (1, 2, 3)}
    assert pairs | {"speedup", "hispec_speedup", "draft/speedup", "intermediate/speedup"} <= set(whole.named())
