"""A request from arrival to answer: its prompt, its row once it runs, its text so far, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from infer.detokenizer import Detokenizer
from infer.output import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from infer.params import SamplingParams
from infer.row import Row


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The engine's record of one prompt.

    Args:
        max_len: most tokens, prompt included, that it may grow to.
        stop_token_ids: every id that ends it, EOS ids among them unless they are to be ignored.
        eos_token_ids: the model's own, which end it without a stop_reason.
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
    judge_names: tuple[str, ...] = ()
    row: Row | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
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
                self._finish("stop", None if token_id in self.eos_token_ids else token_id)
            elif self.detokenizer.push(token_id):
                self._finish("stop", self.detokenizer.stop_string)
            elif len(self.prompt_token_ids) + len(self.token_ids) >= self.max_len:
                self._finish("length", None)
            if self.is_finished:
                return
        self.text += self.detokenizer.take()

    def abort(self, reason: str) -> None:
        self._finish("abort", reason)

    def fail(self, cause: BaseException) -> None:
        """End it for a fault of ours; the text stays as it was shown last."""
        self.finish_reason, self.stop_reason = "error", f"{type(cause).__name__}: {cause}"

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.text += self.detokenizer.take() + self.detokenizer.finish()

    def output(self) -> RequestOutput:
        """What the user sees now."""
        stats = self.row.stats if self.row is not None else []
        tiers = tuple(s.snapshot(name) for s, name in zip(stats, self.judge_names, strict=bool(stats)))[1:]
        completion = CompletionOutput(0, self.text, tuple(self.token_ids), self.finish_reason, self.stop_reason)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, (completion,), self.is_finished, RequestMetrics(tiers)
        )
