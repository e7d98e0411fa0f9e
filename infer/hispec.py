"""The round: draft, verify early, verify fully (arXiv 2510.01336, §3), written as one recursion.

Drafting, verifying early and verifying fully are the same act: bring a tier to the row's end, let its exit judge the
tokens at every position it had not seen, keep those that it accepts, and append its own token after them (`judging`).
With nothing proposed that act drafts one token. So a strategy is a list of stages, plain decoding a list of one;
nothing here knows which strategy it serves, or by which rule tokens are accepted. A first stage may look its proposals
up in the row's own text (`ngram`); what it finds there takes the place of what its exit would have drafted.
"""

# Shape legend: N tokens of all rows together, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.batch import RING_SIZE, runs_of
from infer.judging import IdentityRule, Lines, Rule
from infer.logprobs import score
from infer.ngram import Lookup, NgramIndex
from infer.processors import Processors
from infer.row import Row
from infer.runner import ProgramError, Runner
from infer.sampler import PickParams
from infer.stats import TierStats

_MAX_BATCHES = 16  # sets of rows judged together that are kept

NAN_LOGITS = "the target's logits are not finite"
NOTHING_ALLOWED = "allowed_token_ids, bad_words and min_tokens together leave no token to pick"
NOTHING_IN_GRAMMAR = (
    "the grammar of structured_outputs, with allowed_token_ids, bad_words and min_tokens, leaves no token to pick"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One judge of a round; what the stage below it proposes, it verifies.

    Args:
        tier: whose exit judges; the target's where none does.
        repeats: how often the stage acts while the stage above waits: γ for the drafting stage, R for the next, 0 for
            one that only looks up.
        window: the stage stops repeating for a row once this many of its tokens wait for the target.
        lookup: of the first stage: it looks for proposals in the row's text, and acts in rows without any.
        confidence_threshold: the stage also stops repeating for a row once its exit gave no id so much probability
            where it appended its own token; 0 is off. It looks at that exit's law and never at the token drawn from it,
            so that drafts stay samples of the law, as the rejection rule must have them.
    """

    tier: int
    repeats: int
    window: int
    lookup: Lookup | None = None
    confidence_threshold: float = 0.0


class _Batch:
    """What follows from the rows that are judged together, kept as most often the same ones come again."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        columns = [r.params for r in rows], [r.seed for r in rows], [0] * len(rows)
        self.params = PickParams.of(*columns, device, [r.choice for r in rows])
        self.has_rules = any(r.rules is not None for r in rows)
        self.processors: dict[int, Processors] = {}  # by tier, as vocabularies differ


class Round:
    """Runs outer rounds over a fixed list of stages, the target's last.

    After `run`, every row's tokens are the target's own: committed, with all tiers standing before the last one.
    """

    def __init__(self, runner: Runner, stages: Sequence[Stage], rule: Rule | None = None) -> None:
        assert stages[-1].tier == runner.num_tiers - 1, "the last stage is the target"
        self.runner = runner
        self.stages = tuple(stages)
        self.rule = rule or IdentityRule()
        self.stats = [TierStats() for _ in stages]
        self._verdicts: list[tuple[Row, int, int, int]] = []  # of this round: row, level, drafted, accepted
        self._batches: dict[tuple[Row, ...], _Batch] = {}

    @property
    def judging_tiers(self) -> list[int]:
        """Those whose exits read what is computed."""
        return [stage.tier for stage in self.stages if stage.repeats]

    @property
    def reach(self) -> int:
        """Most positions that a round computes in a row, that of its last token included."""
        return max(1, self.stages[0].window)

    def run(self, rows: Sequence[Row]) -> None:
        self.rule.begin(rows)
        self._verdicts.clear()
        self._run_stage(list(rows), len(self.stages) - 1)
        self.rule.begin(())  # which holds rows and laws for a round alone
        # Counted at the end, as a round that breaks off is run again
        for row, level, num_drafted, num_accepted in self._verdicts:
            self.stats[level].add(num_drafted, num_accepted)
            row.stats[level].add(num_drafted, num_accepted)

    def _run_stage(self, rows: list[Row], level: int) -> None:
        if self._num_above(level):
            rows = [row for row in rows if row.params.speculate]
        if self.stages[level].lookup is not None:
            rows = self._look_up(rows, level)
        unsure: set[Row] = set()
        for _ in range(self.stages[level].repeats):
            rows = [row for row in rows if self._has_room(row, level) and row not in unsure]
            if not rows:
                return
            if level > 0:
                self._run_stage(rows, level - 1)
            unsure = self._judge(rows, level)

    def _has_room(self, row: Row, level: int) -> bool:
        """Whether the stage may append a token: every stage above it must still be able to append its own."""
        num_above = self._num_above(level)
        if num_above == 0:
            return True
        num_tokens = len(row.token_ids)
        num_waiting = num_tokens - row.cursors[-1] - 1
        return num_waiting < self.stages[level].window and num_tokens + 1 + num_above <= row.max_len

    def _num_above(self, level: int) -> int:
        return len(self.stages) - 1 - level

    def _look_up(self, rows: list[Row], level: int) -> list[Row]:
        """Append what the rows' own texts propose; the rows whose text proposes nothing."""
        stage = self.stages[level]
        lookup = stage.lookup
        assert lookup is not None and level == 0, "what is looked up follows committed tokens"
        found: dict[Row, list[int]] = {}
        for row in rows:
            if row.ngrams is None:
                row.ngrams = NgramIndex(lookup.max_ngram, lookup.min_ngram)
            num_free = max(0, row.max_len - len(row) - self._num_above(level))
            if tokens := row.ngrams.propose(row.token_ids, min(lookup.num_tokens, num_free)):
                found[row] = tokens
        if late := [row for row in found if self._is_late(row, stage, lookup)]:
            self.runner.advance(late, stage.tier)
        for row, tokens in found.items():
            for token_id in tokens:
                row.append(token_id)
            self.rule.note_proposal(row, level, tokens)
        return [row for row in rows if row not in found]

    def _is_late(self, row: Row, stage: Stage, lookup: Lookup) -> bool:
        """Whether the stage's exit, which looking up passes over, must compute its own keys now: the states that it
        reads wait in a ring, and this round's, with the token after them, would write over the first of them."""
        if not stage.repeats or not self.runner.exits[stage.tier].has_kv:
            return False
        return len(row) + lookup.num_tokens - row.exit_cursors[stage.tier] >= RING_SIZE

    def _judge(self, rows: list[Row], level: int) -> set[Row]:
        """Compute what is new to the stage's tier and rule on it; the rows in which the judge is unsure of its token.

        As many whole rows at once as one call gives logits for, so that logits, which are large, are not copied.
        """
        tier = self.stages[level].tier
        starts = [row.cursors[tier] for row in rows]  # each row's proposals begin one position further
        counts = [len(row.token_ids) - start for row, start in zip(rows, starts, strict=True)]
        states = self.runner.advance(rows, tier)  # [N, E]
        runs = runs_of(counts, self.runner.max_logits(tier))
        if len(runs) == 1:
            return self._rule_on(rows, level, starts, counts, self.runner.logits(tier, states))
        unsure, first = set[Row](), 0
        for run in runs:
            here = slice(run.start, run.stop)
            last = first + sum(counts[here])
            logits = self.runner.logits(tier, states[first:last])
            unsure |= self._rule_on(rows[here], level, starts[here], counts[here], logits)
            first = last
        return unsure

    def _rule_on(self, rows: list[Row], level: int, starts: list[int], counts: list[int], logits: Tensor) -> set[Row]:
        """Accept what the rule lets pass by logits [N, V] and append the judge's own token; the rows in which it is
        unsure of that one."""
        tier = self.stages[level].tier
        batch = self._batch_of(rows)
        processed = self._processed(batch, logits, starts, counts, tier) if batch.has_rules else logits
        drafted = [row.token_ids[start + 1 :] for row, start in zip(rows, starts, strict=True)]
        is_target = level == len(self.stages) - 1
        lines = Lines(
            rows, level, is_target, processed, self.runner.vocabs[tier], batch.params, starts, counts, drafted
        )
        verdicts, is_broken = self.rule.judge(lines)
        least = self.stages[level].confidence_threshold
        unsure = _unsure(lines, [accepted for accepted, _ in verdicts], least) if least else set()
        first = 0
        for row, start, proposed, count, (accepted, own) in zip(rows, starts, drafted, counts, verdicts, strict=True):
            here = slice(first, first + count)
            first += count
            row.truncate(start + 1 + accepted)
            if is_broken is not None and any(is_broken[here]):  # a rejected position's K and V, too, stay in the blocks
                _note_failure(row, logits[here], is_broken[here], is_target and own < 0)
            if own >= 0:
                row.append(own, tier)
            if is_target and row.scores is not None and row.scores.num_generated is not None:
                scored = torch.tensor(row.token_ids[start + 1 :], dtype=torch.int64, device=logits.device)
                row.scores.generated += score(logits[here][: len(scored)], scored, row.scores.num_generated)
            if own < 0:
                row.append(0, tier)  # a lower exit's broken pick is just a bad guess
            if proposed:
                self._verdicts.append((row, level, len(proposed), accepted))
        return unsure

    def _batch_of(self, rows: list[Row]) -> _Batch:
        key = tuple(rows)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) == _MAX_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = _Batch(rows, self.runner.device)
        return batch

    def _processed(self, batch: _Batch, logits: Tensor, starts: list[int], counts: list[int], tier: int) -> Tensor:
        """The logits after what the batch's rows ask for, given each row's own tokens before each position."""
        if tier not in batch.processors:
            rules, vocab = [row.rules for row in batch.rows], self.runner.vocabs[tier]
            batch.processors[tier] = Processors(rules, logits.shape[1], vocab, self.runner.device)
        texts = [row.token_ids for row in batch.rows]
        return batch.processors[tier].apply(logits, texts, starts, counts, _masks(batch.rows, starts, counts))


