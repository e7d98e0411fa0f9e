"""Every term of the loss: closed forms by hand, what lost mass does, and slopes against float64 autograd."""

import math

import pytest
import torch

from train.losses import TERMS, ExitLoss, Laws, TargetLaw, evaluate

P = [0.5, 0.3, 0.2]  # the target's law; the last id is lost where the vocabulary is trimmed to two
Q = [0.25, 0.75]


def laws(p, q, num_kept=None, label=0):
    """One token's laws from probabilities; the first `num_kept` ids are those that the exit can propose."""
    logits = torch.tensor([p], dtype=torch.float64).log() + 3.0  # a softmax doesn't see the shift
    kept = logits[:, :num_kept]
    partition = None if num_kept is None else logits.logsumexp(-1)
    return Laws(TargetLaw(kept, partition), torch.tensor([q], dtype=torch.float64).log() - 1, torch.tensor([label]))


def value(term, *args, **options):
    settings = {term: 1.0, **{k: options.pop(k) for k in ("top_k",) if k in options}}
    return float(evaluate(ExitLoss(**settings), laws(*args, **options))[0])


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q))


WHOLE_Q = [0.2, 0.2, 0.6]
MEAN = [(a + b) / 2 for a, b in zip(P, WHOLE_Q)]


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ("kl", kl(P, WHOLE_Q)),
        ("reverse_kl", kl(WHOLE_Q, P)),
        ("jsd", (kl(P, MEAN) + kl(WHOLE_Q, MEAN)) / 2),
        ("tv", 0.4),
        ("ce", -math.log(0.2)),
    ],
)
def test_terms_on_the_whole_vocabulary_have_their_closed_forms(term, expected):
    assert value(term, P, WHOLE_Q) == pytest.approx(expected, abs=1e-12)


def test_topk_kl_is_the_kl_over_the_likeliest_ids_and_one_rest():
    assert value("topk_kl", P, WHOLE_Q, top_k=1) == pytest.approx(kl([0.5, 0.5], [0.2, 0.8]), abs=1e-12)
    assert value("topk_kl", P, WHOLE_Q, top_k=3) == pytest.approx(kl(P, WHOLE_Q), abs=1e-12)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ("kl", 0.8 * kl([0.625, 0.375], Q)),
        ("reverse_kl", 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.3)),
        (
            "jsd",
            (0.5 * math.log(0.5 / 0.375) + 0.3 * math.log(0.3 / 0.525) + 0.2 * math.log(2)) / 2
            + (0.25 * math.log(0.25 / 0.375) + 0.75 * math.log(0.75 / 0.525)) / 2,
        ),
        ("tv", (0.25 + 0.45 + 0.2) / 2),
        ("ce", -math.log(0.25)),
    ],
)
def test_lost_mass_of_a_trimmed_vocabulary_counts_as_documented(term, expected):
    assert value(term, P, Q, num_kept=2) == pytest.approx(expected, abs=1e-12)


def test_topk_kl_on_a_trimmed_vocabulary_is_that_of_the_renormalised_target_times_the_kept_mass():
    p, q = [0.4, 0.2, 0.2, 0.2], [0.5, 0.3, 0.2]
    expected = 0.8 * kl([0.5, 0.5], [0.5, 0.5])
    assert value("topk_kl", p, q, num_kept=3, top_k=1) == pytest.approx(expected, abs=1e-12)


def test_a_label_that_the_exit_can_not_say_gives_nothing():
    values, slope = evaluate(ExitLoss(ce=1.0), laws(P, Q, num_kept=2, label=-1))
    assert float(values) == 0 and not slope.any()


@pytest.mark.parametrize("term", [t for t in TERMS if t != "ce"])
@pytest.mark.parametrize("num_kept", [None, 2])
def test_the_renormalised_target_is_the_best_law_of_every_divergence(term, num_kept):
    """tv's optimum is flat, so for it: no other law is better."""
    best = [a / sum(P[:num_kept]) for a in P[:num_kept]]
    _, slope = evaluate(ExitLoss(**{term: 1.0}, top_k=1), laws(P, best, num_kept))
    assert term == "tv" or float(slope.abs().max()) < 1e-12
    least = value(term, P, best, num_kept=num_kept, top_k=1)
    for shift in (-0.2, -0.01, 0.01, 0.2):
        other = [best[0] + shift, best[1] - shift, *best[2:]]
        assert value(term, P, other, num_kept=num_kept, top_k=1) >= least - 1e-12


