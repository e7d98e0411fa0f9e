"""What a request gives back, in vLLM's shape."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from infer.verify import mean_acceptance_length

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """How one tier judged what was proposed to it."""

    tier: str  # name of the judging tier: "intermediate", "target"
    num_drafts: int = 0  # rounds in which something was proposed
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_lengths: tuple[int, ...] = ()  # [k]: in how many of these rounds k tokens were accepted

    @property
    def mean_acceptance_length(self) -> float:
        return mean_acceptance_length(self.num_accepted, self.num_drafts)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    tiers: tuple[TierMetrics, ...] = ()  # from the first judge to the target; empty if nothing was drafted
    time_to_first_token: float | None = None  # seconds from arrival; of the first choice to have one
    time_per_output_token: float | None = None  # seconds, over all choices; None until one has two tokens
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token in the model's own distribution, before temperature, penalties and filters."""

    logprob: float
    rank: int  # 1 is the most probable token of the vocabulary
    decoded_token: str | None = None  # None without detokenize


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]  # up to and including the token that ended the text
    finish_reason: FinishReason | None = None  # None while the request runs
    stop_reason: int | str | None = None  # stop token id or stop string, or why it was ended; else None
    cumulative_logprob: float | None = None  # of the tokens together; None if logprobs were not asked for
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the most probable ones, by id
    # For each token, the number of the tier that picked it first, 255 if it was looked up; no part of the result
    proposers: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None if the request came as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics = RequestMetrics()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token, which nothing predicts


def incomplete(output: RequestOutput) -> list[CompletionOutput]:
    """Its texts that were cut short by a fault or by the caller."""
    return [text for text in output.outputs if text.finish_reason in ("error", "abort")]


def check_whole(outputs: Iterable[RequestOutput]) -> None:
    """ValueError with the cause if a text was cut short by a fault: a measurement of such texts means nothing."""
    for output in outputs:
        for text in incomplete(output):
            raise ValueError(f"request {output.request_id} is incomplete: {text.stop_reason}")