def _unsure(lines: Lines, num_accepted: Sequence[int], least: float) -> set[Row]:
    """The rows in which the line of the judge's own token gives no id the probability `least`."""
    first, own = 0, []
    for count, accepted in zip(lines.counts, num_accepted, strict=True):
        own.append(first + accepted)
        first += count
    logits = lines.logits[own].float()
    surest = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp().tolist()
    return {row for row, sure in zip(lines.rows, surest, strict=True) if sure < least}


def _masks(rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int]) -> dict[int, Tensor]:
    """What the rows' grammars allow at their positions, for those that have one: row's number → [count, G] int32."""
    masks = {}
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        if row.grammar is not None:
            num_prompt = row.num_prompt_tokens
            try:
                masks[b] = row.grammar.masks(row.token_ids[num_prompt:], start + 1 - num_prompt, count)
            except Exception as error:  # one text's, so its neighbours need not end with it
                raise ProgramError([row]) from error
    return masks


def _note_failure(row: Row, logits: Tensor, has_no_pick: Sequence[bool], has_no_token: bool) -> None:
    """Why there is no pick at some of the positions of logits [T, V]: they are broken, or the row's own rules leave no
    id of this exit's. `has_no_token`: so the row can't go on."""
    broken = [not bool(line.max().isfinite()) for line in logits[torch.tensor(has_no_pick)]]
    row.has_nan = row.has_nan or any(broken)
    if has_no_token:  # the first position without a pick is where the row stands
        nothing = NOTHING_ALLOWED if row.grammar is None else NOTHING_IN_GRAMMAR
        row.failure = NAN_LOGITS if broken[0] else nothing
