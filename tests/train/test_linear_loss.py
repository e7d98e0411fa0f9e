"""Chunks change neither loss nor gradient, and nothing as large as [tokens × vocabulary] is ever made."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.linear_loss import Judge, Readout, exit_losses, log_partition, top_ids
from train.losses import TERMS, ExitLoss

IDS = torch.tensor([0, 2, 3, 7, 8])
ALL_TERMS = ExitLoss(kl=1.0, reverse_kl=0.5, jsd=0.3, topk_kl=0.7, tv=2.0, ce=0.1, temperature=0.8, top_k=3)


def problem(num_tokens=10, vocab=11, size=6, dtype=torch.float32):
    """A judge and two exits, one trimmed, with unlike losses."""
    torch.manual_seed(0)
    weight = torch.randn(vocab, size, dtype=dtype)

    def unembed(states, rows=weight):
        return torch.tanh(states @ rows.T / 5) * 5

    judge = Judge(torch.randn(num_tokens, size, dtype=dtype), torch.randint(vocab, (num_tokens,)), unembed)
    exits = {
        "draft": Readout(ALL_TERMS, lambda h: unembed(h, weight[IDS]), IDS),
        "intermediate": Readout(ExitLoss(kl=1.0, tv=0.5), judge.unembed, None),
    }
    states = {name: torch.randn(num_tokens, size, dtype=dtype, requires_grad=True) for name in exits}
    return judge, exits, states


def test_chunks_change_neither_loss_nor_gradient():
    judge, exits, states = problem()

    def solve(chunk):
        sums = exit_losses(judge, exits, states, chunk)
        total = sums["draft"].total * 3 + sums["intermediate"].total
        return total, *torch.autograd.grad(total, list(states.values())), *sums["draft"].terms.values()

    for one, many in zip(solve(10), solve(3), strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-6)


def test_gradients_of_all_terms_together_pass_gradcheck():
    judge, exits, states = problem(dtype=torch.float64)

    def total(draft, intermediate):
        sums = exit_losses(judge, exits, {"draft": draft, "intermediate": intermediate}, chunk=4)
        return sums["draft"].total, sums["intermediate"].total

    assert torch.autograd.gradcheck(total, tuple(states.values()))


def test_the_total_is_the_weighted_sum_of_the_terms():
    judge, exits, states = problem()
    for name, loss in exit_losses(judge, exits, states, chunk=4).items():
        weights = exits[name].loss.weights
        assert list(loss.terms) == list(weights)
        torch.testing.assert_close(loss.total, sum(w * loss.terms[t] for t, w in weights.items()))


def test_the_targets_logits_are_computed_once_for_all_exits():
    judge, exits, states = problem()
    sizes = []
    counted = judge._replace(unembed=lambda h: sizes.append(len(h)) or judge.unembed(h))
    exit_losses(counted, exits, states, chunk=4)
    assert sizes == [4, 4, 2]


def test_an_exit_equal_to_the_target_has_no_divergence():
    judge, _, _ = problem()
    divergences = ExitLoss(**dict.fromkeys([t for t in TERMS if t != "ce"], 1.0))
    loss = exit_losses(judge, {"e": Readout(divergences, judge.unembed, None)}, {"e": judge.states}, chunk=4)["e"]
    assert all(abs(float(term)) < 1e-5 for term in loss.terms.values())


def test_a_batch_without_labels_still_reaches_the_states():
    """A head that no gradient reaches would stop DDP (B16)."""
    judge, exits, states = problem(num_tokens=0)
    sums = exit_losses(judge, exits, states)
    gradients = torch.autograd.grad(sum(loss.total for loss in sums.values()), list(states.values()))
    assert all(g.shape == (0, 6) for g in gradients)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation has given out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("chunk", [4, 16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(chunk):
    vocab = 500
    judge, exits, states = problem(num_tokens=64, vocab=vocab, size=3)
    with Largest() as largest:
        sums = exit_losses(judge, exits, states, chunk)
        (sums["draft"].total + sums["intermediate"].total).backward()
        top_ids(judge.states, judge.unembed, chunk=chunk)
    assert largest.numel == chunk * vocab


def test_losses_of_bfloat16_states_are_float32_and_near():
    judge, exits, states = problem()
    halves = {name: s.detach().bfloat16().requires_grad_() for name, s in states.items()}
    half = lambda unembed: lambda h: unembed(h.float()).bfloat16()  # noqa: E731
    rough_judge = judge._replace(states=judge.states.bfloat16(), unembed=half(judge.unembed))
    rough = exit_losses(rough_judge, {n: r._replace(unembed=half(r.unembed)) for n, r in exits.items()}, halves)
    for name, loss in exit_losses(judge, exits, states).items():
        assert rough[name].total.dtype == torch.float32
        torch.testing.assert_close(rough[name].total, loss.total, rtol=0.05, atol=0.05)
        rough[name].total.backward()
        assert halves[name].grad.dtype == torch.bfloat16


def test_top_ids_of_a_trimmed_vocabulary_are_ids_of_the_whole():
    ids = torch.tensor([3, 7, 9])
    picks = top_ids(torch.eye(3), lambda h: h, ids, chunk=2)
    assert picks.tolist() == [3, 7, 9]


def test_exits_with_the_same_ids_share_the_targets_law_and_keep_their_own_losses():
    """Three of one vocabulary and temperature, one of another temperature, one whole: each as it would be alone."""
    judge, exits, _ = problem()
    trimmed = exits["draft"]
    losses = {"a": ALL_TERMS, "b": ExitLoss(kl=1.0, temperature=0.8), "c": ExitLoss(tv=1.0)}
    together = {name: trimmed._replace(loss=loss) for name, loss in losses.items()}
    together["d"] = exits["intermediate"]
    states = {name: torch.randn(10, 6, requires_grad=True) for name in together}
    sums = exit_losses(judge, together, states, chunk=4)
    for name, readout in together.items():
        alone = exit_losses(judge, {name: readout}, {name: states[name]}, chunk=4)[name]
        torch.testing.assert_close(sums[name].total, alone.total)
        for term in readout.loss.weights:
            torch.testing.assert_close(sums[name].terms[term], alone.terms[term])
        both = (torch.autograd.grad(x.total, states[name], retain_graph=True)[0] for x in (sums[name], alone))
        torch.testing.assert_close(*both)


def test_a_known_partition_spares_the_whole_vocabulary_where_all_are_trimmed_at_temperature_1():
    judge, exits, states = problem()
    calls = []
    counted = judge._replace(unembed=lambda h: calls.append(len(h)) or judge.unembed(h))
    known = counted._replace(log_partition=log_partition(judge.unembed(judge.states)))
    trimmed = {"draft": exits["draft"]._replace(loss=ExitLoss(kl=1.0, tv=1.0))}

    def solve(own, exits):
        sums = exit_losses(own, exits, {name: states[name] for name in exits}, chunk=4)
        return torch.autograd.grad(sum(s.total for s in sums.values()), [states[name] for name in exits])

    torch.testing.assert_close(solve(known, trimmed), solve(judge, trimmed))
    assert calls == []
    for others in (exits, {"draft": exits["draft"]}):  # one untrimmed; a temperature of 0.8
        torch.testing.assert_close(solve(known, others), solve(judge, others))
        assert sum(calls) == 10
        calls.clear()
