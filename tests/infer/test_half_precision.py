"""Rows of different lengths in one batch, in the precisions that overflow."""

import pytest
import torch

from infer.params import SamplingParams
from infer.runner import Runner
from tests.tiny_engine import IN_PLACE, PROMPTS, Tiny, make_model

ROWS = PROMPTS[:3]  # of 3, 9 and 17 tokens


def first_logits(tiny: Tiny, prompts, monkeypatch) -> torch.Tensor:
    """[B, V] float32, of the target for the first new token of each prompt; what follows must be numbers, too."""
    seen = []
    advance, logits_of, counts = Runner.advance, Runner.logits, list[int]()

    def counted(runner, rows, tier):
        counts[:] = [len(row) - row.cursors[tier] for row in rows]
        return advance(runner, rows, tier)

    def recorded(runner, tier, states):
        logits = logits_of(runner, tier, states)
        assert not logits.isnan().any()
        if tier == runner.num_tiers - 1 and not seen:
            seen.append(torch.stack([lines[0] for lines in logits.split(counts)]))
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "advance", counted)
        patch.setattr(Runner, "logits", recorded)
        requests = tiny.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert all(request.finish_reason == "length" for request in requests)
    return seen[0].float()


@pytest.mark.parametrize("strategy", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_short_and_long_rows_share_a_batch_in_half_precision(family, dtype, strategy, monkeypatch):
    """Known elsewhere as NaN from the masked rows of a left-padded batch."""
    model = make_model(family).to(dtype)
    model.base.to(dtype)
    tiny = Tiny(model, strategy)
    assert tiny.runner._pages[0].dtype == dtype
    together = first_logits(tiny, ROWS, monkeypatch)
    alone = torch.cat([first_logits(tiny, [p], monkeypatch) for p in ROWS])
    assert (together - alone).abs().max() < 0.02 * alone.abs().max()
