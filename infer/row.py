"""One request in the making: its tokens and how far each tier has come.

    [0, num_committed)            final: what the target alone would have produced; may be shown
    [num_committed, len - 1)      tentative (accepted by a lower judge) or drafted (proposed at the lowest exit)
    [len - 1]                     never computed by any tier: the next query

A tier's cursor is the number of positions that it has processed. Cursors fall with depth, and the target's says what is
committed: it has judged all that it has computed, so num_committed = cursors[-1] + 1. Rejecting is `truncate`: it moves
numbers, nothing else. A row knows nothing of programs or of what its blocks hold.

There is no phase of prefill: a row whose cursors stand lower catches up, be its tokens a new prompt or, after it had to
give its blocks away, prompt and generated tokens together. It is ready once they all stand before the last token.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.grammar import GrammarState
from infer.logprobs import ScoreLog
from infer.lookahead import Window
from infer.ngram import NgramIndex
from infer.params import SamplingParams
from infer.processors import Rules
from infer.stats import TierStats

LOOKED_UP = 255  # in place of a tier: the token was found in the row's own text


class Row:
    """A running request.

    Args:
        prompt_token_ids: at least one id.
        params: how to sample and when to stop.
        seed: 64-bit key of the row's noise.
        max_len: most tokens, prompt included, that the row may ever hold.
        num_tiers: length of the list of tiers.
        num_stages: length of the list of stages, each of which counts what it accepts.
        blocks: the KV blocks it owns; they grow with it.
        ring: its index in the hand-off rings, ≥ 1 (0 takes the padding).
        rules: what is done to its logits; None leaves them alone.
        scores: where the log probabilities that it asks for are written; None if it asks for none.
        choice: which of its prompt's texts it is; keys its noise together with the seed.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_len: int,
        num_tiers: int,
        num_stages: int,
        blocks: list[int],
        ring: int,
        rules: Rules | None = None,
        scores: ScoreLog | None = None,
        choice: int = 0,
    ) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.proposers = bytearray(self.num_prompt_tokens)  # beside token_ids: which tier picked each one first
        self.params = params
        self.seed = seed
        self.rules = rules
        self.grammar = None if rules is None or rules.grammar is None else GrammarState(rules.grammar)
        self.scores = scores
        self.choice = choice
        self.max_len = max_len
        self.restart(blocks, ring, num_tiers)
        self.stats = [TierStats() for _ in range(num_stages)]
        self.failure: str | None = None  # why the target can't go on: this row alone fails
        self.has_nan = False  # some judge's logits did, so its pages may
        self.ngrams: NgramIndex | None = None  # of its committed tokens, once a strategy looks something up in them
        self.speculates = params.speculate  # in the next round; `payoff` may decide that it does not
        # Its prompt's keys were computed by trunks alone; its exits get theirs before it first speculates
        self.exits_wait = False
        # Kept by `payoff`: tokens that speculating rounds gave it, and these rounds, older ones for less
        self.num_gained, self.num_speculated = 0.0, 0.0
        self.window: Window | None = None  # ahead of its committed tokens, once a strategy looks ahead

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_broken(self) -> bool:
        return self.failure is not None

    @property
    def num_committed(self) -> int:
        return self.cursors[-1] + 1

    @property
    def is_ready(self) -> bool:
        """Whether the next round may run: all but the last token is computed."""
        return self.cursors[-1] == len(self.token_ids) - 1

    @property
    def may_hold_nan(self) -> bool:
        """Whether its blocks must be zeroed before another row gets them: what no judge has read may hold anything."""
        return self.has_nan or self.cursors[-1] < self._num_restarted

    def restart(self, blocks: list[int], ring: int, num_tiers: int) -> None:
        """Begin in these blocks with nothing computed, whatever was before."""
        self.block_table = blocks
        self.ring = ring
        self.cursors = [0] * num_tiers
        # A `layer` exit keeps KV of its own and so a cursor of its own, at most its tier's.
        self.exit_cursors = [0] * num_tiers
        self.first_state = 0  # the target's ring holds its states from this position on
        self._num_restarted = len(self.token_ids)

    def skip(self, num_positions: int, tiers_with_exit: Sequence[int], first_state: int | None = None) -> None:
        """Begin behind positions whose KV its blocks hold, these exits' included.

        first_state: the last of them, if the target's ring holds its state there; None: it holds none of them.
        """
        self.first_state = num_positions if first_state is None else first_state
        self.cursors = [num_positions] * len(self.cursors)
        self.exit_cursors = [num_positions if tier in tiers_with_exit else 0 for tier in range(len(self.cursors))]

    def append(self, token_id: int, proposer: int = LOOKED_UP) -> None:
        """proposer: the tier that picked it, or LOOKED_UP."""
        assert len(self.token_ids) < self.max_len, f"row is full at {self.max_len} tokens"
        self.token_ids.append(token_id)
        self.proposers.append(proposer)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; what was computed beyond them is forgotten. Idempotent."""
        if num_tokens >= len(self.token_ids):
            return  # cursors never pass the tokens
        del self.token_ids[num_tokens:], self.proposers[num_tokens:]
        self.cursors = [min(cursor, num_tokens) for cursor in self.cursors]
        self.exit_cursors = [min(cursor, num_tokens) for cursor in self.exit_cursors]

    def rewind(self, num_committed: int) -> None:
        """Undo a round that broke off: back to the tokens and cursors that it began with."""
        self.truncate(num_committed)
        if self.scores is not None:
            del self.scores.generated[num_committed - self.num_prompt_tokens :]
        self.cursors = [min(cursor, num_committed - 1) for cursor in self.cursors]
        self.exit_cursors = [min(cursor, num_committed - 1) for cursor in self.exit_cursors]

    def check_integrity(self) -> None:
        """Between outer rounds: nothing tentative is left, and all tiers stand before the last token."""
        end, cursors = len(self.token_ids) - 1, self.cursors
        assert cursors.count(end) == len(cursors), f"cursors {cursors} of a row of {end + 1} tokens"
        assert max(self.exit_cursors) <= end, "an exit is ahead of its tier"
        assert end < self.max_len
