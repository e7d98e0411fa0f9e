"""The law that sampled texts must follow, from Hugging Face's logits alone."""

from __future__ import annotations

from infer.params import SamplingParams
from infer.sampler import PickParams, probabilities
from tests.tiny_engine import hf_logits


def exact_law(model, prompt: list[int], how: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `num_tokens` tokens, from Hugging Face's logits."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for text, p in law.items():
            logits = hf_logits(model, [*prompt, *text])[-1:]
            params = PickParams.of([how], [0], [0], logits.device)
            for token, q in enumerate(probabilities(logits, params)[0].tolist()):
                longer[(*text, token)] = p * q
        law = longer
    return law
