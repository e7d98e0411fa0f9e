import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.params import SamplingParams
from infer.sampler import PickParams, cutoffs, pick, probabilities

LOGITS = torch.tensor([0.4, 0.35, 0.15, 0.1]).log()


def law(logits: list[float], params: SamplingParams) -> list[float]:
    """The definition of the filters, by enumerating every possible cutoff."""
    if params.is_greedy:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    allowed = set(range(len(logits)))
    if params.top_k > 0:
        kth = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        allowed = {i for i in allowed if logits[i] >= kth}
    top = max(logits)
    if params.min_p > 0:
        allowed = {i for i in allowed if logits[i] >= top + params.temperature * math.log(params.min_p)}
    mass = {i: math.exp((logits[i] - top) / params.temperature) for i in allowed}
    total = math.fsum(mass.values())
    for cutoff in sorted({logits[i] for i in allowed}, reverse=True):
        nucleus = [i for i in allowed if logits[i] >= cutoff]
        if params.top_p < 1 and math.fsum(mass[i] for i in nucleus) / total >= params.top_p:
            allowed = set(nucleus)
            break
    total = math.fsum(mass[i] for i in allowed)
    return [mass[i] / total if i in allowed else 0.0 for i in range(len(logits))]


def of(*params: SamplingParams, seeds=None, positions=None) -> PickParams:
    return PickParams.of(params, seeds or [0] * len(params), positions or [0] * len(params))


def draws(params: SamplingParams, logits: torch.Tensor, num: int, **keys) -> torch.Tensor:
    """One pick per position 0..num-1 of one request, or per seed."""
    row = of(params, seeds=[keys.get("seed", 0)]).at(torch.zeros(num, dtype=torch.int64), torch.arange(num))
    return pick(logits.expand(num, -1), row)


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=2),
    SamplingParams(top_k=3, temperature=0.7),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.5, temperature=1.5),
    SamplingParams(top_k=3, top_p=0.8),
    SamplingParams(min_p=0.4),
    SamplingParams(min_p=0.3, temperature=2.0, top_k=3, top_p=0.8),
]


@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_picks_follow_the_exact_law(params):
    num = 20_000
    expected = probabilities(LOGITS[None], of(params))[0]
    counts = torch.bincount(draws(params, LOGITS, num, seed=12), minlength=4)
    support = expected > 0
    assert counts[~support].sum() == 0
    assert scipy.stats.chisquare(counts[support].numpy(), num * expected[support].numpy()).pvalue > 0.001


@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.51, 2.0]), min_size=1, max_size=8),
    st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5]),
    st.integers(-1, 9),
    st.sampled_from([1e-9, 0.11, 0.37, 0.63, 0.9, 0.999999, 1.0]),
    st.sampled_from([0.0, 1e-9, 0.02, 0.3, 0.99, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_probabilities_equal_the_definition(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities(torch.tensor([logits], dtype=torch.float64), of(params))[0]
    torch.testing.assert_close(got, torch.tensor(law(logits, params), dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_min_p_keeps_what_is_near_the_most_probable_after_temperature():
    """p = .4, .35, .15, .1: the third is 0.375 of the first, at temperature 2 it is the root of that, 0.61."""
    for temperature, min_p, num_kept in ((1.0, 0.37, 3), (1.0, 0.38, 2), (2.0, 0.6, 3), (2.0, 0.62, 2), (1.0, 1.0, 1)):
        law_ = probabilities(LOGITS[None], of(SamplingParams(temperature=temperature, min_p=min_p)))[0]
        assert int((law_ > 0).sum()) == num_kept


def test_min_p_comes_before_top_p():
    """min_p leaves .4 and .35, of which top_p = 0.5 keeps the first alone; by itself it would need both."""
    both, alone = SamplingParams(min_p=0.5, top_p=0.5), SamplingParams(top_p=0.5)
    law_ = probabilities(LOGITS.repeat(2, 1), of(both, alone))
    assert (law_ > 0).sum(dim=1).tolist() == [1, 2]


def test_temperature_and_top_k_have_their_effect():
    # Known failure A12: probabilities were filtered, then argmax was returned.
    logits = torch.tensor([[0.4, 0.35, 0.25]]).log()
    seeds = torch.arange(300)
    for top_k, tokens in ((0, {0, 1, 2}), (2, {0, 1}), (1, {0})):
        params = PickParams.of([SamplingParams(top_k=top_k)] * 300, seeds.tolist(), [4] * 300)
        picked = pick(logits.expand(300, -1), params)
        assert set(picked.tolist()) == tokens
    assert scipy.stats.chisquare(
        torch.bincount(draws(SamplingParams(), logits[0], 300), minlength=3).numpy(), [120, 105, 75]
    ).pvalue > 0.001  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-5, 1e-39])
def test_tiny_temperatures_act_as_greedy_beside_a_normal_row(dtype, temperature):
    # Known failure A14: T = 1e-5 overflowed fp16, T = 1e-39 fp32, and the NaN took the neighbours down.
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype) * 20
    tiny, normal = SamplingParams(temperature=temperature), SamplingParams(top_p=0.9)
    for partner in (normal, SamplingParams()):
        picked = pick(logits, of(tiny, partner, seeds=[1, 2]))
        assert picked[0] == logits[0].argmax()
        assert picked[1] == pick(logits[1:], of(partner, seeds=[2]))[0]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), *SETTINGS])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_row_of_broken_logits_fails_alone(params, bad):
    logits = LOGITS.repeat(3, 1)
    logits[1, 2 if math.isnan(bad) else slice(None)] = bad
    picked = pick(logits, of(params, params, params, seeds=[1, 2, 3]))
    assert picked[1] == -1
    assert picked[[0, 2]].tolist() == pick(LOGITS.repeat(2, 1), of(params, params, seeds=[1, 3])).tolist()


