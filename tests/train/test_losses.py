import torch

from train.acceptance import Acceptance, run_lengths
from train.losses import kl_sum, top_ids


def test_chunked_kl_has_the_value_and_gradient_of_the_plain_one():
    torch.manual_seed(0)
    weight = torch.randn(11, 6)
    target, own = torch.randn(10, 6), torch.randn(10, 6, requires_grad=True)
    chunked = kl_sum(target, own, lambda h: h @ weight.T, chunk=3)
    (gradient,) = torch.autograd.grad(chunked * 2, own)
    p, q = (target @ weight.T).log_softmax(-1), (own @ weight.T).log_softmax(-1)
    plain = (p.exp() * (p - q)).sum()
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain * 2, own)[0])


def test_kl_of_equal_states_is_zero():
    states = torch.randn(4, 6)
    assert abs(float(kl_sum(states, states.clone(), lambda h: h))) < 1e-6


def test_top_ids_of_a_trimmed_vocabulary_are_ids_of_the_whole():
    ids = torch.tensor([3, 7, 9])
    picks = top_ids(torch.eye(3), lambda h: h, ids, chunk=2)
    assert picks.tolist() == [3, 7, 9]


def test_run_lengths_stop_at_a_mismatch_at_four_and_at_a_break():
    matches = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1]).bool()
    breaks = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 0]).bool()
    assert run_lengths(matches, breaks).tolist() == [2, 1, 0, 4, 4, 3, 2, 1, 2, 1]


def test_acceptance_walks_rounds_as_the_engine_does():
    acceptance = Acceptance()
    judged = torch.zeros(10, dtype=torch.int64)
    drafted = torch.tensor([0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    breaks = torch.zeros(10, dtype=torch.bool)
    breaks[0] = True
    acceptance.update(drafted, judged, breaks)
    # rounds start at 0 (2 accepted), 3 (4 accepted), 8 (2 accepted, the text ends)
    assert (acceptance.num_accepted, acceptance.num_rounds) == (8, 3)
    assert acceptance.length == 1 + 8 / 3
    assert acceptance.agreement == 0.9
