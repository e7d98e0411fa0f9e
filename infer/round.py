"""The round: draft, verify early, verify fully (arXiv 2510.01336, §3), written as one recursion.

Drafting, verifying early and verifying fully are the same act: bring a tier to the row's end, let its exit judge the
tokens at every position it had not seen, keep those that it accepts, and append its own token after them (`judging`).
With nothing proposed that act drafts one token. So a strategy is a list of stages, plain decoding a list of one;
nothing here knows which strategy it serves, or by which rule tokens are accepted. A first stage may look its proposals
up in the row's own text (`ngram`); what it finds there takes the place of what its exit would have drafted. Or it may
choose among exits for every token (AdaDecode, arXiv 2506.03700): a token comes from the lowest exit that is sure of
one, and the layers above that exit run later, for all waiting tokens together, when a token needs them.
"""

# Shape legend: N tokens of all rows together, V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.batch import RING_SIZE, runs_of
from infer.failures import note_failure
from infer.judging import IdentityRule, Rule
from infer.lines import LineMaker, Lines
from infer.logprobs import score
from infer.ngram import NgramIndex
from infer.row import Row
from infer.runner import Runner
from infer.stage import Stage, num_scratch_blocks
from infer.stats import TierStats
from infer.verify import Verdict


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
        self._lines = LineMaker(runner.vocabs, len(stages) - 1, runner.device)

    @property
    def judging_tiers(self) -> list[int]:
        """Those whose exits read what is computed."""
        return [tier for stage in self.stages if stage.repeats for tier in stage.exits or (stage.tier,)]

    @property
    def reach(self) -> int:
        """Most positions that a round computes in a row, that of its last token included."""
        return max(1, self.stages[0].window)

    @property
    def num_scratch_blocks(self) -> int:
        """Of one row, beside the blocks of its text."""
        return num_scratch_blocks(self.stages, self.runner.block_size)

    def run(self, rows: Sequence[Row]) -> None:
        self.rule.begin(rows)
        self._verdicts.clear()
        self._keep_up([row for row in rows if row.params.speculate and not row.speculates and not row.exits_wait])
        self._run_stage(list(rows), len(self.stages) - 1)
        self.rule.begin(())  # which holds rows and laws for a round alone
        # Counted at the end, as a round that breaks off is run again
        for row, level, num_drafted, num_accepted in self._verdicts:
            self.stats[level].add(num_drafted, num_accepted)
            row.stats[level].add(num_drafted, num_accepted)

    def _run_stage(self, rows: list[Row], level: int) -> None:
        stage = self.stages[level]
        if self._num_above(level):
            rows = [row for row in rows if row.speculates]
        if stage.lookup is not None:
            rows = self._look_up(rows, level)
        everyone, unsure = rows, set[Row]()
        for _ in range(stage.repeats):
            rows = [row for row in rows if self._has_room(row, level) and row not in unsure]
            if not rows:
                break
            if level > 0:
                self._run_stage(rows, level - 1)
            unsure = self._act(rows, level)
        for tier in stage.exits[1:]:
            late = [row for row in everyone if self._is_late(row, tier, stage.window + 1)]
            self._catch_up([row for row in late if row.cursors[tier] < len(row)], tier)

    def _act(self, rows: list[Row], level: int) -> set[Row]:
        """A stage acts once: the rows for which it is not to act again."""
        return self._choose_exit(rows, level) if self.stages[level].exits else self._judge(rows, level)

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
        if stage.repeats:
            self._catch_up([row for row in found if self._is_late(row, stage.tier, lookup.num_tokens)], stage.tier)
        for row, tokens in found.items():
            for token_id in tokens:
                row.append(token_id)
            self.rule.note_proposal(row, level, tokens)
        return [row for row in rows if row not in found]

    def _is_late(self, row: Row, tier: int, num_coming: int) -> bool:
        """Whether the tier's exit, which was passed over, must compute its own keys now: the states that it reads wait
        in a ring, and those of so many tokens more, with the token after them, would write over the first of them."""
        return self.runner.exits[tier].has_kv and len(row) + num_coming - row.exit_cursors[tier] >= RING_SIZE

    def _keep_up(self, rows: Sequence[Row]) -> None:
        """Let exits compute their keys in rows that decode plainly for a while, before the states for them are written
        over, be it by the next round, which may speculate."""
        for tier in dict.fromkeys(self.judging_tiers[:-1]) if rows else ():
            self._catch_up([row for row in rows if self._is_late(row, tier, self.reach)], tier)

    def _catch_up(self, rows: list[Row], tier: int) -> None:
        if rows:
            self.runner.advance(rows, tier)

    def _judge(self, rows: list[Row], level: int) -> set[Row]:
        """Compute what is new to the stage's tier, accept what the rule lets pass, append the judge's own token; the
        rows in which it is unsure of that one.

        As many whole rows at once as one call gives logits for, so that logits, which are large, are not copied.
        """
        stage = self.stages[level]
        starts = [row.cursors[stage.tier] for row in rows]  # each row's proposals begin one position further
        counts = [len(row.token_ids) - start for row, start in zip(rows, starts, strict=True)]
        states = self.runner.advance(rows, stage.tier)  # [N, E]
        unsure, first = set[Row](), 0
        for run in runs_of(counts, self.runner.max_logits(stage.tier)):
            here = slice(run.start, run.stop)
            last = first + sum(counts[here])
            logits = self.runner.logits(stage.tier, states[first:last])
            lines = self._lines.make(rows[here], level, stage.tier, logits, starts[here])
            verdicts = self._rule(lines, stage.tier, logits)
            if stage.confidence_threshold:
                unsure |= lines.unsure([accepted for accepted, _ in verdicts], stage.confidence_threshold)
            first = last
        return unsure | self.rule.doubted if self.rule.doubted else unsure

    def _choose_exit(self, rows: list[Row], level: int) -> set[Row]:
        """Append a token from the lowest of the stage's exits that is sure of one; the rows in which none is.

        An exit is asked only where all below it were unsure, and brings its tier to the row's end: the layers that were
        put off for the tokens before run here, in one call.
        """
        stage = self.stages[level]
        for tier in stage.exits:
            ends = list(itertools.accumulate(len(row) - row.cursors[tier] for row in rows))
            states = self.runner.advance(rows, tier)  # [N, E]
            last = self.runner.logits(tier, states if len(states) == len(rows) else states[[end - 1 for end in ends]])
            lines = self._lines.make(rows, level, tier, last, [len(row) - 1 for row in rows])
            unsure = lines.unsure([0] * len(rows), stage.confidence_threshold)
            sure = [number for number, row in enumerate(rows) if row not in unsure]
            if len(sure) == len(rows):
                self._rule(lines, tier, last)
                return set()
            if sure:
                chosen, last = [rows[number] for number in sure], last[sure]
                self._rule(self._lines.make(chosen, level, tier, last, [len(row) - 1 for row in chosen]), tier, last)
            rows = [row for row in rows if row in unsure]
        return set(rows)

    def _rule(self, lines: Lines, tier: int, logits: Tensor) -> list[Verdict]:
        """Let the rule judge and write its rulings into the rows. logits [N, V]: before the rows' own rules."""
        verdicts, is_broken = self.rule.judge(lines)
        first = 0
        for number, (row, count, verdict) in enumerate(zip(lines.rows, lines.counts, verdicts, strict=True)):
            here = slice(first, first + count)
            first += count
            self._write(row, lines, number, tier, verdict, is_broken and is_broken[here], logits[here])
        return verdicts

    def _write(
        self,
        row: Row,
        lines: Lines,
        number: int,
        tier: int,
        verdict: Verdict,
        is_broken: Sequence[bool] | None,
        logits: Tensor,
    ) -> None:
        """Write a verdict into the row, which is the `number`-th of these lines; logits [T, V] are its own."""
        accepted, own = verdict
        start, proposed = lines.starts[number], lines.drafted[number]
        row.truncate(start + 1 + accepted)
        if is_broken and any(is_broken):  # a rejected position's K and V, too, stay in the blocks
            note_failure(row, logits, is_broken, lines.is_target and own < 0)
        if own >= 0:
            row.append(own, tier)
        if lines.is_target and row.scores is not None and row.scores.num_generated is not None:
            scored = torch.tensor(row.token_ids[start + 1 :], dtype=torch.int64, device=logits.device)
            row.scores.generated += score(logits[: len(scored)], scored, row.scores.num_generated)
        if own < 0:
            row.append(0, tier)  # a lower exit's broken pick is just a bad guess
        if proposed:
            self._verdicts.append((row, lines.level, len(proposed), accepted))