def test_greedy_takes_the_first_of_equal_logits_also_beside_sampling_rows():
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0])
    greedy = SamplingParams(temperature=0)
    assert pick(logits[None], of(greedy)).item() == 1
    for partner in (SamplingParams(), SamplingParams(top_k=2)):
        assert pick(logits.repeat(20, 1), of(*[greedy] * 19, partner, seeds=list(range(20))))[
            :19
        ].unique().tolist() == [1]


@st.composite
def batches(draw):
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 1e-9, 0.4, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 40]),
        top_p=st.sampled_from([1e-9, 0.3, 0.8, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    )
    rows = draw(st.lists(params, min_size=1, max_size=6))
    seeds = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(rows), max_size=len(rows)))
    return rows, seeds, draw(st.integers(0, 1000)), draw(st.booleans())


@given(batches())
@settings(max_examples=150, deadline=None)
def test_a_pick_does_not_depend_on_the_other_rows(batch):
    rows, seeds, salt, trimmed = batch
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(salt)).half()
    ids = torch.arange(30) * 7 + 3 if trimmed else None
    together = pick(logits, PickParams.of(rows, seeds, [salt] * len(rows)), ids)
    for i, row in enumerate(rows):
        alone = pick(logits[i : i + 1], PickParams.of([row], [seeds[i]], [salt]), ids)
        assert alone.item() == together[i]


def test_a_trimmed_vocabulary_gets_the_noise_of_its_real_ids():
    # If the dropped ids are impossible, the trimmed head and the full head must pick the same tokens.
    ids = torch.tensor([2, 3, 11, 17])
    full = torch.full((20,), -math.inf)
    full[ids] = LOGITS
    for params in SETTINGS:
        row = of(params, seeds=[5]).at(torch.zeros(200, dtype=torch.int64), torch.arange(200))
        trimmed = pick(LOGITS.expand(200, -1), row, ids)
        assert torch.equal(trimmed, pick(full.expand(200, -1), row))
        assert set(trimmed.tolist()) <= set(ids.tolist())


def test_equal_seeds_repeat_and_other_seeds_or_positions_differ():
    logits = torch.zeros(1000)
    assert torch.equal(draws(SamplingParams(), logits, 50, seed=1), draws(SamplingParams(), logits, 50, seed=1))
    assert not torch.equal(draws(SamplingParams(), logits, 50, seed=1), draws(SamplingParams(), logits, 50, seed=2))
    assert draws(SamplingParams(), logits, 50).unique().numel() > 40


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_looking_at_few_candidates_gives_the_cutoff_of_the_full_sort(spread, dtype):
    # 4,000 ids: near spread 0 the nucleus is far larger than the candidates, bf16 has many ties.
    logits = (torch.randn(12, 4000, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
    rows = [
        SamplingParams(top_p=p, top_k=k) for p in (1e-9, 0.5, 0.95, 0.999999) for k in (0, 10, 2000)
    ]  # fmt: skip
    full = cutoffs(logits, of(*rows), num_candidates=4000)
    for num_candidates in (1, 16, 1024):
        assert torch.equal(cutoffs(logits, of(*rows), num_candidates), full)


def test_no_filter_keeps_the_far_tail():
    # Cumulated probabilities reach 1.0 in float64 long before the last id: top_p = 1 must not be computed.
    logits = torch.tensor([[0.0, -50.0, -60.0]])
    rows = of(SamplingParams(), SamplingParams(top_p=0.5))
    assert (probabilities(logits.repeat(2, 1), rows) > 0).tolist() == [[True, True, True], [True, False, False]]


def test_at_repeats_a_row_for_every_token_that_it_picks():
    rows = of(SamplingParams(temperature=0.5), SamplingParams(top_k=3), seeds=[8, 9])
    picked = rows.at(torch.tensor([1, 1, 0]), torch.tensor([5, 6, 7]))
    assert (picked.top_k.tolist(), picked.seed.tolist(), picked.position.tolist()) == ([3, 3, 0], [9, 9, 8], [5, 6, 7])
