"""Where a text's tokens came from: the field `hispec` of a stream's chunks, for those who ask for it."""

from __future__ import annotations

from typing import Any

from infer.llm import LLM
from infer.output import CompletionOutput, RequestMetrics
from infer.row import LOOKED_UP


class TierReport:
    def __init__(self, llm: LLM) -> None:
        self._names = {number: tier.name for number, tier in enumerate(llm.manifest.tiers)} | {LOOKED_UP: "ngram"}
        self._decode = llm.tokenizer.decode

    def of(self, text: CompletionOutput, start: int, metrics: RequestMetrics) -> dict[str, Any]:
        """The tokens from number `start` on, and what each tier has accepted so far, of all texts of the prompt.

        A token's text is its own: where a character is split over tokens they do not add up to the chunk's text.
        """
        pairs = zip(text.token_ids[start:], text.proposers[start:], strict=True)
        tokens = [
            {"text": self._decode([token_id], skip_special_tokens=True), "tier": self._names[proposer]}
            for token_id, proposer in pairs
        ]
        judged = {
            tier.tier: {
                "num_drafts": tier.num_drafts,
                "num_draft_tokens": tier.num_draft_tokens,
                "num_accepted": tier.num_accepted,
            }
            for tier in metrics.tiers
        }
        return {"tokens": tokens, "judged": judged}
