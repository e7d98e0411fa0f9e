"""A request from arrival to answer: its prompt, its row once it runs, its text so far, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from infer.detokenizer import Detokenizer
from infer.logprobs import ScoreLog, as_logprobs
from infer.output import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from infer.params import SamplingParams
from infer.processors import Rules
from infer.row import Row


@dataclass(slots=True, kw_only=True)
class Request:
    """The engine's record of one prompt.

    Args:
        max_len: most tokens, prompt included, that it may grow to.
        stop_token_ids: every id that ends it, EOS ids among them unless they are to be ignored.
        eos_token_ids: the model's own, which end it without a stop_reason.
        rules: what it does to its logits; None leaves them alone.
        scores: the log probabilities that it asks for; None if it asks for none.
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
    row: Row | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of token_ids, as far as `output` got
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

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
            if self.is_finished:
                return
        self.text += self.detokenizer.take()

    def abort(self, reason: str) -> None:
        self._finish("abort", reason)

    def _stop_at(self, token_id: int) -> None:
        """The stop token belongs to the text only if stop strings do; it may then complete one."""
        reason: int | str | None = None if token_id in self.eos_token_ids else token_id
        if self.params.include_stop_str_in_output and self.detokenizer.push(token_id):
            reason = self.detokenizer.stop_string
        self._finish("stop", reason)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.text += self.detokenizer.take() + self.detokenizer.finish()

    def output(self) -> RequestOutput:
        """What the user sees now."""
        stats = self.row.stats if self.row is not None else []
        tiers = tuple(s.snapshot(name) for s, name in zip(stats, self.judge_names, strict=bool(stats)))[1:]
        completion = CompletionOutput(
            0,
            self.text,
            tuple(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            *self._logprobs(),
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            (completion,),
            self.is_finished,
            RequestMetrics(tiers),
            self._prompt_logprobs(),
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
        return [None, *(as_logprobs(one, self.detokenizer.text_of) for one in self.scores.prompt)]