def test_the_value_of_tv_is_the_share_of_sampled_drafts_that_are_rejected():
    """Accept x ~ q with min(1, p / q): the rule of speculative sampling, by enumeration."""
    accepted = sum(b * min(1, a / b) for a, b in zip(P, Q))
    assert value("tv", P, Q, num_kept=2) == pytest.approx(1 - accepted, abs=1e-12)


# ---- against definitions in float64, through autograd ----


def definition(term, target, own, ids, labels, temperature, top_k):
    """The terms as one would write them down, on probabilities: sum over tokens."""
    whole = (target / temperature).softmax(-1)
    p, log_q = whole[:, ids], (own / temperature).log_softmax(-1)
    q, kept = log_q.exp(), p.sum(-1, keepdim=True)
    lost = 1 - kept
    if term == "kl":
        return (kept * (p / kept) * ((p / kept).log() - log_q)).sum()
    if term == "reverse_kl":
        return (q * (log_q - p.log())).sum()
    if term == "jsd":
        mean = (p + q) / 2
        return 0.5 * ((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum() + (lost * math.log(2)).sum())
    if term == "topk_kl":
        p = p / kept
        top = p.topk(top_k, dim=-1).indices
        p_cells = torch.cat([p.gather(-1, top), 1 - p.gather(-1, top).sum(-1, keepdim=True)], dim=-1)
        q_cells = torch.cat([q.gather(-1, top), 1 - q.gather(-1, top).sum(-1, keepdim=True)], dim=-1)
        return (kept * p_cells * (p_cells / q_cells).log()).sum()
    if term == "tv":
        return 0.5 * ((p - q).abs().sum() + lost.sum())
    known = [(n, ids.tolist().index(i)) for n, i in enumerate(labels.tolist()) if i in ids.tolist()]
    return -sum(log_q[n, row] for n, row in known)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("ids", [list(range(9)), [0, 2, 3, 7]], ids=["whole", "trimmed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_slopes_are_those_of_autograd_in_float64(term, ids, temperature):
    torch.manual_seed(0)
    ids = torch.tensor(ids)
    target = torch.randn(6, 9, dtype=torch.float64) * 2
    own = (torch.randn(6, len(ids), dtype=torch.float64) * 2).requires_grad_()
    labels = torch.tensor([0, 2, 3, 5, 7, 8])
    expected = definition(term, target, own, ids, labels, temperature, top_k=2)
    rows = torch.tensor([ids.tolist().index(i) if i in ids.tolist() else -1 for i in labels.tolist()])
    scaled = target / temperature
    laws = Laws(TargetLaw(scaled[:, ids], scaled.logsumexp(-1)), own.detach() / temperature, rows)
    values, slope = evaluate(ExitLoss(**{term: 2.0}, temperature=temperature, top_k=2), laws)
    torch.testing.assert_close(values, expected.detach().reshape(1), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(2 * expected, own)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("term", TERMS)
def test_laws_without_overlap_stay_finite_in_float32(term):
    target, own = torch.zeros(1, 4), torch.zeros(1, 3)
    target[0, 3], own[0, 0] = 200.0, 300.0  # the target wants what was trimmed away
    laws = Laws(TargetLaw(target[:, :3], target.logsumexp(-1)), own, torch.tensor([1]))
    values, slope = evaluate(ExitLoss(**{term: 1.0}, top_k=1), laws)
    assert values.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kl": -1.0}, r"exits\.draft\.loss\.kl=-1\.0 must be a weight"),
        ({"tv": math.nan}, r"loss\.tv=nan"),
        ({}, r"no term has a weight"),
        ({"kl": 1.0, "temperature": 0.0}, r"loss\.temperature=0\.0"),
        ({"topk_kl": 1.0, "top_k": 0}, r"loss\.top_k=0"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, reason):
    with pytest.raises(ValueError, match=reason):
        ExitLoss(**settings).check("exits.draft.loss")
