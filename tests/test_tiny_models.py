"""The tiny models themselves: a test that uses them can only bite if their tokens vary and their norms matter."""

import pytest
import torch

from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_vary_and_logits_are_finite(family: str) -> None:
    model = make_tiny_model(family)
    prompt = torch.tensor([[5, 9, 17]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    logits = model(tokens).logits
    assert logits.isfinite().all() and 0.5 < logits.std() < 5
    assert len(set(tokens[0, 3:].tolist())) >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_weights(family: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, other = make_tiny_model(family), make_tiny_model(family), make_tiny_model(family, seed=1)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state is left alone"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is not first.get_input_embeddings().weight
