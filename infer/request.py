"""A request from arrival to answer: its prompt, its row once it runs, its text so far, and why it ended.

With n > 1 there is one record for each text: the leader, choice 0, which stands for all where the user sees them, and
its siblings. They live and end on their own; what they share is the prompt's blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from infer.detokenizer import Detokenizer
from infer.logprobs import ScoreLog, as_logprobs
from infer.output import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from infer.params import SamplingParams
from infer.processors import Rules
from infer.row import Row
from infer.stats import TierStats

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The engine's record of one text for one prompt.

    Args:
        max_len: most tokens, prompt included, that it may grow to.
        stop_token_ids: every id that ends it, EOS ids among them unless they are to be ignored.
        eos_token_ids: the model's own, which end it without a stop_reason.
        rules: what it does to its logits; None leaves them alone.
        scores: the log probabilities that it asks for; None if it asks for none.
        choice: its number among the prompt's texts.
        leader: choice 0; None if it is that itself.
        siblings: the leader's other choices.
        pending: those that wait, outside of all queues, until the leader has computed the prompt.
        is_streamed: whether somebody reads its text while it runs; else it is made at the end.
        shared_blocks: the leader's: the prompt's blocks, owned until every sibling has had them. A last block that the
            prompt fills in part is a copy.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_len: int
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    detokenizer: Detokenizer
    rules: Rules | None = None
    scores: ScoreLog | None = None
    judge_names: tuple[str, ...] = ()
    choice: int = 0
    leader: Request | None = field(default=None, repr=False)
    siblings: list[Request] = field(default_factory=list, repr=False)
    pending: list[Request] = field(default_factory=list, repr=False)
    is_streamed: bool = True
    shared_blocks: list[int] | None = None
    row: Row | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of token_ids, as far as `output` got
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # likewise
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    arrival_time: float = 0.0  # all times are seconds of one clock, read by the engine
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_answered(self) -> bool:
        """Whether all choices are finished."""
        return self.is_finished and all(sibling.is_finished for sibling in self.siblings)

    def add_choice(self, detokenizer: Detokenizer) -> None:
        """One more text for the same prompt; before the request is given to an engine."""
        number = len(self.siblings) + 1
        sibling = replace(
            self,
            choice=number,
            leader=self,
            detokenizer=detokenizer,
            scores=ScoreLog.of(self.params.logprobs, None),  # the prompt's are the leader's to give
            siblings=[],
            pending=[],
            token_ids=[],
            logprobs=[],
            prompt_logprobs=[],
        )
        self.siblings.append(sibling)
        self.pending.append(sibling)

    def commit(self, token_ids: list[int]) -> None:
        """Take committed tokens one by one and end at the first that ends the text; the rest never existed."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                self._stop_at(token_id)
            elif self.detokenizer.push(token_id):
                self._finish("stop", self.detokenizer.stop_string)
            elif len(self.prompt_token_ids) + len(self.token_ids) >= self.max_len:
                self._finish("length", None)
            if self.finish_reason is not None:
                return
        if self.is_streamed:
            self.text += self.detokenizer.take()

    def note_time(self, now: float) -> None:
        """Tokens have just been committed."""
        if self.token_ids:
            self.last_token_time = now
            if self.first_token_time is None:
                self.first_token_time = now

    def abort(self, reason: str) -> None:
        self._finish("abort", reason)

    def break_off(self, reason: str) -> None:
        """End it because its row has no next token; the text has all that it committed."""
        self._finish("error", reason)

    def _stop_at(self, token_id: int) -> None:
        """The stop token belongs to the text only if stop strings do; it may then complete one."""
        reason: int | str | None = None if token_id in self.eos_token_ids else token_id
        if self.params.include_stop_str_in_output and self.detokenizer.push(token_id):
            reason = self.detokenizer.stop_string
        self._finish("stop", reason)

    def fail(self, cause: BaseException) -> None:
        """End it for a fault of ours; a streamed text stays as it was shown last."""
        self.finish_reason, self.stop_reason = "error", f"{type(cause).__name__}: {cause}"
        if not self.is_streamed:
            self._take_rest()

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        error = self._take_rest()
        if error is not None and reason in ("stop", "length"):
            self.fail(error)
        elif reason == "length" and self.detokenizer.stop_string is not None:
            # A last token that ends on half a character was held back, and with it the stop string that it completes
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_string

    def _take_rest(self) -> Exception | None:
        """Complete the text as far as it can be made; what kept it from that."""
        try:
            self.text += self.detokenizer.take()
            self.text += self.detokenizer.finish()
        except Exception as error:  # a tokenizer may stumble over ids that a model should not give
            logger.warning("request %s: no text for its last tokens: %s", self.request_id, error)
            return error
        return None

    def completion(self) -> CompletionOutput:
        return CompletionOutput(
            self.choice,
            self.text,
            tuple(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            *self._logprobs(),
            self._proposers(),
        )

    def _proposers(self) -> bytes:
        if self.row is None:
            return b""
        start = self.row.num_prompt_tokens
        return bytes(self.row.proposers[start : start + len(self.token_ids)])

    def output(self) -> RequestOutput:
        """What the user sees now, all choices together; the leader's to give."""
        outputs = tuple(choice.completion() for choice in (self, *self.siblings))
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.is_answered,
            self._metrics(),
            self._prompt_logprobs(),
        )

    def _metrics(self) -> RequestMetrics:
        choices = (self, *self.siblings)
        rows = [choice.row.stats for choice in choices if choice.row is not None]
        totals = [TierStats.total(stats) for stats in zip(*rows, strict=True)]
        tiers = tuple(s.snapshot(name) for s, name in zip(totals, self.judge_names, strict=bool(totals)))[1:]
        spans = [
            (choice.first_token_time, choice.last_token_time, len(choice.token_ids) - 1)
            for choice in choices
            if choice.first_token_time is not None and choice.last_token_time is not None
        ]
        num_later = sum(num for _, _, num in spans)
        return RequestMetrics(
            tiers,
            time_to_first_token=min(first for first, _, _ in spans) - self.arrival_time if spans else None,
            time_per_output_token=sum(last - first for first, last, _ in spans) / num_later if num_later else None,
            num_preemptions=sum(choice.num_preemptions for choice in choices),
        )

    def _logprobs(self) -> tuple[float | None, list[dict[int, Logprob]] | None]:
        """cumulative_logprob and logprobs. What the row committed beyond the text's end never existed."""
        if self.scores is None or self.scores.num_generated is None:
            return None, None
        kept = self.scores.generated[: len(self.token_ids)]
        self.logprobs += [as_logprobs(one, self.detokenizer.text_of) for one in kept[len(self.logprobs) :]]
        return sum(one.logprobs[0] for one in kept), list(self.logprobs)

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.scores is None or self.scores.num_prompt is None or self.row is None:
            return None
        scored = self.scores.prompt[len(self.prompt_logprobs) :]
        self.prompt_logprobs += [as_logprobs(one, self.detokenizer.text_of) for one in scored]
        return [None, *self.prompt_logprobs]
